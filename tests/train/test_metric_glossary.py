"""The glossary and the rows of metrics.jsonl agree."""

import pytest

from grpo_train.runs.metric_glossary import METRICS, glossary, metric, reward_function


def test_glossary_keeps_the_reading_order_and_names_each_reward_function() -> None:
    rows = [
        {"loss": 0.0, "rewards/b/mean": 1.0, "step": 1},
        {"rewards/a/std": 0.0, "rewards/a/mean": 0.0, "reward": 1.0, "validation_accuracy": 0.5},
    ]
    assert list(glossary(rows)) == [
        *("step", "reward", "rewards/a/mean", "rewards/b/mean", "rewards/a/std", "validation_accuracy", "loss"),
    ]
    assert metric("rewards/a/mean") is METRICS["rewards/NAME/mean"]
    assert [reward_function(name) for name in ("rewards/a/mean", "rewards/a/std", "reward")] == ["a", None, None]
    with pytest.raises(KeyError):
        glossary([{"surprise": 1.0}])
