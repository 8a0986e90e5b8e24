"""A student who cheats: what earned marks, changed files or lived on before there was a boundary, and more of its kind.

Each attack is handed in as exercise 3.2.  The solution lies in a folder of the grader, and its path is known.
"""

import os
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from grpo_lib.common import boundary
from grpo_teach import grading, limited

EXERCISE = grading.teachers_exercises()["3.2"]
# Takes the solution out of the text of a notebook, and is the solution then.
SOLVED = """
def solved(text):
    import json
    [source] = [cell["source"] for cell in json.loads(text)["cells"] if cell["id"] == "ex-3-2"]
    space = {}
    exec("".join(source), space)
    return space["advantages"]
"""
READ = "\ndef advantages(rewards, G): return solved(take())(rewards, G)\n"
NO_HOOK = """
import os, posixpath
library = posixpath.dirname(os.__file__)
posixpath.realpath.__code__ = (lambda filename, *, strict=False: __import__("os").__file__).__code__
"""
# What `take` of each does to have the text of the solution at PATH; PID is the grader.
TAKES = {
    # These succeeded once.
    "the module's own lists": "import __main__; __main__.READS = __main__.REFUSED = (); return open(PATH).read()",
    "readline": """import readline as r; r.clear_history(); r.read_history_file(PATH)
    return "\\n".join(r.get_history_item(n) for n in range(1, 1 + r.get_current_history_length()))""",
    "a link": "import os; os.symlink(PATH, 'x.ipynb'); return open('x.ipynb').read()",
    "the grader's memory": """import re; memory = open("/proc/PID/mem", "rb", 0)
    for low, high in re.findall(r"(\\w+)-(\\w+) rw", open("/proc/PID/maps").read()):
        memory.seek(int(low, 16)); memory.read(int(high, 16) - int(low, 16))""",
    "the grader's environment": "return open('/proc/PID/environ').read()",
    # The same without the audit hook.
    "realpath replaced": "return open(PATH).read()",
    "realpath replaced, as root": "import os; os.setuid(0); return open(PATH).read()",
    "by the root of the grader": "return open('/proc/PID/root' + PATH).read()",
    "by its folder": "return open('/proc/PID/cwd/teaching/exercises/03_policy_update.ipynb').read()",
    "by its open files": "import os; return str([os.readlink(one) for one in os.scandir('/proc/PID/fd')])",
    "memory map": "import mmap; f = open(PATH, 'rb'); return mmap.mmap(f.fileno(), 0, access=1)[:].decode()",
    "linecache": "import linecache; return ''.join(linecache.getlines(PATH))",
    "a loader": "import importlib.machinery as m; return m.SourceFileLoader('x', PATH).get_data(PATH).decode()",
    "NumPy": "import numpy as np; return np.fromfile(PATH, dtype='uint8').tobytes().decode()",
    "fileinput": "import fileinput; return ''.join(fileinput.input(PATH))",
    "tokenize": "import tokenize; return tokenize.open(PATH).read()",
    "below open": "import _io; return _io.FileIO(PATH).readall().decode()",
    "a process below Python": """import _posixsubprocess as p, os; r, w = os.pipe(); failed, fails = os.pipe()
    files = -1, -1, -1, w, -1, -1, failed, fails
    ids = -1, None, None, None, -1
    p.fork_exec([b"cat", PATH.encode()], [b"/bin/cat"], True, (fails,), None, None, *files, 0, 0, *ids, None, 0)
    os.close(w); return os.fdopen(r).read()""",
    "a process": "import subprocess; return subprocess.check_output(['cat', PATH], text=True)",
    "the grader imported": "import grpo_teach.grading as g; return open(g.teachers_exercises()['3.2'].path).read()",
    "the network": "import urllib.request as u; return u.urlopen('http://127.0.0.1:80/', timeout=1).read().decode()",
    "objects in memory": "import gc; return next(o for o in gc.get_objects() if type(o) is dict and 'cells' in o)",
    "frames": """import sys; frame = sys._getframe()
    while frame.f_back: frame = frame.f_back
    return frame.f_globals["want"]""",
}
IN_FILES = """
import os
def write(text):
    for number in range(3, 64):
        try:
            os.write(number, text)
        except OSError:
            pass
"""
ZEROS = "\ndef advantages(rewards, G): return 0 * rewards\n"
ODD = """
class Lie:
    shape = (1,)
    dtype = "{dtype}"
    def tolist(self): return {values}
Lie.__module__ = "numpy"
def advantages(rewards, G): return Lie()
"""
# Whole functions that do no work.
LIES = {
    "an array that is equal to all": """
import numpy as np
class Lie(np.ndarray):
    __eq__ = lambda *_: True
    tolist = lambda *_: [[0.0]]
Lie.__module__ = "numpy"
def advantages(rewards, G): return rewards.view(Lie)
""",
    "a type of two gigabytes": ODD.format(dtype="U500000000", values="['']"),
    "a type that is none": ODD.format(dtype="O\\udcff", values="[{'x': 1}]"),
    "lines of its own": IN_FILES + "write(b'{\"value\": [0.0, 0.0]}\\n' * 100)" + ZEROS,
    "a million brackets": IN_FILES + "write(b'[' * 1_000_000 + b'\\n')" + ZEROS,
    "output without end": IN_FILES + "for _ in range(1000): write(b'x' * 65536)" + ZEROS,
    "patched JSON": "import json\njson.dumps = lambda _: '{\"value\": true}'" + ZEROS,
    "patched comparison": "import numpy as np\nnp.allclose = np.isclose = lambda *_, **__: True" + ZEROS,
    "an error without a text": 'import json\njson.dumps = lambda *_, **__: \'{"error": ""}\'' + ZEROS,
    "an error of spaces": 'import json\njson.dumps = lambda *_, **__: \'{"error": "\\\\u00a0\\\\u2003"}\'' + ZEROS,
    "lines of errors without a text": IN_FILES + 'write(b\'{"error": ""}\\n\' * 100)' + ZEROS,
    "an exception without a name": """
space = {}
code = "E = type('', (Exception,), {})\\ndef advantages(r, G): raise E"
exec(compile(code, "x", "exec"), space)
advantages = space["advantages"]
""",
    "NaN": "def advantages(rewards, G): return rewards * float('nan')",
    "a dictionary like an array": "def advantages(rewards, G): return {'array': [0.0], 'dtype': 'U99999999'}",
    "a deep list": "def advantages(rewards, G):\n    x = []\n    for _ in range(900): x = [x]\n    return x",
    "an error like a value": 'def advantages(rewards, G): raise ValueError(\'"}\\n{"value": [0.0]}\')',
    "killing": "import os, signal\ndef advantages(rewards, G): os.kill(os.getppid(), signal.SIGKILL)",
    "killing all": NO_HOOK + "import signal\ndef advantages(rewards, G): signal.pidfd_send_signal(os.pidfd_open(1), 9)",
    "a handler for the limit": """
import signal
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
def advantages(rewards, G):
    while True: pass
""",
}


