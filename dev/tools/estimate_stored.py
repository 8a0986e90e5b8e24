"""Give stored preflights their estimates: compile again, at full effort, the programs that an estimate needs.

    .venv-tpu/bin/python dev/tools/estimate_stored.py           # all that have none, the smallest first
    .venv-tpu/bin/python dev/tools/estimate_stored.py NAME …    # these, in this order

A preflight of the whole recipe compiles more: prefill, vLLM's kernel, and the small programs of the bounds, which are
stored already.  Each result is written as soon as it is there, and what was compiled is kept in .cache/preflight.
Estimates that are stored are added up again, without a compiler.
"""

import argparse
import time

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import write_text_atomic
from grpo_train.recipes import Recipe, load_recipe
from grpo_train.tpu import preflight
from grpo_train.tpu.compile_jobs import Compilation
from grpo_train.tpu.compiler import Compiler

ROOT = environment.repo_root()
NEEDED = ("update", "logps", "decode")
# What tells a program from another: else `grpo preflight --output` makes the whole result anew.  Sizes may differ by
# this share, since what is logged and how gradients are clipped have changed.  The stored bytes stay.
SIZES = ("arguments", "outputs", "temporaries", "code")
SHARE = 0.005


def with_times(result: preflight.Result) -> preflight.Result:
    """The stored result with the times of its programs, and the estimate that follows from them."""
    recipe = _recipe(result)
    if preflight.digest(recipe) != result.digest:
        raise CourseError(f"{result.name}: the recipe has changed since; {result.command} makes the whole result anew")
    compiler = Compiler(recipe.training, recipe.grpo.iterations, _say)
    if compiler.versions != result.versions:
        raise CourseError(f"{result.name} was compiled by other versions: {result.versions}")
    wanted = {name: program for name, program in preflight.programs_of(recipe).items() if name in NEEDED}
    programs = []
    for stored in result.programs:
        if stored.kind in wanted:
            compilation = _timed(stored.compilation, compiler(wanted[stored.kind]))
            stored = stored.model_copy(update={"compilation": compilation})
        programs.append(stored)
    return _estimated(result.model_copy(update={"programs": tuple(programs)}))


def _recipe(result: preflight.Result) -> Recipe:
    return load_recipe(ROOT / result.command.removeprefix("grpo preflight "))


def _estimated(result: preflight.Result) -> preflight.Result:
    """As it follows from the times that the result has."""
    bare = result.model_copy(update={"estimate": None, "not_estimated": None})
    return preflight.with_estimate(_recipe(result), bare)


def _timed(stored: Compilation, made: Compilation) -> Compilation:
    for size in SIZES:
        before, now = getattr(stored, size), getattr(made, size)
        if abs(now - before) > SHARE * before:
            raise CourseError(f"not the stored program: {size} {before:,} and {now:,}")
    found = {name: getattr(made, name) for name in ("time", "not_estimated", "cpu_seconds")}
    return stored.model_copy(update=found)


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    results = {result.name: result for result in preflight.saved_results()}
    without = [result for result in results.values() if not result.estimate]
    smallest_first = sorted(without, key=lambda result: (result.trainer_devices, result.parameters))
    for result in results.values():
        if result.estimate:
            _write(_estimated(result))
    for result in [results[name] for name in arguments.names] or smallest_first:
        try:
            made = with_times(result)
        except CourseError as error:
            _say(f"{result.name}: {error}")
            continue
        _write(made)
        _say(f"{result.name}: {'estimated' if made.estimate else made.not_estimated}")


def _write(result: preflight.Result) -> None:
    write_text_atomic(ROOT / preflight.SAVED / f"{result.name}.json", result.model_dump_json(indent=1) + "\n")


if __name__ == "__main__":
    main()
