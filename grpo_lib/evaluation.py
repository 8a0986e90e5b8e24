"""The evaluation loop: problems and a `generate` function in, one record per problem and sample out.

    before = evaluate(generate, problems, render=render, path=run / "evals/before.jsonl", label="before")
    ...
    summary = summarize(before, after, steps=60)

Every problem counts, whatever the model did with it: a completion that is empty, cut short, or makes the
grader raise is a wrong answer, never a missing one. A finished file is read, and nothing is asked again: the model
that made before.jsonl no longer exists once training has begun. (Its verdicts are those of today's grader: see
records.) An evaluation that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from grpo_lib import statistics
from grpo_lib.errors import CourseError
from grpo_lib.generation import Generation
from grpo_lib.journal import Journal
from grpo_lib.problems.types import Problem
from grpo_lib.records import CLOSE, VERDICTS, EvalRun, Record, grade, graded_again, summarize, wrong

__all__ = ["CLOSE", "VERDICTS", "EvalRun", "Generation", "evaluate", "grade", "summarize"]

Generate = Callable[..., Sequence[Generation | str]]


def evaluate(
    generate: Generate,
    problems: Sequence[Problem],
    *,
    sampled: Generate | None = None,
    samples: int = 1,
    render: Callable[[str], str] | None = None,
    path: str | os.PathLike | None = None,
    batch_size: int = 256,
    progress: bool = True,
    label: str = "",
    model: str | None = None,
    settings: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> EvalRun:
    """Ask for completions of all problems and grade them.

    Args:
      generate: takes at most `batch_size` prompts and returns as many completions, in their order. Prompts
        come longest first: a batch holds prompts of like length, so padding is small, and what does not fit
        in memory fails at once. (So until the end the accuracy on the bar is that of the longer problems.)
        If it has a keyword `seed`, it receives a number that depends on the batch alone, so that what is
        sampled does not depend on how often the process was restarted; if it has a keyword `tasks`, the
        (problem id, sample number) of each prompt.
      sampled: a second `generate`, one that samples. Then sample 0 of each problem is what `generate` says, the
        greedy answer, and samples 1 … `samples` are drawn with this one: greedy accuracy, pass@k and maj@k in one pass.
      samples: completions per problem by `sampled`, or by `generate` where that is all there is. Several by
        `generate` make sense only if it samples, and are recorded as sampled; a single one is recorded as greedy.
      render: turns a question into the prompt; without it the question itself is sent. A `generate` that sends more
        than its prompts has a method `sent(prompt, task)`, which says what: that is what the record keeps.
      path: where the records go when all are there. If that file exists it is loaded and nothing is asked. Until
        then finished batches are kept in `<path>.partial`: an evaluation that was stopped, in whatever way,
        asks only for the batches that it has not finished.
      label: shown on the progress bar.
      model: what answers, such as "step 30"; kept in every record, and a file of another model is refused.
      settings: whatever else decides the completions (a temperature, a limit, the weights), as JSON. Where they are
        given, their digest is kept in every record, an evaluation that was stopped goes on only with the same
        settings, and a file of others is refused; one that does not say is not.
      overwrite: evaluate anew although the file exists, which stays until the new one is whole.

    Returns:
      EvalRun, in the order of `problems`: `samples` records of each, after the greedy one if there is `sampled`.

    Raises:
      CourseError: no problems, two with one id, settings that are no JSON, files that were made for other problems,
        another model or other settings, or a `generate` that returns another number of completions than it was
        given prompts.
    """
    if batch_size < 1 or samples < 1:
        raise CourseError(f"batch_size and samples must be at least 1, got {batch_size} and {samples}")
    if not problems:
        raise CourseError("there are no problems to evaluate; ask for at least one")
    if len({problem.id for problem in problems}) < len(problems):
        raise CourseError("two problems have the same id; before and after could not be paired")
    kinds = [True] + [False] * samples if sampled else [samples == 1] * samples  # sample number -> greedy?
    tasks = [
        _task(problem, sample, greedy, sampled if sampled and not greedy else generate, render)
        for problem in problems
        for sample, greedy in enumerate(kinds)
    ]
    settings, digest = _settled(settings)
    journal = None
    if path is not None:
        journal = Journal(Path(f"{path}.partial"), _job(tasks, batch_size, model, settings))
        if Path(path).exists() and not overwrite:
            run = _load_for(path, tasks, model, digest)
            journal.remove()  # the process may have ended between the last two lines of this function
            return run

    batches = _plan(tasks, batch_size)
    done = _finished(journal, batches, overwrite) if journal else {}
    records = {task.key: record for number in done for task, record in zip(batches[number], done[number], strict=True)}
    running = _Running(kinds[0])
    running.add(records.values())
    with tqdm(
        total=len(tasks), initial=len(records), desc=label or "evaluate", unit="completion", disable=not progress
    ) as bar:
        bar.set_postfix_str(str(running))
        for number, batch in enumerate(batches):
            if number in done:
                continue
            outputs = _ask(sampled if sampled and not batch[0].greedy else generate, batch)
            fresh = [_record(task, model, digest, output) for task, output in zip(batch, outputs, strict=True)]
            if journal:
                journal.add(number, fresh)
            records |= {task.key: record for task, record in zip(batch, fresh, strict=True)}
            running.add(fresh)
            bar.set_postfix_str(str(running), refresh=False)
            bar.update(len(batch))
    run = EvalRun([records[task.key] for task in tasks])
    if journal:
        run.save(path)
        journal.remove()
    return run


@dataclass(frozen=True)
class _Task:
    """One completion to ask for."""

    problem: Problem
    prompt: str  # what `generate` receives
    sent: str  # what the model is sent
    sample: int
    greedy: bool

    @property
    def key(self) -> tuple[str, int]:
        return self.problem.id, self.sample


def _task(
    problem: Problem, sample: int, greedy: bool, generate: Generate, render: Callable[[str], str] | None
) -> _Task:
    prompt = render(problem.question) if render else problem.question
    sent = generate.sent(prompt, (problem.id, sample)) if hasattr(generate, "sent") else prompt
    return _Task(problem, prompt, _storable(sent), sample, greedy)


def _settled(settings: dict[str, Any] | None) -> tuple[dict[str, Any] | None, str | None]:
    """Settings as they come back from a file, where a tuple is a list, and a short digest of them; None for None."""
    if settings is None:
        return None, None
    try:
        settings = json.loads(json.dumps(settings, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CourseError(f"settings must be what JSON can hold, numbers and texts: {error}") from None
    return settings, hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


@dataclass
class _Running:
    """Strict accuracy so far and its interval, as the bar shows them; n counts problems, as in EvalRun.summary."""

    greedy: bool  # which records count: the greedy ones, or the sampled ones where there are no others
    right: int = 0
    graded: int = 0
    ids: set[str] = field(default_factory=set)

    def add(self, records: Iterable[Record]) -> None:
        for record in records:
            if record["greedy"] == self.greedy:
                self.right += record["strict"]
                self.graded += 1
                self.ids.add(record["id"])

    def __str__(self) -> str:
        if not self.graded:
            return ""
        rate, n = self.right / self.graded, len(self.ids)
        low, high = statistics.wilson_interval(min(rate, 1.0) * n, n)
        return f"{100 * rate:.1f} % ({100 * low:.1f}–{100 * high:.1f})"


def _plan(tasks: list[_Task], batch_size: int) -> list[list[_Task]]:
    """The batches, greedy ones first; the same whenever the evaluation is started."""
    batches = []
    for greedy in (True, False):
        # The sort is stable: samples of one problem stay together.
        kind = sorted((task for task in tasks if task.greedy is greedy), key=lambda task: -len(task.prompt))
        batches += [kind[start : start + batch_size] for start in range(0, len(kind), batch_size)]
    return batches


def _job(tasks: list[_Task], batch_size: int, model: str | None, settings: Any) -> dict[str, Any]:
    """What an evaluation is, for its journal: everything that decides its batches and its records."""
    content = json.dumps([astuple(task) for task in tasks])
    return {
        "problems, prompts or samples": hashlib.sha256(content.encode()).hexdigest(),
        "batch_size": batch_size,
        "model": model,
        "settings": settings,
    }


def _finished(journal: Journal, batches: list[list[_Task]], replace: bool) -> dict[int, list[Record]]:
    done = journal.read(replace)
    for number, records in done.items():
        wanted = [task.key for task in batches[number]] if 0 <= number < len(batches) else None
        if [(record.get("id"), record.get("sample")) for record in records] != wanted:
            raise CourseError(f"{journal.path}: batch {number} holds other problems; remove the file to begin anew")
    return {number: [graded_again(record) for record in records] for number, records in done.items()}


def _ask(generate: Generate, batch: list[_Task]) -> list[Any]:
    """The completions of one batch, from a `generate` that may want to know more than the prompts."""
    seed = zlib.crc32(f"{batch[0].problem.id} {batch[0].sample}".encode()) >> 1  # 31 bits: fits every sampler
    extra = {"seed": seed, "tasks": [task.key for task in batch]}
    wanted = _keywords(generate)
    outputs = list(generate([task.prompt for task in batch], **{k: v for k, v in extra.items() if k in wanted}))
    if len(outputs) != len(batch):
        raise CourseError(
            f"generate returned {len(outputs)} completions for {len(batch)} prompts; it must return one for each"
        )
    return outputs


def _keywords(function: Callable) -> set[str]:
    """Names of the arguments that a function takes by keyword; `**anything` does not count as taking one."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return set()
    return {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}


