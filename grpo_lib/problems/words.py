"""Word problems made from sentences and small numbers, with worked solutions.

    >>> generate("train", 1, seed=0)[0].question
    'Leo fills 7 boxes of 3 cards. Then Leo sells 4. How many cards does Leo have now?'

They stand in for GSM8K where the model is tiny: the story must be turned into one or two calculations, and the task
has a ceiling of 100 %.  A question belongs to exactly one split, decided by a hash of its text alone, so that no seed
and no number of problems can move a test problem into training.  Questions are told apart by their text: the same
calculation can occur in two splits with other people and other things.  But a fifth of the calculations that go
beyond what is learnt by heart is held out (`is_held_out`): no training problem needs them, so a right answer
cannot come from memory.

A few problems hold a distractor, a sentence about somebody else that must be ignored.
"""

import random
import re
import zlib
from dataclasses import dataclass, replace

from grpo_lib.common.errors import CourseError

from .types import SPLITS, Problem

NAMES = ["Ana", "Ben", "Eva", "Leo", "Max", "Mia", "Sam", "Tom", "Zoe", "Amy"]
THINGS = ["apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps"]
TWO_STEP_SHARE = 0.55  # of what is drawn; repeated one-step questions are dropped from validation and test
DISTRACTOR_SHARE = 0.03  # of the problems of one step
BY_HEART = 12  # sums and differences that start from larger numbers have to be worked out, digit by digit
MOST_DRAWS = 5_000  # without a new problem: then there is hardly another one
HASH_BUCKETS = 10  # bucket 0 is the test split, bucket 1 the validation split, the rest is train


@dataclass(frozen=True)
class Difficulty:
    """The numbers of the problems, each as (smallest, largest)."""

    terms: tuple[int, int]  # of a sum, and the first number of a difference
    factors: tuple[tuple[int, int], tuple[int, int]]


DIFFICULTIES = {
    "standard": Difficulty(terms=(2, 12), factors=((2, 9), (2, 9))),
    "hard": Difficulty(terms=(13, 90), factors=((11, 19), (2, 5))),
}

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
DISTRACTOR = " Later {m} finds {c} more."
LAST_SENTENCE = " How many {t} does {n} have now?"

_CALCULATION = re.compile(r"\d+[-+*]\d+")
_DISTRACTOR = re.compile(r" Later \w+ finds ")  # no other sentence has both words


def generate(split: str, n: int, seed: int = 0, difficulty: str = "standard") -> list[Problem]:
    """The first `n` problems of a split, in the order that `seed` gives.

    Validation and test hold no question twice; train draws with repetition, so that it never ends, and holds no
    problem that needs a held-out calculation.

    Raises:
      CourseError: unknown split, or fewer than `n` different problems in it.
    """
    if split not in SPLITS:
        raise CourseError(f"problems: split {split!r} does not exist; use one of {', '.join(SPLITS)}")
    name = "words" if difficulty == "standard" else f"words-{difficulty}"
    # Text seeds go through SHA-512, so each split draws its own sequence, the same on every machine.
    rng = random.Random(f"{name} {split} {seed}")
    problems: list[Problem] = []
    seen: set[str] = set()
    draws = 0  # since the last problem that was taken
    while len(problems) < n:
        draws += 1
        if draws > MOST_DRAWS:
            raise CourseError(
                f"problems.{split}={n}: word problems ({difficulty}) have about {len(problems)} different ones; take "
                "fewer"
            )
        problem = draw(rng, DIFFICULTIES[difficulty])
        unfit = needs_held_out(problem.solution) if split == "train" else problem.question in seen
        if split_of(problem.question) == split and not unfit:
            seen.add(problem.question)
            draws = 0
            problems.append(replace(problem, id=f"{name}-{split}-{seed}-{len(problems)}"))
    return problems


def split_of(question: str) -> str:
    """The split that a question belongs to: 10 % test, 10 % validation, 80 % train."""
    bucket = zlib.crc32(question.encode()) % HASH_BUCKETS
    return {0: "test", 1: "validation"}.get(bucket, "train")


def is_held_out(calculation: str) -> bool:
    """Whether a calculation, as in "17-4", belongs to the fifth that no training problem needs."""
    first, operation, _ = re.split(r"([-+*])", calculation)
    return operation != "*" and int(first) > BY_HEART and zlib.crc32(calculation.encode()) % 5 == 0


def needs_held_out(solution: str) -> bool:
    """Whether a worked solution has a calculation that nobody trains on."""
    return any(is_held_out(calculation) for calculation in _CALCULATION.findall(solution))


def has_distractor(question: str) -> bool:
    """Whether a question has a sentence about somebody else, which must be ignored."""
    return _DISTRACTOR.search(question) is not None


def draw(rng: random.Random, difficulty: Difficulty = DIFFICULTIES["standard"]) -> Problem:
    """One problem of any split.  Every intermediate result is a positive integer."""
    name, other = rng.sample(NAMES, 2)
    thing = rng.choice(THINGS)
    operation = rng.choice("+-*")
    low, high = difficulty.terms
    if operation == "*":
        a, b = (rng.randint(*factor) for factor in difficulty.factors)
    else:
        a = rng.randint(low, high)
        b = rng.randint(1, a - 1) if operation == "-" else rng.randint(low, high)
    result = calculate(a, operation, b)
    text = rng.choice(FIRST_SENTENCES[operation])
    solution = [f"{a}{operation}{b}={result}"]
    c = 0
    if rng.random() < TWO_STEP_SHARE:
        operation = rng.choice("+-") if result > 1 else "+"
        c = rng.randint(1, min(result - 1, high)) if operation == "-" else rng.randint(2, high)
        text += rng.choice(SECOND_SENTENCES[operation])
        solution.append(f"{result}{operation}{c}={calculate(result, operation, c)}")
        result = calculate(result, operation, c)
    elif rng.random() < DISTRACTOR_SHARE:
        c = rng.randint(2, high)
        text += DISTRACTOR
    question = (text + LAST_SENTENCE).format(n=name, m=other, t=thing, a=a, b=b, c=c)
    return Problem("", question, " ".join(solution), str(result), "words", steps=len(solution))


def calculate(a: int, operation: str, b: int) -> int:
    """a + b, a - b or a * b."""
    return {"+": a + b, "-": a - b, "*": a * b}[operation]
