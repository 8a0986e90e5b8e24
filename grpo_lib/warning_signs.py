"""Early warnings: what in the rows of metrics.jsonl says that a run goes wrong, in one line, with what to try.

    signs(rows)          # all of a run, in the order of their steps
    new_signs(rows)      # those of the last row; for a training loop, after each step, with all rows so far

A sign is said once, and again only after it has passed.  The limits are set so that a healthy run gives none; each
says why it is what it is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Limits:
    """What counts as a sign.  Numbers of steps are in a row, unless a field says otherwise."""

    # Without a spread of the reward inside a group every advantage is 0.  A few such steps are chance in a small batch.
    steps_without_signal: int = 10
    # Nats per token, of the estimator exp(d) - d - 1 (k3).  At 1 the reference finds the policy's tokens e times less
    # likely each, a completion of 100 of them e^100 times: that is what a penalty (grpo.beta) is there to prevent.
    # Three steps, because the exponential lets one rare token lift the mean of a step.
    kl: float = 1.0
    steps_above_kl: int = 3
    # Share of completions that the length limit cut: beyond one half, it decides the reward more than the answer does.
    truncated: float = 0.5
    steps_truncated: int = 5
    # Entropy in nats per token: under this share of what it was in the first steps, and under an absolute bound, for a
    # policy may begin with texts that hardly anybody could guess.
    entropy_share: float = 0.1
    entropy: float = 0.05
    # From this accuracy on a policy may be sure of itself: it has solved the task.
    solved: float = 0.8
    # A fall of the reward: by so many times its noise from step to step, and by so much of what had been gained.
    fall_in_noise: float = 4.0
    fall_of_gain: float = 0.5
    window: int = 5  # steps over which entropy, accuracy and reward are averaged; also what "the first steps" are
    passed: int = 5  # steps without it, after which a sign may be said again


LIMITS = Limits()


@dataclass(frozen=True)
class Sign:
    """One warning: the step at which it first holds, which kind (a key of KINDS), and a line with what to try."""

    step: int
    kind: str
    message: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.message}"


def signs(rows: Iterable[Row], limits: Limits = LIMITS) -> list[Sign]:
    """All signs of a run, by step.

    Args:
      rows: rows of metrics.jsonl, in any order; of two for one step the later one counts.  Any metric may be missing;
        None, NaN and infinity are what was not finite.
    """
    rows = by_step(rows)
    found = []
    for kind, watch in KINDS.items():
        quiet = limits.passed
        for row, message in zip(rows, watch(rows, limits), strict=True):
            quiet = quiet + 1 if message is None else quiet
            if message is not None:
                if quiet >= limits.passed:
                    found.append(Sign(int(row["step"]), kind, message))
                quiet = 0
    return sorted(found, key=lambda sign: sign.step)


def new_signs(rows: Sequence[Row], limits: Limits = LIMITS) -> list[Sign]:
    """The signs that the last of `rows` brings: what a training loop has to say after that step.

    It keeps nothing between calls, so a resumed run says nothing twice.  With a thousand rows it takes 20 ms.
    """
    return [sign for sign in signs(rows, limits) if sign.step == rows[-1].get("step")]


def by_step(rows: Iterable[Row]) -> list[Row]:
    """One row for each step, in order; of two for one step the later one counts, and a row without one is left out."""
    latest = {row["step"]: row for row in rows if finite(row.get("step")) is not None}
    return [latest[step] for step in sorted(latest)]


def finite(value: Any) -> float | None:
    """A finite number as a float; None for anything else."""
    if not isinstance(value, int | float):
        return None
    try:
        value = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return value if math.isfinite(value) else None


def _no_signal(rows: Sequence[Row], limits: Limits) -> Iterator[str | None]:
    """Nothing to learn from: all completions of every group earn the same, for many steps.

    The reward need not be flat for that: then it moves with the problems that a step drew, and with nothing else.
    """
    streak: deque[Row] = deque(maxlen=limits.steps_without_signal)
    for row in rows:
        streak.append(row)
        if (finite(row.get("zero_variance_groups")) or 0) < 1:
            streak.clear()
        if len(streak) < limits.steps_without_signal:
            yield None
            continue
        accuracy = _mean(finite(r.get("accuracy")) for r in streak)
        remedy = (
            "the problems are solved: stop here, or take harder ones"
            if accuracy is not None and accuracy >= limits.solved
            else "try a higher rollout.temperature, a larger grpo.group_size, easier problems, or rewards that pay for "
            "part of the way"
        )
        yield (
            f"in every group all completions earned the same for {len(streak)} steps{_reward_range(streak)}, "
            f"so nothing is learnt; {remedy}"
        )


def _kl(rows: Sequence[Row], limits: Limits) -> Iterator[str | None]:
    """Far from the reference.  Without a penalty there is no reference, and the rows say 0."""
    for kl, streak in _above(rows, "kl", limits.kl):
        yield (
            f"the KL from the reference is {kl:.2g} nats per token, above {limits.kl:g} for {streak} steps; raise "
            "grpo.beta, or lower training.learning_rate"
            if streak >= limits.steps_above_kl
            else None
        )


def _length(rows: Sequence[Row], limits: Limits) -> Iterator[str | None]:
    """Completions that run into the length limit."""
    for share, streak in _above(rows, "truncated", limits.truncated):
        yield (
            f"{share:.0%} of the completions reach the length limit, more than {limits.truncated:.0%} for {streak} "
            "steps; raise rollout.max_completion_length, or add to rewards one that pays for ending in time"
            if streak >= limits.steps_truncated
            else None
        )


def _entropy(rows: Sequence[Row], limits: Limits) -> Iterator[str | None]:
    """A policy that writes the same whatever it is asked, and is wrong."""
    first: list[float] = []
    last, accuracies = deque(maxlen=limits.window), deque(maxlen=limits.window)
    for row in rows:
        accuracies.append(finite(row.get("accuracy")))
        value = finite(row.get("entropy"))
        if value is None:
            yield None
            continue
        if len(first) < limits.window:
            first.append(value)
        last.append(value)
        mean, start, accuracy = _mean(last), _mean(first), _mean(accuracies)
        collapsed = mean < limits.entropy and mean < limits.entropy_share * start
        solved = accuracy is not None and accuracy >= limits.solved
        yield (
            f"the entropy has collapsed from {start:.2g} to {mean:.2g} nats per token"
            f"{'' if accuracy is None else f' at an accuracy of {accuracy:.0%}'}, so little is explored; raise "
            "rollout.temperature, lower training.learning_rate, or set grpo.beta above 0"
            if collapsed and not solved
            else None
        )


def _fall(rows: Sequence[Row], limits: Limits) -> Iterator[str | None]:
    """A reward that had risen and falls again: too large a step shows so, while entropy and groups still look alive.

    It is measured in the reward's own noise and gain, because the scale of a reward is its recipe's.
    """
    last = deque(maxlen=limits.window)
    start = best = previous = None
    squares = count = 0.0
    for row in rows:
        value = finite(row.get("reward"))
        if value is None:
            yield None
            continue
        if previous is not None:
            squares, count = squares + (value - previous) * (value - previous), count + 1
        previous = value
        last.append(value)
        if len(last) < limits.window:
            yield None
            continue
        mean = _mean(last)
        start = mean if start is None else start
        best = mean if best is None else max(best, mean)
        # Two neighbours differ by twice the variance of one step.
        noise = math.sqrt(squares / count / 2) if count else math.inf
        fallen = best - mean > max(limits.fall_in_noise * noise, limits.fall_of_gain * (best - start))
        yield (
            f"the reward has fallen from {best:.3g} to {mean:.3g} (means of {limits.window} steps); stop, and lower "
            "training.learning_rate, raise training.warmup_steps, lower training.clip, or set grpo.beta above 0"
            if fallen
            else None
        )


def _not_finite(rows: Sequence[Row], limits: Limits) -> Iterator[str | None]:
    """A number that is none."""
    for row in rows:
        names = sorted(" ".join(name.split()) for name, value in row.items() if _is_broken(value))
        if not names:
            yield None
            continue
        remedy = (
            "mend the reward function that gave it (rewards)"
            if any(name.startswith("reward") for name in names)
            else "stop, and lower training.learning_rate or training.clip, raise training.warmup_steps, or take "
            "model.dtype=float32"
        )
        yield f"not a finite number: {', '.join(names)}; {remedy}"


# In the order in which the signs of one step are said: the gravest first.
KINDS: dict[str, Callable[[Sequence[Row], Limits], Iterator[str | None]]] = {
    "not finite": _not_finite,
    "fall": _fall,
    "entropy": _entropy,
    "no signal": _no_signal,
    "kl": _kl,
    "length": _length,
}


def _above(rows: Sequence[Row], name: str, bound: float) -> Iterator[tuple[float | None, int]]:
    """For each row the metric, and for how many rows it has been above the bound."""
    streak = 0
    for row in rows:
        value = finite(row.get(name))
        streak = streak + 1 if value is not None and value > bound else 0
        yield value, streak


def _is_broken(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and finite(value) is None)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _reward_range(rows: Iterable[Row]) -> str:
    rewards = [reward for row in rows if (reward := finite(row.get("reward"))) is not None]
    if not rewards:
        return ""
    low, high = f"{min(rewards):.3g}", f"{max(rewards):.3g}"
    return f" (reward {low})" if low == high else f" (reward {low} to {high})"
