"""Which keys of a recipe may change when a run continues, and why.

    refused(old, new, done=14)      # ["grpo.group_size: 8 != 16"]: what keeps a run of `old` from going on with `new`
    describe_changes(old, new)      # ["training.micro_batch_size: null -> 64"]

A key may change if the run still ends as a run would that had the new value from its first step: up to the rounding of
sums, or with vLLM up to the random numbers of its sampler.  grpo.beta is the exception: a warning advises to raise it,
and the run's changes.jsonl keeps when.  Everything that MAY_CHANGE does not name is refused.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import BaseModel

from grpo_lib.common.errors import CourseError
from grpo_train.recipes import batch_plan
from grpo_train.recipes.batch_plan import BatchPlan
from grpo_train.recipes.loading import changed_values, parse_recipe
from grpo_train.recipes.schema import Recipe, TemperatureSchedule


@dataclass(frozen=True)
class Rule:
    """Keys that may change for one reason.  `unless` says why a change is refused nevertheless, or None."""

    keys: tuple[str, ...]
    reason: str
    unless: Callable[[Recipe, Recipe, int], str | None] = lambda *_: None  # of old recipe, new recipe, finished steps


def _why_not_steps(old: Recipe, new: Recipe, done: int) -> str | None:
    if new.training.steps < done:
        return f"{done} steps are done"
    if new.training.schedule != "constant" and not new.training.schedule_steps:
        return f"with training.schedule={new.training.schedule} the rate of each step follows from their number"
    if (new.grpo.dynamic_sampling or 1) > 1:
        return "grpo.dynamic_sampling takes its spare prompts from behind the last step"
    temperature = new.rollout.temperature
    if isinstance(temperature, TemperatureSchedule) and temperature.steps is None:
        return "rollout.temperature without steps of its own ends at the last step"
    return None


def _why_not_hardware(old: Recipe, new: Recipe, done: int) -> str | None:
    if new.training.prompts_per_step_per_device and new.plan.prompts_per_step != old.plan.prompts_per_step:
        return (
            f"with training.prompts_per_step_per_device a step would have {new.plan.prompts_per_step} prompts, and has "
            f"{old.plan.prompts_per_step}"
        )
    return None


def _why_not_beta(old: Recipe, new: Recipe, done: int) -> str | None:
    if not old.grpo.beta:
        return "a run that began with 0 has loaded no reference model"
    if new.grpo.target_kl:
        return "grpo.target_kl adapts it, and the checkpoint has its value"
    if new.grpo.beta < old.grpo.beta:
        return "it may be raised, and not lowered"
    return None


def _why_not_checkpoints(old: Recipe, new: Recipe, done: int) -> str | None:
    return "its checkpoints are in the old place" if done else None


# Of vLLM's engine: how it divides memory and work.  Others, such as kv_cache_dtype, change what it computes.
VLLM_OPTIONS = (
    "block_size", "cpu_offload_gb", "enable_chunked_prefill", "enable_prefix_caching", "kv_cache_memory_bytes",
    "max_num_batched_tokens", "max_num_seqs", "num_gpu_blocks_override", "swap_space",
)  # fmt: skip

MAY_CHANGE = (
    Rule(
        ("training.micro_batch_size", "training.micro_batch_size_per_device", "training.layout"),
        "the gradient of a step is the same sum, cut into other parts",
    ),
    Rule(
        ("rollout.micro_batch_size", "rollout.micro_batch_size_per_device"),
        "Tunix's sampler draws the same completions. vLLM draws others from the same distribution, and so does "
        "`grpo.dynamic_sampling` where it samples again",
    ),
    Rule(("loss.implementation", "model.remat"), "the value is the same; memory and time differ"),
    Rule(
        (
            "hardware.accelerator",
            "hardware.trainer_devices",
            "hardware.trainer_tensor",
            "hardware.sampler_devices",
            "hardware.sampler_tensor",
            "hardware.processes",
        ),
        "data, seeds and groups do not depend on devices and processes; sums are rounded in another order. vLLM draws "
        "other completions from the same distribution. Not where `training.prompts_per_step_per_device` then gives a "
        "step other prompts",
        unless=_why_not_hardware,
    ),
    Rule(
        ("rollout.vllm.memory_fraction", *(f"rollout.vllm.options.{name}" for name in VLLM_OPTIONS)),
        "how vLLM divides memory and work; with another number of sequences at a time it draws other completions from "
        "the same distribution",
    ),
    Rule(
        ("evaluation.batch_size",),
        "greedy answers do not depend on it, finished ones are kept; with `evaluation.samples` other ones are drawn",
    ),
    Rule(
        (
            "name",
            "rollout.max_mean_gap",
            "training.checkpoint_every",
            "training.max_to_keep",
            "training.stop_after",
            "training.validate_every",
            "training.profile_steps",
            "grpo.watch_kl",
            "tracking.wandb",
        ),
        "what is kept, checked and logged, and when; no step looks at it",
    ),
    Rule(
        ("training.steps",),
        "with `schedule: constant`, or with `schedule_steps`, the rate of a step does not depend on it. Not below the "
        "steps that are done, nor with `grpo.dynamic_sampling` above 1, which takes its spare prompts from behind the "
        "last step, nor with a schedule of `rollout.temperature` that has no steps of its own",
        unless=_why_not_steps,
    ),
    Rule(
        ("grpo.beta",),
        "**changes the results**: it may be raised, from above 0, since a warning advises it when the KL grows. Not "
        "from 0, because such a run has no reference model, and not with `grpo.target_kl`, which adapts it",
        unless=_why_not_beta,
    ),
    Rule(
        ("training.checkpoints",),
        "only before the first step: later its checkpoints are in the old place. Whoever reads a finished run "
        "(notebook 05) may leave it out",
        unless=_why_not_checkpoints,
    ),
)
RULES = {key: rule for rule in MAY_CHANGE for key in rule.keys}
# These change what the run is, so that a run with the old value is not yet one with the new value.
OF_THE_RUN = ("training.steps", "grpo.beta")


def refused(old: Recipe, new: Recipe, done: int) -> list[str]:
    """What keeps a run of the recipe `old` from going on with `new` after `done` steps: `key: a != b (reason)` each."""
    found = []
    for key, (before, after) in changed_values(old, new).items():
        rule = RULES.get(key)
        reason = rule.unless(old, new, done) if rule else None
        if reason:
            found.append(f"{key}: {before} != {after} ({reason})")
        elif not rule:
            found.append(f"{key}: {before} != {after}")
    return found


def describe_changes(old: Recipe, new: Recipe) -> list[str]:
    """Fields in which two recipes differ, as `section.key: old -> new`, values as YAML has them."""
    return [describe_change(key, *values) for key, values in changed_values(old, new).items()]


def describe_change(key: str, before: object, after: object) -> str:
    return f"{key}: {json.dumps(before)} -> {json.dumps(after)}"


def memory_remedies(recipe: Recipe, plan: BatchPlan) -> list[str]:
    """Changes with which a step needs less memory and has the same results, as `section.key=value`.

    The next smaller micro-batches that the recipe accepts; after them, what recomputes.
    """
    sizes = {
        "training": [size for size in batch_plan.micro_batch_sizes(plan) if size < plan.micro_batch_size],
        "rollout": [
            size for size in batch_plan.rollout_micro_batch_sizes(plan) if size < plan.rollout_micro_batch_size
        ],
    }
    found = []
    for section, smaller in sizes.items():
        name = "micro_batch_size"
        per_device = getattr(recipe, section).micro_batch_size_per_device
        if per_device:
            name = "micro_batch_size_per_device"
            smaller = batch_plan.divisors(per_device)[:-1]
        accepted = [size for size in smaller if _accepts(recipe, section, name, size)]
        found += [f"{section}.{name}={size}" for size in accepted[-1:]]
    if recipe.loss.implementation == "jax":
        found.append("loss.implementation=chunked")
    if recipe.model.remat != "full":
        found.append("model.remat=full")
    return found


def _accepts(recipe: Recipe, section: str, name: str, value: int) -> bool:
    data = recipe.model_dump(mode="json")
    data[section][name] = value
    try:
        parse_recipe(data)
    except CourseError:
        return False
    return True


def known_keys(section: type[BaseModel] = Recipe, prefix: str = "") -> list[str]:
    """All keys of the schema as `section.key`, in its order; `problems`, a section or a list, is one key."""
    keys = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            keys += known_keys(kind, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def table() -> str:
    """MAY_CHANGE as a Markdown table, for docs/long-runs.md."""
    options = "rollout.vllm.options."
    rows = ["| key | why |", "|---|---|"]
    known = known_keys()
    for rule in MAY_CHANGE:
        cells = [f"`{key}`" for key in rule.keys if key in known]
        if names := [f"`{key.removeprefix(options)}`" for key in rule.keys if key.startswith(options)]:
            cells.append(f"in `rollout.vllm.options`: {', '.join(names)}")
        rows.append(f"| {', '.join(cells)} | {rule.reason} |")
    return "\n".join(rows) + "\n"
