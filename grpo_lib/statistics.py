"""How sure one can be: intervals, paired tests, the smallest difference that shows, pass@k, majority votes.

Everything here takes plain Python sequences with one entry per problem, in the same order before and after.
Rates are fractions from 0 to 1. NumPy and SciPy are imported inside the functions that need them, so that
this module costs nothing to import.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

from grpo_lib.answers import canonical_answer

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class PairedDifference:
    """Mean change from before to after, and its interval; all fractions from -1 to 1."""

    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class McNemar:
    """Problems right only before and right only after; the two-sided p-value, exact, and the mid-p-value."""

    only_before: int
    only_after: int
    p_value: float
    mid_p: float


def wilson_interval(successes: float, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Score interval for a proportion, without continuity correction: (low, high), within [0, 1].

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927). It
    is method 3 in R. G. Newcombe, "Two-sided confidence intervals for the single proportion", Statistics in
    Medicine 17 (1998): it holds its level for small n and for proportions near 0 and 1, where the textbook's
    p ± z·sqrt(p(1-p)/n) shrinks to nothing.

    Args:
      successes: how many of the n succeeded; a fraction is allowed (the sum of per-problem rates), and what rounding
        adds to n is taken off.
      n: number of problems, at least 1.
      confidence: coverage, strictly between 0 and 1.

    Raises:
      ValueError: n < 1, successes outside 0…n, or confidence outside (0, 1).
    """
    if n < 1 or not 0 <= successes <= n * (1 + 1e-9):
        raise ValueError(f"n must be at least 1, and successes between 0 and n; got n = {n}, successes = {successes}")
    z = NormalDist().inv_cdf(0.5 + _checked_confidence(confidence) / 2)
    p = min(successes / n, 1.0)
    middle = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # At 0 and n the bound is exact; rounding would leave something like 1e-17.
    low = 0.0 if p == 0 else max(0.0, (middle - half) / scale)
    high = 1.0 if p == 1 else min(1.0, (middle + half) / scale)
    return low, high


