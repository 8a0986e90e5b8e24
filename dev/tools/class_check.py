"""Say whether a machine will do for a class: `make class-check`, on each student's machine the day before.

    python dev/tools/class_check.py            one page; exit code 0: it will do, 1: it will not
    python dev/tools/class_check.py --json

It needs nothing but Python.  Memory, disk and cores come first; then it makes .venv where there is none, and trains the
tiny model for a few steps in a temporary folder.  A notebook's minutes are the seconds that its committed outputs took
(`make notebooks` keeps them), times the ratio of a step here to a step of that run (notebook 04 prints it).
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
STAMP = ROOT / ".venv" / ".complete"  # dev/tools/setup.sh writes it last
MEMORY, FREE = 6.0, 4.0  # GB in all, and not in use
DISK, INSTALLED = 4.0, 2.0  # GB for the course, and for .venv, a part of it
CORES, LONGEST = 2, 15.0  # LONGEST: minutes that a class can wait for notebook 04, which trains
ELSEWHERE = "ask the teacher for another machine; exercises alone need a browser and Colab (exercises/colab)"
WINDOWS = """\
This is Windows' own Python: the course needs Linux or macOS, and runs in WSL 2, the Linux of Windows 10 and 11.

  wsl --install -d Ubuntu-24.04      in PowerShell; restart, and open Ubuntu
  sudo apt update && sudo apt install -y make git python3-venv
  make class-check                   in the course's folder, copied into Ubuntu's home folder

{total:.1f} GB of memory and {disk:.1f} GB of disk are here.
WSL gives Linux half of the memory; the course takes {needs:g} GB."""


class Row(NamedTuple):
    """A line of the page: what there is, what it takes, and what to do where that is too little."""

    name: str
    value: str
    needs: str
    ok: bool
    fix: str


def memory() -> tuple[float, float]:
    """GB in all, and free, of the machine or of the container that this runs in."""
    total = free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # macOS does not say what is free
    info = Path("/proc/meminfo")
    if info.exists():
        free = _number(r"MemAvailable:\s+(\d+)", info) * 1024
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if limit.exists() and limit.read_text().strip() != "max":
        used = _number(r"(\d+)", group / "memory.current") - _number(r"inactive_file (\d+)", group / "memory.stat")
        total = min(total, _number(r"(\d+)", limit))
        free = min(free, total - used)
    return total / 1e9, free / 1e9


def windows_memory() -> float:
    """GB in all, as Windows says it."""
    import ctypes

    class Status(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ulong), ("load", ctypes.c_ulong), ("total", ctypes.c_ulonglong)]
        _fields_ += [(name, ctypes.c_ulonglong) for name in ("free", "a", "b", "c", "d", "e")]

    status = Status(length=ctypes.sizeof(Status))
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined]
    return status.total / 1e9


def on_windows(as_json: bool) -> int:
    """Say what to do on Windows' own Python."""
    total, disk = windows_memory(), shutil.disk_usage(ROOT).free / 1e9
    text = WINDOWS.format(total=total, disk=disk, needs=MEMORY)
    print(json.dumps({"ok": False, "windows": text}) if as_json else text)
    return 1


def machine() -> list[Row]:
    """What can be said before anything is installed."""
    total, free = memory()
    disk = shutil.disk_usage(ROOT).free / 1e9
    needed = DISK - INSTALLED if STAMP.exists() else DISK  # what .venv takes is taken
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    version = sys.version.split()[0]
    supported = sys.version_info[:2] in ((3, 12), (3, 13))
    python = Row("Python", version, "3.12 or 3.13", supported, "install one")
    return [
        python,
        Row("cores", str(cores), str(CORES), cores >= CORES, ELSEWHERE),
        gigabytes("memory", total, MEMORY, ELSEWHERE),
        gigabytes("free memory", free, FREE, "close programs, and notebooks' kernels"),
        gigabytes("free disk", disk, needed, "delete files, or use a larger disk"),
    ]


def gigabytes(name: str, value: float, least: float, advice: str) -> Row:
    return Row(name, f"{value:.1f} GB", f"{least:g} GB", value >= least, advice)


