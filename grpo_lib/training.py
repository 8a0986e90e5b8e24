"""GRPO from a recipe: Tunix's RLCluster and GRPOLearner around a MaxText actor.

    session = build_session(recipe, run_dir)     # actor, sampler, learner; the latest checkpoint, if there is one
    check_first_sync(session)                    # refuses to go on when sampler and trainer differ
    rows = train(session, on_step=print)         # metrics.jsonl, TensorBoard, checkpoints

A finished step is never done twice: building a session on a run with checkpoints continues after the last one.
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

from grpo_lib import answers, environment, models, tracking
from grpo_lib.errors import CourseError
from grpo_lib.files import append_jsonl, read_jsonl, write_json_atomic, write_text_atomic
from grpo_lib.problems import Problem, load_problems, training_batches
from grpo_lib.prompts import SYSTEM_PROMPT, render
from grpo_lib.recipes import Recipe
from grpo_lib.rewards import get_rewards

environment.prepare()

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from tunix.rl import rl_cluster as rl  # noqa: E402
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner  # noqa: E402
from tunix.rl.rollout.base_rollout import RolloutConfig  # noqa: E402
from tunix.sft import hooks, metrics_logger  # noqa: E402

from grpo_lib import rollout  # noqa: E402

Row = dict[str, float]

# Tunix's metric -> the name in metrics.jsonl.  The rest of a row is computed here, in _batch_metrics.
TUNIX_METRICS = {
    "actor/train/loss": "loss",
    "actor/train/grad_norm": "grad_norm",
    "actor/train/kl": "kl",
    "actor/train/pg_clipfrac": "clip_fraction",
    "actor/train/entropy": "entropy",
}
# A row is whole when these are in it.
WHOLE = {"reward", "seconds", "loss", "entropy"}


@dataclass
class Session:
    """Everything a run needs in memory.  Made by `build_session`."""

    recipe: Recipe
    directory: Path
    tokenizer: Any
    actor: models.Actor
    cluster: rl.RLCluster
    learner: GRPOLearner
    rollout_config: RolloutConfig
    problems: list[Problem]
    recorder: _Recorder
    clock: _Clock
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
        """Greedy completions from the policy as it is now; the `generate` of grpo_lib.evaluation."""
        evaluation = self.recipe.evaluation
        if self.greedy is None:
            self.greedy = self.sampler.greedy_generate(
                max_completion_length=self.recipe.evaluation_completion_length, batch_size=evaluation.batch_size
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


def require_supported(recipe: Recipe) -> None:
    """Refuse, before anything is downloaded, written or loaded, a training that this machine or version cannot do."""
    if recipe.loss.implementation == "pallas":
        raise CourseError("loss.implementation=pallas is not built yet; use jax")
    require_engine(recipe)
    tracking.require(recipe.tracking)
    place(recipe, jax.devices())


def require_engine(recipe: Recipe) -> None:
    """Refuse an engine that is not installed."""
    if recipe.rollout.engine == "vllm" and not importlib.util.find_spec("vllm"):
        raise CourseError("rollout.engine=vllm needs vllm-tpu, which is not installed; make setup-tpu installs it")


def place(recipe: Recipe, devices: list[Any]) -> tuple[list[Any], list[Any]]:
    """The devices that train and those that sample: the first ones train; the same or the next ones sample.

    Args:
      devices: all that JAX finds.

    Raises CourseError when they are fewer than the recipe needs, do not divide as it says, or belong to several
    processes: a run of several hosts is not built yet (and tpu-inference 0.31.0 wants all devices in its own process).
    """
    hardware, found = recipe.hardware, len(devices)
    if len({device.process_index for device in devices}) > 1:
        raise CourseError("this slice has several hosts, and such a run is not built yet; use a slice of one host")
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
    fsdp = trainer // hardware.trainer_tensor
    if recipe.micro_batch_completions % fsdp:
        raise CourseError(
            f"a micro-batch of {recipe.micro_batch_completions} completions (training.micro_batch x grpo.group_size) "
            f"does not spread evenly over {fsdp} devices; change either, or hardware.trainer_devices"
        )
    first = 0 if hardware.colocated else trainer
    return list(devices[:trainer]), list(devices[first : first + sampler])


def build_session(recipe: Recipe, directory: str | Path, problems: list[Problem], checkpoint: str | Path) -> Session:
    """Load the actor, build sampler and learner, and restore the run's latest checkpoint if it has one.

    Args:
      directory: the run directory; its `checkpoints/` holds actor and optimizer.
      problems: the training problems.
      checkpoint: MaxText weights to start from (`models.convert_to_maxtext`).

    Raises:
      CourseError: a checkpoint cannot be read, a reward is unknown, a prompt is too long, the recipe needs more
        devices than there are, or something that is not installed.
    """
    require_supported(recipe)
    directory = Path(directory).resolve()
    trainer_devices, sampler_devices = place(recipe, jax.devices())
    tokenizer = models.load_tokenizer(recipe.model)
    given = len(problems)
    width, problems = fit_prompts(recipe, tokenizer, problems)
    total = width + recipe.rollout.max_completion_length
    load = functools.partial(
        models.load_actor, recipe.model, checkpoint, total, tokenizer.pad_token_id,
        devices=trainer_devices, tensor=recipe.hardware.trainer_tensor,
    )  # fmt: skip
    actor = load()
    sampler_mesh = actor.mesh if recipe.hardware.colocated else jax.sharding.Mesh(np.array(sampler_devices), ("fsdp",))
    reference = load().module if recipe.grpo.beta else None

    recorder = _Recorder(directory, recipe)
    rollout_config = RolloutConfig(
        max_tokens_to_generate=recipe.rollout.max_completion_length,
        max_prompt_length=width,
        kv_cache_size=total,
        temperature=recipe.rollout.temperature,
        top_p=recipe.rollout.top_p,
        top_k=recipe.rollout.top_k,
    )
    with models.quiet():
        engine = _rollout_engine(recipe, tokenizer, total)
        cluster = _build_cluster(
            recipe, directory, tokenizer, actor, reference, engine, sampler_mesh, rollout_config, recorder
        )
        if recipe.grpo.iterations > 1:
            old_logps_from_actor(cluster)
        learner = GRPOLearner(
            rl_cluster=cluster,
            algo_config=GRPOConfig(
                num_generations=recipe.grpo.group_size,
                num_iterations=recipe.grpo.iterations,
                beta=recipe.grpo.beta,
                epsilon=recipe.grpo.epsilon,
            ),
            reward_fns=get_rewards(recipe.rewards),
            metric_fns=[functools.partial(_batch_metrics, cluster.rollout, recipe.grpo.group_size)],
        )
    cluster.actor_trainer.with_rl_metrics_to_log({"kl": np.mean, "pg_clipfrac": np.mean, "entropy": np.mean})
    clock = _Clock(cluster)
    cluster.actor_trainer.with_training_hooks(clock)
    # A restored actor is newer than the weights that the sampler was made with; so is the noise that comes next.
    cluster.rollout.update_params(nnx.state(actor.module, nnx.Param))
    session = Session(recipe, directory, tokenizer, actor, cluster, learner, rollout_config, problems, recorder, clock)
    cluster.rollout.calls = session.step
    session.left_out = given - len(problems)
    return session


def check_first_sync(session: Session, prompts: int = 32) -> rollout.SyncCheck:
    """Did every weight arrive in the sampler, and do both sides give the same log-probabilities?

    What was found is kept in the run's sync.json.  Raises CourseError, which names the weight or the gap, when not.
    """
    recipe = session.recipe
    # The trainer scores them in the shape of its micro-batches: a larger one might not fit beside a training.
    width = min(prompts, recipe.micro_batch_completions)
    rendered = [session.render(problem.question) for problem in session.problems[: prompts - prompts % width]]
    pad, eos = session.tokenizer.pad_token_id, session.tokenizer.eos_token_id

    def trainer_logps(prompt_ids, ids):
        rows = (slice(start, start + width) for start in range(0, len(ids), width))
        parts = [models.per_token_logps(session.actor, prompt_ids[row], ids[row], pad, eos) for row in rows]
        return np.concatenate([np.asarray(part) for part in parts])

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
    write_json_atomic(session.directory / "sync.json", dataclasses.asdict(check))
    return check


def train(
    session: Session,
    on_step: Callable[[Row], None] | None = None,
    validate: Callable[[], Row] | None = None,
    validate_every: int = 0,
) -> list[Row]:
    """Run the recipe's remaining steps; returns the rows of metrics.jsonl, those of earlier sessions included.

    Args:
      on_step: called with each row, one step late (Tunix logs a step when the next one has begun).
      validate: called after every `validate_every`-th step; what it returns joins that step's row.
    """
    recipe, recorder = session.recipe, session.recorder
    rows = recorder.begin(session.step, on_step)
    if session.step >= recipe.training.steps:
        return rows
    if session.closed:
        raise CourseError("this session was closed by an interrupted training; build a new one, it continues the run")
    recorder.tracker = tracking.start(recipe, session.directory)
    session.clock.start()
    try:
        with models.quiet():
            session.learner.train(_batches(session, validate, validate_every))
        if validate and validate_every and session.step % validate_every == 0:
            recorder.add(session.step, validate())
        recorder.finish()
    finally:
        session.closed = True
        recorder.close_tracker()
        recorder.closed = True
    return rows


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


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm; preflight compiles the same."""
    training, schedule, iterations = recipe.training, learning_rate_schedule(recipe), recipe.grpo.iterations
    rate = schedule if iterations == 1 else lambda update: schedule(update // iterations)
    return optax.chain(
        optax.clip_by_global_norm(training.clip),
        optax.adamw(rate, b1=training.b1, b2=training.b2, weight_decay=training.weight_decay),
    )


def old_logps_from_actor(cluster: rl.RLCluster) -> None:
    """Take the old log-probabilities of several updates per batch from the actor as it was when it was sampled.

    google-tunix 0.1.7 asks the rollout engine for them.  Its vLLM engine answers with lists of different lengths
    (TypeError in RLCluster.get_old_per_token_logps); its own sampler forgets the temperature that the loss divides by.
    The actor's snapshot of the last sync is what the ratio means by the old policy: at the first update it is 1.
    """
    pad, eos = cluster.rollout.pad_id(), cluster.rollout.eos_id()

    def old_logps(prompt_tokens, completion_tokens, micro_batch_size=None):
        return cluster.get_actor_per_token_logps(prompt_tokens, completion_tokens, pad, eos, micro_batch_size)

    cluster.get_old_per_token_logps = old_logps


def _rollout_engine(recipe: Recipe, tokenizer: Any, total: int) -> Callable:
    """The class that Tunix makes the sampler from.

    Args:
      total: tokens of a training prompt and its completion.
    """
    if recipe.rollout.engine == "tunix":
        return functools.partial(rollout.TunixSampler, seed=recipe.seed)
    from grpo_lib.vllm_engine import VllmSampler

    evaluated = [problem for split in ("validation", "test") for problem in load_problems(recipe.problems, split)]
    longest = longest_prompt(recipe, tokenizer, evaluated) + recipe.evaluation_completion_length
    return functools.partial(VllmSampler, recipe=recipe, max_length=max(total, longest))


def _build_cluster(
    recipe, directory, tokenizer, actor, reference, engine, sampler_mesh, rollout_config, recorder
) -> rl.RLCluster:
    import orbax.checkpoint as ocp

    training, roles = recipe.training, (rl.Role.ACTOR, rl.Role.REFERENCE, rl.Role.ROLLOUT)
    iterations = recipe.grpo.iterations
    checkpoints = directory / "checkpoints"
    try:
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
                    mini_batch_size=training.prompts_per_step,
                    train_micro_batch_size=training.micro_batch or training.prompts_per_step,
                    rollout_micro_batch_size=training.prompts_per_step,
                    compute_logps_micro_batch_size=training.micro_batch or training.prompts_per_step,
                    checkpoint_root_directory=str(checkpoints),
                    checkpointing_options=ocp.CheckpointManagerOptions(
                        # Not save_interval_steps: with it Orbax also saves the first update, which may lie in mid-step.
                        should_save_fn=lambda update, _: update % (training.checkpoint_every * iterations) == 0,
                        max_to_keep=training.keep,
                    ),
                    metrics_logging_options=metrics_logger.MetricsLoggerOptions(
                        log_dir=str(directory / "tensorboard"),
                        backend_kwargs={"custom_backend": recorder.backends()},
                    ),
                    pbar_description=recipe.name,
                ),
            ),
        )
    except Exception as error:
        steps = _checkpoint_steps(checkpoints / "actor")
        if not steps:
            raise
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise CourseError(
            f"checkpoint {checkpoints / 'actor' / str(steps[-1])} cannot be restored ({reason}); "
            "remove that folder to continue from the one before"
        ) from error


