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

import yaml

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_train.engines import model_files
from grpo_train.engines.model_files import ITEMSIZE
from grpo_train.recipes import ModelRecipe, Recipe, continuing, parse_recipe
from grpo_train.recipes.batch_plan import BatchPlan
from grpo_train.runs import machine

GIB = 2**30
# What other modules have that import JAX; test_cpu_memory.py holds them equal.
CHUNK = 384 * 2**20  # losses.token_logps.CHUNK
COLD_START_ROWS = 4  # cold_start.ROWS
SCORED_PROMPTS = 32  # training.check_first_sync
# Python, JAX, MaxText, Tunix and TensorFlow's libraries; and later the programs that they have compiled.
LIBRARIES, PROGRAMS = int(0.8 * GIB), int(0.5 * GIB)
CONVERTER = int(0.4 * GIB)  # the libraries of the process that exports
IN_PROCESS = 2**26  # engines.conversion.SMALL: a small model has no process for it
# A block that is freed waits for one that fits, where blocks do not go back at once (model_files.LARGE).
KEPT = 0.25
# In the cold start it is about as much again: SmolLM2 took 10.3 and 12.9 GiB there, twice what it has in use at once.
KEPT_IN_COLD_START = 1.0


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

    return jax.device_count() == 1 and jax.default_backend() == "cpu" and is_large(recipe.model)


