"""The notebooks' way on a TPU VM: 04 and 05 with a recipe that samples through vLLM, scaled down."""

import json
import os
import shutil
import subprocess
import sys

import nbformat
import pytest

from grpo_lib.common.environment import repo_root

ROOT = repo_root()
NAME = "rehearsal-under-test"
RECIPE = "recipes/qwen2.5-0.5b-gsm8k.yaml@vllm"


@pytest.fixture
def run_dir():
    """Notebooks write into the repository's runs/, so this one is removed."""
    folder = ROOT / "runs" / NAME
    shutil.rmtree(folder, ignore_errors=True)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def rehearse(*notebooks: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "dev/tools/rehearse.py", RECIPE, "--overrides", "name=under-test"]
    command += ["--notebooks", *notebooks]
    # Where ipykernel sees pytest, its output has no file number, and vLLM asks for one.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500, env=environment)


def test_training_and_evaluation_come_to_their_ends_through_vllm(run_dir):
    done = rehearse("04_grpo_training", "05_evaluation")
    assert done.returncode == 0, done.stderr + done.stdout
    assert json.loads((run_dir / "sync.json").read_text())["mean_gap"] <= 0.01  # nats
    executed = nbformat.read(run_dir / "notebooks" / "04_grpo_training.ipynb", as_version=4)
    printed = "".join(
        output.get("text", "") for cell in executed.cells for output in cell.get("outputs", []) if output.get("text")
    )
    assert "it is sampled by vLLM" in printed
    table = done.stdout[done.stdout.index("notebook  ") :]
    assert "if small != recipe:" in table  # a way that the tiny recipe's notebook does not go

    again = rehearse("04_grpo_training", "05_evaluation")
    assert again.stdout.count("done before") == 2
