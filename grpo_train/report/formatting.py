"""Results as text: percentages, points, p-values, and the headline of a run."""

from collections.abc import Sequence
from typing import Any

CHANCE = "A difference of this size can be chance."
NBSP, MINUS = "\u00a0", "\u2212"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def headline(summary: dict[str, Any]) -> str:
    """The result in one or two plain sentences, from the dict of summary.json; a change within noise is called so."""
    before, after = summary.get("before"), summary.get("after")
    if not before:
        return "The model has not been evaluated yet."
    if not after:
        return (
            f"Before training the model answers {percent(before['accuracy'])} of {before['n']:,} problems correctly "
            f"({rate_range(before['interval'])}). There is no evaluation after training yet."
        )
    change = summary["difference"], summary["difference_interval"], summary.get("mcnemar_p")
    phases = {"base": summary.get("cold_start", {}).get("before"), "before": before, "after": after}
    answered = ", ".join(f"{percent(part['accuracy'])} {phase}" for phase, part in phases.items() if part)
    verdict = f"{answered}, on {after['n']:,} problems. {evidence(*change)}."
    if not is_clear(*change[1:]):
        return f"No clear change: {verdict} {CHANCE}"
    return f"Accuracy {'rose' if change[0] > 0 else 'fell'}: {verdict}"


def is_clear(interval: Sequence[float], p: float | None) -> bool:
    """Whether a difference is more than noise: its interval excludes zero and, where there is a p-value, p < 0.05."""
    low, high = interval
    return (low > 0 or high < 0) and (p is None or p < 0.05)


def evidence(difference: float, interval: Sequence[float], p: float | None) -> str:
    """A difference with its interval and, unless `p` is None, the test."""
    low, high = map(points, interval)
    text = f"{points(difference)} points (95{NBSP}% interval {low} to {high})"
    return text if p is None else f"{text}; McNemar's exact test: {p_value(p)}"


def percent(rate: float) -> str:
    """0.4213 -> "42.1 %", with a no-break space."""
    return f"{100 * rate:.1f}{NBSP}%"


def points(difference: float) -> str:
    """0.0312 -> "+3.1": percentage points, always signed."""
    text = f"{100 * difference:+.1f}"
    return "0.0" if float(text) == 0 else text.replace("-", MINUS)


def p_value(p: float) -> str:
    """0.0312 -> "p = 0.031", 4e-12 -> "p = 4 × 10⁻¹²"."""
    if p >= 0.001:
        return f"p = {p:.3f}".replace(" ", NBSP)
    if p <= 0:
        return f"p < 10{'-300'.translate(SUPERSCRIPTS)}".replace(" ", NBSP)
    mantissa, exponent = f"{p:.0e}".split("e")
    return f"p = {mantissa} × 10{str(int(exponent)).translate(SUPERSCRIPTS)}".replace(" ", NBSP)


def rate_range(interval: Sequence[float]) -> str:
    """(0.401, 0.463) -> "40.1–46.3 %"."""
    low, high = interval
    return f"{100 * low:.1f}–{100 * high:.1f}{NBSP}%"


def duration(seconds: float) -> str:
    """Seconds up to two minutes, minutes up to two hours, then hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
