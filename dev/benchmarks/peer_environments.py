"""The environments of the peers, each with the CPU build of torch.  Each is made when a benchmark first needs it.

    python dev/benchmarks/peer_environments.py trl              # .venv-trl: TRL; prints the path of its Python
    python dev/benchmarks/peer_environments.py transformers4    # .venv-transformers4: Transformers 4, without TRL
    python dev/benchmarks/peer_environments.py verl             # .venv-verl: the losses of verl and of Liger-Kernel

The packages are those of a lock (hashed), requirements/trl.lock for the first, and torch, whose version its input,
trl.in, names.  torch is apart because its CPU build is a different file on every kind of machine, and because PyPI's
build for Linux does not import without 3 GB of CUDA libraries.  The CPU build is taken from where your pip is
configured to look, else from PyTorch's own site, through `uv pip install --torch-backend cpu`.  Any Python from 3.11 to
3.13 will do; PEER_PYTHON=/path/to/python chooses one.
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
from dataclasses import dataclass
from pathlib import Path

from job import ROOT

CHECK = "import sys, ensurepip, venv; print(sys.executable) if (3, 11) <= sys.version_info < (3, 14) else sys.exit(1)"


@dataclass(frozen=True)
class Peer:
    """One environment."""

    name: str  # of its lock, and of its folder after .venv-
    has: str  # besides torch, for messages
    imports: str  # what must import, besides torch
    size: str  # on disk
    otherwise: str = ""  # what a reader can do without it

    @property
    def environment(self) -> Path:
        return ROOT / f".venv-{self.name}"

    @property
    def python(self) -> Path:
        return self.environment / "bin" / "python"

    @property
    def lock(self) -> Path:
        return ROOT / "requirements" / f"{self.name}.lock"

    @property
    def log(self) -> Path:
        return ROOT / ".cache" / f"{self.name}-environment.log"

    def torch_version(self) -> str:
        asked = self.lock.with_suffix(".in").read_text(encoding="utf-8")
        return re.search(r"^torch==(\S+)", asked, re.MULTILINE).group(1)


TRL = Peer("trl", has="TRL", imports="trl", size="1.4 GB", otherwise=", or use --no-trl")
TRANSFORMERS4 = Peer("transformers4", has="Transformers 4", imports="transformers", size="1 GB")
VERL = Peer("verl", has="verl and Liger-Kernel", imports="verl, liger_kernel", size="1.2 GB")
PEERS = {peer.name: peer for peer in (TRL, TRANSFORMERS4, VERL)}


class EnvironmentFailed(Exception):
    """The environment cannot be made; the message names the fix."""


def ensure(peer: Peer) -> Path:
    """The Python of a peer's environment, after making it if it is missing or was made from another lock.

    Raises EnvironmentFailed, whose message is one line with the fix.
    """
    folder = peer.environment.name
    if peer.environment.is_symlink():  # venv --clear would empty what it points to
        raise EnvironmentFailed(
            f"{peer.environment} is a symbolic link, and making the environment would empty its target; remove the "
            f"link (rm {peer.environment}) and start again"
        )
    version = peer.torch_version()
    stamp = peer.environment / ".complete"
    content = f"{ROOT} torch {version} {zlib.crc32(peer.lock.read_bytes())}"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == content and _runs(peer, [peer.python, "-c", ""]):
        return peer.python
    peer.log.parent.mkdir(exist_ok=True)
    peer.log.write_text("", encoding="utf-8")
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if uv is None:
        raise EnvironmentFailed(f"no uv found for making {folder}; run make setup, which installs it into .venv")
    pythons = list(_pythons())
    if not pythons:
        raise EnvironmentFailed(f"no Python 3.11 to 3.13 with venv found for {folder}; set PEER_PYTHON=/path/to/python")
    for python in pythons:
        made = f"torch {version} for the CPU, and {peer.has} ({peer.size} on disk)"
        print(f"making {folder} with {python}: {made}", file=sys.stderr)
        if not _runs(peer, [python, "-m", "venv", "--clear", peer.environment]):
            continue
        if _install_torch(peer, uv, version) and _install_lock(peer, uv):
            break
    else:
        raise EnvironmentFailed(
            f"torch {version} for the CPU or {peer.has} could not be installed; check the network, or configure pip to "
            f"look where the CPU build is{peer.otherwise}; details: {peer.log}"
        )
    if not _runs(peer, [peer.python, "-c", f"import torch, {peer.imports}"]):
        raise EnvironmentFailed(f"{folder} was made, but torch or {peer.imports} does not import; details: {peer.log}")
    stamp.write_text(content, encoding="utf-8")
    return peer.python


def _install_torch(peer: Peer, uv: str, version: str) -> bool:
    """Only torch itself: what it needs on a CPU is in the lock."""
    build = f"torch=={version}+cpu" if sys.platform == "linux" else f"torch=={version}"
    pip = [peer.python, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]
    backend = [uv, "pip", "install", "--python", peer.python, "--no-deps", "--torch-backend", "cpu"]
    return _runs(peer, [*pip, "--only-binary", ":all:", build]) or _runs(peer, [*backend, f"torch=={version}"])


def _install_lock(peer: Peer, uv: str) -> bool:
    return _runs(
        peer, [uv, "pip", "install", "--python", peer.python, "--no-deps", "--require-hashes", "-r", peer.lock]
    )


def _runs(peer: Peer, command: list) -> bool:
    """Run a command with its output in the peer's log; did it succeed?"""
    variables = os.environ | {"UV_NO_PROGRESS": "1", "UV_PYTHON_DOWNLOADS": "never"}
    variables.setdefault("UV_CACHE_DIR", str(ROOT / ".cache" / "uv"))
    command = [str(part) for part in command]
    peer.log.parent.mkdir(exist_ok=True)
    with open(peer.log, "a", encoding="utf-8") as log:
        print("$", *command, file=log, flush=True)
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables)
        except OSError as error:
            print(error, file=log)
            return False
    return done.returncode == 0


def _pythons() -> Iterator[str]:
    """Working interpreters, this one first, at most one of each minor version."""
    chosen = os.environ.get("PEER_PYTHON")
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", nargs="?", choices=list(PEERS), default="trl", help="which environment (%(default)s)")
    try:
        print(ensure(PEERS[parser.parse_args().peer]))
    except EnvironmentFailed as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
