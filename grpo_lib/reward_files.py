"""A reward function from a file of the user's: `rewards: [my_reward.py:shorter_is_better]` in a recipe.

    def shorter_is_better(prompts, completions, answer, **kwargs):
        return [1.0 / (1 + len(text)) for text in completions]

The convention is that of grpo_lib.rewards: keyword arguments, one number per completion.  The file is run as a module
of its own, once in a process, and what it does wrong is a CourseError of one line that names file, function and line.

The leaderboard of grpo_teach reads, identifies and checks a student's function with what is here (`read_source`,
`digest`, `as_rewards`), and runs it elsewhere.
"""

import functools
import hashlib
import importlib.util
import inspect
import itertools
import math
import os
import reprlib
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError, first_line

SUFFIX = ".py"
EXAMPLE = "def NAME(prompts, completions, answer, **kwargs)"
# What every reward function is called with; a recipe with several tasks has a column `task`, too.
ARGUMENTS = ("prompts", "completions", "answer", "kind", "task")
# Types whose values can be shown in an error as they are.
PLAIN = (bool, int, float, complex, str, bytes, type(None))


class RewardError(CourseError):
    """A reward function failed on a batch, or returned what is no reward."""


def is_file(setting: str) -> bool:
    """Whether an entry of a recipe's `rewards` names a file and not a function of grpo_lib.rewards."""
    return SUFFIX in setting or "/" in setting


def load(setting: str) -> Callable[..., list[float]]:
    """The function of an entry `FILE.py:NAME`; FILE is relative to here or to the repository.

    Its values are checked at each call, and come back as floats.  Its attributes `explain` and `kinds`, which those
    made with `rewards.reward_function` have, are kept.  A call raises RewardError where the function fails.

    Raises CourseError when there is no such file or function, the file raises, or the function takes other arguments.
    """
    path, name = _split(setting)
    function = vars(_module(path)).get(name)
    if not callable(function):
        raise CourseError(f"rewards: {path} has no function {name}; write {EXAMPLE.replace('NAME', name)} there")
    begins = _first_line_of(function)
    _require_arguments(function, _at(setting, begins), name)

    def checked(**columns: Any) -> list[float]:
        try:
            values = function(**columns)
        except (Exception, SystemExit) as error:
            place = _at(setting, _line_in(path, error) or begins)
            raise RewardError(f"rewards: {place} raises {describe(error)}; correct the function") from error
        return as_rewards(values, len(columns["completions"]), f"rewards: {_at(setting, begins)}")

    if inspect.isfunction(function):
        vars(checked).update({key: value for key, value in vars(function).items() if key in ("explain", "kinds")})
    checked.__name__ = checked.__qualname__ = name
    return checked


def as_rewards(values: Any, count: int, named: str, remedy: str = "") -> list[float]:
    """What a reward function has returned for `count` completions, as finite numbers.

    Taken are lists, tuples, one-dimensional arrays and generators of floats, integers, booleans or scalar arrays.

    Args:
      named: begins the error, such as "rewards: my_reward.py:points".
      remedy: ends it; by default what a function in this convention returns.

    Raises RewardError for anything else.
    """
    wanted = remedy or f"return a list of {count} numbers, one per completion"
    if isinstance(values, (str, bytes, dict, set)):
        raise RewardError(f"{named} returned a {type(values).__name__}; {wanted}")
    try:
        listed = list(itertools.islice(values, count + 1))  # an endless one would never be whole
    except Exception as error:
        found = f"{_shown(values)}, which is no list ({describe(error)})"
        raise RewardError(f"{named} returned {found}; {wanted}") from None
    if len(listed) != count:
        found = "more" if len(listed) > count else str(len(listed))
        raise RewardError(f"{named} returned {found} for {count} completions; {wanted}")
    numbers = [_finite(value) for value in listed]
    if None in numbers:
        place = numbers.index(None)
        found = f"{_shown(listed[place])} for completion {place + 1} of {count}, which is no finite number"
        raise RewardError(f"{named} returned {found}; {wanted}")
    return [number for number in numbers if number is not None]


