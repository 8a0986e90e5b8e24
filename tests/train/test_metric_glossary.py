"""The glossary and the rows of metrics.jsonl agree, and rows with the names of version 0.1.0 are read."""

import json

import pytest

from grpo_lib.common.files import append_jsonl
from grpo_train.runs.metric_glossary import METRICS, OLD_METRICS, glossary, metric, read_metrics, reward_function


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


def test_old_names_are_read_with_one_line_of_notice(tmp_path, capsys) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    old = {"step": 1, "reward": 1.0, **{name.replace("NAME", "tags"): 0.5 for name in OLD_METRICS}}
    new = {"step": 1, "reward": 1.0, **{name.replace("NAME", "tags"): 0.5 for name in OLD_METRICS.values()}}
    append_jsonl(path, old)
    append_jsonl(path, new | {"step": 2})  # a run that was continued
    assert read_metrics(path) == [new, new | {"step": 2}]
    notice = capsys.readouterr().err
    assert notice.count("\n") == 1 and str(path) in notice
    assert set(glossary([new])) == set(new)
    path.write_text(json.dumps(new) + "\n")
    assert read_metrics(path) == [new] and capsys.readouterr().err == ""
