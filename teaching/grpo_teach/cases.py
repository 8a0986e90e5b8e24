"""The public cases of an exercise, as data, and the words for a value that is not the right one.

    case(advantages, ([1.1, 0.1, 0.0, 0.0], 4), [1.495, -0.374, -0.561, -0.561], tolerance=1e-3)
    case(pass_at_k, (3, 1, 5), ValueError)
    case(alarm, (rows,), that("a step from 31 to 40", lambda step: 31 <= step <= 40))

In a notebook `case` calls the function and stops at a wrong value.  `grpo check` collects the cases, and calls the
function where grading calls it.  This file needs NumPy and nothing else: in the notebooks for Colab it is a cell.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

LONGEST = 160  # characters of a value that is shown
CHINESE = {
    "expected": "應為",
    "got": "得到",
    "returned None": "傳回了 None",
    "text": "文字",
    "a number": "數字",
    "true or false": "布林值（True 或 False）",
    "a list or an array": "串列或陣列",
    "a dict": "字典（dict）",
    "None": "None",
    "{want} expected, {got} returned": "應傳回{want}，卻傳回{got}",
    "shape {got}, expected {want}": "shape 是 {got}，應為 {want}",
    "the keys {got}, expected {want}": "鍵是 {got}，應為 {want}",
    "another value": "值不對",
    "no error": "沒有錯誤",
    "{kind}, shape {shape}": "{kind}，shape {shape}",
}
_recorded: list["Case"] | None = None  # a list while `grpo check` collects


@dataclass(frozen=True)
class That:
    """A property of a value, in place of the value: its words, and the test."""

    words: str
    holds: Callable[[Any], Any]


@dataclass(frozen=True)
class Case:
    """A call and what it must return; `by` makes it, as by(function, *inputs), where arguments are functions."""

    function: str
    inputs: tuple
    want: Any
    tolerance: float
    by: Callable[..., Any] | None

    @property
    def call(self) -> str:
        """The call as a line of Python, long values cut short."""
        inputs = [shown(one) for one in self.inputs]
        if self.by:
            return f"{self.by.__name__}({', '.join([self.function, *inputs])})"
        return f"{self.function}({', '.join(inputs)})"


class WrongValue(AssertionError):
    """A public case that failed; a notebook shows its message without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


def that(words: str, holds: Callable[[Any], Any]) -> That:
    """What a value must be, where there is no single right one."""
    return That(words, holds)


def case(function: Callable, inputs: tuple, want: Any, *, tolerance: float = 1e-6, by: Callable | None = None) -> None:
    """Call the function with the inputs; a value, a property of it, or an error's class must come back.

    Raises:
      WrongValue: another value came back.  Its message has the input, what was expected, and what came.
    """
    one = Case(function.__name__, inputs, want, tolerance, by)
    if _recorded is not None:
        _recorded.append(one)
        return
    try:
        got = by(function, *inputs) if by else function(*inputs)
    except Exception as error:
        if isinstance(want, type) and isinstance(error, want):
            return
        raise
    if not right(one, got):
        raise WrongValue("\n".join(told(one, got, language())))


@contextlib.contextmanager
def recording() -> Iterator[list[Case]]:
    """Collect the cases in place of calling their functions."""
    global _recorded
    _recorded = []
    try:
        yield _recorded
    finally:
        _recorded = None


def language() -> str:
    """ "zh" in a notebook of the Chinese exercises, else "en"; Jupyter tells a kernel the notebook's path."""
    notebook = os.environ.get("JPY_SESSION_NAME", "")
    return "zh" if "zh_TW" in notebook else os.environ.get("GRPO_LANGUAGE", "en")


def say(words: str, language: str, **values: Any) -> str:
    """A message of `CHINESE` in a language, with its values filled in."""
    return (CHINESE[words] if language == "zh" else words).format(**values)


def right(one: Case, got: Any) -> bool:
    """Whether a value is what the case expects."""
    if isinstance(one.want, type):
        return False  # an error was expected
    try:
        if isinstance(one.want, That):
            verdict = one.want.holds(got)
            return np.ndim(verdict) == 0 and bool(verdict)  # an array of one number is no number
        return equal(got, one.want, one.tolerance)
    except Exception:  # a value of another type or shape
        return False


