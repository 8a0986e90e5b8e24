"""A healthy run gives no alert; each failure gives its own, once, at the first step at which it can be known."""

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lib.common.files import read_jsonl
from grpo_train.recipes import Recipe
from grpo_train.runs.health_checks import RULES, STEPS_CLIPPED, find_alerts, new_alerts

# The rewards of the run at ten times the learning rate (notebook 04, seed 0), as measured.
COLLAPSE = [
    0.545, 0.495, 0.604, 0.848, 0.983, 0.973, 0.997, 0.720, 0.610, 0.760, 0.573, 0.540, 0.505, 0.472, 0.506,
    0.623, 0.411, 0.451, 0.244, 0.326, 0.276, 0.266, 0.458, 0.278, 0.199, 0.255, 0.284, 0.121, 0.131, 0.086,
]  # fmt: skip
SILENT = {"frac_reward_zero_std": lambda step: float(step >= 6)}
JUMPS = [0.3, 0.7, 0.5, 0.9, 0.2, 0.6, 0.8, 0.1, 0.4, 0.5]


def run(steps=40, **metrics):
    """Rows of a run in which nothing is wrong but what is given: a constant, a function of the step, or None for a
    metric that is not measured."""
    healthy = {
        "reward": lambda step: min(1.0, step / 20) + 0.05 * math.sin(step),
        "frac_reward_zero_std": 0.5,
        "kl": 0.01,
        "entropy": 0.3,
        "completions/clipped_ratio": 0.02,
        "accuracy": 0.6,
        "loss": 0.0,
        "grad_norm": 1.0,
    }
    measured = {name: value for name, value in (healthy | metrics).items() if value is not None}

    def row(step):
        return {"step": step} | {name: value(step) if callable(value) else value for name, value in measured.items()}

    return [row(step) for step in range(1, steps + 1)]


def found(rows):
    return [(alert.kind, alert.step) for alert in find_alerts(rows)]


@pytest.mark.parametrize("name", ["course", "seed1", "seed2", "repaired", "repaired1", "repaired2"])
def test_the_reference_runs_give_no_alert(root, name):
    rows = read_jsonl(root / "assets" / "reference" / name / "metrics.jsonl")
    assert len(rows) >= 30
    assert find_alerts(rows) == []
    assert find_alerts(run()) == []
    assert find_alerts([]) == []
    assert new_alerts([]) == []


@pytest.mark.parametrize("name", ["hacked", "hacked1", "hacked2"])
def test_the_hacked_runs_are_found_as_soon_as_two_means_can_be_compared(root, name):
    rows = read_jsonl(root / "assets" / "reference" / name / "metrics.jsonl")
    (alert,) = (alert for alert in find_alerts(rows) if alert.kind == "hacked")
    assert alert.step <= 15
    assert "rewards" in alert.message


@given(st.floats(0.01, 1), st.floats(0, 0.4), st.floats(-100, 100), st.floats(0.1, 100))
def test_reward_up_and_accuracy_down_is_found_on_any_scale(start, left, offset, scale):
    """Half of the accuracy or more is lost while the reward rises; not if the reward rises with the accuracy."""

    def rows(last):
        metrics = ((start if step <= 8 else last, offset + scale * (step > 8)) for step in range(1, 31))
        return [{"step": n, "accuracy": a, "reward": r} for n, (a, r) in enumerate(metrics, start=1)]

    assert [alert.kind for alert in find_alerts(rows(start * left))] == ["hacked"]
    assert find_alerts(rows(start)) == find_alerts(rows(min(1.0, 2 * start))) == []


def test_the_run_at_ten_times_the_learning_rate_is_found_at_half_its_way():
    rows = [{"step": step, "reward": reward} for step, reward in enumerate(COLLAPSE, start=1)]
    (alert,) = find_alerts(rows)
    assert (alert.kind, alert.step) == ("fall", 15)
    assert "from 0.904 to 0.519" in alert.message
    assert "training.learning_rate" in alert.message
    scaled = [row | {"reward": 40 * row["reward"] - 30} for row in rows]  # another scale of the reward, also negative
    assert found(scaled) == [("fall", 15)]


