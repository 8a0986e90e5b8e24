"""One GRPO run with the vLLM engine on a CPU, in a process of its own: vLLM does not shut down cleanly.

    python tests/tpu/stack/grpo_on_vllm.py '{"overrides": [...], "directory": "...", ...}'

The last line that it prints is a JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import psutil

from grpo_tpu import vllm_on_cpu


def run(job: dict) -> dict:
    """What the job asks for.

    Keys of a job: overrides, directory, and, all optional: stock_mapping (leave the workaround for lm_head out),
    evaluate (before and after, and sample twice from one seed), stop_after (kill the process when this step's row is
    written).
    """
    from grpo_lib.common import environment
    from grpo_lib.common.errors import CourseError
    from grpo_train import pipeline, training
    from grpo_train.engines import compat
    from grpo_train.recipes import load_recipe

    if job.get("stock_mapping"):
        compat.untied_lm_head_mapping = lambda mapping, model_name: mapping
    recipe = load_recipe(environment.repo_root() / "recipes" / "tiny-cpu.yaml", job["overrides"])
    session = pipeline.build_session(recipe, Path(job["directory"]))
    meshes = {"trainer": session.actor.mesh, "sampler": session.sampler.mesh}
    result: dict = {
        "started_at": session.step,
        "devices": {who: sorted(device.id for device in mesh.devices.flat) for who, mesh in meshes.items()},
        "axes": [size for size in session.sampler.mesh.shape.values() if size > 1],
    }
    try:
        result["check"] = dataclasses.asdict(training.check_first_sync(session))
    except CourseError as error:
        return result | {"refused": str(error)}
    if job.get("evaluate"):
        result["samples"] = samples(session)
        result["before"] = pipeline.evaluate(session, "before", progress=False).summary()

    def on_step(row: dict) -> None:
        if row["step"] == job.get("stop_after"):
            os.killpg(0, signal.SIGKILL)  # with the processes that the engine forked, which would hold the pipes open

    result["rows"] = training.train(session, on_step)
    if job.get("evaluate"):
        result["after"] = pipeline.evaluate(session, "after", progress=False).summary()
    result["check_after"] = dataclasses.asdict(training.check_first_sync(session))
    return result


def samples(session) -> dict:
    """Texts of two calls, and of the first again."""
    prompts = [session.render(problem.question) for problem in session.problems[:16]]
    session.sampler.calls = 0
    first, second = (session.sampler.generate(prompts, session.rollout_config) for _ in range(2))
    lengths, truncated = session.sampler.lengths, session.sampler.truncated
    session.sampler.calls = 0
    again = session.sampler.generate(prompts, session.rollout_config)
    session.sampler.calls = 0
    return {
        "first": first.text,
        "second": second.text,
        "again": again.text,
        "last_tokens": [int(ids[-1]) for ids in second.tokens],
        "lengths": lengths,
        "truncated": truncated,
    }


if __name__ == "__main__":
    vllm_on_cpu.install()
    print(json.dumps(run(json.loads(sys.argv[1]))), flush=True)
    # Replicas of the engine fork processes that wait for each other, and would hold the pipes of this one open.
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(0)
