"""Figures say what the data says, not by colour alone; the live plot is one picture; the slider needs no kernel."""

import itertools
import math
import re

import drawing_lines
import matplotlib.pyplot as plt
import nbclient
import nbconvert
import nbformat
import numpy as np
import pytest
from bs4 import BeautifulSoup
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from test_report import ROWS, run_with

from grpo_lib import analysis, plain_grpo, rewards, statistics
from grpo_lib.evaluation import EvalRun, summarize
from grpo_train import report
from grpo_train.report import display, figures
from grpo_train.report.alt_text import LONGEST, alt_text
from grpo_train.report.comparison import Comparison
from grpo_train.runs.metric_glossary import REWARD_MEAN, read_metrics

BEFORE = run_with(range(10))
AFTER = run_with(range(5, 32), wrong="no tags")


def lines(axes):
    return [line for line in axes.get_lines() if len(line.get_xdata())]


# --- figures ---


def test_pass_at_k_before_and_after_with_their_intervals():
    part = {"n": 30, "samples": 4, "pass_at_k": {"1": 0.25, "2": 0.5, "4": 0.75}}
    part["pass_at_k_interval"] = {k: [rate - 0.125, rate + 0.125] for k, rate in part["pass_at_k"].items()}
    axes = figures.pass_at_k({"before": part, "after": part | {"pass_at_k": {"1": 1.0, "2": 1.0, "4": 1.0}}}).axes[0]
    assert [line.get_ydata().tolist() for line in lines(axes)] == [[0.25, 0.5, 0.75], [1.0] * 3]
    assert len(axes.collections) == 2
    assert axes.get_title("left") == "30 problems, 4 samples each"
    assert not figures.pass_at_k({"before": {"n": 3}}).axes


def test_a_figure_says_in_words_what_it_draws():
    said = alt_text(figures.training_curves([{"step": 1, "reward": 0.25}, {"step": 2, "reward": 0.75}]))
    assert "Reward" in said
    assert "0.25" in said
    assert "0.75" in said
    said = alt_text(figures.flips(BEFORE, AFTER))
    assert "right, then wrong 5" in said
    assert "wrong, then right 22" in said
    _, (left, right) = plt.subplots(1, 2)
    left.hist(range(100), bins=20)
    left.axvline(7, label="limit")
    right.imshow([[1, 2], [3, 4]])
    right.set_yticks(range(2), range(1, 3))  # integers as labels
    said = alt_text(left.figure)
    assert "highest 5" in said
    assert "limit: at 7" in said
    assert "2 rows" in said
    figure, axes = plt.subplots()
    axes.plot([0.25, 0.75], [3, 3], "o", label="dots")
    axes.scatter(range(20), range(20))
    assert "dots: 0.25, 0.75. dots: 20 points, 0 to 19, 0 to 19, correlation 1." in alt_text(figure)
    axes.barh([f"a bar with a very long name, number {i}" for i in range(15)], range(15))
    assert len(alt_text(figure)) < 600
    assert "highest 14 at a bar with a very long name, number 14" in alt_text(figure)


def test_curves_leave_out_what_is_not_a_number_and_take_the_later_row():
    (axes,) = figures.training_curves(
        [
            {"step": 2, "reward": 9.0},
            {"step": 1, "reward": 1.0},
            {"step": 2, "reward": 2.0, "loss": math.nan, "kl": None},
            {"step": 3, "reward": math.inf},
            {"step": 4, "reward": 4.0},
        ],
        total_steps=60,
    ).axes
    (line,) = lines(axes)
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 2, 4], [1.0, 2.0, 4.0])
    assert axes.get_xlim()[1] >= 60
    assert axes.get_ylabel()
    assert axes.get_title("left") == "Reward"


def test_the_thick_line_is_the_mean_of_the_last_steps():
    thin, thick = lines(figures.training_curves([{"step": i, "reward": float(i)} for i in range(1, 31)]).axes[0])
    assert list(thin.get_ydata()) == list(range(1, 31))
    assert list(thick.get_ydata())[:3] == [1.0, 1.5, 2.0]
    assert thick.get_ydata()[-1] == 29.0


