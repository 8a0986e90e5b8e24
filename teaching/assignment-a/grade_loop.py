"""Grade exercise 10.1 (A2) of a folder of submissions, for teachers.

    .venv/bin/python teaching/assignment-a/grade_loop.py submissions --seed 7

A submission is the notebook, or a folder with it, named after the student.  Writes FOLDER-loop.csv.  The student's
functions run in a process of their own (loop_process.py), behind grpo_lib.common.boundary: first with arguments, then
in a training on the public problems of seed 0.  Values and weights come back, and are judged here: the solution's
values and the secret test problems are never in a process of the student's user.
"""

import argparse
import functools
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from grpo_lib.common import boundary, environment, files
from grpo_lib.common.errors import CourseError
from grpo_lib.common.spreadsheets import BYTE_ORDER_MARK, for_spreadsheet
from grpo_teach.cli import SEED
from grpo_teach.hand_ins import plain
from grpo_teach.notebooks import read_exercises
from grpo_teach.submissions import read_submissions

HERE = Path(__file__).parent
SOLUTION = HERE / "10_assignment_a.ipynb"
EXERCISE = "10.1"
ENDED = "the functions ended their process"
WEIGHTS = b"weights\n"  # what stands before them, as in loop_process.py
PACKAGES = Path(np.__file__).parents[1]
LIBRARY = environment.repo_root() / "grpo_lib"
MODEL = environment.repo_root() / "assets" / "tiny-base"
TEACHERS_ONLY = [HERE.parent, LIBRARY.parent / "tests" / "teach"]
MEMORY = 2**33  # bytes of address space; on two cores JAX took 1.5 GB of it
STEPS = 30  # of a training
OUTPUT = 2**23  # bytes; the weights are 3.3 MB
THREADS = 512  # JAX has some for each core
OPEN_FILES = 256
TEACHERS = read_exercises(SOLUTION)[EXERCISE]
HIDDEN: dict[str, Any] = {"np": np}
exec(compile(TEACHERS.hidden, "hidden tests", "exec"), HIDDEN)


def run(code: str, seconds: float, cases: dict[str, list] | None = None, steps: int = STEPS) -> bytes:
    """What loop_process.py writes: values of the cases, or without cases weights.  Raises CourseError: a remark."""
    loop = (HERE / "train_loop.py").read_text("utf-8")
    paths = [str(LIBRARY.parent), str(PACKAGES)]
    task = {"code": code, "loop": loop, "cases": cases, "model": str(MODEL), "steps": steps, "paths": paths}
    cores = os.cpu_count() or 1  # a training may use all of them
    limits = boundary.Limits(int(seconds * cores), MEMORY, OUTPUT, 1 / cores, THREADS, OPEN_FILES)
    program = (HERE / "loop_process.py").read_text("utf-8")
    # A cache of programs that students could write into is none to share.  YNNPACK needs /proc.
    variables = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    variables["XLA_FLAGS"] = "--xla_cpu_experimental_ynn_fusion_type="
    readable = [PACKAGES, LIBRARY, MODEL]
    ended = boundary.run(program, json.dumps(task).encode(), limits, boundary.in_use(), readable, **variables)
    if ended.code is None:
        raise CourseError(f"stopped after {seconds:g} seconds")
    return ended.output


def said(output: bytes) -> dict[str, Any]:
    """The JSON object that a student's process wrote.  Raises CourseError where it is none, or an error."""
    try:
        found = dict(json.loads(output))
    except (ValueError, TypeError, RecursionError):
        raise CourseError(ENDED) from None
    if "error" in found:
        raise CourseError(plain(str(found["error"])) or ENDED)
    return found


def values(code: str, seconds: float, cases: dict[str, list]) -> dict[str, Any]:
    """Of each function a list of values, or the error as text."""
    try:
        return said(run(code, seconds, cases))
    except CourseError as error:
        return dict.fromkeys(cases, str(error))


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


def learns(code: str, seed: int, seconds: float, steps: int = STEPS) -> str:
    """What is missing after a training, on secret test problems: "" for nothing."""
    loop = train_loop()
    policy = loop.plain_grpo.load_policy(MODEL)
    try:
        policy.weights = trained(run(code, seconds, steps=steps), policy.weights)
    except CourseError as error:
        return plain(str(error))
    problems = int(np.random.default_rng(seed).integers(2**31))
    options = loop.parser_of_options().parse_args(["submission", "--split", "test", "--problems", str(problems)])
    records = loop.test(policy, options)
    share = np.mean([record["right"] for record in records])
    print(f"  {share:.1%} of {len(records)} test problems right", flush=True)
    return "" if share >= HIDDEN["BAR"] else f"{share:.1%} of the test problems, below {HIDDEN['BAR']:.0%}"


def trained(output: bytes, base: dict[str, Any]) -> dict[str, np.ndarray]:
    """The weights that a student's process wrote, in the base's shapes.  Raises CourseError where they are none."""
    sizes = [base[name].size for name in sorted(base)]
    if not output.startswith(WEIGHTS):
        said(output)
    numbers = output.removeprefix(WEIGHTS)
    if len(numbers) != 4 * sum(sizes):
        raise CourseError(ENDED)
    parts = np.split(np.frombuffer(numbers, np.float32), np.cumsum(sizes)[:-1])
    return {name: part.reshape(base[name].shape) for name, part in zip(sorted(base), parts, strict=True)}


@functools.cache
def train_loop() -> Any:
    """train_loop.py as a module; it imports JAX."""
    spec = importlib.util.spec_from_file_location("train_loop", HERE / "train_loop.py")
    assert spec
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    seed = os.environ.get(SEED)
    secret = f"draws what is secret: choose it, and keep it (or {SEED}, which other users cannot read)"
    parser.add_argument("--seed", type=int, default=seed, required=seed is None, help=secret)
    parser.add_argument("--seconds", type=float, default=600, help="that a student's training may take")
    parser.add_argument(
        "--no-isolation", action="store_true", help="run without a boundary the work of people you trust"
    )
    options = parser.parse_args()
    print(boundary.require(*TEACHERS_ONLY, options.folder, off=options.no_isolation), flush=True)
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
    except (CourseError, OSError) as error:
        sys.exit(f"error: {error}")
