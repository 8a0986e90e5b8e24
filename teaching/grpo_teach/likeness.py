"""Hand-ins that are nearly equal, which the teacher may want to look at: no verdict, and nothing that a student reads.

Compared are the functions without comments, docstrings and white space, and with other names for what they define
themselves; short ones are left out, as many people write them alike.

MOSS compares better, but takes an account and sends the work to Stanford; JPlag needs Java, and copydetect compares
files and not the cells of a notebook.  All three are the way for a whole course.
"""

import ast
import difflib
import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol

SHORT = 40  # nodes of a function that many write alike
ALIKE = 0.95  # of two texts, by difflib
MOST = 0.8  # of the exercises that both have


class HasCode(Protocol):
    """A submission."""

    name: str
    code: Mapping[str, str]


def near_equal(submissions: Sequence[HasCode]) -> dict[str, list[str]]:
    """For each name the others whose exercises are nearly all nearly equal."""
    texts = {one.name: _texts(one.code) for one in submissions}
    near: dict[str, list[str]] = {}
    for name, other in itertools.combinations(texts, 2):
        both = texts[name].keys() & texts[other].keys()
        alike = [number for number in both if _alike(texts[name][number], texts[other][number])]
        if both and len(alike) >= MOST * len(both):
            near.setdefault(name, []).append(other)
            near.setdefault(other, []).append(name)
    return near


def _texts(code: Mapping[str, str]) -> dict[str, str]:
    """Of each exercise that is long enough its code as it is compared."""
    texts = {number: _normal(text) for number, text in code.items()}
    return {number: text for number, text in texts.items() if text}


def _normal(code: str) -> str:
    """Code without what is easily changed; "" where it is short, was not written or cannot be read."""
    try:
        tree = ast.parse(code)
        nodes = list(ast.walk(tree))
        if len(nodes) < SHORT or "NotImplementedError" in code:
            return ""
        names: dict[str, str] = {}
        for node in nodes:
            if isinstance(node, ast.arg):
                node.arg = names.setdefault(node.arg, f"v{len(names)}")
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.setdefault(node.id, f"v{len(names)}")
        for node in nodes:
            if isinstance(node, ast.Name):
                node.id = names.get(node.id, node.id)
            elif isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                node.body = node.body[1:]
        return ast.unparse(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError, AttributeError):
        return ""


def _alike(text: str, other: str) -> bool:
    if text == other:
        return True
    matcher = difflib.SequenceMatcher(None, text.split(), other.split(), autojunk=False)
    return matcher.real_quick_ratio() >= ALIKE and matcher.quick_ratio() >= ALIKE and matcher.ratio() >= ALIKE
