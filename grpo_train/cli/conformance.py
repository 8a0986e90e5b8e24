"""`grpo conformance`: does an implementation of GRPO compute what its name says?"""

from pathlib import Path
from typing import Annotated

import typer

from grpo_train.cli.options import AsJson, commands, finish

app = commands()


@app.command()
def conformance(
    adapter: Annotated[
        str, typer.Argument(metavar="FILE.py:NAME", help="A function of a case and a variant: docs/conformance.md.")
    ],
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write the table to this file, too.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare an implementation of GRPO with exact answers: what agrees, what differs and what it equals instead.

    Exit code 1: something that the adapter offers differs or fails; 2: it offers nothing.
    """
    from grpo_lib.conformance import loading, report, suite

    findings = suite.check(loading.load(adapter))
    if markdown:
        markdown.write_text(report.markdown({adapter: findings}), encoding="utf-8")
    finish(report.as_json(findings), as_json, report.text(findings))
    raise typer.Exit(report.exit_code(findings))
