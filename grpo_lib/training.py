"""GRPO from a recipe: Tunix's RLCluster and GRPOLearner around a MaxText actor.

    session = build_session(recipe, run_dir)     # actor, sampler, learner; the latest checkpoint, if there is one
    check_first_sync(session)                    # refuses to go on when sampler and trainer differ
    rows = train(session, on_step=print)         # metrics.jsonl, TensorBoard, checkpoints

A finished step is not done twice: building a session on a run with checkpoints continues after the last one, with the
same problems, noise and rows as if it had not stopped.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lib import environment, losses, models, processes, tracking
from grpo_lib.batch_plan import BatchPlan
from grpo_lib.errors import CourseError
from grpo_lib.files import write_json_atomic
from grpo_lib.problems import Problem, load_problems, training_batches
from grpo_lib.prompts import SYSTEM_PROMPT, render
from grpo_lib.recipes import Recipe
from grpo_lib.rewards import get_rewards

environment.prepare()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from etils import epath  # noqa: E402
from flax import nnx  # noqa: E402
from tunix.rl import rl_cluster as rl  # noqa: E402
from tunix.rl import utils as tunix_utils  # noqa: E402
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner  # noqa: E402
from tunix.rl.rollout.base_rollout import RolloutConfig  # noqa: E402
from tunix.sft import metrics_logger, sharding_utils  # noqa: E402

from grpo_lib import checkpoints, rollout  # noqa: E402
from grpo_lib.recording import Clock, MeasuredReward, Recorder, Row, batch_metrics  # noqa: E402

# How operating system and TensorStore say it.  A limit on the size of files reads like a full disk.
DISK_FULL = ("No space left", "File too large", "quota exceeded")
VALIDATED = "validation_accuracy"  # a row that has it has been validated
# Completions of a step by which sampler and trainer are compared.
COMPARED = 2


@dataclass
class Session:
    """Everything a run needs in memory.  Made by `build_session`."""

    recipe: Recipe
    plan: BatchPlan
    directory: Path
    tokenizer: Any
    actor: models.Actor
    cluster: rl.RLCluster
    learner: GRPOLearner
    rollout_config: RolloutConfig
    problems: list[Problem]
    recorder: Recorder
    clock: Clock
    saving: _Saving
    left_out: int = 0  # training problems whose prompts are too long
    closed: bool = False
    greedy: Callable | None = None  # made when it is first needed

    @property
    def sampler(self) -> Any:
        """A rollout.TunixSampler or a vllm_engine.VllmSampler."""
        return self.cluster.rollout

    @property
    def step(self) -> int:
        """Finished steps: batches of completions with all their updates."""
        return self.cluster.actor_trainer.train_steps // self.recipe.grpo.iterations

    def render(self, question: str) -> str:
        return render_with(self.recipe, self.tokenizer, question)

    def generate(self, prompts: list[str]):
        """Greedy completions from the policy as it is now; the `generate` of grpo_lib.evaluation.

        In a run of several processes it is called inside `lead`.
        """
        return self._answer(processes.from_first(prompts))

    def lead[T](self, work: Callable[[], T]) -> T | None:
        """Do `work`, which may call `generate`.  Of several processes the first does it; the others help with the
        completions that it asks for, and get None.
        """
        if processes.is_first():
            result = work()
            processes.from_first(None)
            return result
        while (prompts := processes.from_first(None)) is not None:
            self._answer(prompts)
        return None

    def _answer(self, prompts: list[str]):
        if self.greedy is None:
            self.greedy = self.sampler.greedy_generate(
                max_completion_length=self.recipe.evaluation_completion_length,
                batch_size=-(-self.recipe.evaluation.batch_size // jax.process_count()),
            )
        return self.greedy(prompts)


def render_with(recipe: Recipe, tokenizer: Any, question: str) -> str:
    """A question as the recipe's model is sent it."""
    system = SYSTEM_PROMPT if recipe.prompts.system == "default" else recipe.prompts.system
    return render(tokenizer, question, system)


