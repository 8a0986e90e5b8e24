"""From the `problems` of a recipe, a section or several tasks, to a list of problems."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from grpo_lib.common.errors import CourseError

from . import code, gsm8k, own_files, words
from .reading import question_key
from .types import SPLITS, Problem, ProblemSettings, TaskSettings

# How many word problems where no limit is given: they never end.
WORD_PROBLEMS = {"train": 20_000, "validation": 500, "test": 1_000}
CODE_PROBLEMS = {"train": 20_000, "validation": 20, "test": 20}
HELD_OUT = 500  # validation problems of GSM8K, DAPO-Math-17k, MATH and files, taken out of their train split


def load_problems(problems: ProblemSettings | list[TaskSettings], split: str, n: int | None = None) -> list[Problem]:
    """The problems of a split: "train", "validation" or "test".

    `n` is an upper limit that replaces the recipe's own (`problems.train` and so on); null there means all, or
    WORD_PROBLEMS and CODE_PROBLEMS where they never end.
    GSM8K, DAPO-Math-17k and MATH have no validation split: it is held out of train, and test stays untouched.
    The last two have no test split either (`problems.test_source`); AIME and MATH-500 have nothing else. Files of your
    own have one, or it is held out, too.  A problem that is also, letter for letter, a test problem is in neither train
    nor validation.
    Of several tasks the problems come one task after the other, `n` of each; ids begin with the task's name.

    Raises:
      CourseError: unknown split; a split that the source does not have; no data (see gsm8k, competition, own_files).
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
        return _load_gsm8k(problems.path, split, problems.conflicts)[:limit]
    if problems.source == "file":
        return _load_files(problems, split)[:limit]
    return _load_competition(problems, split)[:limit]


def describe_filtering(problems: ProblemSettings | list[TaskSettings]) -> str | None:
    """How many rows of the training source repeat a problem, or are left out; None where a source has no such rows."""
    if isinstance(problems, list):
        return "; ".join(filter(None, map(describe_filtering, problems))) or None
    if problems.source in ("words", "code"):
        return None
    if problems.source == "gsm8k":
        return _describe_gsm8k(problems.path, problems.conflicts) if problems.path else None
    if problems.source == "file":
        train, test, described = _files(problems)
        return "; ".join(filter(None, [described, _left_out(len(train) - len(_unjudged(train, test)))]))

    from . import competition

    _, counts = competition.load(problems.source, problems.path, problems.conflicts)
    also_test = counts.kept - len(_without_test_problems(problems))
    return "; ".join(filter(None, [f"{problems.source}: {counts}", _left_out(also_test)]))


def take_different(problems: Sequence[Problem], count: int) -> tuple[list[Problem], list[Problem]]:
    """(the first `count` problems with different questions, all problems with other questions)."""
    first = {problem.question: problem for problem in reversed(problems)}
    questions = list(dict.fromkeys(problem.question for problem in problems))[:count]
    taken = set(questions)
    return [first[question] for question in questions], [each for each in problems if each.question not in taken]


def hold_out(problems: Sequence[Problem], split: str = "validation") -> tuple[list[Problem], list[Problem]]:
    """(train, validation): the last 500 questions of a shuffle, but at most a tenth of all, are held out.

    The shuffle sorts by a hash of the question: it is the same on every machine and for any order of the
    input.  Both parts keep the order of the input, and a question that occurs twice is never in both.

    Args:
      split: what they are held out for; for another one it is another shuffle.
    """
    questions = {problem.question for problem in problems}
    shuffled = sorted(questions, key=lambda text: hashlib.sha256(f"{split} {text}".encode()).digest())
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


def _load_gsm8k(path: str | None, split: str, conflicts: str) -> list[Problem]:
    if path is None:
        stored = gsm8k.from_tfds("test" if split == "test" else "train")
        return stored if split == "test" else _take_split(stored, split, path)
    if split == "test":
        return list(gsm8k.found_in_folder(path, "test", conflicts).problems)
    problems = gsm8k.found_in_folder(path, "train", conflicts).problems
    if gsm8k.has(path, "test"):  # own data in its form; the original has no problem in both
        problems = _unjudged(problems, gsm8k.found_in_folder(path, "test", conflicts).problems)
    return _take_split(problems, split, path)


def _describe_gsm8k(path: str, conflicts: str) -> str | None:
    """What own data in GSM8K's form has that the original has not."""
    train, test = (gsm8k.found_in_folder(path, split, conflicts) for split in ("train", "test"))
    also_test = _left_out(len(train.problems) - len(_unjudged(train.problems, test.problems)))
    if train.is_plain and test.is_plain and not also_test:
        return None
    return "; ".join(filter(None, [train.described, test.described, also_test]))


def _unjudged(train: Sequence[Problem], test: Sequence[Problem]) -> list[Problem]:
    """The problems to train on, without those that are judged on; white space makes no difference."""
    judged = {question_key(problem.question) for problem in test}
    return [problem for problem in train if question_key(problem.question) not in judged]


def _left_out(count: int) -> str | None:
    """Words about problems that `_unjudged` leaves out; None where there are none."""
    return f"{count:,} left out of training, because they are test problems" if count else None


def _load_files(problems: ProblemSettings, split: str) -> list[Problem]:
    train, test, _ = _files(problems)
    return test if split == "test" else _take_split(_unjudged(train, test), split, problems.path)


def _files(problems: ProblemSettings) -> tuple[list[Problem], list[Problem], str]:
    """(train problems, test problems, what was found) of files of the user's; the first may hold some of the second.

    The test problems are those of `test_source` or `test_path`; else, in a folder, of its file of that name, and of a
    single file those that are held out.
    """
    file, test_file = own_files.train_and_test(problems)
    settings = problems.columns, problems.kind, problems.conflicts
    train = own_files.read(file, *settings, "file-train")
    if problems.test_source:
        return list(train.problems), _load_test_problems(problems), train.described
    if test_file:
        test = own_files.read(test_file, *settings, "file-test")
        return list(train.problems), list(test.problems), f"{train.described}; {test.described}"
    rest, held_out = hold_out(train.problems, "test")
    if not held_out:
        count = len(train.problems)
        raise CourseError(f"problems.path={file}: tenth of {count} problems is none; use at least 10, or test_path")
    return rest, held_out, f"{train.described}; {len(held_out):,} of them held out as test problems"


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
            return _load_gsm8k(problems.test_path, "test", problems.conflicts)
        except CourseError as error:
            raise CourseError(str(error).replace("problems.path", "problems.test_path")) from None

    from . import competition

    return competition.load(problems.test_source, problems.test_path, problems.conflicts, "problems.test_path")[0]


def _without_test_problems(problems: ProblemSettings) -> list[Problem]:
    """The problems of a competition source to train on."""
    from . import competition

    found, _ = competition.load(problems.source, problems.path, problems.conflicts)
    if problems.source not in competition.TRAINED or problems.test_source is None:
        return found
    return _unjudged(found, _load_test_problems(problems))


def _take_split(problems: Sequence[Problem], split: str, path: str | None) -> list[Problem]:
    """The train or the validation problems of a train split."""
    train, validation = hold_out(problems)
    if split == "validation" and not validation:
        raise CourseError(f"problems.path={path}: tenth of {len(problems)} problems is none; use at least 10")
    return train if split == "train" else validation
