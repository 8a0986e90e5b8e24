"""Records of experiments as tables: what a reader sees is what the record holds."""

import pytest

from grpo_train.report import experiments


def rows(shown):
    head, *lines = shown.lines
    return [dict(zip(head, line, strict=True)) for line in lines]


def test_a_verdict_says_where_an_interval_goes_beyond_the_bar():
    first, second = rows(experiments.verdicts("stale-mask"))
    assert first["mean (95 % interval)"] == "−1.0 (−4.1 to +2.1) points"  # at most 2 apart
    assert first["verdict"] == "held by its mean; not shown"
    assert second["verdict"] == "FAILED"
    _, form = rows(experiments.verdicts("coin"))
    assert form["verdict"] == "held by its mean; not shown"
    (null,) = rows(experiments.verdicts("gspo"))
    assert null["verdict"] == "held"


@pytest.mark.parametrize("name", sorted(experiments.records()))
def test_what_held_is_called_so_in_every_record(name):
    claims = experiments.record(name)["claims"]
    assert [row["verdict"] != "FAILED" for row in rows(experiments.verdicts(name))] == [c["held"] for c in claims]


def test_an_arm_can_be_shown_by_another_name():
    first, *_ = rows(experiments.verdicts("real", names={"grpo": "maxrl"}))
    assert first["compared"] == "maxrl − start"


def test_the_predictions_that_were_not_blind_are_counted():
    blind = {row["experiment"]: row["blind?"] for row in rows(experiments.totals())}
    not_blind = {"maxrl": "2 of 3", "pass": "no", "precision": "no", "real": "4 of 5"}
    assert blind == dict.fromkeys(experiments.records(), "yes") | not_blind


def test_the_seeds_of_two_experiments_are_one_folded_table():
    shown = experiments.seeds("std", "real")
    assert len(rows(shown.table)) == 3 + 6
    assert shown._repr_html_().startswith("<details><summary>")
    assert rows(shown.table)[-1]["seed 2"] == "68.6"
    assert "| real | tiny | 67.2 |" in shown._repr_markdown_()


def test_a_reading_that_nobody_predicted_has_its_interval():
    (row,) = rows(experiments.unpredicted("clip", "0.28", "0.2", {"accuracy": lambda run: run["accuracy"]}))
    assert row["mean (95 % interval)"] == "−2.0 (−5.4 to +1.3) points"
