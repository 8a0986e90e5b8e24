"""The page holds every answer, no completion can break out of it, and the headline is honest about noise."""

import html
import json
import re
from types import SimpleNamespace

import pytest
from bs4 import BeautifulSoup

from grpo_lib import rewards
from grpo_lib.common.environment import repo_root
from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import append_jsonl, write_json_atomic
from grpo_lib.evaluation import EvalRun, evaluate, summarize
from grpo_lib.problems.types import Problem
from grpo_lib.prompts import template_completion as log
from grpo_train import report
from grpo_train.report import answer_inspector, comparison
from grpo_train.report.comparison import Comparison, category_counts, flip_counts, reward_means
from grpo_train.runs.health_checks import find_alerts

HOSTILE = [
    '</script><script>document.title = "broken"</script>',
    '</SCRIPT ><img src=x onerror="document.title=1">',
    "<!--<script>",
    "]]> {{ 7 * 7 }} {% raw %} &lt;/script&gt; &amp;",
    "a\u2028b\u2029c\x00d\x85\r\n\ufffd 中文 \U0001f600",
    '"\\u003c/script\\u003e\\"',
    "",
    "<answer>" * 500,
]
PROBLEMS = [Problem(f"p{i}", f"What is <b>{i}</b> + 0?", "", str(i), "test", 1) for i in range(40)]


def run_with(right, tail=(), wrong="<reasoning>r</reasoning><answer>99</answer>", problems=PROBLEMS, **options):
    """An evaluation with the given set of right answers; completions of the last problems are those of `tail`."""
    texts = {p.question: log("r", p.answer) if i in right else wrong for i, p in enumerate(problems)}
    texts |= {p.question: text for p, text in zip(problems[len(problems) - len(tail) :], tail, strict=True)}
    return evaluate(lambda prompts: [texts[prompt] for prompt in prompts], problems, progress=False, **options)


BEFORE = run_with(range(10), HOSTILE)
AFTER = run_with(range(5, 32), HOSTILE)
BOTH = Comparison(BEFORE, AFTER)
# With an early warning at the end: a KL above 1 for three steps.
STEADY = {"format": 0.9, "completions/mean_length": 20.0, "frac_reward_zero_std": 0.5, "grad_norm": 1.0}


def row(step):
    grows = {"reward": step / 30, "accuracy": step / 40, "lenient_accuracy": step / 35, "loss": 1e-8 * step}
    return {"step": step} | grows | STEADY | {"kl": 0.1 if step < 28 else 3.0}


ROWS = [row(step) for step in range(1, 31)]


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "demo"
    BEFORE.save(folder / "evals" / "before.jsonl")
    AFTER.save(folder / "evals" / "after.jsonl")
    for row in ROWS:
        append_jsonl(folder / "metrics.jsonl", row)
    write_json_atomic(folder / "summary.json", summarize(BEFORE, AFTER, train_seconds=130.0, steps=30))
    (folder / "recipe.yaml").write_text(
        (repo_root() / "recipes" / "tiny-cpu.yaml").read_text() + "# </pre><script>1</script>\n"
    )
    return folder


LOADED_FROM = ("src", "href", "xlink:href", "srcset", "data")


def parsed(text):
    """What a browser would load or run, and the embedded data."""
    tags = BeautifulSoup(text, "html.parser").find_all(True)
    loads = []
    for tag in tags:
        for name, value in tag.attrs.items():
            elsewhere = name in LOADED_FROM and value[:1] != "#"
            if elsewhere or name.startswith("on"):
                loads.append((tag.name, name, value))
    return SimpleNamespace(
        tags=[tag.name for tag in tags],
        scripts=[(tag.get("type"), tag.string) for tag in tags if tag.name == "script"],
        loads=loads,
    )


# --- words ---


@pytest.mark.parametrize(
    ("difference", "interval", "p", "start"),
    [
        (0.462, [0.429, 0.495], 3e-40, "Accuracy rose"),
        (-0.2, [-0.3, -0.1], 0.001, "Accuracy fell"),
        (-0.04, [-0.18, 0.10], 0.67, "No clear change"),
        (0.04, [0.001, 0.08], 0.06, "No clear change"),  # the two disagree: not clear
        (0.1, [0.05, 0.15], None, "Accuracy rose"),
    ],
)
def test_the_headline_is_honest_about_noise(difference, interval, p, start):
    part = {"accuracy": 0.53, "n": 1000, "interval": [0.5, 0.56]}
    after = part | {"accuracy": 0.53 + difference}
    change = {"difference": difference, "difference_interval": interval, "mcnemar_p": p}
    assert report.headline({"before": part, "after": after, **change}).startswith(start)


