"""The floor of a step's time: what its programs would take on chips that run at their peaks and never wait.

A chip that only computes needs flops / peak seconds; one that only reads and writes its memory, bytes / bandwidth.  A
program needs the larger of the two.  Both counts are the compiler's own, of the program that it made.  Not counted:
traffic between chips, dispatch, rewards, the weight sync, reading the KV cache, and every moment in which a chip waits.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from grpo_lib.accelerators import Chip
from grpo_lib.programs import FEW_LAYERS, Compilation, sampler_tensor
from grpo_lib.recipes import Recipe


class Work(BaseModel):
    """Of one chip in one run of a program."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    flops: float
    traffic: float  # bytes between the chip and its memory

    def seconds(self, chip: Chip) -> float:
        return max(self.flops / chip.flops, self.traffic / chip.bandwidth)


class Part(BaseModel):
    """One part of a step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    times: int  # in a step
    work: Work
    seconds: float  # in a step
    bound: str  # compute or memory


class Floor(BaseModel):
    """Seconds that a step takes at least."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    parts: tuple[Part, ...]
    seconds: float
    chip_hours: float  # of the whole run, on all chips of the slice


def whole_model(few: list[Compilation], layers: int) -> Work:
    """The work of the whole model from those of two and four layers: each layer adds the same."""
    low, high = FEW_LAYERS

    def line(a: float, b: float) -> float:
        return a + (b - a) / (high - low) * (layers - low)

    return Work(flops=line(few[0].flops, few[1].flops), traffic=line(few[0].traffic, few[1].traffic))


def decoding(recipe: Recipe, facts: Compilation) -> Work:
    """One token for every sequence of a batch: each chip of a replica reads its share of the weights once."""
    return Work(flops=0, traffic=(facts.parameter_bytes - facts.looked_up) / sampler_tensor(recipe))


def floor(recipe: Recipe, facts: Compilation, update: Work, logps: Work | None) -> Floor:
    """The floor of a step whose completions are as long as they may be.

    Args:
      facts: the model's sizes.
      update, logps: the work of one micro-batch.
    """
    chip = recipe.hardware.slice.chip
    plan = recipe.plan
    scorings = (recipe.grpo.beta > 0) + (recipe.grpo.iterations > 1)
    replicas = recipe.hardware.sampler_count() // sampler_tensor(recipe)
    each = -(-plan.completions_per_pass // replicas)
    rounds = -(-each // recipe.rollout.vllm.max_sequences) if recipe.rollout.engine == "vllm" else 1
    rounds *= plan.passes
    parts = [
        _part("decoding", rounds * recipe.rollout.max_completion_length, decoding(recipe, facts), chip),
        _part("policy update", plan.accumulation_steps * recipe.grpo.iterations, update, chip),
    ]
    if logps and scorings:
        parts.insert(1, _part("log-probabilities", plan.accumulation_steps * scorings, logps, chip))
    seconds = sum(part.seconds for part in parts)
    return Floor(parts=tuple(parts), seconds=seconds, chip_hours=chip_hours(recipe, seconds))


def chip_hours(recipe: Recipe, seconds_per_step: float) -> float:
    """chips x steps x seconds per step / 3600, on all chips of the slice: they are all paid for."""
    return recipe.hardware.slice.devices * recipe.training.steps * seconds_per_step / 3600


def _part(name: str, times: int, work: Work, chip: Chip) -> Part:
    compute = work.flops / chip.flops >= work.traffic / chip.bandwidth
    bound = "compute" if compute else "memory"
    return Part(name=name, times=times, work=work, seconds=times * work.seconds(chip), bound=bound)
