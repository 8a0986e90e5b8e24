"""The roll call of a run of several processes: who is missing is said at once, and ends the others.

    with RollCall("10.0.0.2:8477", processes=2, process=0, digest=recipe_text) as roll_call:   # waits for all
        train()                                                          # a lost process ends this one, exit code 76

JAX's own words about a missing process come after minutes, in a page of C++ log, and its collectives cannot be
interrupted from Python. So process 0 keeps one connection to each of the others, apart from JAX's, and JSON lines go
both ways every few seconds. A connection that closes without a good-bye is a process that was killed; one that is
silent for too long is a frozen machine or a lost network. The connection is neither encrypted nor authenticated:
it is for one machine or a private network, and what comes in is not trusted.

A main thread that holds Python's lock for longer than `silent_seconds` looks frozen: XLA releases it when it compiles.
The process with JAX's coordination service is a special case: when it is killed, JAX aborts the others by itself, and
now and then it is faster than the sentence from here. Nor is it the roll call that ends a process after an error of its
own: without `os._exit`, JAX waits at the exit for processes that are not coming any more, for a minute and a half.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import hashlib
import ipaddress
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from grpo_lib.errors import CourseError

EXIT_CODE = 76  # EX_PROTOCOL of sysexits.h: the other side is not there

VERSION = 1  # of the lines that are exchanged
LINE_BYTES = 16_384
TEXT_LENGTH = 1000  # characters, so that even a text of escapes fits into a line
STRANGERS = 100  # connections that have not said yet who they are
HANDSHAKE_SECONDS = 5.0
RETRY_SECONDS = 0.2
PARTING_SECONDS = 3.0  # to wait until the others have read a last line
MOMENT_SECONDS = 1.0  # in which an error here may turn out to come from a process that is gone

REMEDY = "the run cannot go on without it: start all processes again, it continues from the last checkpoint"


def leave(sentence: str) -> None:
    """Say `error: <sentence>` on stderr and end this process, whatever its main thread is waiting for."""
    with contextlib.suppress(Exception):
        guard = threading.Timer(PARTING_SECONDS, os._exit, [EXIT_CODE])  # for a terminal that takes no output
        guard.daemon = True
        guard.start()
    with contextlib.suppress(Exception):
        print(f"error: {sentence}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    os._exit(EXIT_CODE)


def host_and_port(address: str, what: str) -> tuple[str, int]:
    """Return the parts of HOST:PORT; an IPv6 host stands in brackets.  Raises CourseError for anything else."""
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    number = int(port) if port.isascii() and port.isdecimal() and len(port) <= 5 else 0
    if not host.strip() or (":" in host) != bracketed or not 0 < number < 65_536:
        raise CourseError(f"{what}: {address!r} is not HOST:PORT; write it like 10.0.0.2:8477, the same for all")
    return host, number


def resolve(host: str, port: int, what: str) -> list[tuple]:
    """Return what `socket.getaddrinfo` knows of the host.  Raises CourseError if that is nothing."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # ValueError: no host can be spelled like this
        reason = getattr(error, "strerror", None) or error
        raise CourseError(f"{what}: the host {host!r} has no address ({reason}); give process 0's machine") from None


def listen(host: str, port: int, what: str) -> socket.socket:
    """Return the socket at which process 0 is reached.

    It listens at an IP address, and at localhost, as it stands. Another name is often 127.0.1.1 on the very machine
    that bears it (Debian), where the others cannot reach it; then it listens at all addresses of the machine.

    Raises:
      CourseError: the host has no address, or the port cannot be had.
    """
    family, _, _, _, place = resolve(host, port, what)[0]
    both = False
    if host == "localhost":
        family, place = socket.AF_INET, ("127.0.0.1", port)
    elif not _is_ip(host):
        both = socket.has_dualstack_ipv6()
        family, place = socket.AF_INET6 if both else socket.AF_INET, ("", port)
    try:
        return socket.create_server(place, family=family, dualstack_ipv6=both)
    except OSError as error:
        remedy = "choose another one for all processes, or end the program that has it"
        if error.errno == errno.EADDRNOTAVAIL:
            remedy = "give an address of the machine on which process 0 runs"
        raise CourseError(
            f"{what}: process 0 cannot listen at {host}, port {port} ({_words(error)}); {remedy}"
        ) from None


