"""Two runs compared: known differences are found, missing data are named, and the runs are left unchanged."""

import json
import re
import shutil

import pytest
from typer.testing import CliRunner

from grpo_lib import evaluation
from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import append_jsonl
from grpo_lib.problems.types import Problem
from grpo_lib.records import EvalRun
from grpo_train.cli import app
from grpo_train.recipes import dump_recipe, load_recipe
from grpo_train.report import compare_runs
from grpo_train.report.compare_runs import compare

PROBLEMS = [Problem(f"p{i}", f"What is {i} + 0?", "", str(i), "test", 1) for i in range(40)]


def answered(right, problems=PROBLEMS, **options):
    """An evaluation in which the problems of these numbers are right."""
    texts = {p.question: f"<answer>{p.answer if i in right else -7}</answer>" for i, p in enumerate(problems)}
    return evaluation.evaluate(lambda asked: [texts[p] for p in asked], problems, progress=False, **options)


@pytest.fixture
def make_run(root, tmp_path):
    """Makes a run directory: recipe, a row for each reward, and the evaluations that are given."""

    def make(name, rewards=(), *overrides, metrics=(), **evaluations):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text(dump_recipe(load_recipe(root / "recipes" / "tiny-cpu.yaml", overrides)))
        for step, reward in enumerate(rewards, start=1):
            append_jsonl(folder / "metrics.jsonl", {"step": step, "reward": reward} | dict(metrics))
        for phase, run in evaluations.items():
            run.save(folder / "evals" / f"{phase}.jsonl")
        return folder

    return make


# --- what is compared ---


def test_the_difference_of_two_evaluations_is_paired(make_run):
    a = make_run("a", after=answered(range(20)))
    b = make_run("b", after=answered(range(5, 35)))
    paired = compare(a, b).paired
    assert (paired.n, paired.difference) == (40, pytest.approx(10 / 40))
    assert (paired.both_right, paired.only_a, paired.only_b, paired.both_wrong) == (15, 5, 15, 5)
    assert paired.p_value == pytest.approx(0.0414, abs=1e-4)  # 5 of 20, a fair coin, both sides
    assert 0 < paired.interval[0] < 0.25 < paired.interval[1] < 0.5
    back = compare(b, a).paired
    assert (back.difference, back.only_a, back.only_b, back.p_value) == (-0.25, 15, 5, paired.p_value)


def test_it_finds_what_the_runs_own_summary_says(root, make_run):
    """The course's evaluation before training, taken for the result of another run: a known difference."""
    reference = root / "assets" / "reference" / "course"
    summary = json.loads((reference / "summary.json").read_text())
    b = make_run("b")
    shutil.copytree(reference / "evals", b / "evals")
    shutil.move(b / "evals" / "before.jsonl", b / "evals" / "after.jsonl")
    compared = compare(b, reference)
    assert compared.paired.difference == pytest.approx(summary["difference"])
    assert compared.paired.interval == pytest.approx(summary["difference_interval"])
    assert compared.paired.p_value == pytest.approx(summary["mcnemar_p"])
    assert (compared.a.after.accuracy, compared.b.after.accuracy) == (
        summary["before"]["accuracy"],
        summary["after"]["accuracy"],
    )
    assert compared.b.before.interval == pytest.approx(summary["before"]["interval"])


def test_the_reference_runs(root):
    folders = [root / "assets" / "reference" / name for name in ("course", "seed1")]
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    compared = compare(*folders)
    assert compared.recipe == ["seed: 0 != 1"]
    for side, summary in zip((compared.a, compared.b), summaries, strict=True):
        assert side.steps == summary["steps"] and side.alerts == []
        assert side.before.accuracy == summary["before"]["accuracy"]
        assert side.after.accuracy == summary["after"]["accuracy"]
    assert compared.paired is None and compared.unpaired == "no evals/after.jsonl in seed1"
    names = {pair.name for pair in compared.metrics}
    assert {"reward", "rewards/correct_answer/mean", "validation_accuracy", "seconds"} <= names
    assert compared.metrics[0].name == "reward"  # the order of the glossary
    assert compared.only_a == compared.only_b == []


