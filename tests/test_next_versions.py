"""`make next`: what it refuses before anything is touched, what it asks the index for, and how it compares two runs."""

import next_versions
import pytest

from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import write_jsonl_atomic

RUNS = ("metrics.jsonl", "evals/before.jsonl", "evals/after.jsonl")


def test_a_link_and_a_folder_of_somebody_are_refused_and_stay_whole(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(next_versions, "ROOT", tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "pyvenv.cfg").write_text("home = /usr/bin")
    (tmp_path / ".venv-next").symlink_to(elsewhere)
    (tmp_path / ".venv-next-tpu").mkdir()
    (tmp_path / ".venv-next-tpu" / "notes.txt").write_text("mine")
    with pytest.raises(CourseError, match=r"\.venv-next is a symbolic link"):
        next_versions.make_environment(next_versions.CPU)
    with pytest.raises(CourseError, match=r"\.venv-next-tpu is not a Python environment"):
        next_versions.make_environment(next_versions.TPU)
    assert (elsewhere / "pyvenv.cfg").exists() and (tmp_path / ".venv-next-tpu" / "notes.txt").exists()


def test_no_version_of_the_requirements_is_kept() -> None:
    asked = next_versions.asked_for(next_versions.TPU)
    assert {"jax", "maxtext", "vllm-tpu", "pytest"} <= set(asked)
    assert [line for line in asked if "=" in line or "<" in line] == []


def test_two_runs_are_compared_digit_for_digit_but_for_their_clocks(capsys, tmp_path) -> None:
    for run, seconds in (("locked", 1.5), ("newest", 2.5)):
        rows = [{"loss": loss, "seconds_update": seconds, "compilations": seconds} for loss in (0.25, 0.1)]
        for name in RUNS:
            write_jsonl_atomic(tmp_path / run / name, rows)
    next_versions.print_differences(tmp_path / "locked", tmp_path / "newest")
    assert capsys.readouterr().out.count("2 rows, equal digit for digit") == 3
    write_jsonl_atomic(tmp_path / "newest" / "metrics.jsonl", [{"loss": 0.25}, {"loss": 0.1 + 2e-17}])
    next_versions.print_differences(tmp_path / "locked", tmp_path / "newest")
    assert (
        "1 values differ (loss), the first in row 2, loss: locked 0.1, newest 0.10000000000000002"
        in capsys.readouterr().out
    )
    write_jsonl_atomic(tmp_path / "newest" / "metrics.jsonl", [{"loss": 0.25}])
    next_versions.print_differences(tmp_path / "locked", tmp_path / "newest")
    assert "the first in row 2, loss: locked 0.1, newest None" in capsys.readouterr().out
