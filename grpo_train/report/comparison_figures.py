"""Figures of comparisons, by name: notebooks 06, 08, 09a and 09b.

    beside("stale", {"accuracy": "share of right samples"}, reference="synced")    # arms of an experiment's record
    dots({"k1": values, "k3": others}, "exact KL, nats per token")                 # one for each seed
    lines({"": {"GRPO": sizes}}, x="right completions of 8")                       # plain curves

Two curves that nearly coincide are never told apart by colour: one is solid and dark, the other light and dashed, and
a third one has a plot of its own.
"""

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from grpo_lib import statistics
from grpo_train.report import canvas, experiments
from grpo_train.report.palette import AFTER, BEFORE, BLUE, GREY, INK, LINES, SKY, VERMILLION

MARKERS = "osD^vP"
# Letters of notebook 09a -> experiment and arm.
LETTERS = {"A": ("expert", "one-round"), "B": ("coin", "base"), "C": ("expert", "grpo"), "D": ("coin", "coin")}
# Drawn over the other line, so that both are seen where they coincide.
REFERENCE = {"color": VERMILLION, "linestyle": (0, (4, 2)), "linewidth": 1.6, "zorder": 4}
ARM = {"color": BLUE, "linewidth": 2.6, "zorder": 3}


# --- records of experiments ---


def beside(name: str, metrics: Mapping[str, str], reference: str, log: Sequence[str] = ()) -> Figure:
    """Every other arm of an experiment in a plot of its own, beside the arm `reference`: a metric of each step.

    Args:
      metrics: key of the record's curves -> what the vertical axis says; a row of plots for each, or a plot where the
        experiment has two arms.
      log: the metrics whose vertical axis is logarithmic.
    """
    others = [arm for arm in experiments.record(name)["arms"] if arm != reference]
    pairs = list(product(metrics, others))
    one_row = len(others) == 1
    columns = len(pairs) if one_row else len(others)
    shared = {"sharey": False if one_row else "row", "sharex": True}
    figure, plots = canvas.panels(columns, len(pairs) // columns, height=2.5, **shared)
    for axes, (metric, arm) in zip(plots, pairs, strict=True):
        _seeds_and_mean(axes, _curves(name, reference, metric), reference, REFERENCE, GREY)
        _seeds_and_mean(axes, _curves(name, arm, metric), arm, ARM, SKY)
        axes.set_yscale("log" if metric in log else "linear")
        at_top, at_left = one_row or metric == pairs[0][0], arm == others[0]
        canvas.label(axes, arm if at_top else "", y=metrics[metric] if at_left else "")
    for axes in plots[-columns:]:
        axes.set_xlabel("step", color=INK, fontsize=9)
    canvas.legend(figure, plots[0], names=(f"{reference}, mean of its seeds", "the arm named above, mean of its seeds"))
    return figure


def dots(values: Mapping[str, Sequence[float]], x: str, from_zero: bool = False) -> Figure:
    """A row for each name: a dot for each of its values, and an upright line at their mean.

    Args:
      values: name -> one number for each seed, or one alone.
      x: the unit.
    """
    figure, (axes,) = canvas.panels(height=0.7 + 0.36 * len(values))
    for place, (name, numbers) in enumerate(values.items()):
        axes.plot(numbers, [place] * len(numbers), "o", color=BLUE, alpha=0.55, markersize=8, clip_on=False, label=name)
        axes.vlines(np.mean(numbers), place - 0.35, place + 0.35, color=VERMILLION, linewidth=2)
    axes.set_yticks(range(len(values)), list(values))
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0, pad=9)  # room for a dot at the edge
    if from_zero:
        axes.set_xlim(left=0)
    canvas.label(axes, x=x, grid="x")
    return figure


def ends(name: str) -> Figure:
    """Test accuracy of every arm of an experiment: a dot for each seed, and their mean."""
    accuracies = {
        arm: 100 * experiments.by_seed(name, arm, lambda run: run["accuracy"])
        for arm in experiments.record(name)["arms"]
    }
    return dots(accuracies, "right answers to test problems, greedy, %: a dot for each seed", from_zero=True)