# --- before beside after ---


def test_flips_are_counted_by_problem():
    assert flip_counts(BEFORE, AFTER) == {"right_right": 5, "right_wrong": 5, "wrong_right": 22, "wrong_wrong": 8}
    with pytest.raises(CourseError):
        flip_counts(BEFORE, EvalRun(AFTER.records[:-1]))


def test_categories_and_parts_of_the_reward_as_tables():
    rows = category_counts(BOTH)
    assert [list(row) for row in rows] == [["category", "before", "after", "meaning"]] * len(rows)
    assert sum(row["before"] for row in rows) == sum(row["after"] for row in rows) == 40
    assert {row["category"]: (row["before"], row["after"]) for row in rows}["right"] == (10, 27)
    assert list(category_counts(Comparison(BEFORE, None))[0]) == ["category", "before", "meaning"]
    assert category_counts(Comparison(None, None)) == reward_means(Comparison(None, None)) == []

    means = reward_means(BOTH)
    assert [row["part"] for row in means] == [f.__name__ for f in rewards.REFERENCE_REWARDS] + ["sum"]
    assert means[3]["before"] == pytest.approx(1.5 * 10 / 40)
    assert means[3]["after"] == pytest.approx(1.5 * 27 / 40)
    assert means[-1]["after"] == pytest.approx(sum(row["after"] for row in means[:-1]))


# --- the page ---


def written(run_dir):
    """The text of a run's page."""
    return report.write_report(run_dir).read_text(encoding="utf-8")


def embedded(text):
    page = parsed(text)
    return page, json.loads(next(script for kind, script in page.scripts if kind == "application/json"))


def completions(data, phase):
    return [problem[6][phase][0] for problem in data["problems"]]


def test_the_page_holds_every_answer_and_warning_and_loads_nothing(run_dir):
    text = written(run_dir)
    page, data = embedded(text)
    assert [problem[0] for problem in data["problems"]] == [problem.id for problem in PROBLEMS]
    assert completions(data, 0) == [record["completion"] for record in BEFORE.records]
    assert completions(data, 1)[-len(HOSTILE) :] == HOSTILE
    assert len(page.scripts) == 2  # the data and the page's own
    assert page.loads == []
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    block = text.partition('type="application/json" id="data">')[2].partition("</script>")[0]
    assert json.loads(block)
    assert not set("<>&\u2028\u2029") & set(block)
    ids = re.findall(r'\sid="([^"]+)"', text.partition("<script")[0])
    assert len(ids) == len(set(ids))
    addresses = {problem[0] for problem in data["problems"]}
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', text)) <= set(ids) | addresses
    (alert,) = find_alerts(ROWS)
    assert alert.kind == "kl"
    assert str(alert) in text


def test_the_first_screen_says_what_was_done_and_shows_one_answer_that_changed(run_dir):
    page = BeautifulSoup(written(run_dir), "html.parser")
    (title,) = page.select("h1")
    assert title.text == "tiny-base on generated word problems, before and after 30 training steps"
    (example,) = page.select("header .example")
    asked = [question.text for question in example.select(".question")]
    assert asked == [PROBLEMS[10].question]  # the first that went from wrong to right
    assert [pre.text for pre in example.select("pre")] == [BEFORE.records[10]["completion"], log("r", 10)]
    assert [mark.text for mark in example.select(".mark")] == ["✗ wrong", "✓ right"]
    assert [link["href"] for link in example.select("a")] == ["#p10"]
    assert "the first of\n22 that went wrong → right; 5 went right → wrong" in example.text


def test_the_one_answer_follows_the_run_and_is_left_out_where_none_changed(run_dir):
    for phase, run in (("before", AFTER), ("after", BEFORE)):
        run.save(run_dir / "evals" / f"{phase}.jsonl")
    (example,) = BeautifulSoup(written(run_dir), "html.parser").select(".example")
    assert [mark.text for mark in example.select(".mark")] == ["✓ right", "✗ wrong"]
    AFTER.save(run_dir / "evals" / "after.jsonl")
    (run_dir / "recipe.yaml").unlink()
    page = BeautifulSoup(written(run_dir), "html.parser")
    assert page.select(".example") == []
    assert [title.text for title in page.select("h1")] == ["demo"]


