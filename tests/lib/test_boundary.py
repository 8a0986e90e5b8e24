"""The boundary around foreign code: what a program behind it sees, changes and leaves, with no audit hook to help."""

import json
import os
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from grpo_lib.common import boundary
from grpo_lib.common.boundary import ANOTHER_USER, BUBBLEWRAP, NONE, Found, Limits
from grpo_lib.common.errors import CourseError

LIMITS = Limits(seconds=2, memory=2**29, output=2**16, wait=3)
TRY = """
def attempt(function, *arguments):
    try:
        return repr(function(*arguments))
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
"""


def said(kind: str, program: str, given: bytes = b"") -> str:
    return boundary.run(TRY + program, given, LIMITS, Found(kind)).output.decode()


def everything(folder: Path) -> set[str]:
    return {str(path) for path in folder.iterdir()}


# --- what is read ---

READS = {
    "open": "open({path!r}).read()",
    "readline": "__import__('readline').read_history_file({path!r}) or __import__('readline').get_history_item(1)",
    "relative": "open('/proc/self/root' + {path!r}).read()",
    "another process's root": "open('/proc/{pid}/root' + {path!r}).read()",
    "environment": "open('/proc/{pid}/environ').read()",
    "memory": "open('/proc/{pid}/mem', 'rb').seek(4096) or open('/proc/{pid}/maps').read(9)",
    "open files": "__import__('os').listdir('/proc/{pid}/fd')",
    "folder": "__import__('os').listdir({folder!r})",
    "link": "__import__('os').symlink({path!r}, 'link') or open('link').read()",
    "hard link": "__import__('os').link({path!r}, 'hard') or open('hard').read()",
    "the grader's repository": "open({repository!r}).read()",
    "shadow": "open('/etc/shadow').read()",
}


@pytest.mark.parametrize("what", READS)
def test_nothing_of_the_grader_is_read(isolation, tmp_path, what) -> None:
    secret = tmp_path / "solutions.txt"
    secret.write_text("the SECRET\n")
    repository = tmp_path / "teaching"
    repository.mkdir(mode=0o700)
    (repository / "answers.py").write_text("the SECRET\n")
    places = {
        "path": str(secret),
        "folder": str(tmp_path),
        "pid": os.getpid(),
        "repository": f"{repository}/answers.py",
    }
    found = said(isolation, f"print(attempt(lambda: {READS[what].format(**places)}))")
    assert "Error" in found, found
    assert "SECRET" not in found


def test_bubblewrap_shows_no_home_no_repository_and_no_processes(isolation, root) -> None:
    if isolation != BUBBLEWRAP:
        pytest.skip("isolation: only bubblewrap has a root of its own")
    program = f"""
import os
folders = ["/proc", "/var", "/mnt", "/sys", "/run", "/srv", {str(root)!r}]
print([folder for folder in folders if os.path.isdir(folder) and os.listdir(folder) not in ([], [".venv"])])
print(sorted(os.listdir("/dev")), os.getpid() < 5)
"""
    assert said(isolation, program) == "[]\n['null', 'urandom'] True\n"


# --- what is changed ---

WRITES = {
    "a file of the grader": "open({path!r}, 'a').write('x')",
    "beside it": "open({folder!r} + '/new', 'w').write('x')",
    "removed": "__import__('os').remove({path!r})",
    "replaced": "__import__('os').rename('own', {path!r})",
    "rights": "__import__('os').chmod({path!r}, 0o777)",
    "the interpreter": "open(__import__('sys').executable, 'r+b').write(b'x')",
    "the library": "open(__import__('os').__file__, 'a').write('x')",
    "the root": "open('/new', 'w').write('x')",
    "root again": "__import__('os').setuid(0)",
    "a mount": "__import__('ctypes').CDLL(None, use_errno=True).mount(b'x', b'/tmp', b'tmpfs', 0, 0) and 1 / 0",
    "signals": "__import__('os').kill({pid}, 9)",
    "signals to all": "__import__('os').killpg({pid}, 9)",
}


@pytest.mark.parametrize("what", WRITES)
def test_nothing_of_the_grader_is_changed(isolation, tmp_path, what) -> None:
    kept = tmp_path / "grades.csv"
    kept.write_text("ada,2\n")
    kept.chmod(0o644)
    places = {"path": str(kept), "folder": str(tmp_path), "pid": os.getpid()}
    found = said(isolation, f"open('own', 'w').close()\nprint(attempt(lambda: {WRITES[what].format(**places)}))")
    assert "Error" in found, found
    assert everything(tmp_path) == {str(kept)}
    assert kept.read_text() == "ada,2\n"
    assert kept.stat().st_mode & 0o777 == 0o644