def test_a_figure_of_nothing_is_drawn():
    assert all(
        figure.texts[0].get_text()
        for figure in (figures.training_curves([]), figures.before_after({}), figures.categories(None, None))
    )
    figures.training_curves([{"step": 1, "reward": 0.0}])._repr_png_()


def test_bars_are_the_rates_with_their_intervals():
    summary = summarize(BEFORE, AFTER)
    axes = figures.before_after(summary).axes[0]
    assert [bar.get_height() for bar in axes.patches] == pytest.approx(
        [summary[phase][key] for phase in ("before", "after") for key in ("accuracy", "lenient_accuracy")]
    )
    ends = [box.lines[2][0].get_segments()[0][:, 1] for box in axes.containers if hasattr(box, "has_yerr")]
    assert sorted(ends[1]) == pytest.approx(summary["after"]["interval"])
    assert len(figures.before_after({"before": summary["before"]}).axes[0].patches) == 2


def test_the_parts_of_the_gain_are_bars():
    (axes,) = figures.decomposition(BEFORE, AFTER).axes
    bars = {label.get_text(): bar.get_width() for label, bar in zip(axes.get_yticklabels(), axes.patches, strict=True)}
    assert bars == pytest.approx({row["part"]: 100 * row["gain"] for row in analysis.gain_parts(BEFORE, AFTER)})


def test_the_parts_of_the_reward_are_lines_of_one_panel():
    parts = ("one", "two", "three", "four")
    rows = [{"step": step, "reward": 1.0} | {REWARD_MEAN.format(name): step for name in parts} for step in range(1, 4)]
    _, by_part = figures.training_curves(rows).axes
    assert by_part.get_title("left") == "Reward by part"
    assert [text.get_text() for text in by_part.get_legend().get_texts()] == list(parts)
    assert len({line.get_color() for line in lines(by_part)}) == 4


def test_categories_and_parts_of_the_reward_before_and_after():
    axes = figures.categories(BEFORE, AFTER).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["right", "no answer", "other"]
    assert [bar.get_width() for bar in axes.patches] == [10, 0, 30, 27, 13, 0]
    functions = rewards.get_rewards(["correct_answer", "tidy_format"])
    axes = figures.reward_parts(Comparison(BEFORE, AFTER, functions)).axes[0]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([0.25, 0.1, 0.35, 0.675, 0.0675, 0.7425])
    below = figures.reward_parts(Comparison(run_with((), wrong="no tags"), AFTER)).axes[0]  # by the reference reward
    assert "−2.00" in [text.get_text() for text in below.texts]


# --- for everybody ---


def lightness(colour):
    """CIE L*, from 0 to 100, with 2.2 for sRGB's curve."""
    luminance = sum(part * value**2.2 for part, value in zip((0.21, 0.72, 0.07), to_rgb(colour), strict=True))
    return 116 * luminance ** (1 / 3)


def told_apart(figure):
    """Whether, in each panel, two series differ in style, marker or hatch, or else by 25 in lightness."""
    for axes in figure.axes:
        looks = []  # of each series: how it is drawn, and its lightness
        for line in axes.get_lines():
            if not line.get_label().startswith("_"):
                # matplotlib calls every dash pattern of one's own "--"
                how = (line._unscaled_dash_pattern, line.get_marker())
                looks.append((how, lightness(line.get_color())))
        for bars in axes.containers:
            if hasattr(bars, "patches"):
                looks.append((("bar", bars[0].get_hatch()), lightness(bars[0].get_facecolor())))
        for (how, light), (other_how, other_light) in itertools.combinations(looks, 2):
            if how == other_how and abs(light - other_light) < 25:
                return False
    return True


