"""Two runs beside each other: known differences are found, what is missing is said, and nothing of theirs is lost."""

import json
import re
import shutil
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from grpo_lib import comparison_page, evaluation
from grpo_lib.cli import app
from grpo_lib.errors import CourseError
from grpo_lib.files import append_jsonl, write_json_atomic
from grpo_lib.problems.types import Problem
from grpo_lib.recipes import dump_recipe, load_recipe
from grpo_lib.records import EvalRun
from grpo_lib.run_comparison import compare, find_run
from grpo_lib.wording import NBSP

PROBLEMS = [Problem(f"p{i}", f"What is {i} + 0?", "", str(i), "test", 1) for i in range(40)]


def answered(right, problems=PROBLEMS, **options):
    """An evaluation in which the problems of these numbers are right."""
    texts = {p.question: f"<answer>{p.answer if i in right else -7}</answer>" for i, p in enumerate(problems)}
    return evaluation.evaluate(lambda asked: [texts[p] for p in asked], problems, progress=False, **options)


@pytest.fixture
def make_run(root, tmp_path):
    """Makes a run directory: recipe, a row for each reward, and the evaluations that are given."""

    def make(name, rewards=(), *overrides, recipe="recipes/tiny-cpu.yaml", metrics=(), **evaluations):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text(dump_recipe(load_recipe(root / recipe, overrides)))
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
    assert 0 < paired.interval[0] < 0.25 < paired.interval[1] < 0.5 and paired.clear
    back = compare(b, a).paired
    assert (back.difference, back.only_a, back.only_b, back.p_value) == (-0.25, 15, 5, paired.p_value)


def test_it_finds_what_the_runs_own_summary_says(root, make_run, tmp_path):
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
    assert (compared.a.after.accuracy, compared.b.after.accuracy) == (0.439, summary["after"]["accuracy"])
    assert compared.b.before.interval == pytest.approx(summary["before"]["interval"])


@pytest.mark.parametrize(("one", "other"), [("course", "seed1"), ("seed1", "seed2")])
def test_the_reference_runs(root, one, other):
    folders = [root / "assets" / "reference" / name for name in (one, other)]
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    compared = compare(*folders)
    assert compared.recipe == [f"seed: {one[-1] if one != 'course' else 0} != {other[-1]}"]
    for side, summary in zip((compared.a, compared.b), summaries, strict=True):
        assert side.steps == 30 and side.signs == []
        assert side.before.accuracy == summary["before"]["accuracy"]
        assert side.after.accuracy == summary["after"]["accuracy"]
    assert compared.paired is None and other in compared.unpaired and "evals/after.jsonl" in compared.unpaired
    assert {"reward", "reward/correct_answer", "validation_accuracy", "seconds"} <= {m.name for m in compared.metrics}
    assert compared.metrics[0].name == "reward"  # the order of the glossary
    assert compared.only_a == compared.only_b == []


def test_last_metrics_are_means_of_ten_steps_or_fewer(make_run):
    a = make_run("a", [100.0] * 5 + [1.0, 2.0] * 5, metrics={"entropy": 0.5, "mine": 1.0, "loss": None})
    b = make_run("b", [2.0, 4.0], metrics={"entropy": 0.25, "kl": 0.0, "loss": 1.0})
    append_jsonl(b / "metrics.jsonl", {"step": 2, "reward": 6.0, "entropy": 0.25, "kl": 0.0})  # done again: it counts
    compared = compare(a, b)
    assert [(m.name, m.unit, m.a, m.b, m.difference) for m in compared.metrics] == [
        ("reward", "reward", 1.5, 4.0, 2.5),
        ("entropy", "nats per token", 0.5, 0.25, -0.25),
    ]
    assert (compared.only_a, compared.only_b) == (["mine"], ["loss", "kl"])
    assert (compared.a.steps, compared.b.steps) == (15, 2)
    assert [sign.kind for sign in compared.a.signs if sign.kind == "not finite"] == ["not finite"]


