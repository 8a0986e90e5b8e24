"""A logit is not a probability: what a step on the logits does to the probabilities, and to the average reward."""

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from grpo_lib.bandit import after_step, policy_gradient, probability_changes, try_or_garbage

# The three answers of notebook 03: right, wrong, and no number.
POLICY, REWARDS = np.array([0.1, 0.3, 0.6]), np.array([9.5, 4.0, 5.0])


@st.composite
def policies(draw) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of two to six answers, none of them 0, and a reward for each."""
    count = draw(st.integers(2, 6))
    weights = np.array(draw(st.lists(st.floats(0.01, 1), min_size=count, max_size=count)))
    rewards = np.array(draw(st.lists(st.floats(-10, 10), min_size=count, max_size=count)))
    return weights / weights.sum(), rewards


@example((POLICY, REWARDS))
@given(policies())
def test_changes_of_probabilities_add_up_to_0_and_are_those_of_a_small_step(policy) -> None:
    pi, r = policy
    gradient = policy_gradient(pi, r)
    changes = probability_changes(pi, gradient)
    assert changes.sum() == pytest.approx(0, abs=1e-12)
    step = 1e-6
    moved = (after_step(pi, gradient, step) - after_step(pi, gradient, -step)) / (2 * step)
    np.testing.assert_allclose(changes, moved, atol=1e-7)


@example((POLICY, REWARDS))
@given(policies())
def test_the_average_reward_rises_by_the_square_of_the_gradient(policy) -> None:
    pi, r = policy
    gradient = policy_gradient(pi, r)
    assert probability_changes(pi, gradient) @ r == pytest.approx(gradient @ gradient, rel=1e-9, abs=1e-12)
    assume(gradient @ gradient > 1e-6)  # below that, rounding decides
    small = 1e-3 / (1 + np.abs(gradient).max() * np.ptp(r))
    assert after_step(pi, gradient, small) @ r > pi @ r


def test_an_answer_below_the_average_gains_where_another_loses_more() -> None:
    gradient = policy_gradient(POLICY, REWARDS)
    changes = probability_changes(POLICY, gradient)
    assert np.sign(gradient).tolist() == [1, -1, -1]
    assert np.sign(changes).tolist() == [1, -1, 1]
    of_no_number = [after_step(POLICY, gradient, step)[2] for step in (0, 0.1, 0.5, 1)]
    np.testing.assert_allclose(of_no_number, [0.6, 0.6013, 0.6036, 0.5991], atol=5e-5)


def test_a_paid_answer_loses_to_one_that_pays_a_little_more() -> None:
    pi, r = np.array([0.6, 0.05, 0.35]), np.array([1.1, 1.0, 0.0])
    gradient = policy_gradient(pi, r)
    assert r[1] > pi @ r and gradient[1] > 0, "it pays more than the average, and its logit rises"
    of_the_second = [after_step(pi, gradient, step)[1] for step in (0, 0.1, 1)]
    np.testing.assert_allclose(of_the_second, [0.05, 0.0498, 0.0469], atol=5e-5)


def test_a_step_too_large_for_exp_is_a_policy_too() -> None:
    np.testing.assert_allclose(after_step(POLICY, [1.0, 0.0, 0.0], 1e6), [1, 0, 0])


@pytest.mark.parametrize(
    ("probabilities", "rewards", "named"),
    [
        ([0.5, 0.6], [1, 0], "add up to 1"),
        ([1.5, -0.5], [1, 0], "at least 0"),
        ([0.5, 0.5], [1, 0, 0], "one entry for each of the 2 answers"),
    ],
)
def test_what_is_no_policy_is_named(probabilities, rewards, named) -> None:
    for function in (policy_gradient, probability_changes):
        with pytest.raises(ValueError, match=named):
            function(probabilities, rewards)


def test_a_policy_falls_into_the_hole_where_garbage_pays_more() -> None:
    paid = {"right": 9.5, "wrong": 4.0, "garbage": 5.0}
    assert try_or_garbage(**paid)[0] == pytest.approx(0.95)
    assert try_or_garbage(**paid)[-1] < 0.05
    assert try_or_garbage(right=1.1, wrong=0.1, garbage=0.0)[-1] > 0.95
    # Trying pays from 2/11 on; with the division by the standard deviation it ends in garbage at a quarter, too.
    assert try_or_garbage(**paid, p=0.25, divide=True)[-1] < 0.05
    assert try_or_garbage(**paid, p=0.25, divide=False)[-1] > 0.95
