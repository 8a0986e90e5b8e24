"""What a step of a recipe takes on its TPU, estimated from the programs that preflight compiles: ranges, in seconds.

    estimate = of_recipe(recipe, compilations, update_bound, update_bound_at_mean)
    print("\\n".join(lines(estimate, recipe.training.steps)))

Three cases: every completion has a third of the longest length; a third on average, and in each batch one that goes on
to the limit, which is the case to plan with; all at the limit.  Nothing of it was measured here on a TPU.
docs/estimates.md puts estimates beside what others measured, with the bars below, which were set before.
"""

import functools
import operator

from grpo_lib.common.errors import CourseError
from grpo_train.recipes import Recipe
from grpo_train.tpu.compile_jobs import Compilation, ProgramTime, SavedModel
from grpo_train.tpu.op_costs import RATES, RING_LINKS
from grpo_train.tpu.roofline import DECODING, LowerBound

# How far off the ends of a range may be: the bars that docs/estimates.md holds predictions to.
UPDATE_BAR = 0.3
DECODING_BAR = 0.5
# Of the longest length, as preflight.at_mean_length assumes of GSM8K's completions.
EXPECTED_LENGTH = 1 / 3
EVALUATIONS = 2  # before and after training

# Problems of splits whose size does not depend on a file.
TEST_PROBLEMS = {"words": 1000, "gsm8k": 1319, "math500": 500}
VALIDATION_PROBLEMS = {"words": 500, "gsm8k": 500}

KINDS = {
    "product": "products",
    "bytes": "memory traffic",
    "arithmetic": "vector arithmetic",
    "collective": "traffic between chips",
    "kernel": "kernels",
    "waiting": "waiting for copies and other chips",
}
UPDATE, LOGPS = "policy update", "log-probabilities"
LEFT_OUT = "the machine's start, downloads, compilation, host work, rewards, checkpoints"


class Range(SavedModel):
    """Seconds, or hours, of three cases, by the length of completions."""

    low: float  # all have a third of the longest length
    likely: float  # a third on average, and in each batch one has all of it
    high: float  # all have all of it

    def __add__(self, other: "Range") -> "Range":
        return Range(low=self.low + other.low, likely=self.likely + other.likely, high=self.high + other.high)

    def times(self, factor: float) -> "Range":
        return Range(low=self.low * factor, likely=self.likely * factor, high=self.high * factor)

    def __str__(self) -> str:
        low, high = short(self.low), short(self.high)
        return low if low == high else f"{low} to {high}"

    @property
    def planned(self) -> str:
        """As text, with the case to plan with."""
        return f"{self}, likely {short(self.likely)}"


class EstimatedPart(SavedModel):
    """A part of a step, or an evaluation."""

    name: str
    seconds: Range
    how: str
    is_bound: bool = False  # by bytes alone: the real time is above it

    @property
    def shown(self) -> str:
        """The seconds as text; of a bound one number, since two of them are read as a range."""
        return f"≥ {short(self.seconds.high)}" if self.is_bound else str(self.seconds)


class Estimate(SavedModel):
    """Of a recipe that fits, and was compiled with full effort."""

    parts: tuple[EstimatedPart, ...]
    step: Range | None  # None: decoding has a bound alone, and so have the step and the run none
    evaluation: EstimatedPart | None
    validation: EstimatedPart | None  # all of a run's
    run_hours: Range | None
    chips: int
    chip_hours: Range | None
    limits: dict[str, float]  # of the update: which share of its time is what
    left_out: str
    libtpu: str

    @property
    def shown_step(self) -> str:
        """The step as text; where decoding has a bound alone, the other parts and this bound."""
        if self.step:
            return self.step.planned
        rest = added([part.seconds for part in self.parts if not part.is_bound])
        return f"{rest} + decoding, {' + '.join(part.shown for part in self.parts if part.is_bound)}"

    def part(self, name: str) -> EstimatedPart | None:
        return next((part for part in self.parts if part.name == name), None)

    @property
    def update(self) -> Range:
        """Seconds of the updates of a step."""
        return next(part.seconds for part in self.parts if part.name == UPDATE)

    def compared(self, measured: float) -> str:
        """One line that puts a measured update beside the estimate."""
        return (
            f"update: {short(measured)} s measured, {self.update} estimated by preflight; measured / estimated at full "
            f"length {short(measured / self.update.high)} (update_over_estimate in metrics.jsonl)"
        )


