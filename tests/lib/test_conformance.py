"""The conformance suite, with the tests that it brings, and its command."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from grpo_lib.common.errors import CourseError
from grpo_lib.conformance import loading
from grpo_lib.conformance.test_conformance import *  # noqa: F403  (what `pytest --pyargs grpo_lib.conformance` runs)
from grpo_train.cli import command_line

TOKENS_FOR_COMPLETIONS = """
import numpy as np
from factors import half


def adapter(case, variant):
    if variant.asks:
        return None
    ratio, A = np.exp(case.logps - case.old_logps), case.advantages[:, None]
    stopped = np.where(A > 0, ratio > 1.2, ratio < 0.8)
    weight = half * case.mask / case.mask.sum()
    loss = -(weight * np.minimum(ratio * A, np.clip(ratio, 0.8, 1.2) * A)).sum()
    return {"loss": loss, "gradient": -weight * np.where(stopped, 0, ratio * A)}


def of_one(case):
    return None


def silent(case, variant):
    return None
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_loss.py").write_text(TOKENS_FOR_COMPLETIONS)
    (tmp_path / "factors.py").write_text("half = 0.5\n")
    return tmp_path


def test_the_command_names_what_differs_and_leaves_with_1(folder):
    command = [sys.executable, "-c", "from grpo_train.cli import main; main()", "conformance", "my_loss.py:adapter"]
    options = ["--json", "--markdown", "table.md"]
    done = subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    rows = {row["row"]: row for row in found["rows"]}
    assert rows["plain GRPO"]["status"] == "differs"
    assert rows["plain GRPO"]["detail"] == "equals `aggregation: tokens` times 0.5"
    assert "DeepSeekMath" in rows["plain GRPO"]["equation"]
    assert rows["kl: k3"]["status"] == "not offered"
    assert found["agrees"] + found["differs"] + found["not_offered"] == len(rows)
    lines = (folder / "table.md").read_text(encoding="utf-8").splitlines()
    assert "| plain GRPO | **differs**: equals `aggregation: tokens` times 0.5 |" in lines
    assert len(lines) == 2 + len(rows)


def test_where_nothing_differs_it_leaves_with_0(folder):
    done = CliRunner().invoke(command_line(), ["conformance", f"{folder / 'my_loss.py'}:silent"])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == f"0 agrees, 0 differs, {len(ROWS)} not offered"  # noqa: F405


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("my_loss.py", "names no adapter; write FILE.py:NAME"),
        ("other.py:adapter", "other.py is not there"),
        ("my_loss.py:loss", r"has no function loss; write def loss\(case, variant\)"),
        ("my_loss.py:of_one", "does not take a case and a variant"),
        ("needs.py:adapter", "needs.py needs no_such_library"),
        ("fails.py:adapter", "fails.py cannot be run: ZeroDivisionError: division by zero"),
    ],
)
def test_a_setting_that_names_no_adapter_is_one_line(folder, monkeypatch, setting, message):
    (folder / "needs.py").write_text("import no_such_library\n")
    (folder / "fails.py").write_text("1 / 0\n")
    monkeypatch.chdir(folder)
    with pytest.raises(CourseError, match=message):
        loading.load(setting)
