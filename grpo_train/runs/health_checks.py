"""Detect unhealthy training metrics: early warnings from the rows of metrics.jsonl, one line each, with what to try.

    find_alerts(rows)    # all alerts of a run, by step
    new_alerts(rows)     # those of the last row; for a training loop, after each step, with all rows so far

An alert is given once, and again only after its condition has cleared.  The limits are set so that a healthy run gives
none; a comment says why each is what it is.
"""

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]  # numbers; None, NaN and infinity are values that were not finite

# When an alert is given.  Numbers of steps are of consecutive steps, unless a comment says otherwise.

# With equal rewards within a group every advantage is 0.  A few such steps are chance in a small batch.
STEPS_WITHOUT_SIGNAL = 10
# Nats per token, by the k3 estimator exp(d) - d - 1, which is about d²/2 for small d.  At 0.1 a token of the policy is
# usually e^0.4 times less likely under the reference, a completion of 100 tokens e^40 times: the bound that published
# recipes of GRPO keep to.  Three steps, because the exponential lets one rare token raise the mean of a step.
KL, STEPS_ABOVE_KL = 0.1, 3
# The part of the optimizer's step that the weights took: 1, but for rounding.  Below one half most of the training is
# lost; nearest rounding of bfloat16 at a large model's learning rate gave 0.005 to 0.05.
UPDATE_APPLIED = 0.5
# Fraction of truncated completions: above one half, the length limit decides the reward more than the answer does.
CLIPPED_RATIO, STEPS_CLIPPED = 0.5, 5
# Entropy in nats per token: below this fraction of its value in the first steps, and below an absolute bound, because a
# policy may start with text that is very hard to predict.  The bound stands between the three hacked runs of
# assets/reference, which fell to 0.021 and less, and the runs of assets/experiments that learnt hard problems, which at
# a tenth of their first entropy have 0.032.  (Of means over completions: assets/experiments/README.md.)
ENTROPY_FRACTION, ENTROPY = 0.1, 0.025
SOLVED = 0.8  # from this accuracy on a low entropy is fine
# A fall of the reward, by this many times its noise from step to step, and by this fraction of the gain so far.
FALL_IN_NOISE, FALL_OF_GAIN = 4.0, 0.5
# Accuracy below this fraction of what it was in the first steps, while the reward rose; both by this many times the
# noise of a mean.  Calibrated on three hacked runs of tiny-hard.yaml and the healthy runs of assets/reference.
HACKED_FRACTION, HACKED_IN_NOISE = 0.5, 2.0
WINDOW = 5  # steps over which entropy, accuracy and reward are averaged; also the number of "first steps"
QUIET = 5  # steps without the condition, after which the same alert may be given again


@dataclass(frozen=True)
class Alert:
    """One warning: the first step of its condition, its kind (a key of RULES), and a line with what to try."""

    step: int
    kind: str
    message: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.message}"


def find_alerts(rows: Iterable[Row]) -> list[Alert]:
    """All alerts of a run, by step; of one step the most severe first.

    Args:
      rows: rows of metrics.jsonl, in any order; of two for one step the later one counts.  Any metric may be missing;
        None, NaN and infinity are values that were not finite.
    """
    rows = by_step(rows)
    found = []
    for kind, rule in RULES.items():
        last = -math.inf  # the number of the last row with this condition
        for number, (row, message) in enumerate(zip(rows, rule(rows), strict=True)):
            if message is not None:
                if number - last > QUIET:
                    found.append(Alert(int(row["step"]), kind, message))
                last = number
    return sorted(found, key=lambda alert: alert.step)


def new_alerts(rows: Sequence[Row]) -> list[Alert]:
    """The alerts of the last of `rows`, for a training loop to report after that step.

    There is no state between calls, so a resumed run reports nothing twice.  A thousand rows take 20 ms.
    """
    return [alert for alert in find_alerts(rows) if alert.step == rows[-1].get("step")]


def by_step[R: Row](rows: Iterable[R]) -> list[R]:
    """One row for each step, in order; of two for one step the later one counts, rows without a step are left out."""
    latest = {row["step"]: row for row in rows if finite(row.get("step")) is not None}
    return [latest[step] for step in sorted(latest)]


