"""A reward function from a file of the user's: `rewards: [my_reward.py:shorter_is_better]` in a recipe.

    def shorter_is_better(prompts, completions, answer, **kwargs):
        return [1.0 / (1 + len(text)) for text in completions]

The convention is that of grpo_lib.rewards: keyword arguments, one number per completion.  The file is run as a module
of its own, once in a process, and what it does wrong is a CourseError of one line that names file and function.
"""

import functools
import hashlib
import inspect
import itertools
import math
import sys
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


def is_file(setting: str) -> bool:
    """Whether an entry of a recipe's `rewards` names a file and not a function of grpo_lib.rewards."""
    return SUFFIX in setting or "/" in setting


def load(setting: str) -> Callable[..., list[float]]:
    """The function of an entry `FILE.py:NAME`; FILE is relative to here or to the repository.

    Its values are checked at each call, and come back as floats.  Its attributes `explain` and `kinds`, which those
    made with `rewards.reward_function` have, are kept.

    Raises CourseError when there is no such file or function, the file raises, or the function takes other arguments.
    """
    path, name = _split(setting)
    function = vars(_module(path)).get(name)
    if not callable(function):
        raise CourseError(f"rewards: {path} has no function {name}; write {EXAMPLE.replace('NAME', name)} there")
    _require_arguments(function, setting, name)

    def checked(**columns: Any) -> list[float]:
        try:
            values = function(**columns)
        except (Exception, SystemExit) as error:
            raise CourseError(f"rewards: {setting} raises {describe(error)}; correct the function") from error
        return _floats(values, len(columns["completions"]), setting)

    if inspect.isfunction(function):
        vars(checked).update({key: value for key, value in vars(function).items() if key in ("explain", "kinds")})
    checked.__name__ = checked.__qualname__ = name
    return checked


def digests(settings: Iterable[str]) -> dict[str, str]:
    """SHA-256 of the files that a recipe's `rewards` name, by entry; empty where none is a file.

    Raises CourseError when one is not there.
    """
    return {setting: hashlib.sha256(_read(_split(setting)[0])).hexdigest() for setting in settings if is_file(setting)}


def describe(error: BaseException) -> str:
    """An error in one line: its type and what it says."""
    try:
        said = first_line(error)
    except Exception:  # an error type of the user's, whose text cannot be made
        said = ""
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
        raise CourseError(f"rewards: {path} cannot be run: {describe(error)}; correct the file") from error
    return module


def _require_arguments(function: Callable[..., Any], setting: str, name: str) -> None:
    """Raise CourseError where the function does not take the arguments of a reward function."""
    try:
        inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS))
    except Exception as error:  # TypeError, or what an object of the user's raises when it is asked
        raise CourseError(
            f"rewards: {setting} does not take the arguments of a reward function ({describe(error)}); write "
            f"{EXAMPLE.replace('NAME', name)}"
        ) from None


def _floats(values: Any, count: int, setting: str) -> list[float]:
    """What a reward function has returned, as finite numbers.  Raises CourseError for anything else."""
    wanted = f"return a list of {count} numbers, one per completion"
    if isinstance(values, (str, bytes, dict, set)):
        raise CourseError(f"rewards: {setting} returned a {type(values).__name__}; {wanted}")
    try:
        listed = list(itertools.islice(values, count + 1))  # an endless one would never be whole
    except Exception as error:
        found = f"a {type(values).__name__}, which is no list ({describe(error)})"
        raise CourseError(f"rewards: {setting} returned {found}; {wanted}") from None
    if len(listed) != count:
        found = "more" if len(listed) > count else str(len(listed))
        raise CourseError(f"rewards: {setting} returned {found} for {count} completions; {wanted}")
    return [_float(value, setting, wanted) for value in listed]


def _float(value: Any, setting: str, wanted: str) -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except Exception:  # of a type of the user's
        number = math.nan
    if not math.isfinite(number):
        kind = type(value).__name__
        raise CourseError(f"rewards: {setting} returned a {kind} that is no finite number; {wanted}")
    return number
