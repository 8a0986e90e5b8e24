"""GRPO runs with the vLLM engine on a CPU, each in a process of its own: vLLM does not shut down cleanly.

    python tests/tpu/stack/grpo_on_vllm.py      # then on stdin, one to a line: a job, see `run`; exit codes on stdout

A process that has imported everything forks one for each job, which saves it a minute.  What the job found is in its
directory, in result.json.
"""

import dataclasses
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import psutil

from grpo_train.tpu import vllm_on_cpu


def run(job: dict) -> dict:
    """What the job asks for.

    Keys of a job: overrides, directory, and, all optional: devices (1), stock_mapping (leave the workaround for
    lm_head out), evaluate (before and after, and sample twice from one seed), and, when this step's row is written,
    stop_after (kill the process and those that the engine forked), kill_after (the process alone; its children are in
    children.json) and terminate_after (SIGTERM to all of them, as `sky cancel` and `pkill -f` send it).
    """
    from grpo_lib.common import environment
    from grpo_lib.common.errors import CourseError
    from grpo_train import checks, pipeline, training
    from grpo_train.engines import compat
    from grpo_train.recipes import load_recipe
    from grpo_train.runs.preemption import Interrupted, PreemptionHandler

    if job.get("stock_mapping"):
        compat.untied_lm_head_mapping = lambda mapping, model_name: mapping
    recipe = load_recipe(environment.repo_root() / "recipes" / "tiny-cpu.yaml", job["overrides"])
    session = pipeline.start_session(checks.check(recipe), Path(job["directory"]))
    meshes = {"trainer": session.actor.mesh, "sampler": session.sampler.mesh}
    result: dict = {
        "started_at": session.step,
        "devices": {who: sorted(device.id for device in mesh.devices.flat) for who, mesh in meshes.items()},
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
            os.killpg(0, signal.SIGKILL)
        if row["step"] == job.get("kill_after"):
            children = [child.pid for child in psutil.Process().children(recursive=True)]
            (Path(job["directory"]) / "children.json").write_text(json.dumps(children), encoding="utf-8")
            os.kill(os.getpid(), signal.SIGKILL)
        if row["step"] == job.get("terminate_after"):
            os.killpg(0, signal.SIGTERM)

    try:
        with PreemptionHandler() as preemption, preemption.defer():
            result["rows"] = training.train(session, on_step, stop=lambda: preemption.requested)
    except Interrupted:
        return result | {"interrupted_at": session.step}
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


def serve() -> None:
    """Fork for each job, and wait for it."""
    vllm_on_cpu.install()
    from grpo_train import pipeline, training  # noqa: F401

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a run prints must not stand between the exit codes
    for line in sys.stdin:
        process = multiprocessing.get_context("fork").Process(target=work, args=(json.loads(line),))
        process.start()
        process.join()
        print(process.exitcode, file=out, flush=True)


def work(job: dict) -> None:
    """In the fork, which ends here; JAX reads XLA_FLAGS when it first looks for devices."""
    os.setpgrp()  # a group that can be killed as one
    signal.alarm(600)
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={job.get('devices', 1)}"
    (Path(job["directory"]) / "result.json").write_text(json.dumps(run(job)), encoding="utf-8")
    # Replicas of the engine fork processes that wait for each other.
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(0)


if __name__ == "__main__":
    serve()
