"""HBM fit and roofline estimate of a recipe, ahead of time: before anything is rented.

    compile = Compiler(recipe.training, recipe.grpo.iterations, print)    # grpo_train.tpu.compiler
    result = preflight(recipe, compile)              # minutes
    print(table(result))
    results = saved_results()                        # assets/preflight, of the shipped recipes

`compile` is any function from a Program to a Compilation; only the estimate of rounded steps imports JAX.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import write_text_atomic
from grpo_train.recipes import Recipe
from grpo_train.recipes.slices import SLICE_SIZES, Slice, parse_slice, slice_of
from grpo_train.tpu import estimate as estimates
from grpo_train.tpu import memory, roofline
from grpo_train.tpu.compile_jobs import (
    GIB,
    KINDS,
    AttentionKernel,
    Compilation,
    CutSampler,
    Program,
    SavedModel,
    SingleUpdate,
    few_layers,
)
from grpo_train.tpu.hints import hints

Compile = Callable[[Program], Compilation]

SAVED = Path("assets") / "preflight"

# engines.tunix_sampler.LONG_PROMPT: an evaluation takes fewer prompts at once when they are longer.
EVALUATED_LENGTH = 128

# initializer_range of Llama's and Qwen's config.json.
SPREAD = 0.02

# Share of a chip's memory below which what is left is no safety.  A program of 10.5 GiB was refused "at the bottom of
# memory" with 7.3 GiB free, in a public report.
# Of the roofline; the runs are Llama-3.1-8B on v5p-8 and Qwen2.5-3B on v6e-8.
TOO_LOW = "published runs took 2 to 5 times such a figure (docs/tpu.md)"
TIGHT = 0.05


class Compiled(SavedModel):
    """A program, and the compiler's report."""

    title: str
    kind: str | None = None  # in results saved before the sampler was compiled: of the trainer
    compilation: Compilation


class Result(SavedModel):
    """The result of a preflight.  Bytes and work are per chip."""

    name: str
    command: str  # that gives the same result
    digest: str  # of the recipe's values that matter here
    versions: dict[str, str]  # of the packages that compile
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
    kv_cache: memory.KVCache
    programs: tuple[Compiled, ...]
    lower_bound: roofline.LowerBound | None = None  # of a recipe that fits
    lower_bound_at_mean: roofline.LowerBound | None = None  # of a layout whose update has fewer tokens then
    estimate: estimates.Estimate | None = None  # of a recipe that fits, compiled with full effort
    not_estimated: str | None = None  # why there is no estimate
    hints: tuple[str, ...] = ()  # of a recipe that does not fit, or is tight
    notes: tuple[str, ...] = ()

    @property
    def tightest(self) -> memory.ChipMemory:
        return min(self.chips, key=lambda chip: chip.margin)

    @property
    def is_tight(self) -> bool:
        """Whether it fits with so little left that fragmentation, which no sum of bytes sees, may need it."""
        return self.fits and self.margin < TIGHT * self.tightest.usable


def preflight(
    recipe: Recipe,
    compile: Compile,
    *,
    quick: bool = False,
    command: str = "",
    versions: dict[str, str] | None = None,
) -> Result:
    """Compile a recipe's programs and add up the memory; a lower bound where it fits, hints where it does not.

    `quick` compiles with low optimization effort; `command` and `versions` go into the result as they are.

    Raises CourseError when the recipe does not fix what must be known, or cannot be compiled for another reason than
    memory.
    """
    result = examine(recipe, compile, quick=quick).model_copy(update={"command": command, "versions": versions or {}})
    if not result.fits or result.is_tight:
        what_to_try = hints(
            recipe.plan, recipe.batch_given, recipe.model, recipe.rollout, recipe.hardware.trainer_tensor
        )
        result = result.model_copy(update={"hints": tuple(what_to_try)})
    if not result.fits:
        return result
    facts = result.programs[0].compilation
    programs = programs_of(recipe)

    def work(program: Program) -> roofline.Work:
        return roofline.whole_model([compile(part) for part in few_layers(program)], facts.num_layers)

    bound = functools.partial(roofline.lower_bound, steps=recipe.training.steps, **_sections(recipe))
    logps = work(programs["logps"]) if "logps" in programs else None
    bounds = {"lower_bound": bound(facts, work(programs["update"]), logps)}
    at_mean = at_mean_length(programs["update"], recipe)
    if at_mean != programs["update"]:
        bounds["lower_bound_at_mean"] = bound(facts, work(at_mean), logps)
    return with_estimate(recipe, result.model_copy(update=bounds))


