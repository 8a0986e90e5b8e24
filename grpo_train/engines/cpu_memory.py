"""What a run takes of a CPU's memory, said before it starts.

    needed = estimate(sizes, recipe, plan, prompt_length=160)
    needed.gib, needed.phase, needed.parts       # 12.8, "update", {"weights": ..., ...} in bytes
    require(sizes, recipe, plan, 160)            # a CourseError where the machine has less

A run has phases, one after the other, and each holds what is named here; the largest decides.  The parts are arithmetic
on sizes, with the forms that a run has on one CPU: an update writes over the old weights, the sampler has none
meanwhile, and a converter has a process of its own.  What XLA needs beside them was read from the programs that it
compiled for Qwen2.5-0.5B, and the sum was compared with whole runs (dev/benchmarks/step_memory.py, docs/results.md).
"""

from dataclasses import dataclass
from typing import Any

from grpo_lib.common.errors import CourseError
from grpo_train.engines import model_files
from grpo_train.engines.model_files import ITEMSIZE
from grpo_train.recipes import Recipe, continuing
from grpo_train.recipes.batch_plan import BatchPlan
from grpo_train.runs import machine

GIB = 2**30
CHUNK = 384 * 2**20  # losses.token_logps.CHUNK, which imports JAX
# Python, JAX, MaxText, Tunix and TensorFlow's libraries; and later the programs that they have compiled.
LIBRARIES, PROGRAMS = int(0.8 * GIB), int(0.5 * GIB)
CONVERTER = int(0.4 * GIB)  # the libraries of the process that exports
IN_PROCESS = 2**26  # engines.conversion.SMALL: a small model has no process for it
# A block that is freed waits for one that fits, where blocks do not go back at once (model_files.LARGE).
KEPT = 0.25


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model that is trained, from its config.json."""

    layers: int
    width: int
    mlp: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    tied: bool

    @property
    def of_layers(self) -> int:
        """Numbers in the matrices of all layers."""
        attention = self.width * self.head * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.width * self.mlp)

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.width

    @property
    def weights(self) -> int:
        """All but norms and biases, which are few."""
        return self.of_layers + self.embedding * (1 if self.tied else 2)

    def adapters(self, rank: int) -> int:
        """Numbers in adapters of this rank, on all matrices of the layers."""
        inner = self.heads * self.head
        attention = 2 * (self.width + inner) + 2 * (self.width + self.kv_heads * self.head)
        return self.layers * rank * (attention + 3 * (self.width + self.mlp))


def is_large_on_cpu(recipe: Recipe) -> bool:
    """Whether a run on one CPU gives memory back between the parts of a step, and saves while nothing else is done."""
    import jax

    if jax.device_count() > 1 or jax.default_backend() != "cpu":
        return False
    config = model_files.read_config(model_files.model_directory(recipe.model, weights=False))
    return sizes_of(config).weights * ITEMSIZE[recipe.model.trainer_dtype] >= model_files.LARGE


def sizes_of(config: dict[str, Any]) -> ModelSizes:
    """From a config.json.  Raises CourseError where a size is not there."""
    needed = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    if missing := [key for key in needed if not config.get(key)]:
        raise CourseError(f"config.json of the model has no {', '.join(missing)}; copy or download the model again")
    heads, width = config["num_attention_heads"], config["hidden_size"]
    return ModelSizes(
        layers=config["num_hidden_layers"],
        width=width,
        mlp=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head=config.get("head_dim") or width // heads,
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings")),
    )


@dataclass(frozen=True)
class Estimate:
    """Bytes that a run holds in each of its phases, by part."""

    phases: dict[str, dict[str, int]]

    @property
    def phase(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=self.total)

    @property
    def parts(self) -> dict[str, int]:
        return self.phases[self.phase]

    @property
    def gib(self) -> float:
        """At the peak, of all processes of the run together."""
        return self.total(self.phase) / GIB

    def total(self, phase: str) -> int:
        return sum(self.phases[phase].values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.parts.items() if size >= GIB / 20)
        return f"{self.gib:.1f} GiB at its peak, which is {self.phase}: {parts}"


def estimate(sizes: ModelSizes, recipe: Recipe, plan: BatchPlan, prompt_length: int) -> Estimate:
    """What a run on one CPU takes.

    Args:
      prompt_length: tokens of the longest training prompt.
    """
    weight, rank = ITEMSIZE[recipe.model.trainer_dtype], recipe.lora.rank
    trained = (sizes.adapters(rank) if rank else sizes.weights) * weight
    is_small = sizes.weights * weight < model_files.LARGE
    held = _held(sizes, recipe, plan)
    sampler = {"sampler": sizes.weights * ITEMSIZE[recipe.model.dtype]}
    merged = {"merged matrices": sizes.of_layers * weight if rank else 0}
    # The gradients of all micro-batches, and what XLA keeps of the optimizer's step.
    update = {"gradients": trained, "the optimizer's step": 3 * trained // 4}

    phases = {"comparing sampler and trainer": held | sampler | _forward(sizes, recipe)}
    phases["an update"] = held | update | _update(sizes, recipe, plan, prompt_length)
    phases["a sync"] = held | sampler | merged
    phases["the export"] = _export(sizes, recipe)
    if not rank:  # else it is small; a large model is saved before the sync
        phases["a checkpoint"] = held | {"what is being written": _written(sizes, recipe)}
    if is_small:
        if not rank:
            phases["a checkpoint"] |= sampler
        for parts in phases.values():
            computed = sum(parts.values()) - LIBRARIES - PROGRAMS
            parts["kept of what was freed"] = int(KEPT * computed)
    return Estimate(phases)


def _held(sizes: ModelSizes, recipe: Recipe, plan: BatchPlan) -> dict[str, int]:
    """In all phases but the export."""
    weight, rank = ITEMSIZE[recipe.model.trainer_dtype], recipe.lora.rank
    adapters = sizes.adapters(rank) if rank else 0
    trained = adapters or sizes.weights
    sums = plan.gradients_summed > 1
    return {
        "libraries": LIBRARIES,
        "programs": PROGRAMS,
        "weights": (sizes.weights + adapters) * weight,
        "moments": 2 * trained * ITEMSIZE[recipe.training.optimizer_dtype],
        "sum of gradients": sums * trained * ITEMSIZE[recipe.training.optimizer_dtype],
        "other models": _other_models(sizes, recipe),
    }


def _export(sizes: ModelSizes, recipe: Recipe) -> dict[str, int]:
    """The converter has the weights three times: as they were saved, as they are exported, and as a file's bytes."""
    weights = sizes.weights * ITEMSIZE[recipe.model.dtype]
    libraries = CONVERTER if weights > IN_PROCESS else 0
    return {"libraries": LIBRARIES, "programs": PROGRAMS, "converter": libraries + 3 * weights}