@pytest.mark.parametrize(
    ("metrics", "kind", "step", "words"),
    [
        (
            SILENT | {"accuracy": 0.0, "reward": 0.1}, "no signal", 15,
            ("rollout.temperature", "grpo.group_size", "rewards"),
        ),
        (SILENT | {"accuracy": 0.99, "reward": 1.0}, "no signal", 15, ("solved", "harder")),
        (SILENT | {"accuracy": None, "reward": lambda step: step % 2}, "no signal", 15, ("grpo.group_size",)),
        ({"kl": lambda step: 0.01 * step}, "kl", 13, ("0.13 nats per token", "grpo.beta")),  # 1.1, 1.2, 1.3
        (
            {"completions/clipped_ratio": lambda step: step / 40}, "length", 25,
            ("62%", "rollout.max_completion_length"),
        ),
        ({"loss": lambda step: None if step % 3 == 0 else 0.0}, "not finite", 3, ("training.learning_rate",)),
        ({"loss": lambda step: math.inf if step >= 8 else 0.0}, "not finite", 8, ("training.learning_rate",)),
        ({"grad_norm": -math.inf, "loss": math.nan}, "not finite", 1, ("grad_norm, loss",)),
        (
            {"rewards/mine/mean": lambda step: math.nan if step == 3 else 1.0}, "not finite", 3,
            ("rewards/mine/mean; fix the reward function",),
        ),
    ],
)  # fmt: skip
def test_a_failure_gives_its_own_alert_once(metrics, kind, step, words):
    (alert,) = find_alerts(run(**metrics))
    assert (alert.kind, alert.step) == (kind, step)
    for word in words:
        assert word in alert.message


@pytest.mark.parametrize(
    "metrics",
    [
        {"frac_reward_zero_std": lambda step: 0.97 if step % 9 == 0 else 1.0},  # one group that still differs
        {"kl": lambda step: 50.0 if step == 9 else 0.0},  # one rare token
        {"reward": lambda step: JUMPS[step % 10] + step / 100},
        {"reward": lambda step: 1.0 if step % 7 else 0.95},  # solved, with a slip now and then
        {"entropy": 0.01},  # sure of itself from the first step
        {"entropy": lambda step: 5.0 if step < 10 else 0.4},  # at 0.4 a text is still open
    ],
)
def test_what_is_no_failure_gives_no_alert(metrics):
    assert find_alerts(run(**metrics)) == []


def test_the_entropy_of_hacked_runs_is_found_and_that_of_runs_that_learnt_hard_problems_is_not(root):
    for name in ("hacked", "hacked1", "hacked2"):
        rows = read_jsonl(root / "assets" / "reference" / name / "metrics.jsonl")
        assert "entropy" in [kind for kind, _ in found(rows)], name
    record = json.loads((root / "assets/experiments/pass.json").read_text(encoding="utf-8"))
    for done in record["runs"]:
        values = [done["curves"].get(name, []) for name in ("entropy", "accuracy")]
        rows = [{"step": step, "entropy": e, "accuracy": a} for step, (e, a) in enumerate(zip(*values, strict=True), 1)]
        assert found(rows) == [], done["seed"]


def test_an_entropy_that_collapses_while_the_answers_are_wrong():
    falling = run(entropy=lambda step: 0.4 * 0.7**step)
    (alert,) = find_alerts(falling)
    assert alert.kind == "entropy"
    assert "accuracy of 60%" in alert.message
    assert "rollout.temperature" in alert.message
    assert 8 <= alert.step <= 15
    assert find_alerts([row | {"accuracy": 0.95} for row in falling]) == []  # solved: it may be sure of itself
    assert found([{k: v for k, v in row.items() if k != "accuracy"} for row in falling]) == [("entropy", alert.step)]


