"""Every recipe and every profile, rehearsed on virtual CPU devices.

Recipes and profiles are found by listing.  Those that come down to one and the same rehearsal (the two losses until the
kernel is there, one recipe on two slices) are rehearsed once, since the second run would repeat the first.  One of each
kind (where the sampler is, KL penalty, updates per batch, loss) goes through the real vLLM engine.  The others take
Tunix's sampler, and minutes each: they run with GRPO_REHEARSE_ALL=1.  A test's name says which engine it is.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from grpo_lib import environment, rehearsal
from grpo_lib.files import read_jsonl
from grpo_lib.recipes import Recipe, load_recipe, profiles_of
from grpo_lib.rollout import MAX_MEAN_GAP

RECIPES = environment.repo_root() / "recipes"


def every_recipe() -> list[str]:
    """FILE and FILE@PROFILE of all there is, and all profiles of a file together."""
    found = []
    for file in sorted(RECIPES.glob("*.yaml")):
        profiles = profiles_of(file)
        together = [",".join(profiles)] if len(profiles) > 1 else []
        found += [file.name, *(f"{file.name}@{profile}" for profile in [*profiles, *together])]
    return found


def shapes() -> dict[str, list[str]]:
    """The last recipe of each shape -> all recipes of which the rehearsals differ in nothing but their name."""
    found: dict[str, list[str]] = {}
    for name in every_recipe():
        scaled = rehearsal.rehearsal_recipe(load_recipe(RECIPES / name), wandb=True)
        found.setdefault(scaled.model_copy(update={"name": "any"}).model_dump_json(), []).append(name)
    return {names[-1]: names for names in found.values()}


def kind(recipe: Recipe) -> tuple:
    scaled = rehearsal.rehearsal_recipe(recipe)
    return (
        scaled.rollout.engine, scaled.hardware.colocated, bool(scaled.grpo.beta), scaled.grpo.iterations > 1,
        scaled.loss.implementation,
    )  # fmt: skip


def engines() -> dict[str, str]:
    """Recipe -> the engine of its rehearsal: its own for the first of each kind."""
    found, kinds = {}, set()
    for name in SHAPES:
        recipe = load_recipe(RECIPES / name)
        found[name] = "tunix" if kind(recipe) in kinds else recipe.rollout.engine
        kinds.add(kind(recipe))
    return found


SHAPES = shapes()
ENGINES = engines()
each_shape = pytest.mark.parametrize(
    "name", SHAPES, ids=lambda name: f"{' = '.join(SHAPES[name])} through {ENGINES[name]}"
)


def rehearse(name: str, folder: Path, base: Path | None, gsm8k: Path | None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "grpo_lib.cli", "rehearse", str(RECIPES / name), "--runs", str(folder), "--json"]
    command += ["--engine", ENGINES[name]] + (["--base", str(base)] if base else [])
    variables = {key: value for key, value in os.environ.items() if key != "GSM8K_DIR"}
    if gsm8k:
        variables["GSM8K_DIR"] = str(gsm8k)
    return subprocess.run(command, capture_output=True, text=True, timeout=900, env=variables)


@pytest.fixture(scope="module")
def rehearsals(request, tmp_path_factory) -> dict[str, Future]:
    """All that were asked for, two at a time (one, where other tests run beside them).  The bfloat16 model is
    converted once for all of them."""
    from grpo_lib import models

    try:
        gsm8k = request.getfixturevalue("gsm8k_dir")
    except pytest.skip.Exception:  # without its files, word problems stand in, as the command says
        gsm8k = None
    folder = tmp_path_factory.mktemp("rehearsals")
    selected = {item.callspec.params["name"] for item in request.session.items if item.function is test_it_is_green}
    everything = bool(os.environ.get("GRPO_REHEARSE_ALL"))
    names = [name for name in SHAPES if name in selected and (everything or ENGINES[name] == "vllm")]
    in_bfloat16 = [name for name in names if load_recipe(RECIPES / name).model.dtype == "bfloat16"]
    base = None
    if in_bfloat16:
        model = rehearsal.rehearsal_recipe(load_recipe(RECIPES / in_bfloat16[0])).model
        models.convert_to_maxtext(model, folder / "base")
        base = folder / "base"
    pool = ThreadPoolExecutor(max_workers=1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
    yield {name: pool.submit(rehearse, name, folder, base if name in in_bfloat16 else None, gsm8k) for name in names}
    pool.shutdown(cancel_futures=True)


def test_every_kind_goes_through_vllm_once():
    kinds = {kind(load_recipe(RECIPES / name)) for name in every_recipe()}
    assert len([name for name in ENGINES if ENGINES[name] == "vllm"]) == len([k for k in kinds if k[0] == "vllm"]) >= 3


@each_shape
def test_it_is_green(name, rehearsals):
    if name not in rehearsals:
        pytest.skip("rehearsals of a kind that went through vLLM already: set GRPO_REHEARSE_ALL=1")
    done = rehearsals[name].result()
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    recipe = load_recipe(RECIPES / name)
    assert result["green"] and result["engine"] == ENGINES[name]
    assert result["weights"] > 0 and result["mean_gap"] < MAX_MEAN_GAP[recipe.model.dtype]

    run = Path(result["run"])
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["loss"] is not None for row in rows)
    assert (rows[-1]["kl"] != 0) == bool(recipe.grpo.beta)
    said = " ".join(result["notes"])
    rehearsed = load_recipe(run / "recipe.yaml")
    assert rehearsed.problems.source == recipe.problems.source or "word problems stood in" in said
    for when in ("before", "after"):
        records = read_jsonl(run / "evals" / f"{when}.jsonl")
        assert len(records) == rehearsal.PROBLEMS["test"]
        assert {record["id"].split("-")[0] for record in records} == {rehearsed.problems.source}
    assert list((run / "export").glob("*.safetensors")) and (run / "checkpoints" / "actor" / "2").is_dir()
    assert (run / "report.html").stat().st_size > 10_000
    assert ("the kernel was interpreted here" in said) == (recipe.loss.implementation == "pallas")
    assert ("THE vLLM ENGINE WAS NOT REHEARSED" in said) == (recipe.rollout.engine != ENGINES[name])
