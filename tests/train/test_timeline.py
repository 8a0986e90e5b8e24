"""Sampler and trainer over time: who waits for whom, and how old the weights of a batch are."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_train import report
from grpo_train.report.timeline import schedule


def test_one_after_the_other_every_batch_is_by_the_newest_weights() -> None:
    planned = schedule(2, 1, 4, behind=0)
    assert [(batch.sampled, batch.trained) for batch in planned] == [(0, 2), (3, 5), (6, 8), (9, 11)]
    assert [batch.behind for batch in planned] == [0, 0, 0, 0]


def test_at_the_same_time_a_step_takes_the_longer_of_both_and_a_batch_is_one_behind() -> None:
    slow_sampler, slow_trainer = (schedule(rollout, update, 4, behind=1) for rollout, update in ((2, 1), (1, 2)))
    assert [batch.trained for batch in slow_sampler] == [2, 4, 6, 8]
    assert [batch.trained for batch in slow_trainer] == [1, 3, 5, 7]
    assert [batch.behind for batch in slow_sampler] == [0, 1, 1, 1]
    assert [batch.behind for batch in slow_trainer] == [0, 1, 1, 1]


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.integers(1, 12), st.integers(0, 3))
def test_no_engine_does_two_things_at_once_and_no_batch_is_older_than_allowed(rollout, update, batches, behind) -> None:
    planned = schedule(rollout, update, batches, behind)
    assert all(0 <= batch.behind <= behind for batch in planned)
    assert all(batch.trained >= batch.sampled + rollout for batch in planned)
    for one, other in itertools.pairwise(planned):
        assert other.sampled >= one.sampled + rollout
        assert other.trained >= one.trained + update


def test_the_figure_says_in_words_what_it_draws() -> None:
    said = report.timeline(rollout=2, update=1).alt
    assert "synchronous: 4 batches are done at 12; batch 4 is sampled by the weights after 3 updates, 0 behind" in said
    assert "one step behind: 4 batches are done at 9; batch 4 is sampled by the weights after 2 updates" in said


@pytest.mark.parametrize(("rollout", "behind"), [(0, 0), (1, -1)])
def test_impossible_times_are_refused(rollout, behind) -> None:
    with pytest.raises(ValueError, match="times must be above 0"):
        schedule(rollout, 1, 2, behind)
