"""End-to-end run: convert, evaluate, train, evaluate, export; the notebooks take the same steps one by one.

    ready = checks.check(recipe, run=directory)      # refuses what cannot run
    run(ready, directory)

    convert (-> cold start) -> session -> check the first sync -> evaluate before -> train -> evaluate after
    -> export -> summary

Every step keeps what is there already, so a run that was interrupted goes on where it stopped. In a multi-process run
all processes take every step together, and process 0 gets what a step returns.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_lib import evaluation
from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import read_json_if_exists, write_json_atomic
from grpo_lib.problems import describe_filtering, load_problems
from grpo_lib.prompts import asks_for_tags, cut_while_thinking, opens_thoughts
from grpo_lib.records import reward_means
from grpo_lib.rewards import get_rewards
from grpo_train import cold_start, training  # first: they prepare the environment before JAX is imported

# isort: split

import jax

from grpo_train.checks import Ready
from grpo_train.engines import conversion, maxtext_model
from grpo_train.engines.model_files import is_tiny, require_engine
from grpo_train.engines.optimizer import nearest_moves
from grpo_train.engines.tokens import Renderer, load_tokenizer
from grpo_train.export import export_policy
from grpo_train.recipes import Recipe, batch_plan
from grpo_train.recipes.continuing import memory_remedies
from grpo_train.runs import health_checks, multihost, tracking
from grpo_train.runs.checkpoints import checkpoint_root
from grpo_train.runs.metric_glossary import TASK_METRIC, read_metrics
from grpo_train.runs.preemption import PreemptionHandler
from grpo_train.runs.run_directory import base_of, has_base
from grpo_train.runs.run_files import read_environment


def require_shared_folders(recipe: Recipe, directory: Path) -> None:
    """Raise CourseError, in all processes, unless they share the run directory and the folder of its checkpoints."""
    multihost.require_shared(directory, "--runs on a disk that all hosts share")
    if recipe.training.checkpoints is not None:
        multihost.require_shared(
            checkpoint_root(recipe.training, directory),
            "training.checkpoints on a disk that all hosts share, or in a bucket, gs://BUCKET/FOLDER",
        )


def require_same_step(recipe: Recipe, directory: Path) -> None:
    """Raise CourseError where a run goes on with other devices than it began with, and its recipe counts the prompts of
    a step by them."""
    found = jax.device_count()
    began = len(read_environment(directory).get("devices", [])) or found
    named = recipe.hardware.accelerator or recipe.hardware.trainer_devices  # then recipes.continuing compares the plans
    if recipe.training.prompts_per_step_per_device and not named and began != found:
        raise CourseError(
            f"the run began on {began} devices, and JAX finds {found} here: with training.prompts_per_step_per_device "
            "a step would have other prompts; continue it on as many, or start a new run with --run NAME"
        )


def convert(recipe: Recipe, directory: Path) -> Path:
    """The base model as a MaxText checkpoint, inside the run or where its `--base` is; done once."""
    return conversion.convert_to_maxtext(recipe.model, base_of(directory))


def starting_checkpoint(recipe: Recipe, directory: Path) -> Path:
    """Where the MaxText checkpoint is that GRPO starts from, once `start` has made it."""
    if recipe.training.cold_start:
        return directory / "checkpoints" / "start" / "0" / "items"
    return convert(recipe, directory)


def start(ready: Ready, directory: Path, log: Callable[[str], None] = print) -> Path:
    """Make the MaxText checkpoint that GRPO starts from: the base, or with `training.cold_start` the base after it.

    Then the base itself is evaluated, too, into evals/base.jsonl.
    """
    recipe, taught = ready.recipe, ready.taught
    base = convert(recipe, directory)
    if not taught:
        return base
    started = directory / "checkpoints" / "start"
    if (started / "0" / "items").exists():
        return started / "0" / "items"
    generate, render = standalone_generate(recipe, ready.render)
    tested = evaluation.evaluate(
        generate, load_problems(recipe.problems, "test"), render=render, path=directory / "evals" / "base.jsonl",
        batch_size=recipe.evaluation.batch_size, label="base", model="base",
    )  # fmt: skip
    log(f"base: {tested.summary()['accuracy']:.1%}; cold start: fine-tuning on {len(taught)} worked solutions")
    del generate  # and the model that it asks: the cold start loads its own
    environment.release_freed_memory()
    spaces = recipe.training.cold_start_spaces
    examples = [cold_start.example(problem, render, spaces) for problem in taught]
    weights = cold_start.fine_tune(ready, examples, base, started)
    environment.release_freed_memory()  # of its model and optimizer, before the run loads its own
    return weights


def start_session(ready: Ready, directory: Path, log: Callable[[str], None] = print) -> training.Session:
    """A training session (training.build_session) on the run's converted base, or after a cold start.

    Args:
      ready: what checks.check has found.
      log: called with the memory that a CPU needs, the number of filtered problems, if any
        (`rollout.overlong_prompts`), and about a damaged checkpoint.
    """
    recipe = ready.recipe
    if ready.memory:
        log(f"memory: the run needs {ready.memory}")
    if rows := describe_filtering(recipe.problems):
        log(rows)
    session = training.build_session(ready, directory, start(ready, directory, log), log)
    if recipe.model.trainer_dtype == "bfloat16" and recipe.training.rounding == "nearest":
        applied, moved = nearest_moves(session.actor.weights(), recipe.training.learning_rate)
        log(
            f"warning: of steps of {recipe.training.learning_rate:g} the bfloat16 weights take {applied:.1%} "
            f"(update_applied), and {moved:.1%} of them move; set training.rounding=stochastic or "
            "model.weight_dtype=float32"
        )
    if recipe.grpo.watch_kl and recipe.grpo.beta:
        log(
            f"grpo.watch_kl={recipe.grpo.watch_kl} changes nothing: with grpo.beta={recipe.grpo.beta:g} the KL is "
            "measured in every step"
        )
    if ready.too_long:
        log(
            f"filtered out of training: {ready.too_long} of {ready.too_long + len(ready.problems)} problems, with "
            f"prompts longer than {recipe.rollout.max_prompt_length} tokens"
        )
    return session


def evaluate(session: training.Session, which: str, progress: bool = True) -> evaluation.EvalRun | None:
    """Evaluation of the test problems, `which` being before or after: greedy, and sampled where the recipe says so.

    A finished one is read, not repeated. Its numbers go to TensorBoard and W&B once, and its seconds, which are no part
    of the records, to `evals/<which>.json`.

    Raises CourseError when the moment has passed: before any step was taken, or after the last.
    """
    recipe = session.recipe
    path = session.directory / "evals" / f"{which}.jsonl"
    steps, samples = recipe.training.steps, recipe.evaluation.samples

    def work() -> evaluation.EvalRun:
        if not path.exists():
            if which == "before" and session.step > 0:
                raise CourseError(
                    f"{path} is missing, and the policy has trained {session.step} steps already; start a new run"
                )
            if which == "after" and session.step < steps:
                raise CourseError(f"the policy has trained {session.step} of {steps} steps; train it first")
            path.with_suffix(".json").unlink(missing_ok=True)
        return evaluation.evaluate(
            session.generate,
            load_problems(recipe.problems, "test"),
            sampled=session.sample if samples else None,
            samples=samples or 1,
            settings=recipe.evaluation_sampling if samples else None,
            render=session.render,
            path=path,
            batch_size=recipe.evaluation.batch_size,
            progress=progress,
            label=which,
            # Not session.step: a finished before.jsonl is read again when training is over.
            model=f"step {0 if which == 'before' else steps}",
        )

    with _explain_full_memory(recipe):
        run = session.run_on_main(work)
    if run is not None:
        _log_once(recipe, session.directory, which, run)
    return run


def _explain_full_memory(recipe: Recipe) -> contextlib.AbstractContextManager[None]:
    """Of an evaluation or a validation."""
    smaller = recipe.evaluation.batch_size // 2
    return training.explain_full_memory(
        "a batch of an evaluation", [f"evaluation.batch_size={smaller}"] if smaller else []
    )


def _log_once(recipe: Recipe, directory: Path, which: str, run: evaluation.EvalRun) -> None:
    """Keep the seconds of an evaluation, and log it unless that is done."""
    file, kept = directory / "evals" / f"{which}.json", _saved_log(directory, which) or {"seconds": run.seconds}
    if "logged" not in kept:
        write_json_atomic(file, kept)
        row = tracking.evaluation_row(
            0 if which == "before" else recipe.training.steps,
            run.summary() | _reward_and_seconds(recipe, directory, which, run),
        )
        before = _saved_log(directory, "before").get("logged", {})
        tracking.log_evaluation(
            recipe.tracking, directory, {"before": before, which: row}, recipe.model_dump(mode="json")
        )
        write_json_atomic(file, kept | {"logged": row})


def _saved_log(directory: Path, which: str) -> dict[str, Any]:
    """What `_log_once` has written: the seconds of an evaluation, and what was logged; empty before that."""
    return read_json_if_exists(directory / "evals" / f"{which}.json")


def _reward_and_seconds(recipe: Recipe, directory: Path, which: str, run: evaluation.EvalRun) -> dict[str, Any]:
    """The mean reward of the counted completions, in all and by function, and the seconds or None."""
    functions: list[Any] = get_rewards(recipe.rewards)
    names = [function.__name__ for function in functions]
    means = dict(zip(names, reward_means(run.counted, functions), strict=True))
    return {"reward": sum(means.values()), "rewards": means, "seconds": _saved_log(directory, which).get("seconds")}


def validation(session: training.Session) -> Callable[[], dict[str, float]]:
    """For training.train(validate=...): greedy accuracy on problems held out of train."""
    problems = load_problems(session.recipe.problems, "validation")

    def validate() -> dict[str, float]:
        with _explain_full_memory(session.recipe):
            run = evaluation.evaluate(
                session.generate, problems, render=session.render, progress=False,
                batch_size=session.recipe.evaluation.batch_size,
            )  # fmt: skip
        summary = run.summary()
        return {
            "validation_accuracy": summary["accuracy"],
            "validation_lenient": summary["lenient_accuracy"],
            **{
                TASK_METRIC.format(task, "validation_accuracy"): part.accuracy()[0]
                for task, part in run.by_task().items()
            },
        }

    return lambda: session.run_on_main(validate) or {}


def write_summary(recipe: Recipe, directory: Path, wall_seconds: float | None = None) -> dict[str, Any]:
    """summary.json from the evaluations and metrics.jsonl."""
    phases = ("base", "before", "after") if recipe.training.cold_start else ("before", "after")
    runs = {phase: evaluation.EvalRun.load(directory / "evals" / f"{phase}.jsonl") for phase in phases}
    rows = read_metrics(directory / "metrics.jsonl")
    summary = evaluation.summarize(
        **runs,
        wall_seconds=wall_seconds,
        train_seconds=sum(row["seconds"] for row in rows),
        steps=int(rows[-1]["step"]),
    )
    for which in ("before", "after"):
        summary[which] |= _reward_and_seconds(recipe, directory, which, runs[which])
    write_json_atomic(directory / "summary.json", summary)
    return summary


def run(
    ready: Ready,
    directory: Path,
    on_step: Callable[[dict], None] = lambda _: None,
    log: Callable[[str], None] = lambda _: None,
    progress: bool = True,
    preemption: PreemptionHandler | None = None,
) -> dict[str, Any] | None:
    """A run from the first step to summary.json and the export; what is done already is not done again.

    Args:
      ready: what checks.check has found.
      on_step: called with each row of metrics.jsonl.
      log: called with a sentence about each stage, and with early warnings (health_checks).
      preemption: a SIGTERM ends the run after the step under way, with `Interrupted`.

    Returns the content of summary.json; None in all processes but the first.
    """
    recipe = ready.recipe
    clock = _Clock(directory, log)
    preemption = preemption or PreemptionHandler()

    def stop() -> bool:
        stopping = multihost.any_process(preemption.requested)  # then all of them stop, or none
        preemption.requested |= stopping
        return stopping

    # 1. Refuse what the other processes of this run would not allow, and warn.
    require_shared_folders(recipe, directory)
    require_same_step(recipe, directory)
    if recipe.training.warmup_steps >= recipe.training.steps:
        log(
            f"warning: training.warmup_steps={recipe.training.warmup_steps} is not less than the steps: the learning "
            "rate never reaches its peak; take fewer"
        )
    if _tags_are_untold(ready):
        log(
            "warning: answers are looked for in <answer> tags, and neither prompts.system nor prompts.user asks for "
            "them: set prompts.system=default, or name the tags in your own words"
        )
    if not has_base(base_of(directory)):
        log("converting the base model to MaxText")

    # 2. Convert, start cold if the recipe says so, and build a session on that: actor, sampler, learner.
    session = start_session(ready, directory, log)
    log(f"{training.describe_devices(session)}\n{batch_plan.table(session.plan, recipe.batch_given)}")

    # 3. Check the first sync: the sampler has the actor's weights, and both compute the same model.
    _check_sampler(session, log)

    # 4. Evaluate before: evals/before.jsonl.
    if before := evaluate(session, "before", progress):
        log(f"before: {_rates(before)}")
        _warn_of_cut_thinking(before, log)

    # 5. Train: metrics.jsonl and checkpoints.
    if session.step:
        log(f"continuing after step {session.step} of {recipe.training.steps}")
    alerts = _NewAlerts(session, log)

    def each_step(row: dict) -> None:
        if multihost.is_main_process():
            clock.save()
        on_step(row)
        alerts.log_new()

    with preemption.defer():
        training.train(session, each_step, validation(session), recipe.training.validate_every, stop)
        preemption.progress = f"after step {session.step} of {recipe.training.steps}, which is saved"

    log(
        f"training completed: {session.step} of {recipe.training.steps} steps; {directory / 'metrics.jsonl'}, "
        f"{directory / 'tensorboard'}, checkpoints in {session.checkpoints}"
    )

    # 6. Evaluate after: evals/after.jsonl.
    if after := evaluate(session, "after", progress):
        log(f"after: {_rates(after)}")

    # 7. Export and compare: export/, summary.json.
    log(f"exported to {export_policy(session, last=True)}")
    return write_summary(recipe, directory, clock.save()) if multihost.is_main_process() else None


def _tags_are_untold(ready: Ready) -> bool:
    """Whether a model is graded by tags that nothing tells it of.  Not refused, since a model may know them: the tiny
    one does, and a cold start or an own fine-tuning teaches them."""
    recipe = ready.recipe
    if recipe.training.cold_start or is_tiny(recipe.model):
        return False
    kinds = {(problem.kind, problem.prompts or recipe.prompts) for problem in ready.problems}
    return any(kind == "tagged" and not asks_for_tags(prompts) for kind, prompts in kinds)


def _check_sampler(session: training.Session, log: Callable[[str], None]) -> None:
    """Refuse a sampler that differs from the trainer, and warn where it leaves out tokens."""
    recipe = session.recipe
    with training.explain_full_memory("the check of the first sync", memory_remedies(recipe, session.plan)):
        check = training.check_first_sync(session)
    log(
        f"all {check.weights} weights arrived, and sampler and trainer agree: "
        f"mean gap {check.mean_gap:.1e} over {check.tokens} tokens"
    )
    left_out = training.share_left_out(session)
    if left_out is not None:
        log(
            f"warning: rollout.top_k={recipe.rollout.top_k or 'null'} and top_p={recipe.rollout.top_p:g} leave out "
            f"{left_out:.2%} of the probability where a token is sampled, on average; the loss is of the whole "
            "distribution, so the gradient is biased; set them to null and 1, and it is not"
        )


def _warn_of_cut_thinking(run: evaluation.EvalRun, log: Callable[[str], None]) -> None:
    cut = sum(cut_while_thinking(record["completion"], opens_thoughts(record["prompt"])) for record in run.counted)
    if cut:
        log(
            f"warning: {cut} of {len(run.counted)} completions end inside <think> and count as wrong; raise "
            "rollout.max_completion_length, or set prompts.thinking=false where the chat template has that choice"
        )


# Share of the first step's completions that are cut, from which on it is said.
CUT_IN_FIRST_STEP = 0.05


class _Clock:
    """The seconds of a run, over all its processes; those of one that is killed count up to its last step."""

    def __init__(self, directory: Path, log: Callable[[str], None]):
        self.file = directory / "seconds.json"
        self.before = _seconds_before(directory, log)
        self.started = time.perf_counter()

    def save(self) -> float:
        """Write the seconds so far, and return them."""
        total = self.before + time.perf_counter() - self.started
        write_json_atomic(self.file, {"wall_seconds": total})
        return total


class _NewAlerts:
    """Logs each early warning (health_checks) once: a row comes again when its validation joins it."""

    def __init__(self, session: training.Session, log: Callable[[str], None]):
        self.session, self.log = session, log
        self.logged: set[tuple[int, str]] = set()

    def log_new(self) -> None:
        rows = self.session.recorder.rows
        if rows and (cut := _cut_in_first_step(rows[-1], self.session.recipe)):
            self.alert(health_checks.Alert(1, "cut in the first step", cut))
        for alert in health_checks.new_alerts(rows):
            self.alert(alert)

    def alert(self, alert: health_checks.Alert) -> None:
        if (alert.step, alert.kind) not in self.logged:
            self.logged.add((alert.step, alert.kind))
            self.log(f"warning: {alert}")


def _cut_in_first_step(row: dict[str, Any], recipe: Recipe) -> str | None:
    """What to say of the first step where many completions have no end, before hours are spent on such ones."""
    limit = recipe.rollout.max_completion_length
    share = row.get("completions/clipped_ratio") or 0.0
    if row.get("step") != 1 or share < CUT_IN_FIRST_STEP:
        return None
    other = "" if recipe.grpo.mask_truncated else ", or leave them out of the loss (grpo.mask_truncated=true)"
    return (
        f"{share:.0%} of the completions are cut at {limit} tokens; take rollout.max_completion_length={2 * limit} and "
        f"look again{other}"
    )


def _seconds_before(directory: Path, log: Callable[[str], None]) -> float:
    """Seconds that earlier sessions of the run took; a damaged file costs the sum, and not the run."""
    try:
        seconds = read_json_if_exists(directory / "seconds.json").get("wall_seconds", 0.0)
    except CourseError:
        seconds = None
    if isinstance(seconds, int | float):
        return seconds
    log(f"warning: {directory / 'seconds.json'} cannot be read; the seconds of the run are counted from now")
    return 0.0


def _rates(run: evaluation.EvalRun) -> str:
    """Of an evaluation, in one line."""
    found = run.summary()
    return (
        f"{found['accuracy']:.1%} of {found['n']} problems solved; last number right {found['lenient_accuracy']:.1%}, "
        f"within 10 % {found['partial_accuracy']:.1%}, format {found['format_accuracy']:.1%}"
    )


def standalone_generate(recipe: Recipe, render: Renderer | None = None) -> tuple[Callable, Callable[..., str]]:
    """(generate, render) for the recipe's Hugging Face directory, by the loader of its rollout engine, without MaxText.

    Args: the recipe's prompts, with its tokenizer; None: that is loaded here.

    `generate` is greedy; with its keyword `temperature` it samples (see tunix_sampler.greedy_generate).
    """
    require_engine(recipe.rollout.engine)
    maxtext_model.multiply_as_exactly_as_stored(recipe.model.dtype)
    directory = maxtext_model.model_directory(recipe.model)
    render = render or Renderer(recipe.prompts, load_tokenizer(recipe.model))
    if recipe.rollout.engine == "vllm":
        from grpo_train.engines.vllm_sampler import standalone_generate as generate_with_vllm

        generate = generate_with_vllm(
            recipe.model,
            recipe.rollout.vllm,
            recipe.hardware,
            max_length=training.evaluated_length(recipe, render),
            max_completion_length=recipe.rollout.max_completion_length,
            seed=recipe.seed,
        )
    else:
        from flax import nnx

        from grpo_train.engines import tunix_models, tunix_sampler

        loaded = tunix_sampler.load_hugging_face(directory)
        module, weights = tunix_models.abstract_model(loaded.config), nnx.state(loaded)
        nnx.update(module, weights)
        generate = tunix_sampler.greedy_generate(
            lambda: (module, weights),
            render.tokenizer,
            max_completion_length=recipe.rollout.max_completion_length,
            batch_size=recipe.evaluation.batch_size,
        )
    return generate, render