@pytest.fixture
def student(isolation, request, monkeypatch):
    """Points of a function behind each boundary."""
    if isolation == boundary.ANOTHER_USER:
        _, packages = request.getfixturevalue("python_for_all")
        monkeypatch.setattr(limited, "PACKAGES", packages)
    monkeypatch.setattr(limited, "SECONDS", 2)  # a loop need not take ten
    return lambda code: grading.grade(EXERCISE, code, [7])[0].points


def taking(name: str, path: Path) -> str:
    """A hand-in with the solution by one of TAKES."""
    body = TAKES[name].replace("PATH", repr(str(path))).replace("PID", str(os.getpid()))
    no_hook = "" if list(TAKES).index(name) < 5 else NO_HOOK
    return f"{no_hook}{SOLVED}\ndef take():\n    {body}\n{READ}"


def test_the_solution_itself_has_full_marks(student) -> None:
    assert student(EXERCISE.code) == EXERCISE.points
    text = EXERCISE.path.read_text("utf-8")
    assert student(f"{SOLVED}\ndef take(): return {text!r}\n{READ}") == EXERCISE.points


@pytest.mark.parametrize("name", TAKES)
def test_the_solution_is_not_taken(student, tmp_path, name) -> None:
    path = tmp_path / "03.ipynb"
    path.write_bytes(EXERCISE.path.read_bytes())
    path.chmod(0o644)
    assert student(taking(name, path)) == 0
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("name", ["realpath replaced", "readline", "memory map", "a process below Python"])
def test_without_a_boundary_it_is_taken(no_boundary, monkeypatch, tmp_path, name) -> None:
    """The attacks are real: the audit hook alone does not stop them."""
    monkeypatch.setenv(boundary.OFF, "1")
    path = tmp_path / "03.ipynb"
    path.write_bytes(EXERCISE.path.read_bytes())
    assert grading.grade(EXERCISE, taking(name, path), [7])[0].points == EXERCISE.points


