"""Random models against transformers in PyTorch: tensors, parity, and that parity finds another config.json.

Weights in wrong places: tests/tpu/test_random_model.py.
"""

import pytest
from parity import LENGTH, changed_config, mean_gap, published
from safetensors.numpy import load_file

from grpo_train.engines import conversion, maxtext_model
from grpo_train.recipes import ModelRecipe
from grpo_train.tpu import random_model


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
    assert mean_gap(maxtext_model.load_actor(recipe, checkpoint, LENGTH), path) < 1e-5


def test_llama_without_scaled_rotary_embeddings_is_that_of_transformers_too(llama, tmp_path):
    folder = changed_config(llama[0], tmp_path / "model", {"rope_scaling": None, "rope_theta": 100_000.0})
    recipe = ModelRecipe(path=str(folder), maxtext_name="llama3-8b")
    checkpoint = conversion.convert_to_maxtext(recipe, tmp_path / "maxtext")
    assert mean_gap(maxtext_model.load_actor(recipe, checkpoint, LENGTH), folder) < 1e-5


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
    wrong = changed_config(path, tmp_path / "wrong", change)
    other = recipe.model_copy(update={"path": str(wrong), "maxtext_name": name})
    assert mean_gap(maxtext_model.load_actor(other, checkpoint, LENGTH), path) > 1e-4
