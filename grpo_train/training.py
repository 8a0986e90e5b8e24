"""GRPO from a recipe: Tunix's RLCluster and GRPOLearner around a MaxText actor.

    ready = checks.check(recipe)                          # refuses what cannot run
    session = build_session(ready, run_dir, checkpoint)   # actor, sampler, learner; continues a run
    check_first_sync(session)                    # refuses to go on when sampler and trainer differ
    rows = train(session, on_step=print)         # metrics.jsonl, TensorBoard, checkpoints

Terms:
    actor       the model that is trained, in MaxText; its weights are the policy
    reference   the base model, which the KL penalty keeps the actor near; only a recipe with grpo.beta has one
    sampler     writes completions with a copy of the actor's weights; Tunix's "rollout engine": TunixSampler or vLLM
    cluster     Tunix's RLCluster: actor, reference and sampler, the devices of each, optimizer and checkpoints
    learner     Tunix's GRPOLearner: the loop over steps, with rewards, advantages and loss

A finished step is not done twice: building a session on a run with checkpoints continues after the last one, with the
same problems, noise and rows as if it had not stopped.  The same step in one file, without Tunix and MaxText, is
grpo_lib/plain_grpo.py.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError, first_line
from grpo_lib.common.files import write_json_atomic
from grpo_lib.problems import Problem, batch_of_step, load_problems
from grpo_lib.records import Generation
from grpo_lib.reward_files import RewardError
from grpo_lib.rewards import overlong_penalty
from grpo_train import losses  # first: it prepares the environment before JAX is imported

# isort: split

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from tunix.rl import rl_cluster as rl
from tunix.rl.rollout.base_rollout import RolloutConfig

from grpo_train.checks import Ready
from grpo_train.engines import cluster as clusters
from grpo_train.engines import compat, cpu_memory, maxtext_model, watched_kl, weight_sync
from grpo_train.engines import learner as learners
from grpo_train.engines.adaptive_beta import AdaptiveBeta
from grpo_train.engines.optimizer import learning_rates
from grpo_train.engines.tokens import Renderer, prompt_lengths
from grpo_train.recipes import Recipe, continuing
from grpo_train.recipes.batch_plan import BatchPlan
from grpo_train.recipes.schema import GRPORecipe
from grpo_train.runs import checkpoints, multihost, tracking
from grpo_train.runs.metrics_logger import Recorder, Row, StepTimer, TimedReward, batch_metrics
from grpo_train.runs.run_directory import one_at_a_time
from grpo_train.runs.step_profile import StepProfile

# How the operating system and TensorStore report a full disk; a limit on file sizes is reported the same way.
DISK_FULL = ("No space left", "File too large", "quota exceeded")
# How JAX reports that the memory of a device is full.
MEMORY_FULL = ("RESOURCE_EXHAUSTED", "out of memory")
COMPLETIONS_COMPARED = 2  # completions of a step by which sampler and trainer are compared


@dataclass
class Session:
    """Everything a run needs in memory. Made by `build_session`."""

    recipe: Recipe
    plan: BatchPlan
    directory: Path
    tokenizer: Any
    render: Renderer  # called with a question: what the model is sent; the `render` of grpo_lib.evaluation
    actor: maxtext_model.Actor
    cluster: rl.RLCluster
    learner: learners.Learner
    rollout_config: RolloutConfig
    problems: list[Problem]
    batches: Callable[[int], dict[str, np.ndarray]]  # training prompts by the number of their step, from 0
    recorder: Recorder
    timer: StepTimer
    checkpoints: epath.Path  # folder of the actor's
    closed: bool = False

    @property
    def sampler(self) -> Any:
        """A TunixSampler or a VllmSampler."""
        return self.cluster.rollout

    @property
    def step(self) -> int:
        """Finished steps: batches of completions with all their updates."""
        return self.cluster.actor_trainer.train_steps // self.recipe.grpo.iterations

    def fitting(self, problems: Sequence[Problem]) -> list[Problem]:
        """Those of the problems whose prompts are not longer than in training."""
        lengths = prompt_lengths(self.render, problems)
        longest = self.rollout_config.max_prompt_length
        return [problem for problem, length in zip(problems, lengths, strict=True) if length <= longest]

    def generate(self, prompts: list[str]) -> list[Generation]:
        """Greedy completions from the policy as it is now; the `generate` of grpo_lib.evaluation.

        With several processes it is called inside `run_on_main`.
        """
        return self._ask(prompts, {})

    def sample(self, prompts: list[str], *, seed: int = 0) -> list[Generation]:
        """As `generate`, drawn at the temperature and top-p of the recipe's evaluation: its `sampled`."""
        return self._ask(prompts, self.recipe.evaluation_sampling | {"seed": seed})

    def run_on_main[T](self, work: Callable[[], T]) -> T | None:
        """Run `work`, which may call `generate`, on process 0; the other processes help to generate, and get None."""
        if multihost.is_main_process():
            result = work()
            multihost.broadcast(None)
            return result
        for prompts, sampling in iter(lambda: multihost.broadcast(None), None):
            self._completions(prompts, **sampling)
        return None

    def _ask(self, prompts: list[str], sampling: dict[str, Any]) -> list[Generation]:
        if self.recipe.rollout.engine == "tunix" and not self.sampler.has_weights:
            raise CourseError("a training was interrupted in mid-step; build a new session, it continues the run")
        prompts, sampling = multihost.broadcast((prompts, sampling))
        return self._completions(prompts, **sampling)

    @functools.cached_property
    def _completions(self) -> Callable[..., list[Generation]]:
        return self.sampler.greedy_generate(
            max_completion_length=self.recipe.rollout.max_completion_length,
            batch_size=-(-self.recipe.evaluation.batch_size // jax.process_count()),
        )


def evaluated_length(recipe: Recipe, render: Renderer) -> int:
    """Tokens of the longest prompt of an evaluation and its completion."""
    evaluated = [problem for split in ("validation", "test") for problem in load_problems(recipe.problems, split)]
    return max(prompt_lengths(render, evaluated)) + recipe.rollout.max_completion_length


def build_session(
    ready: Ready, directory: str | Path, checkpoint: str | Path, log: Callable[[str], None] = print
) -> Session:
    """Load the actor, build sampler and learner, and restore the run's latest checkpoint if it has one.

    Args:
      ready: the recipe, its training problems, and what else `checks.check` has found.
      directory: the run directory; its `checkpoints/` holds actor and optimizer, unless the recipe says where.
      checkpoint: MaxText weights to start from (`conversion.convert_to_maxtext`).
      log: called with a sentence about a damaged checkpoint, in whose place the one before it is restored.

    Raises CourseError when a checkpoint cannot be read.
    """
    directory = Path(directory).resolve()
    recipe, plan, tokenizer = ready.recipe, ready.plan, ready.tokenizer

    # 1. Sizes.  Gives `rollout_config`: prompts of at most P tokens, completions of C.
    maxtext_model.multiply_as_exactly_as_stored(recipe.model.dtype)
    temperature: Any = recipe.rollout.first_temperature
    if recipe.rollout.has_schedule:
        temperature = jnp.float32(temperature)  # an array is an argument of the compiled programs, and no constant
    rollout_config = RolloutConfig(
        max_tokens_to_generate=recipe.rollout.max_completion_length,
        max_prompt_length=ready.max_prompt_length,
        kv_cache_size=ready.max_prompt_length + recipe.rollout.max_completion_length,
        temperature=temperature,
        top_k=recipe.rollout.top_k,
        top_p=recipe.rollout.top_p,
    )

    # 2. The run's files.  Gives `recorder` (rows of metrics.jsonl) and `saved`, the folder of its checkpoints.
    recorder = Recorder(
        directory,
        iterations=recipe.grpo.iterations,
        completions=plan.completions_per_step,
        learning_rate=learning_rates(recipe.training).__getitem__,
        writes=multihost.is_main_process(),
    )
    saved = checkpoints.checkpoint_root(recipe.training, directory) / "actor"
    if multihost.is_main_process():
        checkpoints.drop_unlogged_checkpoints(saved, recorder.last_step, recipe.grpo.iterations, recorder.torn)

    with maxtext_model.quiet():
        # 3. Models and Tunix's cluster.  Gives `actor` and `cluster`, with the weights of the newest checkpoint, and
        #    `watched`, from which the KL is measured where no penalty does it.
        load = functools.partial(
            maxtext_model.load_actor,
            checkpoint=checkpoint,
            max_length=rollout_config.kv_cache_size,
            pad_id=tokenizer.pad_token_id,
            devices=ready.trainer_devices,
            tensor=recipe.hardware.trainer_tensor,
            loss=recipe.loss.implementation,
            lora=recipe.lora,
            seed=recipe.seed,
        )
        shares_devices = recipe.hardware.colocated and not multihost.is_distributed()
        sampler = clusters.sampler_class(
            recipe.rollout,
            recipe.model,
            plan,
            tensor=recipe.hardware.sampler_tensor,
            seed=recipe.seed,
            max_length=lambda: max(rollout_config.kv_cache_size, evaluated_length(recipe, ready.render)),
        )
        # The base: not trained, so in the dtype of computations.  With adapters it is in the actor.
        load_base = functools.partial(load, recipe.model.model_copy(update={"weight_dtype": recipe.model.dtype}))
        reference, watched = None, None
        if recipe.grpo.beta and not recipe.lora.rank:
            reference = load_base().module
        if recipe.grpo.kl_is_watched and not recipe.lora.rank:
            watched = watched_kl.in_host_memory(load_base())

        updates = clusters.UpdateSettings(
            training=recipe.training,
            iterations=recipe.grpo.iterations,
            seed=recipe.seed,
            weights=recipe.model.trainer_dtype,
            adapts_beta=recipe.grpo.target_kl is not None,
        )
        sampling = clusters.SamplingSettings(sampler, rollout_config, None if shares_devices else ready.sampler_devices)
        files = clusters.RunFiles(
            name=recipe.name,
            checkpoints=saved.parent,
            checkpoint_options=checkpoints.save_options(
                recipe.training, recipe.grpo.iterations, in_background=not cpu_memory.is_large_on_cpu(recipe)
            ),
            log_directory=directory / "tensorboard",
            metric_backends=[lambda: recorder],
        )

        def build() -> tuple[maxtext_model.Actor, rl.RLCluster]:  # again when a checkpoint turns out to be damaged
            actor = load(recipe.model)
            # With adapters the base, which is without them, is in the actor.
            adapted = recipe.grpo.beta and recipe.lora.rank
            models = clusters.Models(actor, actor.base if adapted else reference, tokenizer)
            return actor, clusters.make_cluster(plan, models, updates, sampling, files)

        actor, cluster = checkpoints.restore(build, saved, log)
        if recipe.grpo.kl_is_watched and recipe.lora.rank:
            watched = watched_kl.without_adapters(actor)
        _adapt_cluster(ready, actor, cluster, rollout_config)

        # 4. The learner.  Takes all of these; gives `learner`: rewards, advantages, policy loss, metrics.
        batches = batch_of_step(
            ready.problems,
            ready.render,
            plan.prompts_per_step,
            recipe.seed,
            {task.name: task.weight for task in recipe.tasks},
        )
        learner = _make_learner(ready, actor, cluster, watched, batches)
    timer = StepTimer(cluster)
    cluster.actor_trainer.with_training_hooks(timer)

    # 5. The session, continued where the checkpoint is: its weights in the sampler, its noise, its step.
    session = Session(
        recipe=recipe,
        plan=plan,
        directory=directory,
        tokenizer=tokenizer,
        render=ready.render,
        actor=actor,
        cluster=cluster,
        learner=learner,
        rollout_config=rollout_config,
        problems=ready.problems,
        batches=batches,
        recorder=recorder,
        timer=timer,
        checkpoints=saved,
    )
    cluster.rollout.update_params(nnx.state(actor.module, nnx.Param))  # merged, where there are adapters
    environment.release_freed_memory()
    session.sampler.calls = session.step * plan.num_rollout_micro_batches
    cluster.global_steps = session.step  # Tunix's last checkpoint does not store the step number
    return session


def _adapt_cluster(
    ready: Ready, actor: maxtext_model.Actor, cluster: rl.RLCluster, rollout_config: RolloutConfig
) -> None:
    """Give the cluster the log-probabilities, the weights and the layout of micro-batches that this recipe needs."""
    recipe, plan = ready.recipe, ready.plan
    compat.keep_optimizer_state(cluster.actor_trainer)
    if recipe.lora.rank:
        clusters.sync_whole_weights(cluster, actor)
    if recipe.grpo.iterations > 1:
        compat.old_logps_from_actor(cluster, actor)
    else:
        compat.sync_without_snapshot(cluster)
    if recipe.rollout.engine == "vllm":
        compat.sample_outside_the_mesh(cluster)
    # Tunix makes all logits, and compiles them for each temperature.
    if recipe.grpo.beta and (recipe.loss.implementation != "jax" or recipe.rollout.has_schedule):
        cluster.inference_worker.get_ref_per_token_logps = losses.reference_logps(
            cluster.inference_worker, recipe.loss.implementation
        )
    if multihost.is_distributed():
        compat.shard_whole_batches(cluster, actor.mesh)
    if recipe.rollout.engine == "tunix" and maxtext_model.is_one_cpu(actor.mesh) and jax.device_count() == 1:
        compat.donate_weights(cluster.actor_trainer)
        clusters.share_memory_with_sampler(cluster, cpu_memory.is_large_on_cpu(recipe))
    if plan.layout != "padded":
        aggregation = learners.AGGREGATIONS[recipe.grpo.aggregation]
        clusters.pack_micro_batches(cluster, plan, rollout_config, aggregation, ready.min_prompt_length)


def _make_learner(
    ready: Ready,
    actor: maxtext_model.Actor,
    cluster: rl.RLCluster,
    watched: Callable[[], maxtext_model.Actor] | None,
    batches: Callable[[int], dict[str, np.ndarray]],
) -> learners.Learner:
    """`watched`: gives the base, for grpo.watch_kl."""
    recipe, plan, grpo = ready.recipe, ready.plan, ready.recipe.grpo
    sampler: Any = cluster.rollout  # a TunixSampler or a VllmSampler
    rewards = [TimedReward(function) for function in ready.rewards]
    if grpo.overlong_buffer:
        rewards.append(TimedReward(_overlong_reward(sampler, grpo, recipe.rollout.max_completion_length)))
    compared = min(
        plan.micro_batch_size, plan.rollout_micro_batch_completions, math.lcm(COMPLETIONS_COMPARED, actor.mesh.size)
    )
    sampler.scored_rows = compared if grpo.correction == "none" else plan.rollout_micro_batch_completions
    gap = functools.partial(sampler_trainer_gap, sampler, actor, compared, recipe.rollout.max_completion_length)
    metrics: list[Callable] = [functools.partial(batch_metrics, sampler, grpo.group_size, rewards, gap)]
    if grpo.target_kl:
        adaptive = AdaptiveBeta(
            cluster.actor_trainer, actor.mesh, start=grpo.beta, target=grpo.target_kl, updates=grpo.iterations
        )
        metrics.append(adaptive.metrics)
    if grpo.watch_kl and watched:

        def measure() -> float:  # called in training, when `learner`, below, is made
            rows = min(plan.rollout_micro_batch_completions, math.lcm(watched_kl.ROWS, actor.mesh.size))
            # No more at once than an update has, so that there is memory for them.
            at_once = math.gcd(rows, plan.micro_batch_size)
            width = recipe.rollout.max_completion_length
            temperature = learner.algo_config.temperature
            return watched_kl.kl_from_base(sampler, actor, watched(), rows, width, temperature, at_once)

        metrics.append(watched_kl.measured_every(grpo.watch_kl, cluster, measure))
    temperature_of_step = None
    if recipe.rollout.has_schedule:
        temperature_of_step = functools.partial(recipe.rollout.temperature_of, steps=recipe.training.steps)
    learner = learners.Learner(
        grpo=grpo,
        steps=recipe.training.steps,
        calls_per_step=plan.num_rollout_micro_batches,
        rl_cluster=cluster,
        algo_config=learners.policy_loss_config(grpo, recipe.loss.implementation),
        reward_fns=rewards,
        metric_fns=metrics,
        batch_of_step=batches,
        temperature_of_step=temperature_of_step,
    )
    if recipe.hardware.colocated:  # their meshes differ nevertheless, where a process samples on its own devices
        learner.can_enable_async_rollout = False
    logged = ["pg_clipfrac"]
    if grpo.beta:  # without a reference there is no KL to log
        logged.append("kl")
    if grpo.correction == "tis":
        logged.append("importance_ratio")
    logged.append("entropy")  # the last, since it completes a row (metrics_logger.REQUIRED_METRICS)
    cluster.actor_trainer.with_rl_metrics_to_log(dict.fromkeys(logged, np.mean))
    return learner


def _overlong_reward(sampler: Any, grpo: GRPORecipe, limit: int) -> Callable[..., list[float]]:
    """The penalty for long completions as a reward function.  Tunix's own, for DAPO, counts the letters of a text."""

    @functools.wraps(overlong_penalty)  # its name is in those of its metrics
    def penalty(**_: Any) -> list[float]:
        return overlong_penalty(sampler.lengths, limit, grpo.overlong_buffer or 0, grpo.overlong_penalty)

    return penalty


def drop_arrays(session: Session) -> None:
    """Let the models and the optimizer go, after which the session can do nothing: for what needs the memory next."""
    cluster = session.cluster
    trainer = cluster.actor_trainer
    session.sampler.drop_weights()
    held: list[Any] = [nnx.state(trainer.model), nnx.state(trainer.optimizer), cluster._anchor_policy_state]
    held += [nnx.state(model) for model in cluster.inference_worker._models.values()]
    for array in jax.tree.leaves(held):
        if isinstance(array, jax.Array) and not array.is_deleted():
            array.delete()
    environment.release_freed_memory()


def describe_devices(session: Session) -> str:
    """One line: all devices that JAX found, those that train and those that sample, each with its mesh."""
    found = jax.devices()
    return devices_line(
        len(found),
        found[0].device_kind,
        jax.process_count(),
        dict(session.actor.mesh.shape),
        dict(session.sampler.mesh.shape),
    )


def devices_line(found: int, kind: str, processes: int, trainer: dict[str, int], sampler: dict[str, int]) -> str:
    """What `describe_devices` says.

    Args:
      found: devices, of all processes.
      trainer, sampler: axis -> size of their meshes.  In a multi-process run the trainer's has the devices of all
        processes, and the sampler's those of one.
    """
    if found == 1:
        return f"1 x {kind}: trains and samples"
    train, sample = math.prod(trainer.values()), math.prod(sampler.values())
    if processes == 1:
        return f"{found} x {kind}: trainer {_devices(train, trainer)}, sampler {_devices(sample, sampler)}"
    return (
        f"{found} x {kind} in {processes} processes: trainer {_devices(train, trainer)}, sampler {sample * processes}, "
        f"each process {_devices(sample, sampler)}"
    )


def _devices(count: int, mesh: dict[str, int]) -> str:
    """So many, and the axes of their mesh that split something: 8 (fsdp 4 x tensor 2)."""
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1)
    return f"{count} ({axes})" if axes else str(count)


