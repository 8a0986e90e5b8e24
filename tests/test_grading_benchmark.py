"""The benchmark of the grader: it covers every grader, counts what it says, and prints one object."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_lib import answers, rewards
from grpo_lib.prompts import template_completion

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def grading():
    """The program as a module; the folder's modules import each other by name."""
    sys.path.insert(0, str(BENCHMARKS))
    import grading

    yield grading
    sys.path.remove(str(BENCHMARKS))


def test_every_public_function_is_attacked(grading) -> None:
    attacked = {name.partition(",")[0] for name in grading.FUNCTIONS}
    assert {f"answers.{name}" for name in answers.__all__} <= attacked
    assert {f"rewards.{name}" for name in (*rewards.REWARDS, "explain")} <= attacked


def test_an_attack_has_its_size_and_place(grading) -> None:
    text = grading.Attack("digits and points", "before 18").text(1000)
    assert text == template_completion("so", "1." * 500 + " 18")
    assert len(set(grading.UNITS.values())) == len(grading.UNITS)  # no text is tried twice


def test_the_slowest_text_is_found(grading, monkeypatch) -> None:
    seconds = {"1.": 3.0, "7": 5.0}  # of a clock that knows what it is shown
    monkeypatch.setattr(
        grading, "cpu_seconds", lambda function, text: seconds.get(text[:2], seconds.get(text[:1], 1.0))
    )
    found = grading.worst_cases(100)
    assert all(row["seconds"] == 5.0 and row["unit"] == "digits" for row in found["functions"].values())
    assert all(row["place"] == "bare" for row in found["functions"].values())


def test_throughput_counts_verdicts_and_takes_ratios_within_rounds(grading, monkeypatch) -> None:
    clock = iter([0.0, 1.0, 0.0, 4.0, 0.0, 2.0, 0.0, 6.0])  # start and end: first ours, then the other; two rounds
    monkeypatch.setattr(grading.time, "process_time", lambda: next(clock))
    monkeypatch.setattr(
        grading, "graders", lambda pairs: {"is_correct": answers.is_correct, "last_number": grading.last_number}
    )
    pairs = [(template_completion("so", "18"), "18"), ("so 18", "18"), ("so 17", "18"), ("", "18")]
    found = grading.throughput(pairs, rounds=2)
    assert found["accepted"] == {"is_correct": 1, "last_number": 2}
    assert found["per_cpu_second"] == {"is_correct": [4, 2], "last_number": [1, 1]}
    assert found["ratios"] == {"is_correct/last_number": {"median": 3.5, "min": 3.0, "max": 4.0}}


def test_accuracy_tells_the_two_mistakes_apart(grading) -> None:
    rows = [
        {"text": "18", "gold": "18", "label": True},
        {"text": "1.8e1", "gold": "18", "label": True},
        {"text": "17 or 18", "gold": "18", "label": False},
        {"text": "17", "gold": "18", "label": False},
    ]
    found = grading.accuracy(rows)
    assert found["is_correct"] == {"n": 4, "accuracy": 1.0, "wrong_accepted": 0, "right_refused": 0}
    assert found["last_number"] == {"n": 4, "accuracy": 0.5, "wrong_accepted": 1, "right_refused": 1}


def test_math_verify_is_asked_about_the_answer(grading) -> None:
    pytest.importorskip("math_verify")
    verdict = grading.graders([("", "18")])["math_verify"]
    assert verdict(template_completion("so 17", "$18$"), "18")
    assert not verdict(template_completion("so 18", "17"), "18")
    assert not verdict("no tags: 18", "18")


def test_gsm8k_is_optional(grading, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(grading, "ROOT", tmp_path / "course")
    monkeypatch.delenv("GSM8K_DIR", raising=False)
    assert grading.gsm8k_folder() is None
    (tmp_path / "test.jsonl").write_text("")
    monkeypatch.setenv("GSM8K_DIR", str(tmp_path))
    assert grading.gsm8k_folder() == tmp_path


def test_the_program(tmp_path) -> None:
    command = [
        sys.executable,
        str(BENCHMARKS / "grading.py"),
        "--rounds",
        "1",
        "--limit",
        "20",
        "--size",
        "50",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *text, last = done.stdout.splitlines()
    found = json.loads(last)
    assert found["throughput"]["reference run"]["completions"] == 20
    functions = found["worst_case"]["functions"]
    assert functions[found["worst_case"]["worst"]]["seconds"] == max(row["seconds"] for row in functions.values())
    assert {line.split("  ")[0] for line in text} >= {"strict grader (is_correct)", *functions}


def test_help_and_bad_arguments() -> None:
    program = [sys.executable, str(BENCHMARKS / "grading.py")]
    shown = subprocess.run([*program, "--help"], capture_output=True, text=True)
    assert shown.returncode == 0 and shown.stdout.startswith("usage:")
    wrong = subprocess.run([*program, "--rounds", "0"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "must be 1 or more" in wrong.stderr