def _other_models(sizes: ModelSizes, recipe: Recipe) -> int:
    """The reference of a KL penalty, the base by which a KL is watched, and the policy before a step's first update;
    with adapters the first two are in the actor."""
    copies = 0
    if not recipe.lora.rank:
        copies += bool(recipe.grpo.beta) + 2 * recipe.grpo.kl_is_watched  # it is copied while it is used
    copies += recipe.grpo.iterations > 1
    return copies * sizes.weights * ITEMSIZE[recipe.model.dtype]


def _head(sizes: ModelSizes, recipe: Recipe, tokens: int) -> dict[str, int]:
    """The embedding as a tied head is rounded, and float32 logits: some or all of them, twice."""
    logits = 4 * tokens * sizes.vocabulary
    if recipe.loss.implementation != "jax":
        logits = min(logits, CHUNK)
    return {"rounded head": 4 * sizes.embedding if sizes.tied else 0, "logits": 2 * logits}


def _forward(sizes: ModelSizes, recipe: Recipe) -> dict[str, int]:
    """The trainer's log-probabilities of a few completions."""
    copied = sizes.of_layers * ITEMSIZE[recipe.model.trainer_dtype]
    return {"matrices by layer": copied} | _head(sizes, recipe, tokens=recipe.rollout.max_completion_length)


def _update(sizes: ModelSizes, recipe: Recipe, plan: BatchPlan, prompt_length: int) -> dict[str, int]:
    """What XLA holds beside arguments and results while it computes a micro-batch's gradient."""
    item, completion = ITEMSIZE[recipe.model.trainer_dtype], recipe.rollout.max_completion_length
    rows, width = plan.row_shapes(prompt_length, completion)[-1]
    tokens = rows * width
    of_layer = _activations(sizes, plan, prompt_length, completion, rows, width)
    between_layers = sizes.layers * 4 * tokens * sizes.width
    matrices, embeddings = sizes.of_layers * item, (1 if sizes.tied else 2) * sizes.embedding * item
    # A scan wants the stacked matrices by layer, and stacks their gradients so; straight code does the second alone.
    recomputes = recipe.model.remat == "full"
    gradients = 0 if recipe.lora.rank else matrices + embeddings
    return {
        "matrices by layer": matrices if recomputes else 0,
        "gradients of a micro-batch": gradients,
        "activations": between_layers + of_layer if recomputes else sizes.layers * of_layer,
    } | _head(sizes, recipe, tokens)


def _activations(sizes: ModelSizes, plan: BatchPlan, prompt_length: int, completion: int, rows: int, width: int) -> int:
    """What a layer keeps for its gradient: of the MLP and of attention four arrays each, nine as wide as the model."""
    square = rows * width**2
    if plan.layout == "groups":  # losses.slots
        of_prompt, of_each = prompt_length - 1, completion + 1
        slots = of_prompt**2 + plan.group_size * of_each * (of_prompt + of_each)
        square = min(square, rows * slots)
    return 4 * (4 * rows * width * sizes.mlp + 4 * sizes.heads * square + 9 * rows * width * sizes.width)


def _written(sizes: ModelSizes, recipe: Recipe) -> int:
    """Orbax compresses weights and moments while it writes them; 5.5 GiB took 4.0 more."""
    saved = ITEMSIZE[recipe.model.trainer_dtype] + 2 * ITEMSIZE[recipe.training.optimizer_dtype]
    return int(0.75 * sizes.weights * saved)


def require(sizes: ModelSizes, recipe: Recipe, plan: BatchPlan, prompt_length: int) -> Estimate:
    """The estimate of a run on one CPU.

    Raises CourseError where the machine has less: in one line what the run needs, what there is, and what to change.
    """
    needed, free = estimate(sizes, recipe, plan, prompt_length), machine.free_memory()
    if free is not None and needed.total(needed.phase) > free:
        # Sampling is never what takes most.
        remedies = [each for each in continuing.memory_remedies(recipe, plan) if not each.startswith("rollout.")]
        if not recipe.lora.rank:
            remedies.insert(0, "lora.rank=16, which trains adapters alone")
        raise CourseError(
            f"the run needs {needed}; this machine has {free / GIB:.1f} GiB free: set {', or '.join(remedies)}; or end "
            "other programs"
        )
    return needed
