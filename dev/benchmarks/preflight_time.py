"""What the estimates add to a whole preflight: the command of two commits, one after the other, with nothing cached.

    .venv-tpu/bin/python dev/benchmarks/preflight_time.py recipes/tiny-cpu.yaml hardware.accelerator=v6e-1 \\
        rollout.engine=vllm rollout.max_prompt_length=64 model.dtype=bfloat16 training.micro_batch_size=8 \\
        training.layout=padded

Before is 80fae555, the last commit without estimates, after is HEAD.  CPU time counts, of all threads of the compiler:
what else a machine does changes it little.  The command runs in a copy of each commit, in turn, `--rounds` times.
"""

import argparse
import io
import json
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from job import ROOT


def copy_of(commit: str, folder: Path) -> Path:
    """The files of a commit, in a folder of its name."""
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder / commit, filter="data")
    return folder / commit


def measured(tree: Path, arguments: list[str]) -> dict[str, float]:
    """CPU and wall seconds of one preflight in this copy of the repository, whose cache begins empty."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        code = (
            "import functools, pathlib, sys\n"
            "from grpo_train import cli\n"
            "from grpo_train.tpu import compiler\n"
            "compiler.Compiler = functools.partial(compiler.Compiler, cache=pathlib.Path(sys.argv.pop(1)))\n"
            "cli.main()\n"
        )
        command = [sys.executable, "-c", code, cache, "preflight", *arguments, "--json"]
        environment = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{tree / 'teaching'}"}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode or not json.loads(done.stdout.splitlines()[-1])["fits"]:
        sys.exit(f"{tree.name}: {done.stderr.strip()[-500:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_seconds": cpu, "wall_seconds": time.monotonic() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs="+", metavar="RECIPE [KEY=VALUE …]", help="as of grpo preflight")
    parser.add_argument("--before", default="80fae555", help="commit to compare with")
    parser.add_argument("--after", default="HEAD", help="commit that is compared")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
    with tempfile.TemporaryDirectory() as folder:
        trees = {name: copy_of(getattr(arguments, name), Path(folder)) for name in found}
        for _ in range(arguments.rounds):
            for name, tree in trees.items():
                found[name].append(measured(tree, arguments.arguments))
                print(f"{name}: {json.dumps(found[name][-1])}", file=sys.stderr, flush=True)
    least = {name: min(one["cpu_seconds"] for one in runs) for name, runs in found.items()}
    print(json.dumps({**found, "after_over_before": least["after"] / least["before"]}))


if __name__ == "__main__":
    main()
