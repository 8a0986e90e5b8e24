"""Runs that tests start and kill: a process that has imported everything forks one for each run.

    python tests/train/run_server.py       # then on stdin, one to a line: a JSON object, see `Job`; answers on stdout

A fork is a process of its own, with its own JAX; what it saves is the ten seconds of imports.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys
import traceback
from pathlib import Path


@dataclasses.dataclass
class Job:
    """A run."""

    directory: str
    base: str  # the converted model
    overrides: list[str]  # of the recipe
    file_bytes: int | None = None  # limits the size of files


class RunServer:
    """The test's end of it."""

    def __init__(self, root: Path):
        self.process = subprocess.Popen(
            [sys.executable, __file__], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._read() == {"ready": True}

    def start(self, job: Job) -> int:
        """The process id of the run."""
        self._write(dataclasses.asdict(job))
        return self._read()["pid"]

    def wait(self) -> int:
        """Exit code of the run that was started last; negative: the signal that killed it."""
        self._write("wait")
        return self._read()["code"]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)

    def _write(self, message) -> None:
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def _read(self) -> dict:
        line = self.process.stdout.readline()
        assert line, "the run server has died"
        return json.loads(line)


def serve() -> None:
    from grpo_lib.common import environment

    environment.prepare()

    from grpo_train.engines import maxtext_model
    from grpo_train.recipes import load_recipe

    maxtext_model.load_tokenizer(load_recipe("recipes/tiny-cpu.yaml").model)  # imports transformers

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a run prints must not stand between the answers
    print(json.dumps({"ready": True}), file=out, flush=True)
    pid = 0
    for line in sys.stdin:
        message = json.loads(line)
        if message == "wait":
            answer = {"code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}
        else:
            pid = os.fork()
            if not pid:
                os._exit(run(Job(**message)))
            answer = {"pid": pid}
        print(json.dumps(answer), file=out, flush=True)


def run(job: Job) -> int:
    """The run; its messages, and what it failed with, go to `said.txt` in the folder above."""
    from grpo_lib.common.errors import CourseError
    from grpo_train import pipeline
    from grpo_train.recipes import load_recipe
    from grpo_train.runs.preemption import EXIT_CODE, Interrupted, PreemptionHandler
    from grpo_train.runs.run_directory import link_base, open_run

    if job.file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job.file_bytes, job.file_bytes))
    recipe = load_recipe("recipes/tiny-cpu.yaml", job.overrides)
    said = Path(job.directory + ".txt")

    def say(text: str) -> None:
        with said.open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    try:
        with PreemptionHandler() as preemption:
            directory = open_run(job.directory, recipe)
            link_base(directory, job.base)
            pipeline.run(recipe, directory, log=say, progress=False, preemption=preemption)
    except Interrupted:
        return EXIT_CODE
    except CourseError as error:
        say(f"error: {error}")
        return 2
    except BaseException:
        say(traceback.format_exc())
        return 1
    return 0


if __name__ == "__main__":
    serve()
