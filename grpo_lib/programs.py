"""Which programs a recipe makes the TPU run, and what its compiler says of one: plain data, read without JAX.

    for program in programs_of(recipe): print(program.title)

A `Program` holds all that decides what is compiled, and nothing else: two recipes whose programs are equal share one
compilation.  Learning rate, clip and the like are constants in the program and change neither its size nor its time.
"""

from __future__ import annotations

import hashlib
import json
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from grpo_lib.accelerators import parse_slice, slice_of
from grpo_lib.errors import CourseError
from grpo_lib.recipes import ModelRecipe, Recipe

GIB = 2**30

# Slices that exist, in devices, up to 64 chips.  A part of a slice that is one of these is compiled as one.
SLICES = {"v6e": (1, 4, 8, 16, 32, 64), "v5e": (1, 4, 8, 16, 32, 64), "v5p": (4, 8, 16, 32), "v4": (4, 8, 16, 32)}

# Layers of the two small compilations from which the work of the whole model is extrapolated.
FEW_LAYERS = (2, 4)


class Program(BaseModel):
    """One program.  Lengths are in tokens; `sequences` are those of one micro-batch over all devices."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    kind: Literal["update", "logps"]  # the policy update of a micro-batch; log-probabilities of a micro-batch
    model: ModelRecipe
    accelerator: str
    devices: int  # the first of the slice
    tensor: int
    sequences: int
    prompt_length: int
    completion_length: int
    temperature: float
    reference: bool = False  # update: the KL penalty's log-probabilities come in
    old: bool = False  # update: the old policy's come in
    loss: Literal["jax", "chunked", "pallas"] = "jax"
    quick: bool = Field(
        False, description="compiled with little effort: in a tenth of the time, to about the same size"
    )
    layers: int | None = Field(None, description="so many layers, unrolled; null: the model, its layers in one scan")

    @property
    def title(self) -> str:
        what = {"update": "policy update", "logps": "log-probabilities"}[self.kind]
        size = f"{self.sequences} x {self.prompt_length + self.completion_length} tokens"
        part = f", {self.layers} layers" if self.layers else ""
        return f"{what} of {size}{part}, {self.devices} devices of {self.accelerator}"

    def key(self, versions: dict[str, str]) -> str:
        """A name for the program as these versions compile it."""
        fields = self.model_dump(mode="json")
        if not self.quick:
            fields.pop("quick")
        if self.loss == "jax":
            fields.pop("loss")
        facts = json.dumps([fields, versions], sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()[:24]


class Compilation(BaseModel):
    """What the compiler says of a program.  Bytes and work are those of one chip."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    refused: str | None = Field(None, description="the compiler's message, where the program does not fit the chip")
    wanted: float | None = Field(
        None, description="bytes that it would have taken beside its arguments, where the message says so"
    )
    arguments: int = 0
    outputs: int = 0
    aliased: int = Field(0, description="outputs that are written over arguments (donated)")
    temporaries: int = 0
    code: int = 0
    flops: float = 0
    traffic: float = Field(0, description="bytes read and written in the chip's memory")
    batch: int = Field(0, description="the part of the arguments that is the micro-batch")
    parameters: int = Field(0, description="of the model, over all chips")
    parameter_bytes: int = Field(0, description="of the model, over all chips")
    parameter_shard: int = Field(0, description="bytes of the model's parameters on one chip of the trainer")
    optimizer_shard: int = Field(0, description="bytes of optimizer state and accumulated gradients, likewise")
    num_layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    vocabulary: int = 0
    looked_up: int = Field(0, description="bytes of an embedding that is not the output layer too: read by single rows")
    width: int = Field(0, description="of the widest layer: the MLP's, or the embedding's")
    seconds: float = Field(0, description="that the compilation took")
    host_gib: float = Field(0, description="of memory that this process had taken by then, at most")

    @property
    def transient(self) -> int:
        """Bytes that a run of the program needs beside its arguments."""
        return self.outputs - self.aliased + self.temporaries


def programs_of(recipe: Recipe, quick: bool = False) -> dict[str, Program]:
    """The programs that the trainer's devices run in a step: `update`, and `logps` where the recipe needs it.

    The same program serves the reference and the old policy: they differ in their weights alone.

    Raises CourseError when the recipe leaves open what has to be known: the slice, or the length of a prompt.
    """
    hardware, rollout = recipe.hardware, recipe.rollout
    if not hardware.accelerator:
        raise CourseError(
            "hardware.accelerator is not set, so there is no chip to compile for; add hardware.accelerator=v6e-8"
        )
    if rollout.max_prompt_length == "auto":
        raise CourseError(
            "rollout.max_prompt_length=auto is known when the problems are read; add rollout.max_prompt_length=256"
        )
    accelerator, devices = _part(recipe)
    common = {
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
    programs = {"update": Program(kind="update", reference=reference, old=old, **common)}
    if reference or old:
        programs["logps"] = Program(kind="logps", **common)
    return programs


def few_layers(program: Program) -> list[Program]:
    """The same program with a few unrolled layers: the compiler counts a scanned layer's work once.

    With the loss of `jax`: the work is the same, and the compiler does not count inside a kernel.
    """
    return [program.model_copy(update={"layers": layers, "quick": False, "loss": "jax"}) for layers in FEW_LAYERS]


def sampler_tensor(recipe: Recipe) -> int:
    """Chips to a replica of the sampler."""
    return recipe.sampler_tensor


def _part(recipe: Recipe) -> tuple[str, int]:
    """The slice to compile for and how many of its devices.

    The trainer's part of a slice is compiled as a slice of its own where there is one of that size: the chips are the
    same, and libtpu takes several times as long for a part of a larger one.
    """
    whole, devices = recipe.hardware.slice, recipe.hardware.trainer_count()
    if devices < whole.devices and devices in SLICES[whole.chip.generation]:
        return slice_of(whole.chip.generation, devices), devices
    return parse_slice(whole.name).name, devices
