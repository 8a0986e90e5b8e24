"""The programs that a recipe runs on the TPU, and the compiler's report on one: plain data, read without JAX.

    for program in programs_of(recipe): print(program.title)

A `Program` holds everything that determines what is compiled, and nothing else: two recipes whose programs are equal
share one compilation.  Learning rate, clipping and the like are constants in it, and change neither size nor time.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from grpo_lib.common.errors import CourseError
from grpo_train.recipes import ModelRecipe, Recipe
from grpo_train.recipes.layouts import Layout
from grpo_train.recipes.schema import LoRARecipe
from grpo_train.recipes.slices import SLICE_SIZES, Slice, slice_of

GIB = 2**30

# Layers of the two small compilations from which the work of the whole model is extrapolated.
FEW_LAYERS = (2, 4)

Kind = Literal["update", "logps", "prefill", "decode", "sync"]
KINDS: dict[Kind, str] = {
    "update": "policy update",
    "logps": "log-probabilities",
    "prefill": "sampler's prefill",
    "decode": "sampler's decoding",
    "sync": "weight sync",
}


class SavedModel(BaseModel):
    """Plain data, saved as JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Program(SavedModel):
    """One program, or for the sync the few that move a weight.  Lengths are in tokens.

    `update` and `logps` run on the trainer's devices, on a micro-batch; `prefill` and `decode` on one process's devices
    of the sampler, on the completions that the process samples at once; `sync` moves one weight from the former to the
    latter.  The last three are those of rollout.engine=tunix: vLLM compiles its own.
    """

    kind: Kind
    model: ModelRecipe
    accelerator: str
    devices: int  # the first of the slice
    tensor: int
    sequences: int  # over these devices; sync: 0
    prompt_length: int
    completion_length: int
    temperature: float
    reference: bool = False  # update: the KL penalty's log-probabilities come in
    old: bool = False  # update: the old policy's come in
    loss: Literal["jax", "chunked", "pallas"] = "jax"
    layout: Layout = "padded"
    rows: tuple[int, int] | None = None  # update, of another layout: [rows, tokens] that hold the sequences
    quick: bool = False  # low compiler optimization effort: a tenth of the time, about the same size
    layers: int | None = None  # number of layers, unrolled; None: the whole model, as one scan
    processes: int = 1  # sync: that the devices belong to
    lora: LoRARecipe = LoRARecipe()  # update: the adapters, if it has a rank
    sampler_tensor: int | None = None  # sync: `tensor` of the sampler on the same devices; None: it has others

    @property
    def title(self) -> str:
        length = self.prompt_length + self.completion_length
        rows = (
            "{} x {} tokens, {}".format(*self.rows, self.layout) if self.rows else f"{self.sequences} x {length} tokens"
        )
        size = {
            "prefill": f" of {self.sequences} x {self.prompt_length} tokens",
            "decode": f" of {self.sequences} x {self.completion_length} tokens",
            "sync": ", one weight at a time",
        }.get(self.kind, f" of {rows}")
        part = f", {self.layers} layers" if self.layers else ""
        return f"{KINDS[self.kind]}{size}{part}, {self.devices} devices of {self.accelerator}"

    def key(self, versions: dict[str, str]) -> str:
        """A name for the program as these versions compile it."""
        facts = json.dumps([self.model_dump(mode="json"), versions], sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()[:24]


class Compilation(SavedModel):
    """The compiler's report on a program.  Bytes and work are those of one chip."""

    model_config = ConfigDict(extra="ignore")  # saved results may have more fields

    oom_message: str | None = None  # the compiler's message, where the program does not fit the chip
    bytes_needed: float | None = None  # in addition to its arguments, if that message has the number
    arguments: int = 0
    outputs: int = 0
    aliased: int = 0  # outputs that are written over arguments (donated)
    temporaries: int = 0
    code: int = 0
    flops: float = 0
    traffic: float = 0  # bytes read and written in the chip's memory
    batch: int = 0  # the part of the arguments that is the micro-batch
    parameters: int = 0  # of the model, over all chips
    parameter_bytes: int = 0  # of the model, over all chips
    parameter_shard: int = 0  # bytes of the model's parameters on one chip of the trainer
    optimizer_shard: int = 0  # bytes of optimizer state and accumulated gradients on one chip
    sampler_shard: int = 0  # prefill, decode: bytes of the sampler's weights on one chip
    cache_shard: int = 0  # prefill, decode: bytes of the KV cache on one chip, without the padding of its layout
    arriving: int = 0  # sync: bytes of the largest weight on one chip of the sampler
    num_layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    vocabulary: int = 0
    embedding_bytes: int = 0  # of an untied embedding, of which decoding reads single rows only
    width: int = 0  # of the widest layer: the MLP's, or the embedding's


def programs_of(recipe: Recipe, quick: bool = False) -> dict[str, Program]:
    """The programs of a step: `update`; `logps` where the recipe needs it; with Tunix's engine those of the sampler.

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
    whole, devices = hardware.slice, hardware.trainer_count()
    accelerator = _slice_for(whole, devices)
    common: dict[str, Any] = {
        "model": recipe.model,
        "accelerator": accelerator,
        "devices": devices,
        "tensor": hardware.trainer_tensor,
        "sequences": recipe.micro_batch_completions,
        "prompt_length": rollout.max_prompt_length,
        "completion_length": rollout.max_completion_length,
        "temperature": rollout.temperature,
        "quick": quick,
        "loss": recipe.loss.implementation,
    }
    reference, old = recipe.grpo.beta > 0, recipe.grpo.iterations > 1
    shapes = recipe.plan.row_shapes(rollout.max_prompt_length, rollout.max_completion_length)
    rows = {"layout": recipe.plan.layout, "rows": shapes[-1]} if recipe.plan.layout != "padded" else {}
    programs = {"update": Program(kind="update", reference=reference, old=old, lora=recipe.lora, **common, **rows)}
    if reference or old or recipe.grpo.watch_kl:
        programs["logps"] = Program(kind="logps", **common)
    if rollout.engine == "tunix":
        programs |= _sampler_programs(recipe, common)
    return programs


def _sampler_programs(recipe: Recipe, common: dict[str, Any]) -> dict[str, Program]:
    """Each process samples its share of the completions on its own devices."""
    hardware, plan, tensor = recipe.hardware, recipe.plan, recipe.sampler_tensor
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
    sync = common | {
        "sequences": 0,
        "processes": plan.processes,
        "sampler_tensor": tensor if hardware.colocated else None,
        "loss": "jax",
    }
    return {
        "prefill": Program(kind="prefill", **sampler),
        "decode": Program(kind="decode", **sampler),
        "sync": Program(kind="sync", **sync),
    }


def at_mean_length(program: Program, recipe: Recipe) -> Program:
    """The policy update as it runs where each completion and its prompt have a third of their longest length.

    GSM8K's have 0.21 to 0.33 of 256 + 768 tokens (benchmarks/update_tokens.py).  Padded rows are as long as ever.
    """
    if not program.rows:
        return program
    mean = (program.prompt_length + program.completion_length) // 3
    if program.layout == "groups":
        prompt, group = program.prompt_length, recipe.grpo.group_size
        size = group * (1 + mean) - (group - 1) * prompt // 3 - 1  # the prompt once, a third of its longest length too
    else:
        size = mean
    count = program.sequences // (recipe.grpo.group_size if program.layout == "groups" else 1)
    shapes = recipe.plan.row_shapes(program.prompt_length, program.completion_length)
    rows = next(shape for shape in shapes if shape[0] * (shape[1] // size) >= count or shape == shapes[-1])
    return program.model_copy(update={"rows": rows})


def _slice_for(whole: Slice, devices: int) -> str:
    """The slice to compile for, where only some devices of a slice are used: one of that size, where there is one.

    The chips are the same, and libtpu takes several times as long for a part of a larger slice.
    """
    smaller = devices < whole.devices and devices in SLICE_SIZES[whole.chip.generation]
    return slice_of(whole.chip.generation, devices) if smaller else whole.name


def few_layers(program: Program) -> list[Program]:
    """The same program with a few unrolled layers: the compiler counts a scanned layer's work once.

    With the loss of `jax`: the work is the same, and the compiler does not count inside a kernel.
    """
    return [program.model_copy(update={"layers": layers, "quick": False, "loss": "jax"}) for layers in FEW_LAYERS]