STARTS = {
    "fork": "import os; print('child' if os.fork() == 0 else 'parent')",
    "a daemon": "import os\nos.fork() or os.setsid() and os.fork() or os.execvp('sleep', ['sleep', '31.4'])",
    "a program": "import subprocess; subprocess.Popen(['sleep', '31.4'])",
    "a program, below Python": "import os; os.posix_spawnp('sleep', ['sleep', '31.4'], {})",
    "a thread": "import threading; threading.Thread(target=print, args=['child']).start()",
    "higher limits": "import resource; resource.setrlimit(resource.RLIMIT_NPROC, (99, 99)); print('child')",
}


@pytest.mark.parametrize("what", STARTS)
def test_no_process_is_started_and_none_lives_on(isolation, what) -> None:
    assert "child" not in said(isolation, STARTS[what])
    assert [each for each in psutil.process_iter(["cmdline"]) if "31.4" in (each.info["cmdline"] or [])] == []


def test_the_network_is_not_there_behind_bubblewrap(isolation) -> None:
    if isolation != BUBBLEWRAP:
        pytest.skip("isolation: only bubblewrap cuts the network")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = said(isolation, f"import socket; print(attempt(socket.create_connection, ('127.0.0.1', {port}), 1))")
    assert "Error" in found


def test_sockets_with_abstract_names_are_not_reached_behind_bubblewrap(isolation) -> None:
    if isolation != BUBBLEWRAP:
        pytest.skip("isolation: only bubblewrap cuts the network")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0grpo-test-of-a-name")
        server.listen()
        program = "import socket; print(attempt(socket.socket(1).connect, '\\0grpo-test-of-a-name'))"
        assert "ConnectionRefused" in said(isolation, program)


# --- what is used up ---


@pytest.mark.parametrize("text", ["while True: pass", "import signal\nsignal.signal(24, signal.SIG_IGN)\nwhile 1: 1"])
def test_time_ends(isolation, text) -> None:
    ended = boundary.run(text, b"", Limits(1, 2**29, 2**16, wait=30), Found(isolation))
    assert ended.code not in (0, None)
    assert ended.out_of_time == ("signal" not in text)


def test_sleep_ends_by_the_clock(isolation) -> None:
    started = time.monotonic()
    assert boundary.run("import time; time.sleep(60)", b"", Limits(1, 2**29, 2**16, 1), Found(isolation)).code is None
    assert time.monotonic() - started < 20


def test_memory_ends(isolation) -> None:
    assert "MemoryError" in said(isolation, "print(attempt(bytearray, 2**30))")


TMPFS = """
import ctypes, os
system = ctypes.CDLL(None, use_errno=True)
print(0, flush=True)
user = os.getuid()
system.unshare(0x10000000 | 0x00020000)  # a user and a mount namespace
for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {user} 1")):
    open(f"/proc/self/{name}", "w").write(text)
assert system.mount(b"x", b"/tmp", b"tmpfs", 0, None) == 0
for number in range(20_000):
    open(f"/tmp/{number}", "wb").write(bytes(60_000))
    print(number, flush=True)
"""
SEGMENTS = """
import ctypes
system = ctypes.CDLL(None, use_errno=True)
system.shmat.restype = ctypes.c_void_p
for number in range(20):
    address = system.shmat(system.shmget(0, 2**26, 0o1600), None, 0)
    ctypes.memset(address, 1, 2**26)
    system.shmdt(ctypes.c_void_p(address))
    print(number * 1000, flush=True)
"""


@pytest.mark.parametrize("program", [TMPFS, SEGMENTS], ids=["a file system of its own", "System V's segments"])
def test_memory_that_no_process_has_is_counted_in_a_control_group(isolation, program) -> None:
    with boundary.control_group(2**30) as group:
        if group is None:
            pytest.skip("isolation: this user may make no control group")
    last = int(said(isolation, program).split()[-1])
    assert last * 60_000 < LIMITS.memory + boundary.FOLDER


def test_no_shared_memory_is_left(isolation) -> None:
    said(isolation, SEGMENTS.replace("20", "3").replace("2**26", "12345678"))
    assert "12345678" not in Path("/proc/sysvipc/shm").read_text()


