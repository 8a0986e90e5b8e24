"""Records of experiments as tables: what a reader sees is what the record holds."""

import pytest

from grpo_train.report import display, experiments


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
    not_blind = {"maxrl": "2 of 3", "pass": "no", "precision": "no", "real": "4 of 5", "real-blind": "7 of 9"}
    assert blind == dict.fromkeys(experiments.records(), "yes") | not_blind


def test_the_seeds_of_two_experiments_are_one_folded_table():
    shown = experiments.seeds("std", "real")
    assert len(rows(shown.table)) == 3 + 6
    assert shown._repr_html_().startswith("<details><summary>")
    assert rows(shown.table)[-1]["seed 2"] == "68.6"
    assert "| real | tiny | 67.2 |" in shown._repr_markdown_()


@pytest.fixture
def of_two_lengths(monkeypatch):
    """A record whose second arm has fewer seeds."""
    shares = {"a": [0.5, 0.6, 0.7, 0.8], "b": [0.25, 0.3, 0.45]}
    runs = [
        {"seed": seed, "arm": arm, "accuracy": share, "form": 1.0}
        for arm, of_arm in shares.items()
        for seed, share in enumerate(of_arm)
    ]
    monkeypatch.setattr(experiments, "_read", lambda: {"odd": {"arms": {"a": [], "b": []}, "runs": runs, "claims": []}})


def test_an_arm_may_have_fewer_seeds_than_another(of_two_lengths):
    last = rows(experiments.right_and_form("odd"))[2]
    assert list(last.values()) == ["b: right", "25.0", "30.0", "45.0", ""]
    assert rows(experiments.seeds("odd").table)[1]["seed 3"] == ""
    (row,) = rows(experiments.unpredicted("odd", "a", "b", {"": lambda run: run["accuracy"]}))
    assert row["mean (95 % interval)"].startswith("+26.7 ")
    *_, means = rows(experiments.means("odd", {"right": lambda run: run["accuracy"]}))
    assert means["right"] == "33.3\N{NO-BREAK SPACE}%"


def test_a_reading_that_nobody_predicted_has_its_interval():
    (row,) = rows(experiments.unpredicted("clip", "0.28", "0.2", {"accuracy": lambda run: run["accuracy"]}))
    assert row["mean (95 % interval)"] == "−2.0 (−5.4 to +1.3) points"


def test_the_means_of_the_arms_are_those_of_their_seeds():
    base, trained = rows(experiments.means("pass", {"greedy": lambda run: run["accuracy"]}))
    greedy = [run["accuracy"] for run in experiments.record("pass")["runs"] if run["arm"] == "base"]
    assert base == {"arm": "base", "greedy": f"{100 * sum(greedy) / len(greedy):.1f}\N{NO-BREAK SPACE}%"}
    assert trained["arm"] == "trained"


def test_a_mean_that_is_no_share_is_a_number_and_one_that_is_not_there_a_dash():
    columns = {"entropy": lambda run: run["entropy"], "nothing": lambda run: None}
    first, *_ = rows(experiments.means("clip", columns, plain=["entropy"]))
    assert 0.01 < float(first["entropy"]) < 0.03
    assert first["nothing"] == "–"


def test_a_step_is_counted_from_1():
    curves = [run["curves"] for run in experiments.record("maxrl")["runs"] if run["arm"] == "std"]
    first, last = rows(experiments.on_the_way("maxrl", "std", {"accuracy": "right"}, steps=(1, 60)))
    for row, step in ((first, 0), (last, 59)):
        mean = sum(each["accuracy"][step] for each in curves) / len(curves)
        assert row["right"] == f"{100 * mean:.1f}\N{NO-BREAK SPACE}%"


def test_who_hacks_the_reward_is_warned_with_every_seed_and_who_does_not_is_not():
    std, *others = rows(experiments.first_warnings("std-hard", "hacked"))
    steps = [int(std[f"seed {seed}"]) for seed in range(5)]
    assert all(1 < step < 41 for step in steps)
    for row in others:
        assert [row[f"seed {seed}"] for seed in range(5)] == ["–"] * 5


def test_the_way_and_the_end_of_two_arms_are_those_of_the_record():
    (row,) = rows(experiments.ends_and_ways({"clip": ("0.28", "0.2")}))
    (ends,) = rows(experiments.unpredicted("clip", "0.28", "0.2", {"": lambda run: run["accuracy"]}))
    assert row["at the end"] == ends["mean (95 % interval)"]
    assert row["compared"] == "clip: 0.28 − 0.2"


def test_every_run_of_every_record_is_warned_or_not():
    counted = {row["experiment, arm"]: int(row["runs"]) for row in rows(experiments.warned("hacked"))}
    assert sum(counted.values()) == sum(len(kept["runs"]) for kept in experiments.records().values())
    assert counted["std-hard, std"] == 5


def test_the_advantages_of_a_group_are_a_row_for_each_kind():
    mean, other = rows(display.advantages([1.0, 0.0, 0.0, 0.0], {"Dr. GRPO": "mean", "RLOO": "leave-one-out"}))
    assert list(mean.values()) == ["Dr. GRPO", "0.75", "−0.25", "−0.25", "−0.25"]
    assert list(other.values()) == ["RLOO", "1", "−0.333", "−0.333", "−0.333"]
