"""`grpo evaluate`: a model, or completions from elsewhere, on a split of problems."""

import datetime
import functools
import hashlib
import reprlib
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_train.cli.options import (
    AsJson,
    NoIsolation,
    Overrides,
    Overwrite,
    RecipePath,
    commands,
    finish,
    isolate,
    log_for,
)
from grpo_train.recipes import Recipe, load_recipe

# Below this accuracy the tiny model's share is explained: what it solves of other problems, it solves by chance.
EXPECTED_OF_TINY = 0.05
TINY_ON_OTHERS = (
    "note: this is the course's tiny model. It has 0.8 million weights and has read nothing but the course's own word "
    "problems (problems.source=words), so it solves next to none of these. A model that can: make real-model, then "
    "recipes/smollm2-135m-cpu.yaml"
)

app = commands()


@app.command()
def evaluate(
    recipe: RecipePath,
    overrides: Overrides = None,
    split: Annotated[str, typer.Option(help="test or validation")] = "test",
    output: Annotated[Path | None, typer.Option(help="Write one JSON line per completion to this file.")] = None,
    overwrite: Overwrite = False,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Samples per problem, for pass@k and maj@k; default: the recipe's.")
    ] = None,
    completions: Annotated[
        Path | None,
        typer.Option(
            help="Grade the completions in this file: JSON lines with a text or chat messages as completion, response "
            "or messages; samples of lm-eval; output of OpenAI's batches, with problem ids as custom_id."
        ),
    ] = None,
    thinking: Annotated[
        bool,
        typer.Option(
            "--thinking",
            help="The prompts of these completions ended in an open <think>, so what is cut off before </think> is "
            "wrong. For rows without the prompt as it was sent; others say it themselves.",
        ),
    ] = False,
    probe: Annotated[
        Literal["partial-prompt"] | None, typer.Option(help="Has it seen the problems? It completes their questions.")
    ] = None,
    no_isolation: NoIsolation = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate the recipe's model (another with model.path=…) on all problems of a split: greedy completions.

    With --output, an interrupted evaluation goes on where it stopped: run the same command again.

    With --probe partial-prompt the model gets the first 60 % of each question, without a chat around it, and what it
    goes on with is compared with the rest.  Give it problems that it cannot have seen, too (problems.source=words).
    """
    resolved = load_recipe(recipe, overrides or ())
    isolate(resolved, no_isolation, log_for(as_json))
    if probe and (samples or completions):
        raise CourseError("--probe is about the model's greedy completions; leave out --samples and --completions")
    if thinking and not completions:
        raise CourseError("--thinking is about the rows of --completions; a model's own prompts say it themselves")
    if output and output.exists() and not overwrite:
        raise CourseError(f"{output} exists; add --overwrite to replace it, or choose another --output")
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)  # an error comes before the first answer

    from grpo_lib import contamination, evaluation
    from grpo_lib.problems import load_problems

    problems = load_problems(resolved.problems, split)
    samples = None if probe else samples or resolved.evaluation.samples or None
    if completions:
        source = _from_file(completions, resolved, problems, samples, thinking)
    else:
        source = _from_model(resolved, samples, _date(output), in_chat=not probe)
    if probe:
        problems = contamination.partial_prompts(problems)
        source |= {"render": None, "settings": source["settings"] | {"probe": probe}}
    result = evaluation.evaluate(
        problems=problems, path=output, batch_size=resolved.evaluation.batch_size, label=split,
        progress=sys.stderr.isatty(), samples=samples or 1, overwrite=overwrite, **source,
    )  # fmt: skip
    failures = [record["error"] for record in result.records if record["error"]]
    if probe:
        seen = contamination.summary(result) | {"failures": len(failures)}
        return finish(seen, as_json, _seen(seen))
    summary = result.summary() | {"failures": len(failures)}
    text = _verdict(summary, result.records, failures)
    if not completions and summary["accuracy"] < EXPECTED_OF_TINY and _is_tiny_on_others(resolved):
        text += f"\n{TINY_ON_OTHERS}"
    finish(summary, as_json, text)


def _date(output: Path | None) -> datetime.date:
    """For a chat template that writes the date: today's, or that of the evaluation that goes on."""
    from grpo_lib.eval_cache import settings_of_partial

    began = settings_of_partial(output).get("date") if output else None
    try:
        return datetime.date.fromisoformat(began) if began else datetime.date.today()
    except (TypeError, ValueError):
        raise CourseError(
            f"{output}.partial: the date {reprlib.repr(began)} is none; remove it to start again"
        ) from None


