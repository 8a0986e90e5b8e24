"""SIGTERM, which a spot VM gets before it is taken away: the current step is finished and saved, and the program exits
with a code of its own, which means that the same command continues the run.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: not finished, try again


class Interrupted(Exception):
    """The run was asked to stop, and what it has done is saved."""


class PreemptionHandler:
    """Handles SIGTERM inside its `with` block (in the main thread; other threads never get a signal).

    with PreemptionHandler() as preemption:
        convert()                            # a SIGTERM raises Interrupted at once: there is nothing to save
        with preemption.defer():
            train(stop=preemption.requested) # here it only sets `requested()`; Interrupted is raised after the block
    """

    def __init__(self):
        self._requested = self._wait = False

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
            raise Interrupted

    def __enter__(self) -> PreemptionHandler:
        with contextlib.suppress(ValueError):  # not in the main thread
            self._before = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(self, *_: Any) -> None:
        if hasattr(self, "_before"):
            signal.signal(signal.SIGTERM, self._before)

    def _receive(self, *_: Any) -> None:
        self._requested = True
        if not self._wait:
            raise Interrupted
