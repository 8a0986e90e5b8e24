"""Random models against transformers in PyTorch: tensors, parity, and that parity finds another config.json.

Weights in wrong places: tests/tpu/test_random_model.py.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import LENGTH, changed_config, mean_gap, published
from safetensors.numpy import load_file

from grpo_train.engines import conversion, maxtext_model, model_files, tunix_models, tunix_sampler
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


# Llama 3.1's own numbers, and others, by which most frequencies of a head of 64 change; positions of a short text, and
# of a long one.
SCALINGS = [
    (model_files.LLAMA31_SCALING, 0),
    (model_files.LLAMA31_SCALING, 100_000),
    (model_files.LLAMA31_SCALING | {"original_max_position_embeddings": 64}, 0),
    ({"factor": 32, "low_freq_factor": 2, "high_freq_factor": 8, "original_max_position_embeddings": 256}, 1000),
]


@pytest.mark.parametrize(("scaling", "first"), SCALINGS)
def test_tunix_gives_a_scaled_llama_the_logits_of_transformers(llama, tmp_path, scaling, first):
    scaled = {"rope_scaling": scaling | {"rope_type": "llama3"}}
    folder = changed_config(llama[0], tmp_path / "model", scaled)
    plain = changed_config(llama[0], tmp_path / "plain", {"rope_scaling": None})
    ids = np.random.default_rng(0).integers(random_model.END + 1, 256, (2, 256), dtype=np.int32)
    positions = np.broadcast_to(first + np.arange(256), ids.shape)
    expected = _transformers_logits(folder, ids, positions)
    unit = expected.std()
    assert np.abs(_tunix_logits(folder, ids, positions) - expected).max() < 1e-4 * unit
    assert np.abs(_tunix_logits(plain, ids, positions) - expected).max() > 1e-2 * unit


def _transformers_logits(folder: Path, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[B, L, V], without the padding token, which has another order of magnitude."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        given = {
            "input_ids": torch.from_numpy(ids.astype(np.int64)),
            "position_ids": torch.from_numpy(positions.copy()),
        }
        return model(**given).logits.numpy()[..., random_model.END :]


def _tunix_logits(folder: Path, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    model = tunix_sampler.load_hugging_face(folder)
    causal = jnp.tril(jnp.ones((len(ids), ids.shape[1], ids.shape[1]), bool))
    with jax.default_matmul_precision("highest"):
        logits, _ = model(jnp.asarray(ids), jnp.asarray(positions), None, causal)
    return np.asarray(logits)[..., random_model.END :]


def test_the_frequencies_are_those_of_transformers(llama):
    from transformers import AutoModelForCausalLM

    expected = AutoModelForCausalLM.from_pretrained(llama[0]).model.rotary_emb.inv_freq.numpy()
    found = tunix_models.inverse_frequencies(tunix_sampler.load_hugging_face(llama[0]).config)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
