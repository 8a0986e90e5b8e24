"""Roofline of a step: the time of its programs on chips that run at their peaks and never wait.

Two parts of it are lower bounds, for a step in which some completion has the full length: the weights that decoding
reads (bytes / bandwidth), and the FLOPs of the update (flops / peak FLOP/s).  The rest is an estimate: the traffic of
an update is what the compiler counts of one compilation of a few layers, with little optimization, carried on to all
layers.  Another compilation can have less.  Not counted: traffic between chips, dispatch, rewards, the weight sync,
reading the KV cache, and idle time.
"""

from grpo_train.recipes.batch_plan import BatchPlan
from grpo_train.recipes.schema import GRPORecipe, HardwareRecipe, RolloutRecipe
from grpo_train.recipes.slices import Chip
from grpo_train.tpu.compile_jobs import FEW_LAYERS, Compilation, SavedModel

DECODING = "decoding"


class Work(SavedModel):
    """Work of one chip in one run of a program."""

    flops: float
    traffic: float  # bytes between the chip and its memory

    def seconds(self, chip: Chip) -> float:
        return max(self.flops / chip.flops, self.traffic / chip.bandwidth)

    def bound(self, chip: Chip) -> str:
        return "compute" if self.flops / chip.flops >= self.traffic / chip.bandwidth else "memory"


class Part(SavedModel):
    """One part of a step."""

    name: str
    times: int  # in a step
    work: Work
    seconds: float  # in a step
    bound: str  # compute or memory


class LowerBound(SavedModel):
    """The roofline of a step: an estimate, whose `at_least` is a lower bound at full length."""

    parts: tuple[Part, ...]
    seconds: float
    chip_hours: float  # of the whole run, on all chips of the slice


def at_least(part: Part, chip: Chip) -> float:
    """The seconds of a part that no compilation avoids: of its FLOPs at the peak; of decoding, the weights it reads."""
    return part.seconds if part.name == DECODING else part.times * part.work.flops / chip.flops


def whole_model(few: list[Compilation], layers: int) -> Work:
    """The work of the whole model from those of two and four layers: each layer adds the same."""
    low, high = FEW_LAYERS

    def line(a: float, b: float) -> float:
        return a + (b - a) / (high - low) * (layers - low)

    return Work(flops=line(few[0].flops, few[1].flops), traffic=line(few[0].traffic, few[1].traffic))


def lower_bound(
    facts: Compilation,
    update: Work,
    logps: Work | None,
    *,
    hardware: HardwareRecipe,
    rollout: RolloutRecipe,
    grpo: GRPORecipe,
    plan: BatchPlan,
    sampler_tensor: int,
    steps: int,
) -> LowerBound:
    """The roofline of a step whose completions all have the maximum length.

    Args:
      facts: the model's sizes.
      update, logps: the work of one micro-batch.
      steps: of the run.
    """
    replicas = hardware.sampler_count() // sampler_tensor
    of_a_replica = -(-plan.rollout_micro_batch_completions // replicas)
    rounds = -(-of_a_replica // rollout.vllm.max_sequences) if rollout.engine == "vllm" else 1
    decoding_steps = plan.num_rollout_micro_batches * rounds * rollout.max_completion_length
    # A token for every sequence of a batch: each chip of a replica reads its shard of the weights once.
    decoding = Work(flops=0, traffic=(facts.parameter_bytes - facts.embedding_bytes) / sampler_tensor)
    scored = (grpo.beta > 0) + (grpo.iterations > 1)  # by the reference and by the old policy
    chip = hardware.slice.chip
    parts = [_part(DECODING, decoding_steps, decoding, chip)]
    if logps and scored:
        parts.append(_part("log-probabilities", plan.accumulation_steps * scored, logps, chip))
    parts.append(_part("policy update", plan.accumulation_steps * grpo.iterations, update, chip))
    seconds = sum(part.seconds for part in parts)
    # All chips of the slice are paid for, also those that wait.
    chip_hours = hardware.slice.devices * steps * seconds / 3600
    return LowerBound(parts=tuple(parts), seconds=seconds, chip_hours=chip_hours)


def _part(name: str, times: int, work: Work, chip: Chip) -> Part:
    return Part(name=name, times=times, work=work, seconds=times * work.seconds(chip), bound=work.bound(chip))