def pass_curves(name: str, verdicts: Mapping[str, str], samples: int = 32) -> Figure:
    """pass@k in percent of the two arms of an experiment, all seeds together: one plot for each verdict.

    Args:
      verdicts: title of a plot -> key of a run that has, for each problem, how many of its samples are right.
    """
    ks = 2 ** np.arange(samples.bit_length())
    figure, plots = canvas.panels(len(verdicts), height=2.8, sharey=True)
    looks = ({"color": BEFORE, "linestyle": "--", "marker": "s"}, {"color": AFTER, "marker": "o"})
    for axes, (title, counted) in zip(plots, verdicts.items(), strict=True):
        for arm, look in zip(experiments.record(name)["arms"], looks, strict=True):
            of_ks = [experiments.by_seed(name, arm, experiments.passed(counted, int(k), samples)) for k in ks]
            axes.plot(ks, 100 * np.mean(of_ks, axis=1), **look, linewidth=2, markersize=4.5, label=arm)
        _log2(axes, ks)
        axes.set_ylim(0, 103)
        canvas.label(axes, title, x="k", y="pass@k, %" if axes is plots[0] else "")
    canvas.legend(figure, plots[0])
    return figure


def by_updates_and_samples(name: str, predicted_at: int, most: float) -> Figure:
    """Validation accuracy of the two arms of an experiment by updates (left) and by sampled completions (right).

    Args:
      predicted_at: the number of updates that the prediction named, a dotted line.
      most: where the right plot ends, in thousands of completions.
    """
    figure, (left, right) = canvas.panels(2, height=2.9, sharey=True)
    looks = (REFERENCE | {"marker": "s"}, ARM | {"marker": "o"})
    for arm, look in zip(experiments.record(name)["arms"], looks, strict=True):
        updates, sampled, accuracy = _validated(name, arm)
        for axes, places in ((left, np.tile(updates, (len(accuracy), 1))), (right, sampled)):
            axes.plot(places.T, accuracy.T, color=look["color"], linewidth=0.5, alpha=0.5)
            axes.plot(places.mean(axis=0), accuracy.mean(axis=0), **look, markersize=4, label=arm)
    left.axvline(predicted_at, color=INK, linestyle=":")
    right.set_xlim(0, most)
    canvas.label(left, x="updates", y="right on validation problems, %")
    canvas.label(right, x="sampled completions, thousands")
    canvas.legend(figure, left)
    return figure


def by_size(name: str, measures: Mapping[str, experiments.OfRun]) -> Figure:
    """A plot for each measure of an experiment whose arms are sizes that double: a dot for each seed, and a line
    through the means.

    Args:
      measures: what the vertical axis says -> a function of a run.
    """
    sizes = [int(arm) for arm in experiments.record(name)["arms"]]
    figure, plots = canvas.panels(len(measures), height=2.7)
    for axes, (unit, of_run) in zip(plots, measures.items(), strict=True):
        numbers = np.array([experiments.by_seed(name, str(size), of_run) for size in sizes])  # [sizes, seeds]
        axes.plot(sizes, numbers, "o", color=SKY, markersize=5)
        axes.plot(sizes, np.mean(numbers, axis=1), color=BLUE, linewidth=2, label="mean of the seeds")
        _log2(axes, sizes)
        canvas.label(axes, x="group size", y=unit)
    return figure


def which_is_grpo() -> Figure:
    """Test accuracy of four ways to go on from one base, under letters: notebook 09a opens with it."""
    accuracies = {
        letter: 100 * experiments.by_seed(name, arm, lambda run: run["accuracy"])
        for letter, (name, arm) in LETTERS.items()
    }
    return dots(accuracies, "right answers to test problems, %: a dot for each seed", from_zero=True)


def predictions() -> Figure:
    """A square for each prediction of all records: whether it held, and whether it was blind."""
    claims = [claim for kept in experiments.records().values() for claim in kept["claims"]]
    kinds = {"blind": [c for c in claims if not c["known"]], "not blind": [c for c in claims if c["known"]]}
    held = np.array([sum(claim["held"] for claim in some) for some in kinds.values()])
    failed = np.array([len(some) for some in kinds.values()]) - held
    names = [f"{kind}, {len(some)}" for kind, some in kinds.items()]
    figure, (axes,) = canvas.panels(height=1.9)
    axes.barh(names, held, 0.7, color=BLUE, label="held")
    axes.barh(names, failed, 0.7, left=held, color=VERMILLION, hatch="///", hatchcolor="white", label="failed")
    for place in range(1, int((held + failed).max())):  # cuts the bars into squares
        axes.axvline(place, color="white", linewidth=3)
    axes.set(xlim=(0, (held + failed).max()), xticks=())
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    canvas.label(axes, grid="")
    axes.spines[:].set_visible(False)
    canvas.legend(figure, axes)
    return figure


# --- few problems, many samples ---


