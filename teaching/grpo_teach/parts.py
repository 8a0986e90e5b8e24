"""What is graded of an answer: its parts, each with hidden inputs, and how values are compared.

Points are for properties, not for single cases: an exercise has parts, and a part counts if the answer is right for all
its inputs.  So that a constant earns nothing, every part has inputs with different answers.  The parts of an exercise
come from `hidden(rng)` in its test cell, in the teacher's notebook.  Expected values are what the solution returns; a
part may check a property instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """One property of an answer.

    name: what students read in their result.
    inputs: the arguments of each call.
    function: the function that is called; the exercise's first one if empty.
    harness: calls it, as harness(function, *arguments), in the student's process; for arguments that JSON cannot hold.
    passes: from the values of all calls and the solution's to a verdict, true or false, or in place of false what was
    missed as text, which students read (in Chinese by words.REASONS); by default values are compared one by one.
    tolerance: absolute or relative.
    processes: the calls are made in so many processes, one after the other, and the values follow each other.
    equal: compares a value with the solution's; by default they must be `close`.
    share: of the inputs that must be right.
    """

    name: str
    inputs: Sequence[tuple]
    function: str = ""
    harness: Callable[..., Any] | None = None
    passes: Callable[[list, list], Any] | None = None
    tolerance: float = 1e-6
    processes: int = 1
    equal: Callable[[Any, Any], Any] | None = None
    share: float = 1.0
