"""Word problems made from sentences and small numbers, with worked solutions.

    >>> generate("train", 1, seed=0)[0].question
    'Leo fills 7 boxes of 3 cards. Then Leo sells 4. How many cards does Leo have now?'

They stand in for GSM8K where the model is tiny: the story must be turned into one or two calculations, and the task
has a ceiling of 100 %.  A question belongs to exactly one split, decided by a hash of its text alone, so that no seed
and no number of problems can move a test problem into training.  Questions are told apart by their text: the same
sum can occur in two splits with other people and other things.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import replace

from grpo_lib.common.errors import CourseError

from .types import SPLITS, Problem

NAMES = ["Ana", "Ben", "Eva", "Leo", "Max", "Mia", "Sam", "Tom", "Zoe", "Amy"]
THINGS = ["apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps"]
LARGEST_TERM = 12  # what is added or taken away; factors are single digits
TWO_STEP_SHARE = 0.55  # of what is drawn; repeated one-step questions are dropped from validation and test
HASH_BUCKETS = 10  # bucket 0 is the test split, bucket 1 the validation split, the rest is train

# {n} and {m} are two people, {t} a thing, {a}, {b}, {c} numbers.
FIRST_SENTENCES = {
    "+": ["{n} has {a} {t}. {m} gives {n} {b} more.", "{n} finds {a} {t} and then buys {b} more."],
    "-": ["{n} has {a} {t} and gives {b} to {m}.", "{n} buys {a} {t} but loses {b}."],
    "*": ["{n} fills {a} boxes of {b} {t}.", "{n} buys {b} {t} a day for {a} days."],
}
SECOND_SENTENCES = {
    "+": [" Then {n} finds {c} more.", " Later {m} brings {c} more."],
    "-": [" Then {n} sells {c}.", " Later {n} loses {c}."],
}
LAST_SENTENCE = " How many {t} does {n} have now?"


def generate(split: str, n: int, seed: int = 0) -> list[Problem]:
    """The first `n` problems of a split, in the order that `seed` gives.

    Validation and test hold no question twice; train draws with repetition, so that it never ends.

    Raises:
      CourseError: unknown split.
    """
    if split not in SPLITS:
        raise CourseError(f"problems: split {split!r} does not exist; use one of {', '.join(SPLITS)}")
    # Text seeds go through SHA-512, so each split draws its own sequence, the same on every machine.
    rng = random.Random(f"words {split} {seed}")
    problems: list[Problem] = []
    seen: set[str] = set()
    while len(problems) < n:
        problem = draw(rng)
        if split_of(problem.question) != split or (split != "train" and problem.question in seen):
            continue
        seen.add(problem.question)
        problems.append(replace(problem, id=f"words-{split}-{seed}-{len(problems)}"))
    return problems


def split_of(question: str) -> str:
    """The split that a question belongs to: 10 % test, 10 % validation, 80 % train."""
    bucket = zlib.crc32(question.encode()) % HASH_BUCKETS
    return {0: "test", 1: "validation"}.get(bucket, "train")


def draw(rng: random.Random) -> Problem:
    """One problem of any split.  Every intermediate result is a positive integer of at most 93."""
    name, other = rng.sample(NAMES, 2)
    thing = rng.choice(THINGS)
    operation = rng.choice("+-*")
    if operation == "*":
        a, b = rng.randint(2, 9), rng.randint(2, 9)
    else:
        a = rng.randint(2, LARGEST_TERM)
        b = rng.randint(1, a - 1) if operation == "-" else rng.randint(2, LARGEST_TERM)
    result = calculate(a, operation, b)
    text = rng.choice(FIRST_SENTENCES[operation])
    solution = [f"{a}{operation}{b}={result}"]
    c = 0
    if rng.random() < TWO_STEP_SHARE:
        operation = rng.choice("+-") if result > 1 else "+"
        c = rng.randint(1, min(result - 1, LARGEST_TERM)) if operation == "-" else rng.randint(2, LARGEST_TERM)
        text += rng.choice(SECOND_SENTENCES[operation])
        solution.append(f"{result}{operation}{c}={calculate(result, operation, c)}")
        result = calculate(result, operation, c)
    question = (text + LAST_SENTENCE).format(n=name, m=other, t=thing, a=a, b=b, c=c)
    return Problem("", question, " ".join(solution), str(result), "words", steps=len(solution))


def calculate(a: int, operation: str, b: int) -> int:
    """a + b, a - b or a * b."""
    return {"+": a + b, "-": a - b, "*": a * b}[operation]
