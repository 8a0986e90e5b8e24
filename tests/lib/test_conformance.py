"""The conformance suite, with the tests that it brings, and its command."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from grpo_lib.common.errors import CourseError
from grpo_lib.conformance import loading, suite
from grpo_lib.conformance.test_conformance import *  # noqa: F403  (what `pytest --pyargs grpo_lib.conformance` runs)
from grpo_train.cli import command_line

TOKENS_FOR_COMPLETIONS = """
import numpy as np
from factors import WithGradient, half


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


def leaves(case, variant):
    raise SystemExit(0)


def of_a_float(case, variant):
    return 0.5


def of_a_tensor(case, variant):
    return {name: WithGradient() for name in ("loss", "gradient", "advantages")}
"""


FACTORS = """
half = 0.5


class WithGradient:
    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.")
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_loss.py").write_text(TOKENS_FOR_COMPLETIONS)
    (tmp_path / "factors.py").write_text(FACTORS)
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
    assert sum(found[status] for status in ("agrees", "differs", "error", "not_offered")) == len(rows)
    lines = (folder / "table.md").read_text(encoding="utf-8").splitlines()
    assert "| plain GRPO | **differs**: equals `aggregation: tokens` times 0.5 |" in lines
    assert len(lines) == 2 + len(rows)


def test_where_nothing_is_offered_nothing_was_compared(folder):
    with pytest.raises(CourseError, match="returned None for every row"):
        suite.check(loading.load(f"{folder / 'my_loss.py'}:silent"))
    command = [sys.executable, "-m", "grpo_lib.conformance", "my_loss.py:silent"]
    assert subprocess.run(command, cwd=folder, capture_output=True).returncode == 2


@pytest.mark.parametrize(
    ("name", "message", "source"),
    [
        ("leaves", "SystemExit: 0", "raise SystemExit(0)"),
        ("of_a_float", "TypeError: the adapter returned a float; return a dict, or None", "def of_a_float"),
        ("of_a_tensor", "RuntimeError: Can't call numpy() on Tensor that requires grad.", "def of_a_tensor"),
    ],
)
def test_what_fails_is_one_line_with_the_place_in_the_users_code(folder, name, message, source):
    done = CliRunner().invoke(command_line(), ["conformance", f"{folder / 'my_loss.py'}:{name}"])
    lines = TOKENS_FOR_COMPLETIONS.splitlines()
    number = next(place for place, line in enumerate(lines, 1) if source in line)
    assert done.exit_code == 1, done.output
    assert done.output.count("ERROR") == 1
    assert f"{message} (my_loss.py:{number}), and in {len(ROWS) - 1} other rows" in done.output  # noqa: F405
    assert done.output.splitlines()[-1] == f"0 agrees, 0 differs, {len(ROWS)} error, 0 not offered"  # noqa: F405


def test_without_the_command_there_is_a_table_as_markdown_too(folder):
    command = [sys.executable, "-m", "grpo_lib.conformance", "my_loss.py:leaves", "--markdown", "table.md"]
    assert subprocess.run(command, cwd=folder, capture_output=True).returncode == 1
    lines = (folder / "table.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2 + len(ROWS)  # noqa: F405
    assert lines[2].startswith("| advantage: std | **error**: SystemExit: 0 (my_loss.py:")


def test_a_reader_that_has_left_is_no_traceback(folder):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "grpo_lib.conformance", "my_loss.py:leaves", "--json"]
    done = subprocess.run(command, cwd=folder, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


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
