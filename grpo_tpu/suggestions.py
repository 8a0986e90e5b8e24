"""Changes that make a recipe fit its TPU: each is compiled before it is suggested.

    trials, suggestion = find_suggestion(recipe, result, examine)
    print(format_changes(suggestion))     # training.micro_batch_size=32

`examine` is a function from a Recipe to a preflight.Result.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from grpo_lib.common.errors import CourseError
from grpo_tpu.compile_jobs import Frozen
from grpo_train.recipes import Recipe, parse_recipe
from grpo_train.recipes.batch_plan import micro_batch_sizes
from grpo_train.recipes.slices import SLICE_SIZES, slice_of

if TYPE_CHECKING:
    from grpo_tpu.memory import ChipMemory
    from grpo_tpu.preflight import Result

Changes = dict[str, Any]  # section.key -> value
Examine = Callable[[Recipe], "Result"]
Log = Callable[[str], None]

MICRO_BATCH = ("training.micro_batch_size", "training.micro_batch_size_per_device")
ROLLOUT = ("rollout.micro_batch_size", "rollout.micro_batch_size_per_device")


class Trial(Frozen):
    """A change of the recipe that was compiled to see whether it fits."""

    changes: Changes
    fits: bool
    margin: int  # bytes, of the tightest chip
    problem: str | None = None


def find_suggestion(
    recipe: Recipe, result: Result, examine: Examine, log: Log = lambda text: None
) -> tuple[list[Trial], Changes | None]:
    """Try changes, the cheapest first, until one fits; (all trials, the changes that fit or None).

    A change that helps but is not enough is kept while the next ones are tried.
    """
    trials: list[Trial] = []
    changes: Changes = {}
    for candidates in CANDIDATES:
        for change in candidates(recipe, result):
            try:
                changed = with_changes(recipe, change)
                log("trying " + format_changes(changes | change))
                trial = examine(changed)
            except CourseError:
                continue  # a combination that the recipe's own rules, or the wiring of the slice, exclude
            trials.append(Trial(changes=changes | change, fits=trial.fits, margin=trial.margin, problem=trial.problem))
            if trial.fits:
                return trials, changes | change
            if (_out_of_memory(trial), -trial.margin) >= (_out_of_memory(result), -result.margin):
                break  # no better
            recipe, result, changes = changed, trial, changes | change
    return trials, None


def largest_micro_batch(recipe: Recipe, examine: Examine, log: Log = lambda text: None) -> int | None:
    """The most completions of one gradient computation that fit, of those that divide the step; None: none fits."""

    def too_large(size: int) -> bool:
        log(f"trying a micro-batch of {size} completions")
        return not examine(with_changes(recipe, {MICRO_BATCH[0]: size, MICRO_BATCH[1]: None})).fits

    sizes = micro_batch_sizes(recipe.plan)
    fitting = bisect.bisect_left(sizes, True, key=too_large)
    return sizes[fitting - 1] if fitting else None


def with_changes(recipe: Recipe, changes: Changes) -> Recipe:
    """The recipe with other values.  Raises CourseError when the schema does not allow them."""
    data = recipe.model_dump()
    for key, value in changes.items():
        *sections, name = key.split(".")
        section = data
        for part in sections:
            section = section[part]
        section[name] = value
    return parse_recipe(data)


def format_changes(changes: Changes) -> str:
    """Changes as typed on a command line."""
    return " ".join(f"{key}={'null' if value is None else value}" for key, value in changes.items())


SAMPLER = ("prefill", "decode")  # kinds of Tunix's sampler's programs


def _out_of_memory(result: Result, *, sampler: bool | None = None) -> int:
    """How many programs the compiler found no room for; of the sampler, of the others, or of both."""
    return sum(
        program.compilation.oom_message is not None and sampler in (None, program.kind in SAMPLER)
        for program in result.programs
    )


def _too_large(chip: ChipMemory, phases: tuple[str, ...], out_of_memory: int) -> bool:
    """Whether a chip has no room for one of the phases, and would if its transient memory were smaller."""
    persistent = sum(line.bytes for line in chip.lines if line.persistent)
    missing = out_of_memory or any(chip.total(phase) > chip.usable for phase in phases)
    return bool(missing) and persistent < chip.usable


def _trainer_too_large(result: Result) -> bool:
    chip = result.chips[0]
    # What vLLM keeps is there in the other phases too.
    phases = ("log-probabilities", "update") if _tunix(result) else chip.phases
    return _too_large(chip, phases, _out_of_memory(result, sampler=False))


def _sampler_too_large(result: Result) -> bool:
    return _tunix(result) and _too_large(result.chips[-1], ("sampling",), _out_of_memory(result, sampler=True))


def _tunix(result: Result) -> bool:
    """Whether Tunix's sampler was compiled."""
    return any(program.kind in SAMPLER for program in result.programs)