def _from_model(recipe: Recipe, samples: int | None, date: datetime.date, in_chat: bool) -> dict[str, Any]:
    """Arguments of evaluation.evaluate for the recipe's own model; `in_chat`: its prompts are the recipe's."""
    from grpo_train.engines import model_files

    environment.require_free_chips()
    model_files.require_engine(recipe.rollout.engine)
    # A path may hold other weights tomorrow.
    weights = model_files.contents(model_files.model_directory(recipe.model))

    from grpo_train import pipeline
    from grpo_train.engines import prompt_check, tokens

    prompts = tokens.Renderer(recipe.prompts, tokens.load_tokenizer(recipe.model), date)
    if in_chat:
        prompt_check.check_prompts(recipe, prompts)
    sampling = recipe.evaluation_sampling if samples else {}
    generate, render = pipeline.standalone_generate(recipe, prompts)
    settings = {
        "max_completion_length": recipe.rollout.max_completion_length,
        "weights": weights,
        **sampling,
    }
    if in_chat and prompts.writes_date:
        settings["date"] = date.isoformat()
    return {
        "generate": generate,
        "sampled": functools.partial(generate, **sampling) if samples else None,
        "render": render,
        "model": recipe.model.path,
        "settings": settings,
    }


def _is_tiny_on_others(recipe: Recipe) -> bool:
    """Whether the tiny model, or what was trained from it, is asked for something else than the course's problems."""
    from grpo_train.engines import model_files

    others = any(source.source not in ("words", "code") for source in recipe.sources)
    return others and model_files.is_tiny(recipe.model)


def _from_file(path: Path, recipe: Recipe, problems: list, samples: int | None, thinking: bool) -> dict[str, Any]:
    """The same for saved completions, which were made with the recipe's prompts or name their own.

    `thinking`: whether prompts that the file does not have ended in an open <think>.

    Raises CourseError unless the file has as many per problem as are graded, and that of half of the problems at least.
    """
    from grpo_lib import completions_file

    def prefix_of(problem: Any) -> str:
        return (problem.prompts or recipe.prompts).completion_prefix

    saved = completions_file.saved_completions(path, problems, prefix_of, thinking)
    answered = len({problem for problem, _ in saved.found})
    if 2 * answered < len(problems):
        raise CourseError(
            f"{path} has completions of {answered:,} of the {len(problems):,} problems, and the others would count as "
            "wrong; give the problems.… keys that it was made with, such as problems.test"
        )
    if saved.most != (samples or 1) + bool(samples and saved.greedy):
        fitting = "leave out --samples" if saved.most == 1 else f"add --samples {saved.most - saved.greedy}"
        raise CourseError(f"{path} has up to {saved.most} completions per problem; {fitting}, so that all are graded")
    return {
        "generate": saved,
        "sampled": saved if samples and saved.greedy else None,
        "settings": {"completions": hashlib.sha256(path.read_bytes()).hexdigest()},
    }


def _verdict(summary: dict[str, Any], records: list[dict[str, Any]], failures: list[str]) -> str:
    """What `evaluate` prints."""
    low, high = summary["interval"]
    solved = "solved" if any(record["greedy"] for record in records) else "solved, averaged over samples"
    lines = []
    if failures:
        lines.append(f"{len(failures)} of {len(records)} completions failed and count as wrong; first: {failures[0]}")
    strict = f"{summary['accuracy']:.1%} of all {summary['n']} problems {solved}"
    interval = f"(95 % interval {low:.1%} to {high:.1%})"
    lenient = f"last number right {summary['lenient_accuracy']:.1%}, within 10 % {summary['partial_accuracy']:.1%}"
    form = f"format {summary['format_accuracy']:.1%}, truncated {summary['truncated']:.1%}"
    lines.append(f"{strict} {interval}; {lenient}, {form}")
    if "samples" in summary:
        at = "".join(f", pass@{k} {rate:.1%}" for k, rate in summary["pass_at_k"].items())
        lines.append(
            f"sampled {summary['samples']} times: {summary['sampled_accuracy']:.1%} right{at}, "
            f"maj@{summary['samples']} {summary['maj_at_k']:.1%}"
        )
    return "\n".join(lines)


def _seen(summary: dict[str, Any]) -> str:
    """What `evaluate --probe` prints."""
    low, high = summary["interval"]
    return (
        f"{summary['exact']:.1%} of {summary['n']} questions completed word for word (95 % interval {low:.1%} to "
        f"{high:.1%}); on average {summary['words']:.1%} of the rest's words before the first other one"
    )
