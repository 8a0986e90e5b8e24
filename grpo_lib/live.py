"""The training curves, redrawn in a notebook while training runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any

from grpo_lib.figures import Row, training_curves
from grpo_lib.warning_signs import signs


class LivePlot:
    """The training curves, redrawn in place while training runs.

        live = LivePlot(total_steps=60)
        train(session, on_step=live)

    Call it with each row of metrics. It redraws at most twice a second, and less often where drawing is slow, so
    that it takes no more than a tenth of the time; the last step is always drawn. `finish()` draws what an
    interrupted run left undrawn. Early warnings (`warning_signs`) stand below it. Outside a notebook it does nothing.
    """

    SECONDS_BETWEEN = 0.5
    LARGEST_SHARE = 0.1

    def __init__(self, total_steps: int | None = None, rows: Iterable[Row] = ()):
        self.total_steps = total_steps
        self.rows: list[Row] = list(rows)  # those of an earlier session of the same run
        self._handles: list[Any] = []  # of what is shown: the picture, and then the warnings
        self._next = 0.0
        self._undrawn = False

    def __call__(self, row: Row) -> None:
        if self.rows and self.rows[-1]["step"] == row["step"]:  # a validation has joined it
            self.rows.pop()
        self.rows.append(row)
        self._undrawn = True
        last = self.total_steps is not None and (row.get("step") or 0) >= self.total_steps
        if last or time.monotonic() >= self._next:
            self._draw()

    def finish(self) -> None:
        """Draw the rows that came too soon after the last drawing."""
        if self._undrawn:
            self._draw()

    def _draw(self) -> None:
        self._undrawn = False
        if not _in_notebook():
            return
        from IPython.display import Markdown, display

        started = time.monotonic()
        shown: list[Any] = [training_curves(self.rows, self.total_steps)]
        if found := signs(self.rows):
            shown.append(Markdown("\n".join(f"- **warning**, {sign}" for sign in found)))
        for handle, content in zip(self._handles, shown, strict=False):
            handle.update(content)
        self._handles += [display(content, display_id=True) for content in shown[len(self._handles) :]]
        ended = time.monotonic()
        pause = (ended - started) * (1 / self.LARGEST_SHARE - 1)
        self._next = ended + max(self.SECONDS_BETWEEN, pause)


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this; a plain IPython terminal cannot show a picture."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None) is not None
