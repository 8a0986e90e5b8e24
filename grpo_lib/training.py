"""GRPO from a recipe: Tunix's RLCluster and GRPOLearner around a MaxText actor.

    session = build_session(recipe, run_dir)     # actor, sampler, learner; the latest checkpoint, if there is one
    check_first_sync(session)                    # refuses to go on when sampler and trainer differ
    rows = train(session, on_step=print)         # metrics.jsonl, TensorBoard, checkpoints

A finished step is never done twice: building a session on a run with checkpoints continues after the last one.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lib import answers, environment, models
from grpo_lib.errors import CourseError
from grpo_lib.files import append_jsonl, read_jsonl, write_text_atomic
from grpo_lib.problems import Problem, training_batches
from grpo_lib.prompts import SYSTEM_PROMPT, render
from grpo_lib.recipes import Recipe
from grpo_lib.rewards import get_rewards

environment.prepare()

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
    closed: bool = False
    greedy: Callable | None = None  # made when it is first needed

    @property
    def sampler(self) -> rollout.TunixSampler:
        return self.cluster.rollout

    @property
    def step(self) -> int:
        """Finished steps."""
        return self.cluster.actor_trainer.train_steps

    def render(self, question: str) -> str:
        return render_with(self.recipe, self.tokenizer, question)

    def generate(self, prompts: list[str]):
        """Greedy completions from the policy as it is now; the `generate` of grpo_lib.evaluation."""
        evaluation = self.recipe.evaluation
        if self.greedy is None:
            self.greedy = rollout.greedy_generate(
                self.sampler.module_and_state,
                self.tokenizer,
                max_completion_length=self.recipe.evaluation_completion_length,
                batch_size=evaluation.batch_size,
            )
        return self.greedy(prompts)


def render_with(recipe: Recipe, tokenizer: Any, question: str) -> str:
    """A question as the recipe's model is sent it."""
    system = SYSTEM_PROMPT if recipe.prompts.system == "default" else recipe.prompts.system
    return render(tokenizer, question, system)


def longest_prompt(recipe: Recipe, tokenizer: Any, problems: list[Problem]) -> int:
    """Tokens of the longest rendered prompt."""
    prompts = [render_with(recipe, tokenizer, problem.question) for problem in problems]
    return max(len(ids) for ids in tokenizer(prompts, add_special_tokens=False)["input_ids"])


def prompt_length(recipe: Recipe, tokenizer: Any, problems: list[Problem]) -> int:
    """The length to which training prompts are padded.

    Raises CourseError when a prompt of the run is longer than the recipe allows: none is cut or left out silently.
    """
    longest, allowed = longest_prompt(recipe, tokenizer, problems), recipe.rollout.max_prompt_length
    if allowed == "auto":
        return longest
    if longest > allowed:
        raise CourseError(
            f"rollout.max_prompt_length={allowed} is shorter than the longest prompt, {longest} tokens; "
            f"use {longest} or more, or auto"
        )
    return allowed


def build_session(recipe: Recipe, directory: str | Path, problems: list[Problem], checkpoint: str | Path) -> Session:
    """Load the actor, build sampler and learner, and restore the run's latest checkpoint if it has one.

    Args:
      directory: the run directory; its `checkpoints/` holds actor and optimizer.
      problems: the training problems.
      checkpoint: MaxText weights to start from (`models.convert_to_maxtext`).

    Raises:
      CourseError: a checkpoint cannot be read, a reward is unknown, or a prompt is too long.
    """
    directory = Path(directory).resolve()
    tokenizer = models.load_tokenizer(recipe.model)
    width = prompt_length(recipe, tokenizer, problems)
    total = width + recipe.rollout.max_completion_length
    load = functools.partial(models.load_actor, recipe.model, checkpoint, total, tokenizer.pad_token_id)
    actor = load()
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
        cluster = _build_cluster(recipe, directory, tokenizer, actor, reference, rollout_config, recorder)
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
    cluster.rollout.calls = cluster.actor_trainer.train_steps
    return Session(recipe, directory, tokenizer, actor, cluster, learner, rollout_config, problems, recorder, clock)