def clustered_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Interval for the mean of one value per problem, each of several samples: (low, high), within [0, 1].

    The samples of a problem are not independent of each other, so the problems are what is counted: mean ± t · s / √n,
    the clustered standard error of E. Miller, "Adding Error Bars to Evals" (arXiv:2411.00640, equation 5).  Where the
    values are verdicts, 0 or 1 (as pass@n from n samples), or all the same, so that s says nothing, it is Wilson's.

    Raises:
      ValueError: no values, one outside [0, 1], or confidence outside (0, 1).
    """
    import numpy as np
    from scipy.stats import t

    rates = np.asarray(values, float)
    n = len(values)
    if n < 1 or not ((rates >= 0) & (rates <= 1)).all():
        raise ValueError(f"values must be rates from 0 to 1, at least one; got {n} of them")
    mean = float(rates.mean())
    if np.ptp(rates) == 0 or np.isin(rates, (0, 1)).all():
        return wilson_interval(mean * n, n, confidence)
    half = float(t.ppf(0.5 + _checked_confidence(confidence) / 2, n - 1) * rates.std(ddof=1) / math.sqrt(n))
    return max(0.0, mean - half), min(1.0, mean + half)


def paired_bootstrap(
    before: Sequence[float | Sequence[float]],
    after: Sequence[float | Sequence[float]],
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> PairedDifference:
    """Mean of after - before with a percentile bootstrap interval, resampling problems.

    Both verdicts of a problem stay together, so what is hard for both models cancels (Efron and Tibshirani,
    "An Introduction to the Bootstrap", 1993, chapters 8 and 13). Where there are several samples per problem,
    they share its difficulty and are not independent evidence: a problem is drawn with all its samples or not
    at all (the cluster bootstrap: Davison and Hinkley, "Bootstrap Methods and their Application", 1997,
    section 3.8; Field and Welsh, "Bootstrapping clustered data", JRSS B 69, 2007). If nothing changed for any
    problem, the interval has width 0: the bootstrap knows only the problems that it was shown.

    Args:
      before, after: shape [problems], in the same order. An entry is a verdict (0/1), a rate in [0, 1], or the
        verdicts of that problem's samples. Problems weigh the same however many samples they have, and before
        and after need not have as many.

    Raises:
      ValueError: lengths differ, no problems, a problem without samples, a value outside [0, 1],
        resamples < 1, or confidence outside (0, 1).
    """
    import numpy as np

    _check_pairs(before, after)
    _checked_confidence(confidence)
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    n = len(before)
    differences = _rates("after", after) - _rates("before", before)
    values, counts = np.unique(differences, return_counts=True)
    # n problems drawn with replacement matter only through how often each distinct difference was drawn, and
    # those counts are multinomial. For 0/1 verdicts that is three numbers a resample in place of n indices.
    means = np.random.default_rng(seed).multinomial(n, counts / n, size=resamples) @ values / n
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return PairedDifference(float(differences.mean()), float(low), float(high))


def mcnemar(before: Sequence[bool], after: Sequence[bool]) -> McNemar:
    """McNemar's test: do the problems that changed, change in one direction more than a fair coin would?

    Q. McNemar, "Note on the sampling error of the difference between correlated proportions or percentages",
    Psychometrika 12 (1947). Problems that are right both times, or wrong both times, say nothing. `p_value` is
    the two-sided binomial one at 1/2: it never claims too much, for any number of changes, and mostly claims
    too little. `mid_p` counts half of the outcome that was seen, and so comes close to the level it is read at
    (M. W. Fagerland, S. Lydersen and P. Laake, BMC Medical Research Methodology 13:91, 2013). Both are 1.0 if
    nothing changed, or as much in one direction as in the other.

    Args:
      before, after: verdicts (bool or 0/1), shape [problems], in the same order.

    Raises:
      ValueError: lengths differ, no problems, or a value that is neither 0 nor 1.
    """
    from scipy.stats import binom

    _check_pairs(before, after)
    if other := [value for value in (*before, *after) if value not in (0, 1)]:
        raise ValueError(f"McNemar's test needs one verdict, 0 or 1, for each problem; got {other[0]}")
    only_before = sum(1 for b, a in zip(before, after, strict=True) if b and not a)
    only_after = sum(1 for b, a in zip(before, after, strict=True) if a and not b)
    changed, smaller = only_before + only_after, min(only_before, only_after)
    tail, beyond = (float(binom.cdf(count, changed, 0.5)) for count in (smaller, smaller - 1))
    # Twice the smaller tail; of mid-p, with the outcome itself at half weight. No difference is taken: it could cancel.
    return McNemar(only_before, only_after, min(1.0, 2 * tail), min(1.0, tail + beyond))


def smallest_difference(n: int, flips: float, power: float = 0.8, confidence: float = 0.95) -> float:
    """The smallest true change of accuracy that n problems are likely to show; a fraction, in (0, flips].

    McNemar's exact test gives p <= 1 - confidence for a change of this size with probability `power`, computed
    without approximation (see `_power`). That no change was found says little about changes smaller than this.

    Args:
      n: number of problems, one verdict each before and after.
      flips: expected fraction of problems whose verdict changes, in either direction, in (0, 1]. No change of
        accuracy is larger. An earlier pair of runs tells: (only_before + only_after) / n.

    Raises:
      ValueError: n problems cannot show even that all flips go one way, n below 1, flips outside (0, 1], or power not
        between 1 - confidence and 1.
    """
    from scipy.optimize import brentq

    _checked_confidence(confidence)
    if n < 1 or not 0 < flips <= 1:
        raise ValueError(f"n must be at least 1, and flips a fraction above 0, at most 1; got n = {n}, flips = {flips}")
    if not 1 - confidence < power < 1:
        raise ValueError(f"power must lie between 1 - confidence = {1 - confidence:g} and 1, got {power}")
    if _power(n, flips, flips, confidence) < power:
        raise ValueError(f"{n} problems with flips = {flips:g} can show no difference with power {power:g}; take more")
    root = float(brentq(lambda difference: _power(n, difference, flips, confidence) - power, 0.0, flips))
    return min(flips, root + 1e-11)  # the root itself may fall short of the power by a rounding error


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Student's t interval for the mean of a few values, such as one difference for each seed: (low, high).

    It assumes values that are roughly normal, and a bound is not limited to what a value can be.

    Raises:
      ValueError: fewer than two values, or confidence outside (0, 1).
    """
    import numpy as np
    from scipy.stats import t

    if len(values) < 2:
        raise ValueError(f"an interval needs at least two values, got {len(values)}")
    array = np.asarray(values, float)
    half = t.ppf(0.5 + _checked_confidence(confidence) / 2, len(array) - 1) * array.std(ddof=1) / math.sqrt(len(array))
    return float(array.mean() - half), float(array.mean() + half)


