"""A run on competition problems, from rows as they are published to pass@k in the report; the problems are our own."""

import json
import os
import subprocess
import sys

import pytest

from grpo_lib.common.files import read_jsonl
from grpo_train.tpu.placeholder_problems import write_placeholders

pytestmark = pytest.mark.long(minutes=2)


def test_a_run_on_dapo_math_is_judged_on_aime_with_samples(root, tmp_path):
    files = write_placeholders(tmp_path, train=40, test=30)
    command = [
        *(
            sys.executable,
            "-m",
            "grpo_train.cli",
            "train",
            "recipes/tiny-cpu.yaml",
            "--runs",
            str(tmp_path),
            "--run",
            "run",
        ),
        *("problems.source=dapo-math", f"problems.path={files['dapo-math']}"),
        *("problems.test_source=aime", f"problems.test_path={files['aime']}"),
        *("rewards=[correct_answer]", "training.steps=2", "evaluation.samples=8", "evaluation.temperature=0.7"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=os.environ)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "120 rows, 40 problems: 80 duplicates removed" in done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    for phase in ("before", "after"):
        part = summary[phase]
        assert part["n"] == 30
        assert part["samples"] == 8
        assert list(part["pass_at_k"]) == ["1", "2", "4", "8"]
        assert part["pass_at_k"]["8"] > part["pass_at_k"]["1"] > 0
        low, high = part["pass_at_k_interval"]["8"]
        assert low <= part["pass_at_k"]["8"] <= high
        records = read_jsonl(tmp_path / "run" / "evals" / f"{phase}.jsonl")
        assert len(records) == 30 * 9
        assert {record["kind"] for record in records} == {"integer"}
    assert "pass@8" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
