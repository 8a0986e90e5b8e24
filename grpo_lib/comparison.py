"""Before beside after, problem by problem: what the figures, the inspector and the exported tables are made of."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lib import rewards, taxonomy
from grpo_lib.errors import CourseError
from grpo_lib.recipes import Recipe, load_recipe
from grpo_lib.records import EvalRun, Record

RewardFunction = rewards.RewardFunction

PHASES = ("before", "after")


@dataclass(frozen=True)
class Comparison:
    """The evaluations that a run directory holds, its recipe, and the reward functions of that."""

    before: EvalRun | None
    after: EvalRun | None
    functions: tuple[RewardFunction, ...] = rewards.REFERENCE_REWARDS
    recipe: Recipe | None = None

    @property
    def runs(self) -> dict[str, EvalRun]:
        """Those that there are, by phase."""
        return {phase: run for phase in PHASES if (run := getattr(self, phase)) is not None}


@dataclass(frozen=True)
class Answers:
    """What a model answered to one problem."""

    shown: Record  # the completion that counts: the greedy one, or the first where all were sampled
    sampled: list[Record]  # where there are several completions, those that were sampled


def load(run_dir: str | os.PathLike) -> Comparison:
    """Read a run directory; without a recipe the reward is the reference's.

    Raises:
      CourseError: no such directory, a file that cannot be read, or evaluations of different problems.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise CourseError(f"{run_dir}: no such run directory; train first, or correct the path")
    paths = [run_dir / "evals" / f"{phase}.jsonl" for phase in PHASES]
    runs = [EvalRun.load(path) if path.exists() else None for path in paths]
    path = run_dir / "recipe.yaml"
    recipe = load_recipe(path) if path.exists() else None
    functions = rewards.get_rewards(recipe.rewards) if recipe else rewards.REFERENCE_REWARDS
    if all(runs):
        _check_same(*runs)
    return Comparison(*runs, tuple(functions), recipe)


def by_problem(run: EvalRun) -> dict[str, Answers]:
    """The records of a run by problem id, in its order."""
    groups: dict[str, list[Record]] = {}
    for record in run.records:
        groups.setdefault(record["id"], []).append(record)
    found = {}
    for key, group in groups.items():
        shown = next((record for record in group if record.get("greedy")), group[0])
        sampled = [record for record in group if not record.get("greedy")] if len(group) > 1 else []
        found[key] = Answers(shown, sampled)
    return found


def pairs(before: EvalRun, after: EvalRun) -> list[tuple[Record, Record]]:
    """For each problem the completion that counts, before and after.

    Raises:
      CourseError: the two runs are not of the same problems.
    """
    _check_same(before, after)
    old, new = by_problem(before), by_problem(after)
    return [(old[key].shown, new[key].shown) for key in old]


def flip_counts(before: EvalRun, after: EvalRun) -> dict[str, int]:
    """Problems by strict verdict before and after: right_right, right_wrong, wrong_right, wrong_wrong."""
    counts = dict.fromkeys(("right_right", "right_wrong", "wrong_right", "wrong_wrong"), 0)
    for old, new in pairs(before, after):
        counts[f"{'right' if old['strict'] else 'wrong'}_{'right' if new['strict'] else 'wrong'}"] += 1
    return counts


def category_counts(before: EvalRun | None, after: EvalRun | None) -> list[dict[str, Any]]:
    """How many problems' answers fall in each category of the taxonomy: category, before, after, meaning.

    Categories that neither has are left out; a phase without an evaluation has no column.
    """
    runs = Comparison(before, after).runs
    counts = {phase: Counter(taxonomy.classify(record) for record in _shown(run)) for phase, run in runs.items()}
    return [
        {"category": name, **{phase: counts[phase][name] for phase in counts}, "meaning": taxonomy.MEANINGS[name]}
        for name in taxonomy.CATEGORIES
        if any(count[name] for count in counts.values())
    ]


def calculation_rates(before: EvalRun | None, after: EvalRun | None) -> list[dict[str, Any]]:
    """Strict accuracy by the number of calculations in the worked solution: calculations, problems, before, after.

    Empty unless the records know of at least two such numbers; a phase without an evaluation has no column.
    """
    runs = Comparison(before, after).runs
    steps = {record["id"]: record.get("steps") for run in runs.values() for record in run.records}
    rates = {phase: run.rates("strict") for phase, run in runs.items()}
    rows = []
    for number in sorted(set(steps.values()) - {None}):
        group = [key for key, value in steps.items() if value == number]
        row = {"calculations": number, "problems": len(group)}
        rows.append(row | {phase: sum(rates[phase][key] for key in group) / len(group) for phase in rates})
    return rows if len(rows) > 1 else []


def reward_means(
    before: EvalRun | None, after: EvalRun | None, functions: Sequence[RewardFunction] = rewards.REFERENCE_REWARDS
) -> list[dict[str, Any]]:
    """The mean of each reward part over the problems, and of their sum: part, before, after.

    A phase without an evaluation has no column.
    """
    means = {}
    for phase, run in Comparison(before, after).runs.items():
        records = _shown(run)
        texts, golds = [record["completion"] for record in records], [record["gold"] for record in records]
        prompts = [record["prompt"] for record in records]
        points = {f.__name__: f(prompts=prompts, completions=texts, answer=golds) for f in functions}
        means[phase] = {name: sum(values) / len(values) for name, values in points.items()}
    names = [function.__name__ for function in functions]
    rows = [{"part": name, **{phase: means[phase][name] for phase in means}} for name in names]
    return [*rows, {"part": "sum", **{phase: sum(means[phase].values()) for phase in means}}] if means else []


def _shown(run: EvalRun) -> list[Record]:
    return [answers.shown for answers in by_problem(run).values()]


def _check_same(before: EvalRun, after: EvalRun) -> None:
    def golds(records: Iterable[Record]) -> dict[str, str]:
        return {record["id"]: record["gold"] for record in records}

    if golds(before.records) != golds(after.records):
        raise CourseError("before and after are of different problems; evaluate both on the same ones")
