"""What all tests share: caches inside the repo, the CPU, the order, and a last word on what did not run."""

import os
import shutil
from pathlib import Path

import filelock
import hypothesis
import pytest

from grpo_lib import environment

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

# Before any test module imports JAX.
environment.prepare()
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that needs the network is a mistake; it fails at once


# A busy machine is no failure; the suite as a whole is timed, not single examples.
hypothesis.settings.register_profile("course", deadline=None)
hypothesis.settings.load_profile("course")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first: a plain mistake shows within seconds. The sort is stable, files keep their order."""
    items.sort(key=lambda item: ("slow" in item.keywords) + 2 * ("browser" in item.keywords))


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter) -> None:
    """Say which tests were left out and why; a suite that skips in silence looks greener than it is."""
    reasons: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        # longrepr of a skip is (file, line, "Skipped: reason")
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        reasons[reason] = reasons.get(reason, 0) + 1
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"did not run: {reason} ({count} test{'s' if count > 1 else ''})")


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the repo."""
    return environment.repo_root()


@pytest.fixture(scope="session")
def gsm8k_dir(root: Path) -> Path:
    """The folder with GSM8K's train.jsonl and test.jsonl; tests that use it are skipped without it."""
    for folder in (os.environ.get("GSM8K_DIR"), root.parent / "shared" / "gsm8k"):
        if folder and (Path(folder) / "test.jsonl").is_file():
            return Path(folder)
    pytest.skip("GSM8K: set GSM8K_DIR to the folder with its train.jsonl and test.jsonl")


@pytest.fixture(scope="session")
def tiny_recipe(root: Path):
    """The course's own recipe."""
    from grpo_lib.recipes import load_recipe

    return load_recipe(root / "recipes" / "tiny-cpu.yaml")


@pytest.fixture(scope="session")
def tokenizer(tiny_recipe):
    """The tiny model's tokenizer."""
    from grpo_lib import models

    return models.load_tokenizer(tiny_recipe.model)


@pytest.fixture(scope="session")
def converted_base(tiny_recipe, tmp_path_factory) -> Path:
    """The tiny model as a MaxText checkpoint; converted once, also where several workers of pytest-xdist want it."""
    from grpo_lib import models

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with filelock.FileLock(folder / "converted.lock"):
        return models.convert_to_maxtext(tiny_recipe.model, folder / "converted" / "base")


@pytest.fixture(scope="session")
def tiny_actor(tiny_recipe, converted_base):
    """The tiny model in MaxText."""
    from grpo_lib import models

    return models.load_actor(tiny_recipe.model, converted_base, max_length=64)


def find_chromium() -> str | None:
    """Return the Chromium to use: $CHROMIUM, or the first one on PATH, or macOS's usual place."""
    places = [os.environ.get("CHROMIUM"), *BROWSERS, "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"]
    return next((found for place in places if place and (found := shutil.which(place))), None)


@pytest.fixture(scope="session")
def chromium() -> str:
    """The program of a Chromium; tests that use it are skipped without one."""
    path = find_chromium()
    if path is None:
        reason = "browser: no Chromium found; install one, or set CHROMIUM to its program"
        if os.environ.get("GRPO_REQUIRE_BROWSER"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path
