"""The tables of docs/conformance.md: each adapter, in its environment, still gives what is committed."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import make_table
import pytest

from grpo_lib.conformance import report
from grpo_lib.conformance.rows import ROWS

COMMAND = "dev/conformance/make_table.py"
NAMES = tuple(make_table.IMPLEMENTATIONS)


@pytest.mark.nightly(minutes=3)
@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_gives_the_committed_column(root, name):
    done = subprocess.run([sys.executable, COMMAND, "--compare", name], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_row_that_is_not_as_committed_is_named(root):
    committed = json.loads((root / "dev" / "conformance" / "results.json").read_text(encoding="utf-8"))
    of_verl, of_trl = committed["verl"], committed["trl"]
    assert make_table.differences("verl", of_verl, of_verl) == []
    rows = [row | {"status": "differs"} if row["row"] == "plain GRPO" else row for row in of_verl["rows"]]
    (line,) = make_table.differences("verl", of_verl, of_verl | {"rows": rows})
    assert line.startswith("verl: {'row': 'plain GRPO', 'status': 'agrees'")
    (line,) = make_table.differences("verl", of_verl, of_verl | {"versions": of_trl["versions"]})
    assert line == f"verl: made with {of_verl['versions']}"


def test_an_adapter_that_fails_is_an_error_in_the_table_and_not_a_difference():
    row = {"row": "plain GRPO", "status": "error", "detail": "ZeroDivisionError: by nothing (mine.py:3)"}
    column = {"rows": [row], "versions": {}, "differs": 0, "error": 1}
    lines = make_table.table({"verl": column}).splitlines()
    assert "| plain GRPO | **error** 1 |" in lines
    assert "| *error* | 1 |" in lines
    assert lines[-1] == "1. verl, plain GRPO: ZeroDivisionError: by nothing (mine.py:3)"


def test_the_page_has_the_committed_tables(root):
    committed = json.loads((root / "dev" / "conformance" / "results.json").read_text(encoding="utf-8"))
    assert make_table.table(committed) in (root / "docs" / "conformance.md").read_text(encoding="utf-8")
    assert set(committed) == set(NAMES)
    for column in committed.values():
        statuses = [row["status"] for row in column["rows"]]
        assert [row["row"] for row in column["rows"]] == [row.name for row in ROWS]
        assert all(column[each.replace(" ", "_")] == statuses.count(each) for each in report.STATUSES)


def printed(root: Path, report: str) -> dict[str, str]:
    """What a reproduction prints, by the words before the colon; it runs where verl and Liger-Kernel are."""
    environment = [sys.executable, "dev/benchmarks/peer_environments.py", "verl"]
    python = subprocess.run(environment, cwd=root, capture_output=True, text=True, check=True).stdout.split()[-1]
    path = root / "dev" / "conformance" / "reports" / report
    said = subprocess.run([python, path], capture_output=True, text=True, check=True).stdout
    return dict(line.split(":", 1) for line in said.splitlines())


@pytest.mark.nightly
def test_verl_still_weights_gdpo_by_length(root):
    found = printed(root, "verl_gdpo_weights_by_length.py")
    of_verl, of_paper = (ast.literal_eval(found[name].strip()) for name in ("verl", "equation 6"))
    assert of_verl != pytest.approx(of_paper, abs=0.1)


@pytest.mark.nightly
def test_liger_still_counts_padding_in_luspo(root):
    gradient = printed(root, "liger_luspo_counts_padding.py")["gradient"]
    (of_tokens,) = ast.literal_eval(gradient.partition(" where")[0].strip())
    assert of_tokens[2:] != [0, 0]  # the mask is 0 there
