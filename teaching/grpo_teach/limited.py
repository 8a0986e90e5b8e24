"""Run functions of a student in grpo_teach.worker: limits of time, memory and output; values or reasons come back.

Behind what it runs: grpo_lib.common.boundary, but for a student's own code on the student's own machine.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_lib.common import boundary
from grpo_lib.common.boundary import Limits
from grpo_teach import worker
from grpo_teach.hand_ins import plain

PACKAGES = Path(np.__file__).parents[1]
SECONDS = 10  # of computing; a busy machine costs nobody points
WAIT = 3  # times as long by the clock, for what sleeps
MEMORY = 2**30  # bytes of address space, Python and NumPy included
WITHOUT_TEXT = "an error without a text"
OUTPUT = 2**21  # bytes of results; read as JSON they are 50 MB at most
# The types of arrays that come back; text in an array is compared as objects.  (NumPy would take the length of
# "U500000000" from the result, and memory for it.)
NUMBERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
NUMBERS += ("float16", "float32", "float64")


@dataclass(frozen=True)
class Failed:
    """What comes back in place of a value."""

    reason: str
    uncalled: bool = False  # the code itself ended with an error, so that no function was called

    @property
    def kind(self) -> str:
        """The error's type."""
        return self.reason.partition(" (line ")[0].partition(":")[0]


@dataclass(frozen=True)
class Call:
    """One call of a function: its name, its arguments, and the source of `harness(function, *arguments)` or ""."""

    function: str
    harness: str
    arguments: tuple


def run(code: str, calls: Sequence[Call], seconds: int = SECONDS, own: bool = False) -> list[Any]:
    """One value or `Failed` per call, of functions that `code` defines.  All calls share one process and its limits.

    Args:
      own: the code is the user's own: it needs no boundary, and what it prints is shown.

    Raises CourseError where foreign code has no boundary.
    """
    encoded = [[call.function, call.harness, worker.encode(call.arguments)] for call in calls]
    task = {"code": code, "calls": encoded, "packages": str(PACKAGES), "own": own}
    program = Path(worker.__file__).read_text("utf-8")  # not as a file, which another user could not read
    limits = Limits(seconds, MEMORY, OUTPUT, WAIT)
    found = boundary.OWN if own else boundary.in_use()
    numpy = [PACKAGES / "numpy", PACKAGES / "numpy.libs"]
    given = json.dumps(task).encode()
    ended = boundary.run(program, given, limits, found, numpy, own, OPENBLAS_NUM_THREADS="1")
    if ended.code is None:
        reason = f"stopped after {WAIT * seconds} seconds without a result"
    else:
        reason = f"stopped after {seconds} seconds" if ended.out_of_time else "the function ended its process"
    lines = ended.output.decode(errors="replace").split("\n")[:-1]
    values = [_value(line) for line in lines[: len(calls)]]
    return values + [Failed(reason)] * (len(calls) - len(values))


def _value(line: str) -> Any:
    """A result; a student's code can write here too, so the line may hold anything."""
    try:
        result = json.loads(line)
        if "error" in result:
            reason = plain(str(result["error"])) or WITHOUT_TEXT  # the student's process writes it
            return Failed(reason, result.get("uncalled") is True)
        return _decode(result["value"])
    except Exception:
        return Failed("its result cannot be read")


def _decode(value: Any) -> Any:
    """`worker.decode` for what a student's process wrote."""
    if isinstance(value, list):
        return [_decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        return {key: _decode(one) for key, one in value["dict"].items()}
    return np.array(value["array"], value["dtype"] if value["dtype"] in NUMBERS else object)