def told(one: Case, got: Any, language: str) -> list[str]:
    """A call, what it must return, what it returned, and the difference where it is one of kind: lines."""
    if isinstance(one.want, That):
        want = one.want.words
    elif isinstance(one.want, type):
        want = one.want.__name__
    else:
        want = described(one.want, language)
    labels = [say(word, language) for word in ("expected", "got")]
    # A Chinese character is two columns wide.
    expected, found = (label.ljust(9 - len(label) * (language == "zh")) for label in labels)
    value = described(got, language)
    if value == want:  # to four digits they are the same
        value, want = repr(got)[:LONGEST], repr(one.want)[:LONGEST]
    lines = [one.call, f"  {expected} {want}", f"  {found} {value}"]
    kind = "" if isinstance(one.want, That | type) else difference(got, one.want, language)
    return [*lines, f"  {kind}"] if kind else lines


def equal(got: Any, want: Any, tolerance: float) -> bool:
    """Whether two values are `close`; one of another type or shape is not."""
    try:
        return close(got, want, tolerance)
    except Exception:  # the value may be anything, such as a number that no float can hold
        return False


def close(got: Any, want: Any, tolerance: float) -> bool:
    """Whether two values are equal; numbers up to `tolerance`, absolute or relative.  A list equals its array."""
    if isinstance(want, dict):
        return got.keys() == want.keys() and all(close(got[key], want[key], tolerance) for key in want)
    if isinstance(want, list | tuple):
        return len(got) == len(want) and all(close(a, b, tolerance) for a, b in zip(got, want, strict=True))
    if want is None or isinstance(want, bool | str):
        return type(got) is type(want) and got == want
    if isinstance(got, str):
        return False
    numbers = np.asarray(got, float)
    return numbers.shape == np.shape(want) and np.allclose(numbers, want, tolerance, tolerance)


def difference(got: Any, want: Any, language: str = "en") -> str:
    """What is wrong with the kind of a value: None, its type, its keys, its shape; "" if only the value is wrong."""
    if got is None and want is not None:
        return say("returned None", language)
    kinds = _kind(got), _kind(want)
    if want is not None and kinds[0] != kinds[1]:
        found, expected = (say(kind, language) for kind in kinds)
        return say("{want} expected, {got} returned", language, want=expected, got=found)
    if isinstance(want, dict) and isinstance(got, dict):
        if got.keys() != want.keys():
            return say("the keys {got}, expected {want}", language, got=shown([*got]), want=shown([*want]))
        return next(filter(None, (difference(got[key], want[key], language) for key in want)), "")
    shapes = [_shape(value) for value in (got, want)]
    if shapes[0] != shapes[1] and None not in shapes:
        return say("shape {got}, expected {want}", language, got=shapes[0], want=shapes[1])
    return ""


def described(value: Any, language: str) -> str:
    """A value, and for an array its type and shape."""
    if not isinstance(value, np.ndarray):
        return shown(value)
    return f"{shown(value)}  ({say('{kind}, shape {shape}', language, kind=value.dtype, shape=value.shape)})"


def shown(value: Any) -> str:
    """A value as Python writes it, numbers with four digits, cut short."""
    text = repr(_rounded(value))
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _rounded(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_rounded(one) for one in value)
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, bool | np.bool_):
        return "true or false"
    if isinstance(value, str):
        return "text"
    if isinstance(value, dict):
        return "a dict"
    return "a list or an array" if np.ndim(_sized(value)) else "a number"


def _sized(value: Any) -> Any:
    """A list without its content, whose parts may have several lengths."""
    return [0] if isinstance(value, list | tuple) else value


def _shape(value: Any) -> tuple[int, ...] | None:
    """The shape of an array or of a list of numbers; None where the parts have several, or are no numbers."""
    try:
        array = np.asarray(value)
    except ValueError:
        return None
    return array.shape if array.dtype.kind in "bifc" else None
