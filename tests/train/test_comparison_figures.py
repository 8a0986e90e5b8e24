"""Figures of notebooks 06 to 09 by name: what they draw is what the records have, and their words say it."""

import json
import re

import numpy as np
import pytest

from grpo_lib import statistics
from grpo_train.report import comparison_figures, experiments, kernel_figures
from grpo_train.report.alt_text import alt_text


def named(axes):
    """Lines of a plot that a legend would have, by name."""
    return {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")}


@pytest.mark.parametrize(
    ("name", "metrics", "reference", "titles"),
    [
        ("stale", ["accuracy"], "synced", ["ratio-1", "clipped-ratio", "tis"]),
        ("std-hard", ["accuracy", "reward"], "std", ["no-std", "std-left-out", "", ""]),
        ("clip", ["entropy", "clip_ratio"], "0.2", ["0.28", "0.28"]),
    ],
)
def test_each_arm_has_a_plot_with_its_mean_and_that_of_the_reference(name, metrics, reference, titles):
    figure = comparison_figures.beside(name, {metric: f"unit of {metric}" for metric in metrics}, reference)
    assert [axes.get_title("left") for axes in figure.axes] == titles
    arms = [arm for arm in experiments.record(name)["arms"] if arm != reference]
    expected = [(metric, arm) for metric in metrics for arm in arms]
    for axes, (metric, arm) in zip(figure.axes, expected, strict=True):
        drawn = named(axes)
        assert set(drawn) == {reference, arm}
        for one, line in drawn.items():
            runs = [run["curves"][metric] for run in experiments.record(name)["runs"] if run["arm"] == one]
            assert line.get_ydata() == pytest.approx(np.mean(runs, axis=0))
        # Where the two coincide, the dashed one is above, so that both are seen.
        assert drawn[reference].get_zorder() > drawn[arm].get_zorder()
        assert drawn[reference].is_dashed()


def test_dots_of_seeds_are_told_by_name_also_where_all_are_the_same():
    figure = comparison_figures.dots({"base": [33.6, 33.6], "coin": [30.0, 1.8]}, "right, %")
    assert alt_text(figure) == "right, %. base: 33.6, 33.6. coin: 30, 1.8."


def test_the_letters_of_the_first_screen_are_runs_of_the_records():
    (axes,) = comparison_figures.which_is_grpo().axes
    for letter, (name, arm) in comparison_figures.LETTERS.items():
        accuracies = experiments.by_seed(name, arm, lambda run: run["accuracy"])
        assert named(axes)[letter].get_xdata() == pytest.approx(100 * accuracies)


def test_the_ends_of_an_experiment_are_those_of_its_runs_also_where_an_arm_has_fewer():
    (axes,) = comparison_figures.ends("real-blind").axes
    drawn = named(axes)
    for arm in experiments.record("real-blind")["arms"]:
        accuracies = experiments.by_seed("real-blind", arm, lambda run: run["accuracy"])
        assert drawn[arm].get_xdata() == pytest.approx(100 * accuracies)
    assert {len(line.get_xdata()) for line in drawn.values()} == {3, 5}


def test_every_prediction_is_a_square():
    claims = [claim for kept in experiments.records().values() for claim in kept["claims"]]
    blind, known = ([claim for claim in claims if bool(claim["known"]) is seen] for seen in (False, True))
    held = [sum(claim["held"] for claim in some) for some in (blind, known)]
    failed = len(blind) - held[0], len(known) - held[1]
    said = alt_text(comparison_figures.predictions())
    assert f"held: blind, {len(blind)} {held[0]}, not blind, {len(known)} {held[1]}." in said
    assert f"failed: blind, {len(blind)} {failed[0]}, not blind, {len(known)} {failed[1]}." in said


def test_measurements_are_sorted_and_have_wilsons_intervals():
    (axes,) = comparison_figures.measured_again([27, 17], 30).axes
    (line,) = named(axes).values()
    assert line.get_ydata() == pytest.approx([100 * 17 / 30, 90])
    (intervals,) = axes.collections
    drawn = np.array([np.asarray(path.vertices)[:, 1] for path in intervals.get_paths()])
    expected = np.array([statistics.wilson_interval(count, 30) for count in (17, 27)])
    assert drawn == pytest.approx(100 * expected)


def test_a_token_has_the_same_area_in_every_layout():
    """The caption of notebook 07 says: equal areas are equal numbers of tokens."""
    layouts = {"padded": np.ones((12, 61), int), "packed": np.ones((2, 336), int)}
    figure = kernel_figures.rows_of_tokens(layouts)
    figure.canvas.draw()
    areas = []
    for axes, table in zip(figure.axes, layouts.values(), strict=True):
        box = axes.get_window_extent()
        areas.append(box.height / len(table) * box.width / np.ptp(axes.get_xlim()))
    assert areas[0] == pytest.approx(areas[1], rel=0.02)


def test_tiles_reach_over_the_edges_of_the_array():
    said = alt_text(kernel_figures.tiles(tokens=5, entries=10, tile=(2, 4)))
    assert "9 tiles of 2 tokens and 4 entries" in said
    assert "block for the 3 tiles of a row" in said
    assert "4 tiles of 2 tokens and 4 entries" in alt_text(kernel_figures.tiles(tokens=4, entries=8, tile=(2, 4)))


def test_cells_of_the_further_notebooks_hold_no_drawing(root):
    for path in sorted((root / "notebooks" / "further").glob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            source = "".join(cell["source"]) if cell["cell_type"] == "code" else ""
            assert not re.search(r"\b(matplotlib|plt|axes|figure)\b", source), (path.name, cell["id"])
