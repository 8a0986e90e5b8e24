"""The evaluation loop: problems and a `generate` function in, one record per problem and sample out.

    before = evaluate(generate, problems, render=render, path=run / "evals/before.jsonl", label="before")
    ...
    summary = summarize(before, after, steps=60)

Every problem counts, whatever the model did with it: a completion that is empty, cut short, or makes the
grader raise is a wrong answer, never a missing one. A finished file is read, not recomputed: the model that
made before.jsonl no longer exists once training has begun.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from grpo_lib import answers, statistics
from grpo_lib.errors import CourseError
from grpo_lib.files import read_jsonl, write_text_atomic
from grpo_lib.generation import Generation
from grpo_lib.problems.types import Problem

__all__ = ["CLOSE", "EvalRun", "Generation", "evaluate", "grade", "summarize"]

Record = dict[str, Any]
Generate = Callable[[list[str]], Sequence[Generation | str]]

CLOSE = 0.1  # partial credit: within 10 % of the gold number
VERDICTS = ("strict", "lenient", "partial", "format")
# What a record must hold for the statistics and the report; the rest is allowed to be absent in older files.
REQUIRED = ("id", "sample", "question", "prompt", "completion", "extracted", "gold", *VERDICTS, "truncated")


@dataclass(frozen=True)
class EvalRun:
    """The records of one evaluation, in the order of its problems."""

    records: list[Record]

    def summary(self) -> dict[str, Any]:
        """Rates from 0 to 1 over all problems.

        `n` counts problems. The Wilson interval is for that n: several samples of one problem are not
        independent draws, so they sharpen each problem's rate but do not add to n.
        """
        n = len(self.rates("strict"))
        accuracy = self._mean("strict")
        return {
            "accuracy": accuracy,
            "n": n,
            "interval": list(statistics.wilson_interval(min(accuracy, 1.0) * n, n)),
            "lenient_accuracy": self._mean("lenient"),
            "partial_accuracy": self._mean("partial"),
            "format_accuracy": self._mean("format"),
            "truncated": self._mean("truncated"),
        }

    def rates(self, verdict: str) -> dict[str, float]:
        """For each problem id the share of its samples with that verdict (0.0 or 1.0 for one sample)."""
        values: dict[str, list[bool]] = {}
        for record in self.records:
            values.setdefault(record["id"], []).append(bool(record[verdict]))
        return {key: sum(verdicts) / len(verdicts) for key, verdicts in values.items()}

    def save(self, path: str | os.PathLike) -> Path:
        """Write one JSON line per record, atomically."""
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in self.records]
        return write_text_atomic(path, "".join(lines))

    @classmethod
    def load(cls, path: str | os.PathLike) -> EvalRun:
        """Read what `save` wrote.

        Raises:
          CourseError: there is no such file, it is empty, or a record lacks a field.
        """
        try:
            records = read_jsonl(path)
        except FileNotFoundError:
            raise CourseError(f"{path}: no such file; run the evaluation that writes it first") from None
        if not records:
            raise CourseError(f"{path}: holds no records; remove it and evaluate again")
        for number, record in enumerate(records, start=1):
            missing = [name for name in REQUIRED if name not in record]
            if missing:
                raise CourseError(
                    f"{path}: record {number} lacks {', '.join(missing)}; remove the file and evaluate again"
                )
        return cls(records)

    def _mean(self, verdict: str) -> float:
        return sum(bool(record[verdict]) for record in self.records) / len(self.records)


def evaluate(
    generate: Generate,
    problems: Sequence[Problem],
    *,
    render: Callable[[str], str] | None = None,
    path: str | os.PathLike | None = None,
    batch_size: int = 256,
    samples: int = 1,
    progress: bool = True,
    label: str = "",
) -> EvalRun:
    """Ask for completions of all problems and grade them.

    Args:
      generate: takes at most `batch_size` prompts and returns as many completions, in their order. Prompts
        come longest first: a batch holds prompts of like length, so padding is small, and what does not fit
        in memory fails at once.
      render: turns a question into the prompt; without it the question itself is sent.
      path: where the records go when all are there. If that file exists it is loaded and `generate` is not
        called. If `generate` raises, what was finished stays beside it, in `<path>.partial`, for inspection.
      samples: completions per problem; more than one makes sense only if `generate` samples.
      label: shown on the progress bar.

    Returns:
      EvalRun with len(problems) * samples records, in the order of `problems`.

    Raises:
      CourseError: no problems, two with one id, a file that was made for other problems, or a `generate` that
        returns another number of completions than it was given prompts.
    """
    if batch_size < 1 or samples < 1:
        raise CourseError(f"batch_size and samples must be at least 1, got {batch_size} and {samples}")
    if not problems:
        raise CourseError("there are no problems to evaluate; ask for at least one")
    if len({problem.id for problem in problems}) < len(problems):
        raise CourseError("two problems have the same id; before and after could not be paired")
    prompts = [render(problem.question) if render else problem.question for problem in problems]
    if path is not None and Path(path).exists():
        return _load_for(path, problems, prompts, samples)

    tasks = [(index, sample) for index in range(len(problems)) for sample in range(samples)]
    tasks.sort(key=lambda task: -len(prompts[task[0]]))  # stable: samples of one problem stay together
    done: dict[tuple[int, int], Record] = {}
    try:
        with tqdm(total=len(tasks), desc=label or "evaluate", unit="completion", disable=not progress) as bar:
            for start in range(0, len(tasks), batch_size):
                batch = tasks[start : start + batch_size]
                outputs = _generate(generate, [prompts[index] for index, _ in batch])
                for (index, sample), output in zip(batch, outputs, strict=True):
                    done[index, sample] = _record(problems[index], sample, prompts[index], output)
                bar.set_postfix(accuracy=f"{sum(r['strict'] for r in done.values()) / len(done):.1%}")
                bar.update(len(batch))
    except BaseException:
        if path is not None and done:
            EvalRun([done[key] for key in sorted(done)]).save(_partial(path))
        raise
    run = EvalRun([done[key] for key in sorted(done)])
    if path is not None:
        run.save(path)
        _partial(path).unlink(missing_ok=True)
    return run


def grade(completion: str, gold: str) -> Record:
    """Verdicts on one completion.

    Returns:
      extracted (str or None), strict, lenient, partial, format (bool) and error: None, or what the grader
      raised. With an error every verdict is False, so that the denominator is the same for all of them.
    """
    try:
        return {
            "extracted": answers.extract_answer(completion),
            "strict": bool(answers.is_correct(completion, gold)),
            "lenient": bool(answers.is_correct_leniently(completion, gold)),
            "partial": bool(answers.is_close(completion, gold, CLOSE)),
            "format": bool(answers.format_is_exact(completion)),
            "error": None,
        }
    except Exception as error:  # a grader's bug must not shrink the denominator
        wrong = dict.fromkeys(VERDICTS, False)
        return {"extracted": None, **wrong, "error": f"{type(error).__name__}: {error}"}


def summarize(
    before: EvalRun,
    after: EvalRun,
    *,
    wall_seconds: float | None = None,
    train_seconds: float | None = None,
    steps: int | None = None,
) -> dict[str, Any]:
    """The content of summary.json: both summaries, and the paired difference of strict accuracy.

    `difference` is after - before, a fraction; its interval is a 95 % paired bootstrap over problems.
    `mcnemar_p` is exact, and None when there are several samples per problem, for which the test is not made.

    Raises:
      CourseError: the two were not run on the same problems, or not with as many samples.
    """
    _check_same_problems(before, after)
    rates_before, rates_after = before.rates("strict"), after.rates("strict")
    old, new = list(rates_before.values()), [rates_after[key] for key in rates_before]
    bootstrap = statistics.paired_bootstrap(old, new)
    one_sample = len(before.records) == len(old)
    return {
        "before": before.summary(),
        "after": after.summary(),
        "difference": bootstrap.difference,
        "difference_interval": [bootstrap.low, bootstrap.high],
        "mcnemar_p": statistics.mcnemar(old, new).p_value if one_sample else None,
        "wall_seconds": wall_seconds,
        "train_seconds": train_seconds,
        "steps": steps,
    }


def _generate(generate: Generate, prompts: list[str]) -> list[Any]:
    outputs = list(generate(prompts))
    if len(outputs) != len(prompts):
        raise CourseError(
            f"generate returned {len(outputs)} completions for {len(prompts)} prompts; it must return one for each"
        )
    return outputs


def _record(problem: Problem, sample: int, prompt: str, output: Any) -> Record:
    """One line of the evaluation file; what is no completion at all counts as an empty, wrong one."""
    text, tokens, truncated, bad = "", None, False, None
    if isinstance(output, str):
        text = output
    elif isinstance(output, Generation) and isinstance(output.text, str):
        text, tokens, truncated = output.text, int(output.tokens), bool(output.truncated)
    else:
        bad = f"generate returned {type(output).__name__} in place of a completion"
    grades = grade(text, problem.answer)
    return {
        "id": problem.id,
        "sample": sample,
        "question": problem.question,
        "prompt": prompt,
        "completion": text,
        "extracted": grades["extracted"],
        "gold": problem.answer,
        **{name: grades[name] for name in VERDICTS},
        "truncated": truncated,
        "tokens": tokens,  # None: generate returned plain text, and did not count
        "error": bad or grades["error"],
        "steps": problem.steps,
    }


def _partial(path: str | os.PathLike) -> Path:
    return Path(f"{path}.partial")


def _load_for(path: str | os.PathLike, problems: Sequence[Problem], prompts: list[str], samples: int) -> EvalRun:
    """The finished evaluation in `path`, in the order of `problems`, if it is of exactly these problems."""
    records = {(record["id"], record["sample"]): record for record in EvalRun.load(path).records}
    remedy = "move or remove the file to evaluate anew, or use the recipe it was made with"
    wanted = [(problem.id, sample) for problem in problems for sample in range(samples)]
    if set(records) != set(wanted):
        raise CourseError(
            f"{path}: made for other problems or another number of samples ({len(records)} records, "
            f"{len(wanted)} wanted, {len(set(wanted) & set(records))} in common); {remedy}"
        )
    for problem, prompt in zip(problems, prompts, strict=True):
        record = records[problem.id, 0]
        for what, old, new in (
            ("gold answer", record["gold"], problem.answer),
            ("question", record["question"], problem.question),
            ("prompt", record["prompt"], prompt),
        ):
            if old != new:
                raise CourseError(f"{path}: another {what} for problem {problem.id}; {remedy}")
    return EvalRun([records[key] for key in wanted])


def _check_same_problems(before: EvalRun, after: EvalRun) -> None:
    def golds(run: EvalRun) -> dict[tuple[str, int], str]:
        return {(record["id"], record["sample"]): record["gold"] for record in run.records}

    if golds(before) != golds(after):
        common = len(golds(before).items() & golds(after).items())
        raise CourseError(
            f"before ({len(before.records)} records) and after ({len(after.records)}) share only {common}; "
            "evaluate both on the same problems with as many samples"
        )