def test_the_training_loop_gets_every_alert_at_its_step_and_no_other():
    rows = run(
        loss=lambda step: None if step == 7 else 0.0,
        **{"completions/clipped_ratio": lambda step: float(step > 10)},
        frac_reward_zero_std=lambda step: float(step > 20),
        reward=lambda step: math.sin(step) / 20 + (step < 15),
    )
    said = [alert for end in range(1, len(rows) + 1) for alert in new_alerts(rows[:end])]
    assert {alert.kind for alert in said} == {"not finite", "length", "no signal", "fall"}
    assert said == find_alerts(rows)


def test_every_message_is_one_line_that_names_a_key_of_the_recipe(root):

    def rises_and_falls(step):
        return math.sin(step) / 20 + (step < 15) * step / 14

    everything_wrong = {
        "loss": lambda step: None if step == 7 else 0.0,
        "completions/clipped_ratio": 1.0,
        "frac_reward_zero_std": 1.0,
        "kl": 3.0,
        "update_applied": 0.01,
        "dynamic_sampling/uniform_groups": 1.0,
        "dynamic_sampling/passes": 2.0,
        "entropy": lambda step: 0.4 * 0.5**step,
        "reward": rises_and_falls,
        "accuracy": lambda step: 0.1 if step < 8 else 0.0,
    }
    seen = find_alerts(run(**everything_wrong))
    assert {alert.kind for alert in seen} == set(RULES)
    for alert in seen:
        assert "\n" not in str(alert)
        assert str(alert).startswith(f"step {alert.step}: ")
        keys = re.findall(rf"\b({'|'.join(Recipe.model_fields)})\.(\w+)", alert.message)
        assert keys or "change the rewards" in alert.message, alert.message
        for section, key in keys:
            assert key in Recipe.model_fields[section].annotation.model_fields, alert.message


def test_of_two_rows_for_a_step_the_later_one_counts():
    rows = run(loss=lambda step: None if step == 7 else 0.0)
    assert find_alerts([*rows[:7], *run()[4:]]) == []  # steps 5, 6 and 7 were done again after a resume
    assert find_alerts(rows[::-1]) == find_alerts(rows)


NAMES = ("reward", "frac_reward_zero_std", "kl", "entropy", "completions/clipped_ratio", "accuracy", "loss", "step")


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(NAMES), st.none() | st.floats() | st.integers() | st.text(max_size=3) | st.booleans()
        ),
        max_size=30,
    )
)
def test_whatever_a_file_holds_it_is_read_without_an_error(rows):
    for alert in find_alerts(json.loads(json.dumps(rows))):
        assert alert.kind in RULES
        assert "\n" not in alert.message


@given(st.lists(st.floats(0, 1) | st.just(1.0), min_size=1, max_size=40))
def test_a_streak_is_found_where_it_is(ratios):
    """By the definition, in the slow way."""
    rows = [{"step": step, "completions/clipped_ratio": ratio} for step, ratio in enumerate(ratios, start=1)]
    holds = []  # of each step, whether the last STEPS_CLIPPED are all above 0.5
    for step in range(1, len(ratios) + 1):
        last = ratios[max(0, step - STEPS_CLIPPED) : step]
        holds.append(len(last) == STEPS_CLIPPED and min(last) > 0.5)
    wanted = []
    for step, held in enumerate(holds, start=1):
        five_before = holds[max(0, step - 6) : step - 1]
        if held and not any(five_before):
            wanted.append(step)
    assert [alert.step for alert in find_alerts(rows)] == wanted


def test_a_metric_that_is_measured_now_and_then_has_its_streak():
    rows = run(kl=None)
    for row in rows[9::10]:  # steps 10, 20, 30 and 40
        row["kl"] = 0.2
    assert found(rows) == [("kl", 30)]
    rows[29]["kl"] = None  # not finite: the streak ends, and another alert says so
    assert found(rows) == [("not finite", 30)]


def test_dynamic_sampling_that_finds_too_little_is_said_once():
    short = {"dynamic_sampling/uniform_groups": lambda step: float(step > 9) * 2, "dynamic_sampling/passes": 3.0}
    assert found(run(**short)) == [("left out", 10)]
    assert "grpo.dynamic_sampling" in find_alerts(run(**short))[0].message
    assert found(run(**short | {"dynamic_sampling/passes": 1.0})) == []  # one pass leaves out, as it is told to
