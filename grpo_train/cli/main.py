"""The command line as a whole: its groups of commands, and how `grpo` ends.

A package above this one adds its commands by an entry point of the group `grpo.commands`, which names its `app`
(pyproject.toml); so grpo_teach's are there, and nothing here imports it.
"""

import functools
import importlib.metadata
import os
import sys
import traceback
from typing import Annotated, Any, NoReturn

import typer
import typer.exceptions

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_train.cli import evaluate, options, recipes, runs, tpu, train
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
    for module in (recipes, train, evaluate, runs, tpu):
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
    try:
        environment.prepare()
        code = command_line()(standalone_mode=False)
        if code == 130:  # typer's, after Ctrl-C
            print(f"interrupted; {RESUMABLE}", file=sys.stderr)
        _exit(code)
    except CourseError as error:
        print(f"error: {error}", file=sys.stderr)
        _exit(2)
    except typer.exceptions.TyperException as error:  # of the command line; without a message it has shown the help
        if message := error.format_message():
            command = context.command_path if (context := getattr(error, "ctx", None)) else "grpo"
            print(f"error: {message} {_removed(sys.argv[1:]) or f'See {command} --help.'}", file=sys.stderr)
        _exit(2)
    except Interrupted as reason:
        print(f"stopped by {reason}; {RESUMABLE}", file=sys.stderr)
        _exit(EXIT_CODE)
    except SystemExit as end:  # typer's, where nobody reads the output
        _exit(end.code)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package.startswith("grpo_"):  # a module of ours that is not there is a mistake of ours
            raise
        extra = EXTRAS.get(package, "train")
        target = "setup-tpu" if extra == "tpu" else "setup"
        print(
            f"error: {package} is not installed; it comes with the extra {extra}: pip install '.[{extra}]' in a clone, "
            f"or make {target} there",
            file=sys.stderr,
        )
        _exit(2)
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:  # a file that cannot be read or written
            print(f"error: {error.filename}: {error.strerror}; name another file or folder", file=sys.stderr)
            _exit(2)
        traceback.print_exc()
        _exit(1)


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
