"""Every recipe and every profile, rehearsed through the real vLLM engine on virtual CPU devices.

Recipes and profiles are found by listing.  Those that come down to one and the same rehearsal (the two losses until the
kernel is there, one recipe on two slices) are rehearsed once, since the second run would repeat the first.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_lib import environment, rehearsal
from grpo_lib.files import read_jsonl
from grpo_lib.recipes import load_recipe, profiles_of
from grpo_lib.rollout import MAX_MEAN_GAP

ROOT = environment.repo_root()


def every_recipe() -> list[str]:
    """FILE and FILE@PROFILE of all there is, and all profiles of a file together."""
    found = []
    for file in sorted((ROOT / "recipes").glob("*.yaml")):
        profiles = profiles_of(file)
        together = [",".join(profiles)] if len(profiles) > 1 else []
        found += [file.name, *(f"{file.name}@{profile}" for profile in [*profiles, *together])]
    return found


def shapes() -> dict[str, list[str]]:
    """The last recipe of each kind -> all recipes of which the rehearsals differ in nothing but their name."""
    found: dict[str, list[str]] = {}
    for name in every_recipe():
        scaled = rehearsal.rehearsal_recipe(load_recipe(ROOT / "recipes" / name), wandb=True)
        found.setdefault(scaled.model_copy(update={"name": "any"}).model_dump_json(), []).append(name)
    return {names[-1]: names for names in found.values()}


SHAPES = shapes()
BASES: dict[str, Path] = {}  # dtype -> the tiny model, as the first rehearsal in it converted it


def test_no_recipe_is_left_out():
    assert sorted(name for names in SHAPES.values() for name in names) == sorted(every_recipe())


@pytest.mark.parametrize("name", SHAPES, ids=lambda name: " = ".join(SHAPES[name]))
def test_rehearsal_is_green(name, tmp_path, monkeypatch, request):
    try:
        monkeypatch.setenv("GSM8K_DIR", str(request.getfixturevalue("gsm8k_dir")))
    except pytest.skip.Exception:  # without its files, word problems stand in, as the command says
        monkeypatch.delenv("GSM8K_DIR", raising=False)
    path = ROOT / "recipes" / name
    recipe = load_recipe(path)
    command = [sys.executable, "-m", "grpo_lib.cli", "rehearse", str(path), "--runs", str(tmp_path), "--json"]
    if recipe.model.dtype in BASES:
        command += ["--base", str(BASES[recipe.model.dtype])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["green"] and result["engine"] == recipe.rollout.engine
    assert result["weights"] > 0 and result["mean_gap"] < MAX_MEAN_GAP[recipe.model.dtype]

    run = Path(result["run"])
    BASES.setdefault(recipe.model.dtype, run / "checkpoints" / "base")
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["loss"] is not None for row in rows)
    assert ("kl" in rows[-1]) == bool(recipe.grpo.beta)
    rehearsed = load_recipe(run / "recipe.yaml")
    assert rehearsed.problems.source == recipe.problems.source or "word problems stood in" in " ".join(result["notes"])
    for when in ("before", "after"):
        records = read_jsonl(run / "evals" / f"{when}.jsonl")
        assert len(records) == rehearsal.PROBLEMS["test"]
        assert {record["id"].split("-")[0] for record in records} == {rehearsed.problems.source}
    assert list((run / "export").glob("*.safetensors")) and list((run / "checkpoints" / "actor").glob("2"))
    assert (run / "report.html").stat().st_size > 10_000
    said = " ".join(result["notes"])
    assert ("pallas is not built yet" in said) == (recipe.loss.implementation == "pallas")
