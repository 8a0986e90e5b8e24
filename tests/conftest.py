"""What all tests share: caches inside the repo, the CPU, --run-long and --run-nightly, the order, and a list of what
did not run."""

import functools
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import filelock
import hypothesis
import pytest

from grpo_lib.common import boundary, environment

BROWSERS = (
    *("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"),
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)

# Before any test module imports JAX.
environment.prepare()
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that needs the network is a mistake; it fails at once


# A busy machine is not a failure; the suite as a whole is timed, not single examples.
hypothesis.settings.register_profile("course", deadline=None)
hypothesis.settings.load_profile("course")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-long", action="store_true", help="also run the tests marked long, which take minutes each")
    parser.addoption("--run-nightly", action="store_true", help="also run the tests marked nightly, which CI does not")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what was not asked for, then put the files in order.

    pytest-randomly has shuffled the files, and the tests of each file.  A file stays in one piece: its tests share
    fixtures.  Files that only have fast tests come first, where a plain mistake shows within seconds; then those whose
    tests say how many minutes they take, the longest first, so that two workers end together; then the others.
    """
    for item in items:
        option = _missing_option(config, item)
        if option:
            item.add_marker(pytest.mark.skip(reason=f"{option.removeprefix('--run-')}: give {option}"))
    places: dict[Path, tuple[bool, float]] = {}
    for item in items:
        slow, minutes = places.get(item.path, (False, 0))
        places[item.path] = (slow or _is_slow(item), max(minutes, _minutes(item)))
    order = sorted(places, key=lambda path: (places[path][0], -places[path][1]))
    # Both sorts are stable: files of one place stay as pytest-randomly has shuffled them.
    items.sort(key=lambda item: order.index(item.path))


def _missing_option(config: pytest.Config, item: pytest.Item) -> str | None:
    """The option without which this test does not run; None if it runs."""
    for name in ("nightly", "long"):
        if item.get_closest_marker(name):
            option = f"--run-{name}"
            return None if config.getoption(option) else option
    return None


def _is_slow(item: pytest.Item) -> bool:
    marks = ("slow", "long", "nightly", "browser")
    return not item.get_closest_marker("skip") and any(item.get_closest_marker(name) for name in marks)


def _minutes(item: pytest.Item) -> float:
    """The most minutes that a mark of this test names; 0 where none does, or where it does not run."""
    if item.get_closest_marker("skip"):
        return 0
    return max((mark.kwargs.get("minutes", 0) for mark in item.iter_markers()), default=0)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """List the tests that did not run, by reason: a suite that skips silently looks greener than it is.  Then the seed
    of the order, with which the same order comes again."""
    skipped = [report.longrepr for report in terminalreporter.stats.get("skipped", [])]
    # One is (file, line, "Skipped: reason") or an object.
    reasons = Counter(str(one[2] if isinstance(one, tuple) else one).removeprefix("Skipped: ") for one in skipped)
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"did not run: {reason} ({count} test{'s' if count > 1 else ''})")
    if config.pluginmanager.hasplugin("randomly"):
        seed = config.getoption("randomly_seed")
        terminalreporter.write_line(f"random order; the same again: PYTEST_ADDOPTS=--randomly-seed={seed}")


@pytest.fixture(scope="session", autouse=True)
def own_code() -> None:
    """What tests run is the repository's own: it needs no boundary, and has one where this machine does."""
    if boundary.found().kind == boundary.NONE:
        os.environ[boundary.OFF] = "1"


@pytest.fixture(scope="session")
def python_for_all(tmp_path_factory) -> Iterator[tuple[Path, Path]]:
    """A Python and a folder with NumPy that every user can read: those of the tests may be in a private home."""
    import numpy

    with tempfile.TemporaryDirectory(prefix="python-") as place:  # pytest's own folders are private
        folder = Path(place)
        folder.chmod(0o755)
        packages = Path(numpy.__file__).parents[1]
        library = boundary.PYTHON.parents[1] / "lib"
        wanted = [boundary.PYTHON, *library.glob("libpython*"), library / f"python3.{sys.version_info.minor}"]
        places = {path: folder / path.relative_to(boundary.PYTHON.parents[1]) for path in wanted}
        places |= {packages / name: folder / "packages" / name for name in ("numpy", "numpy.libs")}
        for path, copy in places.items():
            copy.parent.mkdir(parents=True, exist_ok=True)
            leave = shutil.ignore_patterns("site-packages", "test", "tests", "__pycache__", "*.a")
            if path.is_dir():
                shutil.copytree(path, copy, ignore=leave, symlinks=True)
            elif path.exists():
                shutil.copy2(path, copy)
        yield folder / "bin" / boundary.PYTHON.name, folder / "packages"


