"""Runs that tests start and kill: a process that has imported everything forks one for each run.

    python tests/train/run_server.py       # then on stdin, one to a line: a JSON object, see `Job`; answers on stdout

A fork is a process of its own, with its own JAX; what it saves is the ten seconds of imports.
"""

import dataclasses
import json
import os
import resource
import subprocess
import sys
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

    from grpo_train import pipeline  # noqa: F401  imports what a run needs
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
    """`grpo train`; what it prints goes to a file next to the folder, with `.txt` behind its name."""
    from grpo_train import cli

    if job.file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job.file_bytes, job.file_bytes))
    said = os.open(job.directory + ".txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    directory = Path(job.directory)
    place = ["--runs", str(directory.parent), "--run", directory.name, "--base", job.base]
    sys.argv = ["grpo", "train", "recipes/tiny-cpu.yaml", *job.overrides, *place]
    try:
        cli.main()
    except SystemExit as end:
        sys.stdout.flush()
        return end.code or 0
    return 1


if __name__ == "__main__":
    serve()