def check_first_sync(session: Session, prompts: int = 32) -> rollout.SyncCheck:
    """Did every weight arrive in the sampler, and do both sides give the same log-probabilities?

    Raises CourseError, which names the weight or the gap, when not.
    """
    rendered = [session.render(problem.question) for problem in session.problems[:prompts]]
    pad, eos = session.tokenizer.pad_token_id, session.tokenizer.eos_token_id
    calls = session.sampler.calls
    check = rollout.check_sync(
        session.sampler,
        session.actor.module,
        rendered,
        session.rollout_config,
        lambda prompt_ids, ids: models.per_token_logps(session.actor, prompt_ids, ids, pad, eos),
    )
    session.sampler.calls = calls  # the check must not change what the run samples
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
    session.clock.start()
    try:
        with models.quiet():
            session.learner.train(_batches(session, validate, validate_every))
        if validate and validate_every and session.step % validate_every == 0:
            recorder.add(session.step, validate())
        recorder.finish()
    finally:
        session.closed = True
        recorder.closed = True
    return rows


def learning_rate_schedule(recipe: Recipe) -> optax.Schedule:
    """Linear warm-up, then constant.  The first step already moves: the schedule does not start at zero."""
    training = recipe.training
    first = training.learning_rate / max(training.warmup_steps, 1)
    return optax.warmup_constant_schedule(first, training.learning_rate, training.warmup_steps)


def _build_cluster(recipe, directory, tokenizer, actor, reference, rollout_config, recorder) -> rl.RLCluster:
    import orbax.checkpoint as ocp

    training, roles = recipe.training, (rl.Role.ACTOR, rl.Role.REFERENCE, rl.Role.ROLLOUT)
    optimizer = optax.chain(
        optax.clip_by_global_norm(training.clip),
        optax.adamw(learning_rate_schedule(recipe), b1=training.b1, b2=training.b2, weight_decay=training.weight_decay),
    )
    checkpoints = directory / "checkpoints"
    try:
        return rl.RLCluster(
            actor=actor.module,
            reference=reference,
            tokenizer=tokenizer,
            cluster_config=rl.ClusterConfig(
                role_to_mesh=dict.fromkeys(roles, actor.mesh),
                role_to_logical_axis_rule=dict.fromkeys(roles, actor.config.logical_axis_rules),
                rollout_engine=functools.partial(rollout.TunixSampler, seed=recipe.seed),
                rollout_config=rollout_config,
                training_config=rl.RLTrainingConfig(
                    actor_optimizer=optimizer,
                    max_steps=training.steps,
                    eval_every_n_steps=training.steps + 1,
                    mini_batch_size=training.prompts_per_step,
                    train_micro_batch_size=training.micro_batch or training.prompts_per_step,
                    rollout_micro_batch_size=training.prompts_per_step,
                    compute_logps_micro_batch_size=training.micro_batch or training.prompts_per_step,
                    checkpoint_root_directory=str(checkpoints),
                    checkpointing_options=ocp.CheckpointManagerOptions(
                        save_interval_steps=training.checkpoint_every, max_to_keep=training.keep
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
    """Endless training batches.  Tunix skips those of restored steps itself; it reads one ahead of each step."""
    recipe = session.recipe
    batches = training_batches(
        session.problems, session.render, batch_size=recipe.training.prompts_per_step, seed=recipe.seed
    )
    for step, batch in enumerate(batches, start=1):
        done = step - 1
        if validate and every and done and done % every == 0 and done >= session.step:
            session.recorder.add(done, validate())
        yield batch


def _batch_metrics(
    sampler: rollout.TunixSampler,
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
            self.add(step, {TUNIX_METRICS[name]: float(value)})
        self._write_whole_rows()

    def close(self) -> None:
        """Tunix calls this when training ends.  The last row still waits for its validation."""

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
            if self.on_step:
                self.on_step(row)
