"""SIGTERM, which a spot VM gets before it is taken away, or the end of the recipe's time (`training.stop_after`): the
current step is finished and saved, and the program exits with a code of its own, which means that the same command
continues the run.
"""

import contextlib
import re
import signal
from collections.abc import Iterator
from typing import Any, Self

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
            train(stop=lambda: preemption.requested)  # here it only sets that; Interrupted is raised after the block
            preemption.progress = "after step 7"          # what it says is done
    """

    def __init__(self, stop_after: str | None = None):
        self._seconds = sum(int(number) * SECONDS[unit] for number, unit in re.findall(r"(\d+)(.)", stop_after or ""))
        self.requested = self._wait = False  # requested: by a signal here or, set by the caller, in another process
        self._reason = "SIGTERM"  # of another process, unless this one knows better
        self.progress = ""

    @contextlib.contextmanager
    def defer(self) -> Iterator[None]:
        """For code that checks `requested` and stops by itself."""
        self._wait = True
        try:
            yield
        finally:
            self._wait = False
        if self.requested:
            raise Interrupted(f"{self._reason} {self.progress}".strip())

    def __enter__(self) -> Self:
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
        self.requested = True
        self._reason = "training.stop_after" if number == signal.SIGALRM else "SIGTERM"
        if not self._wait:
            raise Interrupted(self._reason)
