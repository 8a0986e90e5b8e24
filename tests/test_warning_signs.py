"""A healthy run gives no sign; each way to go wrong gives its own, once, at the step at which it can be known."""

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lib.files import read_jsonl
from grpo_lib.recipes import Recipe
from grpo_lib.warning_signs import KINDS, Limits, new_signs, signs

# The rewards of the run at ten times the learning rate (notebook 03, seed 0), as measured.
COLLAPSE = [
    0.545, 0.495, 0.604, 0.848, 0.983, 0.973, 0.997, 0.720, 0.610, 0.760, 0.573, 0.540, 0.505, 0.472, 0.506,
    0.623, 0.411, 0.451, 0.244, 0.326, 0.276, 0.266, 0.458, 0.278, 0.199, 0.255, 0.284, 0.121, 0.131, 0.086,
]  # fmt: skip


def run(steps=40, **metrics):
    """Rows of a run in which nothing is wrong but what is given: a constant, or a function of the step."""
    healthy = {
        "reward": lambda step: min(1.0, step / 20) + 0.05 * math.sin(step),
        "zero_variance_groups": 0.5,
        "kl": 0.1,
        "entropy": 0.3,
        "truncated": 0.02,
        "accuracy": 0.6,
        "loss": 0.0,
        "grad_norm": 1.0,
    }
    return [
        {"step": step} | {k: v(step) if callable(v) else v for k, v in (healthy | metrics).items()}
        for step in range(1, steps + 1)
    ]


def found(rows, **limits):
    return [(sign.kind, sign.step) for sign in signs(rows, Limits(**limits))]


@pytest.mark.parametrize("name", ["course", "seed1", "seed2"])
def test_the_reference_runs_give_no_sign(root, name):
    rows = read_jsonl(root / "assets" / "reference" / name / "metrics.jsonl")
    assert len(rows) == 30
    assert signs(rows) == []


def test_a_run_in_which_nothing_is_wrong_gives_no_sign():
    assert signs(run()) == signs([]) == new_signs([]) == []


def test_the_run_at_ten_times_the_learning_rate_is_found_at_half_its_way():
    rows = [{"step": step, "reward": reward} for step, reward in enumerate(COLLAPSE, start=1)]
    (sign,) = signs(rows)
    assert (sign.kind, sign.step) == ("fall", 15)
    assert "from 0.904 to 0.519" in sign.message and "training.learning_rate" in sign.message
    scaled = [row | {"reward": 40 * row["reward"] - 30} for row in rows]  # another scale of the reward, also negative
    assert found(scaled) == [("fall", 15)]


def test_a_reward_that_only_jumps_from_step_to_step_has_not_fallen():
    jumps = [0.3, 0.7, 0.5, 0.9, 0.2, 0.6, 0.8, 0.1, 0.4, 0.5]
    assert signs(run(reward=lambda step: jumps[step % 10] + step / 100)) == []
    assert signs(run(reward=lambda step: 1.0 if step % 7 else 0.95)) == []  # solved, with a slip now and then


@pytest.mark.parametrize(
    ("accuracy", "reward", "words"),
    [
        (0.0, 0.1, ("(reward 0.1)", "rollout.temperature", "grpo.group_size", "rewards")),
        (0.99, 1.0, ("(reward 1)", "solved", "harder")),
        (None, lambda step: step % 2, ("(reward 0 to 1)", "grpo.group_size")),
    ],
)
def test_ten_steps_without_a_signal(accuracy, reward, words):
    rows = run(zero_variance_groups=lambda step: float(step >= 6), reward=reward, accuracy=accuracy)
    rows = [{k: v for k, v in row.items() if v is not None} for row in rows]
    (sign,) = signs(rows)
    assert (sign.kind, sign.step) == ("no signal", 15)
    for word in words:
        assert word in sign.message
    assert found(rows, steps_without_signal=3) == [("no signal", 8)]


def test_one_group_that_still_differs_is_a_signal():
    assert signs(run(zero_variance_groups=lambda step: 0.97 if step % 9 == 0 else 1.0)) == []


def test_the_kl_beyond_its_bound():
    rows = run(kl=lambda step: 0.1 * step)
    (sign,) = signs(rows)
    assert (sign.kind, sign.step) == ("kl", 13)  # 1.1, 1.2, 1.3
    assert "1.3 nats per token" in sign.message and "grpo.beta" in sign.message
    assert found(rows, kl=2.0) == [("kl", 23)]
    assert signs(run(kl=lambda step: 50.0 if step == 9 else 0.0)) == []  # one rare token


def test_completions_that_run_into_the_length_limit():
    rows = run(truncated=lambda step: step / 40)
    (sign,) = signs(rows)
    assert (sign.kind, sign.step) == ("length", 25)
    assert "62%" in sign.message and "rollout.max_completion_length" in sign.message