def reference() -> tuple[float, dict[str, float]]:
    """Seconds of rollout and update of a step, and of each notebook, in the run whose outputs are committed."""
    paths = [*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("notebooks/further/*.ipynb")]
    notebooks = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(paths)}
    [cell] = [cell for cell in notebooks["04_grpo_training"]["cells"] if cell["id"] == "train-time"]
    parts = dict(line.split() for line in cell["outputs"][0]["text"])
    seconds = {name: notebook["metadata"]["grpo"]["seconds"] for name, notebook in notebooks.items()}
    return float(parts["seconds_rollout"]) + float(parts["seconds_update"]), seconds


def measure() -> dict[str, float]:
    """Train a few steps: seconds of rollout and update of the first step and of the others, and the peak of memory.

    Exits where .venv cannot be made, or the training fails.
    """
    if not STAMP.exists() and subprocess.run([ROOT / "dev" / "tools" / "setup.sh"], stdout=sys.stderr).returncode:
        sys.exit(1)
    with tempfile.TemporaryDirectory() as folder:
        # A compilation cache of its own: the second check on a machine measures what the first one did.
        variables = os.environ | {"JAX_COMPILATION_CACHE_DIR": f"{folder}/jax", "JAX_PLATFORMS": "cpu"}
        # Few problems, and steps that compile nothing after the first one.
        command = [
            ROOT / ".venv" / "bin" / "grpo", "train", "recipes/tiny-cpu.yaml", "--runs", folder, "problems.test=16",
            "training.steps=6", "training.validate_every=0", "training.checkpoint_every=6",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"error: grpo train failed: {''.join(done.stderr.strip().splitlines()[-1:])}")
        rows = map(json.loads, (Path(folder) / "tiny-cpu" / "metrics.jsonl").read_text("utf-8").splitlines())
        first, *steps = [row["seconds_rollout"] + row["seconds_update"] for row in rows]
    import resource  # Windows has none, and this page is for Windows, too

    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"step": statistics.median(steps), "first_step": first, "peak_gb": peak / 1e9}


def speed(measured: dict[str, float]) -> tuple[Row, dict[str, float]]:
    """The step's line, and the minutes of each notebook here."""
    here = measured["step"]
    there, seconds = reference()
    most = there * LONGEST * 60 / seconds["04_grpo_training"]
    row = Row("a GRPO step", f"{here:.2f} s", f"{most:.1f} s or less", here <= most, ELSEWHERE)
    return row, {name: each * here / there / 60 for name, each in seconds.items()}


def page(rows: list[Row], minutes: dict[str, float], measured: dict[str, float]) -> str:
    """What is printed without --json, but for the last line."""
    lines = []
    for row in rows:
        verdict = "OK" if row.ok else f"too little: {row.fix}"
        lines.append(f"{row.name:<13}{row.value:<10}{row.needs:<16}{verdict}")
    if minutes:
        lines += ["", "Minutes that a notebook runs here, about (reading takes longer):"]
        lines += [f"  {name:<26}{each:5.1f}" for name, each in [*minutes.items(), ("all", sum(minutes.values()))]]
    if "peak_gb" in measured:
        lines += [
            "",
            "The first step, which compiles: {first_step:.0f} s. Memory: {peak_gb:.1f} GB.".format(**measured),
        ]
    return "\n".join([f"{'':<13}{'here':<10}needs", *lines, ""])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="dev/tools/class_check.py", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--step", type=float, metavar="SECONDS", help="of a step, which is not measured then")
    options = parser.parse_args(arguments)
    if sys.platform == "win32":
        return on_windows(options.json)
    if subprocess.run([ROOT / "dev" / "tools" / "check-environment.sh", ".venv"]).returncode:
        return 1  # it has said why
    rows = machine()
    minutes: dict[str, float] = {}
    measured: dict[str, float] = {"step": options.step} if options.step else {}
    if options.step or all(row.ok for row in rows):  # a machine that is too small is not made to install 2 GB
        measured = measured or measure()
        row, minutes = speed(measured)
        rows.append(row)
    good = all(row.ok for row in rows)
    result = {"ok": good, "rows": [row._asdict() for row in rows], "minutes": minutes, "measured": measured}
    if options.json:
        print(json.dumps(result))
    else:
        print(page(rows, minutes, measured))
        print("It will do." if good else "It will not do.")
    return 0 if good else 1


def _number(pattern: str, file: Path) -> int:
    return int(re.findall(pattern, file.read_text())[0])


if __name__ == "__main__":
    sys.exit(main())
