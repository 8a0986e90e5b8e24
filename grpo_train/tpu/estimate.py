"""What a step of a recipe takes on its TPU, estimated from the programs that preflight compiles: ranges, in seconds.

    estimate = of_recipe(recipe, compilations, update_bound, update_bound_at_mean)
    print("\\n".join(lines(estimate, recipe.training.steps)))

The low end of a range is a step whose completions have a third of the longest length, the high end one at full length:
of GSM8K's steps most are near the low end.  Nothing of it was measured here on a TPU.  docs/estimates.md puts such
estimates beside what others measured, with the bars below, which were set before.
"""

from grpo_lib.common.errors import CourseError
from grpo_train.recipes import Recipe
from grpo_train.tpu.compile_jobs import Compilation, ProgramTime, SavedModel
from grpo_train.tpu.op_costs import RATES, RING_LINKS
from grpo_train.tpu.roofline import DECODING, LowerBound

# How far off the ends of a range may be: the bars that docs/estimates.md holds predictions to.
UPDATE_BAR = 0.3
DECODING_BAR = 0.5
# Completions have about a third of the longest length, as preflight.at_mean_length says of GSM8K's.
EXPECTED_LENGTH = 1 / 3
EVALUATIONS = 2  # before and after training

# Problems of test splits whose size does not depend on a file.
TEST_PROBLEMS = {"words": 1000, "gsm8k": 1319, "math500": 500}

KINDS = {
    "product": "products",
    "bytes": "memory traffic",
    "arithmetic": "vector arithmetic",
    "collective": "traffic between chips",
    "kernel": "kernels",
    "waiting": "waiting for copies and other chips",
}
UPDATE = "policy update"
LEFT_OUT = "the machine's start, downloads, compilation, host work, rewards, checkpoints"


class Range(SavedModel):
    """Seconds, or hours: from completions of a third of the length to those of full length."""

    low: float
    high: float

    def __add__(self, other: "Range") -> "Range":
        return Range(low=self.low + other.low, high=self.high + other.high)

    def times(self, factor: float) -> "Range":
        return Range(low=self.low * factor, high=self.high * factor)

    def __str__(self) -> str:
        return self.shown()

    def shown(self, is_bound: bool = False) -> str:
        """Of a bound both ends are one: without a sign at the second, a reader takes that for the most."""
        sign = "≥ " if is_bound else ""
        low, high = (f"{sign}{short(end)}" for end in (self.low, self.high))
        return low if low == high else f"{low} to {high}"


class EstimatedPart(SavedModel):
    """A part of a step, or an evaluation."""

    name: str
    seconds: Range
    how: str
    is_bound: bool = False  # by bytes alone: the real time is above it


class Estimate(SavedModel):
    """Of a recipe that fits, and was compiled with full effort."""

    parts: tuple[EstimatedPart, ...]
    step: Range
    evaluation: EstimatedPart | None
    run_hours: Range
    chips: int
    chip_hours: Range
    limits: dict[str, float]  # of the update: which share of its time is what
    left_out: str
    libtpu: str

    @property
    def is_bound(self) -> bool:
        """Whether a part of the step is known by a bound alone, so that the step and the run are at least as long."""
        return any(part.is_bound for part in self.parts)

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
        seconds = _range(logps).times(passes * scored)
        how = f"{passes * scored} x {short(logps.seconds)} s"
        parts.append(EstimatedPart(name="log-probabilities", seconds=seconds, how=how))
    parts += [_update(update, passes * recipe.grpo.iterations, bound, at_mean), _sync(recipe, compilations)]
    step = parts[0].seconds
    for part in parts[1:]:
        step += part.seconds
    evaluation = _evaluation(recipe, parts[0])
    run = step.times(recipe.training.steps)
    if evaluation:
        run += evaluation.seconds.times(EVALUATIONS)
    chips = recipe.hardware.slice.devices
    hours = run.times(1 / 3600)
    return Estimate(
        parts=tuple(parts),
        step=step,
        evaluation=evaluation,
        run_hours=hours,
        chips=chips,
        chip_hours=hours.times(chips),
        limits=_limits(update),
        left_out=_left_out(recipe, update, evaluation),
        libtpu=update.libtpu,
    )


def _time_of(compilation: Compilation, name: str) -> ProgramTime:
    if compilation.time:
        return compilation.time
    reason = compilation.not_estimated or "it was compiled before there were estimates; run grpo preflight again"
    raise CourseError(f"no time of the {name}: {reason}")


def _range(time: ProgramTime) -> Range:
    """From what was computed to libtpu's own simulation, or the other way round, where there is one."""
    seconds = [time.seconds, time.simulated or time.seconds]
    return Range(low=min(seconds), high=max(seconds))


def _update(time: ProgramTime, times: int, bound: LowerBound, at_mean: LowerBound | None) -> EstimatedPart:
    """From completions of a third of the length, as the roofline shortens the update, to the full one."""
    full = _range(time).times(times)
    how = f"{times} x {short(time.seconds)} s at full length"
    low = full.low
    if at_mean:
        low *= at_mean.parts[-1].seconds / bound.parts[-1].seconds
        how += "; the first number at a third of it"
    return EstimatedPart(name=UPDATE, seconds=Range(low=low, high=full.high), how=how)