def with_estimate(recipe: Recipe, result: Result) -> Result:
    """The result with what its programs take, or with the reason why that is not known."""
    if not result.lower_bound:
        return result
    compilations = {program.kind or "update": program.compilation for program in result.programs}
    bounds = (result.lower_bound, result.lower_bound_at_mean)
    try:
        return result.model_copy(update={"estimate": estimates.of_recipe(recipe, compilations, *bounds)})
    except CourseError as error:
        return result.model_copy(update={"not_estimated": str(error)})


def _sections(recipe: Recipe) -> dict[str, Any]:
    """What memory and roofline read both."""
    return {
        "hardware": recipe.hardware,
        "rollout": recipe.rollout,
        "grpo": recipe.grpo,
        "plan": recipe.plan,
        "sampler_tensor": recipe.sampler_tensor(),
    }


def programs_of(recipe: Recipe, quick: bool = False) -> dict[str, Program]:
    """The programs of a step: `update`; `logps` where the recipe needs it; with Tunix's engine those of the sampler,
    with vLLM `attention`.

    The same `logps` serves the reference and the old policy: they differ in their weights alone.  (An old policy with
    adapters is compiled without them: they are a few thousandths of the work.)

    Raises CourseError when the recipe does not fix the slice, or the length of a prompt, or when a process has not the
    devices for a replica of the sampler.
    """
    hardware, rollout = recipe.hardware, recipe.rollout
    if not hardware.accelerator:
        raise CourseError(
            "hardware.accelerator is not set, so there is no chip to compile for; add hardware.accelerator=v6e-8"
        )
    if rollout.max_prompt_length == "auto":
        raise CourseError(
            "rollout.max_prompt_length=auto is only known when the problems are read; add rollout.max_prompt_length=256"
        )
    devices = hardware.trainer_count()
    common: dict[str, Any] = {
        "model": recipe.model,
        "accelerator": _slice_for(hardware.slice, devices),
        "devices": devices,
        "tensor": hardware.trainer_tensor,
        "sequences": recipe.plan.micro_batch_size,
        "prompt_length": rollout.max_prompt_length,
        "completion_length": rollout.max_completion_length,
        "temperature": rollout.first_temperature,  # a schedule's is an argument of as large a program
        "quick": quick,
        "loss": recipe.loss.implementation,
    }
    rows: dict[str, Any] = {}
    if recipe.plan.layout != "padded":
        shapes = recipe.plan.row_shapes(rollout.max_prompt_length, rollout.max_completion_length)
        rows = {"layout": recipe.plan.layout, "rows": shapes[-1]}
    reference = recipe.grpo.beta > 0
    old = recipe.grpo.iterations > 1
    make_update = Program if recipe.plan.gradients_summed > 1 else SingleUpdate
    programs: dict[str, Program] = {
        "update": make_update(
            kind="update",
            reference=reference,
            old=old,
            lora=recipe.lora,
            optimizer=recipe.training.optimizer,
            rounding=recipe.training.rounding,
            optimizer_dtype=recipe.training.optimizer_dtype,
            **common,
            **rows,
        )
    }
    if reference or old or recipe.grpo.kl_is_watched:
        # The old policy's weights are the larger ones, where both are asked.
        model = recipe.model if old else recipe.model.model_copy(update={"weight_dtype": recipe.model.dtype})
        programs["logps"] = Program(kind="logps", **common | {"model": model})
    if rollout.engine == "tunix":
        programs |= _sampler_programs(recipe, common)
    else:
        programs |= _attention_kernel(recipe, common)
    return programs


