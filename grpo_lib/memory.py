"""What lies in the memory of a TPU chip during a step of GRPO: lines to be added up, each with its origin.

A step has four phases, one after the other: sampling, log-probabilities, update, sync.  Much stays throughout; what
comes and goes counts in its phase alone, and the largest phase decides whether the recipe fits.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from grpo_lib.accelerators import Chip
from grpo_lib.programs import GIB, Compilation, sampler_tensor
from grpo_lib.recipes import Recipe

PHASES = ("sampling", "log-probabilities", "update", "sync")

# vllm_engine.FULL: of a device's memory, what the sampler and all that was there before it may take together.
ENGINE_LIMIT = 0.98

# vLLM 0.31's largest default for the tokens that one call of the model takes, and buffers of the widest layer that are
# alive at once in it (the two inputs of the gated MLP, its product, and the hidden state).
ENGINE_TOKENS, ENGINE_BUFFERS = 8192, 4
# Copies of the sampled positions' logits, in float32: logits, probabilities, and one more for the sampling.
LOGITS_COPIES = 3

# Of a chip's usable memory, left for what is not listed: the sampler's own programs, and gaps between buffers.
RESERVE = 0.02

# tpu-inference 0.31 pads a head to this many numbers.
HEAD_MULTIPLE = 128
ITEMSIZE = {"bfloat16": 2, "float32": 4}


class Line(BaseModel):
    """Some bytes on one chip.

    `origin` is who says so: the compiler; arithmetic on sizes that the compiler gave or that the recipe sets; or an
    estimate, which errs to the large side.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    bytes: int
    phases: tuple[str, ...] = PHASES
    origin: Literal["compiler", "arithmetic", "estimate"]
    how: str

    @property
    def stays(self) -> bool:
        return self.phases == PHASES


class ChipMemory(BaseModel):
    """The memory of one kind of chip of the slice."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: str  # what the chip does
    usable: int  # bytes that programs may take
    lines: tuple[Line, ...]

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


class Pool(BaseModel):
    """The sampler's KV cache on one chip."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: int
    tokens: int  # that fit the pool of one replica
    sequences: int  # of full length that fit it
    wanted: int  # sequences that a replica would sample at once


def chips(recipe: Recipe, update: Compilation, logps: Compilation | None) -> tuple[list[ChipMemory], Pool]:
    """The memory of a chip that trains and of one that samples (one and the same, when colocated), and the KV cache.

    Args:
      update, logps: what the compiler said of the trainer's programs.
    """
    chip = recipe.hardware.slice.chip
    colocated = recipe.hardware.colocated
    training = _trainer(recipe, update, logps)
    before = sum(line.bytes for line in training if line.name in ("actor weights", "reference weights"))
    sampling, pool = _sampler(recipe, update, chip, before if colocated else 0)
    # Tunix takes the scanned layers apart on the trainer's chips, then moves them to the sampler's.
    unstacked = Line(
        name="sync: actor weights, unstacked",
        bytes=update.parameter_shard,
        phases=("sync",),
        origin="estimate",
        how="Tunix slices the scanned layers before it moves them",
    )
    training.append(unstacked)
    usable = int(chip.usable_gib * GIB)
    reserve = Line(
        name="reserve",
        bytes=int(RESERVE * usable),
        origin="estimate",
        how=f"{RESERVE:.0%} for the sampler's own programs and for gaps between buffers",
    )
    training.append(reserve)
    if colocated:
        return [ChipMemory(role="trains and samples", usable=usable, lines=(*training, *sampling))], pool
    sampling.append(reserve)
    return [
        ChipMemory(role="trains", usable=usable, lines=tuple(training)),
        ChipMemory(role="samples", usable=usable, lines=tuple(sampling)),
    ], pool


