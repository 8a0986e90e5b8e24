"""The environment of the peer: .venv-trl, with TRL and the CPU build of torch.  Made when a benchmark first needs it.

    python dev/benchmarks/trl_environment.py        # prints the path of its Python

Its packages are requirements/trl.lock (hashed) and torch, whose version trl.in names.  torch is apart because its CPU
build is a different file on every kind of machine, and because PyPI's build for Linux does not import without 3 GB of
CUDA libraries.  The CPU build is taken from where your pip is configured to look, else from PyTorch's own site, through
`uv pip install --torch-backend cpu`.  Any Python from 3.11 to 3.13 will do;
TRL_PYTHON=/path/to/python chooses one.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

from job import ROOT

ENVIRONMENT = ROOT / ".venv-trl"
PYTHON = ENVIRONMENT / "bin" / "python"
INPUT, LOCK = ROOT / "requirements" / "trl.in", ROOT / "requirements" / "trl.lock"
LOG = ROOT / ".cache" / "trl-environment.log"
CHECK = "import sys, ensurepip, venv; print(sys.executable) if (3, 11) <= sys.version_info < (3, 14) else sys.exit(1)"


class EnvironmentFailed(Exception):
    """The environment cannot be made; the message names the fix."""


def ensure() -> Path:
    """The Python of .venv-trl, after making the environment if it is missing or was made from another lock.

    Raises EnvironmentFailed, whose message is one line with the fix.
    """
    if ENVIRONMENT.is_symlink():  # venv --clear would empty what it points to
        raise EnvironmentFailed(
            f"{ENVIRONMENT} is a symbolic link, and making the environment would empty its target; remove the link "
            f"(rm {ENVIRONMENT}) and start again"
        )
    version = re.search(r"^torch==(\S+)", INPUT.read_text(encoding="utf-8"), re.MULTILINE).group(1)
    stamp = ENVIRONMENT / ".complete"
    content = f"{ROOT} torch {version} {zlib.crc32(LOCK.read_bytes())}"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == content and _runs([PYTHON, "-c", ""]):
        return PYTHON
    LOG.parent.mkdir(exist_ok=True)
    LOG.write_text("", encoding="utf-8")
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if uv is None:
        raise EnvironmentFailed("no uv found for making .venv-trl; run make setup, which installs it into .venv")
    pythons = list(_pythons())
    if not pythons:
        raise EnvironmentFailed("no Python 3.11 to 3.13 with venv found for .venv-trl; set TRL_PYTHON=/path/to/python")
    for python in pythons:
        print(f"making .venv-trl with {python}: torch {version} for the CPU, and TRL (1.4 GB on disk)", file=sys.stderr)
        if not _runs([python, "-m", "venv", "--clear", ENVIRONMENT]):
            continue
        if _install_torch(uv, version) and _install_lock(uv):
            break
    else:
        raise EnvironmentFailed(
            f"torch {version} for the CPU or TRL could not be installed; check the network, or configure pip to "
            f"look where the CPU build is, or use --no-trl; details: {LOG}"
        )
    if not _runs([PYTHON, "-c", "import torch, trl"]):
        raise EnvironmentFailed(f".venv-trl was made, but torch or trl does not import; details: {LOG}")
    stamp.write_text(content, encoding="utf-8")
    return PYTHON


def _install_torch(uv: str, version: str) -> bool:
    """Only torch itself: what it needs on a CPU is in the lock."""
    build = f"torch=={version}+cpu" if sys.platform == "linux" else f"torch=={version}"
    pip = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", build]
    backend = [uv, "pip", "install", "--python", PYTHON, "--no-deps", "--torch-backend", "cpu", f"torch=={version}"]
    return _runs(pip) or _runs(backend)


def _install_lock(uv: str) -> bool:
    return _runs([uv, "pip", "install", "--python", PYTHON, "--no-deps", "--require-hashes", "-r", LOCK])


def _runs(command: list) -> bool:
    """Run a command with its output in the log; did it succeed?"""
    variables = os.environ | {"UV_NO_PROGRESS": "1", "UV_PYTHON_DOWNLOADS": "never"}
    variables.setdefault("UV_CACHE_DIR", str(ROOT / ".cache" / "uv"))
    command = [str(part) for part in command]
    LOG.parent.mkdir(exist_ok=True)
    with open(LOG, "a", encoding="utf-8") as log:
        print("$", *command, file=log, flush=True)
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables)
        except OSError as error:
            print(error, file=log)
            return False
    return done.returncode == 0


def _pythons() -> Iterator[str]:
    """Working interpreters, this one first, at most one of each minor version."""
    chosen = os.environ.get("TRL_PYTHON")
    names = [f"python3.{minor}" for minor in (12, 13, 11)]
    folders = os.environ.get("PATH", "").split(os.pathsep)
    candidates = [chosen] if chosen else [sys.executable, *(os.path.join(f, name) for name in names for f in folders)]
    seen: set[str] = set()
    for candidate in candidates:
        # A name on PATH may be a shim that fails, so each is run before it is believed.
        try:
            probe = subprocess.run([candidate, "-I", "-c", CHECK], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            continue
        version = subprocess.run([candidate, "-V"], capture_output=True, text=True).stdout.rpartition(".")[0]
        if probe.returncode == 0 and version not in seen:
            seen.add(version)
            yield probe.stdout.strip()


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    try:
        print(ensure())
    except EnvironmentFailed as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