@plt.rc_context()
def test_nothing_is_told_by_colour_alone_and_no_description_is_long(root):
    run = root / "assets" / "reference" / "course"
    before, after, sampled = (EvalRun.load(run / "evals" / f"{n}.jsonl") for n in ("before", "after", "sampled"))
    display.style()
    (first_line, *_) = plt.figure().add_subplot().plot([range(6), range(6)], label=list("abcdef"))
    drawn = [
        first_line.figure,
        figures.training_curves(read_metrics(run / "metrics.jsonl")),
        figures.runs_side_by_side(dict.fromkeys("abc", ROWS), ["reward", "accuracy"]),
        figures.before_after(summarize(before, after)),
        figures.pass_at_k(dict.fromkeys(("before", "after"), sampled.summary())),
        figures.flips(before, after),
        figures.categories(before, after),
        figures.decomposition(before, after),
        figures.reward_parts(Comparison(before, after)),
    ]
    for figure in drawn:
        assert told_apart(figure), alt_text(figure)
        assert len(alt_text(figure)) <= LONGEST


@pytest.fixture(scope="module")
def executed():
    """A notebook: a table, a live plot, and a cell after it."""
    cells = [nbformat.v4.new_code_cell(source) for source in (TABLE, PLOT, "1", HELD)]
    return nbclient.NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=120, kernel_name="python3").execute()


HELD = """
import os
from grpo_lib.common import environment
environment.chip_holders, environment.HANDOVER_SECONDS = (lambda: {7: "grpo train"}), 0
environment._require_free_chips_once.cache_clear()  # there were no chips in the first cell
environment.prepare()  # with JAX_PLATFORMS=cpu nothing is asked
print("on the CPU")
del os.environ["JAX_PLATFORMS"]
try:
    environment.prepare()
except environment.CourseError as error:
    print(error)
"""
TABLE = "from grpo_train.report import display; display.table([{'a|' 'b': 'c\\n*' 'd*', 'e': 1}])"
PLOT = """
import warnings; warnings.simplefilter("error", ResourceWarning)
from grpo_train.report import live_plot
plot = live_plot.LivePlot(total_steps=9)
for step in range(1, 10):
    plot({"step": step, "reward": step, "kl": 0.0 if step < 4 else 3.0})
"""


def test_an_exported_notebook_keeps_its_tables(executed):
    texts = [
        nbconvert.MarkdownExporter(display_data_priority=[f"text/{kind}"]).from_notebook_node(executed)[0]
        for kind in ("html", "markdown", "plain")
    ]
    assert len(executed.cells[0].outputs) == 1
    assert all("a|b" in text.replace("\\", "") and "*d*" in text.replace("\\", "") for text in texts)


def test_what_a_model_writes_is_text_and_no_formula(tokenizer):
    """JupyterLab's MathJax looks for the beginning of a formula within a text without tags."""
    written = r"$x$ \(a+b\) \[c\] \begin{align}d\end{align} \ref{e} \$5 <b>"
    for shown in (display.completions([{"text": written}])._repr_html_(), display.tokens(tokenizer, written).data):
        parts = [str(part) for part in BeautifulSoup(shown, "html.parser").find_all(string=True)]
        assert [part for part in parts if len(part) > 1 and ("$" in part or "\\" in part)] == []
    cell = BeautifulSoup(display.completions([{"text": written}])._repr_html_(), "html.parser").find("tbody")
    assert cell.get_text() == written


@pytest.mark.parametrize("language", ["", "python", "yaml", "json"])
def test_code_is_shown_letter_for_letter_in_a_monospaced_font(language):
    """Where Markdown is not rendered, such as in a page that nbconvert makes, HTML is what is shown."""
    written = "def less(a: int) -> bool:\n    # <b>\n    return a < 1 and 'x' != \"&amp;\"\n\n\n# $x$"
    shown = display.text(f"{written}\n", language)
    block = BeautifulSoup(shown._repr_html_(), "html.parser").pre
    assert block.get_text() == repr(shown) == written
    assert "font-family:monospace" in block["style"]
    assert bool(block.find_all("span")) == bool(language)
    assert shown._repr_markdown_() == f"```{language}\n{written}\n```"


