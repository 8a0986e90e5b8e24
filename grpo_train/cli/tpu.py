"""`grpo preflight`, `grpo smoke-test` and `grpo self-check`: before a TPU is rented, and in its first minutes."""

import dataclasses
import importlib.util
import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import write_json_atomic, write_text_atomic
from grpo_train.cli.options import (
    AsJson,
    Base,
    Coordinator,
    Overrides,
    Overwrite,
    Processes,
    ProcessNumber,
    RecipePath,
    RunsFolder,
    commands,
    finish,
    log_for,
    process_count,
    program,
)  # fmt: skip
from grpo_train.recipes import load_recipe

app = commands()


@app.command()
def preflight(
    recipe: RecipePath,
    overrides: Overrides = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Low compiler optimization effort: a third of the time, rougher sizes."),
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write the result, as JSON, to this file.")] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="A table: each KEY=VALUE[,VALUE] is a change of its own, KEY=A+KEY=B is one."),
    ] = False,
    price: Annotated[
        str | None,
        typer.Option(help="Of a chip-hour, such as 2.7 or v6e=2.7,v5p=4.2; without it the estimate names no money."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compile the recipe for its TPU, without one: HBM fit per chip, bounds and an estimate of step time.

    Takes minutes per program; compiled programs are cached in .cache/preflight until you remove it. Exit code 0: the
    recipe fits; 1: it does not, and hints say what to change first; 2: it cannot be determined.
    """
    from grpo_train.engines import model_files
    from grpo_train.tpu import change_table, compiler, preflight

    prices = change_table.prices_of(price)
    compiler.prepare()  # also where all is compiled already: update_applied is by JAX, which would look for a TPU
    if compare:
        if output:
            raise CourseError("--compare makes a table of changes; leave out --output")
        _compare(recipe, overrides or [], quick, as_json, prices)
        return
    resolved = load_recipe(recipe, overrides or ())
    model_files.require_path(resolved.model)
    # Standard output is the result's.
    compile_program = compiler.Compiler(resolved.training, resolved.grpo.iterations, log_for(True))
    result = preflight.preflight(
        resolved,
        compile_program,
        quick=quick,
        command=shlex.join(["grpo", "preflight", str(recipe), *(overrides or ()), *(["--quick"] if quick else [])]),
        versions=compile_program.versions,
    )
    if not quick:
        preflight.keep_result(resolved, result)
    if output:
        write_text_atomic(output, result.model_dump_json(indent=1) + "\n")
    of_slice = change_table.price_of(result.accelerator, prices)
    finish(result.model_dump(mode="json"), as_json, preflight.table(result, of_slice))
    raise typer.Exit(0 if result.fits else 1)


def _compare(recipe: Path, changes: list[str], quick: bool, as_json: bool, prices: dict[str, float]) -> None:
    """A table of changes; one that is not possible is a line of it."""
    from grpo_train.tpu import change_table, compiler, preflight

    results: dict[str, preflight.Result | CourseError] = {}
    for name, overrides in change_table.variants_of(changes):
        try:
            resolved = load_recipe(recipe, overrides)
            compile_program = compiler.Compiler(resolved.training, resolved.grpo.iterations, log_for(True))
            results[name] = preflight.preflight(resolved, compile_program, quick=quick)
        except CourseError as error:
            results[name] = error
    rows = [change_table.row(name, result, prices) for name, result in results.items()]
    named = [dict(zip(change_table.HEADINGS, cells, strict=False)) for cells in rows]
    finish({"changes": named}, as_json, change_table.table(rows))


@app.command()
def smoke_test(
    recipe: RecipePath,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 2,
    engine: Annotated[
        Literal["auto", "tunix", "vllm"],
        typer.Option(help="auto (the recipe's, where it can run here), tunix or vllm."),
    ] = "auto",
    run: Annotated[str | None, typer.Option("--run", help="Name of the run; default: smoke-test-NAME.")] = None,
    runs: RunsFolder = Path("runs"),
    overwrite: Overwrite = False,
    base: Base = None,
    as_json: AsJson = False,
) -> None:
    """Run a recipe with two small models and two steps, on virtual CPU devices with its mesh axes scaled down.

    First a random model of the recipe's own architecture, then the tiny trained model: each goes through grpo train,
    from conversion to the report.  Processes of
    their own do it; a TPU on this machine is not used.  What is scaled is listed first.  Not covered: speed and memory.
    """
    from grpo_train.tpu import smoke_test

    original = load_recipe(recipe, overrides or ())
    scaled = smoke_test.scaled_recipe(
        original,
        steps=steps,
        engine=smoke_test.choose_engine(original, engine),
        gsm8k=smoke_test.gsm8k_folder(original),
        placeholders=smoke_test.placeholders(original),
        wandb=importlib.util.find_spec("wandb") is not None,
    )
    log, devices = log_for(as_json), smoke_test.device_count(scaled)
    count, whole = scaled.hardware.process_count(), original.hardware.process_count()
    processes = f" in {count} processes (the recipe has {whole})" if count > 1 else ""
    remarks = [f"note: {note}" for note in smoke_test.notes(original, scaled)]
    title = f"smoke test of {original.name} on {devices} virtual CPU devices{processes}; scaled down:"
    log("\n".join([title, *(f"  {line}" for line in smoke_test.changes(original, scaled)), *remarks]))
    result = smoke_test.run(original, scaled, runs / (run or scaled.name), overwrite=overwrite, base=base, log=log)
    finish(dataclasses.asdict(result), as_json, "\n".join([*remarks, smoke_test.verdict(result)]))
    raise typer.Exit(0 if result.passed else result.exit_code or 1)


@app.command()
def self_check(
    recipe: RecipePath,
    overrides: Overrides = None,
    runs: RunsFolder = Path("runs"),
    coordinator: Coordinator = None,
    process: ProcessNumber = None,
    processes: Processes = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine for a recipe before hours are spent: packages, chips, disk, model, and a short training.

    The training has random weights of the recipe's widths in two layers, is stopped with SIGTERM and continued.  Of
    several hosts, run it on each.  Without a TPU everything is checked that needs none.  The result is also in
    RUNS/self-check-NAME.json; exit code 1: a check failed.
    """
    from grpo_train.engines import model_files
    from grpo_train.tpu import self_check

    resolved = load_recipe(recipe, overrides or ())
    model_files.require_path(resolved.model)
    count = process_count(resolved, coordinator, process, processes)
    checks = self_check.run(
        resolved, runs, processes=count, coordinator=coordinator, process=process, log=log_for(as_json)
    )
    passed = not self_check.failed(checks)
    result = {"recipe": resolved.name, "passed": passed, "checks": [dataclasses.asdict(check) for check in checks]}
    write_json_atomic(runs / f"self-check-{resolved.name}.json", result)
    following = shlex.join([program(), "train", str(recipe), *(overrides or ()), "--runs", str(runs)])
    finish(result, as_json, self_check.page(resolved, checks) + f"\nnext: {following}" * passed)
    raise typer.Exit(0 if passed else 1)