def check_first_sync(session: Session, prompts: int = 32) -> weight_sync.SyncCheck:
    """Did every weight arrive in the sampler, and do both sides give the same log-probabilities?

    The result is kept in the run's sync.json. Raises CourseError, which names the weight or the gap, when not.

    Args:
      prompts: how many are sampled and scored, at most.
    """
    # The trainer scores them in the shape of its micro-batches.  At most what a step samples is sampled at once: more
    # might not fit next to a training.
    rows = min(prompts, session.plan.micro_batch_size)
    sampled = min(prompts, session.plan.completions_per_step)
    at_once = sampled - sampled % rows
    rendered = [problem.prompt(session.render) for problem in session.problems[: prompts - prompts % at_once]]
    pad, eos = session.tokenizer.pad_token_id, session.tokenizer.eos_token_id

    def trainer_logps(prompt_ids, ids):  # [B, P], [B, C] -> [B, C]
        environment.release_freed_memory()  # of the comparison of weights, and of sampling
        parts = (slice(start, start + rows) for start in range(0, len(ids), rows))
        return np.concatenate(
            [maxtext_model.per_token_logps(session.actor, prompt_ids[part], ids[part], pad, eos) for part in parts]
        )

    calls = session.sampler.calls
    limit = session.recipe.rollout.max_mean_gap or weight_sync.MAX_MEAN_GAP[session.recipe.model.dtype]
    check = weight_sync.check_sync(
        session.sampler, session.actor.weights(), rendered, session.rollout_config, trainer_logps, limit, at_once
    )
    environment.release_freed_memory()
    session.sampler.calls = calls  # the check must not change what the run samples
    if multihost.is_main_process():
        write_json_atomic(session.directory / "sync.json", dataclasses.asdict(check))
    return check


