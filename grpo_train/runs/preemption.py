"""SIGTERM, which a spot VM gets before it is taken away, or the end of the recipe's time (`training.stop_after`): the
current step is finished and saved, and the program exits with a code of its own, which means that the same command
continues the run.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from typing import Any

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: not finished, try again
SECONDS = {"h": 3600, "m": 60, "s": 1}


class Interrupted(Exception):
    """The run was asked to stop, and what it has done is saved."""


class PreemptionHandler:
    """Handles SIGTERM inside its `with` block (in the main thread; other threads never get a signal), and the alarm
    that it sets itself: after `stop_after`, such as 8h30m.

    with PreemptionHandler() as preemption:
        convert()                            # a SIGTERM raises Interrupted at once: there is nothing to save
        with preemption.defer():
            train(stop=preemption.requested) # here it only sets `requested()`; Interrupted is raised after the block
    """

    def __init__(self, stop_after: str | None = None):
        self._seconds = sum(int(number) * SECONDS[unit] for number, unit in re.findall(r"(\d+)(.)", stop_after or ""))
        self._requested = self._wait = False
        self._reason = "SIGTERM"  # of another process, unless this one knows better

    def requested(self) -> bool:
        """Was a SIGTERM received?"""
        return self._requested

    def request(self) -> None:
        """Act as if a SIGTERM had been received: another process of the run has received one."""
        self._requested = True

    @contextlib.contextmanager
    def defer(self) -> Iterator[None]:
        """For code that checks `requested()` and stops by itself."""
        self._wait = True
        try:
            yield
        finally:
            self._wait = False
        if self._requested:
            raise Interrupted(self._reason)

    def __enter__(self) -> PreemptionHandler:
        with contextlib.suppress(ValueError):  # not in the main thread
            self._before = {each: signal.signal(each, self._receive) for each in (signal.SIGTERM, signal.SIGALRM)}
            signal.alarm(self._seconds)
        return self

    def __exit__(self, *_: Any) -> None:
        if hasattr(self, "_before"):
            signal.alarm(0)
            for each, handler in self._before.items():
                signal.signal(each, handler)

    def _receive(self, number: int, frame: Any) -> None:
        self._requested = True
        self._reason = "training.stop_after" if number == signal.SIGALRM else "SIGTERM"
        if not self._wait:
            raise Interrupted(self._reason)
