"""Wrong answers to an exercise, which must not get full marks: `mistakes` less, `without_work` and `guesses` none.

The usual mistakes are in the hidden part of the exercise's test cell, as MISTAKES: name → the whole cell of the
function, or pairs (text of the solution, what is there instead).
"""

import ast
import functools
import json
from collections.abc import Callable
from typing import Any

from grpo_teach import grading, worker
from grpo_teach.limited import Failed
from grpo_teach.notebooks import Exercise

# Values in the form of the right ones: what a constant of the right shape would be.
_BLANK = """
def _blank(function):
    import numpy as np
    def filled(value):
        if isinstance(value, dict):
            return {key: filled(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [filled(one) for one in value]
        return np.full(np.shape(value), FILLER) if np.ndim(value) else FILLER
    return lambda *arguments, **keywords: filled(function(*arguments, **keywords))
"""
# Numbers and arrays of numbers get an axis; what holds them, such as a dict or a pair, stays.
_SHAPED = """
def _shaped(function):
    import functools
    import numpy as np
    def shaped(value):
        if isinstance(value, dict):
            return {key: shaped(one) for key, one in value.items()}
        if isinstance(value, tuple):
            return tuple(shaped(one) for one in value)
        if isinstance(value, (np.ndarray, np.number, float, int)) and not isinstance(value, bool):
            return WRAPPED
        return value
    return functools.wraps(function)(lambda *arguments: shaped(function(*arguments)))
"""
_BY_ORDER = """
import json
import numpy as np
def decode(value):
    if isinstance(value, list):
        return [decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        return {key: decode(one) for key, one in value["dict"].items()}
    return np.array(value["array"], value["dtype"])
VALUES = iter(json.loads(KNOWN))
"""
_READER = """
import json
with open(PATH, encoding="utf-8") as file:
    cells = json.load(file)["cells"]
exec("".join(next(cell for cell in cells if cell["id"] == NAME)["source"]))
"""


def mistakes(exercise: Exercise) -> dict[str, str]:
    """The usual mistakes by name, as the code that a student would hand in.

    Raises:
      ValueError: a text that is replaced is not in the solution exactly once.
    """
    assigned = {
        ast.unparse(node.targets[0]): node.value for node in exercise.hidden.body if isinstance(node, ast.Assign)
    }
    changes: dict[str, Any] = ast.literal_eval(assigned["MISTAKES"])
    return {name: change if isinstance(change, str) else _changed(exercise, change) for name, change in changes.items()}


def by_order(exercise: Exercise, seed: int) -> str:
    """Code that knows each right value for a seed, and goes by the order of calls: it does not look at its inputs."""
    plan = grading.planned(exercise, seed)
    values = [None if isinstance(value, Failed) else value for one in plan for value in one.want * one.part.processes]
    body = "return decode(next(VALUES))"
    known = repr(json.dumps(worker.encode(values)))
    return _BY_ORDER.replace("KNOWN", known) + _functions(dict.fromkeys(exercise.functions, body))


def other_shapes(exercise: Exercise) -> dict[str, str]:
    """The solution with its values in a shape that broadcasts to the right one, by name."""
    changes = {"one more axis": "np.asarray(value)[None]", "a column": "np.asarray(value)[..., None]"}
    wrapped = "\n".join(f"{name} = _shaped({name})" for name in exercise.functions)
    shaped = {name: _SHAPED.replace("WRAPPED", change) for name, change in changes.items()}
    return {name: "\n".join([exercise.code, wrapper, wrapped]) for name, wrapper in shaped.items()}


def without_work(exercise: Exercise) -> dict[str, str]:
    """Answers that cost no work, by name; the last one reads the solution from the disk."""
    names = exercise.functions
    example = {name: f"return {_literal(value)}" for name, value in _first_values(exercise).items()}
    blank = exercise.code + "\n" + _BLANK + "\n".join(f"{name} = _blank({name})" for name in names)
    cell = f"ex-{exercise.number.replace('.', '-')}"
    reader = _READER.replace("PATH", repr(str(exercise.path))).replace("NAME", repr(cell))
    return {
        "empty": _functions(dict.fromkeys(names, "raise NotImplementedError()")),
        "None": _functions(dict.fromkeys(names, "return None")),
        "the public example": _functions(example),
        "zeros": blank.replace("FILLER", "0.0"),
        "NaN": blank.replace("FILLER", "float('nan')"),
        "ones": blank.replace("FILLER", "1.0"),
        "reads the solution": reader,
    }


def _functions(bodies: dict[str, str]) -> str:
    return "\n".join(f"def {name}(*_, **__): {body}" for name, body in bodies.items())


def _changed(exercise: Exercise, pairs: list[tuple[str, str]]) -> str:
    code = exercise.code
    for old, new in pairs:
        if code.count(old) != 1:
            raise ValueError(
                f"exercise {exercise.number}: {old!r} is in the solution {code.count(old)} times, not once"
            )
        code = code.replace(old, new)
    return code


def _first_values(exercise: Exercise) -> dict[str, Any]:
    """What each function returned first while the public cases ran."""
    space: dict[str, Any] = {}
    exec(exercise.code, space)
    first: dict[str, Any] = {}

    def recorded(name: str, function: Callable) -> Callable:
        return functools.wraps(function)(lambda *inputs: _keep(first, name, function(*inputs)))

    space.update({name: recorded(name, space[name]) for name in exercise.functions})
    exec(exercise.public, space)
    return first


def _keep(first: dict[str, Any], name: str, value: Any) -> Any:
    return first.setdefault(name, value) if name not in first else value


def _literal(value: Any) -> str:
    """Python source of a value, arrays as lists."""

    def plain(one: Any) -> Any:
        if isinstance(one, list):
            return [plain(part) for part in one]
        if not isinstance(one, dict):
            return one
        if "array" in one:
            return one["array"]
        return {key: plain(part) for key, part in one["dict"].items()}

    return repr(plain(worker.encode(value)))