def _record(task: _Task, model: str | None, digest: str | None, output: Any) -> Record:
    """One line of the evaluation file; what is no completion at all counts as an empty, wrong one."""
    text, tokens, truncated, failure = "", None, False, None
    if isinstance(output, str):
        text = output
    elif isinstance(output, Generation) and isinstance(output.text, str):
        text, tokens, truncated, failure = output.text, output.tokens, bool(output.truncated), output.error
    else:
        failure = f"generate returned {type(output).__name__} in place of a completion"
    text = _storable(text)  # what is graded is what is stored
    grades = grade(text, task.problem.answer) if failure is None else wrong(_storable(str(failure)))
    return {
        "id": task.problem.id,
        "sample": task.sample,
        "greedy": task.greedy,
        "model": model,
        "question": task.problem.question,
        "solution": task.problem.solution,
        "prompt": task.sent,
        "completion": text,
        "extracted": grades["extracted"],
        "gold": task.problem.answer,
        **{name: grades[name] for name in VERDICTS},
        "truncated": truncated,
        "tokens": None if tokens is None else int(tokens),  # None: generate did not count
        "error": grades["error"],
        "steps": task.problem.steps,
        **({"settings": digest} if digest else {}),
    }


def _storable(text: str) -> str:
    """`text` as it comes back from a UTF-8 file: half of a surrogate pair, which JSON can spell, is no character."""
    return text.encode("utf-8", errors="replace").decode()


