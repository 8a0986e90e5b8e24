"""The evaluation loop: problems and a `generate` function in, one record per problem and sample out.

    before = evaluate(generate, problems, render=render, path=run / "evals/before.jsonl", label="before")
    ...
    summary = summarize(before, after, steps=60)

Every problem counts: a completion that is empty, cut short, or makes the grader raise is a wrong answer, never a
missing one. A finished file is read, and no completion is generated again: the model that made before.jsonl no longer
exists once training has begun. (Its completions are graded again when they are read: see records.) An interrupted
evaluation goes on where it stopped (grpo_lib/eval_cache.py).

Two arguments of `evaluate` need a word. `sampled` is a second `generate`, which draws its completions at a temperature
where the first one is greedy: one evaluation then has the greedy accuracy, pass@k and maj@k. `settings` is a JSON
object with whatever else decides a completion (temperature, length limit, weights): an evaluation is continued, and its
file read, only with the same settings, so that completions of two kinds never mix.
"""

import inspect
import json
import os
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from grpo_lib.common.errors import CourseError
from grpo_lib.eval_cache import Batch, EvalCache, Task, digest
from grpo_lib.problems.types import Problem
from grpo_lib.prompts import opens_thoughts
from grpo_lib.records import CLOSE, VERDICTS, EvalRun, Generation, Record, grade, summarize, wrong

__all__ = ["CLOSE", "VERDICTS", "EvalRun", "Generation", "evaluate", "grade", "summarize"]

Generate = Callable[..., Sequence[Generation | str]]