def smallest_mean(sd: float, n: int, power: float = 0.8, confidence: float = 0.95) -> float:
    """The smallest true mean for which `mean_interval` of n values with this standard deviation is likely to leave out
    0: with probability `power`, by the noncentral t distribution.  In the unit of `sd`.

    Raises:
      ValueError: n below 3 (fewer values say nothing of their spread), sd below 0, confidence outside (0, 1), or power
        not between 1 - confidence and 1.
    """
    from scipy.optimize import brentq
    from scipy.stats import nct, t

    if n < 3 or not sd >= 0:
        raise ValueError(f"the spread of values needs n of at least 3 and an sd of at least 0; got n = {n}, sd = {sd}")
    if not 1 - _checked_confidence(confidence) < power < 1:
        raise ValueError(f"power must lie between 1 - confidence = {1 - confidence:g} and 1, got {power}")
    limit = t.ppf((1 + confidence) / 2, n - 1)

    def missing(shift: float) -> float:  # shift: in standard errors
        return float(nct.sf(limit, n - 1, shift)) - power  # the other tail is less than a thousandth of it

    return float(brentq(missing, 0.0, limit + 4)) * sd / math.sqrt(n)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate, from n samples with c right, that at least one of k samples is right.

    1 - C(n-c, k) / C(n, k): M. Chen et al., "Evaluating Large Language Models Trained on Code" (2021),
    equation 1. It depends on c alone, not on the order of the samples. Average it over problems.

    Raises:
      ValueError: k > n, c > n, k < 1, or c < 0.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    # Python's integers are exact, so the paper's numerically stable product is not needed.
    total = math.comb(n, k)
    return (total - math.comb(n - c, k)) / total


def majority_vote(votes: Iterable[str | None], numbers: bool = True) -> str | None:
    """The value given most often (maj@k of Wang et al., "Self-Consistency", 2022), in canonical form.

    Votes are counted by value, so "18", "18.00" and "$18" are one candidate. None, and text without a number,
    abstains: it does not vote, and one number beats any count of it. Of several values with equally many votes,
    the one given earliest wins; chance alone ordered the samples, so the rule favours no value. None if all
    abstain, which counts as wrong.  Without `numbers` a vote is for a text as it stands.
    """
    value_of = canonical_answer if numbers else str.strip
    values = [value_of(answer) for answer in votes if answer is not None]
    # Counter keeps the order of first appearance, and most_common is stable: ties go to the earliest.
    ranking = Counter(value for value in values if value is not None).most_common(1)
    return ranking[0][0] if ranking else None


def _checked_confidence(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie strictly between 0 and 1, got {confidence}")
    return confidence


def _check_pairs(before: Sequence, after: Sequence) -> None:
    if not 0 < len(before) == len(after):
        raise ValueError(f"before has {len(before)} problems, after has {len(after)}; give the same ones, at least one")


def _rates(name: str, problems: Sequence[float | Sequence[float]]) -> "np.ndarray":
    """One rate per problem, shape [problems]: the mean of its samples, or the number that it is."""
    import numpy as np

    samples = [np.ravel(np.asarray(entry, dtype=np.float64)) for entry in problems]
    for values in samples:
        if not len(values) or not ((values >= 0) & (values <= 1)).all():  # NaN too
            raise ValueError(f"{name} holds {values.tolist()}; each problem has one or more numbers from 0 to 1")
    return np.array([values.mean() for values in samples])


def _power(n: int, difference: float, flips: float, confidence: float) -> float:
    """Probability that McNemar's exact test on n problems gives p <= 1 - confidence.

    How many problems change is binomial(n, flips); how many of those change for the better is binomial at
    (flips + difference) / (2 flips). The test's power given the first number, averaged over it (S. W. Duffy,
    "Asymptotic and exact power for the McNemar test", Biometrics 40, 1984): no normal approximation, which
    would promise too much for the few dozen problems of an AIME.
    """
    import numpy as np
    from scipy.stats import binom

    # The probability outside this range is 2e-12; inside, about sqrt(n) terms in place of n.
    changed = np.arange(binom.ppf(1e-12, n, flips), binom.isf(1e-12, n, flips) + 1)
    level = 1 - confidence
    largest = binom.ppf(level / 2, changed, 0.5)  # the largest smaller count that is still significant, or one above
    largest -= 2 * binom.cdf(largest, changed, 0.5) > level
    better = 0.5 + difference / (2 * flips)
    significant = binom.cdf(largest, changed, better) + binom.cdf(largest, changed, 1 - better)
    return float(binom.pmf(changed, n, flips) @ significant)