def _decoding(recipe: Recipe, compilations: dict[str, Compilation], bound: LowerBound) -> EstimatedPart:
    longest = recipe.rollout.max_completion_length
    expected = round(longest * EXPECTED_LENGTH)
    lengths = f"{expected:,} to {longest:,} tokens of the longest completion"
    if "decode" not in compilations:
        by_bytes = next(part.seconds for part in bound.parts if part.name == DECODING)
        seconds = Range(low=by_bytes * EXPECTED_LENGTH, high=by_bytes)
        how = f"a bound, by the bytes of the weights, for {lengths}; how vLLM schedules is not known"
        return EstimatedPart(name=DECODING, seconds=seconds, how=how, is_bound=True)
    token = _token_seconds(compilations["decode"])
    passes = recipe.plan.num_rollout_micro_batches
    low, high = (passes * length * token for length in (expected, longest))
    seconds = Range(low=low, high=high)
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
    return EstimatedPart(name="weight sync", seconds=Range(low=seconds, high=seconds), how=how)


def _evaluation(recipe: Recipe, decoding: EstimatedPart) -> EstimatedPart | None:
    """All test problems; a batch is taken to decode like one of training's, or as much longer as it is larger."""
    problems = recipe.problems
    if isinstance(problems, list):
        return None
    count = problems.test or TEST_PROBLEMS.get(problems.test_source or problems.source)
    if not count:
        return None
    batch = min(recipe.evaluation.batch_size, count)
    batches = -(-count // batch) * (1 + recipe.evaluation.samples)
    one = decoding.seconds.times(batches / recipe.plan.num_rollout_micro_batches)
    larger = 1.0
    if not decoding.is_bound:  # that one is by the bytes of the weights, which every batch reads once
        larger = max(1.0, batch / recipe.plan.rollout_micro_batch_completions)
    return EstimatedPart(
        name="evaluation",
        seconds=Range(low=one.low, high=one.high * larger),
        how=f"{count:,} problems in {batches} batches of {batch}",
        is_bound=decoding.is_bound,
    )


def _limits(time: ProgramTime) -> dict[str, float]:
    """Shares of the time of a program, the largest first."""
    total = sum(time.by_kind.values()) or 1
    shares = {kind: seconds / total for kind, seconds in time.by_kind.items()}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _left_out(recipe: Recipe, update: ProgramTime, evaluation: EstimatedPart | None) -> str:
    left_out = [LEFT_OUT]
    if recipe.rollout.engine == "vllm":
        left_out.append("vLLM's prefill and scheduling")
    else:
        left_out.append("prefill")
    if update.untimed_kernels:
        left_out.append(f"{update.untimed_kernels} calls of kernels in an update, of which only the bytes count")
    if not evaluation:
        left_out.append("evaluation")
    if recipe.grpo.dynamic_sampling:
        left_out.append("sampling again (grpo.dynamic_sampling)")
    return ", ".join(left_out)


def lines(estimate: Estimate, steps: int, price: float | None = None) -> list[str]:
    """The estimate as a user reads it.

    Args:
      steps: of the run.
      price: of a chip-hour, in the user's currency; without one no money is named.
    """
    is_bound = estimate.is_bound
    shown = [
        f"Estimate in seconds, from the schedule that libtpu {estimate.libtpu} made; measured on no TPU. First number: "
        "the longest completion of a batch ends at a third of the limit; second: at the limit. Neither is the least or "
        f"the most: allow {UPDATE_BAR:.0%} (update) and {DECODING_BAR:.0%} (decoding) beyond them, which is a rule of "
        "ours and no guarantee (docs/estimates.md).",
        *map(_line, estimate.parts),
        f"    {'step':<20}{estimate.step.shown(is_bound)}",
    ]
    if estimate.evaluation:
        shown.append(_line(estimate.evaluation))
    if is_bound:
        shown.append("  ≥: a bound. No budget: the real time is longer, and nobody knows how much vLLM adds.")
    shares = [f"{share:.0%} {KINDS[kind]}" for kind, share in estimate.limits.items() if share >= 0.05]
    shown.append(f"  The update is {', '.join(shares)}.")
    shown.append(_run(estimate, steps, price))
    return shown


def _run(estimate: Estimate, steps: int, price: float | None) -> str:
    """The whole run, and what it does not count, in front of a price that somebody may take for the bill."""
    run = f"{steps:,} steps"
    if estimate.evaluation:
        run += f" and {EVALUATIONS} evaluations"
    chips = "1 chip" if estimate.chips == 1 else f"{estimate.chips} chips"
    hours, chip_hours = estimate.run_hours, estimate.chip_hours
    took = f"{hours.shown(estimate.is_bound)} hours"
    if hours.high < 1:
        took = f"{hours.times(60).shown(estimate.is_bound)} minutes"
    parts = [f"  The run's {run} alone, on {chips}: {took}, {chip_hours.shown(estimate.is_bound)} chip-hours"]
    if price is not None:
        parts.append(f", at {price:g} a chip-hour {chip_hours.times(price).shown(estimate.is_bound)}")
    parts.append(f". The bill is longer by what is not counted: {estimate.left_out}.")
    return "".join(parts)


def _line(part: EstimatedPart) -> str:
    return f"    {part.name:<20}{part.seconds.shown(part.is_bound):<24}{part.how}"


def short(number: float) -> str:
    """Two digits, without an exponent: 0.0042, 0.59, 3.1, 42, 1,200."""
    if number >= 99.5:
        return f"{float(f'{number:.2g}'):,.0f}"
    if number >= 9.95:
        return f"{number:.0f}"
    text = f"{number:.2g}"
    return text if "e" not in text else f"{number:.6f}".rstrip("0").rstrip(".")
