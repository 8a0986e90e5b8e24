"""The batch plan of a run: from the sizes that a person knows to all the others.

    plan = make_plan(group_size=2, processes=2, devices=8, trainer_shards=8, sampler_shards=8,
                     prompts_per_step=16, rollout_prompts_per_device=1, micro_batch_per_device=1)
    plan.rollout_batch, plan.passes, plan.local_micro_batch, plan.accumulation_steps       # 4, 2, 4, 4

A step samples `prompts_per_step x group_size` completions in one or more passes, and computes the gradient from them
in one or more micro-batches.  The two are separate: a sampler holds many sequences, a backward pass few.

A share is what one data-parallel copy of the model works on: a device, or several that hold one copy together (tensor
parallelism).  Sizes "per device" are per share, for whoever shares a model has no batch of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PROMPTS_PER_STEP = 16  # where nothing is said

# How many values a sentence proposes at most: those nearest to the one that was refused.
PROPOSED = 8
# Divisors are looked for up to here, and with each its counterpart: enough for any batch, and never a long wait.
LARGEST_TRIED = 100_000

TRAINER_SHARES = "trainer shares (devices / trainer_tensor)"
SAMPLER_SHARES = "sampler shares (devices / sampler_tensor)"


@dataclass(frozen=True)
class BatchPlan:
    """Every size of a step.  Built by `make_plan`, so that they multiply out.

    Attributes:
      processes: how many take part, one to a host.
      trainer_shards, sampler_shards: shares of the trainer and of the sampler, over all processes.
      group_size: completions per prompt.
      prompts_per_step: prompts, all processes together.
      prompts_per_process: prompts of a step in one process.
      rollout_batch: prompts in one process and one pass.
      passes: rollouts of a step, one after the other.
      completions_per_step: completions, all processes together.
      local_batch: completions of a step in one process.
      micro_batch_size: completions of one gradient computation, all processes together.
      local_micro_batch: completions of one gradient computation in one process.
      micro_batch_per_device: completions of one gradient computation in one share of the trainer.
      accumulation_steps: gradient computations that are added up before an update.
      updates_per_step: updates that each batch of completions serves.
      tokens_per_step: tokens of prompts and completions at full length, an upper bound; None where the longest prompt
        is not known before the problems are read.
    """

    processes: int
    trainer_shards: int
    sampler_shards: int
    group_size: int
    prompts_per_step: int
    prompts_per_process: int
    rollout_batch: int
    passes: int
    completions_per_step: int
    local_batch: int
    micro_batch_size: int
    local_micro_batch: int
    micro_batch_per_device: int
    accumulation_steps: int
    updates_per_step: int
    tokens_per_step: int | None

    @property
    def prompts_per_pass(self) -> int:
        """Prompts of one rollout, all processes together."""
        return self.rollout_batch * self.processes

    @property
    def completions_per_pass(self) -> int:
        """Completions that are sampled at once, all processes together."""
        return self.prompts_per_pass * self.group_size

    @property
    def micro_batch_prompts(self) -> int:
        """Prompts whose completions are in one gradient computation, all processes together; Tunix counts so."""
        return self.micro_batch_size // self.group_size


@dataclass(frozen=True)
class _Size:
    """A size as it was given: `value` under a recipe's key, which counts one `scale`-th of the whole."""

    key: str
    value: int
    scale: int = 1

    @property
    def whole(self) -> int:
        return self.value * self.scale

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


@dataclass(frozen=True)
class _Machine:
    processes: int
    trainer_shards: int
    sampler_shards: int
    group_size: int

    @property
    def prompts_unit(self) -> int:
        """A step's prompts come in multiples of this: each process has as many, and so has each share completions."""
        for_shares = self.trainer_shards // math.gcd(self.trainer_shards, self.group_size)
        return math.lcm(self.processes, for_shares)

    @property
    def micro_batch_unit(self) -> int:
        """A micro-batch's completions come in multiples of this: whole groups, spread evenly."""
        return math.lcm(self.group_size, self.trainer_shards, self.processes)


