"""Published examples, and properties that must hold for any input."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, bootstrap, norm

from grpo_lib.statistics import (
    _power,
    clustered_interval,
    majority_vote,
    mcnemar,
    mean_interval,
    paired_bootstrap,
    pass_at_k,
    smallest_difference,
    smallest_mean,
    wilson_interval,
)

VERDICTS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)


# --- Wilson ---


def test_an_interval_over_problems_is_the_t_interval_of_their_means():
    # 0.5 ± 2.776 · 0.3953 / √5
    assert clustered_interval([0.25, 0.5, 1.0, 0.0, 0.75]) == pytest.approx((0.0092, 0.9908), abs=1e-4)
    assert clustered_interval([1.0] * 20) == wilson_interval(20, 20)
    # 30 problems cannot tell much: pass@32 of 0.7 on a year of AIME.
    assert clustered_interval([1.0] * 21 + [0.0] * 9) == pytest.approx((0.521, 0.833), abs=1e-3)


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0.5, 0.999))
def test_wilson_agrees_with_scipy_and_is_exact_at_the_ends(counts, confidence):
    successes, n = counts
    low, high = wilson_interval(successes, n, confidence)
    assert (low == 0) == (successes == 0)
    assert (high == 1) == (successes == n)
    peer = binomtest(successes, n).proportion_ci(confidence, method="wilson")
    assert (low, high) == pytest.approx((peer.low, peer.high), abs=1e-12)


# --- paired bootstrap ---


def test_bootstrap_agrees_with_scipy():
    rng = np.random.default_rng(1)
    before, after = rng.integers(0, 5, 300) / 4, rng.integers(1, 6, 300) / 5
    peer = bootstrap((after - before,), np.mean, n_resamples=5000, method="percentile", rng=2).confidence_interval
    result = paired_bootstrap(before, after)
    assert (result.low, result.high) == pytest.approx((peer.low, peer.high), abs=0.003)


def test_bootstrap_is_paired():
    # Two equal accuracies, but of other problems: the interval is not a point.
    swapped = paired_bootstrap([1, 0] * 100, [0, 1] * 100)
    assert swapped.difference == 0
    assert swapped.low < -0.1
    assert swapped.high > 0.1


def test_bootstrap_depends_on_the_seed_alone():
    before = [i / 2000 for i in range(1500)]
    after = [min(1, value * value + 0.1) for value in before]
    result, again, other = (paired_bootstrap(before, after, resamples=3000, seed=seed) for seed in (3, 3, 4))
    assert result.low < result.difference < result.high
    assert result == again != other


@settings(max_examples=50, deadline=None)
@given(VERDICTS)
def test_bootstrap_properties(pairs):
    before, after = zip(*pairs, strict=True)
    result = paired_bootstrap(before, after, resamples=500)
    assert -1 <= result.low <= result.high <= 1
    assert result.difference == pytest.approx((sum(after) - sum(before)) / len(pairs))
    # A difference of the sample itself lies among the resampled ones.
    assert paired_bootstrap(before, before, resamples=10).high == 0
    assert paired_bootstrap([0] * len(pairs), [1] * len(pairs), resamples=10).low == 1


# --- paired bootstrap, several samples per problem ---


def test_bootstrap_of_samples_is_that_of_their_rates():
    of_samples = paired_bootstrap([[1, 1, 0, 0], [False], 0.25, [0, 1]], [[True], [0, 1, 1, 1], [1, 0], 1])
    assert of_samples == paired_bootstrap([0.5, 0, 0.25, 0.5], [1, 0.75, 0.5, 1])
    as_array = np.array([[1, 1, 0, 0], [0, 0, 0, 1]], dtype=bool)
    assert paired_bootstrap(as_array, as_array[::-1]) == paired_bootstrap([0.5, 0.25], [0.25, 0.5])


# --- McNemar ---


@pytest.mark.parametrize(
    ("only_before", "only_after", "exact", "mid"),
    [(7, 1, 0.0703, 0.0391), (6, 16, 0.0525, 0.0347)],  # airway hyper-responsiveness; complete response
)
def test_mcnemar_agrees_with_the_examples_of_fagerland_2013(only_before, only_after, exact, mid):
    result = mcnemar([1] * only_before + [0] * only_after + [1, 0], [0] * only_before + [1] * only_after + [1, 0])
    assert (result.only_before, result.only_after) == (only_before, only_after)
    assert (result.p_value, result.mid_p) == pytest.approx((exact, mid), abs=5e-5)


@settings(deadline=None)
@given(VERDICTS)
def test_mcnemar_properties(pairs):
    before, after = zip(*pairs, strict=True)
    result, reverse = mcnemar(before, after), mcnemar(after, before)
    assert (result.only_before, result.only_after) == (reverse.only_after, reverse.only_before)
    assert result.p_value == pytest.approx(reverse.p_value)
    assert result.only_after - result.only_before == sum(after) - sum(before)
    # Two-sided at 1/2: twice the smaller tail, at most 1.
    changed, smaller = result.only_before + result.only_after, min(result.only_before, result.only_after)
    tail = sum(math.comb(changed, i) for i in range(smaller + 1)) / 2**changed
    assert result.p_value == pytest.approx(min(1.0, 2 * tail))
    # Half of the outcome's own probability less on either side; 1 for as many changes in one direction.
    itself = math.comb(changed, smaller) / 2**changed
    assert result.mid_p == pytest.approx(1.0 if changed == 2 * smaller else 2 * tail - itself)
    assert 0 < result.mid_p <= result.p_value


# --- how many problems it takes ---


def test_power_of_the_example_of_obrien():
    # R. G. O'Brien's crossover example, as in the manual of G*Power 3.1: 32 % and 8 % of the pairs discordant,
    # 50 pairs, one-sided level 0.05: power 0.839. The other tail of a two-sided test at 0.10 adds 0.00002.
    assert smallest_difference(50, 0.40, power=0.83935, confidence=0.90) == pytest.approx(0.24, abs=1e-4)
    assert smallest_difference(49, 0.40, power=0.83935, confidence=0.90) > 0.24


@pytest.mark.parametrize(("difference", "flips"), [(0.03, 0.2), (0.05, 0.2), (0.1, 0.3), (0.24, 0.4), (0.02, 0.1)])
def test_smallest_difference_is_connors_formula_and_the_price_of_exactness(difference, flips):
    # Connor 1987, for the test that is not exact; 1 / difference for exactness, as Fleiss adds for continuity.
    z = norm.ppf(0.975) * math.sqrt(flips) + norm.ppf(0.8) * math.sqrt(flips - difference**2)
    connor = (z / difference) ** 2
    assert smallest_difference(math.ceil(connor), flips) > difference
    assert smallest_difference(round(connor + 1 / difference), flips) == pytest.approx(difference, rel=0.02)


def test_the_interval_of_a_mean_and_the_smallest_mean_that_it_shows():
    # t(4, 0.975) is 2.776; these have mean 3 and standard error sqrt(2.5 / 5).
    half = 2.776445 * 0.5**0.5
    assert mean_interval([1, 2, 3, 4, 5]) == pytest.approx((3 - half, 3 + half))
    smallest = smallest_mean(1.0, 5)
    assert smallest_mean(2.5, 5) == pytest.approx(2.5 * smallest)
    samples = np.random.default_rng(5).normal(size=(20_000, 5)) + smallest
    t = samples.mean(axis=1) / (samples.std(axis=1, ddof=1) / 5**0.5)
    assert np.mean(t > 2.776445) == pytest.approx(0.8, abs=0.01)
    for call in (lambda: mean_interval([1.0]), lambda: smallest_mean(1.0, 2), lambda: smallest_mean(-1.0, 5)):
        with pytest.raises(ValueError, match="at least"):
            call()
    with pytest.raises(ValueError, match="power must lie between"):
        smallest_mean(1.0, 5, power=0.01)


def test_fewer_than_six_changes_are_never_significant():
    # 2 / 2^5 > 0.05 >= 2 / 2^6.
    assert smallest_difference(6, 1) <= 1  # 5 changes: see REFUSED


@settings(max_examples=40, deadline=None)
@given(st.integers(6, 2000), st.floats(0.02, 1), st.floats(0.3, 0.95), st.floats(0.8, 0.99))
def test_the_power_at_the_smallest_difference_is_the_power_that_was_asked_for(n, flips, power, confidence):
    try:
        difference = smallest_difference(n, flips, power, confidence)
    except ValueError:
        assert _power(n, flips, flips, confidence) < power
    else:
        assert 0 < difference <= flips
        assert _power(n, difference, flips, confidence) == pytest.approx(power, abs=1e-6) or difference == flips


# --- pass@k and maj@k ---


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_all_subsets_with_a_right_sample(case):
    n, c, k = case
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_of_many_samples_is_the_stable_product_of_chen_2021():
    assert pass_at_k(300, 17, 40) == pytest.approx(1 - math.prod(1 - 40 / i for i in range(284, 301)), abs=1e-12)


@pytest.mark.parametrize(
    ("votes", "winner"),
    [
        (["18", "18.00", "$18", "7", "7"], "18"),
        (["7", None, None, None], "7"),  # no answer is not an answer that wins
        (["3", "5", "5", "3"], "3"),  # a tie: the earliest
        (["5", "3", "5", "3"], "5"),
        (["1,080", "1080", "2"], "1080"),
        (["-5", "5", "-5"], "-5"),
        (["?", "seven", "4"], "4"),
        (["1/3", "0.5", "2/6"], "1/3"),
        (iter(["2", "1", "1"]), "1"),
        ([None, None], None),
        ([], None),
    ],
)
def test_majority_vote(votes, winner):
    assert majority_vote(votes) == winner


# --- what has no answer ---

PAIRS = [([1], [1, 0]), ([], []), ([1, 2], [1, 0]), ([0, 1], [-1, 0]), ([math.nan], [1])]
REFUSED = {
    (clustered_interval, "rates from 0 to 1"): [([],), ([1.2],), ([-0.1, 0.5],)],
    (wilson_interval, "between"): [
        (1, 0), (-1, 5), (6, 5), (math.nan, 5), (1, 5, 0.0), (1, 5, 1.0), (1, 5, 95),
    ],
    (paired_bootstrap, "problem"): PAIRS,
    (paired_bootstrap, "after holds"): [
        ([0, 1], [1, []]), ([0, 1], [1, [0, 2]]), ([0, 1], [1, [0.5, math.nan]]), ([0, 1], [1, None]),
    ],
    (paired_bootstrap, "resamples"): [([0, 1], [1, 1], 0.95, 0)],
    (mcnemar, "problem"): PAIRS,
    (mcnemar, "0 or 1"): [([0.5], [1]), ([[1, 0]], [1])],
    (smallest_difference, "flips|power|confidence"): [
        (0, 0.2), (100, 0), (100, 1.1), (100, math.nan), (100, 0.2, 1), (100, 0.2, 0.05), (100, 0.2, 0.8, 1), (10, 0.1),
    ],
    (smallest_difference, "can show no difference"): [(5, 1)],
    (pass_at_k, "pass@k needs"): [(5, 1, 6), (5, 6, 1), (-1, 0, 1), (5, -1, 1), (5, 1, -1), (5, 1, 0), (0, 0, 1)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "message", "arguments"),
    [(*key, arguments) for key, several in REFUSED.items() for arguments in several],
)
def test_impossible_arguments_are_refused(function, message, arguments):
    with pytest.raises(ValueError, match=message):
        function(*arguments)
