"""The house: the Python finder, setup, the locks, the Makefile, and the two READMEs."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

TOOLS = ("bash", "sh", "dirname", "cat", "cksum", "grep", "tail", "head", "mkdir", "rm", "touch", "make")


def pins(path: Path) -> dict[str, str]:
    """Return name → version of a compiled list."""
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE))


# --- tools/find-python.sh -------------------------------------------------------------------------------------


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder of programs that holds no Python, to be a whole PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        if found := shutil.which(tool):
            (folder / tool).symlink_to(found)
    return folder


def program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def find_python(root: Path, path: Path, home: Path, **variables: str) -> subprocess.CompletedProcess:
    # The folders that the finder looks into on every machine are beside the point here; a test that expects
    # no Python is skipped where one of them has it.
    environment = {"PATH": str(path), "HOME": str(home), **variables}
    return subprocess.run(
        [str(root / "tools" / "find-python.sh")], env=environment, capture_output=True, text=True, timeout=60
    )


def real(version: str = "") -> str:
    """A body that runs the Python of this test, which is a good one."""
    return f'exec "{sys.executable}" "$@"'


BROKEN = "echo 'pyenv: python3.12: command not found' >&2; exit 127"


def test_finder_takes_python_3_12_from_path(root: Path, bare: Path, tmp_path: Path) -> None:
    program(bare / "python3.12", real())
    result = find_python(root, bare, tmp_path)
    assert result.returncode == 0 and Path(result.stdout.strip()).exists()


def test_finder_goes_past_a_shim_that_fails(root: Path, bare: Path, tmp_path: Path) -> None:
    program(bare / "python3.12", BROKEN)
    program(bare / "python3", real())
    result = find_python(root, bare, tmp_path)
    assert result.returncode == 0 and result.stderr == ""


def test_finder_goes_past_a_python_that_is_too_old(root: Path, bare: Path, tmp_path: Path) -> None:
    program(bare / "python3.12", BROKEN)
    program(bare / "python3", "exit 1")  # what the check of the version does on an old one
    kept = program(tmp_path / ".pyenv" / "versions" / "3.12.1" / "bin" / "python3", real())
    result = find_python(root, bare, tmp_path)
    assert kept.exists() and result.returncode == 0


@pytest.mark.parametrize(
    "place",
    [
        ".pyenv/versions/3.12.9/bin/python3",
        "miniforge3/bin/python3",
        "miniconda3/envs/with space/bin/python3",
        ".local/share/uv/python/cpython-3.12.9-linux-x86_64-gnu/bin/python3",
    ],
)
def test_finder_looks_where_versions_are_kept(root: Path, bare: Path, tmp_path: Path, place: str) -> None:
    program(tmp_path / place, real())
    assert find_python(root, bare, tmp_path).returncode == 0


def test_finder_believes_the_variable_or_fails(root: Path, bare: Path, tmp_path: Path) -> None:
    good = find_python(root, bare, tmp_path, PYTHON=sys.executable)
    assert good.returncode == 0
    bad = find_python(root, bare, tmp_path, PYTHON=str(program(tmp_path / "python", BROKEN)))
    assert bad.returncode == 1 and bad.stdout == ""
    assert bad.stderr.startswith("error: PYTHON=") and bad.stderr.count("\n") == 1


def test_no_python_is_one_line_that_says_what_to_install(root: Path, bare: Path, tmp_path: Path) -> None:
    program(bare / "python3.12", BROKEN)
    result = find_python(root, bare, tmp_path)
    if result.returncode == 0:
        pytest.skip(f"finder: this machine keeps a Python at {Path(result.stdout.strip()).parts[1]}/…")
    assert result.stdout == "" and result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: no Python 3.12") and "install" in result.stderr


# --- make setup -----------------------------------------------------------------------------------------------


@pytest.fixture
def clone(root: Path, tmp_path: Path) -> Path:
    """A copy of what setup needs, in a folder with a space in its name."""
    copy = tmp_path / "a clone"
    for name in ("Makefile", "pyproject.toml"):
        copy.mkdir(exist_ok=True)
        shutil.copy(root / name, copy / name)
    shutil.copytree(root / "tools", copy / "tools")
    shutil.copytree(root / "requirements", copy / "requirements")
    (copy / "grpo_lib").mkdir()
    shutil.copy(root / "grpo_lib" / "environment.py", copy / "grpo_lib" / "environment.py")
    return copy


def setup(clone: Path, **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "UV_CACHE_DIR": str(clone / "empty"), **variables}
    environment.pop("MAKEFLAGS", None)
    return subprocess.run(["make", "setup"], cwd=clone, env=environment, capture_output=True, text=True, timeout=300)


def test_setup_without_network_says_so_and_leaves_no_stamp(clone: Path) -> None:
    # A proxy that nobody listens on stands for a missing network.
    closed = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    result = setup(clone, PYTHON=sys.executable, no_proxy="", NO_PROXY="", **closed)
    errors = [line for line in result.stderr.splitlines() if not line.startswith("make")]
    assert result.returncode != 0
    assert len(errors) == 1 and errors[0].startswith("error: the Python package index could not be reached")
    assert not (clone / ".venv" / ".complete").exists()


def test_setup_without_python_says_so(clone: Path) -> None:
    result = setup(clone, PYTHON="/nonexistent/python3.12")
    errors = [line for line in result.stderr.splitlines() if not line.startswith("make")]
    assert result.returncode != 0 and len(errors) == 1
    assert errors[0].startswith("error: PYTHON=/nonexistent/python3.12 is not a working Python")
    assert not (clone / ".venv").exists()


# --- the locks ------------------------------------------------------------------------------------------------


def test_lock_has_a_hash_for_every_package(root: Path) -> None:
    for name in ("cpu.lock", "tpu.lock", "bootstrap.lock"):
        text = (root / "requirements" / name).read_text(encoding="utf-8")
        blocks = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]
        assert blocks and all("--hash=sha256:" in block for block in blocks), name


def test_requirements_name_no_index_and_no_machine(root: Path) -> None:
    for path in [*(root / "requirements").iterdir(), root / "environment.yml", root / "pyproject.toml"]:
        text = path.read_text(encoding="utf-8")
        for word in ("-url", "-links", "://", "autogenerated", "file:"):
            assert word not in text, f"{path.name} holds {word}"


def test_cpu_lock_is_without_the_tpu_stack(root: Path) -> None:
    names = set(pins(root / "requirements" / "cpu.lock"))
    assert not names & {"torch", "torchvision", "vllm", "vllm-tpu", "tpu-inference", "libtpu", "tensorflow"}


def test_cpu_lock_is_a_subset_of_tpu_lock(root: Path) -> None:
    cpu, tpu = pins(root / "requirements" / "cpu.lock"), pins(root / "requirements" / "tpu.lock")
    assert len(tpu) > 400
    only_macos = {"appnope"}
    assert {n: (v, tpu.get(n)) for n, v in cpu.items() if n not in only_macos and tpu.get(n) != v} == {}


@pytest.mark.parametrize(
    ("lock_name", "name"),
    [("cpu.lock", "cpu.in"), ("cpu.lock", "dev.in")] + [("tpu.lock", n) for n in ("cpu.in", "dev.in", "tpu.in")],
)
def test_lock_holds_what_is_asked_for(root: Path, lock_name: str, name: str) -> None:
    lock = pins(root / "requirements" / lock_name)
    for line in (root / "requirements" / name).read_text(encoding="utf-8").splitlines():
        if wanted := line.partition("#")[0].strip():
            requirement = Requirement(wanted)
            assert requirement.specifier.contains(lock[requirement.name], prereleases=True), wanted


def test_every_override_has_a_reason(root: Path) -> None:
    lines = (root / "requirements" / "tpu-overrides.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line and not line.startswith("#") and "  # " not in line] == []


def test_this_environment_is_the_lock(root: Path) -> None:
    from importlib.metadata import version

    for name in ("jax", "flax", "maxtext", "google-tunix", "orbax-checkpoint", "transformers", "numpy"):
        assert version(name) == pins(root / "requirements" / "cpu.lock")[name]


# --- Makefile and READMEs -------------------------------------------------------------------------------------


def test_make_help_lists_every_target(root: Path) -> None:
    text = (root / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)[0].split())
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    listed = subprocess.run(["make", "help"], cwd=root, env=environment, capture_output=True, text=True).stdout
    assert {line.split()[1] for line in listed.splitlines()} == targets


def commands(text: str) -> list[str]:
    """Return the lines of all code blocks of a Markdown text that are commands."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    shell = [block for language, block in blocks if language in ("", "bash", "console", "sh", "shell")]
    lines = [line.partition("  #")[0].strip() for block in shell for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_the_two_readmes_are_in_step(root: Path) -> None:
    english, chinese = ((root / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
    headings = [re.findall(r"^(#+) ", text, re.MULTILINE) for text in (english, chinese)]
    assert headings[0] == headings[1]
    assert commands(english) == commands(chinese)
    links = [sorted(set(re.findall(r"\]\(((?!README)[^)#\s]+)[^)]*\)", text))) for text in (english, chinese)]
    assert links[0] == links[1]
    missing = [link for link in links[0] if "://" not in link and not (root / link).exists()]
    assert missing == []


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_readme_opens_with_the_two_commands(root: Path, name: str) -> None:
    first = commands((root / name).read_text(encoding="utf-8"))[:3]
    assert first[0].startswith("git clone") and first[1:] == ["make course", "make test"]


def test_readme_names_only_targets_that_exist(root: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for line in commands((root / "README.md").read_text(encoding="utf-8")):
        if found := re.match(r"make ([a-z-]+)", line):
            assert found.group(1) in targets, line


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_figures_of_the_readmes_are_those_of_the_files(root: Path, name: str) -> None:
    text, reference = (root / name).read_text(encoding="utf-8"), root / "assets" / "reference"
    assert not re.search(r"(?<!\S)@\w", text), "a placeholder was left"
    for folder in ("course", "seed1", "seed2"):
        summary = json.loads((reference / folder / "summary.json").read_text(encoding="utf-8"))
        for key in ("accuracy", "lenient_accuracy"):
            assert f"{summary['before'][key]:.1%} → {summary['after'][key]:.1%}" in text
        low, high = (f"{100 * end:+.1f}" for end in summary["difference_interval"])
        assert low in text and high in text and f"{summary['mcnemar_p']:.0e}" in text


def test_hardware_table_of_the_readmes_is_that_of_the_preflights(root: Path) -> None:
    from grpo_lib import preflight

    table = preflight.hardware_table(preflight.saved_results())
    assert table in (root / "README.md").read_text(encoding="utf-8")
    chinese = (root / "README.zh.md").read_text(encoding="utf-8")
    for row in table.splitlines()[2:]:
        assert row.replace(", both", " 共用") in chinese
