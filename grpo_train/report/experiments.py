"""The records of experiments (assets/experiments, written by dev/experiments/run.py) as tables.

    experiments.verdicts("kl")                    # what was predicted, and what was measured
    experiments.by_seed("kl", "k3", lambda run: run["accuracy"])

An experiment has arms; seed s of every arm takes its problems in the same order.  A claim is about the differences of
two arms, one for each seed.
"""

import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from grpo_lib.common.environment import repo_root
from grpo_lib.statistics import mean_interval, pass_at_k, smallest_mean
from grpo_train.report.display import Folded, Table, table
from grpo_train.report.formatting import percent
from grpo_train.runs.health_checks import find_alerts

Record = dict[str, Any]
Claim = dict[str, Any]
OfRun = Callable[[Record], Any]

MEASURES = {
    "accuracy": "test accuracy",
    "accuracy_or_majority": "test accuracy; of the start, maj@8",
    "way": "right samples, mean of all steps",
    "form": "test answers in the right form",
    "worked@32": "worked out in one of 32 samples",
    "applied": "part of a step that the weights take",
    "wrong_length": "length of wrong samples, tokens",
    "kl": "KL from the base, nats per token",
    "entropy": "entropy of the last steps, nats per token",
    "at_updates": "validation accuracy after 12 updates",
    "at_completions": "validation accuracy after as many completions",
}
PLAIN = ("kl", "entropy", "wrong_length")  # all others are shares
HARD = "problems.difficulty=hard"


def record(name: str) -> Record:
    """What was predicted in an experiment, and every run of it; of the file assets/experiments/NAME.json."""
    return _read()[name]


def records() -> dict[str, Record]:
    """All of them by name, in the order of the names."""
    return dict(_read())


