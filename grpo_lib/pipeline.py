"""The whole way of a run, in the steps that the notebooks take one by one:

    convert -> build session -> check the first sync -> evaluate before -> train -> evaluate after -> export -> summary

Every step keeps what is there already, so a run that was interrupted goes on where it stopped.  In a run of several
processes all take every step together; what a step returns, the first one gets.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_lib import evaluation, models, processes, training, warning_signs
from grpo_lib.errors import CourseError
from grpo_lib.files import read_jsonl, write_json_atomic
from grpo_lib.interruption import Notice
from grpo_lib.problems import load_problems
from grpo_lib.recipes import Recipe


def convert(recipe: Recipe, directory: Path) -> Path:
    """The base model as a MaxText checkpoint inside the run; done once."""
    return models.convert_to_maxtext(recipe.model, directory / "checkpoints" / "base")


def build_session(recipe: Recipe, directory: Path, say: Callable[[str], None] = print) -> training.Session:
    """A training session on the run's converted base, with the training problems of the recipe.

    `say` is told how many problems are left out, if any are (`rollout.overlong_prompts: skip`), and of a damaged
    checkpoint.
    """
    training.require_supported(recipe)
    problems = load_problems(recipe.problems, "train")
    session = training.build_session(recipe, directory, problems, convert(recipe, directory), say)
    if session.left_out:
        say(
            f"left out of training: {session.left_out} of {len(problems)} problems, whose prompts are longer than "
            f"{recipe.rollout.max_prompt_length} tokens"
        )
    return session


def evaluate(session: training.Session, which: str, progress: bool = True) -> evaluation.EvalRun | None:
    """Greedy evaluation of the test problems, `which` being before or after.  A finished one is read, not repeated.

    One that was interrupted goes on where it was.  Raises CourseError when the moment has passed: before any step was
    taken, or after the last.
    """
    return session.lead(lambda: _evaluate(session, which, progress))


def _evaluate(session: training.Session, which: str, progress: bool) -> evaluation.EvalRun:
    path = session.directory / "evals" / f"{which}.jsonl"
    steps = session.recipe.training.steps
    if not path.exists():
        if which == "before" and session.step > 0:
            raise CourseError(
                f"{path} is missing, and the policy has trained {session.step} steps already; start a new run"
            )
        if which == "after" and session.step < steps:
            raise CourseError(f"the policy has trained {session.step} of {steps} steps; train it first")
    return evaluation.evaluate(
        session.generate,
        load_problems(session.recipe.problems, "test"),
        render=session.render,
        path=path,
        batch_size=session.recipe.evaluation.batch_size,
        progress=progress,
        label=which,
        # Not session.step: a finished before.jsonl is read again when training is over.
        model=f"step {0 if which == 'before' else steps}",
    )


def validation(session: training.Session) -> Callable[[], dict[str, float]]:
    """For training.train(validate=...): greedy accuracy on problems held out of train."""
    problems = load_problems(session.recipe.problems, "validation")

    def validate() -> dict[str, float]:
        run = evaluation.evaluate(
            session.generate, problems, render=session.render, progress=False,
            batch_size=session.recipe.evaluation.batch_size,
        )  # fmt: skip
        summary = run.summary()
        return {"validation_accuracy": summary["accuracy"], "validation_lenient": summary["lenient_accuracy"]}

    return lambda: session.lead(validate) or {}


def export(session: training.Session) -> Path:
    """The trained policy as a Hugging Face directory, in the run's `export/`."""
    return models.export_to_hugging_face(session.actor, session.recipe.model, session.directory / "export")


def write_summary(recipe: Recipe, directory: Path, wall_seconds: float | None = None) -> dict[str, Any]:
    """summary.json from the two evaluations and metrics.jsonl."""
    before = evaluation.EvalRun.load(directory / "evals" / "before.jsonl")
    after = evaluation.EvalRun.load(directory / "evals" / "after.jsonl")
    rows = read_jsonl(directory / "metrics.jsonl")
    summary = evaluation.summarize(
        before,
        after,
        wall_seconds=wall_seconds,
        train_seconds=sum(row["seconds"] for row in rows),
        steps=int(rows[-1]["step"]),
    )
    write_json_atomic(directory / "summary.json", summary)
    return summary


