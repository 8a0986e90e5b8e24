"""python -m grpo_lib.conformance FILE.py:NAME: as `grpo conformance`, where there is nothing but NumPy."""

import argparse
import json
import os
import sys
from pathlib import Path

from grpo_lib.common.errors import CourseError
from grpo_lib.conformance import loading, report, suite


def main() -> int:
    """The exit code: 0, 1 where something that is offered differs or fails, 2 where nothing can be compared."""
    parser = argparse.ArgumentParser(prog="python -m grpo_lib.conformance", description=__doc__)
    parser.add_argument("adapter", metavar="FILE.py:NAME")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="write the table to this file, too")
    arguments = parser.parse_args()
    try:
        findings = suite.check(loading.load(arguments.adapter))
    except CourseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.markdown:
        arguments.markdown.write_text(report.markdown({arguments.adapter: findings}), encoding="utf-8")
    try:
        print(json.dumps(report.as_json(findings)) if arguments.json else report.text(findings), flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has left; nor can Python flush at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return report.exit_code(findings)


if __name__ == "__main__":
    sys.exit(main())