def test_an_entropy_that_collapses_while_the_answers_are_wrong():
    falling = run(entropy=lambda step: 0.4 * 0.7**step)
    (sign,) = signs(falling)
    assert sign.kind == "entropy" and "accuracy of 60%" in sign.message and "rollout.temperature" in sign.message
    assert 8 <= sign.step <= 15
    assert signs([row | {"accuracy": 0.95} for row in falling]) == []  # solved: it may be sure of itself
    assert found([{k: v for k, v in row.items() if k != "accuracy"} for row in falling]) == [("entropy", sign.step)]
    assert signs(run(entropy=0.01)) == []  # sure of itself from the first step
    assert signs(run(entropy=lambda step: 5.0 if step < 10 else 0.4)) == []  # at 0.4 a text is still open


@pytest.mark.parametrize("broken", [None, math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite(broken):
    rows = run(loss=lambda step: broken if step >= 8 else 0.0, grad_norm=lambda step: broken if step >= 8 else 1.0)
    (sign,) = signs(rows)
    assert (sign.kind, sign.step) == ("not finite", 8)
    assert "grad_norm, loss" in sign.message and "training.learning_rate" in sign.message
    (sign,) = signs(run(**{"reward/mine": lambda step: broken if step == 3 else 1.0}))
    assert "reward/mine; mend the reward function" in sign.message


def test_a_sign_is_said_again_only_after_it_has_passed():
    flickering = run(loss=lambda step: None if step % 3 == 0 else 0.0)
    assert found(flickering) == [("not finite", 3)]
    twice = run(loss=lambda step: None if step in (5, 6, 20) else 0.0)
    assert found(twice) == [("not finite", 5), ("not finite", 20)]


def test_the_loop_hears_every_sign_at_its_step_and_no_other():
    rows = run(
        loss=lambda step: None if step == 7 else 0.0,
        truncated=lambda step: float(step > 10),
        zero_variance_groups=lambda step: float(step > 20),
        reward=lambda step: math.sin(step) / 20 + (step < 15),
    )
    said = [sign for end in range(1, len(rows) + 1) for sign in new_signs(rows[:end])]
    assert {sign.kind for sign in said} == {"not finite", "length", "no signal", "fall"}
    assert said == signs(rows)


def test_every_message_is_one_line_that_names_a_key_of_the_recipe(root):
    rows = run(
        loss=lambda step: None if step == 7 else 0.0,
        truncated=1.0,
        zero_variance_groups=1.0,
        kl=3.0,
        entropy=lambda step: 0.4 * 0.5**step,
        reward=lambda step: math.sin(step) / 20 + (step < 15),
    )
    seen = signs(rows)
    assert {sign.kind for sign in seen} == set(KINDS)
    for sign in seen:
        assert "\n" not in str(sign) and str(sign).startswith(f"step {sign.step}: ")
        keys = re.findall(rf"\b({'|'.join(Recipe.model_fields)})\.(\w+)", sign.message)
        assert keys, sign.message
        for section, key in keys:
            assert key in Recipe.model_fields[section].annotation.model_fields, sign.message


def test_of_two_rows_for_a_step_the_later_one_counts():
    rows = run(loss=lambda step: None if step == 7 else 0.0)
    assert signs([*rows[:7], *run()[4:]]) == []  # steps 5, 6 and 7 were done again after a resume
    assert signs(rows[::-1]) == signs(rows)


NAMES = ("reward", "zero_variance_groups", "kl", "entropy", "truncated", "accuracy", "loss", "step", "made\nup")
VALUES = st.none() | st.floats() | st.integers() | st.just(10**400) | st.text(max_size=3) | st.booleans()


@given(st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES), max_size=30))
def test_whatever_a_file_holds_it_is_read_without_an_error(rows):
    for sign in signs(json.loads(json.dumps(rows))):
        assert sign.kind in KINDS and "\n" not in sign.message


@given(st.lists(st.floats(0, 1), min_size=1, max_size=25), st.integers(1, 8))
def test_a_streak_is_found_where_it_is(shares, steps):
    """By the definition, in the slow way."""
    rows = [{"step": step, "truncated": share} for step, share in enumerate(shares, start=1)]
    holds = [min(shares[max(0, i - steps) : i], default=0) > 0.5 and i >= steps for i in range(1, len(shares) + 1)]
    wanted = [i for i in range(1, len(holds) + 1) if holds[i - 1] and not any(holds[max(0, i - 6) : i - 1])]
    assert [sign.step for sign in signs(rows, Limits(steps_truncated=steps))] == wanted
