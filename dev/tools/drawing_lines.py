"""Count the lines of code cells that draw, in each notebook: python dev/tools/drawing_lines.py

A cell draws if its code names plt, ax, axes, fig or figure; all of its lines of code count.  Figures by name
(grpo_train/report/figures.py) leave in a cell what it teaches.  Each folder has a bound.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import translations

ROOT = Path(__file__).resolve().parents[2]
NAMES = {"plt", "ax", "axes", "fig", "figure"}
BOUNDS = {"notebooks": 60, "notebooks/further": 90}  # lines of all notebooks of the folder


def draws(code: str) -> bool:
    """Whether a cell's code names a thing of matplotlib's, where it imports, takes or uses it."""
    nodes = list(ast.walk(ast.parse(code)))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    taken = {node.arg for node in nodes if isinstance(node, ast.arg)}
    imported = {node.asname for node in nodes if isinstance(node, ast.alias)}
    return bool(NAMES & (used | taken | imported))


def drawing_lines(path: Path) -> int:
    """The lines, without empty ones, of all cells of a notebook that draw."""
    total = 0
    for cell in translations.read_notebook(path)["cells"]:
        code = "".join(cell["source"])
        if cell["cell_type"] == "code" and draws(code):
            total += sum(bool(line.strip()) for line in code.splitlines())
    return total


def by_notebook(folder: str) -> Iterator[tuple[Path, int]]:
    """Each notebook of a folder, and its count."""
    for path in sorted((ROOT / folder).glob("*.ipynb")):
        yield path, drawing_lines(path)


def main() -> int:
    within = True
    for folder, bound in BOUNDS.items():
        total = 0
        for path, lines in by_notebook(folder):
            print(f"{path.stem:<28} {lines:4}")
            total += lines
        print(f"{folder:<28} {total:4}, at most {bound}\n")
        within &= total <= bound
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