def test_colours_of_code_can_be_read_on_white_and_on_black():
    shown = display.source(display.source)._repr_html_()
    colours = set(re.findall("#[0-9a-f]{6}", shown))
    assert len(colours) >= 3
    assert all(61 < lightness(colour) < 67 for colour in colours)  # black is 0, white 116


def test_a_notebook_says_who_holds_the_chips(executed):
    [output] = executed.cells[-1].outputs
    assert re.fullmatch(r"on the CPU\nthe TPU is held by process 7 \(grpo train\); .* kill 7\n", output.text)


# --- figures of the lessons ---


@pytest.mark.parametrize("folder", ["notebooks", "notebooks/further"])
def test_cells_draw_little_themselves(folder):
    lines = {path.stem: lines for path, lines in drawing_lines.by_notebook(folder)}
    assert sum(lines.values()) <= drawing_lines.BOUNDS[folder], lines


def test_a_cell_draws_if_it_names_what_matplotlib_draws_on():
    assert drawing_lines.draws("plt.plot(x)")
    assert drawing_lines.draws("for ax in grid:\n    ax.plot(x)")
    assert drawing_lines.draws("import matplotlib.pyplot as plt")
    assert drawing_lines.draws("def draw(axes, y):\n    pass")
    assert not drawing_lines.draws("figures.clip(surrogate, epsilon)  # fig")


def test_the_first_figure_of_the_course_shows_one_question_and_three_answers(root):
    figure = figures.result(root / "assets" / "reference")
    answers, curve = figure.axes
    said = [text.get_text() for text in answers.texts]
    assert sum("<answer>" in text for text in said) == 3
    assert said.index("right") < said.index("<reasoning>?</reasoning><answer>?</answer>")
    assert [text.get_text() for text in curve.texts] == ["33\u00a0%", "96\u00a0%"]
    assert overlapping(figure) == []


def test_the_four_counts_are_areas():
    axes = figures.flips(BEFORE, AFTER).axes[0]
    areas = [
        part.get_width() * part.get_height() for part in axes.patches
    ]  # per verdict before: then wrong, then right
    assert areas == pytest.approx([5 / 40, 5 / 40, 8 / 40, 22 / 40])


def test_the_first_four_curves_and_the_others_are_all_curves(root):
    rows = read_metrics(root / "assets" / "reference" / "course" / "metrics.jsonl")
    first, more, every = (
        [axes.get_title("left") for axes in draw(rows).axes]
        for draw in (figures.main_curves, figures.more_curves, figures.training_curves)
    )
    assert tuple(first) == figures.MAIN
    assert sorted(first + more) == sorted(every)
    assert figures.more_curves([{"step": 1, "reward": 0.0}]).axes == []


def test_a_folded_figure_is_a_picture_with_its_words():
    shown = display.folded(figures.loop(), "one <step>")
    page = BeautifulSoup(shown._repr_html_(), "html.parser")
    assert page.details.summary.get_text() == "one <step>"
    assert page.img["alt"] == repr(shown) and "sync new weights" in page.img["alt"]
    assert page.img["src"].startswith("data:image/png;base64,")


def test_a_group_shows_each_completion_with_its_advantage():
    members = [
        {"completion": "a\nb", "reward": 1.1, "advantage": 1.5},
        {"completion": "c", "reward": 0, "advantage": -1},
    ]
    upper, lower = figures.groups({"before": members, "after": members[:1]}).axes
    assert [bar.get_width() for bar in upper.patches] == [1.5, -1]
    assert [label.get_text() for label in upper.get_yticklabels()] == ["a↵b   1.1", "c   0.0"]
    assert lower.get_xlabel() == "advantage"