def test_a_metric_that_is_measured_seldom_is_its_last_value(make_run):
    a, b = make_run("a", [1.0] * 30), make_run("b", [1.0] * 30)
    for folder, value in ((a, 0.5), (b, 0.75)):
        append_jsonl(folder / "metrics.jsonl", {"step": 5, "reward": 1.0, "validation_accuracy": 0.1})
        append_jsonl(folder / "metrics.jsonl", {"step": 10, "reward": 1.0, "validation_accuracy": value})
    assert [(m.name, m.difference) for m in compare(a, b).metrics] == [("reward", 0.0), ("validation_accuracy", 0.25)]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: None, "b has no evals/after.jsonl"),
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
    assert comparison_page.verdict(compared).startswith("No paired comparison: ")


def test_several_samples_of_a_problem_have_an_interval_and_no_test(make_run):
    compared = compare(
        make_run("a", after=answered(range(5), samples=2)), make_run("b", after=answered(range(30), samples=3))
    )
    assert compared.paired.difference == pytest.approx(25 / 40) and compared.paired.clear
    assert compared.paired.p_value is None and compared.paired.both_right is None
    assert "McNemar" not in comparison_page.text(compared)


def test_a_recipe_of_another_version_is_said_and_the_rest_compared(make_run):
    a, b = make_run("a", [1.0]), make_run("b", [2.0])
    with (b / "recipe.yaml").open("a") as file:
        file.write("telepathy: true\n")
    compared = compare(a, b)
    assert compared.recipe == [] and "telepathy" in compared.recipe_unread
    assert compared.metrics[0].difference == 1.0
    assert "could not be compared" in comparison_page.text(compared)


def test_a_summary_that_is_torn_or_made_up_is_no_evaluation(make_run):
    a, b = make_run("a", [1.0]), make_run("b", [1.0])
    for content in ('{"after": ', "[]", '{"after": {"accuracy": 7, "n": 3, "interval": [0, 1]}}', '{"after": null}'):
        (a / "summary.json").write_text(content)
        assert compare(a, b).a.after is None


# --- what is refused ---


def test_what_cannot_be_compared_is_one_line(make_run, tmp_path):
    a, b = make_run("a", [1.0]), make_run("b")
    with pytest.raises(CourseError, match=r"nowhere is not a run \(it has no recipe.yaml\)"):
        compare(a, tmp_path / "nowhere")
    with pytest.raises(CourseError, match="same run"):
        compare(a, a / ".." / "a")
    with pytest.raises(CourseError, match="a and b have no metric and no evaluation in common"):
        compare(a, b)
    (b / "metrics.jsonl").write_text('{"step": 1, "reward": 2}\nnonsense\n{"step": 2}\n')
    with pytest.raises(CourseError, match=r"metrics.jsonl: line 2 is not JSON"):
        compare(a, b)


def test_runs_of_one_name_are_told_apart(make_run, tmp_path):
    a, b = make_run("x/same", [1.0]), make_run("y/same", [2.0])
    compared = compare(a, b)
    assert (compared.a.name, compared.b.name) == ("x/same", "y/same")
    assert comparison_page.page_name(compared) == "compare-x-same-y-same.html"


def test_a_run_is_found_by_its_path_or_by_its_name(make_run, tmp_path):
    a = make_run("a", [1.0])
    assert find_run("a", tmp_path / "runs") == find_run(a, "elsewhere") == a
    assert find_run("b", tmp_path / "runs").name == "b"  # compare says that it is none


# --- how it is said ---


@pytest.mark.parametrize(
    ("right", "start"),
    [
        (range(20, 40), "No clear difference: A 50.0"),
        (range(38), "B is more often right"),
        ([0], "A is more often right"),
    ],
)
def test_the_verdict_is_honest_about_noise(make_run, right, start):
    compared = compare(make_run("a", after=answered(range(20))), make_run("b", after=answered(right)))
    said = comparison_page.verdict(compared)
    assert said.startswith(start)
    assert ("chance" in said) == start.startswith("No")


