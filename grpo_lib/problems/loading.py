"""From the `problems` of a recipe, a section or several tasks, to a list of problems."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from grpo_lib.common.errors import CourseError

from . import code, gsm8k, words
from .types import SPLITS, Problem, ProblemSettings, TaskSettings

# How many word problems where no limit is given: they never end.
WORD_PROBLEMS = {"train": 20_000, "validation": 500, "test": 1_000}
CODE_PROBLEMS = {"train": 20_000, "validation": 20, "test": 20}
ALWAYS_LOADED = ("words", "code", "gsm8k")  # the other sources are competition's
HELD_OUT = 500  # validation problems of GSM8K, DAPO-Math-17k and MATH, taken out of their train split


def load_problems(problems: ProblemSettings | list[TaskSettings], split: str, n: int | None = None) -> list[Problem]:
    """The problems of a split: "train", "validation" or "test".

    `n` is an upper limit that replaces the recipe's own (`problems.train` and so on); null there means all, or
    WORD_PROBLEMS and CODE_PROBLEMS where they never end.
    GSM8K, DAPO-Math-17k and MATH have no validation split: it is held out of train, and test stays untouched.
    The last two have no test split either (`problems.test_source`); AIME and MATH-500 have nothing else. A problem of
    it that is also, letter for letter, a test problem is in neither train nor validation.
    Of several tasks the problems come one task after the other, `n` of each; ids begin with the task's name.

    Raises:
      CourseError: unknown split; a split that the source does not have; no data (see gsm8k, competition).
    """
    if split not in SPLITS:
        raise CourseError(f"problems: split {split!r} does not exist; use one of {', '.join(SPLITS)}")
    if isinstance(problems, list):
        return [problem for task in problems for problem in _load_task(task, split, n)]
    limit = getattr(problems, split) if n is None else n
    if problems.source == "words":
        return words.generate(split, limit or WORD_PROBLEMS[split], problems.seed, problems.difficulty)
    if problems.source == "code":
        return code.generate(split, limit or CODE_PROBLEMS[split], problems.seed)
    if problems.source == "gsm8k":
        return _load_gsm8k(problems.path, split)[:limit]
    return _load_competition(problems, split)[:limit]


def describe_filtering(problems: ProblemSettings | list[TaskSettings]) -> str | None:
    """How many rows of the training source repeat a problem, or are left out; None where a source has no such rows."""
    if isinstance(problems, list):
        return "; ".join(filter(None, map(describe_filtering, problems))) or None
    if problems.source in ALWAYS_LOADED:
        return None

    from . import competition

    _, counts = competition.load(problems.source, problems.path, problems.conflicts)
    also_test = counts.kept - len(_without_test_problems(problems))
    left_out = f"; {also_test:,} left out of training, because they are test problems" if also_test else ""
    return f"{problems.source}: {counts}{left_out}"


def take_different(problems: Sequence[Problem], count: int) -> tuple[list[Problem], list[Problem]]:
    """(the first `count` problems with different questions, all problems with other questions)."""
    first = {problem.question: problem for problem in reversed(problems)}
    questions = list(dict.fromkeys(problem.question for problem in problems))[:count]
    taken = set(questions)
    return [first[question] for question in questions], [each for each in problems if each.question not in taken]


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


def _load_task(task: TaskSettings, split: str, n: int | None) -> list[Problem]:
    try:
        problems = load_problems(task, split, n)
    except CourseError as error:
        raise CourseError(f"task {task.name}: {error}") from None
    own = {"task": task.name, "prompts": task.prompts}
    return [replace(problem, id=f"{task.name}/{problem.id}", **own) for problem in problems]


def _load_gsm8k(path: str | None, split: str) -> list[Problem]:
    stored = "test" if split == "test" else "train"
    problems = gsm8k.from_folder(path, stored) if path is not None else gsm8k.from_tfds(stored)
    return problems if split == "test" else _take_split(problems, split, path)


def _load_competition(problems: ProblemSettings, split: str) -> list[Problem]:
    from . import competition  # here and below: most recipes never need it

    source = problems.source
    if source in competition.TRAINED:
        return (
            _load_test_problems(problems)
            if split == "test"
            else _take_split(_without_test_problems(problems), split, problems.path)
        )
    if split != "test":
        raise CourseError(
            f"problems.source={source} has only a test split; train with another source, like dapo-math, "
            f"and set problems.test_source={source}"
        )
    return competition.load(source, problems.path, problems.conflicts)[0]


def _load_test_problems(problems: ProblemSettings) -> list[Problem]:
    """The test problems of a source that has none, from `test_source`."""
    if problems.test_source is None:
        raise CourseError(
            f"problems.source={problems.source} has no test split; set problems.test_source=aime, math500 or gsm8k"
        )
    if problems.test_source == "gsm8k":
        try:
            return _load_gsm8k(problems.test_path, "test")
        except CourseError as error:
            raise CourseError(str(error).replace("problems.path", "problems.test_path")) from None

    from . import competition

    return competition.load(problems.test_source, problems.test_path, problems.conflicts, "problems.test_path")[0]


def _without_test_problems(problems: ProblemSettings) -> list[Problem]:
    """The problems to train on, without those that are judged on; spaces around a text make no difference."""
    from . import competition

    found, _ = competition.load(problems.source, problems.path, problems.conflicts)
    if problems.source not in competition.TRAINED or problems.test_source is None:
        return found
    judged = {problem.question.strip() for problem in _load_test_problems(problems)}
    return [problem for problem in found if problem.question.strip() not in judged]


def _take_split(problems: Sequence[Problem], split: str, path: str | None) -> list[Problem]:
    """The train or the validation problems of a train split."""
    train, validation = hold_out(problems)
    if split == "validation" and not validation:
        raise CourseError(f"problems.path={path}: tenth of {len(problems)} problems is none; use at least 10")
    return train if split == "train" else validation