def share_left_out(session: Session) -> float | None:
    """The mean probability that rollout.top_k and top_p leave out where a token is sampled; None without them.

    Of the completions that the sampler has just written, such as those of `check_first_sync`: of a micro-batch at most.
    In a multi-process run all processes call it together.
    """
    rollout = session.recipe.rollout
    tokenizer = session.tokenizer
    if not rollout.is_cut:
        return None
    rows = min(len(session.sampler.last.tokens), session.plan.micro_batch_size)
    scored = session.sampler.last_scored(rows, rollout.max_completion_length)
    masses = maxtext_model.left_out(
        session.actor,
        scored.prompt_ids,
        scored.completion_ids,
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
        rollout.first_temperature,
        rollout.top_k,
        rollout.top_p,
    )  # [B, C]
    of_tokens = [row[: len(logps)] for row, logps in zip(masses, scored.logps, strict=True)]
    return float(np.concatenate(of_tokens).mean())


def sampler_trainer_gap(sampler: Any, actor: maxtext_model.Actor, rows: int, width: int) -> float:
    """Mean absolute difference of the log-probabilities of the first `rows` completions of the step, nats per token.

    Args:
      width: tokens to which completions are padded, so that one shape is compiled.
    """
    scored = sampler.last_scored(rows, width)
    trained = maxtext_model.per_token_logps(
        actor, scored.prompt_ids, scored.completion_ids, sampler.pad_id(), sampler.eos_id()
    )
    return float(weight_sync.gaps(scored, trained).mean())