def prompt_lengths(recipe: Recipe, tokenizer: Any, problems: list[Problem]) -> list[int]:
    """Tokens of each rendered prompt."""
    prompts = [render_with(recipe, tokenizer, problem.question) for problem in problems]
    return [len(ids) for ids in tokenizer(prompts, add_special_tokens=False)["input_ids"]]


def longest_prompt(recipe: Recipe, tokenizer: Any, problems: list[Problem]) -> int:
    """Tokens of the longest rendered prompt."""
    return max(prompt_lengths(recipe, tokenizer, problems))


def fit_prompts(recipe: Recipe, tokenizer: Any, problems: list[Problem]) -> tuple[int, list[Problem]]:
    """(the length to which training prompts are padded, the problems whose prompts fit it).

    Raises CourseError when a prompt is longer than the recipe allows and the recipe does not say to leave it out:
    none is cut or left out silently.
    """
    lengths, allowed = prompt_lengths(recipe, tokenizer, problems), recipe.rollout.max_prompt_length
    longest = max(lengths)
    if allowed == "auto":
        return longest, problems
    if longest > allowed and recipe.rollout.overlong_prompts == "refuse":
        raise CourseError(
            f"rollout.max_prompt_length={allowed} is shorter than the longest prompt, {longest} tokens; "
            f"use {longest} or more, or auto, or leave such problems out with rollout.overlong_prompts=skip"
        )
    fitting = [problem for problem, length in zip(problems, lengths, strict=True) if length <= allowed]
    if not fitting:
        raise CourseError(
            f"rollout.max_prompt_length={allowed} is shorter than every prompt; the longest has {longest} tokens"
        )
    return allowed, fitting


def checkpoint_root(recipe: Recipe, directory: Path) -> epath.Path:
    """Where a run keeps its checkpoints: in itself, or under its name in a folder or bucket for those of all runs."""
    if recipe.training.checkpoints is None:
        return epath.Path(directory) / "checkpoints"
    return epath.Path(recipe.training.checkpoints) / directory.name


def require_supported(recipe: Recipe) -> None:
    """Refuse, before anything is downloaded, written or loaded, a training that this machine or version cannot do."""
    require_engine(recipe)
    tracking.require(recipe.tracking)
    place(recipe, jax.devices())


def require_engine(recipe: Recipe) -> None:
    """Refuse an engine that is not installed."""
    if recipe.rollout.engine == "vllm" and not importlib.util.find_spec("vllm"):
        raise CourseError("rollout.engine=vllm needs vllm-tpu, which is not installed; make setup-tpu installs it")


def place(recipe: Recipe, devices: list[Any]) -> tuple[list[Any], list[Any]]:
    """The devices that train and those that sample: the first ones train; the same or the next ones sample.

    Of several processes all devices train, and each process samples on its own.

    Args:
      devices: all that JAX finds, in all processes.

    Raises CourseError when they are fewer than the recipe needs, do not divide as it says, or belong to several
    processes and the recipe wants them to do different things.
    """
    hardware, found = recipe.hardware, len(devices)
    count = len({device.process_index for device in devices})
    if count > 1:
        _require_alike(recipe, found, count)
    trainer, sampler = hardware.trainer_count(found), hardware.sampler_count(found)
    needed = trainer if hardware.colocated else trainer + sampler
    if needed > found:
        roles = f"{trainer} that train" + ("" if hardware.colocated else f", {sampler} that sample")
        raise CourseError(
            f"hardware needs {needed} devices ({roles}) and JAX finds {found} here; run it on "
            f"{hardware.accelerator or 'such a machine'}, or change hardware.trainer_devices and sampler_devices"
        )
    for name, parts, whole in (
        ("trainer_tensor", hardware.trainer_tensor, trainer),
        ("sampler_tensor", hardware.sampler_tensor or sampler, sampler),
    ):
        if whole % parts:
            raise CourseError(f"hardware.{name}={parts} must divide its {whole} devices")
    recipe.plan_on(found, count)  # refuses a batch that does not divide
    if count > 1:
        return list(devices), [device for device in devices if device.process_index == jax.process_index()]
    first = 0 if hardware.colocated else trainer
    return list(devices[:trainer]), list(devices[first : first + sampler])


