"""The command line as a whole: its groups of commands, and how `grpo` ends.

A package above this one adds its commands by an entry point of the group `grpo.commands`, which names its `app`
(pyproject.toml); so grpo_teach's are there, and nothing here imports it.
"""

import functools
import importlib.metadata
import io
import os
import sys
import traceback
from typing import Annotated, Any, NoReturn

import typer
import typer.exceptions

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError, one_line
from grpo_train.cli import conformance, evaluate, options, recipes, runs, tpu, train
from grpo_train.runs.preemption import EXIT_CODE, Interrupted

# What is gone from the command line, and what to do instead: the error of such a command line ends with it.
REMOVED = {
    "evaluate --endpoint": "save what the server answers, and grade the file with --completions FILE",
    "config --as plan": "grpo config RECIPE has the plan in its comments",
    "preflight --refresh": "to compile again, remove .cache/preflight",
    "preflight --largest-micro-batch": "give sizes to try: grpo preflight RECIPE training.micro_batch_size=N",
}
# A package that is missing, by its name in an import -> the extra that brings it; of all others: train.
EXTRAS = {
    **dict.fromkeys(("libtpu", "tpu_inference", "vllm", "wandb"), "tpu"),
    **dict.fromkeys(("nbformat", "nbgrader", "pandas"), "teach"),
}
RESUMABLE = "finished work of a run or an --output is kept; the same command continues it"


@functools.cache
def command_line() -> typer.Typer:
    """All commands of `grpo`."""
    app = options.commands()
    app.callback()(_options)
    for module in (recipes, train, evaluate, runs, conformance, tpu):
        app.add_typer(module.app)
    for entry_point in importlib.metadata.entry_points(group="grpo.commands"):
        app.add_typer(entry_point.load())
    return app


def _show_version(asked: bool) -> None:
    if asked:
        print(importlib.metadata.version("grpo-hands-on"))
        raise typer.Exit()


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


def main() -> None:
    """Entry point: a CourseError is one line on stderr and exit code 2; after a SIGTERM it is 75."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a terminal may lack a character of an answer
    try:
        environment.prepare()
        code = command_line()(standalone_mode=False)
    except SystemExit as end:  # typer's, where nobody reads the output
        _exit(end.code)
    except Exception as error:
        _exit(_explain(error))
    if code == 130:  # typer's, after Ctrl-C
        print(f"interrupted; {RESUMABLE}", file=sys.stderr)
    _exit(code)


def _explain(error: Exception) -> int:
    """Say in one line what was wrong, or show where a mistake of ours is; return the exit code."""
    if isinstance(error, Interrupted):
        print(f"stopped by {error}; {RESUMABLE}", file=sys.stderr)
        return EXIT_CODE
    text = _sentence(error)
    if text is None:
        traceback.print_exception(error)
        return 1
    if text:
        print(f"error: {one_line(text)}", file=sys.stderr)
    return 2


def _sentence(error: Exception) -> str | None:
    """What is wrong and what to do; empty where that was said already, None where the mistake is not the user's."""
    if isinstance(error, CourseError):
        return str(error)
    if isinstance(error, typer.exceptions.TyperException):  # of the command line
        return _of_the_command_line(error)
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("grpo_"):
        package = str(error.name).partition(".")[0]
        extra = EXTRAS.get(package, "train")
        target = "setup-tpu" if extra == "tpu" else "setup"
        brings = f"it comes with the extra {extra}: pip install '.[{extra}]' in a clone, or make {target} there"
        return f"{package} is not installed; {brings}"
    if isinstance(error, OSError) and error.filename is not None:  # a file that cannot be read or written
        return f"{error.filename}: {error.strerror}; name another file or folder"
    return None


def _of_the_command_line(error: typer.exceptions.TyperException) -> str:
    message = error.format_message()
    if not message:  # it has shown the help
        return ""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "grpo"
    return f"{message} {_removed(sys.argv[1:]) or f'See {command} --help.'}"


def _removed(arguments: list[str]) -> str | None:
    """What to do instead, where the arguments have an option, or a value of one, that was removed."""
    words = {part for argument in arguments for part in argument.split("=")}
    for command_line, instead in REMOVED.items():
        if words.issuperset(command_line.split()):
            return f"It was removed: {instead}."
    return None


def _exit(code: Any) -> NoReturn:
    """Exit; without cleaning up while other processes are connected: at exit JAX would wait for those that are lost."""
    multihost = sys.modules.get("grpo_train.runs.multihost")
    if code and multihost and multihost.is_distributed():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