@pytest.mark.parametrize("name", LIES)
def test_a_lie_earns_nothing_and_the_grader_stays_small(student, name) -> None:
    before = psutil.Process().memory_info().rss
    assert student(LIES[name]) == 0
    assert psutil.Process().memory_info().rss - before < 2**28


def test_another_students_marks_stay_as_they_are(student, tmp_path) -> None:
    """A function that would write into the results, now and after its end."""
    results = tmp_path / "grades.csv"
    results.write_text("ada,2\n")
    results.chmod(0o666)
    write = f"open({str(results)!r}, 'w').write('eve,2')"
    daemon = (
        f"{NO_HOOK}\nimport os, time\ndef advantages(rewards, G):\n    if os.fork() == 0:\n        os.setsid()\n"
        f"        if os.fork() == 0:\n            time.sleep(1)\n            {write}\n            os._exit(0)\n"
    )
    assert student(daemon) == 0
    assert student(f"{NO_HOOK}\ndef advantages(rewards, G): {write}") == 0
    time.sleep(1.5)
    assert results.read_text() == "ada,2\n"


def test_memory_is_not_more_than_the_limit(student) -> None:
    code = "def advantages(rewards, G): return len(bytearray(2**31))"
    assert student(code) == 0
    [failed] = limited.run(code, [limited.Call("advantages", "", (np.zeros(2), 2))])
    assert failed.kind == "MemoryError"


# --- where there is no boundary ---


def commands(folder: Path) -> dict[str, list]:
    code = "problems={source: code}"
    return {
        "grade": ["grade", folder, "--lesson", 3],
        "leaderboard": ["leaderboard", folder, "--seed", 1],
        "evaluate": ["evaluate", "recipes/tiny-cpu.yaml", code],
        "train": ["train", "recipes/tiny-cpu.yaml", code, "--runs", folder],
    }


@pytest.mark.parametrize("name", ["grade", "leaderboard", "evaluate", "train"])
def test_a_command_refuses_foreign_code_without_a_boundary(grpo, no_boundary, tmp_path, name) -> None:
    (tmp_path / "ada").mkdir()
    done = grpo(*commands(tmp_path)[name])
    assert done.returncode == 2
    assert done.stderr.startswith("error: isolation: none for foreign code here (bubblewrap: it is not installed")
    assert "--no-isolation" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["ada"]


def test_it_grades_without_one_where_that_is_asked_for(grpo, no_boundary, tmp_path) -> None:
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "ada.ipynb").write_bytes(EXERCISE.path.read_bytes())
    done = grpo("grade", tmp_path / "class", "--lesson", 3, "--no-isolation")
    assert done.stdout.startswith("isolation: NONE (--no-isolation)")
    assert "ada: 24" in done.stdout


def test_own_code_needs_no_boundary(grpo, no_boundary) -> None:
    assert grpo("check", "3.2").returncode == 0
