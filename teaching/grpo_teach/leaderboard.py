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

from grpo_lib.common import environment, files
from grpo_lib.common.errors import CourseError, first_line
from grpo_lib.common.spreadsheets import for_spreadsheet
from grpo_teach.hand_ins import plain

REWARD = "student_reward"  # the name of the reward in recipes
BUDGET = 6400  # completions that a training may sample
TOGETHER = 2  # trainings of an entry at a time: one does not fill two cores
# What an entry may change.  Problems, evaluation, seeds, the model and all paths are the teacher's.
ALLOWED = [
    "grpo.group_size", "grpo.iterations", "grpo.beta", "grpo.kl", "grpo.advantage", "grpo.aggregation", "grpo.epsilon",
    "grpo.epsilon_high", "grpo.ratio", "grpo.overlong_buffer", "grpo.overlong_penalty", "grpo.dynamic_sampling",
    "rollout.temperature", "training.steps", "training.prompts_per_step", "training.learning_rate",
    "training.warmup_steps", "training.schedule", "training.optimizer", "training.b1", "training.b2",
    "training.weight_decay", "training.max_grad_norm",
]  # fmt: skip


def read_entry(folder: Path) -> list[str]:
    """An entry's changes of the recipe, as section.key=value.  Raises CourseError, which becomes its remark."""
    found = [one for one in folder.iterdir() if not one.name.startswith((".", "__"))] if folder.is_dir() else []
    if other := [
        path.name for path in found
        if path.name not in ("reward.py", "recipe.yaml")
        or path.is_symlink() or not path.is_file() or path.stat().st_size > 100_000
    ]:  # fmt: skip
        raise CourseError(f"{other[0]} is not taken: an entry has reward.py and recipe.yaml, files of up to 100 kB")
    if folder / "reward.py" not in found:
        raise CourseError("there is no reward.py")
    try:
        text = (folder / "recipe.yaml").read_text("utf-8") if len(found) == 2 else "{}"
        if "<<" in text:  # merge keys can make a small file endless
            raise ValueError("write keys out, without <<")
        sections = yaml.safe_load(text).items()
        changes = {
            f"{section}.{key}": None if isinstance(value, dict | list) else json.dumps(value)  # no key takes these
            for section, keys in sections
            for key, value in keys.items()
        }
    except (AttributeError, LookupError, TypeError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise CourseError(f"recipe.yaml must have sections with keys and values ({first_line(error)})") from None
    if other := [key for key in changes if key not in ALLOWED]:
        raise CourseError(f"recipe.yaml: {other[0]} cannot be changed; the assignment lists what can")
    return [f"{key}={value}" for key, value in changes.items()]


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
    secret = np.random.default_rng(seed).integers(2**31, size=seeds + 1).tolist()
    reward, verdicts, minutes, before = folder / "reward.py", [], 0.0, 0.0
    try:
        changes = [
            *read_entry(folder),
            f"problems.seed={secret[0]}",
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
        digest = hashlib.sha256(repr(resolved).encode() + reward.read_bytes()).hexdigest()[:12]
        names = [f"{digest}-{one}" for one in secret[1:]]
        tasks = [
            (*changes, f"seed={one}", "--runs", runs, "--run", run) for one, run in zip(secret[1:], names, strict=True)
        ]
        with ThreadPoolExecutor(TOGETHER) as pool:
            summaries = list(pool.map(lambda task: _grpo(seconds, reward, "train", recipe, *task), tasks))
        for number, (run, summary) in enumerate(zip(names, summaries, strict=True), 1):
            verdicts.append([record["strict"] for record in files.read_jsonl(runs / run / "evals" / "after.jsonl")])
            before, minutes = summary["before"]["accuracy"], minutes + summary["wall_seconds"] / 60
            log(f"  seed {number} of {seeds}: {before:.1%} -> {summary['after']['accuracy']:.1%}")
    except CourseError as error:
        return {"remark": plain(str(error).replace(f"{recipe}:", "recipe.yaml:"), 500)}
    except subprocess.TimeoutExpired:
        return {"remark": f"a training was stopped after {seconds:g} seconds"}
    rates, (low, high) = np.array(verdicts, float), interval(np.array(verdicts, float))
    return {
        **{"accuracy": rates.mean(), "low": low, "high": high, "before": before, "rises": low > before},
        **{"seeds": " ".join(f"{rate:.4f}" for rate in rates.mean(axis=1)), "minutes": round(minutes, 2)},
        "verdicts": rates,
    }


def interval(rates: np.ndarray) -> tuple[float, float]:
    """95 % interval of the mean of [seeds, problems], by a bootstrap that draws both (with few seeds it is narrow)."""
    rng, (seeds, problems) = np.random.default_rng(0), rates.shape
    drawn = ((rng.integers(seeds, size=seeds), rng.integers(problems, size=problems)) for _ in range(2000))
    return tuple(np.quantile([rates[some][:, those].mean() for some, those in drawn], [0.025, 0.975]))


def ranked(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """The leaderboard, best first, then the entries with a remark.

    An entry has a rank of its own if the interval of its difference to the first one of the rank before, with the same
    seeds and problems, does not hold 0.  Points fall evenly from 12 to 4 with the rank; an entry that does not rise has
    none.
    """
    trained = sorted((row for row in rows if "verdicts" in row), key=lambda row: -row["accuracy"])
    first = trained[0] | {"rank": 1} if trained else {}
    for place, row in enumerate(trained, 1):
        row["rank"] = place if interval(first["verdicts"] - row["verdicts"])[0] > 0 else first["rank"]
        first = row if row["rank"] == place else first
        row["points"] = round(12 - 8 * (row["rank"] - 1) / max(len(trained) - 1, 1), 1) if row["rises"] else 0.0
    table = pd.DataFrame(
        [*trained, *(row | {"points": 0.0} for row in rows if "verdicts" not in row)],
        columns=["rank", "entry", "accuracy", "low", "high", "before", "rises", "points", "seeds", "minutes", "remark"],
    )
    return table.round(4).astype({"rank": "Int64"})


def csv(rows: Sequence[dict[str, Any]]) -> str:
    """`ranked` as a CSV for spreadsheets."""
    table = ranked(rows)
    for name in ("entry", "remark"):
        table[name] = table[name].astype(object).map(for_spreadsheet)
    return table.to_csv(index=False)


def _grpo(seconds: float, reward: Path, *arguments: Any) -> dict[str, Any]:
    """What a command of `grpo` prints with --json.  Raises CourseError with its error, or TimeoutExpired."""
    done = subprocess.run(
        [sys.executable, "-m", "grpo_teach.train_process", reward.resolve(), *map(str, arguments), "--json"],
        cwd=environment.repo_root(), capture_output=True, text=True, errors="replace", timeout=seconds,
    )  # fmt: skip
    if done.returncode:  # the last line is an error of grpo, or the end of a traceback
        last = ("\n" + done.stderr.strip()).rpartition("\n")[2]
        raise CourseError(last.removeprefix("error: ").removeprefix(f"{CourseError.__module__}.CourseError: "))
    return json.loads(done.stdout.splitlines()[-1])
