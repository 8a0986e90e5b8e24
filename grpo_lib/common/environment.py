"""Caches inside the repository, quiet logs, and a description of machine and versions.

    from grpo_lib.common import environment
    environment.prepare()          # before JAX, transformers or matplotlib are imported
    environment.describe()         # environment.json of a run

Nothing here imports JAX, except `describe(devices=True)`, and `prepare` where JAX_PLATFORMS names Pathways.
"""

import ctypes
import functools
import importlib.metadata
import os
import platform
import re
import subprocess
import warnings
from pathlib import Path
from typing import Any

from grpo_lib.common.errors import CourseError

KERNEL_NAME = "grpo-course"

# Parameters of mallopt(3), from glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8

# The packages whose versions determine what a run computes.
PACKAGES = (
    "jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "qwix", "maxtext", "google-tunix",
    "vllm-tpu", "tpu-inference", "grain", "tensorflow-datasets", "transformers", "tokenizers", "safetensors",
    "numpy",
)  # fmt: skip

# Modules that emit FutureWarnings about grpcio on import; the locks choose its version.
NOISY_MODULES = ("google.auth.transport.grpc", "google.api_core._python_package_support")


def repo_root() -> Path:
    """Return the repository's folder.

    It is the one above this package, else the nearest above the working folder that has notebooks/ and recipes/,
    else the working folder itself.
    """
    for folder in (Path(__file__).resolve().parents[2], Path.cwd(), *Path.cwd().parents):
        if (folder / "recipes").is_dir() and (folder / "notebooks").is_dir():
            return folder
    return Path.cwd()


def default_variables() -> dict[str, str]:
    """Return the variables that keep every cache in the repo's ignored .cache, and the logs quiet.

    JAX_PLATFORMS is left alone, so that the same code finds a TPU where there is one.
    """
    cache = repo_root() / ".cache"
    variables = {
        "JAX_COMPILATION_CACHE_DIR": str(cache / "jax"),
        # The tiny model's programs compile in less than the default threshold of 1 s, and they are many.
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "HF_HOME": str(cache / "huggingface"),
        "TFDS_DATA_DIR": str(cache / "tensorflow_datasets"),
        "MPLCONFIGDIR": str(cache / "matplotlib"),
        "IPYTHONDIR": str(cache / "ipython"),
        "PYTHONWARNINGS": ",".join(f"ignore::FutureWarning:{module}" for module in NOISY_MODULES),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "GRPC_VERBOSITY": "ERROR",
        "TRANSFORMERS_VERBOSITY": "error",  # it warns at every start that PyTorch is absent, which is intended
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",  # it warns when a process forks after using its threads
    }
    # `hf auth login` saves its token outside the repository; moving HF_HOME must not hide it.
    token = Path.home() / ".cache" / "huggingface" / "token"
    if token.is_file():
        variables["HF_TOKEN_PATH"] = str(token)
    return variables


def prepare() -> None:
    """Set the default variables that are not set yet, create the cache folder, and make Pathways known to JAX.

    Raises CourseError where JAX_PLATFORMS names Pathways and its package is missing.
    """
    for name, value in default_variables().items():
        os.environ.setdefault(name, value)
    for module in NOISY_MODULES:  # PYTHONWARNINGS comes too late for this process
        warnings.filterwarnings("ignore", category=FutureWarning, module=re.escape(module) + "$")
    (repo_root() / ".cache").mkdir(exist_ok=True)
    _keep_freed_memory()
    if uses_pathways():
        _start_pathways()


def has_accelerator() -> bool:
    """True where JAX may find chips: a TPU's devices are there, or those of a Pathways job.  Does not import JAX."""
    return any(Path("/dev").glob("accel*")) or Path("/dev/vfio").exists() or uses_pathways()


def uses_pathways() -> bool:
    """True where JAX_PLATFORMS names `proxy`, as in a Pathways job: one process drives the devices of all hosts."""
    return "proxy" in os.environ.get("JAX_PLATFORMS", "").split(",")


@functools.cache  # once in a process
def _start_pathways() -> None:
    """Make the platform `proxy` known to JAX, before JAX first looks for devices.  It imports JAX."""
    try:
        import pathwaysutils
    except ImportError:
        raise CourseError(
            "JAX_PLATFORMS names proxy, which is Pathways, but pathwaysutils is not installed; make setup-tpu installs "
            "it, or set JAX_PLATFORMS to tpu,cpu"
        ) from None
    pathwaysutils.initialize()


def _keep_freed_memory() -> None:
    """On a Linux machine without an accelerator, let glibc keep freed memory for the next computation.

    By default it returns large blocks to the system at once, and XLA's CPU programs request them again at every call.
    Measured on eight steps of recipes/tiny-cpu.yaml: 0.8 million page faults and 2.5 s of system time without this,
    0.1 to 0.2 million and 1.1 to 1.5 s with it, at the same peak memory.
    """
    if platform.libc_ver()[0] != "glibc" or has_accelerator():
        return
    libc = ctypes.CDLL(None)
    for parameter, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**28), (M_ARENA_MAX, 1)):
        libc.mallopt(parameter, value)


def describe(devices: bool = True) -> dict[str, Any]:
    """Return what a reader needs to reproduce a number: versions, machine, devices, commit.

    No host, user, folder or secret is in it. `devices=False` does not import JAX, which takes seconds.
    """
    import psutil

    description = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "commit": _commit(),
    }
    if devices:
        import jax

        description["devices"] = [f"{device.platform}: {device.device_kind}" for device in jax.devices()]
        description["processes"] = jax.process_count()
    return description


def usable_cores() -> int:
    """Return the number of cores this process may use; in a container the machine can have more."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """Return the processor's model name, or the architecture if it is unknown."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the commit, with "+changes" if tracked files differ from it; None outside a git checkout."""
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if commit and changes else commit


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(repo_root()), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
