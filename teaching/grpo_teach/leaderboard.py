"""Train what students hand in, and rank it: `grpo leaderboard FOLDER`.

An entry is a folder with reward.py, which has a function reward(completion, gold), and perhaps recipe.yaml, with
changes of the teacher's recipe.  It has no weights: the teacher trains each entry with several secret seeds on secret
problems, in processes of their own (grpo_teach.train_process), and tests it there.

What is wrong with an entry is a remark on its line, and the others go on.  The folder of a run is named after the
entry, a digest of what it consists of, and the seed, so the same command continues where it was interrupted, and trains
only what is new or was changed.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from grpo_lib import reward_files
from grpo_lib.common import environment, files
from grpo_lib.common.errors import CourseError, first_line
from grpo_lib.common.spreadsheets import BYTE_ORDER_MARK, for_spreadsheet
from grpo_teach.hand_ins import plain

REWARD = "student_reward"  # the name of the reward in recipes
BUDGET = 6400  # completions that a training may sample
TOGETHER = 2  # trainings of an entry at a time: one does not fill two cores
# What an entry may change.  Problems, evaluation, seeds, the model and all paths are the teacher's.
ALLOWED = [
    "grpo.group_size", "grpo.iterations", "grpo.beta", "grpo.kl", "grpo.advantage", "grpo.aggregation", "grpo.epsilon",
    "grpo.epsilon_high", "grpo.ratio", "grpo.overlong_buffer", "grpo.overlong_penalty", "grpo.mask_truncated",
    "grpo.dynamic_sampling",
    "rollout.temperature", "training.steps", "training.prompts_per_step", "training.learning_rate",
    "training.warmup_steps", "training.schedule", "training.optimizer", "training.b1", "training.b2",
    "training.weight_decay", "training.max_grad_norm",
]  # fmt: skip


def read_entry(folder: Path) -> list[str]:
    """An entry's changes of the recipe, as section.key=value.  Raises CourseError, which becomes its remark."""
    paths: list[Path] = []
    if folder.is_dir():
        paths = [path for path in folder.iterdir() if not path.name.startswith((".", "__"))]
    for path in paths:
        if not _is_taken(path):
            raise CourseError(
                f"{path.name} is not taken: an entry has reward.py and recipe.yaml, files of up to 100 kB"
            )
    if folder / "reward.py" not in paths:
        raise CourseError("there is no reward.py")
    recipe = folder / "recipe.yaml"
    try:
        changes = _changes(recipe.read_text("utf-8")) if recipe in paths else {}
    except (AttributeError, LookupError, TypeError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise CourseError(f"recipe.yaml must have sections with keys and values ({first_line(error)})") from None
    for key in changes:
        if key not in ALLOWED:
            raise CourseError(f"recipe.yaml: {key} cannot be changed; the assignment lists what can")
    return [f"{key}={value}" for key, value in changes.items()]


def _is_taken(path: Path) -> bool:
    """Whether a file of an entry is one of the two, by itself (not a link), and not too large."""
    if path.name not in ("reward.py", "recipe.yaml") or path.is_symlink():
        return False
    return path.is_file() and path.stat().st_size <= 100_000


def _changes(text: str) -> dict[str, str | None]:
    """section.key -> value as JSON, of recipe.yaml.  Raises one of many errors where it has another form."""
    if "<<" in text:  # merge keys can make a small file endless
        raise ValueError("write keys out, without <<")
    changes: dict[str, str | None] = {}
    for section, keys in yaml.safe_load(text).items():
        for key, value in keys.items():
            no_value = isinstance(value, dict | list)  # no key takes these
            changes[f"{section}.{key}"] = None if no_value else json.dumps(value)
    return changes


def train_entry(
    folder: Path, recipe: Path, seed: int, seeds: int, runs: Path, seconds: float, log: Callable[[str], None]
) -> dict[str, Any]:
    """A line of the leaderboard: check an entry, train it with several seeds, and test it.

    Args:
      seed: draws the seed of the problems, and those of the trainings: the same for all entries.
      seconds: that each training may take.

    Returns:
      Values for the columns, and `verdicts`, [seeds, problems]; or a remark.
    """
    problems_seed, *training_seeds = np.random.default_rng(seed).integers(2**31, size=seeds + 1).tolist()
    reward = folder / "reward.py"
    try:
        changes = [
            *read_entry(folder),
            f"problems.seed={problems_seed}",
            f"rewards=[{REWARD}]",
            "training.validate_every=0",
        ]
        resolved = _grpo(seconds, reward, "config", recipe, *changes)
        training, grpo = resolved["training"], resolved["grpo"]
        count = training["steps"] * training["prompts_per_step"] * grpo["group_size"] * (grpo["dynamic_sampling"] or 1)
        if count > BUDGET:
            raise CourseError(
                f"recipe.yaml: {count:,} completions, and the budget is {BUDGET:,}: training.steps times "
                "training.prompts_per_step, grpo.group_size and grpo.dynamic_sampling"
            )
        digest = hashlib.sha256(f"{resolved}{reward_files.digest(reward)}".encode()).hexdigest()[:12]
        names = [f"{digest}-{training_seed}" for training_seed in training_seeds]

        def train(training_seed: int, name: str) -> dict[str, Any]:
            place = ["--runs", runs, "--run", name]
            return _grpo(seconds, reward, "train", recipe, *changes, f"seed={training_seed}", *place)

        with ThreadPoolExecutor(TOGETHER) as pool:
            summaries = list(pool.map(train, training_seeds, names))
        verdicts = []
        minutes = before = 0.0
        for number, (name, summary) in enumerate(zip(names, summaries, strict=True), 1):
            verdicts.append([record["strict"] for record in files.read_jsonl(runs / name / "evals" / "after.jsonl")])
            minutes += summary["wall_seconds"] / 60
            before = summary["before"]["accuracy"]
            log(f"  seed {number} of {seeds}: {before:.1%} -> {summary['after']['accuracy']:.1%}")
    except CourseError as error:
        return {"remark": plain(str(error).replace(f"{recipe}:", "recipe.yaml:"), 500)}
    except subprocess.TimeoutExpired:
        return {"remark": f"a training was stopped after {seconds:g} seconds"}
    rates = np.array(verdicts, float)
    by_seed = " ".join(f"{rate:.4f}" for rate in rates.mean(axis=1))
    low, high = interval(rates)
    return {
        "accuracy": rates.mean(),
        "low": low,
        "high": high,
        "before": before,
        "rises": low > before,
        "seeds": by_seed,
        "minutes": round(minutes, 2),
        "verdicts": rates,
    }


def interval(rates: np.ndarray) -> tuple[float, float]:
    """95 % interval of the mean of [seeds, problems], by a bootstrap that draws both (with few seeds it is narrow)."""
    rng = np.random.default_rng(0)
    seeds, problems = rates.shape
    means = []
    for _ in range(2000):
        drawn_seeds = rng.integers(seeds, size=seeds)
        drawn_problems = rng.integers(problems, size=problems)
        means.append(rates[drawn_seeds][:, drawn_problems].mean())
    low, high = np.quantile(means, [0.025, 0.975])
    return low, high


def ranked(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """The leaderboard, best first, then the entries with a remark.

    An entry has a rank of its own if the interval of its difference to the first one of the rank before, with the same
    seeds and problems, does not hold 0.  Points fall evenly from 12 to 4 with the rank; an entry that does not rise has
    none.
    """
    trained = sorted((row for row in rows if "verdicts" in row), key=lambda row: -row["accuracy"])
    first: dict[str, Any] = {}  # of the rank before
    for place, row in enumerate(trained, 1):
        if not first or interval(first["verdicts"] - row["verdicts"])[0] > 0:
            first = row
            row["rank"] = place
        else:
            row["rank"] = first["rank"]
        fall = 8 * (row["rank"] - 1) / max(len(trained) - 1, 1)
        row["points"] = round(12 - fall, 1) if row["rises"] else 0.0
    remarked = [row | {"points": 0.0} for row in rows if "verdicts" not in row]
    columns = ["rank", "entry", "accuracy", "low", "high", "before", "rises", "points", "seeds", "minutes", "remark"]
    table = pd.DataFrame([*trained, *remarked], columns=columns)
    return table.round(4).astype({"rank": "Int64"})


def csv(rows: Sequence[dict[str, Any]]) -> str:
    """`ranked` as a CSV for spreadsheets."""
    table = ranked(rows)
    for name in ("entry", "remark"):
        table[name] = table[name].astype(object).map(for_spreadsheet)
    return BYTE_ORDER_MARK + table.to_csv(index=False)


def _grpo(seconds: float, reward: Path, *arguments: Any) -> dict[str, Any]:
    """What a command of `grpo` prints with --json.  Raises CourseError with its error, or TimeoutExpired."""
    done = subprocess.run(
        [sys.executable, "-m", "grpo_teach.train_process"],
        input=json.dumps([str(reward.resolve()), *map(str, arguments), "--json"]),
        cwd=environment.repo_root(),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
    )
    if done.returncode:  # the last line is an error of grpo, or the end of a traceback
        last = ("\n" + done.stderr.strip()).rpartition("\n")[2]
        raise CourseError(last.removeprefix("error: "))
    return json.loads(done.stdout.splitlines()[-1])
