"""Runs Python that somebody else wrote: a student's function, or what a model wrote as an answer.

Python cannot keep Python out of its own process, so the operating system does it.  Two boundaries, the better first:

  bubblewrap    A root of its own, which can only be read: of this machine the system's libraries, Python, and the
                folders that the caller names.  No repository, no home, no /proc; a /tmp of 64 MB that is gone
                afterwards; no network; processes that see only each other and all end with the first.
  another user  Where root grades and bubblewrap does not work, as in most containers: a user of its own for each
                program, with a private folder.  The program sees what everybody may read, and the network.

Both: one process and no other (RLIMIT_NPROC), so the limits of a process are those of the whole program; a caller may
allow more, which end with the first.  What no limit of a process counts, such as shared memory that it has left, a
control group does, where this user may make one.  Each boundary is tried before it is used: where it does not hold, it
counts as not there, and `Found.why` says what was missing.  What a program reads is its standard input; what it writes
comes back as bytes, up to a size.

A user's own code (a reward of a recipe, `grpo check`) needs no boundary: `OWN`.

Tools that were considered, and what they lack: `unshare` and `setpriv` of util-linux build no root; firejail is set-uid
root; Docker and Podman start a container for each program, and Docker needs a service (they are the way where there is
no Linux: teaching/README.md); seccomp hides no file; RestrictedPython knows no NumPy; audit hooks are undone from
inside, as PEP 578 says; `systemd-run` needs a session.
"""

import contextlib
import functools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from grpo_lib.common.errors import CourseError, first_line

