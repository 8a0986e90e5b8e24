"""The process that runs a student's function.  grpo_teach.limited starts it: python -I -S -c SOURCE < task > results

It gets code and inputs, and never an expected value.  One line of JSON per call comes back: a value or an error.
What isolates it is grpo_lib.common.boundary, outside of it.  The audit hook in here is a second line: it ends plain
attempts with an error that says why, and code that knows it undoes it.
"""

import functools
import json
import os
import posix
import sys
from collections.abc import Callable
from typing import Any

# Events of Python's audit hooks that end with an error once the student's code runs.  Those that open or list a path
# are allowed for Python's own library and NumPy, which import parts of themselves late.
READS = ("open", "os.listdir", "os.scandir")
REFUSED = ("os.", "subprocess.", "socket.", "ctypes.", "shutil.", "pty.", "sqlite3.", "urllib.", "http.", "gc.")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def encode(value: Any) -> Any:
    """A value as JSON can hold it: arrays keep their dtype, tuples become lists.  Raises TypeError."""
    if isinstance(value, dict):
        return {"dict": {str(key): encode(one) for key, one in value.items()}}
    if isinstance(value, list | tuple):
        return [encode(one) for one in value]
    if type(value).__module__ == "numpy":
        if value.shape:
            return {"array": value.tolist(), "dtype": str(value.dtype)}
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a value of type {type(value).__name__} was returned")


def decode(value: Any) -> Any:
    """The inverse of `encode`; every call makes new lists and arrays."""
    if isinstance(value, list):
        return [decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        return {key: decode(one) for key, one in value["dict"].items()}
    import numpy as np

    return np.array(value["array"], value["dtype"])


def main() -> None:
    task = json.load(sys.stdin)
    results = os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    prints = 2 if task["own"] else nothing  # what the student's code prints is not a result
    for stream, place in enumerate((nothing, prints, prints)):
        os.dup2(place, stream)
    sys.path.append(task["packages"])
    import numpy

    sys.path.remove(task["packages"])  # NumPy and nothing else that is installed
    for name in ("mkfifo", "mknod"):  # these two have no audit event, and a FIFO lets whoever reads it wait for ever
        for module in (os, posix):
            if hasattr(module, name):
                delattr(module, name)
    sys.addaudithook(_refuse_all_but(os.path.dirname(os.__file__), os.path.dirname(numpy.__file__)))
    space: dict[str, Any] = {"__name__": "submission"}
    failed = _line(lambda: exec(compile(task["code"], "submission", "exec"), space), task["code"], uncalled=True)
    for function, harness, inputs in task["calls"]:
        called = functools.partial(_call, space, function, harness, inputs)
        line = failed if "error" in failed else _line(called, task["code"])
        results.write(line + "\n")
        results.flush()  # results before an endless loop count


def _call(space: dict[str, Any], function: str, harness: str, inputs: list[Any]) -> Any:
    import numpy as np

    if function not in space:
        raise NameError(f"there is no function {function}")
    tools: dict[str, Any] = {"np": np, "call": lambda student, *arguments: student(*arguments)}
    exec(harness, tools)
    name = harness.partition("def ")[2].partition("(")[0] or "call"
    return tools[name](space[function], *decode(inputs))


def _line(run: Callable[[], Any], code: str, uncalled: bool = False) -> str:
    """The line for a call; `uncalled` where an error comes before any call."""
    try:
        return json.dumps({"value": encode(run())})
    except BaseException as error:  # SystemExit and MemoryError as well
        told = error.msg if isinstance(error, SyntaxError) else str(error)  # without the line, which `_where` says
        said = (told.splitlines() or [""])[0][:200]
        reason = f"{type(error).__name__}: {said}".rstrip(": ")
        return json.dumps({"error": reason + _where(error, code, uncalled), "uncalled": uncalled})


def _where(error: BaseException, code: str, outermost: bool) -> str:
    """The deepest or outermost line of the student's code that an error went through, in brackets; "" without one."""
    numbers = [error.lineno] if isinstance(error, SyntaxError) and error.filename == "submission" else []
    step = error.__traceback__
    while step:
        if step.tb_frame.f_code.co_filename == "submission":
            numbers.append(step.tb_lineno)
        step = step.tb_next
    number = numbers[0 if outermost else -1] if numbers else None
    lines = code.splitlines()
    if number is None or not 0 < number <= len(lines):
        return ""
    return f" (line {number}: {lines[number - 1].strip()[:100]})"


def _refuse_all_but(library: str, package: str) -> Callable[[str, tuple], None]:
    """An audit hook: only Python's library, without the packages in it, and the folder of one package are read."""
    # As locals, like all that the hook needs: the student's code can change what the module holds.
    real, reads, refused, writing = os.path.realpath, READS, REFUSED, WRITES
    library, package = (real(folder) + "/" for folder in (library, package))

    def hook(event: str, arguments: tuple) -> None:
        if event in reads:
            path = arguments[0] if isinstance(arguments[0], str) else ""
            place = real(path) + "/"
            writes = event == "open" and (arguments[2] or 0) & writing
            own = place.startswith(library) and "-packages" not in place
            if writes or not (own or place.startswith(package)):
                name = "/".join(path.split("/")[-2:])  # students read this: no folders of the machine that grades
                raise PermissionError(f"only NumPy and Python's own library are read, not {name}")
        elif event.startswith(refused):
            raise PermissionError(f"the grader does not allow {event}")

    return hook


if __name__ == "__main__":
    main()