def make_plan(
    *,
    group_size: int,
    processes: int = 1,
    devices: int | None = None,
    trainer_shards: int = 1,
    sampler_shards: int = 1,
    prompts_per_step: int | None = None,
    prompts_per_process: int | None = None,
    prompts_per_device: int | None = None,
    rollout_prompts_per_pass: int | None = None,
    rollout_prompts_per_device: int | None = None,
    micro_batch_size: int | None = None,
    micro_batch_per_device: int | None = None,
    updates_per_step: int = 1,
    tokens_per_sequence: int | None = None,
) -> BatchPlan:
    """Derive a plan.  Of each of the three sizes (step, pass, micro-batch) at most one spelling is given.

    Args:
      devices: of all processes together; None where they are not known.
      prompts_per_step, prompts_per_process, prompts_per_device: of a step; none: PROMPTS_PER_STEP.
      rollout_prompts_per_pass, rollout_prompts_per_device: of a pass, over all processes or per share of the sampler;
        neither: the whole step in one pass.
      micro_batch_size, micro_batch_per_device: completions, over all processes or per share of the trainer; neither:
        the whole step at once.
      tokens_per_sequence: of the longest prompt and the longest completion together.

    Raises ValueError, in sentences that name the recipe's key and the values that it may have.
    """
    machine = _Machine(processes, trainer_shards, sampler_shards, group_size)
    _check_machine(machine, devices)
    prompts, rollout, micro = _given(
        machine,
        (prompts_per_step, prompts_per_process, prompts_per_device),
        (rollout_prompts_per_pass, rollout_prompts_per_device),
        (micro_batch_size, micro_batch_per_device),
    )
    if problem := _prompts_problem(machine, prompts, rollout, micro):
        raise ValueError(problem)
    problems = [_rollout_problem(machine, prompts, rollout), _micro_batch_problem(machine, prompts, micro)]
    if any(problems):
        raise ValueError("; ".join(problem for problem in problems if problem))

    completions = prompts.whole * group_size
    per_pass = rollout.whole if rollout else prompts.whole
    per_gradient = micro.whole if micro else completions
    return BatchPlan(
        processes=processes,
        trainer_shards=trainer_shards,
        sampler_shards=sampler_shards,
        group_size=group_size,
        prompts_per_step=prompts.whole,
        prompts_per_process=prompts.whole // processes,
        rollout_batch=per_pass // processes,
        passes=prompts.whole // per_pass,
        completions_per_step=completions,
        local_batch=completions // processes,
        micro_batch_size=per_gradient,
        local_micro_batch=per_gradient // processes,
        micro_batch_per_device=per_gradient // trainer_shards,
        accumulation_steps=completions // per_gradient,
        updates_per_step=updates_per_step,
        tokens_per_step=None if tokens_per_sequence is None else completions * tokens_per_sequence,
    )


def check_spellings(
    prompts: tuple[int | None, int | None, int | None],
    rollout: tuple[int | None, int | None],
    micro: tuple[int | None, int | None],
) -> None:
    """What can be said of the given sizes before the devices are known: ValueError where one is given twice."""
    _given(_Machine(1, 1, 1, 1), prompts, rollout, micro)


