"""What a run needs, checked once: `check` refuses what cannot run, and gives what it found to all that follows.

    ready = check(recipe, run=run_dir)                      # a CourseError names what is wrong, and the fix
    session = training.build_session(ready, run_dir, checkpoint)

The command does so before a run directory is made, a notebook in a cell of its own.  What can be said at
once is said first, then what needs JAX and its devices, then what may need a download, then what reads all prompts, and
last whether a CPU has the memory, for which their lengths are needed.
"""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lib import reward_files
from grpo_lib.common import environment
from grpo_lib.problems import Problem, load_problems, take_different
from grpo_lib.rewards import RewardFunction, get_rewards
from grpo_train.engines import cpu_memory, model_files
from grpo_train.recipes import Recipe
from grpo_train.recipes.batch_plan import BatchPlan
from grpo_train.runs import tracking
from grpo_train.runs.run_directory import base_of, date_of


@dataclass(frozen=True)
class Ready:
    """A recipe that can run on this machine, and what was found on the way."""

    recipe: Recipe
    plan: BatchPlan  # how a step is cut into micro-batches, on these devices and processes
    trainer_devices: list[Any]
    sampler_devices: list[Any]
    tokenizer: Any
    render: Any  # a tokens.Renderer: questions as the model is sent them
    rewards: list[RewardFunction]
    min_prompt_length: int  # tokens of the shortest training prompt
    max_prompt_length: int  # P: training prompts are padded to it, in tokens
    problems: list[Problem]  # of GRPO, whose prompts are not longer
    too_long: int  # problems whose prompts are longer
    taught: list[Problem]  # other problems, for the cold start; none without one
    memory: cpu_memory.Estimate | None = None  # what the run takes of a CPU's memory


def check(
    recipe: Recipe,
    problems: Sequence[Problem] | None = None,
    *,
    run: Path | None = None,
    makes_base: bool = True,
    date: datetime.date | None = None,
) -> Ready:
    """Refuse what this machine or version cannot do, before anything of a run is written or loaded.

    Args:
      problems: the training problems; None: the recipe's, of which a cold start takes its own.
      run: its folder, whose disk must have room for what the run writes; None: that is not looked at.
      makes_base: the run converts its base; False where it starts from one that is converted already.
      date: for a chat template that writes it; None: that of the run, or today.  Of several processes the first one's.

    Raises CourseError where a package, a reward, a file, a device or room on a disk is missing, the model is another
    than the recipe says, a batch does not divide, a prompt is too long or not what the recipe says, or a CPU has too
    little memory.
    """
    # 1. Said at once.
    model_files.require_engine(recipe.rollout.engine)
    tracking.require(recipe.tracking)
    taught: list[Problem] = []
    if problems is None:
        for split in ("validation", "test"):  # read again when they are evaluated: an error comes now
            load_problems(recipe.problems, split)
        taught, problems = take_different(load_problems(recipe.problems, "train"), recipe.training.cold_start)
    rewards = get_rewards(recipe.rewards, {problem.kind for problem in [*taught, *problems]})
    _try_files(recipe, rewards, problems)
    model_files.check_model(recipe.model)
    if run:
        model_files.require_disk(recipe, base_of(run) if makes_base else None, run)

    # 2. With JAX, which takes seconds to import: enough devices, and a batch that divides.
    trainer_devices, sampler_devices = assign_devices(recipe)

    import jax

    from grpo_train.engines import prompt_check, tokens
    from grpo_train.runs import multihost

    plan = recipe.plan_on(jax.device_count(), jax.process_count())

    # 3. A model of the hub is downloaded here.
    sizes = model_files.maxtext_sizes(recipe.model)
    model_files.require_heads(sizes.get("base_num_kv_heads"), recipe.hardware.trainer_tensor)
    model_files.model_directory(recipe.model)
    tokenizer = tokens.load_tokenizer(recipe.model)

    # 4. All prompts.
    own_date = date or (run and date_of(run)) or datetime.date.today()
    date_of_all = datetime.date.fromisoformat(multihost.broadcast(own_date.isoformat()))
    render = tokens.Renderer(recipe.prompts, tokenizer, date_of_all)
    prompt_check.check_prompts(recipe, render)
    shortest, width, fitting = tokens.fit_prompts(recipe.rollout, render, list(problems))

    # 5. The machine's memory, where it is that of the only device.
    memory = None
    if jax.device_count() == 1 and jax.default_backend() == "cpu":
        config = model_files.read_config(model_files.model_directory(recipe.model, weights=False))
        memory = cpu_memory.require(cpu_memory.sizes_of(config), recipe, plan, width)
    return Ready(
        recipe=recipe,
        plan=plan,
        trainer_devices=trainer_devices,
        sampler_devices=sampler_devices,
        tokenizer=tokenizer,
        render=render,
        rewards=rewards,
        min_prompt_length=shortest,
        max_prompt_length=width,
        problems=fitting,
        too_long=len(problems) - len(fitting),
        taught=taught,
        memory=memory,
    )


def _try_files(recipe: Recipe, rewards: Sequence[RewardFunction], problems: Sequence[Problem]) -> None:
    """Call the reward functions that come from files once, so that one that fails does so before a model is loaded."""
    tried = problems[:2]
    columns = {
        "prompts": [problem.question for problem in tried],
        "completions": [problem.solution for problem in tried],
        "answer": [problem.answer for problem in tried],
        "kind": [problem.kind for problem in tried],
    }
    if recipe.tasks:
        columns["task"] = [problem.task for problem in tried]
    for name, function in zip(recipe.rewards, rewards, strict=True):
        if reward_files.is_file(name):
            function(**columns)


def assign_devices(recipe: Recipe) -> tuple[list[Any], list[Any]]:
    """The devices that train and those that sample, of all that JAX finds; see cluster.assign_devices."""
    environment.prepare()  # before JAX is imported

    import jax

    from grpo_train.engines import cluster

    return cluster.assign_devices(
        recipe.hardware, recipe.rollout.engine, recipe.sampler_tensor(jax.device_count()), jax.devices()
    )
