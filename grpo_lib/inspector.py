"""The inspector: every problem with its completions before and after, to filter, search and open.

    inspector.inspector("runs/course")      # in a notebook; it works without a kernel
    inspector.page_data(comparison)         # what the same table in report.html is made of

Both show one script, one style sheet and one form of data (templates/inspector.*). The data are arrays, and what
repeats (the prompt around the question, the reasons of the reward) stands once: a page of GSM8K's 1,319 problems has
to open at once, and a page of 1,000 tiny ones has to fit into a notebook.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from grpo_lib import answers, comparison, pages, rewards, taxonomy
from grpo_lib.comparison import Comparison, Record
from grpo_lib.errors import CourseError
from grpo_lib.prompts import ANSWER_CLOSE, ANSWER_OPEN

# Bits of a completion's verdicts, as the script reads them.
FLAGS = {"strict": 1, "lenient": 2, "partial": 4, "format": 8, "truncated": 16, "greedy": 32}
HEIGHT = 720  # pixels of the frame in a notebook
SAMPLED_TEXT = 2_000_000  # characters of sampled completions; beyond that the page has their answers, not their texts


def inspector(run_dir: str | os.PathLike, height: int = HEIGHT) -> pages.Frame:
    """The inspector of a run, for a notebook: the last value of a cell. It needs no kernel once it is shown.

    Raises:
      CourseError: no such run directory, or no evaluation in it.
    """
    compared = comparison.load(run_dir)
    if not compared.runs:
        raise CourseError(f"{run_dir}: no evaluation yet (evals/before.jsonl); evaluate first")
    document = pages.render("inspector_frame.html.j2", **page_values(compared))
    n = len(comparison.by_problem(next(iter(compared.runs.values()))))
    note = (
        f"The answers to {n:,} problems. If nothing is shown here, trust the notebook, or open the run's report.html."
    )
    return pages.Frame(document, "every answer, before and after", height, note)


def page_values(compared: Comparison) -> dict[str, Any]:
    """What templates/inspector.html.j2 needs."""
    script = pages.asset("inspector.js")
    return {
        "style": pages.asset("style.css"),
        "script": script,
        "digest": pages.digest(script),
        "data": pages.data(page_data(compared)),
        "phases": list(compared.runs),
        "calculations": bool(comparison.calculation_rates(compared.before, compared.after)),
    }


def page_data(compared: Comparison) -> dict[str, Any]:
    """The table as JSON, documented where it is read: at the head of templates/inspector.js."""
    phases = {phase: comparison.by_problem(run) for phase, run in compared.runs.items()}
    prompts = _Numbers(_prompt_template(group[0].shown) for group in _problems(phases))
    notes = _Numbers()
    sampled = [sample for group in _problems(phases) for side in group for sample in side.sampled]
    texts = sum(len(sample["completion"]) for sample in sampled) <= SAMPLED_TEXT
    problems = []
    for group in _problems(phases):
        one = group[0].shown
        prompt = prompts.number(_prompt_template(one))
        runs = [
            [
                *_answer(side.shown, compared.functions, notes),
                side.shown["prompt"] if side.shown["prompt"] != one["prompt"] else None,
                [[s["completion"] if texts else None, s["extracted"], _flags(s)] for s in side.sampled],
            ]
            for side in group
        ]
        problems.append(
            [one["id"], one["question"], one["gold"], one.get("solution") or "", one.get("steps"), prompt, runs]
        )
    return {
        "phases": list(phases),
        "models": [_model(run.records) for run in compared.runs.values()],
        "categories": [[name, taxonomy.MEANINGS[name]] for name in taxonomy.CATEGORIES],
        "parts": [function.__name__ for function in compared.functions],
        "prompts": prompts.values,
        "notes": notes.values,
        "problems": problems,
    }


class _Numbers:
    """Values that repeat, each kept once and named by its number."""

    def __init__(self, often: Any = ()):
        # The most frequent first: small numbers take the least room.
        self.values: list[Any] = [value for value, _ in Counter(often).most_common()]
        self._numbers = {value: number for number, value in enumerate(self.values)}

    def number(self, value: Any) -> int:
        if value not in self._numbers:
            self._numbers[value] = len(self.values)
            self.values.append(value)
        return self._numbers[value]


def _problems(phases: dict[str, dict[str, comparison.Answers]]) -> list[list[comparison.Answers]]:
    """For each problem the answers of each phase."""
    first = next(iter(phases.values()), {})
    return [[answers_of[key] for answers_of in phases.values()] for key in first]


def _prompt_template(record: Record) -> tuple[str, ...]:
    """The prompt as (what is before the question, what is after it); whole where the question is not in it once."""
    parts = tuple(record["prompt"].split(record["question"])) if record["question"] else ()
    return parts if len(parts) == 2 else (record["prompt"],)


def _answer(record: Record, functions: tuple[rewards.RewardFunction, ...], notes: _Numbers) -> list[Any]:
    parts = rewards.explain(record["completion"], record["gold"], functions=functions)
    return [
        record["completion"],
        record["extracted"],
        _flags(record),
        taxonomy.CATEGORIES.index(taxonomy.classify(record)),
        record.get("tokens"),
        [notes.number((part.points, part.why)) for part in parts],
        _block(record["completion"]),
        answers.lenient_answer(record["completion"]) if record["lenient"] != record["strict"] else None,
        record.get("error"),
    ]


def _flags(record: Record) -> int:
    return sum(bit for name, bit in FLAGS.items() if record.get(name))


def _block(completion: str) -> list[int] | None:
    """Where the graded answer block begins and ends, in UTF-16 units, which are what a script counts in."""
    block = answers.answer_block(completion)
    if block is None:
        return None
    start = completion.rfind(ANSWER_OPEN + block + ANSWER_CLOSE) + len(ANSWER_OPEN)
    begin = _units(completion[:start])
    return [begin, begin + _units(block)]


def _units(text: str) -> int:
    return len(text.encode("utf-16-le", errors="surrogatepass")) // 2


def _model(records: list[Record]) -> str | None:
    """What answered, if it is one thing and is known."""
    models = {record.get("model") for record in records}
    return models.pop() if len(models) == 1 else None
