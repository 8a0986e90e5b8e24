"""SIGTERM, which a spot VM sends before it vanishes: the step under way is finished and saved, and the program leaves
with an exit code of its own, which says that the same command continues the run.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: not done, and worth another try


class Interrupted(Exception):
    """The run was asked to end, and everything that it has done is saved."""


class Notice:
    """Listens for SIGTERM while it is entered (in the main thread; in another one it never hears any).

    with Notice() as notice:
        convert()                      # a SIGTERM raises Interrupted here and now: there is nothing to save
        with notice.at_a_good_moment():
            train(stop=notice.given)   # here it only sets `given()`, and Interrupted is raised at the end of the block
    """

    def __init__(self):
        self._given = self._wait = False

    def given(self) -> bool:
        """Was a SIGTERM received?"""
        return self._given

    def give(self) -> None:
        """As if a SIGTERM had been received: another process of the run was asked to end."""
        self._given = True

    @contextlib.contextmanager
    def at_a_good_moment(self) -> Iterator[None]:
        """Whoever runs inside looks at `given()` and comes to an end by itself."""
        self._wait = True
        try:
            yield
        finally:
            self._wait = False
        if self._given:
            raise Interrupted

    def __enter__(self) -> Notice:
        with contextlib.suppress(ValueError):  # not in the main thread
            self._before = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(self, *_: Any) -> None:
        if hasattr(self, "_before"):
            signal.signal(signal.SIGTERM, self._before)

    def _receive(self, *_: Any) -> None:
        self._given = True
        if not self._wait:
            raise Interrupted