def test_a_lesson_gives_what_it_teaches_and_the_figure_draws_it():
    objective = lambda ratio, advantage: np.clip(ratio, 0.8, 1.2) * advantage  # noqa: E731
    good, bad = figures.clip(objective, epsilon=0.2).axes
    drawn = lines(good)[1]
    assert drawn.get_ydata() == pytest.approx(np.clip(drawn.get_xdata(), 0.8, 1.2))
    assert lines(bad)[1].get_ydata().max() == pytest.approx(-0.8)
    (axes,) = figures.kl({"k2": lambda x: x**2 / 2}).axes
    assert lines(axes)[0].get_ydata().max() == pytest.approx(1.5**2 / 2)
    (axes,) = figures.break_even(right=9.5, wrong=4, garbage=5).axes
    (shaded,) = axes.patches
    assert shaded.get_width() == pytest.approx(1 / 5.5)


def test_two_pulls_are_equal_where_the_algebra_says():
    """p (1 − p) = β (p − 0.1) is a quadratic equation; with β = 0 the pulls meet at 1 only."""
    p = np.linspace(0, 1, 2001)
    betas = (0.1, 0.5, 1.0)
    axes = figures.two_pulls(p, p * (1 - p), {f"{beta}": beta * (p - 0.1) for beta in (0.0, *betas)}, 0.1).axes[0]
    equal = [line.get_xdata()[0] for line in lines(axes) if line.get_marker() == "o"]
    assert equal == pytest.approx([max(np.roots([1, beta - 1, -0.1 * beta])) for beta in betas], abs=5e-4)


def test_one_group_has_the_advantages_of_the_loop(root):
    figure = figures.one_group(root / "assets" / "reference")
    advantages = [bar.get_width() for bar in figure.axes[0].patches]
    paid = [float(label.get_text().split()[-1]) for label in figure.axes[0].get_yticklabels()]
    assert advantages == pytest.approx(plain_grpo.group_advantages(np.array(paid), 8), abs=1e-3)
    assert overlapping(figure) == []


def test_labels_on_their_own_ground_do_not_follow_a_dark_page():
    axes = figures.flips(BEFORE, AFTER).axes[0]
    inside = [text for text in axes.texts if any(part.contains_point(on_screen(axes, text)) for part in axes.patches)]
    assert inside and figures.INK not in {text.get_color() for text in inside}


def on_screen(axes, text):
    return axes.transData.transform(text.get_position())


P = np.linspace(0, 1, 11)
CHANGE = statistics.PairedDifference(-0.04, -0.09, 0.01)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: figures.loop(),
        lambda: figures.token_lengths([18, 19, 19], [10, 11, 11], 24),
        lambda: figures.gaps({"as they are": P / 100, "rounded": P / 1e5}),
        lambda: figures.agreement(-P, {"healthy": -P, "swapped": -2 * P}),
        lambda: figures.reward_grid(["right", "wrong"], ["one", "sum"], np.array([[3.0, 9.5], [-1.0, 4.0]])),
        lambda: figures.reward_counts([-2.0, 5.25, 5.5, 9.5], [29, 8, 8, 67]),
        lambda: figures.break_even(9.5, 4, 5),
        lambda: figures.trying({"reference": P[::-1], "repaired": P}),
        lambda: figures.groups({"a group": [{"completion": "9*2=18", "reward": 1.1, "advantage": 1.5}]}),
        lambda: figures.advantages({"G = 2": (P, np.sign(P)), "G = 8": (P, P)}),
        lambda: figures.two_pulls(P, P * (1 - P), {"β = 0.5": 0.5 * (P - 0.1)}, 0.1),
        lambda: figures.zero_variance(P, {"G = 2": P**2 + (1 - P) ** 2, "G = 4": P**4 + (1 - P) ** 4}),
        lambda: figures.ways({"format": P, "accuracy": P**2}),
        lambda: figures.bootstrap(P, CHANGE),
        lambda: figures.puzzle(np.arange(-20, 20), {"two samples": 0.5, "20 % flip": 0.2}),
        lambda: figures.verdict([True, False], [False, False], CHANGE, "p = 1", clear=False),
        lambda: figures.elicited({"1 calculation": [0.7, 0.9]}, {"1 calculation": 0.95}),
        lambda: figures.flips(BEFORE, AFTER),
        lambda: figures.main_curves(ROWS),
        lambda: figures.runs_side_by_side(dict.fromkeys("ab", ROWS), ["reward", "accuracy", "entropy", "grad_norm"]),
    ],
)
def test_a_figure_fits_a_page_and_nothing_in_it_overlaps(draw):
    figure = draw()
    assert figure.get_size_inches()[0] * figure.dpi <= 900
    assert 20 < len(alt_text(figure)) <= LONGEST
    assert told_apart(figure), alt_text(figure)
    assert overlapping(figure) == []


