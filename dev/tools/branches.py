"""Which way a notebook's cells went: for each `if` of a cell whether its condition was true, false or both.

A kernel runs `record(file)` before the first cell (run_notebooks.py). IPython's own extension points do the rest: an
`ast_transformers` entry wraps each condition, and after each cell a line is added to the file.  `make notebooks` keeps
the ways of the tiny recipe in the notebooks' metadata; rehearse.py says where another recipe went another way.

coverage.py was not taken: it knows lines and jumps between them, and most choices here are conditional expressions
within a line.
"""

import ast
import hashlib
import json
from pathlib import Path
from typing import Any

TOOK = "__took__"  # the name under which a cell finds the function that notes its condition


class _WrapConditions(ast.NodeTransformer):
    """`if a:` becomes `if __took__(CELL, LINE, a):`; the same for `a if b else c`.

    CELL is the one whose code it is: a function is often called in a later cell.
    """

    cell = ""  # digest of the one that is about to run

    def begin(self, info: Any) -> None:
        self.cell = digest(info.raw_cell)

    def visit_If(self, node: ast.If) -> ast.AST:  # the name is ast's
        return self._wrap(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        return self._wrap(node)

    def _wrap(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        place = [ast.Constant(self.cell), ast.Constant(node.test.lineno)]
        call = ast.Call(ast.Name(TOOK, ast.Load()), [*place, node.test], [])
        node.test = ast.copy_location(call, node.test)
        return ast.fix_missing_locations(node)


def record(file: str) -> None:
    """From now on, note the conditions of this kernel's cells in `file`, a JSON object a cell: {"cell", "branches"}."""
    from IPython import get_ipython

    shell: Any = get_ipython()
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("", encoding="utf-8")
    found: dict[str, set[tuple[int, bool]]] = {}

    def took(cell: str, line: int, condition: Any) -> bool:
        outcome = bool(condition)
        found.setdefault(cell, set()).add((line, outcome))
        return outcome

    def finish(_: Any) -> None:
        with path.open("a", encoding="utf-8") as output:
            for cell, ways in found.items():
                output.write(json.dumps({"cell": cell, "branches": sorted(ways)}) + "\n")
        found.clear()

    wrap = _WrapConditions()
    shell.user_ns_hidden[TOOK] = shell.user_ns[TOOK] = took
    shell.ast_transformers.append(wrap)
    shell.events.register("pre_run_cell", wrap.begin)
    shell.events.register("post_run_cell", finish)


def digest(source: str) -> str:
    """Of a cell's source, by which its row is found again."""
    return hashlib.sha256(source.encode()).hexdigest()


def read(file: Path) -> dict[str, list[list[Any]]]:
    """Digest of a cell -> its [line, outcome] pairs, from what `record` wrote; of a cell run twice all of them."""
    found: dict[str, set[tuple[int, bool]]] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        row = json.loads(line)
        found.setdefault(row["cell"], set()).update((number, outcome) for number, outcome in row["branches"])
    return {cell: [list(pair) for pair in sorted(pairs)] for cell, pairs in found.items()}