def evaluate(
    generate: Generate,
    problems: Sequence[Problem],
    *,
    sampled: Generate | None = None,
    samples: int = 1,
    render: Callable[..., str] | None = None,
    path: str | os.PathLike | None = None,
    batch_size: int = 256,
    progress: bool = True,
    label: str = "",
    model: str | None = None,
    settings: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> EvalRun:
    """Generate completions for all problems and grade them.

    Args:
      generate: takes at most `batch_size` prompts and returns as many completions, in their order. The longest prompts
        come first: prompts of a batch have similar lengths, so padding is small, and an out-of-memory error comes at
        once.
        A keyword `seed` of the function receives a number that depends on the batch alone, so that samples do not
        depend on how often the process was restarted; a keyword `tasks` receives the (problem id, sample number) of
        each prompt.
      sampled: a second `generate`, one that samples. Then sample 0 of each problem is the greedy completion of
        `generate`, and samples 1 … `samples` come from this one.
      samples: completions per problem from `sampled`, or from `generate` without it. Several from `generate` make sense
        only if it samples, and are recorded as sampled; a single one is recorded as greedy.
      render: turns a question into the prompt (`Problem.prompt`); without it the question itself is sent. A
        `generate` that sends more than its prompts has a method `sent(prompt, task)`, which returns what the record
        keeps as the prompt.  A `render` whose prompts end with the beginning of the completion has a method
        `completion_prefix` (`Problem.completion_prefix`), and so may a `generate`, by task: that text is put in front
        of each completion before it is graded.
      path: file for the records. If it exists it is loaded and nothing is generated. Until it is complete, finished
        batches are kept in `<path>.partial`.
      label: shown on the progress bar.
      model: what is evaluated, such as "step 30"; kept in every record, and a file of another model is refused.
      settings: whatever else decides the completions, as JSON. Their hash is kept in every record; a file with other
        settings is refused (one without any is not).
      overwrite: evaluate again although the file exists; the old one stays until the new one is complete.

    Returns:
      EvalRun, in the order of `problems`: `samples` records of each, after the greedy one if there is `sampled`. Its
      `seconds` are the sum over the batches, also those of earlier processes if it was interrupted, without a batch
      that was lost; None if the finished file was read.

    Raises:
      CourseError: no problems, two with one id, files that were made for other problems, another model or other
        settings, or a `generate` that returns another number of completions than it was given prompts.
    """
    _require_problems(problems, batch_size, samples)
    # By sample number: whether it is greedy, and the function that writes it.
    writers = [(True, generate)] + [(False, sampled)] * samples if sampled else [(samples == 1, generate)] * samples
    tasks = []
    for problem in problems:
        for sample, (greedy, writer) in enumerate(writers):
            tasks.append(_task(problem, sample, greedy, writer, render))
    settings = json.loads(json.dumps(settings, allow_nan=False))  # as they come back from a file: a tuple is a list
    settings_hash = digest(settings)
    cache = EvalCache(Path(path), tasks, model, settings) if path is not None else None
    if cache and cache.path.exists() and not overwrite:
        return cache.load()

    done = cache.finished_batches(overwrite) if cache else []
    records = {}
    for batch in done:
        records |= {(record["id"], record["sample"]): record for record in batch.records}
    missing = [task for task in tasks if task.key not in records]
    with tqdm(
        total=len(tasks), initial=len(records), desc=label or "evaluate", unit="completion", disable=not progress
    ) as bar:
        for batch in _plan(missing, batch_size):
            started = time.perf_counter()
            _, writer = writers[batch[0].sample]  # a batch is greedy or sampled as a whole
            outputs = _ask(writer, batch)
            fresh = [_record(task, model, settings_hash, output) for task, output in zip(batch, outputs, strict=True)]
            finished = Batch(fresh, time.perf_counter() - started)
            done.append(finished)
            if cache:
                cache.add(finished)
            records |= {task.key: record for task, record in zip(batch, fresh, strict=True)}
            if progress:
                bar.set_postfix_str(_accuracy_so_far(records), refresh=False)
            bar.update(len(batch))
    run = EvalRun([records[task.key] for task in tasks], sum(batch.seconds for batch in done))
    if cache:
        cache.finish(run)
    return run


def _require_problems(problems: Sequence[Problem], batch_size: int, samples: int) -> None:
    """Raise CourseError where nothing can be evaluated, or before and after could not be paired."""
    if batch_size < 1 or samples < 1:
        raise CourseError(f"batch_size and samples must be at least 1, got {batch_size} and {samples}")
    if not problems:
        raise CourseError("there are no problems to evaluate; ask for at least one")
    if len({problem.id for problem in problems}) < len(problems):
        raise CourseError("two problems have the same id; before and after could not be paired")


def _task(problem: Problem, sample: int, greedy: bool, generate: Generate, render: Callable[..., str] | None) -> Task:
    prompt = problem.prompt(render) if render else problem.question
    key = (problem.id, sample)
    sent = generate.sent(prompt, key) if hasattr(generate, "sent") else prompt
    own = getattr(generate, "completion_prefix", None)
    prefix = own(key) if own else problem.completion_prefix(render)
    return Task(problem, prompt, sent, sample, greedy, prefix)


def _plan(tasks: list[Task], batch_size: int) -> list[list[Task]]:
    """The batches, greedy ones first.  Without the tasks of the first batches they are the other batches, so that an
    evaluation that goes on has those of one that was never interrupted, unless `batch_size` changed."""
    batches = []
    for greedy in (True, False):
        # The sort is stable: samples of one problem stay together.
        kind = sorted((task for task in tasks if task.greedy is greedy), key=lambda task: -len(task.prompt))
        batches += [kind[start : start + batch_size] for start in range(0, len(kind), batch_size)]
    return batches


def _ask(generate: Generate, batch: list[Task]) -> list[Any]:
    """The completions of one batch; `seed` and `tasks` go to a `generate` that has these keywords."""
    seed = zlib.crc32(f"{batch[0].problem.id} {batch[0].sample}".encode()) >> 1  # 31 bits: fits every sampler
    extra = {"seed": seed, "tasks": [task.key for task in batch]}
    parameters = inspect.signature(generate).parameters  # `**anything` asks for neither
    extra = {name: value for name, value in extra.items() if name in parameters}
    outputs = list(generate([task.prompt for task in batch], **extra))
    if len(outputs) != len(batch):
        raise CourseError(
            f"generate returned {len(outputs)} completions for {len(batch)} prompts; it must return one for each"
        )
    return outputs


def _record(task: Task, model: str | None, settings_hash: str | None, output: Any) -> Record:
    """One line of the evaluation file; non-string outputs are graded as wrong."""
    if isinstance(output, str):
        output = Generation(output, None, False)
    elif not isinstance(output, Generation):
        output = Generation("", None, False, f"generate returned {type(output).__name__} instead of a completion")
    # As it comes back from a UTF-8 file, without lone surrogates: what is graded is what is stored.
    text = task.completion_prefix + output.text.encode("utf-8", errors="replace").decode()
    if output.error is not None:
        grades = wrong(output.error)
    else:
        grades = grade(text, task.problem.answer, task.problem.kind, thinking=opens_thoughts(task.sent))
    record = {
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
        "kind": task.problem.kind,
    }
    if task.problem.task:
        record["task"] = task.problem.task
    if task.completion_prefix:  # the completion begins with it, and the model wrote the rest
        record["completion_prefix"] = task.completion_prefix
    record |= {name: grades[name] for name in VERDICTS}
    record["truncated"] = bool(output.truncated)
    record["tokens"] = None if output.tokens is None else int(output.tokens)  # None: generate did not count
    record["error"] = grades["error"]
    record["steps"] = task.problem.steps
    if settings_hash:
        record["settings"] = settings_hash
    return record


def _accuracy_so_far(records: dict[Any, Record]) -> str:
    """Strict accuracy and its interval, for the bar."""
    accuracy, (low, high) = EvalRun(list(records.values())).accuracy()
    return f"{100 * accuracy:.1f} % ({100 * low:.1f}–{100 * high:.1f})"