def measured_again(solved: Sequence[int], problems: int) -> Figure:
    """Measurements of a share on a few problems, each with its 95 % Wilson interval, from the lowest to the highest.

    Args:
      solved: of each measurement, how many of the `problems` are solved.
    """
    counts = np.sort(solved)
    ends = np.array([statistics.wilson_interval(int(count), problems) for count in counts])
    shares = counts / problems
    figure, (axes,) = canvas.panels(height=2.5)
    axes.vlines(range(len(counts)), *(100 * ends.T), color=SKY, linewidth=5, label="95 % interval of each")
    axes.plot(100 * shares, "o", color=BLUE, markersize=7, label=f"solved, of {problems} problems")
    for place, share in enumerate(100 * shares):
        axes.annotate(f"{share:.0f}", (place, share), (8, 0), textcoords="offset points", va="center", color=INK)
    axes.set(xticks=(), ylim=(0, 100), xlim=(-0.6, len(counts) - 0.2))
    canvas.label(axes, x=f"{len(counts)} measurements", y="%", grid="y")
    canvas.legend(figure, axes)
    return figure


def right_samples(counts: Sequence[int], samples: int) -> Figure:
    """How many of its samples are right, for each problem, from the hardest to the easiest."""
    figure, (axes,) = canvas.panels(height=2.5)
    axes.bar(range(len(counts)), np.sort(counts), color=BLUE, label="right samples")
    axes.axhline(samples, color=INK, linestyle="--", linewidth=1, label=f"all {samples}")
    axes.set(xticks=())
    canvas.label(axes, x="problems, from the hardest to the easiest", y=f"right, of {samples}", grid="y")
    canvas.legend(figure, axes)
    return figure


def differences(apart: Sequence[int], problems: int) -> Figure:
    """How often two measurements on so many problems are so many points apart; a bar for each number of problems."""
    figure, (axes,) = canvas.panels(height=2.4)
    most = int(np.abs(apart).max())
    ends = 100 * (np.arange(-most, most + 2) - 0.5) / problems
    axes.hist(100 * np.asarray(apart) / problems, bins=ends, color=SKY, edgecolor="white")
    canvas.label(axes, x="points between two measurements of one model", y=f"of {len(apart):,} repetitions", grid="y")
    return figure


def lines(
    curves: Mapping[str, Mapping[str, Sequence[float]]],
    x: str,
    y: str,
    xs: Sequence[float] | None = None,
    from_zero: bool = True,
) -> Figure:
    """Named curves in one plot, or in several beside each other.

    Args:
      curves: title of a plot -> name of a curve -> its values. The names are the same in every plot.
      xs: where the values are; without them 1, 2, 3 and so on.
    """
    figure, plots = canvas.panels(len(curves), height=2.6, sharey=True)
    for axes, (title, named) in zip(plots, curves.items(), strict=True):
        for (name, values), look, marker in zip(named.items(), LINES(), MARKERS, strict=False):
            places = np.arange(1, 1 + len(values)) if xs is None else xs
            axes.plot(places, values, **look, linewidth=2, marker=marker if len(values) < 15 else None, label=name)
        if xs is not None:
            axes.set_xticks(xs)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if from_zero:
            axes.set_ylim(bottom=0)
        canvas.label(axes, title, x=x, y=y if axes is plots[0] else "")
    canvas.legend(figure, plots[0])
    return figure


# --- drawing ---


def _curves(name: str, arm: str, metric: str) -> np.ndarray:
    """A metric of every step, [seeds, steps]."""
    return np.array([run["curves"][metric] for run in experiments.record(name)["runs"] if run["arm"] == arm], float)


def _seeds_and_mean(axes: Axes, runs: np.ndarray, name: str, look: dict, thin: str) -> None:
    """Thin lines for the seeds [seeds, steps], and a thick one for their mean."""
    steps = np.arange(1, runs.shape[1] + 1)
    axes.plot(steps, runs.T, color=thin, linewidth=0.6, alpha=0.6)
    axes.plot(steps, runs.mean(axis=0), **look, label=name)


def _validated(name: str, arm: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the steps with a validation: updates [points], thousands of samples and accuracy in %, [seeds, points]."""
    runs = [run for run in experiments.record(name)["runs"] if run["arm"] == arm]
    steps = [step for step, value in enumerate(runs[0]["validation"]) if value is not None]
    accuracy = np.array([[100 * run["validation"][step] for step in steps] for run in runs])
    passes = np.array([np.cumsum(run["curves"]["sampling_passes"])[steps] for run in runs], float)
    return np.add(steps, 1), passes * runs[0]["completions_per_step"] / 1000, accuracy


def _log2(axes: Axes, ticks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
