"""The TPU stack on a CPU.  Outside .venv-tpu these tests fail instead of being skipped."""

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))  # parity; last, because its files and those here have the same names


def pytest_configure() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise pytest.UsageError("tests/tpu/stack needs vllm-tpu, which is not in this environment; run make test-tpu")