def overlapping(figure):
    """Pairs of texts that lie on each other once the figure is drawn."""
    FigureCanvasAgg(figure).draw()
    texts = []
    for axes in figure.axes:
        texts += [*axes.texts, axes.title, axes._left_title]
        for axis in (axes.xaxis, axes.yaxis) if axes.axison else ():
            texts += [axis.label, *(tick.label1 for tick in axis._update_ticks())]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_visible() and text.get_text()]
    return [(one, other) for (one, a), (other, b) in itertools.combinations(boxes, 2) if a.overlaps(b)]


# --- the triangle of three answers ---


def towards_the_third(pi):
    """An update that feeds the third answer from the first where it is rare, and the other way round elsewhere."""
    size = 0.1 if pi[2] < 0.5 else -0.1
    return np.array([-size, 0.0, size])


def test_the_triangle_says_where_the_third_answer_gains(tmp_path):
    shown = report.simplex(("a", "b", "c"), {"one <way>": towards_the_third}, start=(0.2, 0.2, 0.6))
    assert "at the dot (a 0.2, b 0.2, c 0.6)" in shown.alt
    assert "one <way>: a +0.100, b +0.000, c -0.100; c gains at 15 of 21 points" in shown.alt
    data, about = shown._repr_mimebundle_()
    assert about["image/svg+xml"]["alt"] == data["text/plain"] == shown.alt
    (drawing,) = BeautifulSoup(data["image/svg+xml"], "xml").find_all("svg")
    assert drawing["role"] == "img" and drawing["aria-label"] == shown.alt
    arrows = [part for part in drawing.find_all("g") if part.get("id", "").startswith("Quiver")]
    assert len(arrows) == 22, "21 points of the grid, and the dot"
    again = report.simplex(("a", "b", "c"), {"one <way>": towards_the_third}, start=(0.2, 0.2, 0.6))
    assert again.svg == shown.svg, "the same figure is the same file"


def test_a_triangle_has_three_answers():
    with pytest.raises(ValueError, match="three answers; got 2"):
        report.simplex(("a", "b"), {}, start=(0.5, 0.5))


# --- the slider ---


def test_the_slider_holds_every_picture_and_shows_the_first_without_a_script():
    slider = figures.slider(
        [(f"n = {n} <b>", figures.training_curves([{"step": 1, "reward": n}])) for n in (50, 100, 200)], start=1
    )
    assert slider.document.count("<svg") == 3
    assert slider.picture == (300, 230)
    assert re.findall(r'<figure data-label="n = ([0-9]+) &lt;b&gt;"( hidden)?>', slider.document) == [
        *(("50", " hidden"), ("100", ""), ("200", " hidden")),
    ]
    png, told = slider._repr_png_() or (b"", {})  # what is shown at first, where there are no frames
    assert png.startswith(b"\x89PNG")
    assert "reward: 100" in told["alt"]


# --- the live plot ---


def test_in_a_notebook_the_cell_keeps_one_picture_and_the_warnings(executed):
    _, plotted, after, _ = executed.cells
    picture, warnings = plotted.outputs
    assert "image/png" in picture["data"]
    assert "step 6: " in warnings["data"]["text/markdown"]
    assert len(after.outputs) == 1  # no picture is flushed late
