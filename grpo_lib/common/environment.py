"""Caches inside the repository, quiet logs, and what of the machine must be known before JAX is imported.

    from grpo_lib.common import environment
    environment.prepare()          # before JAX, transformers or matplotlib are imported

Nothing here imports JAX, except `prepare` where JAX_PLATFORMS names Pathways.
"""

import contextlib
import ctypes
import functools
import gc
import os
import platform
import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from grpo_lib.common.errors import CourseError

KERNEL_NAME = "grpo-course"

# Parameters of mallopt(3), from glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -3, -4, -8
LARGEST_THRESHOLD = 2**25  # bytes; more M_MMAP_THRESHOLD cannot be
KEEP_ALL = -1  # of M_TRIM_THRESHOLD: nothing is given back

HANDOVER_SECONDS = 5.0  # in which a process that was killed lets the chips go

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


def cache_dir() -> Path:
    """Return the folder of all caches: the repository's ignored .cache; without a repository one in the home folder."""
    root = repo_root()
    if (root / "recipes").is_dir():
        return root / ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo-hands-on"


def default_variables() -> dict[str, str]:
    """Return the variables that keep every cache in `cache_dir`, and the logs quiet.

    JAX_PLATFORMS is left alone, so that the same code finds a TPU where there is one.
    """
    cache = cache_dir()
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
        "WANDB_SILENT": "true",
        "VLLM_NO_USAGE_STATS": "1",
        # tpu-inference 0.31.0 compiles its programs one after the other, and lets a request wait until each replica of
        # the sampler has one, or for 30 seconds.
        "NUM_PRECOMPILE_WORKERS": "8",
        "DP_SCHED_BATCH_PREFILL": "0",
        "DP_SCHED_ROUTING": "round_robin",
        "TOKENIZERS_PARALLELISM": "false",  # it warns when a process forks after using its threads
    }
    # JAX 0.11 works for all virtual devices of a process, and on the parts of each one's operations, with one pool of
    # threads.  With a thread a device all may wait in a collective for a device that waits for a thread, for ever.
    if found := re.search(r"host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")):
        variables["NPROC"] = str(max(2 * int(found[1]), os.cpu_count() or 1))  # the size of the pool
    # `hf auth login` saves its token outside the repository; moving HF_HOME must not hide it.
    token = Path.home() / ".cache" / "huggingface" / "token"
    if token.is_file():
        variables["HF_TOKEN_PATH"] = str(token)
    return variables


def prepare() -> None:
    """Set the default variables that are not set yet, create the cache folder, and make Pathways known to JAX.

    Raises CourseError where JAX_PLATFORMS names Pathways and its package is missing; and in a cell of a notebook, the
    first time, where another process holds the TPU.
    """
    for name, value in default_variables().items():
        os.environ.setdefault(name, value)
    for module in NOISY_MODULES:  # PYTHONWARNINGS comes too late for this process
        warnings.filterwarnings("ignore", category=FutureWarning, module=re.escape(module) + "$")
    cache_dir().mkdir(parents=True, exist_ok=True)
    _keep_freed_memory()
    if uses_pathways():
        _start_pathways()
    shell = notebook_shell()
    # In a cell: earlier a kernel imports what dev/tools/run_notebooks.py tells it to, while the last one still works.
    if shell and len(shell.user_ns.get("In", ())) > 1 and os.environ.get("JAX_PLATFORMS") != "cpu":
        _require_free_chips_once()


def notebook_shell() -> Any:
    """IPython's shell in a Jupyter kernel; None elsewhere, also in IPython's terminal, which cannot show a picture."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell if getattr(shell, "kernel", None) is not None else None


def has_accelerator() -> bool:
    """True where JAX may find chips: a TPU's devices are there, or those of a Pathways job.  Does not import JAX."""
    return any(Path("/dev").glob("accel*")) or Path("/dev/vfio").exists() or uses_pathways()


def chip_holders(devices: Path = Path("/dev"), processes: Path = Path("/proc")) -> dict[int, str]:
    """Number and command of each other process that has a TPU chip of this machine open.

    A chip belongs to one process; a run that was killed can leave one behind, and the next says "device busy".
    Processes of other users are not seen, but by root.
    """
    chips = {str(path) for path in [*devices.glob("accel[0-9]*"), *devices.glob("vfio/[0-9]*")]}
    holders: dict[int, str] = {}
    for opened in processes.glob("[0-9]*/fd/*") if chips else ():
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            number = int(opened.parts[-3])
            if os.readlink(opened) in chips and number != os.getpid():
                words = (opened.parents[1] / "cmdline").read_text(errors="replace").split("\0")
                holders[number] = " ".join(words).strip()[:120]
    return holders


def require_free_chips() -> None:
    """Raise CourseError where another process holds a TPU chip of this machine, and does not let it go soon."""
    deadline = time.monotonic() + HANDOVER_SECONDS
    while (holders := chip_holders()) and time.monotonic() < deadline:
        time.sleep(0.2)
    if holders:
        who = "; ".join(f"{number} ({command})" for number, command in holders.items())
        raise CourseError(
            f"the TPU is held by process {who}; wait until it has ended, or end it: kill {' '.join(map(str, holders))}"
        )


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


# Once in a process: later the chips are its own, and processes that it has forked hold them, too.
_require_free_chips_once = functools.cache(require_free_chips)


def _keep_freed_memory() -> None:
    """On a Linux machine without an accelerator, let glibc keep freed memory for the next computation.

    By default it returns large blocks to the system at once, and XLA's CPU programs request them again at every call.
    Measured on eight steps of recipes/tiny-cpu.yaml: 0.8 million page faults and 2.5 s of system time without this,
    0.1 to 0.2 million and 1.1 to 1.5 s with it, at the same peak memory.  The threshold is none:
    2**31 - 1 would be a limit of 2 GiB, which the update of a real model crosses.
    """
    if platform.libc_ver()[0] != "glibc" or has_accelerator():
        return
    libc = ctypes.CDLL(None)
    for parameter, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, KEEP_ALL), (M_TOP_PAD, 2**28), (M_ARENA_MAX, 1)):
        libc.mallopt(parameter, value)


def return_large_blocks() -> None:
    """Undo a part of `_keep_freed_memory`, for a large model: blocks of 32 MiB and more go back at once.

    XLA asks for all that a program needs as one block.  Kept, it fits the next program only if that needs no more, and
    nothing else lies in it by then: a step of Qwen2.5-0.5B would take up to twice the memory that is ever in use.
    """
    if platform.libc_ver()[0] != "glibc" or has_accelerator():
        return
    libc = ctypes.CDLL(None)
    for parameter, value in ((M_MMAP_THRESHOLD, LARGEST_THRESHOLD), (M_MMAP_MAX, 2**16), (M_TOP_PAD, 2**24)):
        libc.mallopt(parameter, value)


def release_freed_memory() -> None:
    """Between two phases of a run on such a machine, give the memory that the first has freed back to the system.

    What is kept for the next computation is of the sizes of the last ones; the next phase has others, and would take
    new memory beside it.
    """
    if platform.libc_ver()[0] != "glibc" or has_accelerator():
        return
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