def _sampler_programs(recipe: Recipe, common: dict[str, Any]) -> dict[str, Program]:
    """Each process samples its share of the completions on its own devices."""
    hardware, plan = recipe.hardware, recipe.plan
    tensor = recipe.sampler_tensor()
    devices = hardware.sampler_count() // plan.processes
    if devices % tensor:
        raise CourseError(
            f"hardware.sampler_tensor={tensor} does not divide the {devices} devices of a process, and all devices of "
            "a replica belong to one process; take a divisor of it"
        )
    replicas = devices // tensor
    rows = -(-plan.rollout_micro_batch_completions // plan.processes)
    sampler = common | {
        "accelerator": _slice_for(hardware.slice, devices),
        "devices": devices,
        "tensor": tensor,
        "sequences": -(-rows // replicas) * replicas,  # missing rows are filled up
        "loss": "jax",
    }
    make = Program
    if recipe.rollout.is_cut:
        make = functools.partial(CutSampler, top_k=recipe.rollout.top_k, top_p=recipe.rollout.top_p)
    return {"prefill": make(kind="prefill", **sampler), "decode": make(kind="decode", **sampler)}


def _attention_kernel(recipe: Recipe, common: dict[str, Any]) -> dict[str, Program]:
    """The one program of vLLM's that is compiled here: the kernel is what may not exist for a recipe's shapes."""
    settings = recipe.rollout.vllm
    tensor = recipe.sampler_tensor()
    replica = common | {
        "accelerator": _slice_for(recipe.hardware.slice, tensor),
        "devices": tensor,
        "tensor": tensor,
        "sequences": settings.max_sequences,
        "tokens": settings.max_batched_tokens,
        "page_size": settings.options.get("block_size"),
        "loss": "jax",
    }
    return {"attention": AttentionKernel(kind="attention", **replica)}


def at_mean_length(program: Program, recipe: Recipe) -> Program:
    """The policy update as it runs where each completion and its prompt have a third of their longest length.

    GSM8K's have 0.21 to 0.33 of 256 + 768 tokens (dev/benchmarks/update_tokens.py).  Padded rows are as long as ever.
    """
    if not program.rows:
        return program
    mean = (program.prompt_length + program.completion_length) // 3
    group = recipe.grpo.group_size if program.layout == "groups" else 1
    # Tokens of a group: the prompt once, a third of its longest length too; the last token predicts nothing.
    size = group * (1 + mean) - (group - 1) * program.prompt_length // 3 - 1
    groups = program.sequences // group
    shapes = recipe.plan.row_shapes(program.prompt_length, program.completion_length)
    enough = (shape for shape in shapes if shape[0] * (shape[1] // size) >= groups)
    return program.model_copy(update={"rows": next(enough, shapes[-1])})


def _slice_for(whole: Slice, devices: int) -> str:
    """The slice to compile for, where only some devices of a slice are used: one of that size, where there is one.

    The chips are the same, and libtpu takes several times as long for a part of a larger slice.
    """
    generation = whole.chip.generation
    if devices < whole.devices and devices in SLICE_SIZES[generation]:
        return slice_of(generation, devices)
    return whole.name


def examine(recipe: Recipe, compile: Compile, *, quick: bool = False) -> Result:
    """Compile and add up, without the lower bound and without hints."""
    programs = programs_of(recipe, quick)
    compiled = {name: compile(program) for name, program in programs.items()}
    update = compiled["update"]
    chips, kv_cache = memory.chips(compiled, lora=recipe.lora, model=recipe.model, **_sections(recipe))
    problem = _error_text(compiled, chips, kv_cache)
    reports = [Compiled(title=programs[name].title, kind=name, compilation=report) for name, report in compiled.items()]
    notes = [
        *_trainer_notes(recipe, programs["update"], update, chips[0]),
        *_sampler_notes(recipe, programs.get("decode"), kv_cache),
    ]
    hardware = recipe.hardware
    return Result(
        name=recipe.name,
        command="",
        digest=digest(recipe),
        versions={},
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
        kv_cache=kv_cache,
        programs=tuple(reports),
        notes=tuple(notes),
    )


def _error_text(
    compiled: dict[str, Compilation], chips: list[memory.ChipMemory], kv_cache: memory.KVCache
) -> str | None:
    """Why a recipe does not fit, or None."""
    for name, compilation in compiled.items():
        if compilation.oom_message is not None:
            return f"the compiler runs out of memory in the {KINDS[name]}: {compilation.oom_message}"
    tightest = min(chips, key=lambda chip: chip.margin)
    if tightest.margin < 0:
        return (
            f"a chip that {tightest.role} would need {tightest.largest / GIB:.2f} GiB during {tightest.phase} "
            f"and has {tightest.usable / GIB:.2f}"
        )
    if kv_cache.max_concurrency < 1:
        return f"the KV cache would hold {kv_cache.tokens} tokens, less than one sequence"
    return None


def _trainer_notes(
    recipe: Recipe, update: Program, compilation: Compilation, trainer: memory.ChipMemory
) -> Iterator[str]:
    """What the trainer's numbers leave out; `compilation`: of the update, `trainer`: a chip that trains."""
    whole = recipe.hardware.slice.devices
    if update.quick:
        yield "compiled with low optimization effort (--quick): temporaries can be a quarter off"
    if update.loss != "jax":
        yield "the roofline is that of loss.implementation=jax: the compiler does not count inside a kernel"
    if update.accelerator != recipe.hardware.accelerator:
        yield (
            f"the trainer's {update.devices} of {whole} chips were compiled as a {update.accelerator}: the same chips, "
            "without their neighbours"
        )
    elif update.devices < whole:
        yield f"the trainer's chips are the first {update.devices} of {recipe.hardware.accelerator}"
    yield _update_applied(recipe)

    saved = compilation.optimizer_shard  # bytes of a checkpoint on one chip
    if not recipe.lora.rank:
        saved += compilation.parameter_shard
        if recipe.plan.gradients_summed > 1:  # the sum is as large as the weights; saved, it is zero and takes nothing
            saved -= compilation.parameter_shard
    yield (
        f"a checkpoint takes about {saved * update.devices / 1e9:.2g} GB; while one is written there are "
        f"{recipe.training.max_to_keep + 1} (training.max_to_keep + 1)"
    )
    if recipe.grpo.dynamic_sampling:
        yield (
            "the roofline is of a step that samples once; dynamic sampling does it up to "
            f"{recipe.grpo.dynamic_sampling} times"
        )
    if recipe.grpo.kl_is_watched and not recipe.lora.rank:
        base = compilation.parameter_bytes / recipe.plan.processes  # a host's part of it
        yield f"grpo.watch_kl keeps the base in the hosts' memory: {base / GIB:.1f} GiB on each"
    updates = recipe.plan.accumulation_steps * recipe.grpo.iterations
    missing = compilation.parameter_shard - trainer.usable + trainer.total("update")
    if updates > 1 and trainer.margin >= 0 and missing > 0:
        yield (
            "Tunix starts the next update before the last has ended; a runtime that then held the weights three times "
            f"would be {missing / GIB:.2f} GiB short"
        )


def _sampler_notes(recipe: Recipe, decode: Program | None, kv_cache: memory.KVCache) -> Iterator[str]:
    """What the sampler's numbers leave out; `decode`: of Tunix's engine."""
    if kv_cache.max_concurrency < kv_cache.requested:
        yield (
            f"the KV cache holds {kv_cache.max_concurrency} sequences of full length; a replica is given "
            f"{kv_cache.requested} at once, so some may wait"
        )
    if decode:
        # Prompts of an evaluation that have no more tokens than the sampler's prefill, which is compiled.
        prompts = decode.sequences * decode.prompt_length // EVALUATED_LENGTH
        if recipe.evaluation.batch_size > prompts:
            yield (
                "evaluation may sample more at once than training, and is not compiled; with evaluation.batch_size="
                f"{prompts} its prefill has no more tokens"
            )


def _update_applied(recipe: Recipe) -> str:
    """What the metric of this name will be."""
    if recipe.model.trainer_dtype == "float32":
        return "update_applied is 1: float32 weights take the whole of a step"
    if recipe.training.rounding == "stochastic":
        return "update_applied will be about 1: bfloat16 weights with stochastic rounding"
    from grpo_train.engines.optimizer import nearest_moves

    weights, source = _some_weights(recipe.model.path)
    rate = recipe.training.learning_rate
    applied, moved = nearest_moves(weights, rate)
    return (
        f"update_applied will be about {applied:.2g}: {moved:.1%} of the bfloat16 weights move in a step of {rate:g} "
        f"({source}); set training.rounding=stochastic or model.weight_dtype=float32"
    )


def _some_weights(path: str) -> tuple[Any, str]:
    """The first rows of the base's weights, where they are at hand, else of the usual spread; and which."""
    from safetensors import safe_open

    if not (files := sorted((environment.repo_root() / path).glob("*.safetensors"))):
        drawn = np.random.default_rng(0).normal(scale=SPREAD, size=1_000_000).astype(np.float32)
        return drawn, f"weights drawn from N(0, {SPREAD}²), the base's are not here"
    with safe_open(files[0], framework="flax") as file:
        names = file.keys()
        return [file.get_slice(name)[:64] for name in names], "the base's weights"


def table(result: Result, price: float | None = None) -> str:
    """The result as text; with the price of a chip-hour also what the run costs."""
    split = f"{result.trainer_devices} that train, {result.sampler_devices} that sample"
    if result.colocated:
        split = f"{result.trainer_devices} that train and sample"
    heading = (
        f"{result.name} on {result.accelerator}: {result.devices} chips, {split}; "
        f"{result.parameters / 1e9:.2f} billion parameters"
    )
    blocks = [[heading], *map(_chip_table, result.chips), _verdict(result)]
    if result.lower_bound:
        blocks.append(_lower_bound_table(result, result.lower_bound))
        blocks.append(estimate_lines(result, price))
    blocks[-1] += [f"compiled, too: {program.title}" for program in result.programs if program.kind == "attention"]
    blocks[-1] += [f"note: {note}" for note in result.notes]
    return "\n\n".join("\n".join(lines) for lines in blocks)


def _chip_table(chip: memory.ChipMemory) -> list[str]:
    width = max(len(line.name) for line in chip.lines) + 2
    lines = [f"A chip that {chip.role}, GiB:"]
    for title, persistent in (("persistent", True), ("transient", False)):
        lines.append(f"  {title}")
        for line in chip.lines:
            if line.persistent == persistent:
                lines.append(f"    {line.name:<{width}}{line.bytes / GIB:>7.2f}  {line.origin}: {line.how}")
    lines.append("  total by phase")
    for phase in chip.phases:
        mark = "  <- peak" if phase == chip.phase else ""
        lines.append(f"    {phase:<{width}}{chip.total(phase) / GIB:>7.2f}{mark}")
    lines.append(f"    {'usable':<{width}}{chip.usable / GIB:>7.2f}  libtpu's limit")
    return lines


def _verdict(result: Result) -> list[str]:
    left = f"{result.margin / GIB:.2f} GiB left on the tightest chip"
    if result.fits and not result.is_tight:
        return [f"FITS: {left}"]
    verdict = f"DOES NOT FIT: {result.problem}"
    if result.is_tight:
        verdict = f"TIGHT: {left}, under {TIGHT:.0%} of it; memory also fragments, which no sum of bytes sees"
    return [
        verdict,
        "what to try, in this order; run preflight again after each:",
        *(f"  {hint}" for hint in result.hints),
    ]


def _lower_bound_table(result: Result, bound: roofline.LowerBound) -> list[str]:
    chip = parse_slice(result.accelerator).chip
    lines = [
        f"Roofline estimate of step time, in seconds, at {chip.flops / 1e12:.0f} TFLOP/s and "
        f"{chip.bandwidth / 1e9:.0f} GB/s a chip ({chip.source}):"
    ]
    for part in bound.parts:
        each = f"{part.times} x {part.seconds / part.times:.4f}, {part.bound}-bound"
        if part.name != roofline.DECODING:
            each += f"; at least {roofline.at_least(part, chip):.3f}, by its FLOPs"
        lines.append(f"    {part.name:<20}{part.seconds:>9.3f}  {each}")
    lines.append(f"    {'total':<20}{bound.seconds:>9.3f}  with completions of full length")
    if at_mean := result.lower_bound_at_mean:
        update = at_mean.parts[-1]
        lines.append(
            f"    {at_mean.seconds:>29.3f}  where a completion and its prompt have a third of it on average: "
            f"{update.name} {update.seconds:.3f}"
        )
    lines += [
        "  Not counted: traffic between chips, weight sync, host work, reading the KV cache. Decoding reads the "
        "weights once for each token of the longest completion; completions that end earlier decode faster. Where an "
        "update is memory-bound, its traffic is what the compiler counts of one small compilation.",
        f"The run by the roofline: {result.devices} chips x {result.steps} steps x {bound.seconds:.3f} s / 3600 = "
        f"{bound.chip_hours:.2f} chip-hours, before evaluation, compilation and waiting. No budget: {TOO_LOW}.",
    ]
    return lines


def estimate_lines(result: Result, price: float | None = None) -> list[str]:
    """The estimate, or in one line why there is none."""
    if result.estimate:
        return estimates.lines(result.estimate, result.steps, price)
    lines = [f"Not estimated: {why_not_estimated(result)}."]
    if bound := result.lower_bound:
        lines.append(
            f"By the roofline, at full length: {estimates.short(bound.seconds)} s a step, "
            f"{estimates.short(bound.chip_hours)} chip-hours. No budget: {TOO_LOW}."
        )
    return lines


def why_not_estimated(result: Result) -> str:
    """Why a result has no estimate, and where it can have one, by which command and how long that takes."""
    if result.not_estimated:
        return result.not_estimated
    return (
        "this preflight was stored before there were estimates, and its programs were not compiled again; "
        f"`{result.command}` makes one, by compiling at full effort ({compiling_took(saved_results())})"
    )


def compiling_took(results: list[Result]) -> str:
    """What compiling for an estimate took where it was measured: of the fastest and of the slowest recipe."""
    took = []
    for result in results:
        seconds = [program.compilation.cpu_seconds for program in result.programs if program.compilation.cpu_seconds]
        if result.estimate and seconds:
            took.append((sum(seconds) / 60, result.name))
    if not took:
        return "how long that takes was not measured"
    (least, fast), (most, slow) = min(took), max(took)
    return (
        f"{least:.1f} CPU minutes for the update and the decoding of {fast}, {most:.1f} for those of {slow}; the whole "
        "preflight compiles more, and larger models take longer; `make setup-tpu` brings the compiler"
    )


def digest(recipe: Recipe) -> str:
    """Hash of what a preflight's numbers depend on: its programs, and what memory and roofline read in addition.

    The number of steps is not in it: it multiplies, and `of_steps` does that.
    """
    plan, grpo = recipe.plan, recipe.grpo
    programs = programs_of(recipe)
    programs.pop("attention", None)  # no number is of it, and it follows from the rest
    compiled = {name: program.model_dump(mode="json") for name, program in programs.items()}
    engine = recipe.rollout.vllm.model_dump(mode="json") if recipe.rollout.engine == "vllm" else "tunix"
    step = [plan.prompts_per_step, plan.micro_batch_size, plan.rollout_micro_batch_size]
    settings = [grpo.group_size, grpo.iterations, grpo.beta > 0]
    if grpo.kl_is_watched:  # only then: results saved before there was this key are still found
        settings.append("watch_kl")
    facts = {
        "programs": compiled,
        "hardware": recipe.hardware.model_dump(mode="json", exclude={"processes"}),
        "processes": plan.processes,
        "engine": engine,
        "step": step,
        "grpo": settings,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def saved_results() -> list[Result]:
    """The results in assets/preflight of recipes that fit, by name; refused-*.json are examples that do not."""
    paths = sorted((environment.repo_root() / SAVED).glob("*.json"))
    return [read_result(path) for path in paths if not path.name.startswith("refused-")]


def keep_result(recipe: Recipe, result: Result) -> None:
    """Keep a result on this machine, for stored_result."""
    write_text_atomic(_kept(recipe), result.model_dump_json(indent=1) + "\n")


def stored_result(recipe: Recipe) -> Result | None:
    """What is known of a recipe without a compiler: made on this machine, or shipped; None where there is neither."""
    try:
        kept = _read_kept(_kept(recipe))
        return of_steps(recipe, kept) if kept else saved_result(recipe)
    except CourseError:  # no accelerator or no length, which preflight asks for
        return None


def of_steps(recipe: Recipe, result: Result) -> Result:
    """A result of the same recipe, but for the number of its steps, as one of this recipe."""
    steps = recipe.training.steps
    if result.steps == steps:
        return result
    found: dict[str, Any] = {"steps": steps}
    for name in ("lower_bound", "lower_bound_at_mean"):
        if bound := getattr(result, name):
            found[name] = bound.model_copy(update={"chip_hours": bound.chip_hours * steps / result.steps})
    changed = result.model_copy(update=found)
    return with_estimate(recipe, changed) if result.estimate else changed


def _read_kept(path: Path) -> Result | None:
    """None for a file that another version of this program wrote, or that is damaged: preflight makes it again."""
    try:
        return read_result(path)
    except (OSError, ValueError):
        return None


def _kept(recipe: Recipe) -> Path:
    return environment.cache_dir() / "preflight" / "results" / f"{digest(recipe)}.json"


def saved_result(recipe: Recipe) -> Result:
    """The saved result of a shipped recipe, also under another name.  Raises CourseError when there is none of it as
    it is now."""
    wanted = digest(recipe)
    if found := [result for result in saved_results() if result.digest == wanted]:
        return of_steps(recipe, found[0])
    raise CourseError(
        f"no saved result is of recipe {recipe.name} as it is; run grpo preflight on it with --output "
        f"{SAVED / recipe.name}.json"
    )


def read_result(path: Path) -> Result:
    return Result.model_validate_json(path.read_text(encoding="utf-8"))
