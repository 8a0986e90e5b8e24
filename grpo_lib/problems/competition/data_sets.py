"""Competition mathematics: DAPO-Math-17k, MATH, AIME and MATH-500, from local files or from the Hugging Face hub.

DAPO-Math-17k (Yu et al., arXiv:2503.14476) is published as 1,791,700 rows: each problem about 100 times, inside of a
fixed text that says how to answer.  That text is taken off, and repeated problems are removed and counted.

    {"prompt": [{"role": "user", "content": "Solve the following ...\\n\\nProblem\\n\\nRemember to ..."}],
     "reward_model": {"ground_truth": "34"}, "extra_info": {"index": "9a9b6eb4-..."}}
"""

import re
import reprlib
from dataclasses import dataclass
from functools import lru_cache

from grpo_lib import prompts
from grpo_lib.common.errors import CourseError
from grpo_lib.prompts import DAPO_PREFIX, DAPO_SUFFIX

from ..types import Problem
from .rows import File, Row, find_files, read_rows

KINDS = {"dapo-math": "integer", "math": "latex", "aime": "integer", "math500": "latex"}
TRAINED = ("dapo-math", "math")  # the others are test problems alone
_INTEGER = re.compile(r"([+-]?)0*([0-9]+)")


@dataclass(frozen=True)
class Counts:
    """What became of the rows: rows = kept + duplicates + conflicts."""

    rows: int
    duplicates: int  # rows that repeat a problem
    conflicts: int  # problems left out, because two rows give them two golds
    kept: int  # problems

    def __str__(self) -> str:
        return (
            f"{self.rows:,} rows, {self.kept:,} problems: {self.duplicates:,} duplicates removed, "
            f"{self.conflicts:,} problems with two golds skipped"
        )


def load(
    source: str, path: str | None = None, conflicts: str = "refuse", key: str = "problems.path"
) -> tuple[list[Problem], Counts]:
    """All problems of a source, each once and in the order of the rows, and what became of the rows.

    Reads a file once in a process, until its size or its time changes.

    Args:
      source: a name in KINDS.
      path: a .parquet or .jsonl file, or a folder with some; None: the data set that rows.HUB names.
      conflicts: "refuse" is an error where a problem has two golds; "skip" leaves such problems out.
      key: the recipe key of `path`, named in errors.

    Raises:
      CourseError: no such file, other columns, a row that is not right, or no network.
    """
    problems, counts = _read(source, None if path is None else find_files(path, key), conflicts, key)
    return list(problems), counts


def published_prompt(question: str) -> str:
    """The problem with the text around it that DAPO-Math-17k publishes (and was trained with)."""
    return prompts.user_prompt("dapo", question)


@lru_cache(maxsize=4)
def _read(source: str, files: tuple[File, ...] | None, conflicts: str, key: str) -> tuple[tuple[Problem, ...], Counts]:
    """Each problem once, and the counts."""
    found: dict[str, tuple[Problem, str]] = {}  # question -> (problem, where)
    owners: dict[str, str] = {}  # id -> where
    conflicting: set[str] = set()
    total = 0
    for row in read_rows(source, files, key):
        total += row.count
        question, answer = _question(row), _gold(source, row)
        if question not in found:
            problem = _problem(source, row, question, answer)
            if (other := owners.setdefault(problem.id, row.where)) != row.where:
                raise _bad(row, row.layout.id, f"{problem.id!r} is also the id of another problem, in {other}")
            found[question] = problem, row.where
            continue
        first, where = found[question]
        if first.answer != answer:
            if conflicts == "refuse":
                raise _bad(
                    row,
                    row.layout.gold,
                    f"the gold is {answer[:80]!r}, but {where} gives the same problem {first.answer[:80]!r}",
                    "set problems.conflicts=skip to leave such problems out, or repair the row",
                )
            conflicting.add(question)
    problems = tuple(problem for problem, _ in found.values() if problem.question not in conflicting)
    return problems, Counts(total, total - len(found), len(conflicting), len(problems))


def _problem(source: str, row: Row, question: str, answer: str) -> Problem:
    if isinstance(row.id, bool) or not isinstance(row.id, (str, int)) or row.id == "":
        raise _bad(row, row.layout.id, f"{reprlib.repr(row.id)} is not an id, which is a text or an integer")
    return Problem(
        id=f"{source}-{row.id}",
        question=question,
        solution=row.solution if isinstance(row.solution, str) else "",
        answer=answer,
        source=source,
        kind=KINDS[source],
    )


def _question(row: Row) -> str:
    """The bare problem, of a text or of a chat.  Only whole texts are taken off: strip() would take single letters."""
    text = row.problem
    if chat := isinstance(text, list):
        message = text[0] if len(text) == 1 else None
        if not isinstance(message, dict) or message.get("role") != "user" or not message.get("content"):
            raise _bad(row, row.layout.problem, "the chat must be one user message")
        text = message["content"]
    if not isinstance(text, str) or not text.strip():
        raise _bad(row, row.layout.problem, f"{reprlib.repr(text)} is not a problem, which is a text")
    question = text.removeprefix(DAPO_PREFIX).removesuffix(DAPO_SUFFIX)
    if len(text) - len(question) != len(DAPO_PREFIX) + len(DAPO_SUFFIX):
        if chat:
            wrapper = f"{DAPO_PREFIX[:36]!r}... and end with {DAPO_SUFFIX.strip()!r}"
            raise _bad(row, row.layout.problem, f"the prompt must begin with {wrapper}")
        question = text
    if not question.strip():
        raise _bad(row, row.layout.problem, "the problem is empty")
    return question


def _gold(source: str, row: Row) -> str:
    """The gold in one spelling: "033" -> "33"; LaTeX stays as it is."""
    gold = row.gold
    column = row.layout.gold
    if KINDS[source] == "latex":
        if not isinstance(gold, str) or not gold.strip():
            raise _bad(row, column, f"{reprlib.repr(gold)} is not a gold answer, which is a text")
        return gold.strip()
    text = str(gold).strip() if isinstance(gold, (str, int)) else ""
    parts = _INTEGER.fullmatch(text)
    if isinstance(gold, bool) or not parts:
        raise _bad(row, column, f"{reprlib.repr(gold)} is a gold that is not an integer")
    sign, digits = parts.groups()
    if source == "aime" and ((sign == "-" and digits != "0") or len(digits) > 3):
        raise _bad(row, column, f"{reprlib.repr(gold)} is not an integer from 0 to 999, as AIME has them")
    return "-" + digits if sign == "-" and digits != "0" else digits


def _bad(row: Row, column: str, what: str, remedy: str = "repair the row") -> CourseError:
    return CourseError(f"{row.where}, column {column}: {what}; {remedy}")