@functools.cache
def _read() -> dict[str, Record]:
    files = sorted((repo_root() / "assets/experiments").glob("*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def by_seed(name: str, arm: str, of_run: OfRun) -> np.ndarray:
    """A number of each run of an arm, in the order of the seeds, [seeds]; NaN where it is None."""
    runs = sorted(record(name)["runs"], key=lambda run: run["seed"])
    return np.array([of_run(run) for run in runs if run["arm"] == arm], float)


def mean_of(name: str, arm: str, metric: str, steps: slice) -> float:
    """The mean of a metric over some steps and all seeds of an arm."""
    return float(np.mean([run["curves"][metric][steps] for run in record(name)["runs"] if run["arm"] == arm]))


def curve(metric: str, steps: slice = slice(None)) -> OfRun:
    """A function of a run: the mean of a metric over some of its steps."""
    return lambda run: np.mean(run["curves"][metric][steps])


def passed(counted: str, k: int, samples: int = 32) -> OfRun:
    """A function of a run: its pass@k, the mean over problems.

    Args:
      counted: key of a run that has, for each problem, how many of its samples are right.
    """
    return lambda run: np.mean([pass_at_k(samples, count, k) for count in run[counted]])


def points(values: Sequence[float]) -> str:
    """The mean of a few shares with its 95 % interval, as text: "+1.2 (-0.3 to +2.7) points"."""
    mean, (low, high) = float(np.mean(values)), mean_interval(values)
    return "{} ({} to {}) points".format(*(_number(value, plain=False) for value in (mean, low, high)))


def verdicts(name: str, names: Mapping[str, str] | None = None) -> Table:
    """What was predicted of the difference (or ratio) of two arms, and what was measured: a row for each claim.

    Args:
      names: another name for an arm, where that of the record says too little.
    """
    return table(_verdict(claim, names or {}) for claim in record(name)["claims"])


def shown(claim: Claim) -> bool:
    """Whether the whole interval of a claim that held lies within its bar, and not the mean alone."""
    if claim["kind"] == "within":
        return -claim["bar"] <= claim["low"] and claim["high"] <= claim["bar"]
    if claim["kind"] in ("at most", "half"):
        return claim["high"] <= claim["bar"]
    return True  # the others are judged by the interval


def detectable(claim: Claim) -> float:
    """The smallest detectable difference of the two arms of a claim; of a ratio, how far from 1."""
    ones, others = (np.array(claim["values"][claim[arm]]) for arm in ("one", "other"))
    each = ones / others if claim["kind"] == "half" else ones - others
    return smallest_mean(float(np.std(each, ddof=1)), len(each))


def seeds(*names: str) -> Folded:
    """Test accuracy of every arm of some experiments, a column for each seed: one table, folded."""
    rows = []
    for name in names:
        for arm in record(name)["arms"]:
            accuracies = by_seed(name, arm, lambda run: run["accuracy"])
            rows.append({"experiment": name, "arm, test accuracy in %": arm} | _by_columns(accuracies, *names))
    return Folded(table(rows), f"test accuracy of every seed: {', '.join(names)}")


def right_and_form(name: str, names: Mapping[str, str] | None = None) -> Table:
    """Two rows for each arm, the right test answers and those in the right form, in % and with a column for each seed.

    Args:
      names: as of `verdicts`.
    """
    rows = []
    for arm in record(name)["arms"]:
        for label, measure in (("right", "accuracy"), ("right form", "form")):
            shares = by_seed(name, arm, lambda run, key=measure: run[key])
            of_arm = f"{(names or {}).get(arm, arm)}: {label}"
            rows.append({"greedy, test problems, %": of_arm} | _by_columns(shares, name))
    return table(rows)


def _by_columns(shares: np.ndarray, *names: str) -> dict[str, str]:
    """Shares in %, a column for each seed of these experiments; an arm may have fewer seeds than another."""
    most = 1 + max(run["seed"] for name in names for run in record(name)["runs"])
    cells = [f"{100 * share:.1f}" for share in shares]
    return {f"seed {seed}": cell for seed, cell in enumerate(cells + [""] * (most - len(cells)))}


def unpredicted(name: str, one: str, other: str, readings: Mapping[str, OfRun]) -> Table:
    """Differences of two arms that nobody predicted: {what is read: its function of a run}, of shares."""
    rows = []
    for label, of_run in readings.items():
        ones, others = by_seed(name, one, of_run), by_seed(name, other, of_run)
        both = min(len(ones), len(others))  # the first seeds, which both arms have
        each = ones[:both] - others[:both]
        smallest = _number(smallest_mean(float(np.std(each, ddof=1)), len(each)), plain=False, sign="")
        measured = {"mean (95 % interval)": points(each), "smallest detectable": f"{smallest} points"}
        rows.append({f"{one} − {other}, not predicted": label} | measured)
    return table(rows)


def means(name: str, columns: Mapping[str, OfRun], plain: Sequence[str] = ()) -> Table:
    """A row for each arm of an experiment: the mean of its seeds in each column; "–" where its runs have none.

    Args:
      plain: columns of numbers that are no shares.
    """
    rows = []
    for arm in record(name)["arms"]:
        row: dict[str, Any] = {"arm": arm}
        for label, of_run in columns.items():
            mean = float(by_seed(name, arm, of_run).mean())
            shown = mean if label in plain else percent(mean)
            row[label] = "–" if math.isnan(mean) else shown
        rows.append(row)
    return table(rows)


def ends_and_ways(pairs: Mapping[str, tuple[str, str]]) -> Table:
    """Two arms of each experiment, one minus the other: where they end, the way there, and the entropy on it.

    Args:
      pairs: experiment -> two of its arms.
    """
    rows = []
    for name, (one, other) in pairs.items():
        end, other_end = (by_seed(name, arm, lambda run: run["accuracy"]) for arm in (one, other))
        way, other_way = (by_seed(name, arm, curve("accuracy")) for arm in (one, other))
        entropy, other_entropy = (by_seed(name, arm, curve("entropy")) for arm in (one, other))
        measured = {"at the end": points(end - other_end), "on the way": points(way - other_way)}
        ratio = points(entropy / other_entropy - 1).replace("points", "%")
        rows.append(
            {"compared": f"{name}: {one} − {other}", "ends at": percent(end.mean())}
            | measured
            | {"entropy on the way, ratio": ratio}
        )
    return table(rows)


def on_the_way(name: str, arm: str, metrics: Mapping[str, str], steps: Sequence[int]) -> Table:
    """A row for each of these steps of an arm, counted from 1: means of its seeds.

    Args:
      metrics: key of the curves -> label.
    """
    rows = []
    for step in steps:
        of_step = {label: mean_of(name, arm, metric, slice(step - 1, step)) for metric, label in metrics.items()}
        rows.append({"step": step} | {label: percent(value) for label, value in of_step.items()})
    return table(rows)


def first_warnings(name: str, kind: str) -> Table:
    """The step at which the library would have warned first, for each seed of each arm; "–" where it would not have.

    Args:
      kind: a key of `health_checks.RULES`.
    """
    rows = []
    for arm in record(name)["arms"]:
        steps = by_seed(name, arm, lambda run: _first_warning(run["curves"], kind))
        row = {f"seed {seed}": "–" if np.isnan(step) else f"{step:.0f}" for seed, step in enumerate(steps)}
        rows.append({f"first step with the warning `{kind}`": arm} | row)
    return table(rows)


def warned(kind: str) -> Table:
    """Of all records, how many runs of which arms the library would have warned, and how many not."""
    runs = [(f"{name}, {run['arm']}", run) for name, kept in records().items() for run in kept["runs"]]
    found = Counter()
    for arm, run in runs:
        found["no such warning" if _first_warning(run["curves"], kind) is None else arm] += 1
    return table({"experiment, arm": arm, "runs": count} for arm, count in found.items())


def _first_warning(curves: Mapping[str, Sequence[float]], kind: str) -> int | None:
    names = ["step", *curves]
    steps = range(1, 1 + len(curves.get("reward", [])))
    rows = [dict(zip(names, values, strict=True)) for values in zip(steps, *curves.values(), strict=True)]
    return next((alert.step for alert in find_alerts(rows) if alert.kind == kind), None)


def totals() -> Table:
    """A row for each experiment: how many predictions held, and which were not blind."""
    return table(_total(name, kept) for name, kept in records().items())


def _verdict(claim: Claim, names: Mapping[str, str]) -> dict[str, str]:
    ratio = claim["kind"] == "half"
    plain = ratio or claim["measure"] in PLAIN
    one, other = (names.get(claim[arm], claim[arm]) for arm in ("one", "other"))
    mean, low, high = (_number(claim[key], plain) for key in ("mean", "low", "high"))
    unit = "" if plain else " points"
    held = "held" if shown(claim) else "held by its mean; not shown"
    return {
        "compared": f"{one} {'÷' if ratio else '−'} {other}",
        "measure": MEASURES.get(claim["measure"], claim["measure"]),
        "predicted": claim["predicted"],
        "mean (95 % interval)": f"{mean} ({low} to {high}){unit}",
        "smallest detectable": _number(detectable(claim), plain, "") + (" from 1" if ratio else unit),
        "verdict": held if claim["held"] else "FAILED",
    }


def _total(name: str, kept: Record) -> dict[str, Any]:
    claims = kept["claims"]
    held = sum(claim["held"] for claim in claims)
    return {
        "experiment": name,
        "predictions that held": f"{held} of {len(claims)}",
        "blind?": _blind(claims),
        "runs": len(kept["runs"]),
        "minutes": round(kept["seconds"] / 60),
    }


def _blind(claims: Sequence[Claim]) -> str:
    known = sum(bool(claim["known"]) for claim in claims)
    if not known:
        return "yes"
    return "no" if known == len(claims) else f"{len(claims) - known} of {len(claims)}"


def _number(value: float, plain: bool, sign: str = "+") -> str:
    """Shares in points, with their sign; other numbers (`plain`) as they are."""
    return (f"{value:.3f}" if plain else f"{100 * value:{sign}.1f}").replace("-", "−")
