"""What the tests of the TPU tier share.  They fail, and never skip, outside the environment that they are for."""

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # vllm_on_cpu, tiny_models


def pytest_configure() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise pytest.UsageError("tests/tpu needs vllm-tpu, which is not in this environment; run make test-tpu")
