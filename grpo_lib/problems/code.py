"""Small functions to write in Python: generated, with the cases that they are tested by.

    >>> generate("train", 1)[0].question
    'Write a Python function `solve(values)` that returns ...'

The values of the cases come from a function of our own; a completion is right when its function agrees on all of them.
"""

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


OF_NUMBERS = [
    Template("how many numbers in `values` are larger than {k}", lambda k, v: sum(x > k for x in v)),
    Template("the sum of the numbers in `values` that {k} divides", lambda k, v: sum(x for x in v if x % k == 0)),
    Template("the numbers in `values`, each multiplied by {k}, as a list", lambda k, v: [k * x for x in v]),
    Template("a list of the numbers in `values` that are at least {k}", lambda k, v: [x for x in v if x >= k]),
    Template("a list of every {k}th number in `values`, beginning with the first", lambda k, v: v[::k]),
    Template("`values` turned left by {k} places", lambda k, v: v[k % len(v) :] + v[: k % len(v)]),
    Template(
        "how many pairs of positions i < j have values[i] + values[j] == {k}",
        lambda k, v: sum(v[i] + v[j] == k for j in range(len(v)) for i in range(j)),
    ),
    Template("the {k} smallest numbers in `values` (all, if there are fewer), sorted", lambda k, v: sorted(v)[:k]),
]
OF_TEXT = [
    Template(
        "a list of the words in `values` with at least {k} letters",
        lambda k, text: [word for word in text.split() if len(word) >= k],
    ),
    Template(
        "the words in `values` in reverse order, joined by {k} spaces",
        lambda k, text: (" " * k).join(text.split()[::-1]),
    ),
    Template(
        "the first {k} letters of each word in `values`, as one text",
        lambda k, text: "".join(word[:k] for word in text.split()),
    ),
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
    template, k = rng.choice(OF_TEXT if of_text else OF_NUMBERS), rng.randint(2, 6 if of_text else 40)
    question = (
        f"Write a Python function `solve(values)` that returns {template.text.format(k=k)}. `values` is a "
        f"{'text of words' if of_text else 'list of integers'}. Answer with its code in a ```python block."
    )
    inputs = random.Random(question)  # one question has one gold, whenever it is drawn
    cases: list[Any] = []
    while len({str(value) for _, value in cases}) < CASES // 2:  # no constant passes
        sizes = [inputs.randint(1, 12 if of_text else 2 * k + 3) for _ in range(CASES)]
        given = [
            " ".join(inputs.choices(WORDS, k=size)) if of_text else [inputs.randint(-5, 2 * k + 5) for _ in range(size)]
            for size in sizes
        ]
        cases = [[[value], template.solve(k, value)] for value in given]
    return Problem(name, question, "", json.dumps({"function": "solve", "cases": cases}), "code", kind="code")
