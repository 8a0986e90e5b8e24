"""What a problem is, whatever its source."""

from __future__ import annotations

from dataclasses import dataclass

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Problem:
    """One question with one answer."""

    id: str  # unique within its source and split
    question: str
    solution: str  # a worked solution, as text
    answer: str  # the gold; a number in canonical form: "1080", not "1,080" or "1080.00"; LaTeX as it is
    source: str  # "words", "gsm8k", ...
    steps: int | None = None  # calculations in the worked solution, where that is known
    kind: str = "tagged"  # "tagged": one number in <answer> tags; "integer": an integer stated last; "latex"
