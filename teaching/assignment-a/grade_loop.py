"""Grade exercise 10.1 (A2) of a folder of submissions, for teachers.

    .venv/bin/python teaching/assignment-a/grade_loop.py submissions --seed 7

A submission is the notebook, or a folder with it, named after the student.  Writes FOLDER-loop.csv.  The student's
functions run in a process of their own (train_loop.py) with a limit of time; it gets arguments and problems, and the
values and completions that it returns are judged here.  That process has JAX and can read files: use a container for
the work of people you do not trust.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from grpo_lib.common import environment, files
from grpo_lib.common.errors import CourseError
from grpo_lib.problems.words import generate
from grpo_lib.records import grade
from grpo_teach.notebooks import read_exercises

HERE = Path(__file__).parent
SOLUTION = HERE / "10_assignment_a.ipynb"
EXERCISE = "10.1"


def run(code: str, seconds: float, *arguments: Any) -> str:
    """What train_loop.py prints with these functions.  Raises CourseError: a remark."""
    root = environment.repo_root()
    variables = environment.default_variables() | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    with tempfile.TemporaryDirectory() as folder:
        functions = files.write_text_atomic(Path(folder) / "functions.py", code)
        command = list(map(str, [sys.executable, HERE / "train_loop.py", functions, *arguments]))
        try:
            done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=seconds, env=variables)
        except subprocess.TimeoutExpired:
            raise CourseError(f"stopped after {seconds:g} seconds") from None
    if done.returncode:
        raise CourseError(("\n" + done.stderr.strip()).rpartition("\n")[2][:300] or "it ended its process")
    return done.stdout


def values(code: str, seconds: float, cases: dict[str, list]) -> dict[str, Any]:
    """Of each function a list of values, or the error as text."""
    with tempfile.TemporaryDirectory() as folder:
        path = files.write_json_atomic(Path(folder) / "cases.json", cases)
        try:
            return json.loads(run(code, seconds, "--cases", path).splitlines()[-1])
        except (CourseError, ValueError, IndexError) as error:
            return dict.fromkeys(cases, str(error))


def learns(code: str, seconds: float, seed: int, bar: float) -> str:
    """What is missing after a training on secret problems: "" for nothing."""
    problems, training = (int(one) for one in np.random.default_rng(seed).integers(2**31, size=2))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "records.jsonl"
        arguments = ["--problems", problems, "--seed", training, "--split", "test", "--output", output]
        try:
            run(code, seconds, *arguments)
            said = {record["id"]: str(record["completion"]) for record in files.read_jsonl(output)}
        except (CourseError, OSError, LookupError, TypeError) as error:
            return str(error)
    tests = generate("test", 500, seed=problems)
    share = np.mean([grade(said.get(one.id, ""), one.answer, one.kind)["strict"] for one in tests])
    print(f"  {share:.1%} of {len(tests)} test problems right", flush=True)
    return "" if share >= bar else f"{share:.1%} of the test problems, below {bar:.0%}"


def equal(got: Any, want: Any) -> bool:
    return len(got) == len(want) and all(
        np.shape(a) == np.shape(b) and np.allclose(a, b, 1e-4, 1e-5) for a, b in zip(got, want, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, required=True, help="draws what is secret: choose it, and keep it")
    parser.add_argument("--seconds", type=float, default=600, help="that a student's training may take")
    options = parser.parse_args()
    teachers, hidden = read_exercises(SOLUTION)[EXERCISE], {"np": np}
    exec(compile(teachers.hidden, "hidden tests", "exec"), hidden)
    cases = hidden["cases"](np.random.default_rng(options.seed))
    want, lines = values(teachers.code, options.seconds, cases), []
    for entry in sorted(one for one in options.folder.iterdir() if one.is_dir() or one.suffix == ".ipynb"):
        name, missed = (entry.stem if entry.is_file() else entry.name), {}
        try:
            notebooks = sorted(entry.rglob("*.ipynb")) if entry.is_dir() else [entry]
            code = {number: one.code for path in notebooks for number, one in read_exercises(path).items()}[EXERCISE]
            for part, got in values(code, options.seconds, cases).items():
                missed[part] = got if isinstance(got, str) else "" if equal(got, want[part]) else "not right"
            missed["learns"] = learns(code, options.seconds, options.seed, hidden["BAR"])
        except KeyError:
            missed = {"all": f"no exercise {EXERCISE}"}
        except ValueError as error:
            missed = {"all": str(error)}
        points = teachers.points * list(missed.values()).count("") / (len(want) + 1)
        remarks = "; ".join(f"{part}: {reason}" for part, reason in missed.items() if reason)
        lines.append({"submission": name, "points": points, "of": teachers.points, "remarks": remarks})
        print(f"{name}: {points:g}  {remarks}", flush=True)
    table = options.folder.with_name(f"{options.folder.resolve().name}-loop.csv")
    files.write_text_atomic(table, pd.DataFrame(lines).to_csv(index=False))
    print(f"grades: {table}")


if __name__ == "__main__":
    main()
