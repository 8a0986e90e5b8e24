"""Does a recipe fit its TPU, and what is the least a step can cost?  Asked before anything is rented.

    result = preflight(recipe, Compiler(recipe))     # grpo_lib.compilation; minutes
    print(table(result))
    results = saved_results()                        # assets/preflight, of the shipped recipes
    print(hardware_table(results))

`compile` is any function from a Program to a Compilation; nothing here imports JAX.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from grpo_lib import environment, memory, roofline
from grpo_lib.accelerators import parse_slice, slice_of
from grpo_lib.batch_plan import micro_batch_sizes
from grpo_lib.errors import CourseError
from grpo_lib.programs import GIB, SLICES, Compilation, Program, few_layers, programs_of
from grpo_lib.recipes import Recipe, load_recipe, parse_recipe

Compile = Callable[[Program], Compilation]
Changes = dict[str, Any]  # section.key -> value

# What a preflight does not read: values that change neither memory, nor the programs, nor their number.
INDIFFERENT = {
    "name", "seed", "problems", "prompts", "rewards", "evaluation", "tracking",
    "rollout.overlong_prompts", "rollout.top_p", "rollout.top_k", "grpo.epsilon",
    "training.learning_rate", "training.warmup_steps", "training.schedule", "training.b1", "training.b2",
    "training.weight_decay", "training.clip", "training.checkpoint_every", "training.keep", "training.validate_every",
    "training.checkpoints",
}  # fmt: skip

MICRO_BATCH = ("training.micro_batch_size", "training.micro_batch_per_device")
# What says a step's sizes, each in several ways; a preflight reads the plan.
BATCH = {
    "hardware.processes", "rollout.prompts_per_pass", "rollout.prompts_per_device",
    "training.prompts_per_step", "training.prompts_per_process", "training.prompts_per_device", *MICRO_BATCH,
}  # fmt: skip

SAVED = Path("assets") / "preflight"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Compiled(_Model):
    """A program of the trainer, and what the compiler said."""

    title: str
    says: Compilation


class Trial(_Model):
    """A change of the recipe that was compiled to see whether it fits."""

    changes: Changes
    fits: bool
    margin: int  # bytes, of the tightest chip
    problem: str | None = None


class Result(_Model):
    """What preflight found out about a recipe.  Bytes and work are per chip."""

    name: str
    command: str
    digest: str  # of the recipe's values that matter here
    versions: dict[str, str]
    accelerator: str
    devices: int
    trainer_devices: int
    sampler_devices: int
    colocated: bool
    parameters: int
    steps: int
    fits: bool
    problem: str | None  # why not
    margin: int  # bytes left on the tightest chip
    chips: tuple[memory.ChipMemory, ...]
    pool: memory.Pool
    programs: tuple[Compiled, ...]
    floor: roofline.Floor | None  # of a recipe that fits
    trials: tuple[Trial, ...] = ()
    remedy: Changes | None = None
    notes: tuple[str, ...] = ()

    @property
    def tightest(self) -> memory.ChipMemory:
        return min(self.chips, key=lambda chip: chip.margin)


def preflight(
    recipe: Recipe,
    compile: Compile,
    say: Callable[[str], None] = lambda text: None,
    *,
    quick: bool = False,
    command: str = "",
    versions: dict[str, str] | None = None,
) -> Result:
    """Compile a recipe's programs, add up the memory, and find changes that fit when it does not.

    Args:
      quick: compile with little effort.
      command: that a reader types to get the same result.
      versions: of the packages that compile.

    Raises CourseError when the recipe leaves open what has to be known, or cannot be compiled for another reason
    than memory.
    """
    result = examine(recipe, compile, quick=quick, command=command, versions=versions or {})
    if result.fits:
        return result.model_copy(update={"floor": _floor(recipe, compile, result)})
    say(f"does not fit: {result.problem}; trying changes")
    trials, remedy = find_remedy(recipe, result, compile, say, quick)
    return result.model_copy(update={"trials": tuple(trials), "remedy": remedy})


def examine(
    recipe: Recipe,
    compile: Compile,
    *,
    quick: bool = False,
    command: str = "",
    versions: dict[str, str] | None = None,
) -> Result:
    """Compile and add up, without a search for remedies and without the floor."""
    programs = programs_of(recipe, quick)
    compiled = {name: compile(program) for name, program in programs.items()}
    update = compiled["update"]
    chips, pool = memory.chips(recipe, update, compiled.get("logps"))
    problem = _problem(compiled, chips, pool)
    hardware = recipe.hardware
    return Result(
        name=recipe.name,
        command=command,
        digest=digest(recipe),
        versions=versions or {},
        accelerator=hardware.accelerator,
        devices=hardware.slice.devices,
        trainer_devices=hardware.trainer_count(),
        sampler_devices=hardware.sampler_count(),
        colocated=hardware.colocated,
        parameters=update.parameters,
        steps=recipe.training.steps,
        fits=problem is None,
        problem=problem,
        margin=min(chip.margin for chip in chips),
        chips=tuple(chips),
        pool=pool,
        programs=tuple(Compiled(title=programs[name].title, says=says) for name, says in compiled.items()),
        floor=None,
        notes=tuple(_notes(recipe, programs["update"], update, chips[0], pool)),
    )


def _problem(compiled: dict[str, Compilation], chips: list[memory.ChipMemory], pool: memory.Pool) -> str | None:
    """Why a recipe does not fit, or None."""
    for name, says in compiled.items():
        if says.refused is not None:
            what = {"update": "policy update", "logps": "log-probabilities"}[name]
            return f"the compiler refuses the {what}: {says.refused}"
    tightest = min(chips, key=lambda chip: chip.margin)
    if tightest.margin < 0:
        return (
            f"a chip that {tightest.role} would need {tightest.largest / GIB:.2f} GiB during {tightest.phase} "
            f"and has {tightest.usable / GIB:.2f}"
        )
    if pool.sequences < 1:
        return f"the KV cache would hold {pool.tokens} tokens, less than one sequence"
    return None


def _notes(
    recipe: Recipe, update: Program, says: Compilation, trainer: memory.ChipMemory, pool: memory.Pool
) -> Iterator[str]:
    if update.quick:
        yield "compiled with little effort (--quick): temporaries are a few per cent off"
    if update.loss != "jax":
        yield "the floor is that of loss.implementation=jax: the compiler does not count inside a kernel"
    if update.accelerator != recipe.hardware.accelerator:
        yield (
            f"the trainer's {update.devices} of {recipe.hardware.slice.devices} chips were compiled as a "
            f"{update.accelerator}: the same chips, without their neighbours"
        )
    elif update.devices < recipe.hardware.slice.devices:
        yield f"the trainer's chips are the first {update.devices} of {recipe.hardware.accelerator}"
    updates = recipe.plan.accumulation_steps * recipe.grpo.iterations
    ahead = says.parameter_shard - trainer.usable + trainer.total("update")
    if updates > 1 and trainer.margin >= 0 and ahead > 0:
        yield (
            "Tunix starts the next update before the last has ended; a runtime that then held the weights three times "
            f"would be {ahead / GIB:.2f} GiB short"
        )
    if pool.sequences < pool.wanted:
        yield (
            f"the KV cache holds {pool.sequences} sequences of full length; a replica is given {pool.wanted} at once, "
            "so some may wait"
        )


def _floor(recipe: Recipe, compile: Compile, result: Result) -> roofline.Floor:
    facts = result.programs[0].says
    work = {
        name: roofline.whole_model([compile(part) for part in few_layers(program)], facts.num_layers)
        for name, program in programs_of(recipe).items()
    }
    return roofline.floor(recipe, facts, work["update"], work.get("logps"))


def largest_micro_batch(
    recipe: Recipe, compile: Compile, say: Callable[[str], None] = lambda text: None, *, quick: bool = False
) -> int | None:
    """The most completions of one gradient computation that fit, of those that divide the step; None where none fits.

    Found by halving: what fits, fits with less.
    """
    sizes = micro_batch_sizes(recipe.plan)
    fitting, beyond = -1, len(sizes)
    while beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        changed = with_changes(recipe, {"training.micro_batch_size": sizes[middle], MICRO_BATCH[1]: None})
        say(f"trying a micro-batch of {sizes[middle]} completions")
        fits = examine(changed, compile, quick=quick).fits
        fitting, beyond = (middle, beyond) if fits else (fitting, middle)
    return sizes[fitting] if fitting >= 0 else None


# What to change when a recipe does not fit.


def find_remedy(
    recipe: Recipe,
    result: Result,
    compile: Compile,
    say: Callable[[str], None] = lambda text: None,
    quick: bool = False,
) -> tuple[list[Trial], Changes | None]:
    """Try changes, those first that cost least, until one fits; (all trials, the changes that fit or None).

    A change that helps but is not enough stays while the next ones are tried.
    """
    trials: list[Trial] = []
    changes: Changes = {}
    for candidates in REMEDIES:
        for change in candidates(recipe, result):
            try:
                changed = with_changes(recipe, change)
            except CourseError:
                continue  # a combination that the recipe's own rules exclude
            say("trying " + spelled(changes | change))
            trial = examine(changed, compile, quick=quick)
            trials.append(Trial(changes=changes | change, fits=trial.fits, margin=trial.margin, problem=trial.problem))
            if trial.fits:
                return trials, changes | change
            if not _better(trial, result):
                break
            recipe, result, changes = changed, trial, changes | change
    return trials, None


def with_changes(recipe: Recipe, changes: Changes) -> Recipe:
    """The recipe with other values.  Raises CourseError when it does not allow them."""
    data = recipe.model_dump()
    for key, value in changes.items():
        *sections, name = key.split(".")
        place = data
        for section in sections:
            place = place[section]
        place[name] = value
    return parse_recipe(data)


def spelled(changes: Changes) -> str:
    """Changes as one types them."""
    return " ".join(f"{key}={'null' if value is None else value}" for key, value in changes.items())


def _better(trial: Result, result: Result) -> bool:
    def refused(one: Result) -> int:
        return sum(program.says.refused is not None for program in one.programs)

    return (refused(trial), -trial.margin) < (refused(result), -result.margin)


def _trains(result: Result) -> bool:
    """Whether programs of the trainer are what does not fit, and would if they took less."""
    refused = any(program.says.refused is not None for program in result.programs)
    chip = result.chips[0]
    if not refused and chip.margin >= 0:
        return False
    return sum(line.bytes for line in chip.lines if line.stays) < chip.usable


def _micro_batches(recipe: Recipe, result: Result) -> Iterator[Changes]:
    """Fewer completions at a time: half, a quarter, … as long as they are whole groups and spread over the devices."""
    now, possible = recipe.plan.micro_batch_size, micro_batch_sizes(recipe.plan)
    if not _trains(result):
        return
    while now % 2 == 0 and now // 2 in possible:
        now //= 2
        yield _micro_batch(recipe, now)


def _micro_batch(recipe: Recipe, completions: int) -> Changes:
    """The change that gives a micro-batch so many completions, in the recipe's own key."""
    if recipe.training.micro_batch_per_device:
        return {"training.micro_batch_per_device": completions // recipe.plan.trainer_shards}
    return {"training.micro_batch_size": completions}


def _remat(recipe: Recipe, result: Result) -> Iterator[Changes]:
    if recipe.model.remat != "full" and _trains(result):
        yield {"model.remat": "full"}


def _memory_fraction(recipe: Recipe, result: Result) -> Iterator[Changes]:
    """Less for the KV cache where memory is short, as long as it holds a sequence; more where it holds none."""
    fraction = recipe.rollout.vllm.memory_fraction
    if recipe.rollout.engine != "vllm" or recipe.rollout.vllm.kv_blocks:
        return
    usable = result.chips[-1].usable
    if result.pool.sequences < 1:
        while fraction < 0.9:
            fraction = round(fraction + 0.1, 2)
            yield {"rollout.vllm.memory_fraction": fraction}
    elif result.chips[-1].margin < 0:
        missing = -result.chips[-1].margin / usable
        lower = int((fraction - missing) * 100) / 100
        if lower > 0:
            yield {"rollout.vllm.memory_fraction": lower}


def _tensor(recipe: Recipe, result: Result) -> Iterator[Changes]:
    """Each sequence over two chips, or four: its activations are halved, and so is the number of fsdp shards."""
    if not _trains(result):
        return
    for tensor in (2, 4):
        if tensor > recipe.hardware.trainer_tensor:
            yield {"hardware.trainer_tensor": tensor}


def _shorter(recipe: Recipe, result: Result) -> Iterator[Changes]:
    if _trains(result) or result.pool.sequences < 1:
        yield {"rollout.max_completion_length": recipe.rollout.max_completion_length // 2}


def _larger_slice(recipe: Recipe, result: Result) -> Iterator[Changes]:
    """Twice the chips, and twice again; with them the parts of the slice, and a micro-batch too small for them.

    The step stays as large as it is, so sizes that count by process or device are said for all together.
    """
    hardware, chip, plan = recipe.hardware, recipe.hardware.slice.chip, recipe.plan
    for times in (2, 4):
        if hardware.slice.devices * times not in SLICES[chip.generation]:
            continue
        change = {"hardware.accelerator": slice_of(chip.generation, hardware.slice.devices * times)}
        for name in ("trainer_devices", "sampler_devices"):
            if count := getattr(hardware, name):
                change[f"hardware.{name}"] = count * times
        if hardware.processes:
            change["hardware.processes"] = None  # as many as the larger slice has hosts
        change |= _said_together(recipe)
        try:
            larger = with_changes(recipe, change | dict.fromkeys(MICRO_BATCH)).plan
        except CourseError:
            continue  # the step is too small for so many chips
        even = [size for size in micro_batch_sizes(larger) if size >= plan.micro_batch_size]
        if recipe.training.micro_batch_per_device:
            change |= {"training.micro_batch_per_device": None, "training.micro_batch_size": even[0]}
        elif even[0] != plan.micro_batch_size:
            change["training.micro_batch_size"] = even[0]
        yield change


def _said_together(recipe: Recipe) -> Changes:
    """The changes that say a step's and a pass's prompts for all processes together, where the recipe does not."""
    change: Changes = {}
    for key in ("training.prompts_per_process", "training.prompts_per_device"):
        if key in recipe.batch_given:
            change |= {key: None, "training.prompts_per_step": recipe.plan.prompts_per_step}
    if recipe.rollout.prompts_per_device:
        change |= {"rollout.prompts_per_device": None, "rollout.prompts_per_pass": recipe.plan.prompts_per_pass}
    return change


REMEDIES = (_micro_batches, _remat, _memory_fraction, _tensor, _shorter, _larger_slice)


# What a person reads.


def table(result: Result, price: float | None = None) -> str:
    """The result as text.

    Args:
      price: of a chip for an hour, in whatever currency.
    """
    split = (
        f"{result.trainer_devices} that train and sample"
        if result.colocated
        else f"{result.trainer_devices} that train, {result.sampler_devices} that sample"
    )
    lines = [
        f"{result.name} on {result.accelerator}: {result.devices} chips, {split}; "
        f"{result.parameters / 1e9:.2f} billion parameters"
    ]
    for chip in result.chips:
        lines += ["", *_chip_table(chip)]
    lines += ["", _verdict(result)]
    if result.floor:
        lines += ["", *_floor_table(result, price)]
    lines += [f"note: {note}" for note in result.notes]
    return "\n".join(lines)


def _chip_table(chip: memory.ChipMemory) -> Iterator[str]:
    width = max(len(line.name) for line in chip.lines) + 2
    yield f"A chip that {chip.role}, GiB:"
    for stays in (True, False):
        yield "  stays" if stays else "  comes and goes"
        for line in chip.lines:
            if line.stays == stays:
                yield f"    {line.name:<{width}}{line.bytes / GIB:>7.2f}  {line.origin}: {line.how}"
    yield "  together, by phase"
    for phase in chip.phases:
        mark = "  <- the most" if phase == chip.phase else ""
        yield f"    {phase:<{width}}{chip.total(phase) / GIB:>7.2f}{mark}"
    yield f"    {'usable':<{width}}{chip.usable / GIB:>7.2f}  where libtpu begins to refuse"


def _verdict(result: Result) -> str:
    if result.fits:
        return f"FITS: {result.margin / GIB:.2f} GiB left on the tightest chip"
    lines = [f"DOES NOT FIT: {result.problem}"]
    for trial in result.trials:
        after = f"fits, {trial.margin / GIB:.2f} GiB left" if trial.fits else f"does not fit ({trial.problem})"
        lines.append(f"  {'change' if trial.fits else 'tried'} {spelled(trial.changes)}: {after}")
    if result.remedy is None:
        lines.append("  no change that was tried fits; take a larger slice or a smaller model")
    return "\n".join(lines)


def _floor_table(result: Result, price: float | None) -> Iterator[str]:
    chip = parse_slice(result.accelerator).chip
    yield (
        f"Floor of a step, in seconds, at {chip.flops / 1e12:.0f} TFLOP/s and {chip.bandwidth / 1e9:.0f} GB/s a chip "
        f"({chip.source}):"
    )
    for part in result.floor.parts:
        each = f"{part.times} x {part.seconds / part.times:.4f}, {part.bound}-bound"
        yield f"    {part.name:<20}{part.seconds:>9.3f}  {each}"
    yield f"    {'together':<20}{result.floor.seconds:>9.3f}  with completions of full length"
    yield (
        "  No traffic between chips, no weight sync, no host work is counted; decoding reads the weights once for each "
        "token of the longest completion, and completions that end earlier decode faster."
    )
    hours = result.floor.chip_hours
    yield (
        f"Cost: chips x steps x seconds per step / 3600 x your price per chip-hour; at the floor "
        f"{result.devices} x {result.steps} x {result.floor.seconds:.3f} / 3600 = {hours:.2f} chip-hours"
        + (f" x {price:g} = {hours * price:.2f}" if price is not None else "")
        + ", before evaluation, compilation and waiting."
    )


def hardware_table(results: list[Result]) -> str:
    """A Markdown table of results, for a README."""
    rows = [
        "| recipe | slice | chips that train / sample | GiB on the fullest chip | of usable | left | "
        "floor of a step at full length, s | of the run, chip-hours |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for result in results:
        chip = result.tightest
        split = (
            f"{result.trainer_devices}, both"
            if result.colocated
            else (f"{result.trainer_devices} / {result.sampler_devices}")
        )
        floor = (f"{result.floor.seconds:.2f}", f"{result.floor.chip_hours:.2g}") if result.floor else ("-", "-")
        rows.append(
            f"| {result.name} | {result.accelerator} | {split} | {chip.largest / GIB:.1f} | {chip.usable / GIB:.1f} | "
            f"{chip.margin / GIB:.1f} | {floor[0]} | {floor[1]} |"
        )
    return "\n".join(rows)


# Results of the shipped recipes.


def digest(recipe: Recipe) -> str:
    """Changes with every value of a recipe that a preflight depends on, however the recipe says it."""
    data = recipe.model_dump(mode="json")
    for key in INDIFFERENT | BATCH:
        section, _, name = key.partition(".")
        (data[section] if name else data).pop(name or section)
    # One spelling of the batch: prompts, with null for the whole step.
    plan = recipe.plan
    data["training"]["prompts_per_step"] = plan.prompts_per_step
    data["training"]["micro_batch"] = plan.micro_batch_prompts if plan.accumulation_steps > 1 else None
    if plan.passes > 1:
        data["rollout"]["prompts_per_pass"] = plan.prompts_per_pass
    data["grpo"]["beta"] = data["grpo"]["beta"] > 0
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def saved_results(folder: Path | None = None) -> list[Result]:
    """The results in assets/preflight of recipes that fit, by name; those named refused-* are examples of the other."""
    folder = folder or environment.repo_root() / SAVED
    return [read_result(path) for path in sorted(folder.glob("*.json")) if not path.name.startswith("refused-")]


def saved_result(recipe: Recipe, folder: Path | None = None) -> Result:
    """The saved result of a shipped recipe.

    Raises CourseError when there is none, or the recipe has changed since.
    """
    path = (folder or environment.repo_root() / SAVED) / f"{recipe.name}.json"
    remedy = f"run grpo preflight on it with --output {SAVED / path.name}"
    if not path.is_file():
        raise CourseError(f"{SAVED / path.name} does not exist; {remedy}")
    result = read_result(path)
    if result.digest != digest(recipe):
        raise CourseError(f"recipe {recipe.name} has changed since {SAVED / path.name} was made; {remedy}")
    return result


def read_result(path: Path) -> Result:
    return Result.model_validate_json(path.read_text(encoding="utf-8"))


def shipped_recipes(folder: Path | None = None) -> dict[str, Recipe]:
    """Every recipe that ships with a slice, and its profiles, by what one types after `grpo preflight`."""
    folder = folder or environment.repo_root() / "recipes"
    return {spec: recipe for spec in _specs(folder) if (recipe := load_recipe(folder / spec)).hardware.accelerator}


def _specs(folder: Path) -> Iterator[str]:
    from grpo_lib.recipes import profiles_of

    for path in sorted(folder.glob("*.yaml")):
        profiles = profiles_of(path)
        yield path.name
        for profile in profiles:
            yield f"{path.name}@{profile}"
        if {"v5p-8", "g8"} <= set(profiles):
            yield f"{path.name}@v5p-8,g8"