def test_the_data_say_why_each_part_of_the_reward_was_given(run_dir):
    data = answer_inspector.page_data(comparison.load(run_dir))
    assert data["parts"] == ["correct_answer", "tidy_format"]  # those of the recipe
    for problem, record in zip(data["problems"], AFTER.records, strict=True):
        told = [data["notes"][number] for number in problem[6][1][5]]
        parts = rewards.explain(record["completion"], record["gold"], functions=rewards.get_rewards(data["parts"]))
        assert told == [(part.points, part.why) for part in parts]
    (run_dir / "recipe.yaml").unlink()
    data = answer_inspector.page_data(comparison.load(run_dir))
    assert data["parts"] == [function.__name__ for function in rewards.REFERENCE_REWARDS]


def test_sampled_completions_stand_beside_the_greedy_one(monkeypatch):
    def sampled(prompts):
        return [log("r", prompt.split("<b>")[1].split("</b>")[0]) for prompt in prompts]

    run = evaluate(lambda prompts: [""] * len(prompts), PROBLEMS[:3], sampled=sampled, samples=2, progress=False)
    for longest, shown in ((answer_inspector.SAMPLED_TEXT, log("r", 2)), (10, None)):  # too long: the answer alone
        monkeypatch.setattr(answer_inspector, "SAMPLED_TEXT", longest)
        data = answer_inspector.page_data(Comparison(run, None))
        assert data["phases"] == ["before"]
        assert completions(data, 0) == ["", "", ""]
        assert [sample[:2] for sample in data["problems"][2][6][0][10]] == [[shown, "2"]] * 2
    run = evaluate(sampled, PROBLEMS[:3], samples=2, progress=False)  # no greedy one: the first stands for all
    data = answer_inspector.page_data(Comparison(run, None))
    assert completions(data, 0) == [log("r", n) for n in range(3)]
    assert len(data["problems"][0][6][0][10]) == 2


def test_a_run_that_is_not_finished_has_a_page(run_dir):
    (run_dir / "evals" / "after.jsonl").unlink()
    (run_dir / "metrics.jsonl").unlink()
    _, data = embedded(written(run_dir))
    assert data["phases"] == ["before"]
    assert len(data["problems"][0][6]) == 1
    (run_dir / "evals" / "before.jsonl").unlink()
    assert len(parsed(written(run_dir)).scripts) < 2  # no answers to look at
    with pytest.raises(CourseError):
        report.inspector(run_dir)


def test_missing_and_mismatched_runs_are_refused(run_dir):
    with pytest.raises(CourseError, match="nowhere"):
        report.write_report(run_dir / "nowhere")
    EvalRun(AFTER.records[:-1]).save(run_dir / "evals" / "after.jsonl")
    with pytest.raises(CourseError, match="different problems"):
        report.write_report(run_dir)
    AFTER.save(run_dir / "evals" / "after.jsonl")
    for name, content in (("summary.json", "{"), ("summary.json", "[1]"), ("environment.json", "[1]")):
        before = (run_dir / name).read_text() if (run_dir / name).exists() else "{}"
        (run_dir / name).write_text(content)
        with pytest.raises(CourseError, match=re.escape(f"{name}: ")):
            report.write_report(run_dir)
        (run_dir / name).write_text(before)
    assert not (run_dir / "report.html").exists()


# --- inside a notebook ---


def test_the_inspector_of_a_notebook_is_a_frame_that_needs_nothing(run_dir):
    shown = report.inspector(run_dir)._repr_html_()
    (tag, *others) = parsed(shown).tags
    assert (tag, others[0]) == ("div", "iframe")
    assert "script" not in others  # all of it is inside the frame
    assert "sandbox='allow-scripts'" in shown  # and no allow-same-origin
    page = parsed(html.unescape(shown.partition("srcdoc='")[2].partition("'></iframe>")[0]))
    assert page.loads == []
    assert page.scripts == parsed(written(run_dir)).scripts  # data and code of the page


def test_several_tasks_have_their_own_rates_in_summary_and_report(run_dir):
    before, after = (
        EvalRun([record | {"task": "easy" if n < 20 else "hard"} for n, record in enumerate(run.records)])
        for run in (BEFORE, AFTER)
    )
    summary = summarize(before, after, steps=30)
    easy, hard = summary["tasks"]["easy"], summary["tasks"]["hard"]
    assert (easy["before"]["n"], easy["before"]["accuracy"], easy["after"]["accuracy"]) == (20, 0.5, 0.75)
    alone = summarize(EvalRun(before.records[20:]), EvalRun(after.records[20:]))
    assert hard == {key: value for key, value in alone.items() if key in hard}
    assert "tasks" not in summarize(BEFORE, AFTER)
    before.save(run_dir / "evals" / "before.jsonl")
    after.save(run_dir / "evals" / "after.jsonl")
    text = written(run_dir)
    assert ">easy</th>" in text
    assert ">hard</th>" in text
