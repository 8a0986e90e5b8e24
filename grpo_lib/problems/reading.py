"""What files of a user's problems have in common: how their text is read, and that each question comes once."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lib.common.errors import CourseError

from .types import Problem

BOM = b"\xef\xbb\xbf"  # the byte order mark of UTF-8


@dataclass(frozen=True)
class Found:
    """What a file holds."""

    problems: tuple[Problem, ...]  # each question once, in the order of the rows
    described: str  # how many rows repeat one or are left out, and what else was odd
    is_plain: bool  # nothing was odd, and each row is a problem


@dataclass(frozen=True)
class Place:
    """Where a problem stands, for an error."""

    row: str  # "FILE, line 3"
    answer: str  # the same with the column of its answer, where there are columns of any names


def read_text(file: Path) -> tuple[str, list[str]]:
    """The text of a file in UTF-8, and what about it was odd.

    Raises CourseError, which names the file, where it is in another encoding; OSError where it cannot be read.
    """
    content = file.read_bytes()
    odd = ["byte order mark taken off"] if content.startswith(BOM) else []
    odd += ["Windows line ends read"] if b"\r\n" in content else []
    try:
        return content.decode("utf-8-sig"), odd
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise CourseError(f"{file}, line {line} is not UTF-8; save the file as UTF-8") from None


def question_key(question: str) -> str:
    """Two questions are the same one if this is: white space makes no difference."""
    return " ".join(question.split())


def rows_as_python(name: str, table: Any, start: int = 0) -> list[dict[str, Any]]:
    """The rows of an Arrow table.

    Args:
      name: of its file, and `start` the number of its first row there, for the error.

    Raises CourseError, which names the row, where a text is not UTF-8: Arrow takes any bytes as one.
    """
    try:
        return table.to_pylist()
    except UnicodeDecodeError:
        broken = next(number for number in range(table.num_rows) if not _is_readable(table.slice(number, 1)))
        raise CourseError(f"{name}, row {start + broken} has a text that is not UTF-8; repair the row") from None


def _is_readable(table: Any) -> bool:
    try:
        table.to_pylist()
    except UnicodeDecodeError:
        return False
    return True


def each_once(file: Path, rows: Iterable[tuple[Problem, Place]], conflicts: str, odd: list[str]) -> Found:
    """The problems of a file's rows, each question once.

    Args:
      conflicts: "refuse" is an error where a question has two answers; "skip" leaves such questions out.
      odd: what else is to be said about the file.

    Raises CourseError.
    """
    first: dict[str, tuple[Problem, Place]] = {}  # question -> its first problem, and where that stands
    conflicting: set[str] = set()
    total = 0
    for problem, place in rows:
        total += 1
        key = question_key(problem.question)
        known, before = first.setdefault(key, (problem, place))
        if known.answer == problem.answer:
            continue
        if conflicts == "refuse":
            raise CourseError(
                f"{place.answer}: the answer is {problem.answer[:80]!r}, but {before.row} gives the same question "
                f"{known.answer[:80]!r}; set problems.conflicts=skip to leave such problems out, or repair the row"
            )
        conflicting.add(key)
    kept = tuple(problem for key, (problem, _) in first.items() if key not in conflicting)
    counts = f"{total:,} rows, {len(kept):,} problems: {total - len(first):,} duplicates removed"
    left_out = f"{len(conflicting):,} problems with two answers skipped"
    return Found(kept, f"{file}: {', '.join([counts, left_out, *odd])}", len(kept) == total and not odd)
