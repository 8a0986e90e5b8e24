"""The roll call, with real processes: who is missing is named in all that are left, soon, and with the exit code."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lib import roll_call
from grpo_lib.errors import CourseError
from grpo_lib.roll_call import EXIT_CODE, RollCall

# A process of a run. Its main thread waits for a line as others wait in a collective, from which nothing wakes it.
PROGRAM = """
import json, sys, time
from grpo_lib.errors import CourseError
from grpo_lib.roll_call import RollCall

try:
    with RollCall(**json.loads(sys.argv[1])):
        print("begun", flush=True)
        line = sys.stdin.readline() or time.sleep(3600)  # no line: the test only waits for the end
        if line == "fail\\n":
            raise RuntimeError("no memory\\nat all")
except CourseError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
print("done")
"""

PATIENCE = 60  # seconds after which a test gives up; a busy machine takes some of them


class Member:
    """A process of a run, seen from the test."""

    def __init__(self, address: str, processes: int, process: int, **options):
        options = {"arrive_seconds": 30, "grace_seconds": 0.2} | options
        options |= {"address": address, "processes": processes, "process": process}
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", PROGRAM, json.dumps(options)]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def begun(self) -> None:
        assert self.process.stdout.readline() == "begun\n", self.process.communicate(timeout=PATIENCE)

    def say(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ends(self) -> tuple[int, str]:
        """Exit code and stderr, which is at most one line."""
        _, said = self.process.communicate(timeout=PATIENCE)
        assert said.count("\n") <= 1 or "Traceback" in said, said
        return self.process.returncode, said

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    @property
    def pid(self) -> int:
        return self.process.pid


@pytest.fixture
def address() -> str:
    """A free port below those that the kernel gives to clients, one of which could take it before the test does."""
    for port in random.sample(range(20_000, 32_000), 50):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return f"localhost:{port}"
    raise AssertionError("no free port")


@pytest.fixture
def start(address):
    """start(processes, process, **options) -> Member; none outlives the test."""
    members: list[Member] = []

    def start_one(processes: int, process: int, **options) -> Member:
        members.append(Member(address, processes, process, **options))
        return members[-1]

    yield start_one
    for member in members:
        member.process.kill()
        member.process.communicate()


def run_of(start, processes: int, **options) -> list[Member]:
    """All of a run, begun; the last is started first."""
    members = [start(processes, process, **options) for process in reversed(range(processes))][::-1]
    for member in members:
        member.begun()
    return members


def gone(member: Member, number: int, processes: int, how: str = "is gone") -> str:
    """What is said of a member that is lost."""
    return (
        f"error: process {number} of {processes} (host {socket.gethostname()}, pid {member.pid}) {how}; the run cannot "
        "go on without it: start all processes again, it continues from the last checkpoint\n"
    )


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_all_arrive_and_end_in_any_order(start, order):
    members = run_of(start, 4)
    for number in order:
        members[number].say("go on")
        assert members[number].ends() == (0, "")


@pytest.mark.parametrize("killed", [0, 2])
def test_a_killed_process_ends_the_others(start, killed):
    members = run_of(start, 3)
    began = time.monotonic()
    members[killed].signal(signal.SIGKILL)
    for number in {0, 1, 2} - {killed}:
        assert members[number].ends() == (EXIT_CODE, gone(members[killed], killed, 3))
    assert time.monotonic() - began < 15  # at once, not after the 20 s of silence


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_process_ends_the_others_and_itself_when_it_wakes_up(start, frozen):
    members = run_of(start, 3, silent_seconds=3)
    members[frozen].signal(signal.SIGSTOP)
    sentence = gone(members[frozen], frozen, 3, "has been silent for 3 s")
    for number in {0, 1, 2} - {frozen}:
        assert members[number].ends() == (EXIT_CODE, sentence)
    members[frozen].signal(signal.SIGCONT)
    assert members[frozen].ends() == (EXIT_CODE, sentence)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_one_process_is_told_to_the_others(start, failing):
    members = run_of(start, 3)
    members[failing].say("fail")
    code, said = members[failing].ends()
    assert (code, said.splitlines()[-2:]) == (1, ["RuntimeError: no memory", "at all"])
    who = f"process {failing} of 3 (host {socket.gethostname()}, pid {members[failing].pid})"
    for number in {0, 1, 2} - {failing}:
        assert members[number].ends() == (EXIT_CODE, f"error: {who} stopped: RuntimeError: no memory at all\n")


def test_an_error_that_others_had_before_is_shown_with_theirs(start):
    members = run_of(start, 2, grace_seconds=PATIENCE)
    members[1].say("fail")
    assert members[1].ends()[0] == 1
    members[0].say("fail")  # also what a collective does that misses the other one
    code, said = members[0].ends()
    who = f"process 1 of 2 (host {socket.gethostname()}, pid {members[1].pid})"
    assert (
        code == 1 and "Traceback" in said and said.endswith(f"at all\n{who} stopped: RuntimeError: no memory at all\n")
    )


def test_who_never_arrives_is_named_in_all_that_did_and_so_is_who_was_refused(start, address):
    here = [start(4, process, arrive_seconds=4) for process in (0, 2)]
    refused = greeted(address, hello(4, 3) | {"digest": "another"}, until=lambda answer: True)["over"]
    assert refused.startswith("process 3 of 4 (host there, pid 1) has another recipe than process 0; ")
    for member in here:
        assert member.ends() == (
            2,
            f"error: processes 1, 3 of 4 have not arrived at {address} within 4 s; {refused}; "
            "start all processes, each with its own number\n",
        )


def test_process_0_never_arrives(start, address):
    code, said = start(2, 1, arrive_seconds=1, what="--coordinator").ends()
    assert code == 2
    assert said == (
        f"error: process 0 of 2 has not arrived: nobody answers (Connection refused) at {address} within 1 s; "
        "start it there, or give all processes the right --coordinator\n"
    )


def test_a_process_that_came_and_died_may_come_again(start, address):
    first = start(3, 0)
    # Seen to be in: a second process of the same number is refused.
    died = start(3, 1)
    refused = greeted(address, hello(3, 1, died.pid), until=lambda answer: "taken" in answer.get("over", ""))
    assert f"pid {died.pid}) has a number that is taken" in refused["over"]
    died.signal(signal.SIGKILL)
    died.ends()
    members = [first, start(3, 1), start(3, 2)]
    for member in members:
        member.begun()
    for member in members:
        member.say("go on")
        assert member.ends() == (0, "")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"digest": "beta: 0.1"}, "has another recipe than process 0"),
        ({"processes": 3}, "counts 3 processes, process 0 counts 2"),
    ],
)
def test_a_process_of_another_run_is_refused_by_name(start, options, reason):
    first = start(2, 0, digest="beta: 0")
    stranger = start(**({"processes": 2, "process": 1, "digest": "beta: 0"} | options))
    code, said = stranger.ends()
    assert code == 2
    assert re.match(rf"error: process 1 of 2 \(host .*, pid {stranger.pid}\) {reason}; ", said)
    second = start(2, 1, digest="beta: 0")  # the right one is still welcome
    for member in (first, second):
        member.begun()


def test_a_number_that_is_taken_is_refused_and_the_run_goes_on(start):
    members = run_of(start, 2)
    twin = start(2, 1)
    code, said = twin.ends()
    assert code == 2 and f"has a number that is taken, by process 1 of 2 (host {socket.gethostname()}" in said
    assert f"pid {members[1].pid}" in said and f"pid {twin.pid}" in said
    code, said = start(2, 0, what="--coordinator").ends()
    assert code == 2 and said.startswith("error: --coordinator: process 0 cannot listen at localhost, port ")
    assert "(Address already in use); choose another one" in said
    for member in members:
        member.say("go on")
        assert member.ends() == (0, "")


def test_junk_on_the_port_changes_nothing(start, address):
    first = start(2, 0)
    silent = connect(address)  # says nothing, and stays
    for junk in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\xfc" + bytes(range(256)),
        b"[" * 100_000 + b"\n",
        b"x" * 1_000_000,
        b"3\n[]\nnull\n",
        b'{"bye": "x"}\n{"over": "x"}\n{"begin": true}\n',
        b'{"roll_call": 1, "process": true, "processes": 2}\n',
        b'{"roll_call": 1, "process": 1e999, "processes": 2}\n',
        b'{"roll_call": 1, "process": ' + b"9" * 5000 + b', "processes": 2}\n',
        json.dumps(hello(2, 7)).encode() + b"\n",
        json.dumps(hello(2, -1)).encode() + b"\n",
    ):
        with connect(address) as sock, contextlib.suppress(OSError):  # it may hang up before it has it all
            sock.sendall(junk)
    second = start(2, 1)
    for member in (first, second):
        member.begun()
    with connect(address) as sock, contextlib.suppress(OSError):  # and during the run
        sock.sendall(b"x" * 1_000_000)
    for member in (first, second):
        member.say("go on")
        assert member.ends() == (0, "")
    silent.close()


def test_a_number_out_of_range_is_refused(start, address):
    start(2, 0)
    assert (
        "(host there, pid 1) has a number out of range; the numbers go from 0 to 1"
        in (greeted(address, hello(2, 2), until=lambda answer: True)["over"])
    )


def test_control_characters_do_not_reach_the_terminal(start, address):
    bad = "\x1b[2J\u202eb\ud800\n" + 10_000 * "c"
    start(2, 0)
    answer = greeted(address, hello(2, 2) | {"host": bad}, until=lambda answer: True)
    assert "host ?[2J?b? ccc" in answer["over"] and "…" in answer["over"]
    assert answer["over"].isprintable() and len(answer["over"]) <= 1000


def test_nor_do_those_of_a_process_0(start, address):
    host, _, port = address.partition(":")
    with socket.create_server((host, int(port))) as server:
        threading.Thread(target=reply, args=[server, b'{"over": "\\u001b[2J\\nb"}\n'], daemon=True).start()
        assert start(2, 1).ends() == (2, "error: ?[2J b\n")


def test_another_server_at_the_address_is_no_process_0(start, address):
    host, _, port = address.partition(":")
    with socket.create_server((host, int(port))) as server:
        threading.Thread(target=reply, args=[server, b"HTTP/1.1 400 Bad Request\r\n\r\n"], daemon=True).start()
        code, said = start(2, 1, arrive_seconds=1).ends()
    assert code == 2
    assert f"process 0 of 2 has not arrived: what answers is no roll call at {address} within 1 s" in said


def test_the_caller_decides_what_happens_and_learns_why(start, address):
    heard: list[str] = []
    second = start(2, 1)
    watched = RollCall(address, 2, 0, on_missing=heard.append).start()
    second.begun()
    assert watched.failed() is None and watched.wait_for_reason(0.1) is None
    second.signal(signal.SIGKILL)
    sentence = watched.wait_for_reason(PATIENCE)
    assert f"error: {sentence}\n" == gone(second, 1, 2) and watched.failed() == sentence
    watched.finish()
    watched.finish()  # twice does no harm
    assert heard in ([], [sentence])  # whoever finishes first is not called any more
    with socket.create_server(("127.0.0.1", int(address.partition(":")[2]))):
        pass  # the port is free again


def test_on_missing_is_called_with_the_sentence(start, address):
    called, heard = threading.Event(), []
    second = start(2, 1)
    watched = RollCall(address, 2, 0, on_missing=lambda sentence: (heard.append(sentence), called.set()))
    watched.start()
    second.signal(signal.SIGKILL)
    assert called.wait(PATIENCE) and heard == [watched.failed()]
    watched.finish()


def test_a_run_of_one_process_needs_no_port(address):
    with (
        socket.create_server(("127.0.0.1", int(address.partition(":")[2]))),
        RollCall(address, 1, 0) as alone,
    ):
        assert alone.failed() is None


@pytest.mark.parametrize("wrong", ["", "localhost", "localhost:", ":80", "a:0", "a:65536", "a:-1", "::1:80", "[a]:80"])
def test_a_malformed_address_is_named(wrong):
    with pytest.raises(CourseError, match=r"^--coordinator: .* is not HOST:PORT; write it like 10\.0\.0\.2:8477"):
        RollCall(wrong, 2, 0, what="--coordinator")


@given(st.text(max_size=30))
@settings(max_examples=200)
def test_any_address_is_taken_apart_or_refused(text):
    with contextlib.suppress(CourseError):
        host, port = roll_call.host_and_port(text, "address")
        assert 0 < port < 65_536 and text in (
            f"{host}:{text.rpartition(':')[2]}",
            f"[{host}]:{text.rpartition(':')[2]}",
        )


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "a\0b"])
def test_a_host_without_address_is_named(host, process):
    with pytest.raises(CourseError, match=r"^--coordinator: the host .* has no address \("):
        RollCall(f"{host}:29000", 2, process, what="--coordinator").start()


def test_process_0_on_another_machine_than_the_address_says():
    with pytest.raises(CourseError, match="give an address of the machine on which process 0 runs"):
        RollCall("203.0.113.1:29000", 2, 0).start()  # an address for documents, which no machine has


def test_a_name_that_is_only_local_here_is_listened_at_everywhere(monkeypatch, address):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", ("127.0.1.1", 1))])
    with roll_call.listen("host-a", int(address.partition(":")[2]), "address") as sock:
        assert sock.getsockname()[0] in ("::", "0.0.0.0")


def hello(processes: int, process: int, pid: int = 1) -> dict:
    digest = roll_call.hashlib.sha256(b"").hexdigest()
    return {"roll_call": 1, "process": process, "processes": processes, "digest": digest, "host": "there", "pid": pid}


def connect(address: str) -> socket.socket:
    """Connect as soon as somebody listens."""
    host, _, port = address.partition(":")
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=PATIENCE)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def greeted(address: str, message: dict, until) -> dict:
    """The first answer to `message` for which `until` holds; it is asked again until then."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with connect(address) as sock:
            sock.sendall(json.dumps(message).encode() + b"\n")
            answer = json.loads(sock.makefile().readline())
        if until(answer):
            return answer
        time.sleep(0.2)
    raise AssertionError("no such answer")


def reply(server: socket.socket, answer: bytes) -> None:
    """A server that answers everybody the same."""
    with contextlib.suppress(OSError):
        while True:
            with server.accept()[0] as sock:
                sock.recv(1000)
                sock.sendall(answer)