def test_last_metrics_are_means_of_ten_steps_or_fewer(make_run):
    a = make_run("a", [100.0] * 5 + [1.0, 2.0] * 5, metrics={"entropy": 0.5, "mine": 1.0, "loss": None})
    b = make_run("b", [2.0, 4.0], metrics={"entropy": 0.25, "kl": 0.0, "loss": 1.0, "format": 0.5})
    append_jsonl(b / "metrics.jsonl", {"step": 2, "reward": 6.0, "entropy": 0.25, "kl": 0.0})  # done again: it counts
    append_jsonl(a / "metrics.jsonl", {"step": 3, "reward": 1.0, "format": 0.75})  # measured seldom: the last value
    compared = compare(a, b)
    assert [(m.name, m.unit, m.a, m.b, m.difference) for m in compared.metrics] == [
        ("reward", "reward", 1.5, 4.0, 2.5),
        ("format", "fraction", 0.75, 0.5, -0.25),
        ("entropy", "nats per token", 0.5, 0.25, -0.25),
    ]
    assert (compared.only_a, compared.only_b) == (["mine"], ["loss", "kl"])
    assert (compared.a.steps, compared.b.steps) == (15, 2)
    assert [alert.kind for alert in compared.a.alerts if alert.kind == "not finite"] == ["not finite"]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: None, "no evals/after.jsonl in b"),
        (lambda: answered(range(3), PROBLEMS[:-1]), r"different problems \(40 and 39, 39 in common\)"),
        (
            lambda: EvalRun([r | {"gold": "9"} if r["id"] == "p3" else r for r in answered(range(9)).records]),
            "39 in common",
        ),
        (lambda: answered(range(3), samples=2), "temperature"),
    ],
)
def test_evaluations_that_cannot_be_paired_say_why(make_run, other, words):
    evaluations = {"after": run} if (run := other()) else {}
    compared = compare(make_run("a", [1.0], after=answered(range(5))), make_run("b", [1.0], **evaluations))
    assert compared.paired is None and re.search(words, compared.unpaired)
    assert compared.metrics and compared.a.after.accuracy == 5 / 40
    assert compare_runs.verdict(compared).startswith("No paired comparison: ")


def test_several_samples_of_a_problem_have_an_interval_and_no_test(make_run):
    compared = compare(
        make_run("a", after=answered(range(5), samples=2)), make_run("b", after=answered(range(30), samples=3))
    )
    assert compared.paired.difference == pytest.approx(25 / 40) and compared.paired.interval[0] > 0
    assert compared.paired.p_value is None and compared.paired.both_right is None
    assert "McNemar" not in compare_runs.text(compared)


# --- what is refused ---


def test_what_cannot_be_compared_is_one_line(make_run, tmp_path):
    a, b = make_run("a", [1.0]), make_run("b")
    with pytest.raises(CourseError, match=r"nowhere is not a run \(it has no recipe.yaml\)"):
        compare(a, tmp_path / "nowhere")
    with pytest.raises(CourseError, match="same run"):
        compare(a, a / ".." / "a")
    (b / "metrics.jsonl").write_text('{"step": 1, "reward": 2}\nnonsense\n{"step": 2}\n')
    with pytest.raises(CourseError, match=r"metrics.jsonl: line 2 is not JSON"):
        compare(a, b)


# --- how it is said ---


def test_the_verdict_is_honest_about_noise(make_run):
    a = make_run("a", after=answered(range(20)))
    starts = {"b": "B is more often right", "c": "A is more often right", "d": "No clear difference: A 50.0"}
    for (name, start), right in zip(starts.items(), (range(38), [0], range(20, 40)), strict=True):
        said = compare_runs.verdict(compare(a, make_run(name, after=answered(right))))
        assert said.startswith(start) and ("chance" in said) == start.startswith("No")


def test_nothing_that_a_file_holds_controls_the_terminal(make_run):
    hostile = "\x1b[31m x\ny"
    metrics = {f"rewards/{hostile}/mean": 1.0, hostile: 2.0}
    a = make_run("a", [1.0, 2.0], metrics=metrics, after=answered(range(9)))
    b = make_run("b", [2.0, 1.0], metrics=metrics, after=answered(range(9)))
    said = compare_runs.text(compare(a, b))
    assert "\x1b" not in said and "[31m x" in said


# --- the command ---


def test_the_command_prints_the_comparison(make_run, tmp_path):
    make_run("a", [1.0] * 3, after=answered(range(20)))
    make_run("b", [2.0] * 3, "seed=1", after=answered(range(5, 35)))
    runs = tmp_path / "runs"
    files = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    command = ["compare", "a", str(runs / "b"), "--runs", str(runs)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    for words in ("B is more often right", "only B right 15", "seed: 0 != 1", "+1"):
        assert words in done.stdout
    result = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout.splitlines()[-1])
    assert result["paired"]["only_b"] == 15 and result["a"]["steps"] == 3
    assert result["metrics"] == [{"name": "reward", "unit": "reward", "a": 1.0, "b": 2.0, "difference": 1.0}]
    assert {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()} == files  # as they were
