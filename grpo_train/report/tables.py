"""The answers as tables, for a spreadsheet and for pandas: one row per problem and sample, with before and after.

    export_table("runs/course")      # evals/answers.csv

Every value unchanged is in the records (evals/*.jsonl). Spreadsheets evaluate any cell that begins like a formula ("CSV
injection": =, +, -, @, their full-width forms, or a tab or line break), and a completion may begin in any way: such a
cell gets an apostrophe in front, unless it is a plain number. The file begins with a byte order mark, without which
Excel does not read it as UTF-8.
"""

import os
from pathlib import Path
from typing import Any

from grpo_lib import analysis, rewards
from grpo_lib.common.files import write_text_atomic
from grpo_lib.common.spreadsheets import for_spreadsheet
from grpo_lib.prompts import opens_thoughts
from grpo_lib.records import kind_of
from grpo_train.report import comparison

TEXTS, VERDICTS = ("completion", "extracted"), ("strict", "lenient", "partial", "format", "truncated")


def export_table(run_dir: str | os.PathLike) -> Path:
    """Write evals/answers.csv of a run, and return its path.

    Columns: id, sample, question, gold, solution; then for each evaluation, with before_ or after_ in front:
    completion, extracted, the verdicts strict, lenient, partial, format and truncated, tokens, category (see
    taxonomy), reward_<part> for each reward function of the recipe, and reward, their sum. There is a row for each
    sample of either evaluation; the other evaluation's columns may be empty.

    Raises:
      CourseError: no such run directory, or no evaluation in it.
    """
    import pandas

    frame = pandas.DataFrame(table(comparison.load(run_dir, need_evaluation=True)), dtype=object)
    return write_text_atomic(
        Path(run_dir) / "evals" / "answers.csv", f"\ufeff{frame.map(for_spreadsheet).to_csv(index=False)}"
    )


def table(compared: comparison.Comparison) -> list[dict[str, Any]]:
    """The rows of both files; all have the same columns."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for phase, run in compared.runs.items():
        for record in run.records:
            key = record["id"], record["sample"]
            own = {"id": key[0], "sample": key[1], **{name: record[name] for name in ("question", "gold", "solution")}}
            points = {
                f"reward_{part.name}": float(part.points)
                for part in rewards.explain(
                    record["completion"],
                    record["gold"],
                    functions=compared.functions,
                    kind=kind_of(record),
                    thinking=opens_thoughts(record["prompt"]),
                )
            }
            values = {
                **{name: record[name] for name in TEXTS},
                **{name: bool(record[name]) for name in VERDICTS},
                "tokens": record.get("tokens"),
                "category": analysis.classify(record),
                **points,
                "reward": sum(points.values()),
            }
            rows.setdefault(key, own).update({f"{phase}_{name}": value for name, value in values.items()})
    names = dict.fromkeys(name for row in rows.values() for name in row)
    return [{name: row.get(name) for name in names} for row in rows.values()]