@pytest.fixture(params=[boundary.BUBBLEWRAP, boundary.ANOTHER_USER])
def isolation(request, monkeypatch) -> str:
    """Each boundary; tests with one that this machine lacks are skipped, and the last lines say so."""
    if request.param == boundary.ANOTHER_USER and os.geteuid() == 0:
        python, _ = request.getfixturevalue("python_for_all")
        monkeypatch.setattr(boundary, "PYTHON", python)
    monkeypatch.setattr(boundary, "found", lambda: boundary.Found(request.param))
    monkeypatch.setenv(boundary.OFF, "")
    if reason := _missing(request.param):
        if request.param in os.environ.get("GRPO_BOUNDARIES", ""):  # .ci/run has installed it
            pytest.fail(reason)
        pytest.skip(f"isolation: {request.param}: {reason}")
    return request.param


@pytest.fixture
def no_boundary(monkeypatch) -> Iterator[None]:
    """A machine without bubblewrap, and not root."""
    monkeypatch.setenv(boundary.OFF, "")
    monkeypatch.setattr(boundary, "BWRAP", "bwrap-that-is-not-there")
    monkeypatch.setattr(boundary.os, "geteuid", lambda: 1000)
    boundary.found.cache_clear()
    yield
    boundary.found.cache_clear()


@functools.cache
def _missing(kind: str) -> str:
    return boundary._missing(kind)


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


@pytest.fixture
def grpo(root, monkeypatch, capsys):
    """Runs a command in this process: most of a command's seconds are its imports."""
    from grpo_train import cli

    def run(*arguments) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["grpo", *map(str, arguments)])
        monkeypatch.chdir(root)
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        shown = capsys.readouterr()
        return SimpleNamespace(returncode=end.value.code or 0, stdout=shown.out, stderr=shown.err)

    return run


@pytest.fixture(scope="session")
def tiny_recipe(root: Path):
    """The course's own recipe."""
    from grpo_train.recipes import load_recipe

    return load_recipe(root / "recipes" / "tiny-cpu.yaml")


@pytest.fixture(scope="session")
def tokenizer(tiny_recipe):
    """The tiny model's tokenizer."""
    from grpo_train.engines.tokens import load_tokenizer

    return load_tokenizer(tiny_recipe.model)


@pytest.fixture(scope="session")
def converted_base(tiny_recipe, tmp_path_factory) -> Path:
    """The tiny model as a MaxText checkpoint; converted once, also where several workers of pytest-xdist want it."""
    from grpo_train.engines import conversion

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with filelock.FileLock(folder / "converted.lock"):
        return conversion.convert_to_maxtext(tiny_recipe.model, folder / "converted" / "base")


@pytest.fixture(scope="session")
def tiny_actor(tiny_recipe, converted_base):
    """The tiny model in MaxText."""
    from grpo_train.engines import maxtext_model

    return maxtext_model.load_actor(tiny_recipe.model, converted_base, max_length=64)


@pytest.fixture(scope="session")
def rollout_config():
    """Short prompts and completions, sampled from the policy itself."""
    from tunix.rl.rollout.base_rollout import RolloutConfig

    return RolloutConfig(
        max_tokens_to_generate=12, max_prompt_length=32, kv_cache_size=44, temperature=1.0, top_p=1.0, top_k=None
    )


@pytest.fixture
def sampler(tiny_actor, tokenizer, rollout_config):
    """Tunix's sampler with the tiny model."""
    from grpo_train.engines.tunix_sampler import TunixSampler

    return TunixSampler(tiny_actor.module, tokenizer, tiny_actor.mesh, rollout_config, seed=7)


def find_chromium() -> str | None:
    """Return the Chromium to use: $CHROMIUM, or the first one on PATH, or macOS's usual place."""
    for place in (os.environ.get("CHROMIUM"), *BROWSERS):
        program = shutil.which(place) if place else None
        if program:
            return program
    return None


@pytest.fixture(scope="session")
def chromium(request: pytest.FixtureRequest) -> str:
    """The path of a Chromium; tests that use it are skipped without one."""
    path = find_chromium()
    if path is None:
        reason = "browser: no Chromium found; install one, or set CHROMIUM to its program"
        # Whoever names a browser, or asks for the long tests too, wants these to run. .ci/run does both.
        asked = any(request.config.getoption(option) for option in ("--run-long", "--run-nightly"))
        if asked or "CHROMIUM" in os.environ:
            pytest.fail(reason)
        pytest.skip(reason)
    return path


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    """A Chromium for the tests of a file, driven by Playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()
