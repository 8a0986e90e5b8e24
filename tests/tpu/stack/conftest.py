"""The TPU stack on a CPU.  Outside .venv-tpu these tests fail instead of being skipped."""

import importlib.util
import sys
from pathlib import Path

import pytest

LONGEST = ("test_rehearsal.py", "test_vllm.py", "test_preflight.py", "test_maxtext_rl.py", "test_smoke_test.py")

sys.path.append(str(Path(__file__).parents[1]))  # parity; last, because its files and those here have the same names


def pytest_configure() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise pytest.UsageError("tests/tpu/stack needs vllm-tpu, which is not in this environment; run make test-tpu")


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that two workers end together.

    --dist loadgroup: the tests of a file share what they made, but those of test_smoke_test.py are minutes each.
    """
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    for item in items:
        if item.path.name != "test_smoke_test.py":
            item.add_marker(pytest.mark.xdist_group(item.path.name))
