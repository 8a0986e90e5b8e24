"""Random models against transformers in PyTorch: tensors, parity, and that parity finds another config.json.

Weights in wrong places: tests/tpu/test_random_model.py.
"""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from grpo_lib.common.errors import CourseError
from grpo_tpu import random_model
from grpo_train.engines import conversion, maxtext_model
from grpo_train.recipes import ModelRecipe

LENGTH = random_model.PROMPT + random_model.COMPLETION


def published(name: str) -> ModelRecipe:
    return ModelRecipe(path="nobody/nothing", maxtext_name=name)


@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen2.5-1.5b", "qwen3-1.7b", "qwen3-8b", "llama3.1-8b"])
def test_its_tensors_are_those_of_transformers(name, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = random_model.write_random_model(published(name), tmp_path)
    config = AutoConfig.from_pretrained(folder)
    expected = AutoModelForCausalLM.from_config(config).state_dict()
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight")
    found = load_file(folder / "model.safetensors")
    assert {key: value.shape for key, value in found.items()} == {k: tuple(v.shape) for k, v in expected.items()}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """(its folder, its recipe, the MaxText checkpoint)"""
    folder = tmp_path_factory.mktemp("llama")
    path = random_model.write_random_model(published("llama3.1-8b"), folder / "model")
    recipe = ModelRecipe(path=str(path), maxtext_name="llama3.1-8b")
    return path, recipe, conversion.convert_to_maxtext(recipe, folder / "maxtext")


def test_llama_in_maxtext_is_llama_in_transformers(llama):
    path, recipe, checkpoint = llama
    found = random_model.check_parity(maxtext_model.load_actor(recipe, checkpoint, LENGTH), path)
    assert found.reference == "transformers" and found.mean_gap < 1e-5


def test_llama_without_scaled_rotary_embeddings_is_that_of_transformers_too(llama, tmp_path):
    folder = Path(shutil.copytree(llama[0], tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_scaling": None, "rope_theta": 100_000.0}))
    recipe = ModelRecipe(path=str(folder), maxtext_name="llama3-8b")
    actor = maxtext_model.load_actor(recipe, conversion.convert_to_maxtext(recipe, tmp_path / "maxtext"), LENGTH)
    assert random_model.check_parity(actor, folder).mean_gap < 1e-5


@pytest.mark.parametrize(
    "name, change",
    [
        ("llama3.1-8b", {"rope_theta": 10_000.0}),
        ("llama3-8b", {"rope_scaling": None}),
        ("llama3.1-8b", {"rms_norm_eps": 1e-2}),
    ],
)
def test_parity_finds_another_llama(llama, tmp_path, name, change):
    path, recipe, checkpoint = llama
    wrong = Path(shutil.copytree(path, tmp_path / "wrong"))
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps(config | change))
    other = recipe.model_copy(update={"path": str(wrong), "maxtext_name": name})
    actor = maxtext_model.load_actor(other, checkpoint, LENGTH)
    with pytest.raises(CourseError, match="MaxText and transformers disagree on this llama model"):
        random_model.check_parity(actor, path)