def kv_bytes_per_token(recipe: Recipe, facts: Compilation) -> int:
    """Bytes of one token's keys and values on one chip of a replica; heads are repeated until each chip has one."""
    heads = -(-facts.kv_heads // sampler_tensor(recipe))
    head = -(-facts.head_dim // HEAD_MULTIPLE) * HEAD_MULTIPLE
    return 2 * facts.num_layers * heads * head * ITEMSIZE[recipe.model.dtype]


def _trainer(recipe: Recipe, update: Compilation, logps: Compilation | None) -> list[Line]:
    micro_batches = recipe.plan.accumulation_steps
    lines = [
        Line(
            name="actor weights",
            bytes=update.parameter_shard,
            origin="compiler",
            how="its shard of the weights, an argument of the update",
        ),
        Line(
            name="optimizer state, gradients",
            bytes=update.optimizer_shard,
            origin="compiler",
            how="AdamW's two moments and the accumulated gradients, an argument of the update",
        ),
    ]
    if recipe.grpo.beta:
        lines.append(
            Line(
                name="reference weights",
                bytes=update.parameter_shard,
                origin="arithmetic",
                how="as the actor's; grpo.beta is above 0",
            )
        )
    lines.append(
        Line(
            name="batch of the step",
            bytes=update.batch * micro_batches,
            origin="arithmetic",
            how=f"the micro-batch, {micro_batches} times",
        )
    )
    programs = [program for program in (update, logps) if program]
    lines.append(
        Line(name="programs", bytes=sum(program.code for program in programs), origin="compiler", how="generated code")
    )
    if update.refused is None:
        lines += [
            Line(
                name="update: new weights",
                bytes=update.outputs - update.aliased,
                phases=("update",),
                origin="compiler",
                how="Tunix donates the optimizer's state, not the weights: both exist until the step ends",
            ),
            Line(
                name="update: temporaries",
                bytes=update.temporaries,
                phases=("update",),
                origin="compiler",
                how="activations, logits, gradients, gathered weights",
            ),
        ]
    else:
        lines.append(_refused("update", "update", update))
    if logps:
        if recipe.grpo.iterations > 1:
            lines.append(
                Line(
                    name="log-probabilities: old weights",
                    bytes=update.parameter_shard,
                    phases=("log-probabilities",),
                    origin="estimate",
                    how="Tunix fetches the actor of the last sync from the host; grpo.iterations is above 1",
                )
            )
        if logps.refused is None:
            lines.append(
                Line(
                    name="log-probabilities: temporaries",
                    bytes=logps.transient,
                    phases=("log-probabilities",),
                    origin="compiler",
                    how="the same program for reference and old policy",
                )
            )
        else:
            lines.append(_refused("log-probabilities", "log-probabilities", logps))
    return lines


def _refused(name: str, phase: str, program: Compilation) -> Line:
    return Line(
        name=f"{name}: refused",
        bytes=int(program.wanted or 0),
        phases=(phase,),
        origin="compiler",
        how="what the compiler's message says it would take beside its arguments",
    )


def _sampler(recipe: Recipe, facts: Compilation, chip: Chip, before: int) -> tuple[list[Line], Pool]:
    """Lines of a chip that samples, and its KV cache.

    Args:
      before: bytes on the chip when the engine starts.
    """
    rollout, tensor = recipe.rollout, sampler_tensor(recipe)
    replicas = recipe.hardware.sampler_count() // tensor
    weights = -(-facts.parameter_bytes // tensor)
    per_token = kv_bytes_per_token(recipe, facts)
    length = int(rollout.max_prompt_length) + rollout.max_completion_length
    at_once = recipe.plan.completions_per_pass
    if rollout.engine == "tunix":
        pool_bytes = at_once * length * per_token
        how, phases = f"{at_once} sequences of {length} tokens", ("sampling",)
        wanted = at_once
    else:
        settings = rollout.vllm
        usable = chip.usable_gib * GIB
        if settings.kv_blocks and settings.block_size:
            pool_bytes = settings.kv_blocks * settings.block_size * per_token
            how = f"rollout.vllm.kv_blocks={settings.kv_blocks} of {settings.block_size} tokens"
        else:
            share = min(before + settings.memory_fraction * usable, ENGINE_LIMIT * usable) - before
            pool_bytes = max(int(share) - weights, 0)
            how = f"what rollout.vllm.memory_fraction={settings.memory_fraction} leaves beside the weights"
        phases = ("sampling", "log-probabilities", "update")  # the engine frees it for the sync
        wanted = min(settings.max_sequences, -(-at_once // replicas))
    tokens = pool_bytes // per_token
    pool = Pool(bytes=pool_bytes, tokens=tokens, sequences=tokens // length, wanted=wanted)
    itemsize = ITEMSIZE[recipe.model.dtype]
    sampled = min(rollout.vllm.max_sequences, wanted) if rollout.engine == "vllm" else wanted
    activations = (
        ENGINE_TOKENS * ENGINE_BUFFERS * facts.width * itemsize // tensor
        + LOGITS_COPIES * sampled * facts.vocabulary * ITEMSIZE["float32"]
    )
    return [
        Line(
            name="sampler weights",
            bytes=weights,
            origin="arithmetic",
            how=f"{facts.parameter_bytes / GIB:.2f} GiB over {tensor} chips; replicas: {replicas}",
        ),
        Line(name="KV cache", bytes=pool_bytes, phases=phases, origin="arithmetic", how=how),
        Line(
            name="sampling: activations",
            bytes=activations,
            phases=("sampling",),
            origin="estimate",
            how=f"{ENGINE_TOKENS} tokens in {ENGINE_BUFFERS} buffers of the widest layer, and the logits thrice",
        ),
        Line(
            name="sync: arriving weights",
            bytes=weights,
            phases=("sync",),
            origin="estimate",
            how="the new weights beside the old ones, until all have arrived",
        ),
    ], pool
