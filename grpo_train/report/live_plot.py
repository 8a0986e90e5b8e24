"""The training curves, redrawn in a notebook while training runs."""

import time
from typing import Any

from grpo_lib.common import environment
from grpo_train.report.figures import main_curves
from grpo_train.runs.health_checks import find_alerts
from grpo_train.runs.metric_glossary import Row


class LivePlot:
    """The curves that a reader watches first, redrawn in place while training runs.

        live = LivePlot(total_steps=60)
        train(session, on_step=live)

    Call it with each row of metrics. It redraws less often where drawing is slow, so that drawing takes at most a tenth
    of the time; the last step is always drawn. Early warnings (runs.health_checks) are shown below. Outside a notebook
    it does nothing.
    """

    def __init__(self, total_steps: int | None = None):
        self.total_steps = total_steps
        self.rows: list[Row] = []
        self._handles: list[Any] = []  # display handles of the picture and of the warnings
        self._next = 0.0  # when it may draw again

    def __call__(self, row: Row) -> None:
        self.rows.append(row)  # maybe the last row again, with its validation: of two for one step the later one counts
        last = self.total_steps is not None and row["step"] >= self.total_steps
        if (last or time.monotonic() >= self._next) and environment.notebook_shell():
            self._draw()

    def _draw(self) -> None:
        from IPython.display import Markdown, display

        started = time.monotonic()
        alerts = "\n".join(f"- **warning**, {alert}" for alert in find_alerts(self.rows))
        shown = [main_curves(self.rows, self.total_steps), *([Markdown(alerts)] if alerts else [])]
        for handle, content in zip(self._handles, shown, strict=False):
            handle.update(content)
        self._handles += [display(content, display_id=True) for content in shown[len(self._handles) :]]
        self._next = started + 10 * (time.monotonic() - started)
