"""The Python finder, the locks, and what the READMEs and docs/ claim: commands, links and numbers."""

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

import pytest
import typer
import yaml
from packaging.requirements import Requirement

from grpo_lib import analysis, statistics
from grpo_lib.records import EvalRun, summarize

# --- dev/tools/find-python.sh -------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["bin/python3", ".pyenv/versions/3.12.9/bin/python3", "miniconda3/bin/python3"])
def test_finder_goes_past_a_shim_that_fails(root: Path, tmp_path: Path, place: str) -> None:
    """The python3.12 on PATH is a shim that fails; another Python is in one of the usual places."""
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "sh"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    shim = "echo 'pyenv: command not found' >&2; exit 127"
    for name, line in {"bin/python3.12": shim, place: f'exec "{sys.executable}" "$@"'}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        path.chmod(0o755)
    result = subprocess.run(
        [str(root / "dev" / "tools" / "find-python.sh")],
        env={"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0
    assert Path(result.stdout.strip()).exists()
    assert result.stderr == ""


# --- requirements/ --------------------------------------------------------------------------------------------


# Of pure Python, without a wheel in any version.
ONLY_SOURCE = ["antlr4-python3-runtime", "promise", "colorful", "smart-open"]


def pins(path: Path) -> dict[str, str]:
    """Return name → version of a lock."""
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE))


def test_no_lock_names_an_index(root: Path) -> None:
    for path in (root / "requirements").iterdir():
        text = path.read_text(encoding="utf-8")
        assert not [word for word in ("-url", "-links", "://", "file:") if word in text], path.name


@pytest.mark.long(minutes=1)
@pytest.mark.parametrize(
    ("name", "version"),
    [
        *((name, version) for name in ("bootstrap", "cpu", "site", "smollm2") for version in ("3.12", "3.13")),
        ("tpu", "3.12"),
    ],
)  # vllm-tpu 0.31.0 has no wheel for Python 3.13
def test_every_package_of_a_lock_has_a_file_for_this_python(root: Path, tmp_path: Path, name, version) -> None:
    lock = root / "requirements" / f"{name}.lock"
    environment = [f"--python={sys.executable}", f"--python-version={version}", f"--target={tmp_path}"]
    files = ["--only-binary=:all:", *(f"--no-binary={name}" for name in ONLY_SOURCE)]
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--dry-run", "--no-deps", "--require-hashes"]
    found = subprocess.run([*uv, *environment, *files, "-r", str(lock)], capture_output=True, text=True, timeout=300)
    if "error sending request" in found.stderr:
        pytest.skip("the package index, for every file of the locks")
    assert found.returncode == 0, found.stderr[-800:]
    assert int(re.findall(r"Would install (\d+)", found.stderr)[0]) > 0.98 * len(pins(lock))  # some are for macOS


def test_cpu_lock_is_a_subset_of_tpu_lock(root: Path) -> None:
    cpu = pins(root / "requirements" / "cpu.lock")
    tpu = pins(root / "requirements" / "tpu.lock")
    assert len(tpu) > 400
    assert not set(cpu) & {"torch", "vllm", "vllm-tpu", "tpu-inference", "libtpu", "tensorflow"}
    assert not re.search("^(torch|nvidia|cuda)", "\n".join(pins(root / "requirements" / "trl.lock")), re.MULTILINE)
    only_macos = {"appnope"}
    for name in cpu.keys() - only_macos:
        assert tpu.get(name) == cpu[name], name


@pytest.mark.parametrize(("lock", "names"), [("cpu.lock", ["cpu", "dev"]), ("tpu.lock", ["cpu", "dev", "tpu"])])
def test_lock_holds_what_is_asked_for(root: Path, lock: str, names: list[str]) -> None:
    locked = pins(root / "requirements" / lock)
    lines = [line for name in names for line in (root / "requirements" / f"{name}.in").read_text().splitlines()]
    asked = [Requirement(line) for line in (line.partition("#")[0].strip() for line in lines) if line]
    assert [str(one) for one in asked if not one.specifier.contains(locked[one.name], prereleases=True)] == []


def test_tensorboard_has_one_profiler_and_it_needs_no_tensorflow() -> None:
    profilers = [one for one in entry_points(group="tensorboard_plugins") if one.name == "profile"]
    assert [one.value.partition(".")[0] for one in profilers] == ["xprof"]
    # Without this name TensorBoard shows a second PROFILE tab, which asks the reader to install it.
    assert find_spec("tensorboard_plugin_profile")


# --- READMEs and docs/ ----------------------------------------------------------------------------------------


