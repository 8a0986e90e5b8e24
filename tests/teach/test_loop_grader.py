"""The grader of assignment A's training loop: what a student's three functions cannot do.

The functions need JAX, so each case starts a process that takes seconds.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from grpo_lib.common import boundary
from grpo_lib.common.errors import CourseError

# What a student's cell tries; SECRET is in a file that everybody may read, PID the grader.
TAKES = """
import subprocess
said = []
for take in (
    lambda: open(PATH).read(),
    lambda: open("/proc/PID/root" + PATH).read(),
    lambda: open("/proc/PID/mem", "rb").read(1),
    lambda: open("/proc/PID/environ").read(),
    lambda: subprocess.check_output(["cat", PATH], text=True),
):
    try: said.append(str(take()))
    except Exception as error: said.append("Error")
raise ValueError(str(said))
"""
ALL = "\ngroup_advantages = policy_loss = update = lambda *_: 0.0\n"
FORGED = {
    "values of its own": (
        "import os, json\n"
        "for n in range(3, 64):\n"
        "    try: os.write(n, json.dumps(dict.fromkeys(NAMES, [[0.0]])).encode())\n"
        "    except OSError: pass\n"
        "os._exit(0)"
    ),
    "the values of the grader": (
        "import sys\nfor name, module in list(sys.modules.items()):\n"
        "    if hasattr(module, 'values'): module.values = lambda *_: dict.fromkeys(NAMES, [])"
    ),
    "nothing": "import os; os._exit(0)",
    "no JSON": (
        "import os\nfor n in range(3, 64):\n    try: os.write(n, b'[' * 9999)\n    except OSError: pass\nos._exit(0)"
    ),
    "exit": "raise SystemExit(0)",
}
NAMES = ["group_advantages", "policy_loss", "update"]


@pytest.fixture(scope="module")
def grader():
    path = Path(__file__).parents[2] / "teaching" / "assignment-a" / "grade_loop.py"
    spec = importlib.util.spec_from_file_location("grade_loop", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def behind(grader, isolation):
    """The grader behind each boundary that can read JAX."""
    if isolation == boundary.ANOTHER_USER:
        asked = json.dumps([str(grader.PACKAGES / "jax"), str(grader.LIBRARY), str(grader.MODEL)]).encode()
        limits = boundary.Limits(20, 2**30, 2**20)
        ended = boundary.run(boundary._PROBE, asked, limits, boundary.Found(isolation))
        if len(json.loads(ended.output)[1]) < 3:
            pytest.skip("isolation: another user: this environment is in a private folder")
    return grader


CASES = {"group_advantages": [[[1.0, 0.0], 2]]}


@pytest.mark.slow
def test_the_functions_read_nothing_of_the_grader(behind, tmp_path) -> None:
    secret = tmp_path / "10.py"
    secret.write_text("the SECRET")
    secret.chmod(0o644)
    take = TAKES.replace("PATH", repr(str(secret))).replace("PID", str(os.getpid()))
    said = behind.values(take, 60, CASES)["group_advantages"]
    assert said == "ValueError: " + str(["Error"] * 5)


@pytest.mark.slow
@pytest.mark.long(minutes=2)
@pytest.mark.parametrize("what", FORGED)
def test_a_forged_result_earns_nothing(behind, monkeypatch, what) -> None:
    drawn = {"group_advantages": [[[1.0, 0.0], 2]], "policy_loss": [], "update": []}
    right = {"group_advantages": [[0.7, -0.7]], "policy_loss": [0.1], "update": [[1.0]]}
    monkeypatch.setattr(behind, "wanted", lambda *_: (drawn, right))
    missed = behind.wrong_values(f"NAMES = {NAMES}\n{ALL}{FORGED[what]}", 7, 60)
    assert all(missed.values())


@pytest.mark.slow
def test_nothing_is_written_and_no_daemon_lives_on(behind, tmp_path) -> None:
    marks = tmp_path / "class-loop.csv"
    marks.write_text("ada,4\n")
    marks.chmod(0o666)
    tmp_path.chmod(0o777)
    write = f"open({str(marks)!r}, 'w').write('eve,4')"
    code = f"""import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(2)
        {write}
        os.execvp("sleep", ["sleep", "27.18"])
    os._exit(0)
try:
    {write}
except OSError:
    pass
{ALL}"""
    behind.values(code, 60, CASES)
    time.sleep(3)
    assert marks.read_text() == "ada,4\n"
    assert [one for one in psutil.process_iter(["cmdline"]) if "27.18" in (one.info["cmdline"] or [])] == []


@pytest.mark.slow
def test_the_student_reads_no_seed_and_no_expected_value(behind, monkeypatch) -> None:
    """All that a student's process can see of itself and of the grader: files, command lines, variables, modules."""
    code = """import glob, sys
seen = [repr(vars(module)) for name, module in sys.modules.items() if name in ("__main__", "train_loop")]
for path in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ") + glob.glob("*"):
    try: seen.append(open(path, errors="replace").read())
    except OSError: pass
frame = sys._getframe()
while frame:
    seen.append(repr(frame.f_locals))
    frame = frame.f_back
secrets = "7654" + "321", "0.123" + "456"
raise ValueError("FOUND" if any(secret in text for text in seen for secret in secrets) else "none")
"""
    drawn, wanted = {"group_advantages": [[[1.0, 0.0], 2]]}, {"group_advantages": [[0.123456]]}
    monkeypatch.setattr(behind, "wanted", lambda *_: (drawn, wanted))
    assert behind.wrong_values(code, 7654321, 60) == {"group_advantages": "ValueError: none"}
    assert "ValueError: none" in behind.learns(code, 7654321, 60)


def test_only_weights_of_the_right_size_are_taken(grader) -> None:
    base = {"b": np.zeros((2, 3)), "a": np.zeros(2)}
    written = grader.WEIGHTS + np.arange(8, dtype=np.float32).tobytes()
    found = grader.trained(written, base)
    assert found["a"].tolist() == [0, 1]
    assert found["b"].tolist() == [[2, 3, 4], [5, 6, 7]]
    for bad in (b"", b"x", written[:-1], written + b"1234", b"[" * 100_000, b'{"error": "mine"}', b"[]"):
        with pytest.raises(CourseError):
            grader.trained(bad, base)


def test_without_a_boundary_the_command_refuses(root, tmp_path) -> None:
    (tmp_path / "class").mkdir()
    program = root / "teaching" / "assignment-a" / "grade_loop.py"
    code = f"""import runpy, sys
from grpo_lib.common import boundary
boundary._missing = lambda kind: "it is not installed"
sys.argv = ["grade_loop", {str(tmp_path / "class")!r}, "--seed", "7"]
runpy.run_path({str(program)!r}, run_name="__main__")"""
    variables = {name: value for name, value in os.environ.items() if name != boundary.OFF}
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=variables, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: isolation: none for foreign code here")
    assert [path.name for path in tmp_path.iterdir()] == ["class"]
