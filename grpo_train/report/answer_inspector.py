"""The inspector: every problem with its completions before and after, to filter, search and open.

    inspector("runs/course")       # in a notebook; works without a kernel
    page_values(comparison)        # the same table in report.html

Both use the same script, style sheet and data format (templates/inspector.*). The data are arrays, and values that
repeat (the prompt around the question, the reasons of the reward) are stored once: a page of GSM8K's 1,319 problems has
to open at once, and a page of 1,000 tiny ones has to fit into a notebook.
"""

import os
from collections.abc import Sequence
from typing import Any

from grpo_lib import analysis, answers, rewards
from grpo_lib.prompts import opens_thoughts
from grpo_lib.records import EvalRun, Record, by_problem, kind_of
from grpo_train.report import comparison, html_page

# Bits of a completion's verdicts; inspector.js reads them.
FLAGS = {"strict": 1, "lenient": 2, "partial": 4, "format": 8, "truncated": 16, "greedy": 32}
SAMPLED_TEXT = 2_000_000  # characters of sampled completions; above it the page has their answers, not their texts
Numbered = dict[Any, int]  # values that repeat, each stored once and referred to by its number


def inspector(run_dir: str | os.PathLike) -> html_page.Frame:
    """The inspector of a run, as the last value of a notebook cell. Once shown, it needs no kernel.

    Raises:
      CourseError: no such run directory, or no evaluation in it.
    """
    values = page_values(comparison.load(run_dir, need_evaluation=True))
    return html_page.Frame(
        html_page.render("inspector_frame.html.j2", "inspector.js", **values),
        title="every answer, before and after",
        height=720,
        note="Every answer. If nothing is shown here, trust the notebook, or open the run's report.html.",
    )


def page_values(compared: comparison.Comparison) -> dict[str, Any]:
    """The values of templates/inspector.html.j2."""
    steps = set()
    for run in compared.runs.values():
        steps.update(record.get("steps") for record in run.records)
    return {
        "data": html_page.data(page_data(compared)),
        "phases": list(compared.runs),
        "calculations": len(steps) > 1,
    }


def page_data(compared: comparison.Comparison) -> dict[str, Any]:
    """The table as JSON; its format is described at the head of templates/inspector.js."""
    phases = [by_problem(run.records) for run in compared.runs.values()]
    characters = 0
    for groups in phases:
        for group in groups.values():
            characters += sum(len(record["completion"]) for record in _sampled(group))
    with_texts = characters <= SAMPLED_TEXT
    prompts: Numbered = {}
    notes: Numbered = {}
    problems = []
    for key in phases[0] if phases else ():
        first = phases[0][key][0]
        prompt = prompts.setdefault(_prompt_template(first), len(prompts))
        runs = []
        for groups in phases:
            shown = groups[key][0]
            other_prompt = shown["prompt"] if shown["prompt"] != first["prompt"] else None
            samples = [_sample(record, with_texts) for record in _sampled(groups[key])]
            runs.append([*_answer(shown, compared.functions, notes), other_prompt, samples])
        told = [first[name] for name in ("id", "question", "gold", "solution")]
        problems.append([*told, first.get("steps"), prompt, runs])
    return {
        "phases": list(compared.runs),
        "models": [_only_model(run) for run in compared.runs.values()],
        "categories": list(analysis.MEANINGS.items()),
        "parts": [function.__name__ for function in compared.functions],
        "prompts": list(prompts),
        "notes": list(notes),
        "problems": problems,
    }


def _only_model(run: EvalRun) -> str | None:
    """The model that gave all answers; None where there are several."""
    models = {record.get("model") for record in run.records}
    return models.pop() if len(models) == 1 else None


def _sample(record: Record, with_text: bool) -> list[Any]:
    return [record["completion"] if with_text else None, record["extracted"], _flags(record)]


def _sampled(group: list[Record]) -> list[Record]:
    """The sampled answers to a problem, where there are several answers."""
    return [record for record in group if not record.get("greedy")] if len(group) > 1 else []


def _prompt_template(record: Record) -> tuple[str, ...]:
    """The prompt as (text before the question, text after it); whole unless the question is in it exactly once."""
    parts = tuple(record["prompt"].split(record["question"])) if record["question"] else ()
    return parts if len(parts) == 2 else (record["prompt"],)


def _answer(record: Record, functions: Sequence[rewards.RewardFunction], notes: Numbered) -> list[Any]:
    text = record["completion"]
    thinking = opens_thoughts(record["prompt"])
    parts = rewards.explain(text, record["gold"], functions=functions, kind=kind_of(record), thinking=thinking)
    reasons = [notes.setdefault((part.points, part.why), len(notes)) for part in parts]
    category = analysis.CATEGORIES.index(analysis.classify(record))
    lenient = answers.lenient_answer(text, thinking) if record["lenient"] != record["strict"] else None
    return [
        text,
        record["extracted"],
        _flags(record),
        category,
        record.get("tokens"),
        reasons,
        answers.answer_block(text, thinking),
        lenient,
        record.get("error"),
    ]


def _flags(record: Record) -> int:
    return sum(bit for name, bit in FLAGS.items() if record.get(name))