def micro_batch_sizes(plan: BatchPlan) -> list[int]:
    """The micro-batches that the plan's step can be cut into, in completions of all processes, smallest first."""
    unit = math.lcm(plan.group_size, plan.trainer_shards, plan.processes)
    return [unit * n for n in divisors(plan.completions_per_step // unit)]


def divisors(number: int) -> list[int]:
    """Smallest first.  Those between LARGEST_TRIED and number / LARGEST_TRIED are left out."""
    small = [n for n in range(1, min(math.isqrt(number), LARGEST_TRIED) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def listed(values: list[int]) -> str:
    """2, 4, 8 or 16"""
    return " or ".join(part for part in (", ".join(map(str, values[:-1])), str(values[-1])) if part)


def table(plan: BatchPlan, given: dict[str, int]) -> list[str]:
    """The plan as aligned lines: what was given and what was derived, side by side.

    Args:
      given: recipe key -> value, of what was said.
    """
    length = "not known before the problems are read" if plan.tokens_per_step is None else "at full length"
    rows = [("batch plan", "given", "derived", "")]
    for name, key, unit in ROWS:
        if key in given:
            rows.append((name, f"{given[key]:,}", "", f"{unit}: {key}"))
        elif value := getattr(plan, name.replace(" ", "_"), None):
            rows.append((name, "", f"{value:,}", unit))
    rows.append(("tokens per step", "", "?" if plan.tokens_per_step is None else f"{plan.tokens_per_step:,}", length))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows]


# The lines of the table: a size, the recipe key that may give it, and its unit.  With underscores for spaces
# a name is that of the plan; the two that are not in it are shown where they are given.
ROWS = (
    ("processes", "hardware.processes", "one to a host"),
    ("trainer shards", None, TRAINER_SHARES),
    ("sampler shards", None, SAMPLER_SHARES),
    ("group size", "grpo.group_size", "samples per prompt"),
    ("prompts per step", "training.prompts_per_step", "all processes together"),
    ("prompts per process", "training.prompts_per_process", "of a step"),
    ("prompts per device", "training.prompts_per_device", "of a step, in each trainer share"),
    ("prompts per pass", "rollout.prompts_per_pass", "of one rollout, all processes together"),
    ("rollout prompts per device", "rollout.prompts_per_device", "of a pass, in each sampler share"),
    ("rollout batch", None, "prompts per process and pass"),
    ("passes", None, "rollouts per step"),
    ("completions per step", None, "all processes together"),
    ("local batch", None, "completions per process and step"),
    ("micro batch size", "training.micro_batch_size", "completions per gradient, all processes together"),
    ("local micro batch", None, "completions per gradient and process"),
    ("micro batch per device", "training.micro_batch_per_device", "completions per gradient and trainer share"),
    ("accumulation steps", None, "gradients that make an update"),
    ("updates per step", "grpo.iterations", "from the same completions"),
)


def _check_machine(machine: _Machine, devices: int | None) -> None:
    for name in ("processes", "trainer_shards", "sampler_shards", "group_size"):
        if getattr(machine, name) < 1:
            raise ValueError(f"{name}={getattr(machine, name)} must be at least 1")
    if devices is not None and devices % machine.processes:
        raise ValueError(
            f"hardware.processes={machine.processes} must divide the {devices} devices: use {listed(divisors(devices))}"
        )


def _given(
    machine: _Machine,
    prompts: tuple[int | None, int | None, int | None],
    rollout: tuple[int | None, int | None],
    micro: tuple[int | None, int | None],
) -> tuple[_Size, _Size | None, _Size | None]:
    """The three sizes as they were said; of a pass and a micro-batch None where nothing was."""
    trainer, sampler = machine.trainer_shards, machine.sampler_shards
    of_step = _one_of(
        ("training.prompts_per_step", prompts[0], 1),
        ("training.prompts_per_process", prompts[1], machine.processes),
        ("training.prompts_per_device", prompts[2], trainer),
    )
    of_pass = _one_of(("rollout.prompts_per_pass", rollout[0], 1), ("rollout.prompts_per_device", rollout[1], sampler))
    of_gradient = _one_of(
        ("training.micro_batch_size", micro[0], 1), ("training.micro_batch_per_device", micro[1], trainer)
    )
    return of_step or _Size("training.prompts_per_step", PROMPTS_PER_STEP), of_pass, of_gradient


def _one_of(*spellings: tuple[str, int | None, int]) -> _Size | None:
    said = [_Size(key, value, scale) for key, value, scale in spellings if value is not None]
    for size in said:
        if size.value < 1:
            raise ValueError(f"{size} must be at least 1")
    if len(said) > 1:
        raise ValueError(f"{' and '.join(map(str, said))} are spellings of one size: give one, and null for the other")
    return said[0] if said else None


def _prompts_problem(machine: _Machine, prompts: _Size, rollout: _Size | None, micro: _Size | None) -> str | None:
    """Why a step of so many prompts cannot be, and the nearest that can; None where it can."""
    if prompts.whole % machine.prompts_unit == 0:
        return None
    if prompts.whole % machine.processes:
        said = f"{prompts} must be a multiple of the {machine.processes} processes"
    else:
        said = (
            f"{prompts} makes {prompts.whole * machine.group_size} completions a step, "
            f"which do not spread evenly over {machine.trainer_shards} {TRAINER_SHARES}"
        )
    # The other sizes stay, unless no number of prompts suits them.
    wanted, unsuited = machine.prompts_unit, []
    if rollout and rollout.whole % machine.processes == 0:
        wanted = math.lcm(wanted, rollout.whole)
    elif rollout:
        unsuited.append(rollout.key)
    if micro and micro.whole % machine.micro_batch_unit == 0:
        wanted = math.lcm(wanted, micro.whole // machine.group_size)
    elif micro:
        unsuited.append(micro.key)
    unit = wanted // math.gcd(wanted, prompts.scale)
    below = prompts.value // unit * unit
    remedy = f"use {listed([n for n in (below, below + unit) if n])}"
    return f"{said}: {remedy}" + (f", and leave out {' and '.join(unsuited)}" if unsuited else "")


def _rollout_problem(machine: _Machine, prompts: _Size, rollout: _Size | None) -> str | None:
    """Why a step cannot be sampled in passes of this size, and the sizes that can be; None where it can."""

    def fits(prompts_per_pass: int) -> bool:
        return prompts_per_pass % machine.processes == 0 and prompts.whole % prompts_per_pass == 0

    if rollout is None or fits(rollout.whole):
        return None
    together = f" on {rollout.scale} {SAMPLER_SHARES} is {rollout.whole} prompts a pass, which" * (rollout.scale > 1)
    if rollout.whole % machine.processes:
        said = f"{rollout}{together} must be a multiple of the {machine.processes} processes"
    elif machine.processes > 1:
        said = (
            f"{rollout}{together} must divide the step's {machine.processes} processes x "
            f"prompts_per_process={prompts.whole // machine.processes}"
        )
    else:
        said = f"{rollout}{together} must divide prompts_per_step={prompts.whole}"
    every = [n for n in divisors(prompts.whole) if fits(n)]
    own = _spelled(every, rollout)
    if own:
        return f"{said}: use {listed(own)}"
    # The shares of the sampler do not divide the step, so no number per share does.
    return f"{said}: use rollout.prompts_per_pass={listed(_nearest(every, rollout.whole))} in its place"


def _micro_batch_problem(machine: _Machine, prompts: _Size, micro: _Size | None) -> str | None:
    """Why a step cannot be cut into micro-batches of this size, and the sizes that can be; None where it can."""
    completions = prompts.whole * machine.group_size
    if micro is None or (micro.whole % machine.micro_batch_unit == 0 and completions % micro.whole == 0):
        return None
    together = f" on {micro.scale} {TRAINER_SHARES} is {micro.whole} completions, which" * (micro.scale > 1)
    if completions % micro.whole:
        step = f"local_batch={completions // machine.processes}"
        if machine.processes > 1:
            step = f"the step's {machine.processes} processes x {step}"
        said = f"{micro}{together} must divide {step}"
    elif micro.whole % machine.group_size:
        said = f"{micro}{together} must hold whole groups of grpo.group_size={machine.group_size}"
    elif micro.whole % machine.trainer_shards:
        said = f"{micro} must spread evenly over {machine.trainer_shards} {TRAINER_SHARES}"
    else:
        said = f"{micro}{together} must be a multiple of the {machine.processes} processes"
    unit = machine.micro_batch_unit
    return f"{said}: use {listed(_spelled([unit * n for n in divisors(completions // unit)], micro))}"


def _spelled(wholes: list[int], size: _Size) -> list[int]:
    """Of the possible wholes those that can be said in the size's own key, as one says them there; the nearest."""
    return _nearest([whole // size.scale for whole in wholes if whole % size.scale == 0], size.value)


def _nearest(values: list[int], value: int) -> list[int]:
    return sorted(sorted(values, key=lambda n: abs(math.log(n) - math.log(value)))[:PROPOSED])
