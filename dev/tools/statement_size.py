"""Hold each statement to 60 syntax nodes: python dev/tools/statement_size.py [--densest 10]

A node is one of Python's `ast`, counted below a statement without the statements in its body; imports and the heads of
functions and classes do not count, nor do docstrings.  Two kinds may be larger, because they are read line by line and
not as a whole: tables of constants, and calls or dicts that fill fields, each of at most FIELD nodes.

No limit is on totals: one on statements was tried, and pressed the code until it was hard to read.
"""

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LARGEST, FIELD = 60, 20
PLACES = ("grpo_lib", "grpo_train", "teaching", "tests", "dev", "notebooks", ".ci")
HEADS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
CONSTANTS = (
    *(ast.Constant, ast.Name, ast.Attribute, ast.Dict, ast.List, ast.Tuple, ast.Set, ast.Starred),
    *(ast.UnaryOp, ast.USub, ast.expr_context),
)


class Statement(NamedTuple):
    place: str  # PATH:LINE
    nodes: int
    allowed: bool  # a table, or one that fills fields


def statements(path: Path, name: str) -> Iterator[Statement]:
    """Each statement of a file but imports, docstrings and the heads of functions and classes."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.stmt) and not isinstance(node, HEADS) and not is_text(node):
            yield Statement(f"{name}:{node.lineno}", size(node), is_table(node) or fills_fields(node))


def is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def size(node: ast.AST) -> int:
    """The nodes below this one, without those of statements in its body."""
    below = [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]
    bodies = (ast.ExceptHandler, ast.match_case)  # they hold statements and are none
    return sum(size(child) + (not isinstance(child, bodies)) for child in below)


def value_of(node: ast.stmt) -> ast.expr | None:
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return | ast.Expr):
        return node.value
    return None


def is_table(node: ast.stmt) -> bool:
    """Whether all of the value are constants and names, in lists, dicts and the like."""
    value = value_of(node)
    return value is not None and all(isinstance(part, CONSTANTS) for part in ast.walk(value))


def fills_fields(node: ast.stmt) -> bool:
    """Whether the value is a call, a dict or a list whose parts are small, each of them by itself."""
    value = value_of(node)
    if isinstance(value, ast.Call):
        parts = [value.func, *value.args, *(keyword.value for keyword in value.keywords)]
        return len(value.keywords) >= len(value.args) and all(size(part) < FIELD for part in parts)
    if isinstance(value, ast.Dict):
        return all(size(part) < FIELD for part in [*filter(None, value.keys), *value.values])
    if isinstance(value, ast.List | ast.Tuple | ast.Set):
        return all(size(part) < FIELD for part in value.elts)
    return False


def tracked_files(root: Path) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", "*.py"], cwd=root, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.split("\0") if name.partition("/")[0] in PLACES]
    return [root / name for name in sorted(names)]


def part_of(name: str) -> str:
    """The package of a file, or what it is instead."""
    return "grpo_teach" if name.startswith("teaching/grpo_teach/") else name.partition("/")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--densest", type=int, default=0, metavar="N", help="also print the N largest statements")
    densest = parser.parse_args().densest
    root = Path(__file__).resolve().parents[2]
    by_part: dict[str, list[Statement]] = {}
    for path in tracked_files(root):
        name = path.relative_to(root).as_posix()
        by_part.setdefault(part_of(name), []).extend(statements(path, name))
    print(f"{'nodes a statement':<18}{'statements':>11}{'mean':>7}{'p99':>5}{'largest':>9}")
    held: list[Statement] = []
    for part, of_part in by_part.items():
        held += [statement for statement in of_part if not statement.allowed]
        print(f"{part:<18}{counts(of_part)}")
    held.sort(key=lambda statement: -statement.nodes)
    for statement in held[:densest]:
        print(f"{statement.nodes:>4} {statement.place}")
    large = [statement for statement in held if statement.nodes > LARGEST]
    for statement in large:
        print(
            f"{statement.place}: a statement of {statement.nodes} nodes; split it, at most {LARGEST}", file=sys.stderr
        )
    return 1 if large else 0


def counts(of_part: list[Statement]) -> str:
    """A row of the table; the sizes are without tables and calls that are larger than LARGEST."""
    sizes = sorted(one.nodes for one in of_part if not one.allowed or one.nodes <= LARGEST)
    mean = sum(sizes) / len(sizes)
    p99 = sizes[int(0.99 * len(sizes))]
    return f"{len(of_part):>11,}{mean:>7.1f}{p99:>5}{sizes[-1]:>9}"


if __name__ == "__main__":
    sys.exit(main())
