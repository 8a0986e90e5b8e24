"""`make class-check`: a machine as fast as the one of the committed notebooks will do; a slow one gets a remedy."""

import json
import subprocess
import sys

import class_check
import pytest


@pytest.mark.parametrize(("seconds", "ok"), [(0.5, True), (60, False)])
def test_a_step_gives_minutes_and_a_verdict(seconds, ok, capsys) -> None:
    status = class_check.main(["--json", "--step", str(seconds)])
    shown = json.loads(capsys.readouterr().out)
    assert shown["rows"][-1]["ok"] == ok  # the step's
    assert shown["ok"] == (status == 0)
    assert status == (not all(row["ok"] for row in shown["rows"]))
    there, taken = class_check.reference()
    assert shown["minutes"] == pytest.approx({name: each * seconds / there / 60 for name, each in taken.items()})


ON_WINDOWS = """
import argparse, json, os, pathlib, re, runpy, shutil, statistics, subprocess, sys, tempfile, typing
sys.modules["resource"] = None
del os.sysconf
sys.platform = "win32"
sys.path.insert(0, sys.argv.pop(1))
import class_check
class_check.windows_memory = lambda: 16.0
sys.exit(class_check.main())
"""


def test_windows_own_python_is_told_of_wsl(root) -> None:
    command = [sys.executable, "-c", ON_WINDOWS, str(root / "dev" / "tools")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == ""
    assert "wsl --install" in done.stdout and "16.0 GB of memory" in done.stdout
