"""Figures say what the data says, the live plot is one picture, and no completion can break out of the page."""

import json
import math
import re
import shutil
from html.parser import HTMLParser

import pytest

from grpo_lib import report
from grpo_lib.errors import CourseError
from grpo_lib.evaluation import EvalRun, evaluate, summarize
from grpo_lib.files import append_jsonl, write_json_atomic
from grpo_lib.problems.types import Problem

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
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def say(answer):
    return f"<reasoning>r</reasoning><answer>{answer}</answer>"


PROBLEMS = [Problem(f"p{i}", f"What is <b>{i}</b> + 0?", "", str(i), "test", 1) for i in range(40)]


def run_with(right, tail=()):
    """An evaluation with the given set of right answers; completions of the last problems are those of `tail`."""
    texts = {p.question: say(p.answer if i in right else int(p.answer) + 1) for i, p in enumerate(PROBLEMS)}
    texts |= {p.question: text for p, text in zip(PROBLEMS[len(PROBLEMS) - len(tail) :], tail, strict=True)}
    return evaluate(lambda prompts: [texts[prompt] for prompt in prompts], PROBLEMS, progress=False)


BEFORE = run_with(range(10), HOSTILE)
AFTER = run_with(range(5, 32), HOSTILE)
ROWS = [
    {
        "step": step,
        "reward": step / 30,
        "accuracy": step / 40,
        "lenient_accuracy": step / 35,
        "format": 0.9,
        "completion_length": 20.0,
        "zero_variance_groups": 0.5,
        "grad_norm": 1.0,
        "loss": 1e-8 * step,
    }
    for step in range(1, 31)
]


def lines(axes):
    return [line for line in axes.get_lines() if len(line.get_xdata())]


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "demo"
    BEFORE.save(folder / "evals" / "before.jsonl")
    AFTER.save(folder / "evals" / "after.jsonl")
    for row in ROWS:
        append_jsonl(folder / "metrics.jsonl", row)
    write_json_atomic(folder / "summary.json", summarize(BEFORE, AFTER, train_seconds=130.0, steps=30))
    (folder / "recipe.yaml").write_text("name: demo # </pre><script>1</script>\n")
    return folder


class Page(HTMLParser):
    """What a browser would load or run, and the embedded data."""

    def __init__(self, text):
        super().__init__()
        self.scripts, self.tags, self.loads, self._inside = [], [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        if tag == "script":
            self.scripts.append([attributes.get("type"), ""])
            self._inside = True
        for name, value in attributes.items():
            outside = name in ("src", "href", "xlink:href", "srcset", "data") and not (value or "").startswith("#")
            if outside or name.startswith("on"):
                self.loads.append((tag, name, value))

    def handle_endtag(self, tag):
        if tag == "script":
            self._inside = False

    def handle_data(self, data):
        if self._inside:
            self.scripts[-1][1] += data


# --- figures ---


def test_curves_have_a_panel_per_metric_with_labelled_axes():
    figure = report.training_curves(ROWS)
    titles = [axes.get_title("left") for axes in figure.axes]
    assert titles == [
        *("Reward", "Accuracy", "Exact format", "Completion length"),
        *("Groups without a signal", "Gradient norm", "Loss"),
    ]
    assert all(axes.get_ylabel() for axes in figure.axes)
    assert sum(axes.get_xlabel() == "training step" for axes in figure.axes) == 4
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_curves_leave_out_what_is_not_a_number_and_take_the_later_row():
    rows = [
        {"step": 2, "reward": 9.0},
        {"step": 1, "reward": 1.0},
        {"step": 2, "reward": 2.0, "loss": math.nan, "kl": None},
        {"step": 3, "reward": math.inf},
        {"step": 4, "reward": 4.0},
    ]
    (axes,) = report.training_curves(rows, total_steps=60).axes
    (line,) = lines(axes)
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 2, 4], [1.0, 2.0, 4.0])
    assert axes.get_xlim()[1] >= 60


def test_the_thick_line_is_the_mean_of_the_last_steps():
    axes = report.training_curves([{"step": i, "reward": float(i)} for i in range(1, 31)]).axes[0]
    thin, thick = lines(axes)
    assert list(thin.get_ydata()) == list(range(1, 31))
    assert list(thick.get_ydata())[:3] == [1.0, 1.5, 2.0] and thick.get_ydata()[-1] == 29.0


def test_no_rows_and_no_evaluation_are_said():
    assert "No training step" in report.training_curves([]).texts[0].get_text()
    assert "No evaluation" in report.before_after({}).texts[0].get_text()
    report.training_curves([{"step": 1, "reward": 0.0}])._repr_png_()