def digests(settings: Iterable[str]) -> dict[str, str]:
    """The `digest` of the files that a recipe's `rewards` name, by entry; empty where none is a file.

    Raises CourseError when one is not there.
    """
    return {setting: digest(_split(setting)[0]) for setting in settings if is_file(setting)}


def digest(path: str | os.PathLike) -> str:
    """SHA-256 of a file's content.  Raises CourseError when it cannot be read."""
    return hashlib.sha256(_read(Path(path))).hexdigest()


def read_source(path: str | os.PathLike) -> str:
    """The code of a file, in the encoding that it names, or UTF-8 with or without a byte order mark.

    Raises CourseError when it cannot be read.
    """
    path = Path(path)
    content = _read(path)
    try:
        return importlib.util.decode_source(content)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise CourseError(f"rewards: {path} cannot be read ({first_line(error)}); save it as UTF-8") from None


def describe(error: BaseException) -> str:
    """An error in one line: its type and what it says."""
    try:
        said = first_line(error)
    except Exception:  # an error type of the user's, whose text cannot be made
        said = ""
    if isinstance(error, SyntaxError) and error.msg:  # its text names the line, and so does `_at`
        said = str(error.msg)
    kind = type(error).__name__
    return f"{kind}: {said}" if said and said != kind else kind


def _split(setting: str) -> tuple[Path, str]:
    """(file, name of the function) of an entry."""
    file, _, name = setting.rpartition(":")
    if not file.endswith(SUFFIX) or not name.isidentifier():
        raise CourseError(f"rewards: {setting} names no function; write FILE.py:FUNCTION, such as my_reward.py:length")
    path = Path(file).expanduser()
    places = (path, environment.repo_root() / path)
    return next((place.resolve() for place in places if place.is_file()), path), name


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "its name cannot be read"
        raise CourseError(
            f"rewards: {path} cannot be read ({reason}); give a file relative to here or to the repository"
        ) from None


@functools.cache
def _module(path: Path) -> ModuleType:
    """The file as a module that no import statement finds by another name."""
    code = _read(path)
    name = f"grpo_reward_file_{hashlib.sha256(str(path).encode(errors='replace')).hexdigest()[:16]}"
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses and pickle look there
    try:
        exec(compile(code, str(path), "exec"), module.__dict__)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a file that calls sys.exit, too
        del sys.modules[name]
        place = _at(str(path), _line_in(path, error))
        raise CourseError(f"rewards: {place} cannot be run: {describe(error)}; correct the file") from error
    return module


def _at(setting: str, line: int | None) -> str:
    """An entry, or a file, with the line in it that an error is about, where that is known."""
    return f"{setting} (line {line})" if line else setting


def _line_in(path: Path, error: BaseException) -> int | None:
    """The line of this file in which an error was raised, or which called what raised it; None if it is not known."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == str(path)]
    return lines[-1] if lines else None


def _first_line_of(function: Callable[..., Any]) -> int | None:
    """The line in which a function begins; None for a callable of another kind."""
    if not inspect.isfunction(function):
        return None
    original: Any = inspect.unwrap(function)
    return original.__code__.co_firstlineno if inspect.isfunction(original) else None


def _require_arguments(function: Callable[..., Any], place: str, name: str) -> None:
    """Raise CourseError where the function does not take the arguments of a reward function."""
    try:
        inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS))
    except Exception as error:  # TypeError, or what an object of the user's raises when it is asked
        raise CourseError(
            f"rewards: {place} does not take the arguments of a reward function ({describe(error)}); write "
            f"{EXAMPLE.replace('NAME', name)}"
        ) from None


def _finite(value: Any) -> float | None:
    """A value as a finite number; None if it is none.  A text is none, and neither is an array of one."""
    try:
        if isinstance(value, (str, bytes)) or getattr(value, "shape", ()) != ():
            return None
        number = float(value)
    except Exception:  # of a type of the user's
        return None
    return number if math.isfinite(number) else None


def _shown(value: Any) -> str:
    """A value in a few words: itself, or its type."""
    if isinstance(value, PLAIN):
        return reprlib.repr(value)
    kind = f"a value of type {type(value).__name__}"
    try:
        return f"{kind} and shape {tuple(value.shape)}"
    except Exception:  # it has none
        return kind
