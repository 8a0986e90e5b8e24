"""Grade exercise 10.1 (A2) of a folder of submissions, for teachers.

    .venv/bin/python teaching/assignment-a/grade_loop.py submissions --seed 7

A submission is the notebook, or a folder with it, named after the student.  Writes FOLDER-loop.csv.  The student's
functions run in a process of their own (train_loop.py) with a limit of time; it gets arguments and problems, and the
values and completions that it returns are judged here.  That process has JAX and can read files, and no boundary is
around it: use a container for the work of people you do not trust.
"""

import argparse
import functools
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
from grpo_lib.common.spreadsheets import BYTE_ORDER_MARK, for_spreadsheet
from grpo_lib.problems.words import generate
from grpo_lib.records import grade
from grpo_teach.hand_ins import plain
from grpo_teach.notebooks import read_exercises
from grpo_teach.submissions import read_submissions

HERE = Path(__file__).parent
SOLUTION = HERE / "10_assignment_a.ipynb"
EXERCISE = "10.1"
ENDED = "the functions ended their process"
TEACHERS = read_exercises(SOLUTION)[EXERCISE]
HIDDEN: dict[str, Any] = {"np": np}
exec(compile(TEACHERS.hidden, "hidden tests", "exec"), HIDDEN)


def run(code: str, seconds: float, *arguments: Any) -> str:
    """What train_loop.py prints with these functions.  Raises CourseError: a remark."""
    root = environment.repo_root()
    variables = environment.default_variables() | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    with tempfile.TemporaryDirectory() as folder:
        functions = files.write_text_atomic(Path(folder) / "functions.py", code)
        command = list(map(str, [sys.executable, HERE / "train_loop.py", functions, *arguments]))
        try:
            done = subprocess.run(
                command, cwd=root, capture_output=True, text=True, errors="replace", timeout=seconds, env=variables
            )
        except subprocess.TimeoutExpired:
            raise CourseError(f"stopped after {seconds:g} seconds") from None
    if done.returncode:
        last = ("\n" + done.stderr.strip()).rpartition("\n")[2]
        raise CourseError(plain(last.replace(f"{root}/", "")) or ENDED)
    return done.stdout


def values(code: str, seconds: float, cases: dict[str, list]) -> dict[str, Any]:
    """Of each function a list of values, or the error as text."""
    with tempfile.TemporaryDirectory() as folder:
        path = files.write_json_atomic(Path(folder) / "cases.json", cases)
        try:
            return dict(json.loads(run(code, seconds, "--cases", path).splitlines()[-1]))
        except CourseError as error:
            return dict.fromkeys(cases, str(error))
        except (ValueError, IndexError, TypeError, RecursionError):  # it printed something else
            return dict.fromkeys(cases, ENDED)


@functools.cache
def wanted(seed: int, seconds: float) -> tuple[dict[str, list], dict[str, Any]]:
    """Arguments of each function that this seed draws, and the solution's values."""
    cases = HIDDEN["cases"](np.random.default_rng(seed))
    return cases, values(TEACHERS.code, seconds, cases)


def wrong_values(code: str, seed: int, seconds: float) -> dict[str, str]:
    """Of each function what was missed: "" for nothing."""
    cases, want = wanted(seed, seconds)
    found = values(code, seconds, cases)
    missed: dict[str, str] = {}
    for name in cases:
        got = found.get(name, "no values")
        if isinstance(got, str):  # the error
            missed[name] = plain(got) or ENDED
        else:
            missed[name] = "" if equal(got, want[name]) else "not right"
    return missed


def learns(code: str, seed: int, seconds: float) -> str:
    """What is missing after a training on secret problems: "" for nothing."""
    problems, training = np.random.default_rng(seed).integers(2**31, size=2).tolist()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "records.jsonl"
        arguments = ["--problems", problems, "--seed", training, "--split", "test", "--output", output]
        try:
            run(code, seconds, *arguments)
            if output.is_symlink() or not output.is_file():  # the functions could make something else of it
                return ENDED
            said = {record["id"]: str(record["completion"]) for record in files.read_jsonl(output)}
        except CourseError as error:
            return plain(str(error))
        except (OSError, LookupError, TypeError, RecursionError):
            return ENDED
    tests = generate("test", 500, seed=problems)
    share = np.mean([grade(said.get(test.id, ""), test.answer, test.kind)["strict"] for test in tests])
    print(f"  {share:.1%} of {len(tests)} test problems right", flush=True)
    return "" if share >= HIDDEN["BAR"] else f"{share:.1%} of the test problems, below {HIDDEN['BAR']:.0%}"


def equal(got: Any, want: Any) -> bool:
    """Whether all values are equal; what the student's process printed may be anything."""
    try:
        if len(got) != len(want):
            return False
        pairs = zip(got, want, strict=True)
        return all(np.shape(a) == np.shape(b) and np.allclose(a, b, 1e-4, 1e-5) for a, b in pairs)
    except (ArithmeticError, TypeError, ValueError):
        return False


def write_table(lines: list[dict[str, Any]], path: Path) -> Path:
    """The CSV, a line for each submission."""
    frame = pd.DataFrame(lines, dtype=object)
    return files.write_text_atomic(path, BYTE_ORDER_MARK + frame.map(for_spreadsheet).to_csv(index=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, required=True, help="draws what is secret: choose it, and keep it")
    parser.add_argument("--seconds", type=float, default=600, help="that a student's training may take")
    options = parser.parse_args()
    table = options.folder.with_name(f"{options.folder.resolve().name}-loop.csv")
    lines: list[dict[str, Any]] = []
    for entry in read_submissions(options.folder):
        if code := entry.code.get(EXERCISE):
            missed = wrong_values(code, options.seed, options.seconds)
            missed["learns"] = learns(code, options.seed, options.seconds)
        else:
            missed = {"all": "; ".join(entry.remarks) or f"no exercise {EXERCISE}"}
        points = TEACHERS.points * list(missed.values()).count("") / 4
        parts_of: dict[str, list[str]] = {}  # of each reason
        for part, reason in missed.items():
            if reason:
                parts_of.setdefault(reason, []).append(part)
        remarks = "; ".join(f"{', '.join(parts)}: {reason}" for reason, parts in parts_of.items())
        lines.append({"submission": entry.name, "points": points, "of": TEACHERS.points, "remarks": remarks})
        write_table(lines, table)
        print(f"{entry.name}: {points:g}  {remarks}", flush=True)
    print(f"grades: {table}")


if __name__ == "__main__":
    try:
        main()
    except CourseError as error:
        sys.exit(f"error: {error}")