def is_large(model: ModelRecipe) -> bool:
    """Whether giving memory back takes no time beside a step with so many weights."""
    config = model_files.read_config(model_files.model_directory(model, weights=False))
    return sizes_of(config).weights * ITEMSIZE[model.trainer_dtype] >= model_files.LARGE


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
    step = {"gradients": trained, "the optimizer's step": 3 * trained // 4}

    phases = {"sampling": held | sampler | _sampling(sizes, recipe, plan, prompt_length)}
    phases["comparing sampler and trainer"] = held | sampler | _forward(sizes, recipe, plan, prompt_length)
    phases["an update"] = held | step | _update(sizes, recipe, plan, prompt_length)
    phases["a sync"] = held | sampler | merged
    phases["the export"] = _export(sizes, recipe)
    # Saved while the next update is computed, which cannot write over what is not saved yet.
    saved = {"weights and moments being saved": held["weights"] + held["moments"]}
    if recipe.training.cold_start:
        phases["the cold start"] = held | step | saved | _cold_start(sizes, recipe, prompt_length) | {"other models": 0}
    written = {"what is being written": _written(sizes, recipe)}
    if not rank:  # else it is small; a large model is saved before the sync
        phases["a checkpoint"] = held | written
    if is_small:
        if not rank:
            phases["a checkpoint"] |= sampler
            phases["an update"] |= saved
        for phase, parts in phases.items():
            computed = sum(parts.values()) - LIBRARIES - PROGRAMS
            kept = KEPT_IN_COLD_START if phase == "the cold start" else KEPT
            parts["kept of what was freed"] = int(kept * computed)
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
    old = 2 * (recipe.grpo.iterations > 1)  # that, too
    return sizes.weights * (copies * ITEMSIZE[recipe.model.dtype] + old * ITEMSIZE[recipe.model.trainer_dtype])


def _head(sizes: ModelSizes, recipe: Recipe, tokens: int) -> dict[str, int]:
    """The embedding as a tied head is rounded, and float32 logits: some or all of them, twice."""
    logits = 4 * tokens * sizes.vocabulary
    if recipe.loss.implementation != "jax":
        logits = min(logits, CHUNK)
    return {"rounded head": 4 * sizes.embedding if sizes.tied else 0, "logits": 2 * logits}


def _sampling(sizes: ModelSizes, recipe: Recipe, plan: BatchPlan, prompt_length: int) -> dict[str, int]:
    """Keys and values of all tokens, and the logits of the next one, of a step or an evaluation."""
    item = ITEMSIZE[recipe.model.dtype]
    sequences = max(plan.rollout_micro_batch_completions, recipe.evaluation.batch_size)
    cached = sequences * (prompt_length + recipe.rollout.max_completion_length)
    scored = sequences * (1 if item == 4 else prompt_length)  # Tunix's own sampler scores prompts, too
    return {
        "keys and values": 2 * cached * sizes.layers * sizes.kv_heads * sizes.head * item,
        "logits": 2 * 4 * scored * sizes.vocabulary,
    }


def _forward(sizes: ModelSizes, recipe: Recipe, plan: BatchPlan, prompt_length: int) -> dict[str, int]:
    """The trainer's log-probabilities of as many completions as a micro-batch has, in padded rows."""
    copied = sizes.of_layers * ITEMSIZE[recipe.model.trainer_dtype]
    tokens = min(SCORED_PROMPTS, plan.micro_batch_size) * (prompt_length + recipe.rollout.max_completion_length)
    head = _head(sizes, recipe, tokens)
    return {"matrices by layer": copied} | head | {"logits": head["logits"] // 2}  # without their gradients


def _update(sizes: ModelSizes, recipe: Recipe, plan: BatchPlan, prompt_length: int) -> dict[str, int]:
    """What XLA holds beside arguments and results while it computes a micro-batch's gradient."""
    rows, width = plan.row_shapes(prompt_length, recipe.rollout.max_completion_length)[-1]
    return _gradient(sizes, recipe, rows, width, pairs=_pairs(recipe, plan, prompt_length, rows, width))


def _cold_start(sizes: ModelSizes, recipe: Recipe, prompt_length: int) -> dict[str, int]:
    """The same for the worked solutions of the cold start, in padded rows."""
    width = prompt_length + recipe.rollout.max_completion_length
    return _gradient(sizes, recipe, COLD_START_ROWS, width, pairs=COLD_START_ROWS * width**2)


def _gradient(sizes: ModelSizes, recipe: Recipe, rows: int, width: int, pairs: int) -> dict[str, int]:
    """Of rows of so many tokens; `pairs`: those that attention computes in all of them."""
    item, tokens = ITEMSIZE[recipe.model.trainer_dtype], rows * width
    # Of the MLP and of attention four arrays each are kept, and nine as wide as the model.
    of_layer = 4 * (4 * tokens * sizes.mlp + 4 * sizes.heads * pairs + 9 * tokens * sizes.width)
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


def _pairs(recipe: Recipe, plan: BatchPlan, prompt_length: int, rows: int, width: int) -> int:
    """Pairs of tokens for which attention computes a score: all of a row, or those of its slots (losses.slots)."""
    if plan.layout == "groups" and recipe.model.dtype == "float32":
        of_prompt, of_each = prompt_length - 1, recipe.rollout.max_completion_length + 1
        slots = of_prompt**2 + plan.group_size * of_each * (of_prompt + of_each)
        if 2 * slots <= width**2:
            return rows * slots
    return rows * width**2


def _written(sizes: ModelSizes, recipe: Recipe) -> int:
    """Orbax compresses weights and moments while it writes them; 5.5 GiB took 4.0 more."""
    saved = ITEMSIZE[recipe.model.trainer_dtype] + 2 * ITEMSIZE[recipe.training.optimizer_dtype]
    return int(0.75 * sizes.weights * saved)


def require(sizes: ModelSizes, recipe: Recipe, plan: BatchPlan, prompt_length: int) -> Estimate:
    """The estimate of a run on one CPU.

    Raises CourseError where the machine has less: in one line what the run needs, what there is, and what to change.
    """
    environment.release_freed_memory()  # what an earlier run of this process kept is free, too
    needed, free = estimate(sizes, recipe, plan, prompt_length), machine.free_memory()
    if free is None or needed.total(needed.phase) <= free:
        return needed
    remedies = _remedies(sizes, recipe, plan, prompt_length)
    change = f": set {', or '.join(remedies)}; or end other programs" if remedies else "; end other programs"
    raise CourseError(f"the run needs {needed}; this machine has {free / GIB:.1f} GiB free{change}")


def _remedies(sizes: ModelSizes, recipe: Recipe, plan: BatchPlan, prompt_length: int) -> list[str]:
    """Changes of the recipe with which a run takes at least a twentieth less, each as `section.key=value`."""
    tried = [
        *continuing.memory_remedies(recipe, plan),
        f"evaluation.batch_size={-(-recipe.evaluation.batch_size // 4)}",
    ]
    if not recipe.lora.rank:
        tried.insert(0, "lora.rank=16")
    before, found = estimate(sizes, recipe, plan, prompt_length).gib, []
    for change in tried:
        changed = _changed(recipe, change)
        if changed and estimate(sizes, changed, changed.plan_on(1, 1), prompt_length).gib < 0.95 * before:
            found.append(change)
    return [each.replace("lora.rank=16", "lora.rank=16 (adapters alone, in a new run)") for each in found]


def _changed(recipe: Recipe, change: str) -> Recipe | None:
    """The recipe with `section.key=value`, if it accepts that."""
    data = recipe.model_dump(mode="json")
    name, value = change.split("=")
    section, key = name.split(".")
    data[section][key] = yaml.safe_load(value)
    try:
        return parse_recipe(data)
    except CourseError:
        return None