def finite(value: Any) -> float | None:
    """A finite number as a float; None for anything else."""
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:  # an integer of more than 308 digits
        return None


def _left_out(rows: Sequence[Row]) -> Iterator[str | None]:
    """Dynamic sampling that did not find enough groups.  A limit of one pass only leaves out, and expects to."""
    for row in rows:
        groups, passes = (finite(row.get(f"dynamic_sampling/{name}")) or 0 for name in ("uniform_groups", "passes"))
        if not (groups and passes > 1):
            yield None
            continue
        yield (
            f"{groups:g} groups had only right or only wrong completions, and dynamic sampling found no others in its "
            "last pass; they count as advantages of 0; raise grpo.dynamic_sampling, or take other problems"
        )


def _streaks(
    rows: Sequence[Row], name: str, unhealthy: Callable[[float], bool], least: int, message: str
) -> Iterator[str | None]:
    """The message for each row that is at least the `least`-th in succession with an unhealthy value of a metric.

    A row without the metric, which is not measured in every step, goes on as the row before it.
    """
    steps = 0
    said = None
    for row in rows:
        if name in row:
            value = finite(row[name])
            steps = steps + 1 if value is not None and unhealthy(value) else 0
            said = message.format(value=value, steps=steps) if steps >= least else None
        yield said


def _entropy(rows: Sequence[Row]) -> Iterator[str | None]:
    """A policy that no longer varies its text, and is often wrong."""
    entropy, accuracy = _Trend(), _Trend()
    for row in rows:
        accuracy.add(finite(row.get("accuracy")))
        known = entropy.add(finite(row.get("entropy")))
        collapsed = entropy.mean < ENTROPY and entropy.mean < ENTROPY_FRACTION * entropy.first
        if not (known and collapsed and accuracy.mean < SOLVED):
            yield None
            continue
        at_accuracy = f" at an accuracy of {accuracy.mean:.0%}" if accuracy.count else ""
        yield (
            f"the entropy has collapsed from {entropy.first:.2g} to {entropy.mean:.2g} nats per token"
            f"{at_accuracy}, so little is explored; raise "
            "rollout.temperature, lower training.learning_rate, or set grpo.beta above 0"
        )


def _fall(rows: Sequence[Row]) -> Iterator[str | None]:
    """A reward that had risen and falls again, the sign of too large an update; entropy and groups still look healthy.

    The fall is measured against the reward's own noise and gain, because the scale of a reward depends on the recipe.
    """
    reward = _Trend()
    best = -math.inf
    for row in rows:
        known = reward.add(finite(row.get("reward")))
        best = max(best, reward.mean) if reward.count >= WINDOW else best
        enough = max(FALL_IN_NOISE * reward.noise_of_a_step(), FALL_OF_GAIN * (best - reward.first))
        if not (known and best - reward.mean > enough):
            yield None
            continue
        yield (
            f"the reward has fallen from {best:.3g} to {reward.mean:.3g} (means of {WINDOW} steps); stop, and lower "
            "training.learning_rate, raise training.warmup_steps, lower training.max_grad_norm, or set grpo.beta > 0"
        )


def _hacked(rows: Sequence[Row]) -> Iterator[str | None]:
    """Reward up, accuracy down: the policy earns reward with something else than right answers (reward hacking)."""
    reward, accuracy = _Trend(), _Trend()
    for row in rows:
        reward.add(finite(row.get("reward")))
        accuracy.add(finite(row.get("accuracy")))
        risen = reward.mean - reward.first > HACKED_IN_NOISE * reward.noise_of_change()
        fallen = accuracy.first - accuracy.mean > HACKED_IN_NOISE * accuracy.noise_of_change()
        if not (risen and fallen and accuracy.mean < HACKED_FRACTION * accuracy.first):
            yield None
            continue
        yield (
            f"the reward has risen from {reward.first:.3g} to {reward.mean:.3g}, and the accuracy has fallen from "
            f"{accuracy.first:.1%} to {accuracy.mean:.1%} (means of {WINDOW} steps): something else than right answers "
            "is paid; read completions of these steps, and change the rewards"
        )


