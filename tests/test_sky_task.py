"""tools/grpo.sky.yaml: SkyPilot itself reads it, and its commands are what each host of a slice has to run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from grpo_tpu import cli

# Run in SkyPilot's own environment: tasks as JSON on stdin, what became of each on the last line of stdout.
READER = """
import json, sys, sky
def read(task):
    try:
        task = sky.Task.from_yaml_config(task, env_overrides=[("BUCKET", "some-bucket")])
    except Exception as error:
        return str(error)
    [resources] = task.resources
    return {"resources": resources.to_yaml_config(), "nodes": task.num_nodes, "secrets": sorted(task.secrets),
            "mounts": [mount.source for mount in task.storage_mounts.values()]}
print("\\n" + json.dumps({name: read(task) for name, task in json.load(sys.stdin).items()}))
"""


@pytest.fixture(scope="module")
def task(root: Path) -> dict:
    return yaml.safe_load((root / "tools" / "grpo.sky.yaml").read_text())


@pytest.mark.slow
def test_skypilot_reads_the_task_and_refuses_a_mistake(root: Path, task: dict, tmp_path: Path):
    tasks = {"task": task, "mistake": task | {"resources": task["resources"] | {"use_spott": True}}}
    variables = {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    variables["UV_CACHE_DIR"] = os.environ.get("UV_CACHE_DIR", str(root / ".cache" / "uv"))
    uv = [str(Path(sys.executable).with_name("uv")), "run", "--isolated", "--no-project", "--python", sys.executable]
    for network in (["--offline"], []):  # the cache first: it is faster, and the same with and without a network
        done = subprocess.run(
            [*uv, *network, "--with-requirements", "requirements/sky.lock", "python", "-c", READER],
            cwd=root, env=os.environ | variables, input=json.dumps(tasks), capture_output=True, text=True,
        )  # fmt: skip
        if not done.returncode:
            break
    else:
        if re.search(r"dns|resolve host|connect|network|timed? ?out", done.stderr, re.IGNORECASE):
            pytest.skip("SkyPilot: its packages are not in uv's cache, and the package index cannot be reached")
        pytest.fail(done.stderr[-2000:])
    read = json.loads(done.stdout.splitlines()[-1])
    found = read["task"]
    assert isinstance(found, dict), found
    resources = found["resources"]
    assert (resources["infra"], resources["accelerators"], resources["use_spot"]) == ("gcp", {"tpu-v6e-8": 1}, True)
    assert resources["autostop"]["down"] and resources["job_recovery"]["recover_on_exit_codes"] == [75, 134]
    assert found["nodes"] == 1 and found["mounts"] == ["gs://some-bucket"]  # one slice, whatever hosts it has
    assert found["secrets"] == ["HF_TOKEN", "WANDB_API_KEY"]
    assert "Invalid" in read["mistake"]


def test_every_host_runs_grpo_train(task: dict, tmp_path: Path):
    grpo = tmp_path / ".venv-tpu" / "bin" / "grpo"
    grpo.parent.mkdir(parents=True)
    grpo.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nexit 75\n')
    grpo.chmod(0o755)
    given = task["envs"] | {"BUCKET": "b", "HOME": "/home/me", "OVERRIDES": "seed=1 training.steps=2"}
    done = subprocess.run(
        ["bash", "-c", task["run"]], cwd=tmp_path, env=os.environ | given, capture_output=True, text=True
    )
    words = done.stdout.split()
    assert (done.returncode, words[:2]) == (75, ["train", task["envs"]["RECIPE"]])  # 75 is what job_recovery waits for
    assert {"seed=1", "training.steps=2", "training.checkpoints=gs://b/checkpoints", "/home/me/bucket/runs"} <= {*words}
    # The same command on every host: JAX finds the others.
    assert [word for word in words if word.startswith("--")] == ["--runs"]
    known = {name for option in typer.main.get_command(cli.app).commands["train"].params for name in option.opts}
    assert {word for word in words if word.startswith("--")} <= known