def test_output_ends(isolation) -> None:
    ended = boundary.run("while True: print('x' * 1000)", b"", LIMITS, Found(isolation))
    assert len(ended.output) == LIMITS.output


def test_the_disk_is_not_filled_and_nothing_is_left(isolation) -> None:
    """2,000 files, and folders deeper than Python's own recursion."""
    program = """
import os
written = 0
try:
    for number in range(2000):
        with open(f"/tmp/file-{number}-of-the-boundary", "wb") as file:
            written += file.write(bytes(60_000))
except OSError:
    pass
for _ in range(1500):
    os.mkdir("d")
    os.chdir("d")
print(written)
"""
    found = int(said(isolation, program))
    assert isolation == ANOTHER_USER or found < boundary.FOLDER
    left = [path for path in Path("/tmp").iterdir() if path.name.endswith("-of-the-boundary")]
    assert left == []


def test_each_program_has_a_place_of_its_own(isolation) -> None:
    """What one leaves, the next does not find, also at the same time."""
    program = "import os, time; print(sorted(os.listdir('.'))); open('note', 'w').close(); time.sleep(0.5)"
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: said(isolation, program), range(3)))
    assert found == ["[]\n"] * 3


def test_nothing_of_the_environment_comes_along(isolation, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert "hf_secret" not in said(isolation, "import os; print(dict(os.environ), os.getcwd())")


def test_no_open_file_comes_along(isolation, tmp_path) -> None:
    with (tmp_path / "file").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        program = "import os; print([n for n in range(3, 64) if 'OSError' not in attempt(os.fstat, n)])"
        assert said(isolation, program) == "[]\n"


def test_what_is_given_is_read(isolation) -> None:
    assert said(isolation, "import json, sys; print(json.load(sys.stdin)['x'] * 2)", b'{"x": 4}') == "8\n"


# --- where there is none ---


def test_foreign_code_is_refused_where_there_is_no_boundary(no_boundary) -> None:
    with pytest.raises(CourseError, match=r"bubblewrap: it is not installed; another user: only root .*--no-isolation"):
        boundary.require()
    with pytest.raises(CourseError, match="isolation: none"):
        boundary.in_use()


def test_it_runs_without_one_where_that_is_asked_for(no_boundary) -> None:
    assert boundary.require(off=True).startswith("isolation: NONE")
    assert boundary.in_use().kind == NONE
    assert said(NONE, "print(6)") == "6\n"


def test_a_boundary_that_does_not_start_is_none_and_says_why(monkeypatch, tmp_path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(boundary, "BWRAP", str(broken))
    assert boundary._missing(BUBBLEWRAP) == "bwrap: No permissions to create a new namespace"


def test_an_interpreter_that_another_user_cannot_read_is_no_boundary(monkeypatch, tmp_path) -> None:
    if os.geteuid() != 0:
        pytest.skip("isolation: another user: only root can start a program as another user")
    private = tmp_path / "bin" / "python"  # pytest's folders are private
    private.parent.mkdir()
    shutil.copy2(boundary.PYTHON, private)
    monkeypatch.setattr(boundary, "PYTHON", private)
    assert boundary._missing(ANOTHER_USER) not in ("", "it needs Linux")


def test_a_secret_that_can_be_read_is_refused(isolation, tmp_path_factory) -> None:
    with pytest.raises(CourseError, match="could read /usr/lib; chmod 700 /usr/lib"):
        boundary.require(Path("/usr/lib"))
    private = tmp_path_factory.mktemp("private")
    assert boundary.require(private, Path("/not/there")).startswith(f"isolation: {isolation}")


def test_what_comes_back_is_no_more_than_json(isolation) -> None:
    ended = boundary.run("print('[' * 100_000)", b"", LIMITS, Found(isolation))
    with pytest.raises((RecursionError, ValueError)):
        json.loads(ended.output)


def test_boundaries_side_by_side_leave_each_other_alone(isolation) -> None:
    """Others of both kinds end while some still work: processes are killed by user, so no two share one."""
    kinds = [isolation] * 4
    if os.geteuid() == 0 and not boundary._missing(BUBBLEWRAP):
        kinds += [BUBBLEWRAP] * 4
    with ThreadPoolExecutor(len(kinds)) as pool:
        slow = [pool.submit(said, kind, "import time; time.sleep(1); print('ended')") for kind in kinds]
        for _ in range(4):
            assert said(isolation, "print('ended')") == "ended\n"
        assert [one.result() for one in slow] == ["ended\n"] * len(kinds)
