"""On a TPU VM: .venv-tpu/bin/python -m pytest tests/tpu/on_tpu

`grpo self-check` as a user runs it: kernels against references, then the tiny model's widths trained on the chips
through an engine, stopped with SIGTERM to the group (exit code 75), continued by the same command, and no process left.
JAX starts in those processes alone: this one would hold the chips.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHIPS = len([*Path("/dev").glob("accel[0-9]*"), *Path("/dev").glob("vfio/[0-9]*")])

pytestmark = pytest.mark.skipif(CHIPS == 0, reason="on_tpu: needs a TPU, and /dev has no chip")

VLLM = ["rollout.engine=vllm", "hardware.sampler_tensor=1"]
BFLOAT16 = ["model.dtype=bfloat16", "training.rounding=stochastic"]
CASES = {  # chips -> what differs from recipes/tiny-cpu.yaml
    "tunix, float32, the kernel": (1, ["loss.implementation=pallas"]),
    "tunix, bfloat16, the kernel": (1, ["loss.implementation=pallas", *BFLOAT16]),
    "vllm, bfloat16": (1, [*VLLM, *BFLOAT16]),
    "vllm, two replicas": (2, [*VLLM, *BFLOAT16]),
}


@pytest.mark.parametrize(("chips", "changes"), CASES.values(), ids=CASES)
def test_a_training_on_the_chips_is_stopped_and_continued(root, tmp_path, chips, changes):
    if chips > CHIPS:
        pytest.skip(f"on_tpu: needs {chips} chips, and here is {CHIPS}")
    changes = [*changes, f"hardware.trainer_devices={chips}", "rollout.max_prompt_length=64", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "grpo_train.cli", "self-check", "recipes/tiny-cpu.yaml", "--runs", tmp_path, *changes],
        env=os.environ | {"JAX_PLATFORMS": "tpu,cpu"},  # tests/conftest.py chooses the CPU
        cwd=root, capture_output=True, text=True,
    )  # fmt: skip
    checks = {check["name"]: check for check in json.loads(done.stdout.splitlines()[-1])["checks"]}
    assert done.returncode == 0, [check for check in checks.values() if check["outcome"] == "FAIL"]
    assert "exit code 75" in checks["stopped"]["text"]
    assert "step 6" in checks["continued"]["text"]
    assert (checks["loss"]["outcome"] == "pass") == ("loss.implementation=pallas" in changes)