def _require_alike(recipe: Recipe, found: int, count: int) -> None:
    """Refuse what does not let all processes do the same."""
    hardware, said = recipe.hardware, f"{count} processes train and sample alike, on all their devices: "
    if recipe.rollout.engine != "tunix":
        raise CourseError(
            f"rollout.engine={recipe.rollout.engine} needs all devices in one process (tpu-inference 0.31.0), and "
            f"there are {count}; use a slice of one host, or rollout.engine=tunix"
        )
    if not hardware.colocated:
        raise CourseError(f"{said}set hardware.sampler_devices to null")
    if hardware.trainer_count(found) != found:
        raise CourseError(f"{said}set hardware.trainer_devices to {found}, or to null")


def build_session(
    recipe: Recipe,
    directory: str | Path,
    problems: list[Problem],
    checkpoint: str | Path,
    say: Callable[[str], None] = print,
) -> Session:
    """Load the actor, build sampler and learner, and restore the run's latest checkpoint if it has one.

    Args:
      directory: the run directory; its `checkpoints/` holds actor and optimizer, unless the recipe says where.
      problems: the training problems.
      checkpoint: MaxText weights to start from (`models.convert_to_maxtext`).
      say: is told of a checkpoint that is damaged, so that the one before it is taken.

    Raises:
      CourseError: a checkpoint cannot be read, a reward is unknown, a prompt is too long, the recipe needs more
        devices than there are, or something that is not installed.
    """
    require_supported(recipe)
    directory = Path(directory).resolve()
    trainer_devices, sampler_devices = place(recipe, jax.devices())
    plan = recipe.plan_on(jax.device_count(), jax.process_count())
    tokenizer = models.load_tokenizer(recipe.model)
    given = len(problems)
    width, problems = fit_prompts(recipe, tokenizer, problems)
    total = width + recipe.rollout.max_completion_length
    load = functools.partial(
        models.load_actor, recipe.model, checkpoint, total, tokenizer.pad_token_id,
        devices=trainer_devices, tensor=recipe.hardware.trainer_tensor, loss=recipe.loss.implementation,
    )  # fmt: skip
    together = recipe.hardware.colocated and not processes.several()
    apart = None if together else jax.sharding.Mesh(np.array(sampler_devices), ("fsdp",))
    reference = load().module if recipe.grpo.beta else None

    recorder = Recorder(
        directory,
        iterations=recipe.grpo.iterations,
        completions=plan.completions_per_step,
        learning_rate=learning_rates(recipe).__getitem__,
        writes=processes.is_first(),
    )
    rollout_config = RolloutConfig(
        max_tokens_to_generate=recipe.rollout.max_completion_length,
        max_prompt_length=width,
        kv_cache_size=total,
        temperature=recipe.rollout.temperature,
        top_p=recipe.rollout.top_p,
        top_k=recipe.rollout.top_k,
    )
    saving = _Saving(recipe, checkpoint_root(recipe, directory) / "actor")
    if processes.is_first():
        checkpoints.drop_one_without_its_row(saving.folder, recorder.last_step, recipe.grpo.iterations)
    rewards = [MeasuredReward(function) for function in get_rewards(recipe.rewards)]
    with models.quiet():
        engine = _rollout_engine(recipe, plan, tokenizer, total)

        def build() -> tuple[models.Actor, rl.RLCluster]:
            actor = load()
            return actor, _build_cluster(
                recipe, plan, directory, tokenizer, actor, reference, engine, apart or actor.mesh, rollout_config,
                recorder, saving,
            )  # fmt: skip

        actor, cluster = _restored(build, saving, say)
        if recipe.grpo.iterations > 1:
            old_logps_from_actor(cluster, actor)
        chosen = recipe.loss.implementation
        if recipe.grpo.beta and chosen != "jax":
            worker = cluster.inference_worker
            worker.get_ref_per_token_logps = losses.reference_logps(worker, chosen)
        if processes.several():
            spread_batches(cluster, actor.mesh)
        if recipe.grpo.beta:
            time_the_reference(cluster)
        sampler = cluster.rollout
        compared = min(plan.micro_batch_size, plan.completions_per_pass, math.lcm(COMPARED, len(trainer_devices)))
        sampler.scored_rows = compared
        gap = functools.partial(sampler_trainer_gap, sampler, actor, compared, recipe.rollout.max_completion_length)
        learner = GRPOLearner(
            rl_cluster=cluster,
            algo_config=GRPOConfig(
                num_generations=recipe.grpo.group_size,
                num_iterations=recipe.grpo.iterations,
                beta=recipe.grpo.beta,
                epsilon=recipe.grpo.epsilon,
                # Of `jax`, Tunix has one of its own, with the values of the reference in `losses`.
                policy_loss_fn="grpo" if chosen == "jax" else losses.policy_loss_name(chosen),
                kl_loss_mode="low_var_kl",  # the k3 estimator, as in the GRPO paper (equation 4); Tunix's default is k1
            ),
            reward_fns=rewards,
            metric_fns=[functools.partial(batch_metrics, sampler, recipe.grpo.group_size, rewards, gap)],
        )
        if recipe.hardware.colocated:  # their meshes differ nevertheless, where a process samples on its own devices
            learner.can_enable_async_rollout = False
    cluster.actor_trainer.with_rl_metrics_to_log({"kl": np.mean, "pg_clipfrac": np.mean, "entropy": np.mean})
    clock = Clock(cluster)
    cluster.actor_trainer.with_training_hooks(clock)
    # A restored actor is newer than the weights that the sampler was made with; so is the noise that comes next.
    cluster.rollout.update_params(nnx.state(actor.module, nnx.Param))
    session = Session(
        recipe, plan, directory, tokenizer, actor, cluster, learner, rollout_config, problems, recorder, clock, saving
    )
    sampler.calls = session.step * plan.passes
    cluster.global_steps = session.step  # the checkpoint that Tunix writes when it closes does not know it
    session.left_out = given - len(problems)
    return session


