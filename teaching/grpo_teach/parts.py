"""What is graded of an answer: its parts, each with hidden inputs, and how values are compared.

Points are for properties, not for single cases: an exercise has parts, and a part counts if the answer is right for all
its inputs.  So that a constant earns nothing, every part has inputs with different answers.  The parts of an exercise
come from `hidden(rng)` in its test cell, in the teacher's notebook.  Expected values are what the solution returns; a
part may check a property instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Part:
    """One property of an answer.

    name: what students read in their result.
    inputs: the arguments of each call.
    function: the function that is called; the exercise's first one if empty.
    harness: calls it, as harness(function, *arguments), in the student's process; for arguments that JSON cannot hold.
    passes: from the values of all calls and the solution's to a verdict; by default all must be `close`.
    tolerance: absolute or relative.
    processes: the calls are made in so many processes, one after the other, and the values follow each other.
    """

    name: str
    inputs: Sequence[tuple]
    function: str = ""
    harness: Callable[..., Any] | None = None
    passes: Callable[[list, list], Any] | None = None
    tolerance: float = 1e-6
    processes: int = 1


def close(got: Any, want: Any, tolerance: float) -> bool:
    """Whether two values are equal; numbers up to `tolerance`, absolute or relative.  A list equals its array."""
    if isinstance(want, dict):
        return got.keys() == want.keys() and all(close(got[key], want[key], tolerance) for key in want)
    if isinstance(want, list | tuple):
        return len(got) == len(want) and all(close(a, b, tolerance) for a, b in zip(got, want, strict=True))
    if want is None or isinstance(want, bool | str):
        return type(got) is type(want) and got == want
    numbers = np.asarray(got, float)
    return numbers.shape == np.shape(want) and np.allclose(numbers, want, tolerance, tolerance)