# Candidates: each yields changes of one kind, the smallest first.


def _micro_batches(recipe: Recipe, result: Result) -> Iterator[Changes]:
    """Fewer completions at a time: half, a quarter, … as long as they are whole groups and spread over the devices."""
    now, possible = recipe.plan.micro_batch_size, micro_batch_sizes(recipe.plan)
    per_device = bool(recipe.training.micro_batch_size_per_device)
    while _trainer_too_large(result) and now % 2 == 0 and now // 2 in possible:
        now //= 2
        yield {MICRO_BATCH[per_device]: now // (recipe.plan.trainer_replicas if per_device else 1)}


def _rollout_micro_batches(recipe: Recipe, result: Result) -> Iterator[Changes]:
    """Fewer prompts sampled at once: half, a quarter, … as long as each process has as many."""
    plan = recipe.plan
    now, per_device = plan.rollout_micro_batch_size, bool(recipe.rollout.micro_batch_size_per_device)
    while _sampler_too_large(result) and now % (2 * plan.processes) == 0:
        now //= 2
        if not per_device:
            yield {ROLLOUT[0]: now}
        elif now % plan.sampler_replicas == 0:
            yield {ROLLOUT[1]: now // plan.sampler_replicas}
        else:
            yield {ROLLOUT[1]: None, ROLLOUT[0]: now}


def _remat(recipe: Recipe, result: Result) -> Iterator[Changes]:
    if recipe.model.remat != "full" and _trainer_too_large(result):
        yield {"model.remat": "full"}


def _memory_fraction(recipe: Recipe, result: Result) -> Iterator[Changes]:
    """Less for the KV cache where memory is short, as long as it holds a sequence; more where it holds none."""
    fraction = recipe.rollout.vllm.memory_fraction
    if recipe.rollout.engine != "vllm" or recipe.rollout.vllm.kv_blocks:
        return
    sampler = result.chips[-1]
    if result.kv_cache.max_concurrency < 1:
        while fraction < 0.9:
            fraction = round(fraction + 0.1, 2)
            yield {"rollout.vllm.memory_fraction": fraction}
    elif sampler.margin < 0:
        lower = int((fraction + sampler.margin / sampler.usable) * 100) / 100
        if lower > 0:
            yield {"rollout.vllm.memory_fraction": lower}


def _tensor(recipe: Recipe, result: Result) -> Iterator[Changes]:
    """Each sequence over two chips, or four: its activations are halved, and so is the number of fsdp shards."""
    if _trainer_too_large(result):
        for tensor in (2, 4):
            if tensor > recipe.hardware.trainer_tensor:
                yield {"hardware.trainer_tensor": tensor}


def _shorter(recipe: Recipe, result: Result) -> Iterator[Changes]:
    if _trainer_too_large(result) or _sampler_too_large(result) or result.kv_cache.max_concurrency < 1:
        yield {"rollout.max_completion_length": recipe.rollout.max_completion_length // 2}


def _larger_slice(recipe: Recipe, result: Result) -> Iterator[Changes]:
    """Twice the chips, then four times; the parts of the slice grow with it, and a micro-batch too small for them.

    The step stays as large as it is, so sizes per process or device become global ones.
    """
    hardware, generation, plan = recipe.hardware, recipe.hardware.slice.chip.generation, recipe.plan
    for times in (2, 4):
        devices = hardware.slice.devices * times
        if devices not in SLICE_SIZES[generation]:
            continue
        change: Changes = {"hardware.accelerator": slice_of(generation, devices)}
        for name in ("trainer_devices", "sampler_devices"):
            if count := getattr(hardware, name):
                change[f"hardware.{name}"] = count * times
        if hardware.processes:
            change["hardware.processes"] = None  # as many as the larger slice has hosts
        for section, name, size in (
            ("training", "prompts_per_step", plan.prompts_per_step),
            ("rollout", "micro_batch_size", plan.rollout_micro_batch_size),
        ):
            if getattr(getattr(recipe, section), f"{name}_per_device"):
                change |= {f"{section}.{name}_per_device": None, f"{section}.{name}": size}
        try:
            larger = with_changes(recipe, change | dict.fromkeys(MICRO_BATCH)).plan
        except CourseError:
            continue  # the step is too small for so many chips
        even = next(size for size in micro_batch_sizes(larger) if size >= plan.micro_batch_size)
        if recipe.training.micro_batch_size_per_device:
            change |= {MICRO_BATCH[1]: None, MICRO_BATCH[0]: even}
        elif even != plan.micro_batch_size:
            change[MICRO_BATCH[0]] = even
        yield change


CANDIDATES = (_micro_batches, _rollout_micro_batches, _remat, _memory_fraction, _tensor, _shorter, _larger_slice)
