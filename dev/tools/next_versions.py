"""Try the newest versions of what the course is built on, next to the locked ones.

    make next         .venv-next: JAX, Flax, Transformers, Orbax, Tunix, MaxText
    make next-tpu     .venv-next-tpu, 11 GB of disk: vLLM-TPU, Tunix, MaxText

There is no lock: uv resolves requirements/*.in without their versions, with what the index has today.  It prints which
versions differ from the lock's, whether four training steps and their evaluations are equal to those of the locked
environment digit for digit, and which tests of upstream's faults fail: such a fault is gone, or is now somewhere else.

The exit code is 1 if something could not be installed or run, or if a test failed.  Other digits alone are only
reported: a new compiler may add in another order.
"""

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import read_jsonl, write_text_atomic

ROOT = environment.repo_root()
WORK = ROOT / ".cache" / "next"
UV = ROOT / ".venv" / "bin" / "uv"

# Upper bounds of one package against another, which would hold a newest one back.
WITHOUT_BOUNDS = ("safetensors", "tensorboard-plugin-profile")

FOUR_STEPS = ("training.steps=4", "training.validate_every=0", "problems.test=200")
# Two runs of the same steps differ in these.
CLOCKS = ("seconds", "tokens_per_second", "compilations")

SMOKE_RECIPE = "recipes/published/qwen3-1.7b-gsm8k-smoke.yaml"


@dataclass(frozen=True)
class Tier:
    """What is tried together, in an environment of its own.

    newest: packages of which the newest version is taken, whatever the others ask for.
    """

    venv: str
    inputs: tuple[str, ...]
    lock: str
    newest: tuple[str, ...]


