"""Smoke tests of every recipe and every profile, on virtual CPU devices.

Recipes that scale down to one and the same run are tested once.  One of each kind (where the sampler is, KL penalty,
updates per batch) goes through the real vLLM engine.  The others use Tunix's sampler, take minutes each and run
with --run-nightly.  A test's name has its engine.
"""

import os
import subprocess
import sys
from pathlib import Path

import filelock
import pytest
from helpers import result_of

from grpo_lib.common import environment
from grpo_lib.common.files import read_jsonl
from grpo_train.engines.weight_sync import MAX_MEAN_GAP
from grpo_train.recipes import load_recipe, profiles_of
from grpo_train.tpu import random_model, smoke_test

RECIPES = environment.repo_root() / "recipes"


def every_recipe() -> list[str]:
    """FILE and FILE@PROFILE of all there is, and all profiles of a file together."""
    found = []
    for file in sorted(RECIPES.rglob("*.yaml")):
        profiles = profiles_of(file)
        together = [",".join(profiles)] if len(profiles) > 1 else []
        name = str(file.relative_to(RECIPES))
        found += [name, *(f"{name}@{profile}" for profile in [*profiles, *together])]
    return found


def shapes() -> dict[str, list[str]]:
    """The last recipe of each shape -> all recipes whose scaled recipes differ in their name only."""
    found: dict[str, list[str]] = {}
    for name in every_recipe():
        scaled = smoke_test.scaled_recipe(load_recipe(RECIPES / name), wandb=True)
        found.setdefault(scaled.model_copy(update={"name": "any"}).model_dump_json(), []).append(name)
    return {names[-1]: names for names in found.values()}


def engines() -> dict[str, str]:
    """Recipe -> the engine of its smoke test: its own for the first of each kind."""
    engine_of: dict[str, str] = {}
    kinds = set()
    for name in SHAPES:
        scaled = smoke_test.scaled_recipe(load_recipe(RECIPES / name))
        engine = scaled.rollout.engine
        kind = (engine, scaled.hardware.colocated, scaled.grpo.beta > 0, scaled.grpo.iterations > 1)
        engine_of[name] = "tunix" if kind in kinds else engine
        kinds.add(kind)
    return engine_of


SHAPES = shapes()
ENGINES = engines()


def is_short(name: str) -> bool:
    """Through vLLM, and not with the kernel, which runs in interpret mode here (test_loss_kernel.py compiles it)."""
    return ENGINES[name] == "vllm" and load_recipe(RECIPES / name).loss.implementation != "pallas"


def name_of_test(name: str) -> str:
    return f"{' = '.join(SHAPES[name])} through {ENGINES[name]}"


CASES = [pytest.param(name, marks=[] if is_short(name) else pytest.mark.nightly) for name in SHAPES]
each_shape = pytest.mark.parametrize("name", CASES, ids=name_of_test)


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """The float32 model that the smoke tests share; converted once, also where several workers want it."""
    from grpo_train.engines import conversion

    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    model = smoke_test.scaled_recipe(load_recipe(RECIPES / "published" / "qwen3-1.7b-gsm8k-smoke.yaml")).model
    with filelock.FileLock(folder / "smoke.lock"):
        return conversion.convert_to_maxtext(model, folder / "smoke" / "base")


def smoke(name: str, folder: Path, base: Path, gsm8k: Path | None) -> subprocess.CompletedProcess:
    command = [
        *(sys.executable, "-m", "grpo_train.cli", "smoke-test", str(RECIPES / name), "--runs", str(folder), "--json"),
        *("--engine", ENGINES[name]),
    ]
    if load_recipe(RECIPES / name).model.trainer_dtype == "float32":
        command += ["--base", str(base)]
    variables = os.environ | {"GSM8K_DIR": str(gsm8k or "")}
    return subprocess.run(command, capture_output=True, text=True, timeout=1800, env=variables)


@each_shape
def test_it_passes(name, base, request, tmp_path):
    try:
        gsm8k = request.getfixturevalue("gsm8k_dir")
    except pytest.skip.Exception:  # without its files the command uses word problems
        gsm8k = None
    result = result_of(smoke(name, tmp_path, base, gsm8k))
    recipe = load_recipe(RECIPES / name)
    assert result["passed"]
    assert result["engine"] == ENGINES[name]
    assert result["weights"] > 0
    assert result["mean_gap"] < MAX_MEAN_GAP[recipe.model.dtype]
    assert result["update_applied"] > 0.9
    assert result["architecture"] == random_model.family(recipe.model)

    run = Path(result["run"])
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["loss"] is not None for row in rows)
    assert ("kl" in rows[-1]) == bool(recipe.grpo.beta)
    scaled = load_recipe(run / "recipe.yaml")
    for when in ("before", "after"):
        records = read_jsonl(run / "evals" / f"{when}.jsonl")
        assert len(records) == smoke_test.PROBLEMS["test"] * len(scaled.sources) * (1 + scaled.evaluation.samples)
