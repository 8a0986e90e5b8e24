"""From the `problems` section of a recipe to a list of problems."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpo_lib.common.errors import CourseError

from . import gsm8k, words
from .types import SPLITS, Problem

if TYPE_CHECKING:
    from grpo_lib.recipes import ProblemsRecipe

# How many word problems where no limit is given: they never end.
WORD_PROBLEMS = {"train": 20_000, "validation": 500, "test": 1_000}
HELD_OUT = 500  # validation problems of GSM8K, taken out of its train split


def load_problems(problems: ProblemsRecipe, split: str, n: int | None = None) -> list[Problem]:
    """The problems of a split: "train", "validation" or "test".

    `n` is an upper limit that replaces the recipe's own (`problems.train` and so on); null there means all, or
    WORD_PROBLEMS where they never end.
    GSM8K has no validation split: it is held out of train, and test stays untouched.

    Raises:
      CourseError: unknown split; no data (see gsm8k).
    """
    if split not in SPLITS:
        raise CourseError(f"problems: split {split!r} does not exist; use one of {', '.join(SPLITS)}")
    limit = getattr(problems, split) if n is None else n
    if problems.source == "words":
        return words.generate(split, limit or WORD_PROBLEMS[split], problems.seed, problems.difficulty)
    return _load_gsm8k(problems.path, split)[:limit]


def hold_out(problems: Sequence[Problem]) -> tuple[list[Problem], list[Problem]]:
    """(train, validation): the last 500 questions of a shuffle, but at most a tenth of all, are held out.

    The shuffle sorts by a hash of the question: it is the same on every machine and for any order of the
    input.  Both parts keep the order of the input, and a question that occurs twice is never in both.
    """
    questions = {problem.question for problem in problems}
    shuffled = sorted(questions, key=lambda text: hashlib.sha256(f"validation {text}".encode()).digest())
    count = min(HELD_OUT, len(shuffled) // 10)
    held_out = set(shuffled[len(shuffled) - count :])
    train = [problem for problem in problems if problem.question not in held_out]
    return train, [problem for problem in problems if problem.question in held_out]


def _load_gsm8k(path: str | None, split: str) -> list[Problem]:
    stored = "test" if split == "test" else "train"
    problems = gsm8k.from_folder(path, stored) if path is not None else gsm8k.from_tfds(stored)
    if split == "test":
        return problems
    train, validation = hold_out(problems)
    if split == "validation" and not validation:
        raise CourseError(f"problems.path={path}: tenth of {len(problems)} problems is none; use at least 10")
    return train if split == "train" else validation