def _load_for(path: str | os.PathLike, tasks: list[_Task], model: str | None, digest: str | None) -> EvalRun:
    """The finished evaluation in `path`, in the order of `tasks`, if it is of exactly these."""
    records = {(record["id"], record["sample"]): record for record in EvalRun.load(path).records}
    remedy = "move or remove the file to evaluate anew, or use the recipe it was made with"
    wanted = [task.key for task in tasks]
    if set(records) != set(wanted):
        raise CourseError(
            f"{path}: made for other problems or another number of samples ({len(records)} records, "
            f"{len(wanted)} wanted, {len(set(wanted) & set(records))} in common); {remedy}"
        )
    for task in tasks:
        record = records[task.key]
        for what, old, new in (
            ("gold answer", record["gold"], task.problem.answer),
            ("question", record["question"], task.problem.question),
            ("prompt", record["prompt"], task.sent),
            ("way of sampling", record["greedy"], task.greedy),
        ):
            if old != new:
                raise CourseError(f"{path}: another {what} for problem {task.problem.id}; {remedy}")
        if None not in (model, record["model"]) and record["model"] != model:
            raise CourseError(f"{path}: holds the answers of {record['model']}, not of {model}; {remedy}")
        if digest and record.get("settings", digest) != digest:
            raise CourseError(f"{path}: made with other settings (a temperature, a limit, other weights); {remedy}")
    return EvalRun([records[key] for key in wanted])