def run(
    recipe: Recipe,
    directory: Path,
    on_step: Callable[[dict], None] | None = None,
    say: Callable[[str], None] = lambda _: None,
    progress: bool = True,
    notice: Notice | None = None,
) -> dict[str, Any] | None:
    """A run from the first step to summary.json and the export; arguments as for `learn`."""
    started = time.perf_counter()
    session = learn(recipe, directory, on_step, say, progress, notice)
    wall_seconds = time.perf_counter() - started
    summary = write_summary(recipe, directory, wall_seconds) if processes.is_first() else None
    say(f"exported to {export(session)}")
    return summary


def learn(
    recipe: Recipe,
    directory: Path,
    on_step: Callable[[dict], None] | None = None,
    say: Callable[[str], None] = lambda _: None,
    progress: bool = True,
    notice: Notice | None = None,
) -> training.Session:
    """Convert, evaluate, train and evaluate again, as far as that is not done yet.

    Args:
      say: receives a sentence about each stage, and early warnings (`warning_signs`).
      notice: of a SIGTERM, which ends the run at the next good moment with `Interrupted`.
    """
    notice = notice or Notice()
    say("converting the base model to MaxText")
    session = build_session(recipe, directory, say)
    check = training.check_first_sync(session)
    say(
        f"all {check.weights} weights arrived, and sampler and trainer agree: "
        f"mean gap {check.mean_gap:.1e} over {check.tokens} tokens"
    )
    if before := evaluate(session, "before", progress):
        say(f"before: {before.summary()['accuracy']:.1%} of {len(before.records)} problems")
    if session.step:
        say(f"continuing after step {session.step} of {recipe.training.steps}")
    with notice.at_a_good_moment():
        training.train(
            session,
            _watched(session, on_step, say),
            validation(session),
            recipe.training.validate_every,
            stop=functools.partial(_given_to_any, notice),
        )
    if after := evaluate(session, "after", progress):
        say(f"after: {after.summary()['accuracy']:.1%} of {len(after.records)} problems")
    return session


def _given_to_any(notice: Notice) -> bool:
    """Was this process asked to end, or another one?  Then all do."""
    if processes.any_of(notice.given()):
        notice.give()
    return notice.given()


def _watched(session: training.Session, on_step: Callable[[dict], None] | None, say: Callable[[str], None]) -> Callable:
    """`on_step`, and then what the rows so far warn of."""
    said: set[tuple[int, str]] = set()

    def watched(row: dict) -> None:
        if on_step:
            on_step(row)
        for sign in warning_signs.new_signs(session.recorder.rows):
            if (sign.step, sign.kind) not in said:
                said.add((sign.step, sign.kind))
                say(f"warning: {sign}")

    return watched


def standalone_generate(recipe: Recipe) -> tuple[Callable, Callable[[str], str]]:
    """(generate, render) for the recipe's Hugging Face directory, by the loader of its rollout engine, without MaxText.

    `generate` is greedy; with its keyword `temperature` it samples (see rollout.greedy_generate).
    """
    training.require_engine(recipe)
    directory = models.model_directory(recipe.model)
    tokenizer = models.load_tokenizer(recipe.model)

    def render(question: str) -> str:
        return training.render_with(recipe, tokenizer, question)

    if recipe.rollout.engine == "vllm":
        from grpo_lib.vllm_standalone import standalone_generate as generate_with_vllm

        asked = [problem for split in ("validation", "test") for problem in load_problems(recipe.problems, split)]
        longest = training.longest_prompt(recipe, tokenizer, asked)
        return generate_with_vllm(recipe, longest + recipe.evaluation_completion_length), render

    from flax import nnx

    from grpo_lib import rollout

    module = rollout.load_hugging_face(directory)
    weights = nnx.variables(module)
    generate = rollout.greedy_generate(
        lambda: (module, weights),
        tokenizer,
        max_completion_length=recipe.evaluation_completion_length,
        batch_size=recipe.evaluation.batch_size,
    )
    return generate, render