OFF = "GRPO_NO_ISOLATION"  # set by --no-isolation, for the processes that a command starts, too
BUBBLEWRAP = "bubblewrap"
ANOTHER_USER = "another user"
NONE = "none"
PYTHON = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
FOLDER = 2**26  # bytes of the /tmp in bubblewrap
USERS = range(60600, 60700)  # systemd keeps 60578 to 61183 for nobody
SYSTEM = ("/usr/bin", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/nix/store", "/etc/ld.so.cache")
DEVICES = (Path("/dev/null"), Path("/dev/urandom"))
SHARED = ("/tmp", "/var/tmp", "/dev/shm", "/run/lock")  # folders into which every user may write
CGROUPS = Path("/sys/fs/cgroup")
WAIT = 20  # seconds for the tools themselves

# What the boundary is tried with: which of some paths can be read, and who runs.
_PROBE = """
import json, os, sys
asked = json.load(sys.stdin)
read = [path for path in asked if os.access(path, os.X_OK if os.path.isdir(path) else os.R_OK)]
print(json.dumps([os.getuid(), read]))
"""


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    seconds: of computing; by the clock `wait` times as long.
    memory: bytes of address space, Python included.
    output: bytes of what is printed, and of each file.
    processes: threads count.  With more than one, `memory` is of each, and of all where there is a control group.
    """

    seconds: int
    memory: int
    output: int
    wait: float = 3
    processes: int = 1
    open_files: int = 64


@dataclass(frozen=True)
class Found:
    """A boundary of this machine.

    why: of those that are better, or of all, what is missing here.
    """

    kind: str
    why: str = ""


@dataclass(frozen=True)
class Ended:
    """What a program wrote, and how it ended: `code` is that of Popen, and None where it was stopped by the clock."""

    output: bytes
    code: int | None

    @property
    def out_of_time(self) -> bool:
        """Whether it used up its seconds of computing."""
        return self.code in (-signal.SIGXCPU, 128 + signal.SIGXCPU)


OWN = Found(NONE)


def require(*private: Path, off: bool = False) -> str:
    """The line that a command says first, before it runs foreign code: what isolates it.

    Args:
      private: files and folders that the code must not be able to read.
      off: run without a boundary, here and in the processes that this one starts.

    Raises:
      CourseError: there is no boundary and `off` is not given, or one of them can be read behind it.
    """
    if off:
        os.environ[OFF] = "1"
    boundary = in_use()
    if boundary.kind == NONE:
        return "isolation: NONE (--no-isolation): foreign code can read and change what you can"
    if seen := _readable([path for path in private if path.exists()], boundary):
        places = " ".join(map(str, seen))
        raise CourseError(f"isolation: foreign code, as {boundary.kind}, could read {places}; chmod 700 {places}")
    return f"isolation: {boundary.kind}" + (f" ({boundary.why})" if boundary.why else "")


def in_use() -> Found:
    """The boundary for foreign code.  Raises CourseError where there is none, unless that was asked for."""
    if os.environ.get(OFF):
        return OWN
    boundary = found()
    if boundary.kind == NONE:
        raise CourseError(
            f"isolation: none for foreign code here ({boundary.why}); install bubblewrap, or grade in a container "
            "(teaching/README.md); your own code needs none: --no-isolation"
        )
    return boundary


@functools.cache
def found() -> Found:
    """The best boundary that works on this machine."""
    reasons = []
    for kind in (BUBBLEWRAP, ANOTHER_USER):
        reason = _missing(kind)
        if not reason:
            return Found(kind, "; ".join(reasons))
        reasons.append(f"{kind}: {reason}")
    return Found(NONE, "; ".join(reasons))


def run(
    program: str,
    given: bytes,
    limits: Limits,
    boundary: Found,
    readable: Sequence[Path] = (),
    shown: bool = False,
    **variables: str,
) -> Ended:
    """Run a program of Python without site-packages, behind a boundary.

    Args:
      program: its source; it is visible to other users.
      given: its standard input.
      readable: folders that it may read, besides Python's own library.
      shown: its standard error goes to this process's; for a user's own code.
      variables: its environment.
    """
    source = f"{_limiting(limits, boundary)}\n{program}"
    memory = limits.memory + FOLDER
    errors = None if shown else subprocess.DEVNULL
    with tempfile.TemporaryFile() as output, control_group(memory) as group, _place(boundary, readable) as place:
        joins = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group)] if group else []
        command = [*joins, *place.command, str(PYTHON), "-I", "-S", "-c", source]
        seconds = limits.wait * limits.seconds
        code = _run(command, given, output, errors, seconds, place.folder, variables | _libraries())
        output.seek(0)
        return Ended(output.read(limits.output), code)


@dataclass(frozen=True)
class _Place:
    """Where a program runs: what stands before its command, and its folder."""

    command: Sequence[str]
    folder: str


def _limiting(limits: Limits, boundary: Found) -> str:
    """The program's first lines."""
    values = {"CPU": limits.seconds, "AS": limits.memory, "FSIZE": limits.output, "CORE": 0}
    if boundary.kind != NONE:  # else the user's other processes would count, too
        values |= {"NPROC": limits.processes, "NOFILE": limits.open_files}
    hard = values | {"CPU": limits.seconds + 1}
    pairs = {name: (value, hard[name]) for name, value in values.items()}
    return (
        "import resource\n"
        f"for name, values in {pairs}.items():\n"
        "    resource.setrlimit(getattr(resource, 'RLIMIT_' + name), values)\n"
    )


def _run(
    command: Sequence[str],
    given: bytes,
    output: IO[bytes],
    errors: int | None,
    seconds: float,
    folder: str,
    variables: dict[str, str],
) -> int | None:
    """Popen's code; None after `seconds`.  The process group is killed in any case."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=output, stderr=errors, cwd=folder, env=variables,
        start_new_session=True,
    )  # fmt: skip
    code: int | None = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(given, timeout=seconds)
        code = process.returncode
    with contextlib.suppress(ProcessLookupError):  # whatever is left of it
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return code


def _libraries() -> dict[str, str]:
    """Where a Python finds its own shared library: what it was started with may not say so any more."""
    shared = sysconfig.get_config_var("Py_ENABLE_SHARED")
    return {"LD_LIBRARY_PATH": str(PYTHON.parents[1] / "lib")} if shared else {}


@contextlib.contextmanager
def control_group(memory: int) -> Iterator[Path | None]:
    """A control group with a limit of memory, as the file that a process writes its number into; None without one."""
    for above, limit in _groups():
        group = above / f"grpo-{secrets.token_hex(8)}"
        try:
            group.mkdir()
        except OSError:  # not ours, or read only, as in most containers
            continue
        try:
            yield group / "cgroup.procs" if _limit(group / limit, memory) else None
        finally:
            _remove_group(group)
        return
    yield None


def _groups() -> list[tuple[Path, str]]:
    """Control groups in which one may be made, and the file with a group's limit of memory: versions 2 and 1."""
    groups = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text("utf-8").splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":  # beside this process's own: a group with processes has none below it
                groups.append((CGROUPS / path.strip("/") / "..", "memory.max"))
            if controllers == "memory":
                groups.append((CGROUPS / "memory" / path.strip("/"), "memory.limit_in_bytes"))
    return [(above, limit) for above, limit in groups if (above / "cgroup.procs").exists()]


def _limit(file: Path, memory: int) -> bool:
    """Whether a group has taken a limit."""
    try:
        file.write_text(str(memory))
        return True
    except OSError:  # memory is not counted here
        return False


def _remove_group(group: Path) -> None:
    """Remove a group as soon as its last process is gone."""
    for _ in range(100):
        try:
            return group.rmdir()
        except OSError:
            time.sleep(0.01)


@contextlib.contextmanager
def _place(boundary: Found, readable: Sequence[Path]) -> Iterator[_Place]:
    if boundary.kind == BUBBLEWRAP:
        # Root drops to a user that no other program has: processes are counted, and killed, by user.
        with _free_user() if os.geteuid() == 0 else contextlib.nullcontext() as user:
            yield _Place(_in_bubblewrap(readable, user), "/")
        return
    folder = tempfile.mkdtemp(prefix="grpo-")
    try:
        if boundary.kind == ANOTHER_USER:
            with _user() as user:
                os.chown(folder, user, user)
                yield _Place(_as_user(user), folder)
        else:
            yield _Place((), folder)
    finally:
        _remove([folder])


def _in_bubblewrap(readable: Sequence[Path], user: int | None) -> list[str]:
    """bubblewrap and its options, up to the program, which runs as `user` where there is one."""
    prefix = PYTHON.parents[1]
    seen = [*map(Path, SYSTEM), prefix / "bin", prefix / "lib", *readable]
    command = [BWRAP, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--die-with-parent", "--cap-drop", "ALL"]
    if user is not None:  # root drops to another user inside; what opens mounts has begun as root
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534"]
    command += ["--perms", "1777", "--size", str(FOLDER), "--tmpfs", "/tmp"]
    above = {parent for path in [*seen, *DEVICES] for parent in path.parents}
    for folder in sorted(above - {Path("/")}):
        command += ["--perms", "0755", "--dir", str(folder)]
    for path in seen:
        command += ["--ro-bind-try", str(path), str(path)]
    for path in DEVICES:
        command += ["--dev-bind", str(path), str(path)]
    command += ["--remount-ro", "/", "--chdir", "/tmp", "--"]
    return command + (_as_user(user) if user is not None else [])


BWRAP = "bwrap"


def _as_user(user: int) -> list[str]:
    return [
        "setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs", "--pdeathsig=KILL", "--"
    ]  # fmt: skip


@contextlib.contextmanager
def _user() -> Iterator[int]:
    """A user that nothing else runs as; afterwards its processes are killed, and its files removed."""
    with _free_user() as user:
        try:
            yield user
        finally:
            _clear(user)
            _remove(_files_of(user))


@contextlib.contextmanager
def _free_user() -> Iterator[int]:
    """A user that no other boundary on this machine has now."""
    for user in USERS:
        with socket.socket(socket.AF_UNIX) as lock:
            try:
                lock.bind(f"\0grpo-user-{user}")  # a name of the whole machine; it is free when this process ends
            except OSError:
                continue
            yield user
            return
    raise CourseError(f"isolation: all users from {USERS[0]} to {USERS[-1]} are in use; grade less at a time")


def _clear(user: int) -> None:
    """Kill all that runs as a user, and remove the shared memory that it has left."""
    for script in ("kill -KILL -1", "ipcrm --all"):
        command = [*_as_user(user), "sh", "-c", script]
        subprocess.run(command, capture_output=True, timeout=WAIT, check=False)


def _files_of(user: int) -> list[str]:
    """What a user has left in the folders of everybody."""
    left = []
    for folder in SHARED:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            left += [entry.path for entry in entries if entry.stat(follow_symlinks=False).st_uid == user]
    return left


def _remove(paths: Sequence[str]) -> None:
    """Remove files and folders; `rm` has no limit to the depth, as shutil.rmtree has."""
    if paths:
        subprocess.run(["rm", "-rf", "--", *paths], stderr=subprocess.DEVNULL, check=False)


def _missing(kind: str) -> str:
    """Why a boundary does not work here; "" if it does."""
    if sys.platform != "linux":
        return "it needs Linux"
    if kind == BUBBLEWRAP and not shutil.which(BWRAP):
        return "it is not installed"
    if kind == ANOTHER_USER and os.geteuid() != 0:
        return "only root can start a program as another user"
    try:
        return _reason(kind)
    except (OSError, ValueError, CourseError, subprocess.SubprocessError) as error:
        return first_line(error)


def _reason(kind: str) -> str:
    """The last line of what a first try says on the standard error; "" if it works."""
    with _place(Found(kind), []) as place:
        done = subprocess.run(
            [*place.command, str(PYTHON), "-I", "-S", "-c", _PROBE], input="[]", cwd=place.folder, env=_libraries(),
            capture_output=True, text=True, errors="replace", timeout=WAIT,
        )  # fmt: skip
    if done.returncode:
        return ("\n" + done.stderr.strip()).rpartition("\n")[2] or f"it ended with {done.returncode}"
    return "" if json.loads(done.stdout)[0] != 0 else "the program would still be root"


def _readable(paths: Sequence[Path], boundary: Found) -> list[Path]:
    """Those of the paths that a program can read behind a boundary."""
    names = [str(path.resolve()) for path in paths]
    limits = Limits(seconds=WAIT, memory=2**30, output=2**20)
    ended = run(_PROBE, json.dumps(names).encode(), limits, boundary)
    return [Path(name) for name in json.loads(ended.output)[1]]
