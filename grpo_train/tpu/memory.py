"""HBM budget per chip of one step of GRPO: a sum of lines, each with its origin.

A step has four phases, one after the other: sampling, log-probabilities, update, sync.  Persistent lines count in all,
transient lines in their own; the largest phase decides whether the recipe fits.
"""

from typing import Literal

from grpo_train.engines.model_files import ITEMSIZE
from grpo_train.recipes.batch_plan import BatchPlan
from grpo_train.recipes.schema import GRPORecipe, HardwareRecipe, LoRARecipe, ModelRecipe, RolloutRecipe
from grpo_train.tpu.compile_jobs import GIB, Compilation, SavedModel

PHASES = ("sampling", "log-probabilities", "update", "sync")

# engines.vllm_sampler.FULL: the fraction of a device's memory that vLLM and everything allocated before it may take.
ENGINE_LIMIT = 0.98

# Buffers as wide as the widest layer that are alive at once in vLLM's forward pass: the two inputs of the gated MLP,
# their product, and the hidden state.
ENGINE_BUFFERS = 4
# Copies of the sampled positions' logits, in float32: logits, probabilities, and one more for sampling.
LOGITS_COPIES = 3

# Fraction of a chip's usable memory left for what is not listed: the sampler's own programs, and fragmentation.
RESERVE = 0.02

# tpu-inference 0.31 pads a head to a multiple of this many numbers.
HEAD_MULTIPLE = 128
NEEDED = "from the compiler's out-of-memory message: needed in addition to the arguments"

# Reported by the compiler; arithmetic on sizes that it reported or that the recipe sets; or an estimate, which errs on
# the large side.
Origin = Literal["compiler", "arithmetic", "estimate"]


class MemoryItem(SavedModel):
    """Some bytes on one chip."""

    name: str
    bytes: int
    phases: tuple[str, ...] = PHASES
    origin: Origin
    how: str

    @property
    def persistent(self) -> bool:
        return self.phases == PHASES


class ChipMemory(SavedModel):
    """The memory of one kind of chip of the slice."""

    role: str  # what the chip does
    usable: int  # bytes that programs may take
    lines: tuple[MemoryItem, ...]

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases in which this chip does something."""
        return tuple(phase for phase in PHASES if any(line.phases == (phase,) for line in self.lines))

    def total(self, phase: str) -> int:
        return sum(line.bytes for line in self.lines if phase in line.phases)

    @property
    def phase(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=self.total)

    @property
    def largest(self) -> int:
        return self.total(self.phase)

    @property
    def margin(self) -> int:
        """Bytes left over; below zero, bytes missing."""
        return self.usable - self.largest


class KVCache(SavedModel):
    """The sampler's KV cache on one chip."""

    bytes: int
    tokens: int  # that fit the cache of one replica
    max_concurrency: int  # sequences of full length that fit it, as vLLM counts
    requested: int  # sequences that a replica is given at once


