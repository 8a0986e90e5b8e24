"""A result in words: percentages, points, p-values, and the sentence that says what came out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NBSP, MINUS = "\u00a0", "\u2212"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def headline(summary: dict[str, Any]) -> str:
    """The result in one or two plain sentences, from the dict of summary.json; honest about noise.

    A change counts as one only if the interval of the difference leaves out zero and, where there is a p-value,
    p < 0.05.
    """
    before, after = summary.get("before"), summary.get("after")
    if not before:
        return "The model has not been evaluated yet."
    if not after:
        return (
            f"Before training the model answers {percent(before['accuracy'])} of {before['n']:,} problems correctly "
            f"({rate_range(before['interval'])}). There is no evaluation after training yet."
        )
    low, high = summary["difference_interval"]
    p = summary.get("mcnemar_p")
    clear = (low > 0 or high < 0) and (p is None or p < 0.05)
    rates = f"{percent(before['accuracy'])} before, {percent(after['accuracy'])} after, on {after['n']:,} problems"
    evidence = f"{points(summary['difference'])} points (95{NBSP}% interval {points(low)} to {points(high)})"
    if p is not None:
        evidence += f"; McNemar's exact test: {p_value(p)}"
    if clear:
        verdict = "Accuracy rose" if summary["difference"] > 0 else "Accuracy fell"
        return f"{verdict}: {rates}. {evidence}."
    return f"No clear change: {rates}. {evidence}. A difference of this size can be chance."


def percent(rate: float) -> str:
    """0.4213 -> "42.1 %", with a space that does not break."""
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
