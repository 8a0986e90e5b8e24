"""Count the statements of each package, and compare with its limit: python tools/count_statements.py

A statement is an `ast.stmt` that is not a docstring, so neither blank lines nor long ones change the count.  The limits
are in pyproject.toml, [tool.grpo.statements].  Over a limit: take something out.
"""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def count_statements(source: str) -> int:
    """Return the number of statements in Python source, docstrings left out."""
    return sum(isinstance(node, ast.stmt) and not _is_text(node) for node in ast.walk(ast.parse(source)))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def main() -> int:
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["grpo"]["statements"]
    over = 0
    for package, limit in limits.items():
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", f"{package}/*.py"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
        files = [ROOT / name for name in listed if (ROOT / name).is_file()]
        count = sum(count_statements(file.read_text(encoding="utf-8")) for file in files)
        print(f"{package:<11} {count:5,} statements in {len(files)} files, limit {limit:,}")
        if count > limit:
            print(f"error: {package} is over its limit; take something out (CONTRIBUTING.md)", file=sys.stderr)
            over += 1
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
