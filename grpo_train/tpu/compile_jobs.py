"""The programs that a recipe runs on the TPU, and the compiler's report on one: plain data, read without JAX.

A `Program` holds everything that determines what is compiled, and nothing else: two recipes whose programs are equal
share one compilation.  Learning rate, clipping and the like are constants in it, and change neither size nor time.
"""

import hashlib
import importlib.metadata
import json
from typing import Literal

from pydantic import BaseModel, ConfigDict

from grpo_train.recipes import ModelRecipe
from grpo_train.recipes.layouts import Layout
from grpo_train.recipes.schema import DType, LoRARecipe

GIB = 2**30  # bytes

# Layers of the two small compilations from which the work of the whole model is extrapolated.
FEW_LAYERS = (2, 4)

Kind = Literal["update", "logps", "prefill", "decode", "attention"]
KINDS: dict[Kind, str] = {
    "update": "policy update",
    "logps": "log-probabilities",
    "prefill": "sampler's prefill",
    "decode": "sampler's decoding",
    "attention": "vLLM attention kernel",
}


class SavedModel(BaseModel):
    """Plain data, saved as JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Program(SavedModel):
    """One program.  Lengths are in tokens.

    `update` and `logps` run on the trainer's devices, on a micro-batch; `prefill` and `decode` on one process's devices
    of the sampler, on the completions that the process samples at once.  The last two are those of
    rollout.engine=tunix: of vLLM, which compiles its own, see AttentionKernel.
    """

    kind: Kind
    model: ModelRecipe
    accelerator: str
    devices: int  # the first of the slice
    tensor: int
    sequences: int  # over these devices
    prompt_length: int
    completion_length: int
    temperature: float
    reference: bool = False  # update: the KL penalty's log-probabilities come in
    old: bool = False  # update: the old policy's come in
    loss: Literal["jax", "chunked", "pallas"] = "jax"
    layout: Layout = "padded"
    rows: tuple[int, int] | None = None  # update, of another layout: [rows, tokens] that hold the sequences
    quick: bool = False  # low compiler optimization effort: less time, rougher sizes (docs/tpu.md)
    layers: int | None = None  # number of layers, unrolled; None: the whole model, as one scan
    lora: LoRARecipe = LoRARecipe()  # update: the adapters, if it has a rank
    # update: of the optimizer, which is made of the recipe
    optimizer: Literal["adamw", "lion"] = "adamw"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    optimizer_dtype: DType = "float32"

    @property
    def title(self) -> str:
        layers = f", {self.layers} layers" if self.layers else ""
        return f"{KINDS[self.kind]} of {self._size}{layers}, {self.devices} devices of {self.accelerator}"

    @property
    def _size(self) -> str:
        """Of what it computes: rows and tokens."""
        if self.kind == "prefill":
            return f"{self.sequences} x {self.prompt_length} tokens"
        if self.kind == "decode":
            return f"{self.sequences} x {self.completion_length} tokens"
        if self.rows:
            rows, tokens = self.rows
            return f"{rows} x {tokens} tokens, {self.layout}"
        return f"{self.sequences} x {self.prompt_length + self.completion_length} tokens"

    def key(self, versions: dict[str, str]) -> str:
        """A name for the program as these versions compile it."""
        facts = json.dumps([self.model_dump(mode="json"), versions], sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()[:24]


class SingleUpdate(Program):
    """The update of a step that is one micro-batch: no sum of gradients is kept for it.

    A class of its own, so that the keys of the other programs, and saved results, do not change with its fields.
    """

    sums_gradients: Literal[False] = False


class CutSampler(Program):
    """Prefill or decode of a recipe with top-k or top-p.

    A class of its own, so that the keys of the other programs, and saved results, do not change with its fields.
    """

    top_k: int | None
    top_p: float


class AttentionKernel(Program):
    """The attention kernel of tpu-inference, on the chips of one of vLLM's replicas, which has `sequences` at once.

    A class of its own, so that the keys of the other programs, and saved results, do not change with its fields.
    """

    tokens: int  # of prompts, computed together
    page_size: int | None  # tokens of a block of the KV cache; None: tpu-inference chooses

    def key(self, versions: dict[str, str]) -> str:
        return super().key(versions | {"tpu-inference": importlib.metadata.version("tpu-inference")})


class ProgramTime(SavedModel):
    """The estimated time of one run of a program on one chip, in seconds (grpo_train.tpu.program_time)."""

    seconds: float
    by_kind: dict[str, float]  # product, bytes, arithmetic, collective, kernel, waiting: they add up to about seconds
    open_loops: tuple[float, ...] = ()  # one turn of each loop that runs until the data says so; not in seconds
    untimed_kernels: int = 0  # calls of kernels that count with their bytes only
    simulated: float | None = None  # libtpu's own simulation of its schedule, where it wrote one that can be believed
    libtpu: str = ""  # its version


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
    parameter_bytes: int = 0  # of the model as the sampler has it (model.dtype), over all chips
    parameter_shard: int = 0  # bytes of the model's parameters on one chip of the trainer
    optimizer_shard: int = 0  # bytes of optimizer state and accumulated gradients on one chip
    sampler_shard: int = 0  # prefill, decode: bytes of the sampler's weights on one chip
    cache_shard: int = 0  # prefill, decode: bytes of the KV cache on one chip, without the padding of its layout
    num_layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    vocabulary: int = 0
    embedding_bytes: int = 0  # of an untied embedding, of which decoding reads single rows only
    largest_weight: int = 0  # bytes of the embedding, or of one of the MLP's if it is larger
    width: int = 0  # of the widest layer: the MLP's, or the embedding's
    time: ProgramTime | None = None  # of one compiled with full effort
    not_estimated: str | None = None  # why there is no time
    cpu_seconds: float | None = None  # that the compiler took, over all of its threads


def few_layers(program: Program) -> list[Program]:
    """The same program with a few unrolled layers: the compiler counts a scanned layer's work once.

    With the loss of `jax`: the work is the same, and the compiler does not count inside a kernel.
    """
    return [program.model_copy(update={"layers": layers, "quick": False, "loss": "jax"}) for layers in FEW_LAYERS]