def chips(
    compiled: dict[str, Compilation],
    *,
    hardware: HardwareRecipe,
    rollout: RolloutRecipe,
    grpo: GRPORecipe,
    lora: LoRARecipe,
    model: ModelRecipe,
    plan: BatchPlan,
    sampler_tensor: int,
) -> tuple[list[ChipMemory], KVCache]:
    """The memory of a chip that trains and of one that samples (the same chip, when colocated), and the KV cache.

    Args:
      compiled: the compiler's reports, by the names of preflight.programs_of.
    """
    usable = int(hardware.slice.chip.usable_gib * GIB)
    colocated = hardware.colocated
    update = compiled["update"]
    # Of the trainer's weights, as the sampler and the reference have them.
    frozen = update.parameter_shard * ITEMSIZE[model.dtype] // ITEMSIZE[model.trainer_dtype]
    training = _trainer(update, compiled.get("logps"), grpo, bool(lora.rank), plan, frozen)
    if rollout.engine == "tunix":
        sampling, kv_cache = _tunix_sampler(compiled, hardware, rollout, plan, sampler_tensor)
        # So libtpu 0.0.44 reported it; less on the way to one replica over all chips, where it never makes it whole.
        size = update.largest_weight
        moved = _line(
            "sync: one weight",
            size + size // sampler_tensor,
            "arithmetic",
            "the largest weight on its way: whole, and as a chip of the sampler has it",
            "sync",
        )
        training.append(moved)
        if not colocated:
            sampling.append(moved)
    else:
        # Tunix takes the scanned layers apart on the trainer's chips, then moves them to vLLM's.
        training.append(
            _line(
                "sync: actor weights, unstacked",
                frozen,
                "estimate",
                "Tunix slices the scanned layers before it moves them",
                "sync",
            )
        )
        if model.dtype != model.trainer_dtype:
            training.append(
                _line(
                    "sync: actor weights, converted",
                    frozen,
                    "arithmetic",
                    f"all weights in {model.dtype}, before they are sliced",
                    "sync",
                )
            )
        before = ("actor weights", "reference weights") if colocated else ()  # on the chip when the engine starts
        sampling, kv_cache = _vllm_sampler(
            update,
            sum(line.bytes for line in training if line.name in before),
            hardware,
            rollout,
            plan,
            sampler_tensor,
            ITEMSIZE[model.dtype],
        )
    programs = "small programs" if rollout.engine == "tunix" else "the sampler's own programs"
    reserve = _line("reserve", RESERVE * usable, "estimate", f"{RESERVE:.0%} for {programs} and for fragmentation")
    if lora.rank:
        training.append(
            _line(
                "sync: merged weights",
                update.parameter_shard,
                "arithmetic",
                "the weights with their adapters' products, which the sampler gets",
                "sync",
            )
        )
    if colocated:
        both = ChipMemory(role="trains and samples", usable=usable, lines=(*training, reserve, *sampling))
        return [both], kv_cache
    trains = ChipMemory(role="trains", usable=usable, lines=(*training, reserve))
    samples = ChipMemory(role="samples", usable=usable, lines=(*sampling, reserve))
    return [trains, samples], kv_cache


def _line(name: str, size: float, origin: Origin, how: str, *phases: str) -> MemoryItem:
    """A transient line of these phases; without any, a persistent one."""
    return MemoryItem(name=name, bytes=int(size), origin=origin, how=how, phases=phases or PHASES)


def _trainer(
    update: Compilation, logps: Compilation | None, grpo: GRPORecipe, adapters: bool, plan: BatchPlan, frozen: int
) -> list[MemoryItem]:
    """Lines of a chip that trains."""
    weights, micro_batches = update.parameter_shard, plan.accumulation_steps
    held = "the optimizer's moments"
    if plan.gradients_summed > 1:
        held += " and the accumulated gradients"
    lines = [
        _line("actor weights", weights, "compiler", "its shard of the weights, an argument of the update"),
        _line("optimizer state, gradients", update.optimizer_shard, "compiler", f"{held}, an argument of the update"),
    ]
    if grpo.beta and not adapters:  # else it is the actor without its adapters
        lines.append(_line("reference weights", frozen, "arithmetic", "in model.dtype; grpo.beta is above 0"))
    lines += [
        _line("batch of the step", update.batch * micro_batches, "arithmetic", f"{micro_batches} x the micro-batch"),
        _line("programs", update.code + (logps.code if logps else 0), "compiler", "generated code"),
    ]
    if update.oom_message is None:
        lines.append(
            _line(
                "update: new weights",
                update.outputs - update.aliased,
                "compiler",
                "Tunix donates the optimizer's state, not the weights: both exist until the step ends",
                "update",
            )
        )
    lines.append(_temporaries("update", update, update.temporaries, "activations, logits, gradients, gathered weights"))
    if logps:
        if grpo.iterations > 1:
            lines.append(
                _line(
                    "log-probabilities: old weights",
                    weights,
                    "estimate",
                    "Tunix fetches the actor of the last sync from the host; grpo.iterations is above 1",
                    "log-probabilities",
                )
            )
        if grpo.kl_is_watched and not adapters:
            lines.append(
                _line(
                    "log-probabilities: base weights",
                    frozen,
                    "arithmetic",
                    "of grpo.watch_kl, in model.dtype; between two measurements they are in the host's memory",
                    "log-probabilities",
                )
            )
        lines.append(
            _temporaries(
                "log-probabilities",
                logps,
                logps.outputs - logps.aliased + logps.temporaries,
                "the same program for reference and old policy",
            )
        )
    return lines


def _temporaries(phase: str, program: Compilation, size: int, how: str) -> MemoryItem:
    if program.oom_message is None:
        return _line(f"{phase}: temporaries", size, "compiler", how, phase)
    return _line(f"{phase}: out of memory", program.bytes_needed or 0, "compiler", NEEDED, phase)