def _checkpoint_steps(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit()) if folder.is_dir() else []


def _batches(session: Session, validate: Callable[[], Row] | None, every: int) -> Iterator[dict[str, np.ndarray]]:
    """Endless training batches.  Tunix skips those of restored steps itself; it reads one ahead of each step.

    It skips one for every update: with several updates a batch, the batches of restored steps come that often.
    """
    recipe, restored = session.recipe, session.step
    batches = training_batches(
        session.problems, session.render, batch_size=recipe.training.prompts_per_step, seed=recipe.seed
    )
    for step, batch in enumerate(batches, start=1):
        done = step - 1
        if validate and every and done and done % every == 0 and done >= session.step:
            session.recorder.add(done, validate())
        for _ in range(recipe.grpo.iterations if step <= restored else 1):
            yield dict(batch)


def _batch_metrics(
    sampler: Any,
    group_size: int,
    prompts,
    completions,
    rewards,
    advantages,
    answer,
    **_: Any,
) -> dict[str, tuple[float, Callable]]:
    """Metrics of one batch of completions, in Tunix's form {name: (value, aggregation)}.  Shapes are [prompts * G]."""
    rewards = np.asarray(rewards, np.float32)
    groups = rewards.reshape(-1, group_size)
    verdicts = [answers.is_correct(text, gold) for text, gold in zip(completions, answer, strict=True)]
    lenient = [answers.is_correct_leniently(text, gold) for text, gold in zip(completions, answer, strict=True)]
    values = {
        "reward": rewards.mean(),
        "reward_std": groups.std(axis=1).mean(),
        "zero_variance_groups": (np.ptp(groups, axis=1) == 0).mean(),
        "accuracy": np.mean(verdicts),
        "lenient_accuracy": np.mean(lenient),
        "format": np.mean([answers.format_is_exact(text) for text in completions]),
        "completion_length": np.mean(sampler.lengths),
        "truncated": np.mean(sampler.truncated),
        "seconds_rollout": sampler.take_seconds("generating"),
        "seconds_sync": sampler.take_seconds("syncing"),
    }
    return {f"step/{name}": (float(value), np.mean) for name, value in values.items()}


