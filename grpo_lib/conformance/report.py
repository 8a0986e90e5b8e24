"""The table of findings: for a terminal, as Markdown, as JSON."""

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from grpo_lib.conformance.suite import AGREES, DIFFERS, NOT_OFFERED, Finding

STATUSES = (AGREES, DIFFERS, NOT_OFFERED)


def counts(findings: Sequence[Finding]) -> dict[str, int]:
    """How many rows of each status."""
    found = Counter(finding.status for finding in findings)
    return {status: found[status] for status in STATUSES}


def text(findings: Sequence[Finding]) -> str:
    """For a terminal; under a row that differs is the equation that was asked for, where it is another than above."""
    offered = [finding for finding in findings if finding.status != NOT_OFFERED]
    left_out = [finding.row.name for finding in findings if finding.status == NOT_OFFERED]
    width = max((len(finding.row.name) for finding in offered), default=0)
    lines, shown = [], set()
    for finding in offered:
        status = "DIFFERS" if finding.status == DIFFERS else finding.status
        lines.append(f"{finding.row.name:<{width}}  {status:<7}  {finding.detail}".rstrip())
        if finding.status == DIFFERS and finding.row.source not in shown:
            shown.add(finding.row.source)
            lines += _wrapped(f"{'':<{width}}  asked:   ", finding.row.source)
    if left_out:
        lines += ["", *_wrapped("not offered: ", "; ".join(left_out))]
    summary = ", ".join(f"{number} {status}" for status, number in counts(findings).items())
    return "\n".join([*lines, "", summary])


def _wrapped(begins: str, words: str) -> list[str]:
    return textwrap.wrap(begins + words, 110, subsequent_indent=" " * len(begins), break_on_hyphens=False)


def markdown(columns: dict[str, Sequence[Finding]]) -> str:
    """One table: a line for each row, a column for each implementation by name."""
    names = list(columns)
    rows = [finding.row for finding in columns[names[0]]]
    lines = ["| variant | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for place, row in enumerate(rows):
        cells = [_cell(columns[name][place]) for name in names]
        lines.append(f"| {row.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(finding: Finding) -> str:
    if finding.status == NOT_OFFERED:
        return ""
    status = f"**{finding.status}**" if finding.status == DIFFERS else finding.status
    return f"{status}: {finding.detail}" if finding.detail else status


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Rows with their status, and the counts."""
    rows = [
        {"row": one.row.name, "status": one.status, "detail": one.detail, "equation": one.row.source}
        for one in findings
    ]
    return {"rows": rows, **{status.replace(" ", "_"): number for status, number in counts(findings).items()}}