def train(
    session: Session,
    on_step: Callable[[Row], None] | None = None,
    validate: Callable[[], Row] | None = None,
    validate_every: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> list[Row]:
    """Run the recipe's remaining steps; returns the rows of metrics.jsonl, those of earlier sessions included.

    Args:
      on_step: called with each row, one step late (Tunix logs a step when the next one has begun), and again when a
        validation joins it later than that.
      validate: called after every `validate_every`-th step; what it returns joins that step's row.
      stop: asked now and then, in all processes; once it is true, the step under way is finished and saved, and
        training ends.

    With several processes, process 0 has the rows and calls `on_step`; all call `validate`, see `Session.run_on_main`.
    """
    recipe, recorder = session.recipe, session.recorder
    left = session.step < recipe.training.steps
    if left and session.closed:
        raise CourseError("this session was closed by an interrupted training; build a new one, it continues the run")

    def validate_after(step: int) -> None:
        due = validate_every and step and step % validate_every == 0
        validated = any(row["step"] == step and "validation_accuracy" in row for row in recorder.rows)
        if validate and due and multihost.broadcast(not validated):
            recorder.add(step, validate())

    profile = StepProfile(recipe.training.profile_steps, session.directory / "tensorboard")
    # `grpo train` has this lock already; a process may take it twice.
    with one_at_a_time(session.directory) if multihost.is_main_process() else contextlib.nullcontext():
        rows = recorder.begin(session.step, on_step)
        try:
            if left:
                session.closed = True
                if multihost.is_main_process():
                    recorder.trackers = tracking.start(
                        recipe.tracking, session.directory, session.step, config=recipe.model_dump(mode="json")
                    )
                session.timer.start()
                remedies = continuing.memory_remedies(recipe, session.plan)
                with maxtext_model.quiet(), explain_full_memory("a training step", remedies):
                    # The seven stages of a step: see engines/learner.py, Learner.
                    session.learner.train(_batches(session, validate_after, stop, profile))
            if session.step >= recipe.training.steps:  # a run may have been killed in its last validation
                validate_after(session.step)
        except Exception as error:
            _explain_failure(session, error)
            raise
        finally:
            profile.close()
            recorder.finish()
            environment.release_freed_memory()
    return rows


def _explain_failure(session: Session, error: Exception) -> None:
    """Raise CourseError, which says what is kept, where a training ends with a full disk or a failed reward function.

    Before a failed reward function ends it, the steps before that are logged and saved.
    """
    if full := _disk_full(error):
        raise CourseError(
            f"{session.directory} cannot be written, its disk is full ({full}); {_last_checkpoint(session)}; make room "
            "and give the same command again"
        ) from error
    if isinstance(error, RewardError):
        step = session.step
        if not multihost.is_distributed():  # else the others may not have failed
            _close(session)
        raise CourseError(f"step {step + 1}: {error}; {_last_checkpoint(session)}") from error


def _close(session: Session) -> None:
    """Finish what Tunix does one step late or in the background: metrics and checkpoints."""
    trainer = session.cluster.actor_trainer
    accumulated = trainer.iter_steps % trainer.config.get_with_default("gradient_accumulation_steps", 1)
    if accumulated or trainer.train_steps % session.recipe.grpo.iterations:
        trainer.checkpoint_manager.close()  # in mid-step: a checkpoint of it would not be that of any step
    else:
        session.cluster.close()


def _last_checkpoint(session: Session) -> str:
    """What a run that has failed can go on from."""
    step = max(checkpoints.updates(session.checkpoints), default=0) // session.recipe.grpo.iterations
    return f"the last good checkpoint is of step {step}" if step else "there is no checkpoint yet"


@contextlib.contextmanager
def explain_full_memory(what: str, remedies: Sequence[str]) -> Iterator[None]:
    """Say in one line what to do when the memory of a device does not hold what is computed inside.

    Args:
      what: is computed.
      remedies: changes, `section.key=value`, with which the same command continues the run.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not any(sign in str(error) for sign in MEMORY_FULL) or _disk_full(error):
            raise
        changes = f"run the same command with {' or '.join(remedies)}: it continues the run; " if remedies else ""
        raise CourseError(
            f"{what} does not fit the memory of a device ({first_line(error)}); {changes}"
            "grpo preflight RECIPE shows what fills the memory of a TPU"
        ) from error


def _disk_full(error: BaseException | None) -> str | None:
    """How an error, or one that caused it, says that the disk is full; None if it says something else."""
    while error is not None:
        if found := next((sign for sign in DISK_FULL if sign in str(error)), None):
            return found
        error = error.__cause__ or error.__context__
    return None


def _batches(
    session: Session, validate_after: Callable[[int], None], stop: Callable[[], bool], profile: StepProfile
) -> Iterator[dict[str, np.ndarray]]:
    """Training batches until `stop`.

    Tunix asks for the batch of step n + 1 after the updates and the sync of step n, so what belongs between two steps
    is done here.  It skips the batches of restored steps itself.

    Tunix skips one batch per update, so a batch of a restored step is yielded `iterations` times.
    """
    recipe = session.recipe
    restored = session.step
    for done in itertools.count():
        if done >= max(restored, 1) and stop():
            return  # Tunix saves a checkpoint when it closes
        if done >= restored:
            # LoRA's B starts at 0: before step 1 merged weights equal the base, so a sync that did nothing would pass.
            if recipe.lora.rank and done == 1:
                weight_sync.check_weights(session.sampler, weight_sync.by_name(session.actor.weights()))
            validate_after(done)
            profile.begin_step(done + 1)
        for _ in range(recipe.grpo.iterations if done < restored else 1):
            yield session.batches(done)
