"""The table of findings: for a terminal, as Markdown, as JSON."""

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from grpo_lib.conformance.suite import AGREES, DIFFERS, ERROR, NOT_OFFERED, Finding

STATUSES = (AGREES, DIFFERS, ERROR, NOT_OFFERED)


def counts(findings: Sequence[Finding]) -> dict[str, int]:
    """How many rows of each status."""
    found = Counter(finding.status for finding in findings)
    return {status: found[status] for status in STATUSES}


def exit_code(findings: Sequence[Finding]) -> int:
    """1 where something that is offered differs or fails, else 0."""
    number = counts(findings)
    return int(number[DIFFERS] + number[ERROR] > 0)


def text(findings: Sequence[Finding]) -> str:
    """For a terminal; under a row that differs is the equation that was asked for, where it is another than above.

    An error of several rows is one line, at the first of them.
    """
    offered = [finding for finding in findings if finding.status != NOT_OFFERED]
    errors = Counter(finding.detail for finding in offered if finding.status == ERROR)
    left_out = [finding.row.name for finding in findings if finding.status == NOT_OFFERED]
    width = max((len(finding.row.name) for finding in offered), default=0)
    lines, shown = [], set()
    for finding in offered:
        detail = finding.detail
        if finding.status == ERROR:
            if detail in shown:
                continue
            shown.add(detail)
            detail += f", and in {errors[detail] - 1} other rows" if errors[detail] > 1 else ""
        status = finding.status.upper() if finding.status in (DIFFERS, ERROR) else finding.status
        lines.append(f"{finding.row.name:<{width}}  {status:<7}  {detail}".rstrip())
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
    status = f"**{finding.status}**" if finding.status in (DIFFERS, ERROR) else finding.status
    return f"{status}: {finding.detail}" if finding.detail else status


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Rows with their status, and the counts."""
    rows = [
        {"row": one.row.name, "status": one.status, "detail": one.detail, "equation": one.row.source}
        for one in findings
    ]
    return {"rows": rows, **{status.replace(" ", "_"): number for status, number in counts(findings).items()}}
