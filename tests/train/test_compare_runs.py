"""Two runs compared: known differences are found, missing data are named, and the runs are left unchanged."""

import pytest
from helpers import result_of
from test_report import PROBLEMS
from test_report import run_with as answered

from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import append_jsonl
from grpo_lib.records import EvalRun
from grpo_train.recipes import dump_recipe, load_recipe
from grpo_train.report import compare_runs
from grpo_train.report.compare_runs import compare
from grpo_train.runs.metric_glossary import read_metrics


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
    assert (paired["after"]["n"], paired["difference"]) == (40, pytest.approx(10 / 40))
    assert list(paired["flips"].values()) == [15, 5, 15, 5]  # both right, only A, only B, both wrong
    assert paired["mcnemar_p"] == pytest.approx(0.0414, abs=1e-4)  # 5 of 20, a fair coin, both sides
    low, high = paired["difference_interval"]
    assert 0 < low < 0.25 < high < 0.5
    back = compare(b, a).paired
    assert (back["difference"], back["mcnemar_p"]) == (-0.25, paired["mcnemar_p"])
    assert list(back["flips"].values()) == [15, 15, 5, 5]
    c = make_run("c", after=answered(range(5), samples=2))
    d = make_run("d", after=answered(range(30), samples=3))
    several = compare(c, d).paired
    assert several["difference"] == pytest.approx(25 / 40)
    assert several["mcnemar_p"] is None
    assert several["flips"] is None


def test_last_metrics_are_means_of_ten_steps_or_fewer(make_run):
    a = make_run("a", [100.0] * 5 + [1.0, 2.0] * 5, metrics={"entropy": 0.5, "mine": 1.0, "loss": None})
    b = make_run("b", [2.0, 4.0], "grpo.beta=0.1", metrics={"entropy": 0.25, "kl": 0.0, "loss": 1.0, "format": 0.5})
    append_jsonl(b / "metrics.jsonl", {"step": 2, "reward": 6.0, "entropy": 0.25, "kl": 0.0})  # done again: it counts
    append_jsonl(a / "metrics.jsonl", {"step": 3, "reward": 1.0, "format": 0.75})  # measured seldom: the last value
    wanted = {
        "reward": (1.5, 4.0),
        "format": (0.75, 0.5),
        "entropy": (0.5, 0.25),
        "loss": (None, 1.0),
        "kl": (None, 0.0),
        "mine": (1.0, None),
    }
    metrics = compare(a, b).metrics
    assert metrics == wanted
    assert list(metrics) == list(wanted)  # in the order of the glossary; what is not in it comes last


def test_a_kl_that_nothing_measured_is_a_dash(make_run):
    """Earlier versions wrote a 0 into every row of a run without a penalty."""
    a = make_run("a", [1.0], metrics={"kl": 0.0})
    b = make_run("b", [1.0], "grpo.beta=0.1", metrics={"kl": 0.0})
    compared = compare(a, b)
    assert compared.metrics["kl"] == (None, 0.0)
    (line,) = (line for line in compare_runs.text(compared).splitlines() if line.startswith("kl "))
    assert line.split()[1:4] == ["–", "0", "–"]
    assert "kl" not in compare(a, make_run("c", [2.0], metrics={"kl": 0.0})).metrics


def test_the_shipped_runs_have_no_kl(root):
    for file in (root / "assets" / "reference").glob("*/metrics.jsonl"):
        assert "kl" not in {name for row in read_metrics(file) for name in row}, file


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: None, "no evals/after.jsonl in b"),
        (lambda: EvalRun([r | {"gold": "-9"} for r in answered(range(9)).records]), " 0 in common"),
        (lambda: answered(range(3), samples=2), "temperature"),
    ],
)
def test_evaluations_that_cannot_be_paired_say_why(make_run, other, words):
    run = other()
    evaluations = {"after": run} if run else {}
    a = make_run("a", [1.0], after=answered(range(5)))
    compared = compare(a, make_run("b", [1.0], **evaluations))
    assert compared.paired is None
    assert words in compared.unpaired
    assert compared.metrics


def with_another_gold(run: EvalRun, number: str) -> EvalRun:
    return EvalRun([record | {"gold": "9"} if record["id"] == number else record for record in run.records])


