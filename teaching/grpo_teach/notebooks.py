"""Exercises in notebooks of nbgrader's format: one function to a cell, one cell of tests below it.

The cells of exercise 3.2 have the ids ex-3-2-text, ex-3-2 (the function) and ex-3-2-test, which are nbgrader's
`grade_id` as well.  The teacher's notebook has the solution and the hidden tests between nbgrader's markers.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

HIDDEN = "### BEGIN HIDDEN TESTS"
LARGEST = 20 * 2**20  # bytes of a notebook


@dataclass(frozen=True)
class Exercise:
    """What a notebook holds of one exercise; `code` is the cell with the function, of a student or the teacher."""

    path: Path
    number: str  # such as 3.2
    title: str
    points: float
    code: str
    test: str

    @property
    def language(self) -> str:
        """ "zh" where its text is Chinese, else "en"."""
        return "zh" if re.search("[\u4e00-\u9fff]", self.title) else "en"

    @property
    def functions(self) -> list[str]:
        """The names of the functions in `code`, in order.  Raises SyntaxError."""
        return [node.name for node in ast.parse(self.code).body if isinstance(node, ast.FunctionDef)]

    @property
    def public(self) -> str:
        """The test cell up to its hidden part."""
        return self.test.partition(HIDDEN)[0]

    @property
    def hidden(self) -> ast.Module:
        """What the hidden part of a teacher's test cell defines; its last line is for nbgrader."""
        tree = ast.parse(self.test.partition(HIDDEN)[2])
        tree.body = [node for node in tree.body if not isinstance(node, ast.Expr)]
        return tree


def read_exercises(path: Path) -> dict[str, Exercise]:
    """The exercises of a notebook by number, in order.

    Raises:
      ValueError: the file is not a notebook; one line says why.
    """
    try:
        if not path.is_file():  # a FIFO would let the reader wait for ever
            raise ValueError("not a file")
        if path.stat().st_size > LARGEST:
            raise ValueError(f"larger than {LARGEST // 2**20} MB")
        notebook = nbformat.read(path, as_version=4)
        cells: dict[str, Any] = {_grade_id(cell): cell for cell in notebook.cells}
        exercises: dict[str, Exercise] = {}
        for name in cells:
            match = re.fullmatch(r"ex-(\d+)-(\d+)", name)
            if match:
                number = match.expand(r"\1.\2")
                exercises[number] = _exercise(path, number, cells)
        return exercises
    except Exception as error:  # the file may hold anything
        raise ValueError(f"{path.name} is not a notebook ({type(error).__name__})") from error


def _grade_id(cell: Any) -> str:
    """The cell's name: nbgrader's, or the id; Colab keeps ids in the metadata."""
    names = [cell.metadata.get("nbgrader", {}).get("grade_id"), cell.metadata.get("id"), cell.get("id", "")]
    exercises = [str(name) for name in names if str(name).startswith("ex-")]
    return [*exercises, *(str(name) for name in names if name), ""][0]


def _exercise(path: Path, number: str, cells: dict[str, Any]) -> Exercise:
    name = f"ex-{number.replace('.', '-')}"
    text, test = (cells.get(f"{name}-{part}", {}) for part in ("text", "test"))
    title = str(text.get("source", "")).partition("\n")[0].strip("# ")
    points = test.get("metadata", {}).get("nbgrader", {}).get("points", 0)
    return Exercise(path, number, title or number, points, str(cells[name].source), str(test.get("source", "")))
