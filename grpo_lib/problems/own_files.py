"""Problems from files of the user's: CSV, JSON lines or Parquet, with columns of any names.

    problems:
      source: file
      path: problems.csv                               # or a folder with train.csv and test.csv
      columns: {question: prompt, answer: target}
      kind: tagged                                     # how the answers are graded

Each question comes once.  A byte order mark, Windows line ends and rows that repeat a problem are taken and counted;
anything else that is odd is a CourseError of one line with file, line and remedy.
"""

import csv
import io
import itertools
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from grpo_lib import answers
from grpo_lib.answers.final_answer import canonical_answer
from grpo_lib.common.errors import CourseError, first_line
from grpo_lib.common.files import has_half_a_character, parse_json_lines

from .gsm8k import ANSWER_MARK
from .reading import Found, Place, each_once, read_text, rows_as_python
from .types import Problem, ProblemSettings

SUFFIXES = (".csv", ".jsonl", ".parquet")
# Of columns in an error: how many, and characters of each.
MOST_NAMES, LONGEST_NAME = 20, 80
DELIMITERS = ",;\t"
SET_COLUMNS = "set problems.columns={question: COLUMN, answer: COLUMN}"
# What a gold of each kind is.
GOLDS = {"tagged": "one number", "integer": "one integer", "latex": "a LaTeX answer"}


class Columns(Protocol):
    """A recipe's `problems.columns`; "a.b" is field b of column a.  Hashable."""

    question: str
    answer: str
    solution: str | None


@dataclass(frozen=True)
class _Row:
    where: str  # "FILE, line 3"
    values: dict[str, Any]


def find_file(path: str, name: str, key: str) -> Path:
    """The file itself, or that of a folder with this name, such as "train", and one of SUFFIXES.

    Args:
      key: the recipe key of `path`, for the error.

    Raises CourseError where there is none, or are several.
    """
    place = Path(path).expanduser()
    wanted = f"give a {', '.join(SUFFIXES)} file, or a folder with {name}.csv or the like"
    if not place.is_dir():
        if not place.is_file() or place.suffix.lower() not in SUFFIXES:
            raise CourseError(f"{key}={path} is no such file; {wanted}")
        return place
    files = [file for file in sorted(place.glob(f"{name}.*")) if file.suffix.lower() in SUFFIXES]
    if len(files) != 1:
        found = f"has {' and '.join(file.name for file in files)}" if files else f"has no file {name}"
        raise CourseError(f"{key}={path} {found}; {wanted}")
    return files[0]


def train_and_test(problems: ProblemSettings) -> tuple[Path, Path | None]:
    """The files of the train and the test problems; None where these are of another source, or held out of the first.

    Raises CourseError where there is no such file.
    """
    path = problems.path or ""
    train = find_file(path, "train", "problems.path")
    if problems.test_source:
        return train, None
    if problems.test_path:
        return train, find_file(problems.test_path, "test", "problems.test_path")
    return train, find_file(path, "test", "problems.path") if Path(path).expanduser().is_dir() else None


def read(file: Path, columns: Columns, kind: str, conflicts: str, prefix: str) -> Found:
    """The problems of a file.  It is read once in a process, until its size or its time changes.

    Args:
      kind: how the answers are graded: a name in GOLDS.
      conflicts: "refuse" is an error where a question has two answers; "skip" leaves such questions out.
      prefix: begins the ids.

    Raises CourseError for a file or a row that cannot be read.
    """
    stat = file.stat()
    return _read(file, stat.st_size, stat.st_mtime_ns, columns, kind, conflicts, prefix)


@lru_cache(maxsize=8)
def _read(file: Path, size: int, changed: int, columns: Columns, kind: str, conflicts: str, prefix: str) -> Found:
    rows, odd = _rows(file)
    _require_columns(file, rows, columns)
    problems = [_problem(row, columns, kind, f"{prefix}-{number:05d}") for number, row in enumerate(rows)]
    places = [Place(row.where, f"{row.where}, column {columns.answer}") for row in rows]
    return each_once(file, zip(problems, places, strict=True), conflicts, odd)