def check_first_sync(session: Session, prompts: int = 32) -> rollout.SyncCheck:
    """Did every weight arrive in the sampler, and do both sides give the same log-probabilities?

    What was found is kept in the run's sync.json.  Raises CourseError, which names the weight or the gap, when not.
    """
    recipe = session.recipe
    # The trainer scores them in the shape of its micro-batches: a larger one might not fit beside a training.
    width = min(prompts, session.plan.micro_batch_size)
    rendered = [session.render(problem.question) for problem in session.problems[: prompts - prompts % width]]
    pad, eos = session.tokenizer.pad_token_id, session.tokenizer.eos_token_id

    def trainer_logps(prompt_ids, ids):
        rows = (slice(start, start + width) for start in range(0, len(ids), width))
        parts = [models.per_token_logps(session.actor, prompt_ids[row], ids[row], pad, eos) for row in rows]
        return np.concatenate([processes.on_host(part) for part in parts])

    calls = session.sampler.calls
    check = rollout.check_sync(
        session.sampler,
        session.actor.module,
        rendered,
        session.rollout_config,
        trainer_logps,
        recipe.model.dtype,
    )
    session.sampler.calls = calls  # the check must not change what the run samples
    if processes.is_first():
        write_json_atomic(session.directory / "sync.json", dataclasses.asdict(check))
    return check


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

    Of several processes the first has the rows and calls `on_step`; all call `validate`, see `Session.lead`.
    """
    recipe, recorder = session.recipe, session.recorder
    every = validate_every if validate else 0
    left = session.step < recipe.training.steps
    if left and session.closed:
        raise CourseError("this session was closed by an interrupted training; build a new one, it continues the run")
    rows = recorder.begin(session.step, on_step)
    try:
        if left:
            session.closed = True
            if processes.is_first():
                recorder.trackers = tracking.start(recipe, session.directory, session.step)
            session.clock.start()
            with models.quiet():
                session.learner.train(_batches(session, validate, every, stop))
        if session.step >= recipe.training.steps:  # a run may have been killed in its last validation
            _validate_last(session, validate, every)
    except Exception as error:
        explained = _explained(error, session)
        if explained is error:  # an error is not its own cause
            raise
        raise explained from error
    finally:
        recorder.finish()
    return rows


def _validate_last(session: Session, validate: Callable[[], Row] | None, every: int) -> None:
    if every and session.step % every == 0 and _unvalidated(session, session.step):
        session.recorder.add(session.step, validate())


def _unvalidated(session: Session, step: int) -> bool:
    return processes.from_first(not session.recorder.has(step, VALIDATED))


def _explained(error: Exception, session: Session) -> Exception:
    """An error of training as a person can use it: a full disk is one line, others stay as they are."""
    full = next((sign for text in map(str, _causes(error)) for sign in DISK_FULL if sign in text), None)
    if full is None:
        return error
    found = checkpoints.updates(session.saving.folder)
    step = found[-1] // session.recipe.grpo.iterations if found else 0
    good = f"the last good checkpoint is of step {step}" if step else "there is no checkpoint yet"
    return CourseError(
        f"{session.directory} cannot be written, its disk is full ({full}); {good}; make room "
        "and give the same command again"
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def learning_rate_schedule(recipe: Recipe) -> optax.Schedule:
    """The learning rate of a step, counted from 0.  The first step already moves: it does not start at zero.

    Linear warm-up, then constant, or half a cosine that would reach 0 at the step after the last.  A step is one batch
    of completions; all its updates (`grpo.iterations`) have the step's rate.
    """
    training = recipe.training
    first = training.learning_rate / max(training.warmup_steps, 1)
    if training.schedule == "cosine" and training.steps > training.warmup_steps:  # else it ends in the warm-up
        return optax.warmup_cosine_decay_schedule(
            first, training.learning_rate, training.warmup_steps, decay_steps=training.steps
        )
    return optax.warmup_constant_schedule(first, training.learning_rate, training.warmup_steps)


def learning_rates(recipe: Recipe) -> np.ndarray:
    """The learning rates of all steps, [steps], for the rows.

    Asked for one by one, each would be computed on the device, and wait there for the update that is under way.
    """
    steps = recipe.training.steps
    return np.broadcast_to(np.asarray(learning_rate_schedule(recipe)(jnp.arange(steps))), steps)


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm; preflight compiles the same."""
    training, schedule, iterations = recipe.training, learning_rate_schedule(recipe), recipe.grpo.iterations
    rate = schedule if iterations == 1 else lambda update: schedule(update // iterations)
    return optax.chain(
        optax.clip_by_global_norm(training.clip),
        optax.adamw(rate, b1=training.b1, b2=training.b2, weight_decay=training.weight_decay),
    )


def old_logps_from_actor(cluster: rl.RLCluster, actor: models.Actor) -> None:
    """Take the old log-probabilities of several updates per batch from the actor as it was when it was sampled.

    google-tunix 0.1.7 asks the rollout engine for them.  Its vLLM engine answers with lists of different lengths
    (TypeError in RLCluster.get_old_per_token_logps); its own sampler forgets the temperature that the loss divides by.
    The actor's snapshot of the last sync is what the ratio means by the old policy: at the first update it is 1.
    """
    pad, eos = cluster.rollout.pad_id(), cluster.rollout.eos_id()

    def with_logits(prompt_tokens, completion_tokens, micro_batch_size=None):
        return cluster.get_actor_per_token_logps(prompt_tokens, completion_tokens, pad, eos, micro_batch_size)

    def without_logits(prompt_tokens, completion_tokens, micro_batch_size=None):
        snapshot = tunix_utils.put_params_on_memory_kind(cluster._anchor_policy_state, cluster._default_memory_kind)
        graphdef, _ = nnx.split(actor.module)
        temperature = cluster.get_rollout_config(mode=rl.Mode.TRAIN).temperature
        parts = []
        with actor.scope():
            for rows in tunix_utils.chunk_slices_by_size(len(prompt_tokens), micro_batch_size or len(prompt_tokens)):
                batch = sharding_utils.shard_input((prompt_tokens[rows], completion_tokens[rows]), ("fsdp",))
                parts.append(losses.per_token_logps(graphdef, snapshot, *batch, pad, eos, temperature, actor.loss))
        return jnp.concatenate(parts)

    cluster.get_old_per_token_logps = with_logits if actor.loss == "jax" else without_logits


def spread_batches(cluster: rl.RLCluster, mesh: jax.sharding.Mesh) -> None:
    """Let the trainer and the reference model of several processes take batches that each process has whole.

    Tunix takes them for this process's part of a batch: see `processes.spread`.
    """

    def spreading(logps: Callable) -> Callable:
        def spread(*, prompt_tokens, completion_tokens, micro_batch_size, **more):
            parts = []
            for first in range(0, len(prompt_tokens), micro_batch_size):
                rows = slice(first, first + micro_batch_size)
                batch = processes.spread((prompt_tokens[rows], completion_tokens[rows]), mesh)
                parts.append(processes.on_host(logps(prompt_tokens=batch[0], completion_tokens=batch[1], **more)))
            return jnp.concatenate(parts)

        return spread

    cluster.actor_trainer._prepare_inputs = functools.partial(processes.spread, mesh=mesh)
    cluster.get_ref_per_token_logps = spreading(cluster.get_ref_per_token_logps)
    cluster.get_old_per_token_logps = spreading(cluster.get_old_per_token_logps)


def time_the_reference(cluster: rl.RLCluster) -> None:
    """Hand the time of the reference model's log-probabilities to the metrics."""
    reference_logps = cluster.get_ref_per_token_logps

    def timed(**arguments):
        started = time.perf_counter()
        logps = jax.block_until_ready(reference_logps(**arguments))
        cluster.buffer_metrics({"step/seconds_reference": (time.perf_counter() - started, np.sum)})
        return logps

    cluster.get_ref_per_token_logps = timed


def sampler_trainer_gap(sampler: Any, actor: models.Actor, rows: int, width: int) -> float:
    """Mean absolute difference of the log-probabilities of the first `rows` completions of the step, nats per token.

    Args:
      width: tokens to which completions are padded, so that one shape is compiled.
    """
    scored = sampler.last_scored(rows, width)
    trained = processes.on_host(
        models.per_token_logps(actor, scored.prompt_ids, scored.completion_ids, sampler.pad_id(), sampler.eos_id())
    )
    gaps = [np.abs(ours - theirs[: len(ours)]) for ours, theirs in zip(scored.logps, trained, strict=True)]
    return float(np.concatenate(gaps).mean())


class _Saving:
    """When a checkpoint is due, and what goes with it."""

    def __init__(self, recipe: Recipe, folder: epath.Path):
        self.folder, self.seed = folder, recipe.seed
        self.iterations = recipe.grpo.iterations  # updates per step
        self.last = recipe.training.steps * self.iterations
        self.trainer: Any = None
        every = recipe.training.checkpoint_every * self.iterations
        self.options = checkpoints.manager_options(every, recipe.training.keep, self.last, self.keep_beside)

    def keep_beside(self, update: int) -> None:
        fingerprint = self._fingerprint()  # by all processes; so are the random numbers the same in all
        if processes.is_first():
            checkpoints.keep_beside(self.folder, update, fingerprint)

    def restore_beside(self) -> str | None:
        """Once the trainer is there; returns what is wrong with what it restored."""
        if not self.trainer.train_steps:
            checkpoints.seed_random_numbers(self.seed)
        elif checkpoints.restore_beside(self.folder, self.trainer.train_steps) != self._fingerprint():
            return "its values are not those that were saved"
        return None

    def _fingerprint(self) -> int:
        return checkpoints.fingerprint(
            nnx.state(self.trainer.model), nnx.state(self.trainer.optimizer, nnx.optimizer.OptState)
        )


def _rollout_engine(recipe: Recipe, plan: BatchPlan, tokenizer: Any, total: int) -> Callable:
    """The class that Tunix makes the sampler from.

    Args:
      total: tokens of a training prompt and its completion.
    """
    if recipe.rollout.engine == "tunix":
        return functools.partial(rollout.TunixSampler, seed=recipe.seed, passes=plan.passes)
    from grpo_lib.vllm_engine import VllmSampler

    evaluated = [problem for split in ("validation", "test") for problem in load_problems(recipe.problems, split)]
    longest = longest_prompt(recipe, tokenizer, evaluated) + recipe.evaluation_completion_length
    return functools.partial(VllmSampler, recipe=recipe, max_length=max(total, longest))


def _restored(
    build: Callable[[], tuple[models.Actor, rl.RLCluster]], saving: _Saving, say: Callable[[str], None]
) -> tuple[models.Actor, rl.RLCluster]:
    """What `build` makes from the newest checkpoint that is whole; `say` is told of one that is not."""
    while True:
        if processes.several():  # they restore together: it must not fail in one of them
            while damage := processes.from_first(_set_aside(saving)):
                say(damage)
        try:
            actor, cluster = build()
        except Exception:
            damage = None if processes.several() else _set_aside(saving)
            if damage is None:  # then something else is wrong
                raise
        else:
            saving.trainer = cluster.actor_trainer
            reason = saving.restore_beside()
            if reason is None:
                return actor, cluster
            damage = processes.from_first(_set_aside(saving, reason))
        say(damage)


def _set_aside(saving: _Saving, reason: str | None = None) -> str | None:
    """What process 0 says of the newest checkpoint when it is damaged, and then out of the way."""
    return checkpoints.set_damaged_aside(saving.folder, reason) if processes.is_first() else None


def _build_cluster(
    recipe, plan, directory, tokenizer, actor, reference, engine, sampler_mesh, rollout_config, recorder, saving
) -> rl.RLCluster:
    training, roles = recipe.training, (rl.Role.ACTOR, rl.Role.REFERENCE, rl.Role.ROLLOUT)
    iterations = recipe.grpo.iterations
    return rl.RLCluster(
        actor=actor.module,
        reference=reference,
        tokenizer=tokenizer,
        cluster_config=rl.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, actor.mesh) | {rl.Role.ROLLOUT: sampler_mesh},
            role_to_logical_axis_rule=dict.fromkeys(roles, actor.config.logical_axis_rules),
            rollout_engine=engine,
            rollout_config=rollout_config,
            training_config=rl.RLTrainingConfig(
                actor_optimizer=make_optimizer(recipe),
                # Tunix counts updates; a step here is a batch, with all its updates.
                max_steps=training.steps * iterations,
                eval_every_n_steps=training.steps * iterations + 1,
                # Of all processes together: each sees the whole batch.
                mini_batch_size=plan.prompts_per_step,
                train_micro_batch_size=plan.micro_batch_prompts,
                rollout_micro_batch_size=plan.prompts_per_pass,
                compute_logps_micro_batch_size=plan.micro_batch_prompts,
                # Tunix's default is 2; several processes run one program at a time (`processes`).
                max_inflight_computations=1 if processes.several() else 2,
                checkpoint_root_directory=str(saving.folder.parent),
                checkpointing_options=saving.options,
                metrics_logging_options=metrics_logger.MetricsLoggerOptions(
                    log_dir=str(directory / "tensorboard"),
                    backend_kwargs={"custom_backend": recorder.backends()},
                ),
                pbar_description=recipe.name,
            ),
        ),
    )


def _batches(
    session: Session, validate: Callable[[], Row] | None, every: int, stop: Callable[[], bool]
) -> Iterator[dict[str, np.ndarray]]:
    """Training batches until `stop`.  Tunix skips those of restored steps itself; it reads one ahead of each step.

    It skips one for every update: with several updates a batch, the batches of restored steps come that often.
    """
    recipe, restored, recorder = session.recipe, session.step, session.recorder
    batches = training_batches(
        session.problems, session.render, batch_size=session.plan.prompts_per_step, seed=recipe.seed
    )
    for step, batch in enumerate(batches, start=1):
        done = step - 1
        if done >= max(restored, 1) and stop():
            if done > restored:  # Tunix saves when it closes, unless it has
                session.saving.keep_beside(done * recipe.grpo.iterations)
            return
        if every and done and done % every == 0 and done >= restored and _unvalidated(session, done):
            recorder.add(done, validate())
        for _ in range(recipe.grpo.iterations if step <= restored else 1):
            yield dict(batch)
