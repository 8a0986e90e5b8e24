"""An adapter from a file of the user's: FILE.py:NAME."""

import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from grpo_lib.common.errors import CourseError, first_line
from grpo_lib.conformance.suite import Adapter

EXAMPLE = "def NAME(case, variant)"


def load(setting: str) -> Adapter:
    """The adapter of a setting FILE.py:NAME.  The file can import its neighbours, as when it is run.

    Raises CourseError where there is no such file or function, or the file cannot be run.
    """
    file, _, name = setting.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not file.endswith(".py") or not name.isidentifier():
        raise CourseError(f"{setting} names no adapter; write FILE.py:NAME, such as my_loss.py:adapter")
    if not path.is_file():
        raise CourseError(f"{file} is not there; give a file relative to here")
    specification = importlib.util.spec_from_file_location(f"conformance_adapter_{path.stem}", path)
    assert specification and specification.loader  # as it ends in .py
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # dataclasses look there
    sys.path.insert(0, str(path.parent))
    try:
        specification.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise CourseError(f"{file} needs {error.name}; run the command in an environment that has it") from error
    except (Exception, SystemExit) as error:
        raise CourseError(f"{file} cannot be run: {type(error).__name__}: {first_line(error)}; correct it") from error
    found: Any = vars(module).get(name)
    example = EXAMPLE.replace("NAME", name)
    if not callable(found):
        raise CourseError(f"{file} has no function {name}; write {example} there")
    try:
        inspect.signature(found).bind("case", "variant")
    except TypeError:
        raise CourseError(f"{setting} does not take a case and a variant; write {example}") from None
    adapter: Any = found  # what it returns is checked at each call
    return adapter