def _rows(file: Path) -> tuple[list[_Row], list[str]]:
    """The rows of a file, and what about it was odd."""
    if file.suffix.lower() == ".parquet":
        return list(_parquet_rows(file)), []
    try:
        text, odd = read_text(file)
    except OSError as error:
        raise CourseError(f"{file} cannot be read ({error.strerror}); give another file") from None
    read_rows = _csv_rows if file.suffix.lower() == ".csv" else _json_rows
    return list(read_rows(file, text)), odd


def _json_rows(file: Path, text: str) -> Iterator[_Row]:
    for where, values in parse_json_lines(file, text):
        if not isinstance(values, dict):
            raise CourseError(f"{where} is a JSON {type(values).__name__}, and not an object; repair the line")
        yield _Row(where, values)


def _csv_rows(file: Path, text: str) -> Iterator[_Row]:
    header = text.partition("\n")[0]
    delimiter = max(DELIMITERS, key=header.count)  # the first of them where there is one column
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for values in reader:
            breaks = sum(str(value).count("\n") for value in values.values())
            where = f"{file}, line {reader.line_num - breaks}"  # in which the row begins
            if None in values:  # its key for more fields than the header has
                raise CourseError(f"{where} has more fields than the first line; put quotes around texts with commas")
            yield _Row(where, {name: _lines(value) for name, value in values.items()})
    except csv.Error as error:
        raise CourseError(f"{file}, line {reader.line_num} is not CSV ({error}); repair the line") from None


def _lines(text: str | None) -> str | None:
    """Line breaks inside of a field as all other texts have them."""
    return text and text.replace("\r\n", "\n")


def _parquet_rows(file: Path) -> Iterator[_Row]:
    import pyarrow.parquet  # it comes with the extra train

    try:
        table = pyarrow.parquet.read_table(file)
    except Exception as error:  # whatever its parts raise: disk, file format, nesting
        raise CourseError(f"{file} is not Parquet ({first_line(error)}); save it again") from None
    for number, values in enumerate(rows_as_python(str(file), table)):
        yield _Row(f"{file}, row {number}", values)


def _require_columns(file: Path, rows: Iterable[_Row], columns: Columns) -> None:
    """Raise CourseError where no row has one of the columns, or there is no row."""
    names: Counter[str] = Counter()
    for row in rows:
        names.update(map(str, row.values))
    if not names:
        raise CourseError(f"{file} is empty; it needs a row for each problem")
    for column in filter(None, (columns.question, columns.answer, columns.solution)):
        if column not in names and column.partition(".")[0] not in names:
            raise CourseError(f"{file} has no column {column}, but {_listed(names)}; {SET_COLUMNS}")


def _listed(names: Iterable[str]) -> str:
    shown = [name[:LONGEST_NAME] for name in itertools.islice(names, MOST_NAMES)]
    return ", ".join(shown)


def _problem(row: _Row, columns: Columns, kind: str, name: str) -> Problem:
    question, answer = (_text(row, column) for column in (columns.question, columns.answer))
    solution = _text(row, columns.solution) if columns.solution else ""
    worked, mark, gold = answer.rpartition(ANSWER_MARK)
    if mark and kind != "latex":  # GSM8K's way: a worked solution, and the number on its last line
        solution, answer = solution or worked.strip(), gold
    canonical = _gold(answer, kind)
    if canonical is None:
        others = " or ".join(other for other in GOLDS if other != kind)
        raise CourseError(
            f"{row.where}, column {columns.answer}: {reprlib.repr(answer)} is not {GOLDS[kind]}, as problems.kind="
            f"{kind} has them; repair the row, or set problems.kind to {others}"
        )
    return Problem(name, question, solution, canonical, "file", kind=kind)


def _text(row: _Row, column: str) -> str:
    """A value as text.  Raises CourseError where there is none."""
    value: Any = row.values
    for part in [column] if column in row.values else column.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise CourseError(f"{row.where}, column {column}: {reprlib.repr(value)} is not a text; repair the row")
    if has_half_a_character(value):
        raise CourseError(f"{row.where}, column {column}: half a character (\\ud800 to \\udfff); repair the row")
    return value.strip()


def _gold(answer: str, kind: str) -> str | None:
    """A gold in one spelling; None for one that no completion could agree with."""
    if kind == "latex":
        return answer if answers.agrees(answer, answer, kind) else None
    number = canonical_answer(answer)
    if kind == "integer" and number and not number.removeprefix("-").isdigit():
        return None
    return number