def of_recipe(
    recipe: Recipe, compilations: dict[str, Compilation], bound: LowerBound, at_mean: LowerBound | None
) -> Estimate:
    """The estimate of a recipe.

    Args:
      compilations: by the names of preflight.programs_of.
      bound, at_mean: the roofline at full length, and with completions of a third of it.

    Raises CourseError, with the reason, where there is none.
    """
    update = _time_of(compilations["update"], UPDATE)
    parts = [_decoding(recipe, compilations, bound)]
    scored = (recipe.grpo.beta > 0) + (recipe.grpo.iterations > 1)
    passes = recipe.plan.accumulation_steps
    if scored and "logps" in compilations:
        logps = _time_of(compilations["logps"], "log-probabilities")
        parts.append(_trained(LOGPS, logps, passes * scored, bound, at_mean))
    parts.append(_trained(UPDATE, update, passes * recipe.grpo.iterations, bound, at_mean))
    parts.append(_sync(recipe, compilations))
    decoding = parts[0]
    evaluation, validation = _evaluation(recipe, decoding), _validation(recipe, decoding)
    chips = recipe.hardware.slice.devices
    step = hours = None
    if not decoding.is_bound:
        step = added([part.seconds for part in parts])
        run = [step.times(recipe.training.steps)]
        run += [evaluation.seconds.times(EVALUATIONS)] if evaluation else []
        run += [validation.seconds] if validation else []
        hours = added(run).times(1 / 3600)
    return Estimate(
        parts=tuple(parts),
        step=step,
        evaluation=evaluation,
        validation=validation,
        run_hours=hours,
        chips=chips,
        chip_hours=hours.times(chips) if hours else None,
        limits=_limits(update),
        left_out=_left_out(recipe, update, evaluation, validation),
        libtpu=update.libtpu,
    )


def added(ranges: list[Range]) -> Range:
    return functools.reduce(operator.add, ranges)


def _time_of(compilation: Compilation, name: str) -> ProgramTime:
    if compilation.time:
        return compilation.time
    reason = compilation.not_estimated or "it was compiled before there were estimates; run grpo preflight again"
    raise CourseError(f"no time of the {name}: {reason}")


def _trained(name: str, time: ProgramTime, times: int, bound: LowerBound, at_mean: LowerBound | None) -> EstimatedPart:
    """A program of the trainer.  It is compiled at full length; with a third of the tokens it is as much shorter as its
    roofline is.  Where libtpu's own simulation says something else, one end is that."""
    ends = [time.seconds, time.simulated or time.seconds]
    how = f"{times} x {short(time.seconds)} s at full length"
    shorter = 1.0
    if at_mean and (full := _seconds_in(bound, name)):
        shorter = _seconds_in(at_mean, name) / full
    if shorter != 1:
        how += "; the first number: a third of the tokens, by the roofline, not compiled"
    low = times * min(ends) * shorter
    return EstimatedPart(name=name, seconds=Range(low=low, likely=low, high=times * max(ends)), how=how)


def _seconds_in(bound: LowerBound, name: str) -> float:
    return sum(part.seconds for part in bound.parts if part.name == name)


