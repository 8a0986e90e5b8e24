"""Reports: a run's page, figures, the inspector of all answers, tables, and what notebooks display.

report.write_report("runs/course")        # runs/course/report.html, one file, works offline
report.inspector("runs/course")           # its table of all answers, inside a notebook
report.export_table("runs/course")        # the same answers as CSV
report.training_curves(rows)              # figures; a notebook shows what a cell returns
live = report.LivePlot(total_steps)       # live(row) after each training step
print(report.headline(summary))           # the result in a sentence, from the dict of summary.json
"""

from grpo_train.report.answer_inspector import inspector
from grpo_train.report.figures import (
    before_after,
    categories,
    decomposition,
    flips,
    main_curves,
    more_curves,
    pass_at_k,
    runs_side_by_side,
    slider,
    training_curves,
)
from grpo_train.report.formatting import headline, percent, points
from grpo_train.report.live_plot import LivePlot
from grpo_train.report.run_report import RATES, write_report
from grpo_train.report.simplex import simplex
from grpo_train.report.tables import export_table
from grpo_train.report.timeline import timeline

__all__ = [
    "RATES", "LivePlot", "before_after", "categories", "decomposition", "export_table", "flips", "headline",
    "inspector", "main_curves", "more_curves", "pass_at_k", "percent", "points", "runs_side_by_side", "simplex",
    "slider", "timeline", "training_curves", "write_report",
]  # fmt: skip
