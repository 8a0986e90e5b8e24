"""The leaderboard and assignment A: hostile entries are one remark, others are trained once, ties share a rank."""

import runpy
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import result_of

from grpo_lib.common.files import write_text_atomic
from grpo_teach import leaderboard, mutants

RIGHT = "def reward(completion, gold): return float(f'<answer>{gold}</answer>' in completion)"
# Files of an entry, and words of its remark, or its rank.
ENTRIES = {
    "ada": ({"reward.py": RIGHT, "recipe.yaml": "training: {steps: 1, warmup_steps: 0}"}, "'rank': 1"),
    "loop": ({"reward.py": "def reward(*_):\n    while True: pass"}, "stopped after"),
    "exit": ({"reward.py": "import os\ndef reward(*_): os._exit(0)"}, "ended its process"),
    "memory": ({"reward.py": "def reward(*_): return len(bytearray(10 * 2**30))"}, "MemoryError"),
    "shape": ({"reward.py": "def reward(*_): return [1.0, 2.0]"}, "which is no finite number"),
    "reads": ({"reward.py": "def reward(*_): return len(open('/etc/hosts').read())"}, "are read, not"),
    "empty": ({"recipe.yaml": ""}, "no reward.py"),
    "list": ({"reward.py": RIGHT, "recipe.yaml": "- steps"}, "sections"),
    "weights": ({"reward.py": RIGHT, "model.safetensors": ""}, "model.safetensors is not taken"),
    "outside": ({"reward.py": RIGHT, "recipe.yaml": "model: {path: ../trained}"}, "model.path cannot be changed"),
    "budget": ({"reward.py": RIGHT, "recipe.yaml": "grpo: {dynamic_sampling: 2}"}, "budget is 6,400"),
    "value": ({"reward.py": RIGHT, "recipe.yaml": "training: {steps: [9]}"}, "recipe.yaml: training.steps"),
}


@pytest.mark.long
def test_what_is_wrong_is_a_remark_and_others_are_trained_once(grpo, root, tmp_path) -> None:
    texts = {f"a6/{name}/{file}": text for name, (files, _) in ENTRIES.items() for file, text in files.items()}
    texts["tiny.yaml"] = (
        (root / "recipes" / "lessons" / "tiny-hard.yaml").read_text("utf-8").replace("test: 500", "test: 20")
    )
    _ = [write_text_atomic(tmp_path / name, text) for name, text in texts.items()]
    done = grpo("leaderboard", tmp_path / "a6", "--recipe", tmp_path / "tiny.yaml", "--seed", 3, "--seeds", 1, "--json")
    rows = {row["entry"]: row for row in result_of(done)["leaderboard"]}
    assert {name: rows[name] for name, (_, words) in ENTRIES.items() if words not in f"{rows[name]}"} == {}
    records = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("after.jsonl")}
    assert len(records) == 1 and rows["ada"]["seeds"] == leaderboard.train_entry(
        tmp_path / "a6" / "ada", tmp_path / "tiny.yaml", 3, 1, tmp_path / "a6-leaderboard" / "ada", 60, print
    )["seeds"]  # fmt: skip
    assert all(
        path.stat().st_mtime_ns == before and "words-hard-test-0-" not in path.read_text()
        for path, before in records.items()
    )


def test_secret_seeds_are_in_no_command_line(root, tmp_path, monkeypatch) -> None:
    """Every user may read command lines, also the one whose process runs a student's reward."""
    reward = write_text_atomic(tmp_path / "reward.py", RIGHT)
    lines = []

    def run(command, **how):
        lines.append(command)
        return subprocess.run(command, **how)

    monkeypatch.setattr(leaderboard, "subprocess", SimpleNamespace(run=run))
    recipe = root / "recipes" / "lessons" / "tiny-hard.yaml"
    changes = ["problems.seed=31337", f"rewards=[{leaderboard.REWARD}]"]
    assert leaderboard._grpo(100, reward, "config", recipe, *changes)["problems"]["seed"] == 31337
    assert len(lines) == 1 and "31337" not in " ".join(map(str, lines[0]))


def test_entries_share_a_rank_unless_their_interval_is_above_0() -> None:
    verdicts = {"low": np.eye(3, 200), "best": np.ones((3, 200)), "tied": 1 - np.eye(3, 200)}
    rows = [{"entry": name, "accuracy": one.mean(), "verdicts": one, "rises": True} for name, one in verdicts.items()]
    assert leaderboard.ranked([*rows, {"entry": "odd"}])[["entry", "points"]].values.tolist() == [
        ["best", 12],
        ["tied", 12],
        ["low", 4],
        ["odd", 0],
    ]


@pytest.mark.nightly(minutes=3)
def test_the_loop_has_full_points_and_its_mistakes_have_less(root) -> None:
    grader = runpy.run_path(str(root / "teaching" / "assignment-a" / "grade_loop.py"))
    assert not any(
        {
            **grader["wrong_values"](grader["TEACHERS"].code, 7, 600),
            "": grader["learns"](grader["TEACHERS"].code, 7, 600),
        }.values()
    )
    assert all(
        any(grader["wrong_values"](code, 7, 600).values()) for code in mutants.mistakes(grader["TEACHERS"]).values()
    )
