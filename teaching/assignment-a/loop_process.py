"""The process that runs a student's three functions.  grade_loop.py starts it behind grpo_lib.common.boundary.

It gets the student's code, train_loop.py, and arguments or the public problems, and never an expected value, a seed of
the grader or a test problem.  What comes back is a JSON object of values, or `WEIGHTS` and the weights as bytes.
"""

import json
import os
import sys
import types
from typing import Any

WEIGHTS = b"weights\n"


def main() -> None:
    task = json.load(sys.stdin)
    results = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # what the student's code prints is no result
        os.dup2(nothing, stream)
    os.environ["HOME"] = os.getcwd()
    sys.path[:0] = task["paths"]
    try:
        written = _run(task)
    except BaseException as error:  # also SystemExit: all of it is the student's
        written = json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()
    results.write(written)
    results.flush()


def _run(task: dict[str, Any]) -> bytes:
    loop = types.ModuleType("train_loop")
    sys.modules["train_loop"] = loop
    exec(compile(task["loop"], "train_loop.py", "exec"), vars(loop))
    functions = loop.functions_of(task["code"], "submission")
    if task["cases"]:
        return json.dumps(loop.values(functions, task["cases"])).encode()
    arguments = ["submission", "--model", task["model"], "--steps", str(task["steps"])]
    options = loop.parser_of_options().parse_args(arguments)
    return WEIGHTS + _as_bytes(loop.train(functions, options).weights)


def _as_bytes(weights: dict[str, Any]) -> bytes:
    """All weights one after the other, in the order of their names."""
    import numpy as np

    return b"".join(np.asarray(weights[name], np.float32).tobytes() for name in sorted(weights))


if __name__ == "__main__":
    main()