CPU = Tier(
    venv=".venv-next",
    inputs=("cpu.in", "dev.in"),
    lock="cpu.lock",
    newest=("jax", "jaxlib", "flax", "transformers", "orbax-checkpoint", "google-tunix", "maxtext"),
)
# vLLM-TPU chooses JAX, libtpu and Flax here.
TPU = Tier(
    venv=".venv-next-tpu",
    inputs=("tpu.in", "cpu.in", "dev.in"),
    lock="tpu.lock",
    newest=("vllm-tpu", "tpu-inference", "google-tunix", "maxtext", "qwix"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tpu", action="store_true", help="the newest vLLM-TPU, a weight sync and a smoke test")
    tier = TPU if parser.parse_args().tpu else CPU
    try:
        python = make_environment(tier)
    except CourseError as error:
        sys.exit(f"error: {error}")
    print_versions(tier, python)
    succeeded = try_tpu(python) if tier is TPU else try_cpu(python)
    sys.exit(0 if succeeded else 1)


# --- The environment ------------------------------------------------------------------------------------------


def make_environment(tier: Tier) -> Path:
    """Make the environment anew, with this repository in it, and return its Python.

    Raises:
      CourseError: its folder is not an environment of ours, the machine does not do for it, or uv failed.
    """
    folder = ROOT / tier.venv
    if folder.is_symlink():
        raise CourseError(f"{tier.venv} is a symbolic link, and what it points to would be emptied; remove the link")
    if folder.exists() and not (folder / "pyvenv.cfg").is_file():
        raise CourseError(f"{tier.venv} is not a Python environment; move it away")
    if tier is TPU and (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise CourseError("vLLM-TPU needs Linux on x86-64; make next tries the rest")
    requirements = write_text_atomic(WORK / "requirements.txt", "\n".join(asked_for(tier)) + "\n")
    overrides = write_text_atomic(WORK / "overrides.txt", "\n".join(overriding(tier)) + "\n")
    python = folder / "bin" / "python"
    print(f"next: installing the newest versions into {tier.venv}; a few minutes", flush=True)
    uv("venv", "--clear", "--python", ROOT / ".venv" / "bin" / "python", folder)
    uv("pip", "install", "--python", python, "--requirements", requirements, "--overrides", overrides)
    uv("pip", "install", "--python", python, "--no-deps", "--no-build-isolation", "--offline", "--editable", ROOT)
    return python


def asked_for(tier: Tier) -> list[str]:
    """The packages of requirements/*.in, without versions.

    Also without extras: those of MaxText pin JAX, PyTorch and more, and what the course imports of them is in cpu.in.
    """
    return sorted({one.name for name in tier.inputs for one in read_requirements(name)} | {"pyright[nodejs]"})


def overriding(tier: Tier) -> list[str]:
    """Lines that replace what other packages ask for: the newest of `tier.newest`, and what is never installed here."""
    found = uv(
        "pip", "compile", "--quiet", "--no-deps", "--no-header", "--no-annotate", "-", given="\n".join(tier.newest)
    )
    never = [str(one) for one in read_requirements("tpu-overrides.txt") if one.marker]
    return [*found.split(), *WITHOUT_BOUNDS, *never]


def read_requirements(name: str) -> list[Requirement]:
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    texts = (line.partition("#")[0].strip() for line in lines)
    return [Requirement(text) for text in texts if text]


def uv(*arguments: str | Path, given: str = "") -> str:
    """Run uv and return what it printed.

    Raises:
      CourseError: it failed; with the end of what it said.
    """
    done = subprocess.run([UV, *arguments], cwd=ROOT, input=given, capture_output=True, text=True)
    if done.returncode:
        log = write_text_atomic(WORK / "uv.log", done.stderr)
        raise CourseError(f"uv {arguments[0]} {arguments[1]} failed ({log}): {done.stderr.strip()[-300:]}")
    return done.stdout


# --- Versions -------------------------------------------------------------------------------------------------


def print_versions(tier: Tier, python: Path) -> None:
    """Print the packages of requirements/*.in whose version is not the lock's; .cache/next/versions.md has all."""
    locked: dict[str, str] = locked_versions(tier.lock)
    listed = json.loads(uv("pip", "list", "--python", python, "--format", "json"))
    newest: dict[str, str] = {canonicalize_name(package["name"]): package["version"] for package in listed}
    differing = [name for name in sorted(locked | newest) if locked.get(name) != newest.get(name)]
    named = set(tier.newest)
    for file in tier.inputs:
        named |= {canonicalize_name(requirement.name) for requirement in read_requirements(file)}
    rows = {name: f"| {name} | {locked.get(name, '–')} | {newest.get(name, '–')} |" for name in differing}
    head = ["| package | locked | newest |", "|---|---|---|"]
    everything = write_text_atomic(WORK / "versions.md", "\n".join([*head, *rows.values()]) + "\n")
    printed = [row for name, row in rows.items() if name in named]
    print("\n".join([*head, *printed]))
    print(f"\n{len(rows)} packages differ from {tier.lock}; {everything.relative_to(ROOT)} has all of them", flush=True)


def locked_versions(lock: str) -> dict[str, str]:
    text = (ROOT / "requirements" / lock).read_text(encoding="utf-8")
    pinned = re.findall(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in pinned}


# --- What is tried --------------------------------------------------------------------------------------------


def try_cpu(python: Path) -> bool:
    """The course's first steps with the locked and the newest versions, then the tests of upstream's faults."""
    runs = WORK / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    trained = True
    for name, folder in (("locked", ROOT / ".venv" / "bin"), ("newest", python.parent)):
        command = [folder / "grpo", "train", "recipes/tiny-cpu.yaml", "--runs", runs, "--run", name, *FOUR_STEPS]
        trained = succeeds(f"four steps, {name}", *command) and trained
    if trained:
        print_differences(runs / "locked", runs / "newest")
    tested = passes(python, "tests/train/test_compat.py")
    return trained and tested


def try_tpu(python: Path) -> bool:
    """A run with vLLM whose weights are compared after a sync, then the smoke test of a recipe."""
    synced = passes(python, "tests/tpu/stack/test_vllm.py", "-k", "two_iterations_make_one_row")
    smoke_tested = succeeds("smoke test", python.parent / "grpo", "smoke-test", SMOKE_RECIPE)
    return synced and smoke_tested


def passes(python: Path, *tests: str) -> bool:
    """Run tests, and print those that fail: what they say of upstream is no longer so."""
    return succeeds(f"pytest {' '.join(tests)}", python, "-m", "pytest", "-n", "0", "-rf", *tests)


def succeeds(name: str, *command: str | Path) -> bool:
    """Run a command and print whether it succeeded; if not, the tests that failed, or its last lines."""
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    log = write_text_atomic(WORK / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.log", done.stdout)
    result = "ok" if done.returncode == 0 else f"FAILED, exit code {done.returncode}"
    print(f"\n{name}: {result} ({log.relative_to(ROOT)})", flush=True)
    if done.returncode:
        lines = done.stdout.splitlines()
        failed_tests = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        print("\n".join(failed_tests or lines[-5:]), flush=True)
    return done.returncode == 0


def print_differences(locked: Path, newest: Path) -> None:
    """Print whether two runs have the same metrics and records, digit for digit, or what differs."""
    for name in ("metrics.jsonl", "evals/before.jsonl", "evals/after.jsonl"):
        rows, others = ([without_clocks(row) for row in read_jsonl(run / name)] for run in (locked, newest))
        differing = differences(rows, others)
        if not differing:
            print(f"{name}: {len(rows)} rows, equal digit for digit", flush=True)
            continue
        keys = sorted({key for _, key, _, _ in differing})
        row, key, one, other = differing[0]
        first = f"the first in row {row}, {key}: locked {one}, newest {other}"
        print(f"{name}: {len(differing)} values differ ({', '.join(keys)}), {first}", flush=True)


def differences(locked: list[dict], newest: list[dict]) -> list[tuple[int, str, Any, Any]]:
    """(row, counted from 1, key, value in `locked`, value in `newest`) where two lists of rows differ."""
    different = []
    for number, (one, other) in enumerate(zip_longest(locked, newest, fillvalue={}), start=1):
        for key in sorted(one | other):
            if one.get(key) != other.get(key):
                different.append((number, key, one.get(key), other.get(key)))
    return different


def without_clocks(row: dict) -> dict:
    return {key: value for key, value in row.items() if not key.startswith(CLOCKS)}


if __name__ == "__main__":
    main()