class _Clock(hooks.TrainingHooks):
    """Measures the update and the whole step, and hands both to Tunix's metrics.

    With gradient accumulation Tunix calls the trainer once per micro-batch; the sums over a step are what counts.
    """

    def __init__(self, cluster: rl.RLCluster):
        self.cluster = cluster
        self.last = self.update_started = 0.0

    def start(self) -> None:
        """Time begins with the training, whatever was sampled or evaluated before."""
        self.last = time.perf_counter()
        for what in ("generating", "syncing"):
            self.cluster.rollout.take_seconds(what)

    def on_train_start(self, train_ctx) -> None:
        self.update_started = time.perf_counter()

    def on_train_end(self, train_ctx) -> None:
        now = time.perf_counter()
        self.cluster.buffer_metrics(
            {
                "step/seconds_update": (now - self.update_started, np.sum),
                "step/seconds": (now - self.last, np.sum),
            }
        )
        self.last = now

    def on_train_step_start(self, train_ctx) -> None: ...
    def on_train_step_end(self, train_ctx, train_step, train_loss) -> None: ...
    def on_eval_step_start(self, train_ctx) -> None: ...
    def on_eval_step_end(self, train_ctx, eval_loss) -> None: ...


class _Recorder:
    """Collects a step's metrics from Tunix's logger into one row, and writes it to metrics.jsonl when it is whole."""

    def __init__(self, directory: Path, recipe: Recipe):
        self.directory = directory
        self.path = directory / "metrics.jsonl"
        self.rewards = recipe.rewards
        self.iterations = recipe.grpo.iterations
        self.updates: dict[str, list[float]] = {}  # metrics of the updates of the step that is under way
        self.tracker: Any | None = None
        self.last_step: int | None = recipe.training.steps
        self.schedule = learning_rate_schedule(recipe)
        self.pending: dict[int, Row] = {}
        self.rows: list[Row] = []
        self.on_step: Callable[[Row], None] | None = None
        self.closed = False

    def backends(self) -> list[Callable[[], Any]]:
        """Factories for Tunix's MetricsLogger: TensorBoard, and this recorder."""
        return [
            lambda: metrics_logger.TensorboardBackend(log_dir=str(self.directory / "tensorboard")),
            lambda: self,
        ]

    def begin(self, finished: int, on_step: Callable[[Row], None] | None) -> list[Row]:
        """Keep the rows of finished steps, drop those of steps that will be done again."""
        self.on_step = on_step
        known = read_jsonl(self.path) if self.path.exists() else []
        self.rows[:] = [row for row in known if row["step"] <= finished]
        if len(self.rows) != len(known):
            write_text_atomic(self.path, "")
            for row in self.rows:
                append_jsonl(self.path, row)
        return self.rows

    def add(self, step: int, values: Row) -> None:
        self.pending.setdefault(step, {}).update(values)

    def log_scalar(self, event: str, value: Any, **kwargs: Any) -> None:
        """Tunix's LoggingBackend.  RL metrics count steps from 0, the trainer's from 1."""
        if self.closed or kwargs.get("step") is None:
            return
        step, name = int(kwargs["step"]), event.lstrip("/")
        if name.startswith("step/train/"):
            self.add(step + 1, {name.removeprefix("step/train/"): float(value)})
        elif name.startswith("rewards/train/") and (part := name.removeprefix("rewards/train/")) in self.rewards:
            self.add(step + 1, {f"reward/{part}": float(value)})
        elif name in TUNIX_METRICS:
            self._add_update(step, TUNIX_METRICS[name], float(value))
        self._write_whole_rows()

    def _add_update(self, update: int, name: str, value: float) -> None:
        """A metric of one update, counted from 1.  A row has the mean over the updates of its step."""
        values = self.updates.setdefault(name, [])
        values.append(value)
        if update % self.iterations == 0:
            self.add(update // self.iterations, {name: sum(values) / len(values)})
            values.clear()

    def close(self) -> None:
        """Tunix calls this when training ends.  The last row still waits for its validation."""

    def close_tracker(self) -> None:
        if self.tracker:
            self.tracker.close()
            self.tracker = None

    def finish(self) -> None:
        """Write the last row."""
        self.last_step = None
        self._write_whole_rows()

    def _write_whole_rows(self) -> None:
        for step in sorted(self.pending):
            # Tunix logs the entropy last, after the loss, when the next step is done; the rest came before it.
            if step == self.last_step or not self.pending[step].keys() >= WHOLE:
                continue
            row = {"step": step, "learning_rate": float(self.schedule(step - 1)), **self.pending.pop(step)}
            row = {key: (value if math.isfinite(value) else None) for key, value in row.items()}
            append_jsonl(self.path, row)
            self.rows.append(row)
            if self.tracker:
                tracking.log(self.tracker, row)
            if self.on_step:
                self.on_step(row)