def _tunix_sampler(
    compiled: dict[str, Compilation], hardware: HardwareRecipe, rollout: RolloutRecipe, plan: BatchPlan, tensor: int
) -> tuple[list[MemoryItem], KVCache]:
    """Lines of a chip that samples with Tunix's engine, and its KV cache."""
    prefill, decode = compiled["prefill"], compiled["decode"]
    rows = -(-plan.rollout_micro_batch_completions // (hardware.sampler_count() // tensor))  # of a replica
    length = int(rollout.max_prompt_length) + rollout.max_completion_length
    held = f"{rows} sequences of {length} tokens in each replica of {tensor} chips"
    if decode.oom_message is None:
        size = decode.arguments - decode.sampler_shard - decode.batch
        cache = _line("KV cache", size, "compiler", f"{held}; an argument of decoding, as it is laid out", "sampling")
    else:
        cache = _line("KV cache", decode.cache_shard, "arithmetic", held, "sampling")
    sampling = [
        _line("sampler weights", decode.sampler_shard, "compiler", f"over {tensor} chips, an argument of decoding"),
        cache,
        _line("sampler's programs", prefill.code + decode.code, "compiler", "generated code"),
    ]
    programs = {"prefill": prefill, "decoding": decode}
    failed = {name: program for name, program in programs.items() if program.oom_message}
    for name, program in failed.items():
        needed = program.bytes_needed or 0
        sampling.append(_line(f"sampling: {name} out of memory", needed, "compiler", NEEDED, "sampling"))
    if not failed:
        sizes = {name: program.outputs - program.aliased + program.temporaries for name, program in programs.items()}
        size, name = max((size, name) for name, size in sizes.items())
        sampling.append(_line("sampling: temporaries", size, "compiler", f"of {name}, which needs more", "sampling"))
    return sampling, KVCache(bytes=cache.bytes, tokens=rows * length, max_concurrency=rows, requested=rows)


def _vllm_sampler(
    facts: Compilation,
    before: int,
    hardware: HardwareRecipe,
    rollout: RolloutRecipe,
    plan: BatchPlan,
    tensor: int,
    itemsize: int,
) -> tuple[list[MemoryItem], KVCache]:
    """Lines of a chip that samples with vLLM, and its KV cache; `before`: bytes on the chip when the engine starts."""
    replicas = hardware.sampler_count() // tensor
    weights = -(-facts.parameter_bytes // tensor)
    # Keys and values of a token; heads are repeated until each chip of a replica has one.
    head = -(-facts.head_dim // HEAD_MULTIPLE) * HEAD_MULTIPLE
    per_token = 2 * facts.num_layers * -(-facts.kv_heads // tensor) * head * itemsize
    length = int(rollout.max_prompt_length) + rollout.max_completion_length
    settings = rollout.vllm
    requested = min(settings.max_sequences, -(-plan.rollout_micro_batch_completions // replicas))
    usable = hardware.slice.chip.usable_gib * GIB
    engine = min(before + settings.memory_fraction * usable, ENGINE_LIMIT * usable) - before
    size = max(int(engine) - weights, 0)
    tokens = size // per_token
    buffers = settings.max_batched_tokens * ENGINE_BUFFERS * facts.width * itemsize // tensor
    logits = LOGITS_COPIES * requested * facts.vocabulary * ITEMSIZE["float32"]
    held = _line(
        "sampler weights",
        weights,
        "arithmetic",
        f"{facts.parameter_bytes / GIB:.2f} GiB over {tensor} chips; replicas: {replicas}",
    )
    cache = _line(
        "KV cache",
        size,
        "arithmetic",
        f"what rollout.vllm.memory_fraction={settings.memory_fraction} leaves after the weights",
        *("sampling", "log-probabilities", "update"),  # the engine frees it for the sync
    )
    activations = _line(
        "sampling: activations",
        buffers + logits,
        "estimate",
        f"{settings.max_batched_tokens} tokens in {ENGINE_BUFFERS} buffers of the widest layer, "
        f"and {LOGITS_COPIES} copies of the logits",
        "sampling",
    )
    arriving = _line(
        "sync: arriving weights",
        weights,
        "estimate",
        "the new weights in addition to the old ones, until all have arrived",
        "sync",
    )
    lines = [held, cache, activations, arriving]
    return lines, KVCache(bytes=size, tokens=tokens, max_concurrency=tokens // length, requested=requested)
