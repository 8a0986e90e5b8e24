"""The TPU stack on a CPU.  Outside .venv-tpu these tests fail instead of being skipped."""

import importlib.util

import pytest


def pytest_configure() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise pytest.UsageError("tests/tpu/stack needs vllm-tpu, which is not in this environment; run make test-tpu")