def commands(text: str) -> list[str]:
    """Return the commands of all shell blocks of a Markdown text, without their comments."""
    blocks = re.findall(r"^ *```(?:bash|console|sh)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    lines = [line.partition(" # ")[0].strip() for line in "".join(blocks).splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def links(text: str) -> list[str]:
    return sorted(set(re.findall(r"\]\(((?!README|https?:)[^)#\s]+)[^)]*\)", text)))


def figures(text: str) -> list[list[str]]:
    """The numbers of each row of a table."""
    return [re.findall(r"\d[\d.,e-]*", row) for row in re.findall(r"^\|.*", text, re.MULTILINE)]


def test_the_two_readmes_are_in_step(root: Path) -> None:
    english, chinese = ((root / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
    for part in (commands, links, figures):
        assert part(english) == part(chinese)


def test_commands_and_links_of_the_texts_exist(root: Path) -> None:
    from grpo_train import cli

    makefile = (root / "Makefile").read_text(encoding="utf-8")
    known = {("make", target): set() for target in re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)}
    for name, one in typer.main.get_command(cli.command_line()).commands.items():  # type: ignore[attr-defined]
        known["grpo", name] = {"--help", *(flag for each in one.params for flag in each.opts + each.secondary_opts)}
    for path in [*root.glob("*.md"), *(root / "docs").glob("*.md"), *(root / "teaching").rglob("*.md")]:
        place = path.relative_to(root)
        text = path.read_text(encoding="utf-8")
        # What students get has the links of their folder, where exercises/ and assignment-a/ are in the root.
        folders = [root, root / "teaching"] if path.parent.name == "student" else [path.parent]
        assert [link for link in links(text) if not any((folder / link).exists() for folder in folders)] == [], place
        lines = "\n".join([*commands(text.replace("\\\n", " ")), *re.findall("`([^`\n]+)`", text)])
        for tool, name, rest in re.findall(
            r"(?m)(?:^|[\s/;'\"])(grpo|make) ([a-z][a-z-]*)(?![\w/-])([^;&|\n]*)", lines
        ):
            flags = set(re.findall(r"(?<!\S)--[a-z-]+", rest))
            exists = (tool, name) in known and flags <= known[tool, name]
            assert exists or path.name == "CHANGELOG.md", f"{place}: {tool} {name}{rest}"  # it names what is gone
        for script, rest in re.findall(r"python (\S+\.py)([^;&|\n]*)", lines):
            found = [one for one in (root / script, root / "teaching" / script) if one.exists()]  # a student's folder
            assert found, f"{place}: {script}"
            assert [flag for flag in re.findall("--[a-z-]+", rest) if flag not in found[0].read_text()] == [], place


def summary_of(root: Path, folder: str) -> dict:
    """The summary of a run that assets/reference keeps."""
    return json.loads((root / "assets" / "reference" / folder / "summary.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["README.md", "README.zh.md", "docs/results.md"])
def test_figures_of_the_readmes_are_those_of_the_files(root: Path, name: str) -> None:
    text = (root / name).read_text(encoding="utf-8")
    if name.startswith("README") and not (root / "teaching").exists():
        pytest.skip("a student's folder: its README has no results")
    for folder in ("course", "seed1", "seed2", *(f"{kind}{n}" for kind in ("hacked", "repaired") for n in ("", 1, 2))):
        summary = summary_of(root, folder)
        assert f"{summary['before']['accuracy']:.1%} → {summary['after']['accuracy']:.1%}" in text
        assert all(f"{100 * end:+.1f}" in text for end in summary["difference_interval"])
        assert f"{summary['mcnemar_p']:.0e}" in text or folder[0] in "hr"


@pytest.mark.parametrize("name", ["README.md", "README.zh.md", "docs/results.md"])
def test_figures_of_the_real_model_are_those_of_its_seeds(root: Path, name: str) -> None:
    text = (root / name).read_text(encoding="utf-8").replace("\N{MINUS SIGN}", "-")
    if name.startswith("README") and not (root / "teaching").exists():
        pytest.skip("a student's folder: its README has no results")

    from grpo_train.report import experiments

    arms = ("start", "maxrl", "grpo")
    right = {arm: experiments.by_seed("real-blind", arm, lambda run: run["accuracy"]) for arm in arms}
    for shares in right.values():
        assert f"{100 * shares.mean():.1f}" in text
    for arm in ("maxrl", "grpo"):
        gains = right[arm] - right["start"]
        assert f"{100 * gains.mean():.1f}" in text
        for end in statistics.mean_interval(gains):
            assert f"{100 * end:+.1f}" in text


def test_figures_of_the_real_models_runs_are_those_of_their_summaries(root: Path) -> None:
    text = (root / "docs" / "results.md").read_text(encoding="utf-8")
    seeds = [summary_of(root, folder) for folder in ("smollm2", "smollm2-1", "smollm2-2")]
    gains = [run["difference"] for run in seeds]
    shares = [fmean(run[when]["accuracy"] for run in seeds) for when in ("before", "after")]
    shares += [summary_of(root, "smollm2-spaces")[when]["accuracy"] for when in ("before", "after")]
    for share in shares:
        assert f"{100 * share:.1f}" in text
    for gain in (fmean(gains), *statistics.clustered_interval(gains)):
        assert f"{100 * gain:.1f}" in text


def test_the_table_of_spellings_is_that_of_its_record(root: Path) -> None:
    text = (root / "docs" / "results.md").read_text(encoding="utf-8")
    record = json.loads((root / "assets" / "reference" / "spelling.json").read_text(encoding="utf-8"))
    for spelling in ("9 * 5 =", "9*5=", "<reasoning>9 * 5 =", "<reasoning>9*5="):
        cells = []
        for signs in ("+-*", "+", "-", "*"):
            asked = [row for row in record["problems"] if row["sign"] in signs]
            cells.append(f"{100 * fmean(row[spelling] == row['right'] for row in asked):.1f} %")
        (row,) = [line for line in text.splitlines() if line.startswith(f"| the base, given `{spelling}`")]
        assert row.endswith(f"| {' | '.join(cells)} |")


def test_the_rows_of_the_runs_in_that_table_are_counted_in_their_answers(root: Path) -> None:
    lines = (root / "docs" / "results.md").read_text(encoding="utf-8").splitlines()
    given = json.loads((root / "assets" / "reference" / "spelling.json").read_text(encoding="utf-8"))["problems"]
    for folder in ("smollm2", "smollm2-spaces"):
        for when in ("before", "after"):
            (evals,) = (root / "assets" / "reference" / folder / "evals").glob(f"{when}.jsonl*")
            rights: dict[str, list[bool]] = {"+": [], "-": [], "*": []}
            for row, answer in zip(given, EvalRun.load(evals).counted, strict=False):
                asked = [row["a"], row["sign"], row["b"]]
                written = analysis.simple_calculations(answer["completion"])
                results = [result for *calculation, result in written if calculation == asked]
                rights[row["sign"]] += [result == row["right"] for result in results[:1]]
            every = [right for some in rights.values() for right in some]
            cells = [f"{100 * fmean(some):.1f} %" for some in (every, *rights.values())]
            assert [line for line in lines if line.endswith(f"| {' | '.join(cells)} |")], (folder, when)


def test_the_shipped_summary_is_that_of_its_evaluations(root: Path) -> None:
    run = root / "assets" / "reference" / "course"
    found = summarize(*(EvalRun.load(run / "evals" / f"{when}.jsonl") for when in ("before", "after")))
    shipped = summary_of(root, "course")
    for key in ("difference", "difference_interval", "mcnemar_p"):
        assert found[key] == pytest.approx(shipped[key])


def test_hardware_table_is_that_of_the_preflights(root: Path) -> None:
    import preflight_results

    from grpo_train.tpu import preflight

    rows = preflight_results.hardware_table(preflight.saved_results()).splitlines()[2:]
    assert "\n".join(rows) in (root / "docs" / "tpu.md").read_text(encoding="utf-8")


def test_the_names_of_09a_have_the_settings_of_the_tiny_recipes_profiles(root: Path) -> None:
    """In the table of both languages: what each of the six profiles changes, and nothing else."""
    profiles = yaml.safe_load((root / "recipes/tiny-cpu.yaml").read_text("utf-8"))["profiles"]
    wanted = {
        f"{key}: {value}"
        for name in ("dr-grpo", "maxrl", "rloo", "dapo", "gspo", "tis")
        for key, value in profiles[name]["grpo"].items()
    }
    notebook = json.loads((root / "notebooks/further/09a_which_algorithm.ipynb").read_text("utf-8"))
    (english,) = ("".join(cell["source"]) for cell in notebook["cells"] if cell["id"] == "names")
    catalogue = (root / "dev/translations/zh_TW/further/09a_which_algorithm.po").read_text("utf-8")
    (chinese,) = (entry for entry in catalogue.split("\n\n") if 'msgctxt "names"' in entry)
    for text in (english, chinese.partition("msgstr")[2]):
        assert set(re.findall(r"`([a-z_]+: [\w.-]+)`", text)) == wanted
