"""Small functions to write in Python: generated, with the cases that they are tested by.

    >>> generate("train", 1)[0].question
    'Write a Python function `solve(values)` that returns ...'

The values of the cases come from a function of our own; a completion is right when its function agrees on all of them.
"""

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .types import Problem
from .words import MOST_DRAWS, split_of

CASES = 6
WORDS = ["a", "of", "to", "sea", "bird", "cloud", "dance", "eagle", "flower", "island", "jungle", "kite"]


@dataclass(frozen=True)
class Template:
    """A family of functions: what is asked, with a number {k} in it, and the answer for k and an input."""

    text: str
    solve: Callable[[int, Any], Any]


def _count_larger(k: int, values: list[int]) -> int:
    return sum(value > k for value in values)


def _at_least(k: int, values: list[int]) -> list[int]:
    return [value for value in values if value >= k]


def _sum_of_multiples(k: int, values: list[int]) -> int:
    return sum(value for value in values if value % k == 0)


def _turned_left(k: int, values: list[int]) -> list[int]:
    places = k % len(values)
    return values[places:] + values[:places]


def _pairs_with_sum(k: int, values: list[int]) -> int:
    """How many pairs of positions i < j there are whose values add up to k."""
    pairs = itertools.combinations(values, 2)
    return sum(first + second == k for first, second in pairs)


def _words_of_length(k: int, text: str) -> list[str]:
    return [word for word in text.split() if len(word) >= k]


def _words_reversed(k: int, text: str) -> str:
    words = text.split()
    return (" " * k).join(words[::-1])


def _first_letters(k: int, text: str) -> str:
    return "".join(word[:k] for word in text.split())


OF_NUMBERS = [
    Template("how many numbers in `values` are larger than {k}", _count_larger),
    Template("the sum of the numbers in `values` that {k} divides", _sum_of_multiples),
    Template("the numbers in `values`, each multiplied by {k}, as a list", lambda k, v: [k * x for x in v]),
    Template("a list of the numbers in `values` that are at least {k}", _at_least),
    Template("a list of every {k}th number in `values`, beginning with the first", lambda k, v: v[::k]),
    Template("`values` turned left by {k} places", _turned_left),
    Template("how many pairs of positions i < j have values[i] + values[j] == {k}", _pairs_with_sum),
    Template("the {k} smallest numbers in `values` (all, if there are fewer), sorted", lambda k, v: sorted(v)[:k]),
]
OF_TEXT = [
    Template("a list of the words in `values` with at least {k} letters", _words_of_length),
    Template("the words in `values` in reverse order, joined by {k} spaces", _words_reversed),
    Template("the first {k} letters of each word in `values`, as one text", _first_letters),
]


def generate(split: str, n: int, seed: int = 0) -> list[Problem]:
    """The first `n` problems of a split, in the order that `seed` gives; no question is in two splits.

    Train draws with repetition, so that it never ends; validation and test have a few dozen, and give all where `n` is
    more.
    """
    rng = random.Random(f"code {split} {seed}")
    problems: list[Problem] = []
    seen: set[str] = set()
    for _ in range(MOST_DRAWS + 20 * n):
        problem = _draw(rng, f"code-{split}-{seed}-{len(problems)}")
        if split_of(problem.question) == split and (split == "train" or problem.question not in seen):
            seen.add(problem.question)
            problems.append(problem)
        if len(problems) == n:
            break
    return problems


def _draw(rng: random.Random, name: str) -> Problem:
    of_text = rng.random() < 0.2
    template = rng.choice(OF_TEXT if of_text else OF_NUMBERS)
    k = rng.randint(2, 6 if of_text else 40)
    question = (
        f"Write a Python function `solve(values)` that returns {template.text.format(k=k)}. `values` is a "
        f"{'text of words' if of_text else 'list of integers'}. Answer with its code in a ```python block."
    )
    inputs = random.Random(question)  # one question has one gold, whenever it is drawn
    cases: list[Any] = []
    while len({str(value) for _, value in cases}) < CASES // 2:  # no constant passes
        sizes = [inputs.randint(1, 12 if of_text else 2 * k + 3) for _ in range(CASES)]
        given: list[Any] = []
        for size in sizes:
            if of_text:
                given.append(" ".join(inputs.choices(WORDS, k=size)))
            else:
                given.append([inputs.randint(-5, 2 * k + 5) for _ in range(size)])
        cases = [[[value], template.solve(k, value)] for value in given]
    gold = json.dumps({"function": "solve", "cases": cases})
    return Problem(name, question, "", gold, "code", kind="code")
