"""The tables hold what the records hold, open in a spreadsheet as text, and calculate nothing there."""

import csv
import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grpo_lib import rewards
from grpo_lib.common.errors import CourseError
from grpo_lib.evaluation import EvalRun, evaluate
from grpo_lib.problems.types import Problem
from grpo_train import cli
from grpo_train.report import tables, taxonomy
from grpo_train.report.comparison import Comparison

WILD = [
    *('=HYPERLINK("x")', "-2+3+cmd|' /C calc'!A0", "@SUM(1)", "+1", "\t=1", "\n=1", "＝1"),
    *('"a",b\r\nc\nd', "中文 \U0001f600", ""),
]
PROBLEMS = [Problem(f"p{i}", text or "empty?", "1+1=2", str(i - 3), "test", 1) for i, text in enumerate(WILD)]


def log(answer):
    return f"<reasoning>r</reasoning><answer>{answer}</answer>"


@pytest.fixture
def run_dir(tmp_path):
    echo = evaluate(lambda prompts: prompts, PROBLEMS, progress=False)
    right = {problem.question: log(problem.answer) for problem in PROBLEMS}
    after = evaluate(lambda prompts: [right[prompt] for prompt in prompts], PROBLEMS, progress=False)
    echo.save(tmp_path / "evals" / "before.jsonl")
    after.save(tmp_path / "evals" / "after.jsonl")
    return tmp_path


def test_parquet_holds_every_value_as_it_is(run_dir):
    import pandas

    path = tables.export_table(run_dir)[1]
    table = pandas.read_parquet(path)
    records = EvalRun.load(run_dir / "evals" / "before.jsonl").records
    assert list(table["id"]) == [problem.id for problem in PROBLEMS]
    assert list(table["before_completion"]) == [record["completion"] for record in records]
    assert list(table["before_category"]) == [taxonomy.classify(record) for record in records]
    assert table["after_strict"].dtype == bool and table["after_strict"].all()
    assert list(table["after_extracted"]) == [problem.answer for problem in PROBLEMS]
    assert table["before_tokens"].isna().all() and "int" in str(table["before_tokens"].astype("Int64").dtype).lower()
    names = [f"after_reward_{function.__name__}" for function in rewards.REFERENCE_REWARDS]
    assert [name for name in table if name.startswith("after_reward")] == [*names, "after_reward"]
    assert (table["after_reward"] == 9.5).all()


def test_csv_opens_in_a_spreadsheet_and_calculates_nothing(run_dir):
    path = tables.export_table(run_dir)[0]
    assert path.read_bytes().startswith(b"\xef\xbb\xbfid,sample,question,gold,solution,before_completion")
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(PROBLEMS)
    for row, problem in zip(rows, PROBLEMS, strict=True):
        assert row["question"].removeprefix("'") == problem.question
        assert row["after_strict"] == "True" and row["after_reward"] == "9.5" and row["before_tokens"] == ""
        assert row["gold"] == row["after_extracted"] == problem.answer  # -3 stays a number
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
    assert {row["before_completion"] for row in rows[2:]} == {row["before_reward"] for row in rows[2:]} == {None}


def test_the_command_writes_them_when_asked(run_dir, root):
    shutil.copy(root / "recipes" / "tiny-cpu.yaml", run_dir / "recipe.yaml")
    for options, names in (([], ["report"]), (["--tables"], ["report", "csv", "parquet"])):
        done = CliRunner().invoke(cli.app, ["report", str(run_dir), "--json", *options])
        written = json.loads(done.stdout.splitlines()[-1])
        assert list(written) == names and all(Path(path).is_file() for path in written.values())
    header = (run_dir / "evals" / "answers.csv").read_text(encoding="utf-8-sig").partition("\n")[0]
    assert "after_reward_correct_answer,after_reward_tidy_format,after_reward" in header  # those of the recipe
    with pytest.raises(CourseError, match="no evaluation yet"):
        tables.export_table(root)