class _Link:
    """A connection: JSON objects, one to a line, both ways.  `number` is None until the other side is known."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self.sock, self.number, self.refused = sock, None, False
        self.opened = self.heard = time.monotonic()
        self._rest = b""

    def send(self, message: dict[str, Any], *, last: bool = False) -> None:
        """Send a line, and no more after the `last` one.  That a connection is lost is found out by `receive`."""
        with contextlib.suppress(OSError):
            self.sock.sendall(json.dumps(message).encode() + b"\n")
            if last:
                self.sock.shutdown(socket.SHUT_WR)

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that are there.  Raises OSError: closed, or what came is none of our lines."""
        try:
            data = self.sock.recv(LINE_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionError("closed")
        self.heard = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            raise ConnectionError("not JSON") from None
        if len(self._rest) > LINE_BYTES or not all(isinstance(message, dict) for message in messages):
            raise ConnectionError("not a message")
        return messages


class RollCall:
    """All processes of a run, present from `start` to `finish`; see the module.  It is used once.

    Args:
      address: HOST:PORT where process 0 listens; not the port of JAX's coordinator.
      processes: how many there are; a roll call of one does nothing.
      process: the number of this one, from 0.
      digest: what has to be the same in all of them, such as the text of the recipe.
      arrive_seconds: how long process 0 waits for the others, and each of them for process 0.
      silent_seconds: after so long without a sign of life a process counts as lost.
      grace_seconds: for a process to come to its own end after another one stopped with an error; all of them may
        have the same error, or be saving after the same signal.
      on_missing: called in the watching thread with a sentence when a process is lost; unless given, it is `leave`.
      what: how messages call the address, such as the command-line option that sets it.

    Raises:
      CourseError: the address is not HOST:PORT, or there is no such process.
    """

    def __init__(
        self, address: str, processes: int, process: int, *, digest: str = "", arrive_seconds: float = 60,
        silent_seconds: float = 20, grace_seconds: float = 10, on_missing: Callable[[str], None] | None = None,
        what: str = "roll call address",
    ):  # fmt: skip
        self._host, self._port = host_and_port(address, what)
        if not 0 <= process < processes:
            raise CourseError(f"process {process} of {processes}: the processes of a run count from 0 to one less")
        self._address, self._what, self._processes, self._process = address, what, processes, process
        self._digest = hashlib.sha256(digest.encode(errors="replace")).hexdigest()
        self._arrive_seconds, self._silent_seconds, self._grace_seconds = arrive_seconds, silent_seconds, grace_seconds
        self._on_missing = on_missing or leave
        self._me = {"host": socket.gethostname(), "pid": os.getpid()}

        self._arrived = {process: self._who(process, **self._me)}  # number -> how messages call it
        self._turned_away: collections.deque[str] = collections.deque(maxlen=3)
        self._trouble = "nobody answers"  # at the address, as far as this process knows
        self._begun = False
        self._over: str | None = None  # why the run cannot go on
        self._grace = False  # is there time to come to an end by ourselves?
        self._news, self._left = threading.Event(), threading.Event()
        self._farewell = ""

        # Touched by `start`, and from then on by the watching thread alone, which is woken through the bell.
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._links: list[_Link] = []
        self._beat, self._next_beat = min(2.0, silent_seconds / 5), 0.0
        self._bell, self._ear = socket.socketpair()
        self._selector.register(self._ear, selectors.EVENT_READ)
        self._watcher: threading.Thread | None = None

    def start(self) -> RollCall:
        """Wait until all processes have arrived, and watch over them from then on.

        Raises:
          CourseError: somebody did not arrive (the message says who, in all processes that did), this process was
            refused, or the address is of no use.
        """
        try:
            if self._processes == 1:
                self._part({})
                return self
            self._arrive()
        except BaseException as error:
            self._part({"bye": _reason(error)})
            raise
        if self._over:
            raise CourseError(self._over)
        self._watcher = threading.Thread(target=self._watch, name="roll call", daemon=True)
        self._watcher.start()
        return self

    def finish(self, reason: str = "") -> None:
        """Say good-bye: in order, after which nobody misses this process; or with the one-line `reason` for stopping,
        which ends the others.  Waits at most a few seconds for them to hear it."""
        self._farewell = _printable(reason)
        self._left.set()
        with contextlib.suppress(OSError):
            self._bell.send(b"!")
        if self._watcher and self._watcher is not threading.current_thread():
            self._watcher.join(2 * PARTING_SECONDS)

    def failed(self) -> str | None:
        """Return why the run cannot go on, as a sentence; None while nobody is missing."""
        return self._over

    def wait_for_reason(self, seconds: float) -> str | None:
        """The same, up to `seconds` later: a collective may fail before the news of the lost process is here."""
        self._news.wait(seconds)
        return self._over

    def __enter__(self) -> RollCall:
        return self.start()

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.finish()
        elif self._watcher:
            # The error may be what a lost process looks like from here: the news of it, if any, is about to come.
            if reason := self.wait_for_reason(MOMENT_SECONDS):
                error.add_note(reason)  # stands below the traceback
            self.finish(_reason(error))

    def _arrive(self) -> None:
        """Until all are there, or somebody did not come in time."""
        deadline = time.monotonic() + self._arrive_seconds
        resolve(self._host, self._port, self._what)
        if self._process == 0:
            self._listener = listen(self._host, self._port, self._what)
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ)
        while not self._begun and not self._over:
            left = deadline - time.monotonic()
            if left <= 0 and (self._process == 0 or 0 not in self._arrived):
                self._end(self._absent())
            elif self._process and not self._links:
                time.sleep(RETRY_SECONDS)
                self._call(min(left, HANDSHAKE_SECONDS))
            else:
                self._turn(RETRY_SECONDS)

    def _watch(self) -> None:
        """The watching thread: until the end of the run, or of somebody in it."""
        while not self._over and not self._left.is_set():
            self._turn(self._beat)
        if not self._over:
            self._part({"bye": self._farewell})
        elif not self._left.wait(self._grace_seconds if self._grace else 0):
            self._on_missing(self._over)

    def _turn(self, seconds: float) -> None:
        """Read what comes within `seconds`, send the signs of life that are due, and look for the silent."""
        for key, _ in self._selector.select(max(0.0, min(seconds, self._next_beat - time.monotonic()))):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data in self._links:
                self._read(key.data)
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + self._beat
            for link in self._links:
                if link.number is not None:
                    link.send({})
        for link in list(self._links):
            if link in self._links and self._overdue(link):
                self._read(link)  # it may have spoken while this process was the one that slept
            if link in self._links and self._overdue(link):
                self._lose(link, f"has been silent for {self._silent_seconds:g} s")

    def _overdue(self, link: _Link) -> bool:
        if link.number is None:
            return time.monotonic() - link.opened > HANDSHAKE_SECONDS
        return time.monotonic() - link.heard > self._silent_seconds

    def _call(self, seconds: float) -> None:
        """Try once to reach process 0."""
        try:
            sock = socket.create_connection((self._host, self._port), timeout=seconds)
            if sock.getsockname() == sock.getpeername():  # an odd corner of TCP: one reaches oneself
                sock.close()
                raise ConnectionRefusedError("reached itself")
        except OSError as error:
            self._trouble = f"nobody answers ({_words(error)})"
            return
        self._trouble = "what answers is no roll call"
        hello = {"roll_call": VERSION, "process": self._process, "processes": self._processes, "digest": self._digest}
        self._add(_Link(sock)).send(hello | self._me)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it went away again, or this process has too many open files
            time.sleep(RETRY_SECONDS)
            return
        if sum(link.number is None for link in self._links) < STRANGERS:
            self._add(_Link(sock))
        else:
            sock.close()

    def _read(self, link: _Link) -> None:
        try:
            messages = link.receive()
        except OSError:
            self._lose(link, "is gone")
            return
        for message in messages:
            if link in self._links and not link.refused:
                self._hear(link, message)

    def _hear(self, link: _Link, message: dict[str, Any]) -> None:
        if self._process == 0 and link.number is None:
            self._admit(link, message)
        elif "over" in message:
            self._drop(link)
            self._end(str(message["over"]), grace=message.get("grace") is True)
        elif "bye" in message and link.number is not None:
            self._drop(link)
            if message["bye"]:
                self._end(f"{self._arrived[link.number]} stopped: {message['bye']}", grace=True)
        elif "accepted" in message and link.number is None:
            link.number, self._arrived[0] = 0, self._who(0, message.get("host"), message.get("pid"))
        elif "begin" in message and self._process:
            self._begun = True

    def _admit(self, link: _Link, hello: dict[str, Any]) -> None:
        """Process 0: take somebody in, or say why not.  Who does not speak our language is not answered."""
        number, processes, digest = hello.get("process"), hello.get("processes"), hello.get("digest")
        if hello.get("roll_call") != VERSION or type(number) is not int or type(processes) is not int:
            self._drop(link)
            return
        who = self._who(number, hello.get("host"), hello.get("pid"))
        refusal = None
        if processes != self._processes:
            refusal = f"counts {processes} processes, process 0 counts {self._processes}; start all with one number"
        elif not 0 <= number < self._processes:
            refusal = f"has a number out of range; the numbers go from 0 to {self._processes - 1}"
        elif digest != self._digest:
            refusal = "has another recipe than process 0; start all with the same recipe and overrides"
        elif number in self._arrived:
            refusal = f"has a number that is taken, by {self._arrived[number]}; give each process its own"
        if refusal:
            self._turned_away.append(f"{who} {refusal}")
            link.refused = True  # it stays until it has read why
            link.send({"over": _printable(f"{who} {refusal}")}, last=True)
            return
        link.number, self._arrived[number] = number, who
        link.send({"accepted": True} | self._me)
        if len(self._arrived) == self._processes:
            self._begun = True
            for other in self._links:
                if other.number is not None:
                    other.send({"begin": True})

    def _lose(self, link: _Link, how: str) -> None:
        """The connection is lost: what that means depends on who it was, and when."""
        if link.number is None:
            self._drop(link)
        elif self._process == 0 and not self._begun:
            self._turned_away.append(f"{self._arrived.pop(link.number)} came, and {how}")  # it may come again
            self._drop(link)
        else:
            sentence = f"{self._arrived[link.number]} {how}; {REMEDY}"
            link.send({"over": sentence}, last=True)  # for the day on which it wakes up
            self._drop(link)
            self._end(sentence)

    def _absent(self) -> str:
        """Who did not come in time, as far as is known here."""
        place = f"at {self._address} within {self._arrive_seconds:g} s"
        if self._process:
            return (
                f"process 0 of {self._processes} has not arrived: {self._trouble} {place}; "
                f"start it there, or give all processes the right {self._what}"
            )
        missing = [str(number) for number in range(self._processes) if number not in self._arrived]
        names = f"process {missing[0]}" if len(missing) == 1 else f"processes {', '.join(missing)}"
        verb = "has" if len(missing) == 1 else "have"
        known = "".join(f"; {text}" for text in self._turned_away)
        remedy = "start all processes, each with its own number"
        return f"{names} of {self._processes} {verb} not arrived {place}{known}; {remedy}"

    def _end(self, sentence: str, *, grace: bool = False) -> None:
        """The run cannot go on: tell the others, and whoever waits for a reason here."""
        self._over, self._grace = _printable(sentence), grace
        self._news.set()
        self._part({"over": self._over, "grace": grace})

    def _part(self, message: dict[str, Any]) -> None:
        """Send a last line to all, wait a little until they have closed their end, and close."""
        for sock in (self._listener, self._bell, self._ear):
            if sock:
                with contextlib.suppress(KeyError, ValueError):  # it is not registered
                    self._selector.unregister(sock)
                sock.close()
        for link in list(self._links):
            if link.number is None:
                self._drop(link)
            else:
                link.send(message, last=True)
        deadline = time.monotonic() + PARTING_SECONDS
        # Closing before they have read it could lose the line: a closed socket answers what still comes with a reset.
        while self._links and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                try:
                    key.data.receive()
                except OSError:
                    self._drop(key.data)
        for link in list(self._links):
            self._drop(link)
        self._selector.close()

    def _add(self, link: _Link) -> _Link:
        self._links.append(link)
        self._selector.register(link.sock, selectors.EVENT_READ, link)
        return link

    def _drop(self, link: _Link) -> None:
        self._links.remove(link)
        self._selector.unregister(link.sock)
        link.sock.close()

    def _who(self, number: int, host: Any, pid: Any) -> str:
        return _printable(f"process {number} of {self._processes} (host {host}, pid {pid})", 200)


def _words(error: OSError) -> str:
    """What went wrong, without the number and the address that some messages carry."""
    return os.strerror(error.errno) if (error.errno or 0) > 0 else str(error)


def _is_ip(host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def _reason(error: BaseException) -> str:
    text = str(error) if isinstance(error, CourseError) else f"{type(error).__name__}: {error}"
    return _printable(text.rstrip(": "))


def _printable(text: str, length: int = TEXT_LENGTH) -> str:
    """One line of at most `length` characters, without the control characters that a terminal would obey."""
    text = " ".join(text.split())
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= length else text[: length - 1] + "…"
