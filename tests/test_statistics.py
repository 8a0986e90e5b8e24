"""Published examples, and properties that must hold for any input."""

import itertools
import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lib.statistics import majority_vote, mcnemar, paired_bootstrap, pass_at_k, wilson_interval

VERDICTS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)


# --- Wilson ---


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_agrees_with_newcombe_1998_table_1_method_3(successes, n, low, high):
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_half_width_at_the_size_of_the_gsm8k_test_split():
    low, high = wilson_interval(660, 1319)
    assert (high - low) / 2 == pytest.approx(0.027, abs=5e-4)


def test_wilson_is_exact_at_the_ends():
    assert wilson_interval(0, 7)[0] == 0.0
    assert wilson_interval(7, 7)[1] == 1.0


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0.5, 0.999))
def test_wilson_properties(counts, confidence):
    successes, n = counts
    low, high = wilson_interval(successes, n, confidence)
    assert 0 <= low <= successes / n <= high <= 1
    assert low < high
    mirrored = wilson_interval(n - successes, n, confidence)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high), abs=1e-9)
    wider = wilson_interval(successes, n, 0.9995)
    assert wider[0] <= low and high <= wider[1]


@pytest.mark.parametrize("arguments", [(1, 0), (-1, 5), (6, 5), (math.nan, 5), (1, 5, 0.0), (1, 5, 1.0), (1, 5, 95)])
def test_wilson_refuses(arguments):
    with pytest.raises(ValueError):
        wilson_interval(*arguments)


# --- paired bootstrap ---


def test_bootstrap_agrees_with_the_normal_interval_on_many_problems():
    before = [1] * 600 + [0] * 100 + [1] * 40 + [0] * 260
    after = [1] * 600 + [1] * 100 + [0] * 40 + [0] * 260
    result = paired_bootstrap(before, after)
    assert result.difference == pytest.approx(0.06)
    # Var(difference) = ((b + c) - (b - c)^2 / n) / n^2 for b = 100, c = 40 discordant pairs of n = 1000.
    half = 1.959964 * math.sqrt((140 - 60**2 / 1000) / 1000**2)
    assert (result.low, result.high) == pytest.approx((0.06 - half, 0.06 + half), abs=0.002)


def test_bootstrap_is_paired():
    # The same two accuracies, but which problems are right changes: the interval must widen.
    same = paired_bootstrap([1, 0] * 100, [1, 0] * 100)
    swapped = paired_bootstrap([1, 0] * 100, [0, 1] * 100)
    assert (same.difference, same.low, same.high) == (0, 0, 0)
    assert swapped.difference == 0
    assert swapped.low < -0.1 and swapped.high > 0.1


def test_bootstrap_depends_on_the_seed_alone():
    before, after = [0, 1, 0, 1, 0.25], [1, 1, 0, 0, 0.75]
    assert paired_bootstrap(before, after, seed=3) == paired_bootstrap(before, after, seed=3)
    before, after = [i / 97 for i in range(97)], [(i / 97) ** 2 for i in range(97)]
    assert paired_bootstrap(before, after, seed=3) != paired_bootstrap(before, after, seed=4)


def test_bootstrap_of_many_distinct_rates_is_chunked_without_a_seam():
    before = [i / 2000 for i in range(1500)]
    after = [min(1, value * value + 0.1) for value in before]
    result = paired_bootstrap(before, after, resamples=3000)
    assert result.low < result.difference < result.high


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


@pytest.mark.parametrize("function", [paired_bootstrap, mcnemar])
@pytest.mark.parametrize(
    ("before", "after"), [([1], [1, 0]), ([], []), ([1, 2], [1, 0]), ([0, 1], [-1, 0]), ([math.nan], [1])]
)
def test_pairs_are_checked(function, before, after):
    with pytest.raises(ValueError):
        function(before, after)


def test_bootstrap_refuses_no_resamples():
    with pytest.raises(ValueError, match="resamples"):
        paired_bootstrap([1], [1], resamples=0)


# --- McNemar ---


def test_mcnemar_agrees_with_the_example_of_fay_2010():
    # R package exact2x2, mcnemar.exact(matrix(c(21, 9, 2, 12), 2, 2)): p-value = 0.06543.
    before = [1] * 21 + [1] * 2 + [0] * 9 + [0] * 12
    after = [1] * 21 + [0] * 2 + [1] * 9 + [0] * 12
    result = mcnemar(before, after)
    assert (result.only_before, result.only_after) == (2, 9)
    assert result.p_value == pytest.approx(0.06543, abs=5e-6)


def test_mcnemar_without_changes():
    assert mcnemar([True, False], [True, False]).p_value == 1.0


def test_mcnemar_refuses_rates():
    with pytest.raises(ValueError, match="0 or 1"):
        mcnemar([0.5], [1])


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


# --- pass@k and maj@k ---


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_all_subsets_with_a_right_sample(case):
    n, c, k = case
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_agrees_with_the_stable_product_of_chen_2021(case):
    n, c, k = case
    expected = 1.0 if n - c < k else 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_examples():
    assert pass_at_k(200, 10, 1) == pytest.approx(0.05)
    assert pass_at_k(5, 2, 2) == pytest.approx(0.7)
    assert pass_at_k(5, 0, 5) == 0.0
    assert pass_at_k(5, 1, 5) == 1.0


@pytest.mark.parametrize("arguments", [(5, 1, 6), (5, 6, 1), (-1, 0, 1), (5, -1, 1), (5, 1, -1), (5, 1, 0), (0, 0, 1)])
def test_pass_at_k_refuses(arguments):
    with pytest.raises(ValueError):
        pass_at_k(*arguments)


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
        ([None, None], None),
        ([], None),
    ],
)
def test_majority_vote(votes, winner):
    assert majority_vote(votes) == winner


@given(st.lists(st.one_of(st.none(), st.integers(-20, 20).map(str)), max_size=12))
def test_majority_vote_has_the_most_votes(votes):
    winner = majority_vote(votes)
    cast = [vote for vote in votes if vote is not None]
    assert (winner is None) == (not cast)
    assert all(cast.count(winner) >= cast.count(vote) for vote in cast)
    assert majority_vote(iter(votes)) == winner


def test_import_is_light():
    code = "import sys, grpo_lib.statistics; print({'numpy', 'scipy', 'jax'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