def test_bars_are_the_rates_with_their_intervals():
    summary = summarize(BEFORE, AFTER)
    axes = report.before_after(summary).axes[0]
    heights = [round(bar.get_height(), 6) for bar in axes.patches]
    assert heights == [
        *(summary["before"]["accuracy"], summary["before"]["lenient_accuracy"]),
        *(summary["after"]["accuracy"], summary["after"]["lenient_accuracy"]),
    ]
    low, high = summary["after"]["interval"]
    bars = [box.lines[2][0].get_segments()[0][:, 1] for box in axes.containers if hasattr(box, "has_yerr")]
    assert sorted(bars[2]) == pytest.approx([low, high])
    assert len(report.before_after({"before": summary["before"]}).axes[0].patches) == 2


def test_flips():
    counts = report.flip_counts(BEFORE, AFTER)
    assert counts == {"right_right": 5, "right_wrong": 5, "wrong_right": 22, "wrong_wrong": 8}
    axes = report.flips(BEFORE, AFTER).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [5, 22]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["right, then wrong", "wrong, then right"]
    with pytest.raises(CourseError, match="different problems"):
        report.flips(BEFORE, EvalRun(AFTER.records[:-1]))
    report.flips(BEFORE, BEFORE)._repr_png_()  # nothing changed


# --- the live plot ---


def test_the_live_plot_does_nothing_outside_a_notebook(capsys, monkeypatch):
    monkeypatch.setattr(report, "training_curves", lambda *_: pytest.fail("drew a figure"))
    live = report.LivePlot(total_steps=3)
    for row in ROWS[:3]:
        live(row)
    live.finish()
    assert capsys.readouterr().out == ""
    assert live.rows == ROWS[:3]


def test_the_live_plot_redraws_seldom_and_always_draws_the_last_step(monkeypatch):
    drawn, clock = [], [0.0]
    live = report.LivePlot(total_steps=20)

    def draw():
        drawn.append(len(live.rows))
        live._undrawn, live._next = False, clock[0] + live.SECONDS_BETWEEN

    monkeypatch.setattr(live, "_draw", draw)
    monkeypatch.setattr(report.time, "monotonic", lambda: clock[0])
    for row in ROWS[:20]:
        clock[0] += 0.2
        live(row)
    assert drawn == [1, 4, 7, 10, 13, 16, 19, 20]
    live.finish()
    assert len(drawn) == 8
    live({"step": None})
    live.finish()
    assert drawn[-1] == 21


