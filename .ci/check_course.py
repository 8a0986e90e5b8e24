"""Check what `make course` produced, not only that it ended: python .ci/check_course.py FILE_WITH_ITS_OUTPUT"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import run_notebooks  # .ci/run sets PYTHONPATH

from grpo_lib import analysis
from grpo_lib.evaluation import EvalRun

RUN = Path("runs/course")
EVALUATIONS = (RUN / "evals" / "before.jsonl", RUN / "evals" / "after.jsonl")

Checks = Iterator[tuple[str, bool]]  # what is checked, and whether it is so


def check_rates(summary: dict[str, Any]) -> Checks:
    before = summary["before"]
    after = summary["after"]
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in EVALUATIONS]
    yield "at least 1,000 problems, the same number before and after", before["n"] == after["n"] >= 1000
    yield "one record for each", all(count == before["n"] for count in lines)
    yield "strict accuracy before from 30 to 40 %", 0.30 <= before["accuracy"] <= 0.40
    yield "lenient accuracy before from 50 to 65 %", 0.50 <= before["lenient_accuracy"] <= 0.65
    yield "both at least 90 % after", min(after["accuracy"], after["lenient_accuracy"]) >= 0.90


def check_gain() -> Checks:
    before, after = (EvalRun.load(path) for path in EVALUATIONS)
    lost = 0
    for old, new in zip(before.records, after.records, strict=True):
        lost += old["strict"] and not new["strict"]
    yield "some problems were lost", 3 <= lost <= 20

    # 8.5 and more with all three seeds of assets/reference; another processor rounds otherwise, and ends a little off.
    parts = analysis.gain_parts(before, after)
    trained = [row for row in parts if row["part"] in ("format", "habit", "skill")]
    enough = all(row["gain"] >= 0.06 and row["low"] > 0 for row in trained)
    yield "at least 6 points each from format, habit and skill", enough


def check_statistics(summary: dict[str, Any]) -> Checks:
    low, high = summary["difference_interval"]
    yield "p below 1e-6", summary["mcnemar_p"] < 1e-6
    yield "the interval holds the difference, not zero", 0 < low <= summary["difference"] <= high


def check_notebooks() -> Checks:
    cells = []
    for name in run_notebooks.NOTEBOOKS:
        notebook = nbformat.read(RUN / "notebooks" / f"{name}.ipynb", as_version=4)
        cells += run_notebooks.code_cells(notebook)
    kinds = [output.output_type for cell in cells for output in cell.outputs]
    yield "all cells of all notebooks executed", all(cell.execution_count for cell in cells if cell.source.strip())
    yield "no cell ended in an error", "error" not in kinds


def check_files(summary: dict[str, Any]) -> Checks:
    rows = (RUN / "metrics.jsonl").read_text().splitlines()
    report_bytes = (RUN / "report.html").stat().st_size
    yield "a metrics row per step", len(rows) == summary["steps"]
    yield "report.html holds every answer, in less than 6 MB", 100_000 < report_bytes < 6_000_000
    yield "the table is there", (RUN / "evals" / "answers.csv").exists()
    yield "no evaluation is left half done", not list((RUN / "evals").glob("*.partial"))


def check_printed(file: Path) -> Checks:
    lines = file.read_text(encoding="utf-8").splitlines()
    first_words = [line.split()[0] for line in lines[-5:]]
    yield "the last lines say so", first_words == ["before", "after", "interval", "p", "report"]


def main() -> None:
    summary = json.loads((RUN / "summary.json").read_text(encoding="utf-8"))
    checks = [
        *check_rates(summary),
        *check_gain(),
        *check_statistics(summary),
        *check_notebooks(),
        *check_files(summary),
        *check_printed(Path(sys.argv[1])),
    ]
    for name, good in checks:
        print(f"{'ok  ' if good else 'FAIL'} {name}")
    print(json.dumps(summary))
    sys.exit(not all(good for _, good in checks))


if __name__ == "__main__":
    main()
