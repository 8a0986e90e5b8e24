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
    remark: str = ""  # where the code is not in one cell
    text: str = ""  # with the title

    @property
    def language(self) -> str:
        """ "zh" where its text is Chinese, else "en"."""
        return "zh" if re.search("[\u4e00-\u9fff]", self.title + self.text) else "en"

    @property
    def functions(self) -> list[str]:
        """The names of the functions in `code`, in order.  Raises SyntaxError."""
        return [node.name for node in ast.parse(self.code).body if isinstance(node, ast.FunctionDef)]

    @property
    def unwritten(self) -> int:
        """How many functions are still as they were given; a line that was left below other code does not count."""
        last = {node.name: node for node in _functions(self.code)}
        return sum(map(_is_unwritten, last.values()))

    @property
    def left_over(self) -> int:
        """The line of the code that still raises NotImplementedError where a function was written; 0 if none does."""
        for function in _functions(self.code):
            for step in function.body:
                if _raises_unwritten(step) and not _is_unwritten(function):
                    return step.lineno
        return 0

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
    if not path.exists():
        raise ValueError(f"{path} is not there")
    if not path.is_file():  # a FIFO would let the reader wait for ever
        raise ValueError(f"{path} is not a file")
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path} is larger than {LARGEST // 2**20} MB")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error
    return exercises_in(content, path)


def exercises_in(content: bytes, path: Path) -> dict[str, Exercise]:
    """The exercises in what a notebook's file holds; `path` is for messages.  Raises ValueError as `read_exercises`."""
    try:
        notebook = nbformat.reads(content.decode("utf-8-sig"), as_version=4)
        numbers = [re.fullmatch(r"ex-(\d+)-(\d+)", _grade_id(cell)) for cell in notebook.cells]
        found = [match.expand(r"\1.\2") for match in numbers if match]
        return {number: _exercise(path, number, notebook.cells) for number in found}
    except Exception as error:  # the file may hold anything
        raise ValueError(f"{path.name} is not a notebook ({type(error).__name__})") from error


def _grade_id(cell: Any) -> str:
    """The cell's name: nbgrader's, or the id; Colab keeps ids in the metadata."""
    names = [cell.metadata.get("nbgrader", {}).get("grade_id"), cell.metadata.get("id"), cell.get("id", "")]
    exercises = [str(name) for name in names if str(name).startswith("ex-")]
    return [*exercises, *(str(name) for name in names if name), ""][0]


def _exercise(path: Path, number: str, cells: list[Any]) -> Exercise:
    name = f"ex-{number.replace('.', '-')}"
    named = {_grade_id(cell): cell for cell in cells}
    text, test = (named.get(f"{name}-{part}", {}) for part in ("text", "test"))
    said = str(text.get("source", ""))
    title = said.partition("\n")[0].strip("# ")
    points = test.get("metadata", {}).get("nbgrader", {}).get("points", 0)
    code, remark = _code(name, cells, str(test.get("source", "")))
    return Exercise(path, number, title or number, points, code, str(test.get("source", "")), remark, said)


def _code(name: str, cells: list[Any], test: str) -> tuple[str, str]:
    """The code of an exercise, and a remark where it is not in one cell.

    JupyterLab gives a copy of a cell, and the second half of one that was split, the metadata of the first.  Halves
    define different functions and belong together.  Of copies the cell that was given counts, by its own id, which a
    copy does not have.  A half may also be without metadata, above the tests.  Where the cell is still as it was given,
    the function may have been written in a new one.
    """
    places = [place for place, cell in enumerate(cells) if _grade_id(cell) == name]
    given = next((place for place in places if cells[place].get("id") == name), places[-1])
    sources = [str(cells[place].source) for place in places]
    defined = [_defines(source) for source in sources]
    if len(places) > 1 and sum(map(len, defined)) == len(set().union(*defined)):
        return "\n\n".join(sources), f"its code is in {len(places)} cells"
    code = str(cells[given].source)
    remark = f"its cell is there {len(places)} times; the one that was given counts" if len(places) > 1 else ""
    below = []
    for cell in cells[given + 1 :]:
        if cell.cell_type != "code" or _grade_id(cell).startswith("ex-"):
            break
        below.append(str(cell.source))
    whole = "\n\n".join([code, *below])
    if _called(test) & (_defines(whole) - _defines(code)):
        return whole, f"its code is in {1 + len(below)} cells"
    if new := _written_elsewhere(code, cells):
        return f"{code}\n\n{new}", "its function is in a new cell; it belongs in the cell that was given"
    return code, remark


def _written_elsewhere(code: str, cells: list[Any]) -> str:
    """Of cells that students made the last one with a function that is unwritten in `code`; "" if there is none."""
    unwritten = {node.name for node in _functions(code) if _is_unwritten(node)}
    made = [str(cell.source) for cell in cells if cell.cell_type == "code" and not _grade_id(cell).startswith("ex-")]
    for source in reversed(made):
        if unwritten & {node.name for node in _functions(source) if not _is_unwritten(node)}:
            return source
    return ""


def _defines(source: str) -> set[str]:
    """The names of the functions that a cell defines; none where it cannot be read."""
    return {node.name for node in _functions(source)}


def _functions(source: str) -> list[ast.FunctionDef]:
    """The functions that a cell defines; none where it cannot be read."""
    try:
        return [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _is_unwritten(function: ast.FunctionDef) -> bool:
    """Whether a function has nothing but a docstring and the line that nbgrader puts in place of a solution."""
    own = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return len(own) == 1 and _raises_unwritten(own[0])


def _raises_unwritten(step: ast.stmt) -> bool:
    return isinstance(step, ast.Raise) and "NotImplementedError" in ast.unparse(step)


def _called(test: str) -> set[str]:
    """The names in a cell of tests."""
    return set(re.findall(r"[A-Za-z_]\w*", test))
