"""The answers as tables, for a spreadsheet and for pandas: one row per problem and sample, before beside after.

    export.export_table("runs/course")      # evals/answers.csv and evals/answers.parquet

Parquet holds every value as it is. CSV is for spreadsheets, which calculate any cell that begins like a formula ("CSV
injection": =, +, -, @, their full-width forms, or a tab or line break before them), and a completion may begin in any
way: such a cell gets an apostrophe in front, unless it is a plain number. It begins with a byte order mark, without
which Excel does not read it as UTF-8.
"""

from __future__ import annotations

import csv
import io
import os
import re
from pathlib import Path
from typing import Any

from grpo_lib import comparison, rewards, taxonomy
from grpo_lib.comparison import Comparison
from grpo_lib.errors import CourseError
from grpo_lib.files import write_bytes_atomic, write_text_atomic
from grpo_lib.records import Record

TEXTS, VERDICTS = ("completion", "extracted"), ("strict", "lenient", "partial", "format", "truncated")
_FORMULA = re.compile(r"[=+@\t\r\n＝＋－＠]|-(?![0-9]+(?:\.[0-9]+)?\Z)")


def export_table(run_dir: str | os.PathLike) -> tuple[Path, Path]:
    """Write evals/answers.csv and evals/answers.parquet of a run, and return their paths.

    Columns: id, sample, question, gold, solution; then for each evaluation, with before_ or after_ in front:
    completion, extracted, the verdicts strict, lenient, partial, format and truncated, tokens, category (see
    taxonomy), reward_<part> for each reward function of the recipe, and reward, their sum.
    A row exists for each sample that either evaluation has; the columns of the other are empty then.

    Raises:
      CourseError: no such run directory, or no evaluation in it.
    """
    compared = comparison.load(run_dir)
    if not compared.runs:
        raise CourseError(f"{run_dir}: no evaluation yet (evals/before.jsonl); evaluate first")
    rows, folder = table(compared), Path(run_dir) / "evals"
    return _write_csv(folder / "answers.csv", rows), _write_parquet(folder / "answers.parquet", rows)


def table(compared: Comparison) -> list[dict[str, Any]]:
    """The rows of both files, which all have the same columns."""
    runs = {
        phase: {(record["id"], record["sample"]): record for record in run.records}
        for phase, run in compared.runs.items()
    }
    rows = []
    for key in dict.fromkeys(key for records in runs.values() for key in records):
        records = {phase: runs[phase].get(key) for phase in runs}
        one = next(record for record in records.values() if record)
        row = {"id": key[0], "sample": key[1], "question": one["question"], "gold": one["gold"]}
        row["solution"] = one.get("solution") or ""
        for phase, record in records.items():
            columns = _columns(record, compared.functions)
            row |= {f"{phase}_{name}": value for name, value in columns.items()}
        rows.append(row)
    return rows


def _columns(record: Record | None, functions: tuple[rewards.RewardFunction, ...]) -> dict[str, Any]:
    if record is None:
        parts = [f"reward_{function.__name__}" for function in functions]
        return dict.fromkeys([*TEXTS, *VERDICTS, "tokens", "category", *parts, "reward"])
    parts = rewards.explain(record["completion"], record["gold"], functions=functions)
    return {
        **{name: record[name] for name in TEXTS},
        **{name: bool(record[name]) for name in VERDICTS},
        "tokens": record.get("tokens"),
        "category": taxonomy.classify(record),
        **{f"reward_{part.name}": float(part.points) for part in parts},
        "reward": float(sum(part.points for part in parts)),
    }


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(rows[0])
    writer.writerows([_cell(value) for value in row.values()] for row in rows)
    return write_text_atomic(path, "\ufeff" + buffer.getvalue())


def _cell(value: Any) -> str:
    """Numbers and truth values as a script writes them, so that the page's download gives the same text."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = str(value)
    return f"'{text}" if isinstance(value, str) and _FORMULA.match(text) else text


def _write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    text, whole = pyarrow.string(), pyarrow.int64()
    types = {**dict.fromkeys(VERDICTS, pyarrow.bool_()), "tokens": whole, "sample": whole}

    def column(name: str) -> pyarrow.Field:
        own = name.removeprefix("before_").removeprefix("after_")
        return pyarrow.field(name, pyarrow.float64() if own.startswith("reward") else types.get(own, text))

    def storable(value: Any) -> Any:  # half of a surrogate pair has no form in UTF-8
        return value.encode(errors="replace").decode() if isinstance(value, str) else value

    clean = [{name: storable(value) for name, value in row.items()} for row in rows]
    schema = pyarrow.schema([column(name) for name in rows[0]])
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(clean, schema), buffer, compression="zstd")
    return write_bytes_atomic(path, buffer.getvalue())
