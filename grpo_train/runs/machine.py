"""What a reader needs to reproduce a number: versions, machine, devices, commit.

machine.describe()             # environment.json of a run
"""

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_lib.common import environment

# The packages whose versions determine what a run computes.
PACKAGES = (
    "jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "qwix", "maxtext", "google-tunix",
    "vllm-tpu", "tpu-inference", "grain", "tensorflow-datasets", "transformers", "tokenizers", "safetensors",
    "numpy",
)  # fmt: skip


def describe(devices: bool = True) -> dict[str, Any]:
    """Return what a reader needs to reproduce a number: versions, machine, devices, commit.

    No host, user, folder or secret is in it. `devices=False` does not import JAX, which takes seconds.
    """
    import psutil

    installed = {re.sub(r"[-_.]+", "-", each.name).lower(): each.version for each in importlib.metadata.distributions()}
    description = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "packages": {name: installed[name] for name in PACKAGES if name in installed},
        "commit": _commit(),
    }
    if devices:
        import jax

        description["devices"] = [f"{device.platform}: {device.device_kind}" for device in jax.devices()]
        description["processes"] = jax.process_count()
    return description


def free_memory(cgroups: Path = Path("/sys/fs/cgroup"), of_process: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes that programs can still have: what the system calls available, or less where a container, a batch system or
    systemd sets a limit.  Swap does not count.  None where it is not known.
    """
    import psutil

    try:
        free = psutil.virtual_memory().available
        groups = of_process.read_text(encoding="utf-8") if of_process.exists() else ""
    except (OSError, RuntimeError):
        return None
    return min([free, *_free_in_groups(cgroups, groups)])


def _free_in_groups(cgroups: Path, groups: str) -> Iterator[int]:
    """What each limit of Linux's control groups leaves, of those that a process is in: its own and all above it.

    Args:
      groups: lines as in /proc/self/cgroup: 0::/path of version 2, 4:memory:/path of version 1.
    """
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = root / path.strip("/")  # it is not there in a container, which sees its own group as the root
        for folder in [own, *own.parents]:
            if folder.is_relative_to(root) and (left := _free_in(folder, *names)) is not None:
                yield left


def _free_in(folder: Path, limit_name: str, used_name: str, cached_name: str) -> int | None:
    """Bytes below the limit of one control group, with what is cached of files; None without a limit."""
    try:
        limit = int((folder / limit_name).read_text())
        used = int((folder / used_name).read_text())
        cached = re.search(rf"^{cached_name} (\d+)", (folder / "memory.stat").read_text(), re.M)
    except (OSError, ValueError):  # no such group, or "max"
        return None
    return max(0, limit - used + (int(cached[1]) if cached else 0))


def operating_system() -> str:
    """Its name, from os-release where there is one, and the version of its kernel."""
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:  # not Linux
        return f"{platform.system()} {platform.release()}"
    return f"{name}, kernel {platform.release()}"


def usable_cores() -> int:
    """Return the number of cores this process may use; in a container the machine can have more."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    """Return the processor's model name, or the architecture if it is unknown."""
    file = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)", file.read_text(errors="replace"), re.M) if file.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the commit, with "+changes" if tracked files differ from it; None outside a git checkout."""
    command = [
        "git", "-C", str(environment.repo_root()), "describe", "--always", "--abbrev=40", "--exclude=*",
        "--dirty=+changes",
    ]  # fmt: skip
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
