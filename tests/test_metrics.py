"""The glossary and the rows of metrics.jsonl agree."""

import subprocess
import sys

import pytest

from grpo_lib.metrics import METRICS, REWARD_PART, REWARD_SPREAD, glossary, metric


def test_every_entry_says_all_three_things() -> None:
    for name, entry in METRICS.items():
        assert entry.meaning and entry.unit and entry.healthy, name


def test_glossary_keeps_the_reading_order_and_names_each_reward_function() -> None:
    rows = [{"loss": 0.0, "reward/b": 1.0, "step": 1}, {"reward/a": 0.0, "reward": 1.0, "validation_accuracy": 0.5}]
    assert list(glossary(rows)) == ["step", "reward", "reward/a", "reward/b", "validation_accuracy", "loss"]
    assert metric("reward/a") is METRICS[REWARD_PART + "…"]


def test_a_metric_without_an_entry_is_not_passed_over() -> None:
    with pytest.raises(KeyError):
        glossary([{"surprise": 1.0}])


def test_it_costs_nothing_to_import() -> None:
    code = "import sys, grpo_lib.metrics; print([m for m in ('jax', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.slow
def test_every_key_that_training_writes_is_in_the_glossary() -> None:
    from grpo_lib import recording

    class Sampler:
        lengths, truncated = [4, 6], [False, True]

        def take_seconds(self, what: str) -> float:
            return 0.0

    def correct_answer(prompts, completions, answer):
        return [1.0, 0.0]

    part = recording.MeasuredReward(correct_answer)
    part(["p"] * 2, ["5", "6"], answer=["5"] * 2)
    batch = recording.batch_metrics(
        Sampler(),
        2,
        [part],
        lambda: 0.0,
        ["p"] * 2,
        ["5", "6"],
        [1.0, 0.0],
        None,
        answer=["5"] * 2,
    )
    written = {name.removeprefix("step/") for name in batch} | set(recording.TUNIX_METRICS.values())
    # From the clock, the reference model's, the recorder and pipeline.validation.
    written |= {"seconds", "seconds_update", "seconds_reference", "tokens_per_second", "step", "learning_rate"}
    written |= {"validation_accuracy", "validation_lenient"}
    assert set(glossary([dict.fromkeys(written, 0.0)])) == written
    known = {name for name in METRICS if not name.startswith((REWARD_PART, REWARD_SPREAD))}
    assert known <= written, "an entry for a metric that nothing writes"