class _Trend:
    """The means of a metric over its first and its last WINDOW values; over fewer while there are fewer."""

    def __init__(self) -> None:
        self.last: deque[float] = deque(maxlen=WINDOW)
        self.first = self.mean = self.squares = 0.0
        self.count = 0

    def add(self, value: float | None) -> bool:
        """Take the value of a step; False where there is none."""
        if value is None:
            return False
        if self.last:
            change = value - self.last[-1]
            self.squares += change * change  # ** 2 may raise
        self.count += 1
        self.last.append(value)
        self.mean = sum(self.last) / len(self.last)
        self.first = self.mean if self.count <= WINDOW else self.first
        return True

    def noise_of_a_step(self) -> float:
        """Standard deviation of a single step: the difference of two neighbouring ones has twice its variance."""
        return math.sqrt(self.squares / (self.count - 1) / 2) if self.count > 1 else math.inf

    def noise_of_change(self) -> float:
        """Standard deviation of the difference between the two means, if nothing but chance were at work."""
        # A mean of WINDOW steps has the variance of a step over WINDOW, and the difference of two twice that.
        return self.noise_of_a_step() * math.sqrt(2 / WINDOW) if self.count >= 2 * WINDOW else math.inf


def _not_finite(rows: Sequence[Row]) -> Iterator[str | None]:
    """A metric that is NaN or infinite."""
    for row in rows:
        names = sorted(name for name, value in row.items() if finite(value) is None)
        if not names:
            yield None
            continue
        advice = (
            "stop, and lower training.learning_rate or training.max_grad_norm, raise training.warmup_steps, or "
            "use model.dtype=float32"
        )
        if any(name.startswith("reward") for name in names):
            advice = "fix the reward function that returned it (rewards)"
        yield f"not a finite number: {', '.join(names)}; {advice}"


# Steps that bfloat16 weights round away.
_not_applied = functools.partial(
    _streaks,
    name="update_applied",
    unhealthy=lambda value: value < UPDATE_APPLIED,
    least=1,
    message="the weights took {value:.1%} of the optimizer's step, the rest was rounded away; set "
    "training.rounding=stochastic or model.weight_dtype=float32",
)

# The reward need not be constant for this: it then changes only with the problems of the step.
_no_signal = functools.partial(
    _streaks,
    name="frac_reward_zero_std",
    unhealthy=lambda value: value >= 1,
    least=STEPS_WITHOUT_SIGNAL,
    message="in every group all completions had the same reward for {steps} steps; if the problems are solved, "
    "stop here or take harder ones; else try a higher rollout.temperature, a larger grpo.group_size, easier "
    "problems, or rewards that give partial credit",
)

# Far from the reference, in the rows that have a KL: all with grpo.beta above 0, some with grpo.watch_kl.
_kl = functools.partial(
    _streaks,
    name="kl",
    unhealthy=lambda value: value > KL,
    least=STEPS_ABOVE_KL,
    message=f"the KL from the reference is {{value:.2g}} nats per token, above {KL:g} {{steps}} times in "
    "succession; continue the run with a larger grpo.beta, where that is above 0, or begin another one with "
    "grpo.target_kl, which adapts it, or a lower training.learning_rate",
)

_length = functools.partial(
    _streaks,
    name="completions/clipped_ratio",
    unhealthy=lambda value: value > CLIPPED_RATIO,
    least=STEPS_CLIPPED,
    message=f"{{value:.0%}} of the completions reach the length limit, more than {CLIPPED_RATIO:.0%} for {{steps}} "
    "steps; raise rollout.max_completion_length, or add a reward (rewards) for ending in time",
)

# The most severe first.
RULES: dict[str, Callable[[Sequence[Row]], Iterator[str | None]]] = {
    "not finite": _not_finite,
    "fall": _fall,
    "hacked": _hacked,
    "entropy": _entropy,
    "not applied": _not_applied,
    "no signal": _no_signal,
    "left out": _left_out,
    "kl": _kl,
    "length": _length,
}