def _decoding(recipe: Recipe, compilations: dict[str, Compilation], bound: LowerBound) -> EstimatedPart:
    longest = recipe.rollout.max_completion_length
    expected = round(longest * EXPECTED_LENGTH)
    lengths = f"{expected:,} to {longest:,} tokens of the longest completion"
    if "decode" not in compilations:
        by_bytes = next(part.seconds for part in bound.parts if part.name == DECODING)
        seconds = Range(low=by_bytes * EXPECTED_LENGTH, likely=by_bytes, high=by_bytes)
        how = (
            f"the time to read the weights once for each of {longest:,} tokens; the KV cache and vLLM's scheduling "
            "come on top"
        )
        return EstimatedPart(name=DECODING, seconds=seconds, how=how, is_bound=True)
    token = _token_seconds(compilations["decode"])
    passes = recipe.plan.num_rollout_micro_batches
    low, high = (passes * length * token for length in (expected, longest))
    seconds = Range(low=low, likely=high, high=high)
    times = f"{passes} x " if passes > 1 else ""
    how = f"{times}{token * 1e3:.3g} ms a token, {lengths}"
    return EstimatedPart(name=DECODING, seconds=seconds, how=how)


def _token_seconds(decode: Compilation) -> float:
    """One turn of the sampler's loop: the one loop of its program whose end the data decide."""
    time = _time_of(decode, "sampler's decoding")
    if len(time.open_loops) != 1:
        raise CourseError(f"no time of a token: the sampler's program has {len(time.open_loops)} loops of unknown ends")
    return time.open_loops[0]


def _sync(recipe: Recipe, compilations: dict[str, Compilation]) -> EstimatedPart:
    """Each chip that samples receives its part of the weights over the links."""
    facts = compilations["update"]
    received = facts.parameter_bytes / recipe.sampler_tensor()
    if "decode" in compilations:
        received = compilations["decode"].sampler_shard
    if recipe.hardware.slice.devices == 1:
        seconds = 2 * received / recipe.hardware.slice.chip.bandwidth
        how = "a copy in the chip's memory"
    else:
        seconds = received / (RING_LINKS * RATES[recipe.hardware.slice.chip.generation].link)
        how = "its bytes over the links between chips"
    return EstimatedPart(name="weight sync", seconds=Range(low=seconds, likely=seconds, high=seconds), how=how)


def _evaluation(recipe: Recipe, decoding: EstimatedPart) -> EstimatedPart | None:
    """All test problems, greedy and sampled."""
    problems = recipe.problems
    if isinstance(problems, list):
        return None
    count = problems.test or TEST_PROBLEMS.get(problems.test_source or problems.source)
    return _answering("evaluation", recipe, decoding, count, 1 + recipe.evaluation.samples) if count else None


def _validation(recipe: Recipe, decoding: EstimatedPart) -> EstimatedPart | None:
    """All validations of a run, greedy."""
    problems, every = recipe.problems, recipe.training.validate_every
    times = recipe.training.steps // every if every else 0
    if isinstance(problems, list) or not times:
        return None
    count = problems.validation or VALIDATION_PROBLEMS.get(problems.source)
    return _answering("validations, all", recipe, decoding, count, times) if count else None


