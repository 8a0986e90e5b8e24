"""Write docs/names.md, the names that notebooks 00 to 05 import from this course: python dev/tools/notebook_names.py"""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import translations

from grpo_lib.common.files import write_text_atomic

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "names.md"
PACKAGES = ("grpo_lib", "grpo_train")
INTRO = """\
# Names in the notebooks

What notebooks 00 to 05 import from this course, and what it is for. `MODULE.NAME` is used through its module. The
notebooks in `further/` use more. This page is made from the notebooks by `python dev/tools/notebook_names.py`.
"""


def main() -> None:
    write_text_atomic(PAGE, page())


def page() -> str:
    used: dict[str, set[str]] = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for name in names_in(path):
            used.setdefault(name, set()).add(path.stem[:2])
    parts = [INTRO]
    for package, title in (
        ("grpo_lib", "grpo_lib: the course's library"),
        ("grpo_train", "grpo_train: what runs it"),
    ):
        rows = [name for name in sorted(used) if name.startswith(f"{package}.")]
        parts.append(f"## {title}\n\n| name | notebooks | what for |\n|---|---|---|")
        parts += [
            f"| `{name.removeprefix(f'{package}.')}` | {', '.join(sorted(used[name]))} | {purpose(name)} |"
            for name in rows
        ]
        parts.append("")
    return "\n".join(parts)


def names_in(path: Path) -> Iterator[str]:
    """Each name that a notebook imports from PACKAGES, with its module; of a module what is used of it."""
    cells = translations.read_notebook(path)["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    tree = ast.parse("\n".join(sources))
    modules: dict[str, str] = {}  # as a notebook calls it -> its whole name
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in PACKAGES:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if is_module(whole):
                    modules[alias.asname or alias.name] = whole
                else:
                    yield whole
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield f"{modules[node.value.id]}.{node.attr}"


def is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


def purpose(name: str) -> str:
    """The first sentence of what a name is documented with: of a value, its comment."""
    module_name, _, attribute = name.rpartition(".")
    module = importlib.import_module(module_name)
    value = inspect.unwrap(getattr(module, attribute))
    documented = inspect.isclass(value) or inspect.isfunction(value)
    text = inspect.getdoc(value) if documented else comment_of(module, attribute)
    first = " ".join((text or "").partition("\n\n")[0].split())
    sentence = first.partition(". ")[0].rstrip(".")
    return sentence.replace("|", "\\|")


def comment_of(module: ModuleType, name: str) -> str:
    """The comment of a value: behind its assignment, or in the lines above it; also where it is imported from."""
    lines = inspect.getsource(module).splitlines()
    for node in ast.parse("\n".join(lines)).body:
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return comment_of(importlib.import_module(f"{'.' * node.level}{node.module}", module.__package__), name)
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in assigned(node):
            behind = lines[node.lineno - 1].partition("  # ")[2]
            return behind or comment_above(lines, node.lineno - 1)
    return ""


def assigned(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]


def comment_above(lines: list[str], number: int) -> str:
    first = number
    while first and lines[first - 1].startswith("#"):
        first -= 1
    return " ".join(line.lstrip("# ") for line in lines[first:number])


if __name__ == "__main__":
    main()