@pytest.mark.parametrize(
    ("other", "n", "left_out"),
    [
        (answered(range(10), problems=PROBLEMS[:30]), 30, (10, 0)),
        (with_another_gold(answered(range(10)), "p3"), 39, (1, 1)),  # the same id, and another problem
    ],
)
def test_problems_that_both_have_are_paired(make_run, other, n, left_out):
    compared = compare(make_run("a", after=answered(range(20))), make_run("b", after=other))
    assert compared.left_out == left_out
    assert compared.paired["after"]["n"] == n
    assert sum(compared.paired["flips"].values()) == n
    said = compare_runs.verdict(compared)
    assert f"{n} problems that both were evaluated on" in said
    assert f"{left_out[0]} of A alone" in said
    everything = compare_runs.verdict(compare(make_run("c", after=other), make_run("d", after=other)))
    assert "left out" not in everything


def test_the_table_says_how_many_steps_its_means_have(make_run):
    a, b = make_run("a", [1.0, 2.0]), make_run("b", [1.0] * 12)
    assert compare(a, b).steps == (2, 10)
    assert "last 2 steps (A), 10 steps (B)" in compare_runs.text(compare(a, b))
    assert "mean of the last 2 steps  " in compare_runs.text(compare(a, make_run("c", [1.0, 2.0])))


def test_steps_that_compile_have_no_say_in_the_clocks(make_run):
    a, b = make_run("a"), make_run("b")
    for step, (seconds, compilations) in enumerate([(40.0, 29), (2.0, 0), (9.0, 1), (4.0, 0)], start=1):
        row = {"step": step, "seconds": seconds, "tokens_per_second": 1 / seconds, "reward": seconds}
        append_jsonl(a / "metrics.jsonl", row | {"compilations": compilations})
    append_jsonl(b / "metrics.jsonl", {"step": 1, "seconds": 40.0, "reward": 1.0, "compilations": 29})
    metrics = compare(a, b).metrics
    assert metrics["seconds"] == (3.0, None)
    assert metrics["tokens_per_second"] == (0.375, None)
    assert metrics["reward"] == (13.75, 1.0)


# --- what is refused ---


def test_what_cannot_be_compared_is_named(make_run, tmp_path):
    a, b = make_run("a", [1.0]), make_run("b")
    (b / "metrics.jsonl").write_text('{"step": 1, "reward": 2}\nnonsense\n{"step": 2}\n')
    for other, words in ((tmp_path / "nowhere", "nowhere"), (a / ".." / "a", "same run"), (b, "metrics.jsonl: line 2")):
        with pytest.raises(CourseError, match=words):
            compare(a, other)


# --- how it is said ---


@pytest.mark.parametrize(("right", "start"), [(range(38), "B is"), ([0], "A is"), (range(20, 40), "No clear")])
def test_the_verdict_is_honest_about_noise(make_run, right, start):
    compared = compare(make_run("a", after=answered(range(20))), make_run("b", after=answered(right)))
    assert compare_runs.verdict(compared).startswith(start)


def test_nothing_that_a_file_holds_controls_the_terminal(make_run):
    hostile = "\x1b[31m x\ny"
    metrics = {f"rewards/{hostile}/mean": 1.0, hostile: 2.0}
    a = make_run("a", [1.0, 2.0], metrics=metrics, after=answered(range(9)))
    said = compare_runs.text(compare(a, make_run("b", [2.0, 1.0], metrics=metrics, after=answered(range(9)))))
    assert "\x1b" not in said
    assert "[31m x" in said


# --- the command ---


def test_the_command_prints_the_comparison(make_run, grpo, tmp_path):
    make_run("a", [1.0] * 3, after=answered(range(20)))
    make_run("b", [2.0] * 3, "seed=1", after=answered(range(5, 35)))
    runs = tmp_path / "runs"
    files = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    result = result_of(grpo("compare", "a", runs / "b", "--runs", runs, "--json"))
    assert result["recipe"] == ["seed: 0 != 1"]
    assert result["paired"]["flips"]["wrong_right"] == 15
    assert result["metrics"] == {"reward": [1.0, 2.0]}
    assert {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()} == files  # as they were
