"""The wheel in an empty environment: grpo_lib is usable as it is, and `grpo` says which extra the rest needs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long(minutes=1)

IMPORT_ALL = """
import importlib, pkgutil, grpo_lib
left_out = ("grpo_lib.plain_grpo", "grpo_lib.conformance.test_conformance")  # the latter needs pytest
for module in pkgutil.walk_packages(grpo_lib.__path__, "grpo_lib."):
    if module.name not in left_out:
        importlib.import_module(module.name)
try:
    import grpo_lib.plain_grpo
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def installed(root: Path, tmp_path_factory) -> Path:
    """The programs of an environment that has the wheel, what it depends on, and nothing else."""
    folder, uv = tmp_path_factory.mktemp("wheel"), str(Path(sys.executable).with_name("uv"))
    source = folder / "source"
    # A copy: setuptools writes build/ next to what it packs.
    listed = ["grpo_lib", "grpo_train", "teaching/grpo_teach", "requirements", "pyproject.toml", "LICENSE", "README.md"]
    subprocess.run(["cp", "-R", "--parents", *listed, _made(source)], cwd=root, check=True)
    build = [uv, "build", "--quiet", "--wheel", "--no-build-isolation", "--python", sys.executable, "-o", folder]
    subprocess.run([*build, source], check=True)
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder / "env"], check=True)
    [wheel] = folder.glob("*.whl")
    into = ["--python", folder / "env" / "bin" / "python"]
    done = subprocess.run([uv, "pip", "install", "--quiet", *into, wheel], capture_output=True, text=True)
    if "error sending request" in done.stderr:
        pytest.skip("the package index, for what the wheel depends on")
    assert done.returncode == 0, done.stderr
    return folder / "env" / "bin"


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.fixture
def run(installed, tmp_path):
    """Runs a program of the environment, in an empty folder and with an empty home folder."""

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess:
        variables = {name: value for name, value in os.environ.items() if name.startswith(("LANG", "LC_"))}
        variables |= {"PATH": f"{installed}:/usr/bin:/bin", "HOME": str(tmp_path / "home")}
        place = tmp_path / "empty"
        place.mkdir(exist_ok=True)
        command = [str(installed / program), *arguments]
        done = subprocess.run(command, cwd=place, env=variables, capture_output=True, text=True)
        assert list(place.iterdir()) == [], "files are left where one stands"
        return done

    return run


def test_version_and_help(run) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", run("grpo", "--version").stdout)
    shown = run("grpo", "--help").stdout
    assert all(f"\n  {name} " in shown for name in ("train", "evaluate", "preflight", "check"))


def test_all_of_grpo_lib_is_imported_but_plain_grpo_which_names_its_extra(run) -> None:
    done = run("python", "-c", IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    assert "plain_grpo needs jax" in done.stdout and "[train]" in done.stdout


def test_the_graders_example_of_the_readme_runs(root, run) -> None:
    [example] = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    done = run("python", "-c", example)
    assert done.returncode == 0, done.stderr
    # The comment at the end of each line that prints says what it prints.
    assert done.stdout.splitlines() == re.findall(r"print\(.*\)  # (.*)", example)


def test_a_loss_in_numpy_is_checked(run, tmp_path) -> None:
    adapter = tmp_path / "by_hand.py"
    adapter.write_text("from grpo_lib.conformance.planted import by_hand\n")
    done = run("grpo", "conformance", f"{adapter}:by_hand")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("20 agrees, 0 differs")


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["config", "recipe.yaml"], "train"),
        (["train", "recipe.yaml"], "train"),
        (["evaluate", "recipe.yaml"], "train"),
        (["convert", "recipe.yaml"], "train"),
        (["export", "run"], "train"),
        (["report", "run"], "train"),
        (["compare", "one", "other"], "train"),
        (["preflight", "recipe.yaml"], "train"),
        (["smoke-test", "recipe.yaml"], "train"),
        (["self-check", "recipe.yaml"], "train"),
        (["check", "3.2"], "teach"),
        (["grade", "."], "teach"),
        (["leaderboard", ".", "--seed", "1"], "teach"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_what_needs_more_says_in_one_line_which_extra_is_missing(root, run, tmp_path, arguments, extra) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text((root / "recipes" / "tiny-cpu.yaml").read_text(encoding="utf-8"))
    done = run("grpo", *(str(recipe) if word == "recipe.yaml" else word for word in arguments))
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: ") and f"'.[{extra}]'" in done.stderr


def test_a_recipe_that_is_not_there_says_where_recipes_are(run) -> None:
    done = run("grpo", "train", "recipes/tiny-cpu.yaml")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "recipe recipes/tiny-cpu.yaml does not exist" in done.stderr and "repository" in done.stderr
