"""A recipe as arguments for MaxText's own `maxtext.trainers.post_train.rl.train_rl`, and a launcher for it.

    grpo config RECIPE --as maxtext --problems FOLDER | xargs python -m grpo_train.maxtext_rl

The first argument is MaxText's configs/post_train/rl.yml, the others are `key=value`.  Rewards, prompt and problems
are ours, through upstream's options: see reward_functions.py and problem_files.py.  differences.py lists what upstream
has no option for.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_lib.common.errors import CourseError
from grpo_lib.rewards import get_rewards
from grpo_train.engines import compat, maxtext_model, model_files
from grpo_train.maxtext_rl import problem_files
from grpo_train.maxtext_rl.differences import devices, differing
from grpo_train.recipes import HardwareRecipe, ModelRecipe, Recipe
from grpo_train.recipes.batch_plan import BatchPlan
from grpo_train.recipes.schema import RolloutRecipe, TrainingRecipe

# Steps of the cosine per step of a recipe whose learning rate is constant.
FLAT = 1000
# Files that must exist before the models are loaded, and the command that makes each.
MADE_BY = {"load_parameters_path": "grpo convert"} | dict.fromkeys(
    ("hf_train_files", "hf_eval_files", "data_template_path"), "grpo config --as maxtext --problems"
)


def arguments(
    recipe: Recipe, problems: str | Path, checkpoint: str | Path, output: str | Path, tests: int
) -> list[str]:
    """The arguments of `train_rl` for a recipe: the path of rl.yml, then `key=value`.

    Args:
      problems: the folder that `problem_files.write_problems` fills.
      checkpoint: the recipe's model in MaxText's format, its `0/items` folder (`grpo convert`).
      output: where upstream makes its run.
      tests: how many test problems it wrote.

    Raises CourseError when a reward is unknown, or `rollout.max_prompt_length: auto` or the model's sizes cannot be
    worked out because its files cannot be read.
    """
    from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR

    get_rewards(recipe.rewards)
    source = problem_files.only_source(recipe.problems)
    prompt = problem_files.prompt_length(source, recipe.prompts, recipe.rollout, recipe.model)
    folder = Path(problems).resolve()
    functions = Path(__file__).with_name("reward_functions.py")
    test_batches, test_batch_size = problem_files.eval_batches(recipe.evaluation.batch_size, tests)
    values = {
        "run_name": recipe.name,
        "base_output_directory": Path(output).resolve(),
        "data_shuffle_seed": recipe.seed,
        "init_weights_seed": recipe.seed,
        **_model(recipe.model, Path(checkpoint)),
        **_hardware(recipe.hardware),
        "dataset_name": source.source,
        "eval_dataset_name": source.source,
        "hf_train_files": folder / problem_files.TRAIN,
        "hf_eval_files": folder / problem_files.TEST,
        "data_template_path": folder / problem_files.TEMPLATE,
        "dataset_processor_path": functions,
        "reward_functions_path": functions,
        "reward_functions": ",".join(recipe.rewards),
        **_sampling(recipe.rollout, prompt),
        "rl.num_generations": recipe.grpo.group_size,
        "rl.num_iterations": recipe.grpo.iterations,
        "rl.grpo_beta": recipe.grpo.beta,
        "rl.grpo_epsilon": recipe.grpo.epsilon,
        "rl.loss_algo": {"token": "grpo", "sequence": "gspo-token"}[recipe.grpo.ratio],
        "rl.loss_agg_mode": "token-mean" if recipe.grpo.aggregation == "step" else "sequence-mean-token-mean",
        **_training(recipe.training, recipe.plan, recipe.grpo.iterations),
        "eval_batch_size": test_batch_size,
        "num_test_batches": test_batches,
        "eval_interval": recipe.training.steps + 1,  # never: it would look at the test problems
    }
    return [
        f"{MAXTEXT_CONFIGS_DIR}/post_train/rl.yml",
        *(f"{key}={value}" for key, value in values.items() if value is not None),  # null where upstream has null
    ]


def not_expressible(recipe: Recipe, tests: int) -> list[str]:
    """One sentence for each value of the recipe that upstream's options cannot express, beginning with its key.

    `tests` is the number of test problems that were written.
    """
    found = differing(
        recipe.model_dump(exclude_defaults=True),
        problem_files.only_source(recipe.problems),
        recipe.rollout,
        recipe.training,
        recipe.hardware,
        recipe.grpo,
    )
    batches, size = problem_files.eval_batches(recipe.evaluation.batch_size, tests)
    if (evaluated := batches * size) < tests:
        found.append(f"problems.test: upstream drops an incomplete last batch, so it evaluates {evaluated} of {tests}")
    return found


def write_problems(recipe: Recipe, folder: str | Path) -> tuple[int, list[str]]:
    """The files that the arguments name; see problem_files.write_problems."""
    rows = -(-recipe.training.steps // recipe.grpo.iterations) * recipe.plan.prompts_per_step
    return problem_files.write_problems(folder, recipe.problems, recipe.prompts, recipe.rollout, recipe.model, rows)


def _model(model: ModelRecipe, checkpoint: Path) -> dict[str, Any]:
    """Architecture, sizes and number format as in our own training, and the checkpoint to start from."""
    folder = model_files.local_folder(model)
    return {
        **maxtext_model.maxtext_overrides(
            model,
            sizes=model_files.maxtext_sizes(model) if folder else model.sizes,
            tokenizer_path=folder.resolve() if folder else model.path,
        ),
        "load_parameters_path": checkpoint.resolve(),
        "convert_checkpoint_if_possible": False,  # `grpo convert` has done it
        "checkpoint_storage_use_ocdbt": True,  # as it writes them; rl.yml's false is for Pathways
        "checkpoint_storage_use_zarr3": True,
        "scan_layers": True,
    }


def _hardware(hardware: HardwareRecipe) -> dict[str, Any]:
    """Upstream splits the devices of a slice only where it sees Pathways and two machines or more.

    Both switches are used for nothing else, so a split on one machine counts half of its chips as a machine.
    """
    found = devices(hardware)
    trainer, sampler = hardware.trainer_count(), hardware.sampler_count()
    chips = hardware.slice.chip.chips_per_host if hardware.slice else found or 1
    if not hardware.colocated:
        if found is None:
            raise CourseError(
                f"hardware.sampler_devices={hardware.sampler_devices} needs hardware.trainer_devices, or an accelerator"
            )
        chips = max(1, min(chips, found // 2))
    tensor = hardware.sampler_tensor or (sampler if found else -1)
    return {
        "hardware": "tpu" if hardware.accelerator else "cpu",
        "use_pathways": not hardware.colocated,
        "chips_per_vm": chips,
        "trainer_devices_fraction": 1.0 if hardware.colocated else _fraction(trainer, found),
        "sampler_devices_fraction": 1.0 if hardware.colocated else _fraction(sampler, found),
        "ici_fsdp_parallelism": -1,  # what the tensor axis leaves
        "ici_tensor_parallelism": hardware.trainer_tensor,
        "rollout_tensor_parallelism": tensor,
        "rollout_data_parallelism": sampler // tensor if found else (-1 if tensor > 0 else 1),
        "rollout_expert_parallelism": 1,
    }


def _sampling(rollout: RolloutRecipe, prompt: int) -> dict[str, Any]:
    return {
        "max_prefill_predict_length": prompt,
        "max_target_length": prompt + rollout.max_completion_length,
        "decode_sampling_temperature": rollout.first_temperature,
        "decode_sampling_top_k": rollout.top_k or -1,  # off
        "decode_sampling_nucleus_p": rollout.top_p,
        "hbm_utilization_vllm": rollout.vllm.memory_fraction,
        "max_num_seqs": rollout.vllm.max_sequences,
        "vllm_block_size": rollout.vllm.options.get("block_size"),
    }


def _training(training: TrainingRecipe, plan: BatchPlan, iterations: int) -> dict[str, Any]:
    cosine = training.schedule == "cosine"
    steps = training.cosine_steps if cosine else FLAT * (training.steps + training.warmup_steps)
    return {
        "batch_size": plan.prompts_per_step,
        "num_batches": -(-training.steps // iterations),  # each serves so many updates
        "train_fraction": 1.0,
        "num_epoch": 1,
        "train_micro_batch_size": plan.micro_batch_prompts,
        "rollout_micro_batch_size": plan.rollout_micro_batch_size,
        "learning_rate": training.learning_rate,
        "learning_rate_schedule_steps": steps,
        "warmup_steps_fraction": _fraction(training.warmup_steps, steps),
        "adam_b1": training.b1,
        "adam_b2": training.b2,
        "adam_weight_decay": training.weight_decay,
        "gradient_clipping_threshold": training.max_grad_norm,
        "enable_checkpointing": True,
        "checkpoint_period": training.checkpoint_every,
        "max_num_checkpoints_to_keep": training.max_to_keep,
    }


def _fraction(part: int, whole: int) -> float:
    """part / whole, such that int(fraction * whole) is `part` again, as upstream computes it."""
    fraction = part / whole
    return fraction if int(fraction * whole) == part else (part + 0.5) / whole


def train(arguments: Sequence[str]) -> None:
    """Run MaxText's train_rl, unmodified, with the arguments that `arguments` made.

    Raises CourseError when something that they name is not there.
    """
    given = {key: value for key, _, value in (argument.partition("=") for argument in arguments[1:])}
    for key, command in MADE_BY.items():
        if key not in given or not Path(given[key]).exists():
            raise CourseError(f"{key}={given.get(key, '')} does not exist; {command} makes it")
    model_files.require_engine("vllm")
    if os.environ.setdefault("WANDB_MODE", "disabled") == "disabled":
        compat.hide_wandb()
    compat.add_missing_options()
    compat.send_untied_head()
    if given.get("override_model_config") == "True":
        maxtext_model.register_architecture(ModelRecipe(path=given["tokenizer_path"], maxtext_name=given["model_name"]))
    from maxtext.trainers.post_train.rl import train_rl

    train_rl.main(["train_rl", *arguments])


def main() -> None:
    """Entry point of `python -m grpo_train.maxtext_rl`: a CourseError is one line on stderr and exit code 2."""
    try:
        if len(sys.argv) < 3:
            raise CourseError("give the arguments that `grpo config RECIPE --as maxtext` prints")
        train(sys.argv[1:])
    except CourseError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