def _answering(name: str, recipe: Recipe, decoding: EstimatedPart, count: int, times: int) -> EstimatedPart:
    """So many problems, so many times; a batch is taken to decode like one of training's, or as much longer as it is
    larger."""
    batch = min(recipe.evaluation.batch_size, count)
    batches = -(-count // batch) * times
    one = decoding.seconds.times(batches / recipe.plan.num_rollout_micro_batches)
    larger = 1.0
    if not decoding.is_bound:  # that one is by the bytes of the weights, which every batch reads once
        larger = max(1.0, batch / recipe.plan.rollout_micro_batch_completions)
    seconds = Range(low=one.low, likely=one.likely * larger, high=one.high * larger)
    how = f"{count:,} problems, {times} {'times' if times > 1 else 'time'}, in {batches} batches of {batch}"
    return EstimatedPart(name=name, seconds=seconds, how=how, is_bound=decoding.is_bound)


def _limits(time: ProgramTime) -> dict[str, float]:
    """Shares of the time of a program, the largest first."""
    total = sum(time.by_kind.values()) or 1
    shares = {kind: seconds / total for kind, seconds in time.by_kind.items()}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _left_out(
    recipe: Recipe, update: ProgramTime, evaluation: EstimatedPart | None, validation: EstimatedPart | None
) -> str:
    left_out = [LEFT_OUT]
    if recipe.rollout.engine == "vllm":
        left_out.append("vLLM's prefill and scheduling")
    else:
        left_out.append("prefill")
    if update.untimed_kernels:
        left_out.append(f"{update.untimed_kernels} calls of kernels in an update, of which only the bytes count")
    if not evaluation:
        left_out.append("evaluation")
    if recipe.training.validate_every and not validation:
        left_out.append("validations")
    if recipe.training.cold_start:
        left_out.append("the cold start")
    if recipe.grpo.dynamic_sampling:
        left_out.append("sampling again (grpo.dynamic_sampling)")
    return ", ".join(left_out)


def lines(estimate: Estimate, steps: int, price: float | None = None) -> list[str]:
    """The estimate as a user reads it.

    Args:
      steps: of the run.
      price: of a chip-hour, in the user's currency; without one no money is named.
    """
    shown = [
        f"Estimate in seconds, from the schedule that libtpu {estimate.libtpu} made; measured on no TPU. First number: "
        "every completion has a third of the longest length. Second: all have all of it. Likely, and to plan with: a "
        "third on average, and one of each batch has all of it.",
        *map(_line, estimate.parts),
        f"    {'step':<20}{estimate.shown_step}",
        *(_line(part) for part in (estimate.evaluation, estimate.validation) if part),
    ]
    shares = [f"{share:.0%} {KINDS[kind]}" for kind, share in estimate.limits.items() if share >= 0.05]
    shown.append(f"  The update is {', '.join(shares)}.")
    shown.append(_run(estimate, steps, price))
    shown.append(
        f"  How far off: set for it were {UPDATE_BAR:.0%} (update) and {DECODING_BAR:.0%} (decoding), and checked on "
        "v6e alone, near full length (docs/estimates.md). Of other chips, and of the first number, nothing is known."
    )
    return shown


def _run(estimate: Estimate, steps: int, price: float | None) -> str:
    """The whole run, and what it does not count, in front of a price that somebody may take for the bill."""
    hours, chip_hours = estimate.run_hours, estimate.chip_hours
    if not hours or not chip_hours:
        return (
            "  No hours and no money: of vLLM's decoding only a bound is known (≥), and no budget is made of one. Ten "
            f"steps on the slice say more. Not counted: {estimate.left_out}."
        )
    run = f"{steps:,} steps"
    if estimate.evaluation:
        run += f", {EVALUATIONS} evaluations"
    if estimate.validation:
        run += " and validations"
    chips = "1 chip" if estimate.chips == 1 else f"{estimate.chips} chips"
    took = f"{hours.planned} hours"
    if hours.high < 1:
        took = f"{hours.times(60).planned} minutes"
    parts = [f"  The run's {run} alone, on {chips}: {took}; chip-hours {chip_hours.planned}"]
    if price is not None:
        parts.append(f"; at {price:g} a chip-hour {chip_hours.times(price).planned}")
    parts.append(f". The bill is longer by what is not counted: {estimate.left_out}.")
    return "".join(parts)


def _line(part: EstimatedPart) -> str:
    return f"    {part.name:<20}{part.shown:<24}{part.how}"


def short(number: float) -> str:
    """Two digits, without an exponent: 0.0042, 0.59, 3.1, 42, 1,200."""
    if number >= 99.5:
        return f"{float(f'{number:.2g}'):,.0f}"
    if number >= 9.95:
        return f"{number:.0f}"
    text = f"{number:.2g}"
    return text if "e" not in text else f"{number:.6f}".rstrip("0").rstrip(".")
