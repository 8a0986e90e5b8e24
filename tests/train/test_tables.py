"""The tables hold what the records hold, open in a spreadsheet as text, and calculate nothing there."""

import csv
import shutil
from pathlib import Path

import pytest
from helpers import result_of

from grpo_lib.evaluation import evaluate
from grpo_lib.problems.types import Problem
from grpo_lib.prompts import template_completion
from grpo_train.report import tables
from grpo_train.report.comparison import Comparison

WILD = [
    *('=HYPERLINK("x")', "-2+3+cmd|' /C calc'!A0", "@SUM(1)", "+1", "\t=1", "\n=1", "＝1"),
    *('"a",b\r\nc\nd', "中文 \U0001f600", ""),
]
PROBLEMS = [Problem(f"p{i}", text or "empty?", "1+1=2", str(i - 3), "test", 1) for i, text in enumerate(WILD)]


@pytest.fixture
def run_dir(tmp_path, root):
    right = {problem.question: template_completion("r", problem.answer) for problem in PROBLEMS}
    for phase, generate in (("before", lambda texts: texts), ("after", lambda texts: [right[text] for text in texts])):
        evaluate(generate, PROBLEMS, path=tmp_path / "evals" / f"{phase}.jsonl", progress=False)
    shutil.copy(root / "recipes" / "tiny-cpu.yaml", tmp_path / "recipe.yaml")
    return tmp_path


def test_csv_opens_in_a_spreadsheet_and_calculates_nothing(run_dir):
    path = tables.export_table(run_dir)
    assert path.read_bytes().startswith(b"\xef\xbb\xbfid,sample,question")  # Excel takes it for UTF-8
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    for row, problem in zip(rows, PROBLEMS, strict=True):
        assert row["question"].removeprefix("'") == problem.question
        assert row["gold"] == row["after_extracted"] == problem.answer  # -3 stays a number
        assert row["after_category"] == "right"
        assert float(row["after_reward"]) == pytest.approx(
            sum(float(row[f"after_reward_{name}"]) for name in ("correct_answer", "tidy_format"))  # those of the recipe
        )
        for value in row.values():
            assert value[:1] not in tuple("=+@\t\r\n＝＋－＠") and (
                value[:1] != "-" or value[1:].replace(".", "", 1).isdigit()
            )


def test_samples_have_rows_of_their_own():
    greedy = evaluate(lambda prompts: prompts, PROBLEMS[:2], progress=False)
    both = evaluate(lambda p: p, PROBLEMS[:2], sampled=lambda p: p, samples=3, progress=False)
    rows = tables.table(Comparison(greedy, both))
    assert [(row["id"], row["sample"]) for row in rows][:2] == [("p0", 0), ("p1", 0)] and len(rows) == 8
    assert len({tuple(row) for row in rows}) == 1  # the same columns everywhere


@pytest.mark.parametrize(("options", "names"), [([], ["report"]), (["--tables"], ["report", "csv"])])
def test_the_command_writes_them_when_asked(run_dir, grpo, options, names):
    for run in ([run_dir], [run_dir.name, "--runs", run_dir.parent]):
        written = result_of(grpo("report", *run, "--json", *options))
        assert list(written) == names and all(Path(path).is_file() for path in written.values())
