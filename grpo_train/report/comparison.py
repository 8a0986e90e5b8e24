"""Before and after, problem by problem: the data of the figures, the inspector and the exported tables."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lib import analysis, records, rewards
from grpo_lib.analysis import completion_pairs, first_completions
from grpo_lib.common.errors import CourseError
from grpo_lib.records import EvalRun
from grpo_train.recipes import load_recipe

PHASES = ("before", "after")


@dataclass(frozen=True)
class Comparison:
    """The evaluations of a run directory, and its recipe's reward functions."""

    before: EvalRun | None
    after: EvalRun | None
    functions: Sequence[rewards.RewardFunction] = rewards.REFERENCE_REWARDS

    @property
    def runs(self) -> dict[str, EvalRun]:
        """The evaluations that exist, by phase."""
        return {phase: run for phase in PHASES if (run := getattr(self, phase)) is not None}


def load(run_dir: str | os.PathLike, need_evaluation: bool = False) -> Comparison:
    """Read a run directory; without a recipe the reward functions are REFERENCE_REWARDS.

    Raises:
      CourseError: no such directory, a file that cannot be read, evaluations of different problems, or none where one
        is needed.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise CourseError(f"{run_dir}: no such run directory; train first, or correct the path")
    paths = [run_dir / "evals" / f"{phase}.jsonl" for phase in PHASES]
    before, after = (EvalRun.load(path) if path.exists() else None for path in paths)
    if need_evaluation and not before and not after:
        raise CourseError(f"{run_dir}: no evaluation yet (evals/before.jsonl); evaluate first")
    if before and after:
        try:
            records.check_same_problems(before, after)
        except CourseError as error:
            raise CourseError(f"{paths[0]} and {paths[1].name}: {error}") from None
    if not (run_dir / "recipe.yaml").exists():
        return Comparison(before, after)
    return Comparison(before, after, rewards.get_rewards(load_recipe(run_dir / "recipe.yaml").rewards))


def flip_counts(before: EvalRun, after: EvalRun) -> dict[str, int]:
    """Problems by strict verdict before and after: right_right, right_wrong, wrong_right, wrong_wrong.

    Raises:
      CourseError: the two runs have different problems.
    """
    counts = Counter(
        "_".join("right" if record["strict"] else "wrong" for record in pair)
        for pair in completion_pairs(before, after)
    )
    return {name: counts[name] for name in ("right_right", "right_wrong", "wrong_right", "wrong_wrong")}


def category_counts(compared: Comparison) -> list[dict[str, Any]]:
    """How many answers are in each category of the taxonomy: category, before, after, meaning.

    Empty categories are left out; a phase without an evaluation has no column.
    """
    counts = {phase: Counter(map(analysis.classify, first_completions(run))) for phase, run in compared.runs.items()}
    rows = []
    for name, meaning in analysis.MEANINGS.items():
        of_phase = {phase: count[name] for phase, count in counts.items()}
        if any(of_phase.values()):
            rows.append({"category": name, **of_phase, "meaning": meaning})
    return rows


def reward_means(compared: Comparison) -> list[dict[str, Any]]:
    """The mean of each reward part over the problems, and of their sum: part, before, after; columns as above."""
    means = {p: records.reward_means(first_completions(run), compared.functions) for p, run in compared.runs.items()}
    columns = {phase: [*values, sum(values)] for phase, values in means.items()}
    names = [*(function.__name__ for function in compared.functions), "sum"] if columns else []
    return [{"part": name, **{p: values[i] for p, values in columns.items()}} for i, name in enumerate(names)]
