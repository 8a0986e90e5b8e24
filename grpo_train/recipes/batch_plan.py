"""The batch plan: every size of a training step, derived from the few that the recipe gives.

    plan = make_plan({"training.prompts_per_step": 16, "training.micro_batch_size_per_device": 1},
                     group_size=2, processes=2, trainer_replicas=8, sampler_replicas=8)
    plan.micro_batch_size, plan.accumulation_steps       # 8, 4

A step samples `prompts_per_step x group_size` completions in one or more rollout micro-batches, and computes the
gradient from them in one or more micro-batches.  The two are independent: a sampler holds many sequences at once, a
backward pass few.

A replica (data-parallel) is the group of devices that works on one part of a batch: one device, or with tensor
parallelism several.  A size "per device" is that of one replica: of the sampler for `rollout`, of the trainer for
`training`.  A recipe that gives its sizes so keeps them when it moves to another slice.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from grpo_train.recipes.layouts import Layout, choose_layout, row_shapes
from grpo_train.recipes.text_table import text_table

PROMPTS_PER_STEP = 16  # default
PROPOSED = 8  # an error proposes at most so many values: those nearest to the refused one
# Divisors are searched up to here, each with its counterpart: enough for any batch, and fast for any number.
LARGEST_TRIED = 100_000


@dataclass(frozen=True)
class BatchPlan:
    """All sizes of a step, over all processes where the name does not say otherwise."""

    processes: int
    trainer_replicas: int
    sampler_replicas: int
    group_size: int  # completions per prompt
    prompts_per_step: int
    rollout_micro_batch_size: int  # prompts sampled at once
    num_rollout_micro_batches: int  # per step
    completions_per_step: int
    micro_batch_size: int  # completions in one gradient computation
    micro_batch_size_per_device: int  # completions in one trainer replica
    accumulation_steps: int  # micro-batches whose gradients are added up before an update
    tokens_per_step: int | None  # at full length, so an upper bound; None: the longest prompt is not known yet
    layout: Layout  # how the policy update lays a micro-batch in rows
    longest: tuple[int, int] | None  # tokens of the longest prompt and completion; None: as tokens_per_step

    def row_shapes(self, prompt_length: int, completion_length: int) -> list[tuple[int, int]]:
        """[rows, tokens] that a micro-batch can have in the policy update, smallest first; the last one holds any.

        Args: tokens of the longest prompt, and of the longest completion.
        """
        return row_shapes(
            self.layout,
            sequences=self.micro_batch_size,
            group_size=self.group_size,
            prompt_length=prompt_length,
            completion_length=completion_length,
            replicas=self.trainer_replicas,
        )

    @property
    def rollout_micro_batch_completions(self) -> int:
        """Completions sampled at once."""
        return self.rollout_micro_batch_size * self.group_size

    @property
    def micro_batch_prompts(self) -> int:
        """Prompts in one gradient computation."""
        return self.micro_batch_size // self.group_size

    @property
    def micro_batches_in_loss(self) -> int:
        """Micro-batches that the loss takes one after another (losses.in_micro_batches); 1: Tunix takes them, each for
        itself.  On one device it is faster: between two of Tunix's, gradients, weights and moments are written."""
        return (
            self.accumulation_steps
            if self.layout == "groups"
            and self.trainer_replicas == self.processes == self.num_rollout_micro_batches == 1
            else 1
        )

    @property
    def gradients_summed(self) -> int:
        """Gradients that the optimizer adds up before an update; with 1 it keeps no sum, which is as large as the
        weights."""
        return self.accumulation_steps // self.micro_batches_in_loss


@dataclass(frozen=True)
class _Size:
    """A size as the recipe gives it."""

    key: str
    value: int
    replicas: int = 1  # over which a size per device is multiplied

    @property
    def total(self) -> int:
        return self.value * self.replicas

    def __str__(self) -> str:
        times = f" x {self.replicas} replicas = {self.total}" if self.replicas > 1 else ""
        return f"{self.key}={self.value}{times}"


