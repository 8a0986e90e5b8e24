"""Make the tables of docs/conformance.md: every adapter here, in the environment that it needs.

    python dev/conformance/make_table.py                   # all, each in a process of its own
    python dev/conformance/make_table.py trl verl          # these; the other columns stay as they are committed

Results are kept in dev/conformance/results.json, with the versions that they were made with.

    python dev/conformance/make_table.py --compare verl    # change nothing; say which rows are not as committed
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE, RESULTS = ROOT / "docs" / "conformance.md", HERE / "results.json"
BEGIN, END = "<!-- made by dev/conformance/make_table.py -->", "<!-- end -->"
WORKER = """
import importlib.metadata, json, sys
from grpo_lib.conformance import loading, report, suite
found = report.as_json(suite.check(loading.load(sys.argv[1])))
found["versions"] = {name: importlib.metadata.version(name) for name in sys.argv[2:]}
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Implementation:
    """A column."""

    title: str
    packages: tuple[str, ...]  # whose versions stand above it
    peer: str = ""  # of dev/benchmarks/peer_environments.py; "": the course's environment


IMPLEMENTATIONS = {
    "plain_grpo": Implementation("plain_grpo", ("jax",)),
    "course": Implementation("the course, through Tunix", ("google-tunix", "jax")),
    "tunix": Implementation("Tunix", ("google-tunix", "jax")),
    "trl": Implementation("TRL", ("trl", "torch"), "trl"),
    "verl": Implementation("verl", ("verl", "torch"), "verl"),
    "liger": Implementation("Liger-Kernel", ("liger-kernel", "torch"), "verl"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(IMPLEMENTATIONS)}; default: all")
    parser.add_argument("--compare", action="store_true", help="write nothing; exit 1 where a row is not as committed")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(IMPLEMENTATIONS)
    if unknown:
        sys.exit(f"error: no adapter of {min(unknown)}; there are {', '.join(IMPLEMENTATIONS)}")
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    changed: list[str] = []
    for name in arguments.names or IMPLEMENTATIONS:
        print(f"{name} …", file=sys.stderr, flush=True)
        found = measured(name)
        if arguments.compare:
            changed += differences(name, results[name], found)
            continue
        results[name] = found
        ordered = {each: results[each] for each in IMPLEMENTATIONS if each in results}
        RESULTS.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if arguments.compare:
        sys.exit("\n".join(changed) or 0)
    write_page(json.loads(RESULTS.read_text(encoding="utf-8")))


def differences(name: str, committed: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """A line for each row, and for the versions, that are not as committed."""
    lines = [] if committed["versions"] == found["versions"] else [f"{name}: made with {committed['versions']}"]
    before = {row["row"]: row for row in committed["rows"]}
    for row in found["rows"]:
        if row != before.get(row["row"]):
            lines.append(f"{name}: {before.get(row['row'])} is now {row}")
    return lines


def measured(name: str) -> dict[str, Any]:
    """The findings of an adapter, from a process in its environment."""
    one = IMPLEMENTATIONS[name]
    command = [python_of(one.peer), "-c", WORKER, str(HERE / f"of_{name}.py") + ":adapter", *one.packages]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"error: the adapter of {name} failed; what it said is above")
    found = json.loads(done.stdout.splitlines()[-1])
    for row in found["rows"]:
        del row["equation"]  # the same in every column, and in grpo_lib/conformance/equations.py
    return found


def python_of(peer: str) -> str:
    if not peer:
        return sys.executable
    done = subprocess.run(
        [sys.executable, ROOT / "dev" / "benchmarks" / "peer_environments.py", peer], stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"error: no environment for {peer}; what went wrong is above")
    return done.stdout.splitlines()[-1]


def write_page(results: dict[str, Any]) -> None:
    """Put table and versions between the two marks of the page."""
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(results)}\n{END}{after}", encoding="utf-8")


def table(results: dict[str, Any]) -> str:
    """A line for each row; what differs has a number, and the lines below the table say what it equals."""
    titles = [IMPLEMENTATIONS[name].title for name in results]
    lines = ["| variant | " + " | ".join(titles) + " |", "|---|" + "---|" * len(titles)]
    notes: list[str] = []
    columns = list(results.values())
    for place, row in enumerate(columns[0]["rows"]):
        cells = [cell(column["rows"][place], title, notes) for column, title in zip(columns, titles, strict=True)]
        lines.append(f"| {row['row']} | " + " | ".join(cells) + " |")
    for status in ("differs", "error"):
        lines.append(f"| *{status}* | " + " | ".join(str(column[status]) for column in columns) + " |")
    versions = [
        f"{title}: " + ", ".join(f"{package} {version}" for package, version in column["versions"].items())
        for column, title in zip(columns, titles, strict=True)
    ]
    return "\n".join([*lines, "", "Versions. " + "; ".join(versions) + ".", "", *notes]) + "\n"


def cell(found: dict[str, str], title: str, notes: list[str]) -> str:
    if found["status"] == "not offered":
        return ""
    if found["status"] == "agrees":
        return f"agrees ({found['detail']})" if found["detail"] else "agrees"
    notes.append(f"{len(notes) + 1}. {title}, {found['row']}: {found['detail']}")
    return f"**{found['status']}** {len(notes)}"


if __name__ == "__main__":
    main()