def test_in_a_notebook_the_cell_keeps_one_picture(tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    source = """
import warnings; warnings.simplefilter("error", ResourceWarning)
from grpo_lib import report
report.LivePlot.SECONDS_BETWEEN = report.LivePlot.LARGEST_SHARE = 0.01
report.LivePlot.LARGEST_SHARE = 1.0
live = report.LivePlot(total_steps=3)
for step in range(1, 4):
    live({"step": step, "reward": step})
"""
    cells = [nbformat.v4.new_code_cell(text) for text in (source, "report.training_curves(live.rows)", "1")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    for cell in notebook.cells[:2]:
        (output,) = cell.outputs
        assert "image/png" in output["data"]
    assert len(notebook.cells[2].outputs) == 1  # no picture is flushed late


# --- words ---


@pytest.mark.parametrize(
    ("difference", "interval", "p", "start"),
    [
        (0.462, [0.429, 0.495], 3e-40, "Accuracy rose: 53.0"),
        (-0.2, [-0.3, -0.1], 0.001, "Accuracy fell"),
        (-0.04, [-0.18, 0.10], 0.67, "No clear change"),
        (0.04, [0.001, 0.08], 0.06, "No clear change"),  # the two disagree: not clear
        (0.1, [0.05, 0.15], None, "Accuracy rose"),
    ],
)
def test_the_headline_is_honest_about_noise(difference, interval, p, start):
    part = {"accuracy": 0.53, "n": 1000, "interval": [0.5, 0.56]}
    after = part | {"accuracy": 0.53 + difference}
    text = report.headline(
        {
            "before": part,
            "after": after,
            "difference": difference,
            "difference_interval": interval,
            "mcnemar_p": p,
        }
    )
    assert text.startswith(start)
    assert ("chance" in text) == start.startswith("No")
    assert ("McNemar" in text) == (p is not None)


def test_numbers_in_words():
    assert report.p_value(4.4e-12) == "p = 4 × 10⁻¹²".replace(" ", report.NBSP)
    assert report.p_value(0.0312) == "p = 0.031".replace(" ", report.NBSP)
    assert report.p_value(0.0) == "p < 10⁻³⁰⁰".replace(" ", report.NBSP)
    assert [report.points(x) for x in (0.031, -0.031, -0.0001)] == ["+3.1", "−3.1", "0.0"]


# --- the page ---


def embedded(path):
    page = Page(path.read_text(encoding="utf-8"))
    return page, json.loads(next(text for kind, text in page.scripts if kind == "application/json"))


def test_the_page_holds_every_answer_and_loads_nothing(run_dir):
    page, data = embedded(report.write_report(run_dir))
    assert [entry["id"] for entry in data] == [problem.id for problem in PROBLEMS]
    assert [entry["before"]["completion"] for entry in data] == [r["completion"] for r in BEFORE.records]
    assert [entry["after"]["completion"] for entry in data[-len(HOSTILE) :]] == HOSTILE
    assert len(page.scripts) == 2  # the data and the page's own
    assert page.loads == []
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    assert page.tags.count("svg") == 2 + 7
    text = (run_dir / "report.html").read_text(encoding="utf-8")
    assert "url(http" not in text and "@import" not in text
    assert "30 training steps · 2 min of training" in text
    assert "innerHTML" not in text and "document.write" not in text


def test_ids_in_the_figures_are_unique(run_dir):
    text = report.write_report(run_dir).read_text(encoding="utf-8")
    ids = re.findall(r'\sid="([^"]+)"', text.partition("<script")[0])
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', text)) <= set(ids)


def test_the_same_run_gives_the_same_page(run_dir):
    first = report.write_report(run_dir).read_bytes()
    assert report.write_report(run_dir).read_bytes() == first


def test_the_data_block_has_no_character_that_html_reads(run_dir):
    text = report.write_report(run_dir).read_text(encoding="utf-8")
    block = text.partition('id="answers">')[2].partition("</script>")[0]
    assert json.loads(block)
    assert not set("<>&\u2028\u2029") & set(block)


def test_a_run_without_after_says_so(run_dir):
    (run_dir / "evals" / "after.jsonl").unlink()
    (run_dir / "metrics.jsonl").unlink()
    path = report.write_report(run_dir)
    _, data = embedded(path)
    assert data[0]["after"] is None and data[0]["before"]["strict"] is True
    text = path.read_text(encoding="utf-8")
    assert "There is no evaluation after training yet" in text
    assert "no step has finished" in text and "Only one evaluation is there yet" in text


def test_an_empty_run_says_so(tmp_path):
    text = report.write_report(tmp_path).read_text(encoding="utf-8")
    assert "has not been evaluated yet" in text
    assert "There are no evaluation records yet" in text and "no training metrics yet" in text


def test_missing_and_mismatched_runs_are_refused(run_dir):
    with pytest.raises(CourseError, match="no such run directory"):
        report.write_report(run_dir / "nowhere")
    EvalRun(AFTER.records[:-1]).save(run_dir / "evals" / "after.jsonl")
    with pytest.raises(CourseError, match="same problems"):
        report.write_report(run_dir)
    assert not (run_dir / "report.html").exists()
    (run_dir / "summary.json").write_text("{")
    with pytest.raises(CourseError, match=r"summary\.json: not JSON"):
        report.write_report(run_dir)


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1200, 390])
def test_in_a_browser(run_dir, width):
    playwright = pytest.importorskip("playwright.sync_api")
    address = report.write_report(run_dir).as_uri()
    with playwright.sync_playwright() as player:
        browser = player.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 900})
        troubles, requests = [], []
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        assert page.locator("#rows tr.row").count() == 40

        page.get_by_role("button", name="right → wrong").click()
        assert page.locator("#rows .open").all_inner_texts() == [f"p{i}" for i in range(5)]
        page.get_by_role("button", name="wrong → right").click()
        assert page.locator("#rows tr.row").count() == 22
        page.get_by_role("button", name="all (40)").click()
        page.get_by_label("Search").fill("document.title")
        playwright.expect(page.locator("#count")).to_have_text("2 shown.")

        page.locator("#rows .open").first.click()
        panes = page.locator(".detail .pane pre")
        assert panes.all_text_contents() == [HOSTILE[0], HOSTILE[0]]
        assert page.locator("#rows .open").first.get_attribute("aria-expanded") == "true"
        page.locator("#rows .open").first.click()
        assert page.locator(".detail").count() == 0

        page.get_by_label("Search").fill("")
        playwright.expect(page.locator("#count")).to_have_text("40 shown.")
        for button in page.locator("#rows .open").all()[-len(HOSTILE) :]:
            button.click()
        assert page.title() == "demo: before and after"
        assert page.locator("img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert requests == [address] and troubles == []
        browser.close()