def make_plan(
    given: Mapping[str, int],
    *,
    group_size: int,
    processes: int = 1,
    devices: int | None = None,
    trainer_replicas: int = 1,
    sampler_replicas: int = 1,
    longest: tuple[int, int] | None = None,
    layout: str = "padded",
    accelerator: bool = False,
) -> BatchPlan:
    """Derive a plan.

    Args:
      given: the recipe's sizes, `training.prompts_per_step`, `rollout.micro_batch_size` (default: the whole step) and
        `training.micro_batch_size` (default: the whole step); each of them, or the same with `_per_device`.
      devices: of all processes; None: not known.
      longest: tokens of the longest prompt, and of the longest completion.
      layout: training.layout; what `auto` means depends on whether the recipe names an `accelerator`.

    Raises ValueError with the recipe key and the nearest possible values.
    """
    if devices is not None and devices % processes:
        raise ValueError(
            f"hardware.processes={processes} must divide the {devices} devices: use {listed(divisors(devices))}"
        )
    default = _Size("training.prompts_per_step", PROMPTS_PER_STEP)
    prompts_given = _given_size(given, "training.prompts_per_step", trainer_replicas) or default
    rollout_given = _given_size(given, "rollout.micro_batch_size", sampler_replicas)
    micro_given = _given_size(given, "training.micro_batch_size", trainer_replicas)
    prompts = prompts_given.total
    completions = prompts * group_size
    rollout = rollout_given.total if rollout_given else prompts
    micro = micro_given.total if micro_given else completions

    # Each process gets the same number of prompts, and each trainer replica the same number of completions.  A
    # micro-batch has whole groups, the same number in each replica and process.
    prompts_unit = math.lcm(processes, trainer_replicas // math.gcd(trainer_replicas, group_size))
    micro_unit = math.lcm(group_size, trainer_replicas, processes)
    by_process = [f"{processes} processes"] if processes > 1 else []
    by_replica = [f"{trainer_replicas} trainer replicas"] if trainer_replicas > 1 else []
    reason = ", ".join([*by_process, *by_replica, f"grpo.group_size={group_size}"])
    if prompts % prompts_unit:
        unit = prompts_unit // math.gcd(prompts_unit, prompts_given.replicas)  # of the number that the recipe gives
        below = prompts_given.value // unit * unit
        raise ValueError(
            f"{prompts_given} must be a multiple of {prompts_unit} ({reason}): use "
            f"{listed([value for value in (below, below + unit) if value])}"
        )
    errors = [
        _error_text(rollout_given, prompts, "prompts", processes, ", ".join(by_process)),
        _error_text(micro_given, completions, "completions", micro_unit, reason),
    ]
    if any(errors):
        raise ValueError("; ".join(filter(None, errors)))

    layout = choose_layout(layout, accelerator=accelerator, groups=micro // group_size, replicas=trainer_replicas)
    return BatchPlan(
        processes=processes,
        trainer_replicas=trainer_replicas,
        sampler_replicas=sampler_replicas,
        group_size=group_size,
        prompts_per_step=prompts,
        rollout_micro_batch_size=rollout,
        num_rollout_micro_batches=prompts // rollout,
        completions_per_step=completions,
        micro_batch_size=micro,
        micro_batch_size_per_device=micro // trainer_replicas,
        accumulation_steps=completions // micro,
        tokens_per_step=completions * sum(longest) if longest else None,
        layout=layout,
        longest=longest,
    )


def micro_batch_sizes(plan: BatchPlan) -> list[int]:
    """All possible values of training.micro_batch_size for the plan's step, smallest first."""
    return _multiples(math.lcm(plan.group_size, plan.trainer_replicas, plan.processes), plan.completions_per_step)


def rollout_micro_batch_sizes(plan: BatchPlan) -> list[int]:
    """All possible values of rollout.micro_batch_size for the plan's step, smallest first."""
    return _multiples(plan.processes, plan.prompts_per_step)


def divisors(number: int) -> list[int]:
    """Smallest first, without those between LARGEST_TRIED and number / LARGEST_TRIED."""
    small = [n for n in range(1, min(math.isqrt(number), LARGEST_TRIED) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def listed(values: list[int]) -> str:
    """2, 4, 8 or 16"""
    return " or ".join(part for part in (", ".join(map(str, values[:-1])), str(values[-1])) if part)


# Rows of the table: attribute of the plan, recipe key that can give it, unit.
ROWS = (
    ("processes", "hardware.processes", "one per host"),
    ("trainer_replicas", None, "trainer devices / trainer_tensor"),
    ("sampler_replicas", None, "sampler devices / sampler_tensor"),
    ("group_size", "grpo.group_size", "completions per prompt"),
    ("prompts_per_step", "training.prompts_per_step", "all processes"),
    ("prompts_per_step_per_device", "training.prompts_per_step_per_device", "per trainer replica"),
    ("rollout_micro_batch_size", "rollout.micro_batch_size", "prompts sampled at once, all processes"),
    ("rollout_micro_batch_size_per_device", "rollout.micro_batch_size_per_device", "prompts per sampler replica"),
    ("num_rollout_micro_batches", None, "per step"),
    ("completions_per_step", None, "all processes"),
    ("micro_batch_size", "training.micro_batch_size", "completions per gradient, all processes"),
    ("micro_batch_size_per_device", "training.micro_batch_size_per_device", "completions per gradient and replica"),
    ("accumulation_steps", None, "gradients per update"),
    ("updates_per_step", "grpo.iterations", "from the same completions"),
    ("tokens_per_step", None, "at full length"),
)  # fmt: skip


def table(plan: BatchPlan, given: Mapping[str, int]) -> str:
    """The plan as text, given (recipe key -> value) and derived sizes side by side."""
    rows = []
    for name, key, unit in ROWS:
        label = name.removeprefix("num_").replace("_", " ")
        if key in given:
            rows.append((label, f"{given[key]:,}", "", f"{unit}: {key}"))
        elif value := getattr(plan, name, None):
            rows.append((label, "", f"{value:,}", unit))
    rows.append(("layout", "", plan.layout, "rows of the policy update: training.layout"))
    if plan.longest:
        tokens = [f"{math.prod(shape):,}" for shape in plan.row_shapes(*plan.longest)]
        span = " to ".join(dict.fromkeys((tokens[0], tokens[-1])))
        rows.append(("tokens per micro batch", "", span, "computed, padding included"))
    return text_table(("batch plan", "given", "derived", ""), rows, right=2)


def _given_size(given: Mapping[str, int], key: str, replicas: int) -> _Size | None:
    """The size of a key, or of the same key per device; None where the recipe gives neither."""
    per_device = f"{key}_per_device"
    if key in given:
        return _Size(key, given[key])
    return _Size(per_device, given[per_device], replicas) if per_device in given else None


def _error_text(size: _Size | None, step: int, what: str, unit: int, reason: str) -> str | None:
    """Why the step cannot be split into parts of this size, with the possible values; None where it can."""
    if size is None or (size.total % unit == 0 and step % size.total == 0):
        return None
    possible = _multiples(unit, step)
    of_key = [total // size.replicas for total in possible if total % size.replicas == 0]
    if of_key:
        proposed = listed(_nearest(of_key, size.value))
    else:  # the replicas do not divide the step, so no number per device does
        proposed = f"{size.key.removesuffix('_per_device')}={listed(_nearest(possible, size.total))} instead"
    multiple = f" and be a multiple of {unit} ({reason})" if unit > 1 else ""
    return f"{size} must divide the {step} {what} of a step{multiple}: use {proposed}"


def _multiples(unit: int, number: int) -> list[int]:
    """The divisors of `number` that are multiples of `unit`."""
    return [unit * n for n in divisors(number // unit)]


def _nearest(values: list[int], value: int) -> list[int]:
    """The PROPOSED values that are nearest to this one, smallest first."""
    return sorted(sorted(values, key=lambda n: abs(math.log(n) - math.log(value)))[:PROPOSED])