class Page(HTMLParser):
    """The tags of a page, and what it would load or run."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.loads = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            outside = name in ("src", "href", "xlink:href", "srcset", "data") and not (value or "").startswith("#")
            if outside or name.startswith("on"):
                self.loads.append((tag, name, value))


HOSTILE = "<script>alert(1)</script> $x_{ <img src=x onerror=1> \x1b[31m"


def test_nothing_that_a_file_holds_becomes_markup(make_run, tmp_path):
    metrics = {f"reward/{HOSTILE}": 1.0, "reward/other": 1.0, f"loss {HOSTILE}": None, HOSTILE: 2.0}
    a = make_run("<b>a</b>", [1.0, 2.0], metrics=metrics, after=answered(range(9)))
    b = make_run("b & <i>", [2.0, 1.0], f"model.path=<b>{HOSTILE[:8]}", metrics=metrics, after=answered(range(9)))
    compared = compare(a, b)
    text = comparison_page.write_page(compared, tmp_path / "page.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.loads == [] and not {"script", "img", "b", "i", "link", "iframe"} & set(page.tags)
    assert page.tags.count("svg") == 3  # the reward and its two parts
    assert "&lt;script&gt;" in text and "default-src 'none'" in text
    assert "\x1b" not in comparison_page.text(compared) and "\x1b" not in text


def test_the_page_shows_both_runs_and_is_the_same_again(root, tmp_path):
    folders = [root / "assets" / "reference" / name for name in ("seed1", "seed2")]
    paths = [comparison_page.write_page(compare(*folders), tmp_path / f"{n}.html") for n in range(2)]
    text, again = (path.read_text(encoding="utf-8") for path in paths)
    assert text == again
    assert str(root) not in text
    for curve in ("Reward", "Reward by part: correct_answer", "Accuracy: validation, strict", "Entropy"):
        assert f'aria-label="{curve},' in text
    ids = re.findall(r'\sid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    summary = json.loads((folders[1] / "summary.json").read_text(encoding="utf-8"))
    for phase in ("before", "after"):
        assert f"{100 * summary[phase]['accuracy']:.1f}{NBSP}%" in text
    assert "seed: 1 != 2" in text


# --- the command ---


def test_the_command_writes_its_page_beside_the_runs_and_prints_the_comparison(make_run, tmp_path):
    make_run("a", [1.0] * 3, after=answered(range(20)))
    make_run("b", [2.0] * 3, "seed=1", after=answered(range(5, 35)))
    runs = tmp_path / "runs"
    command = ["compare", "a", str(runs / "b"), "--runs", str(runs)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    page = runs / "compare-a-b.html"
    assert done.stdout.splitlines()[-1] == f"page: {page}"
    for words in ("B is more often right", "only B right 15", "seed: 0 != 1", "+1"):
        assert words in done.stdout
    first = page.read_bytes()
    done = CliRunner().invoke(app, [*command, "--json"])  # its own page is replaced
    assert page.read_bytes() == first
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["page"] == str(page) and result["paired"]["only_b"] == 15 and "rows" not in result["a"]
    assert result["metrics"] == [{"name": "reward", "unit": "reward", "a": 1.0, "b": 2.0, "difference": 1.0}]


def test_another_file_is_not_overwritten(make_run, tmp_path):
    runs = [str(make_run(name, [1.0])) for name in "ab"]
    mine = tmp_path / "thesis.html"
    mine.write_text("<html>my own</html>")
    for taken in (mine, tmp_path):
        done = CliRunner().invoke(app, ["compare", *runs, "--output", str(taken)])
        assert isinstance(done.exception, CourseError)
        assert str(taken) in str(done.exception) and "another --output" in str(done.exception)
    assert mine.read_text() == "<html>my own</html>"
    done = CliRunner().invoke(app, ["compare", *runs, "--output", str(mine / "page.html")])
    assert isinstance(done.exception, CourseError) and "cannot be written" in str(done.exception)


def test_a_compared_run_is_left_as_it_was(make_run):
    folders = [make_run(name, [1.0], after=answered(range(9))) for name in "ab"]
    write_json_atomic(folders[0] / "summary.json", {})
    before = {path: path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}
    compare(*folders)
    assert {path: path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()} == before
