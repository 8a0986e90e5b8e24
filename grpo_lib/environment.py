"""Where a process keeps its caches, and what machine and versions it runs on.

    from grpo_lib import environment
    environment.prepare()          # before JAX, transformers or matplotlib are imported
    environment.describe()         # what environment.json of a run holds

Nothing here imports JAX, except `describe` when it is asked for the devices.
"""

import ctypes
import importlib.metadata
import os
import platform
import re
import subprocess
import warnings
from pathlib import Path
from typing import Any

KERNEL_NAME = "grpo-course"

# Parameters of mallopt(3), from glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8

# The packages whose versions decide what a run computes.
PACKAGES = (
    "jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "qwix", "maxtext", "google-tunix",
    "vllm-tpu", "tpu-inference", "grain", "tensorflow-datasets", "transformers", "tokenizers", "safetensors",
    "numpy",
)  # fmt: skip

# Modules that tell every importer which grpcio they will ask for one day; the locks decide that here.
TALKATIVE = ("google.auth.transport.grpc", "google.api_core._python_package_support")


def repo_root() -> Path:
    """Return the folder of the repo.

    That is the one above this package, else the nearest above the working folder that holds notebooks/ and
    recipes/, else the working folder itself.
    """
    for folder in (Path(__file__).resolve().parents[1], Path.cwd(), *Path.cwd().parents):
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
        "PYTHONWARNINGS": ",".join(f"ignore::FutureWarning:{module}" for module in TALKATIVE),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "GRPC_VERBOSITY": "ERROR",
        "TRANSFORMERS_VERBOSITY": "error",  # it says at every start that PyTorch is absent, as it is meant to be
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",  # it warns when a process forks after using its threads
    }
    # A login made with `hf auth login` stands outside the repo; moving HF_HOME must not hide it.
    token = Path.home() / ".cache" / "huggingface" / "token"
    if token.is_file():
        variables["HF_TOKEN_PATH"] = str(token)
    return variables


def prepare() -> None:
    """Set the default variables that the environment does not set itself, and make the cache folder."""
    for name, value in default_variables().items():
        os.environ.setdefault(name, value)
    for module in TALKATIVE:  # PYTHONWARNINGS comes too late for this process
        warnings.filterwarnings("ignore", category=FutureWarning, module=re.escape(module) + "$")
    (repo_root() / ".cache").mkdir(exist_ok=True)
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    """On a Linux machine without an accelerator, let glibc keep freed memory for the next computation.

    By default it returns large blocks to the system at once, and XLA's CPU programs ask for the same blocks at every
    call, page by page.  With an accelerator the host's memory is better left to others.
    """
    if platform.libc_ver()[0] != "glibc" or any(Path("/dev").glob("accel*")) or Path("/dev/vfio").exists():
        return
    libc = ctypes.CDLL(None)
    for parameter, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**28), (M_ARENA_MAX, 1)):
        libc.mallopt(parameter, value)


def describe(devices: bool = True) -> dict[str, Any]:
    """Return what a reader needs to reproduce a number: versions, machine, devices, commit.

    It names no host, user, folder or secret. `devices=False` leaves JAX alone, which takes seconds to import.
    """
    description = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_gib": _memory_gib(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "commit": _commit(),
    }
    if devices:
        import jax

        description["devices"] = [f"{device.platform}: {device.device_kind}" for device in jax.devices()]
        description["processes"] = jax.process_count()
    return description


def usable_cores() -> int:
    """Return how many cores this process may use, which in a container can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """Return the processor's model name, or the architecture where the system does not say."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None


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
