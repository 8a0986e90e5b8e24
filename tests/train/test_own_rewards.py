"""A reward of the user's own: refused in one line before JAX is imported, or trained with from end to end."""

import subprocess
import sys

import pytest
from helpers import result_of

from grpo_lib.common.files import read_json, read_jsonl

START = "def points(prompts, completions, answer, **kwargs):\n    "
# What is odd about a reward -> the body of its function, and words of the one line.  Empty words: it is taken.
ODD = {
    "none": ("return None", "(line 1) returned None, which is no list"),
    "nan": ("return [0.5, float('nan')]", "(line 1) returned nan for completion 2 of 2, which is no finite number"),
    "infinite": ("return [float('inf'), 0]", "returned inf for completion 1 of 2"),
    "too large": ("return [10 ** 400, 0]", "for completion 1 of 2, which is no finite number"),
    "too few": ("return [1.0]", "returned 1 for 2 completions; return a list of 2 numbers, one per completion"),
    "too many": ("return [1.0] * 3", "returned more for 2 completions"),
    "one value": ("return 1.0", "returned 1.0, which is no list"),
    "texts": ("return ['1', '2']", "returned '1' for completion 1 of 2"),
    "a text": ("return '12'", "returned a str"),
    "a column": ("import numpy\n    return numpy.ones((2, 1))", "of type ndarray and shape (1,) for completion 1 of 2"),
    "a mapping": ("return dict(enumerate(completions))", "returned a dict"),
    "an error": ("x = 1\n    return [x / 0]", "(line 3) raises ZeroDivisionError: division by zero"),
    "an exit": ("raise SystemExit('bye')", "(line 2) raises SystemExit: bye"),
    "no syntax": ("return [", "(line 2) cannot be run: SyntaxError: '[' was never closed"),
    "truth values": ("return [True, False]", ""),
    "whole numbers": ("return [len(text) for text in completions]", ""),
}
# Checks a recipe with each file, in one process.  argv: name of each file; prints name -> error, or None.
CHECK_EACH = """
import json, sys
from grpo_lib.common.errors import CourseError
from grpo_train import checks
from grpo_train.recipes import load_recipe

class Reached(Exception): pass
def with_jax(recipe): raise Reached
checks.assign_devices = with_jax  # what imports JAX
said = {}
for path in sys.argv[1:]:
    recipe = load_recipe("recipes/tiny-cpu.yaml", [f"rewards=[correct_answer, '{path}:points']", "problems.train=20"])
    try:
        checks.check(recipe)
    except CourseError as error:
        said[path] = str(error)
    except Reached:
        said[path] = None
print(json.dumps({"said": said, "jax": "jax" in sys.modules}))
"""


@pytest.fixture(scope="module")
def checked(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd")
    paths = {name: folder / f"{name.replace(' ', '_')}.py" for name in ODD}
    for name, (body, _) in ODD.items():
        paths[name].write_text(f"{START}{body}\n", encoding="utf-8")
    command = [sys.executable, "-c", CHECK_EACH, *map(str, paths.values())]
    result = result_of(subprocess.run(command, cwd=root, capture_output=True, text=True))
    return result["jax"], {name: result["said"][str(path)] for name, path in paths.items()}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_reward_is_one_line_before_jax(checked, name):
    imported_jax, said = checked
    words = ODD[name][1]
    assert not imported_jax
    if words:
        assert said[name].startswith("rewards: ") and f"{name.replace(' ', '_')}.py" in said[name]
        assert words in said[name] and len(said[name].splitlines()) == 1
    else:
        assert said[name] is None


SMALL = [
    *("training.prompts_per_step=4", "training.validate_every=0", "grpo.group_size=4"),
    *("problems.train=200", "problems.test=8", "problems.validation=8", "evaluation.batch_size=8"),
]
FAILS_LATER = """
calls = 0
def points(prompts, completions, answer, **kwargs):
    global calls
    calls += len(completions) == 16  # others are a trial, and evaluations
    return [float("nan") if calls == 3 and len(completions) == 16 else float(len(text)) for text in completions]
"""


@pytest.mark.long(minutes=1)
def test_a_reward_that_fails_in_a_later_step_loses_nothing(grpo, tmp_path, converted_base):
    file = tmp_path / "later.py"
    file.write_text(FAILS_LATER, encoding="utf-8")
    run = tmp_path / "run"
    rewards = f"rewards=['{file}:points', correct_answer]"
    options = ["--runs", tmp_path, "--run", "run", "--base", converted_base]
    command = ["train", "recipes/tiny-cpu.yaml", *SMALL, "training.steps=5", rewards, *options]
    done = grpo(*command)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"error: step 3: rewards: {file}:points (line 3) returned nan for completion 1 of 16")
    assert last.endswith("the last good checkpoint is of step 2")
    assert "Traceback" not in done.stderr
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [1, 2]
    assert len(read_jsonl(run / "evals" / "before.jsonl")) == 8
    # The file is loaded still, and counts on: the same command goes on behind step 2.
    done = grpo(*command)
    assert done.returncode == 0 and "continuing after step 2 of 5" in done.stdout
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3, 4, 5]


@pytest.mark.long(minutes=1)
def test_a_reward_of_a_file_trains_the_tiny_model(root, tmp_path):
    """By command, in processes of their own: 20 steps in which short completions alone are paid."""
    file = tmp_path / "mine.py"
    code = f"{START}return [-len(text) / 100 for text in completions]\n"
    file.write_text(code, encoding="utf-8")
    rewards = "rewards=['mine.py:points']"

    def grpo(*arguments):
        command = [sys.executable, "-m", "grpo_train.cli", *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    model = f"model.path={root / 'assets' / 'tiny-base'}"
    fast = ["training.validate_every=0", "training.warmup_steps=0", "problems.test=100"]
    command = ["train", root / "recipes" / "tiny-cpu.yaml", rewards, model, *fast, "--run", "own"]
    done = grpo(*command, "training.steps=20", "--json")
    summary = result_of(done)
    run = tmp_path / "runs" / "own"
    assert summary["after"]["rewards"]["points"] > summary["before"]["rewards"]["points"]
    assert list(read_json(run / "environment.json", "")["reward_files"]) == ["mine.py:points"]
    assert all("rewards/points/mean" in row for row in read_jsonl(run / "metrics.jsonl"))
    assert "points" in (run / "report.html").read_text(encoding="utf-8")
    # With another content it does not go on, in one line.
    file.write_text(f"{code}# another\n", encoding="utf-8")
    again = grpo(*command, "training.steps=25")
    assert again.returncode == 2 and len(again.stderr.strip().splitlines()) == 1
    assert "began with another content of mine.py:points" in again.stderr
