"""Hugging Face ⇄ MaxText: bit for bit there and back, parity with another implementation, errors that name the file."""

import shutil

import numpy as np
import pytest

from grpo_lib.errors import CourseError
from grpo_lib.recipes import ModelRecipe

pytestmark = pytest.mark.slow


@pytest.fixture
def model_copy(tmp_path, tiny_recipe):
    """A Hugging Face directory of its own, to be damaged."""
    from grpo_lib import models

    copy = tmp_path / "model"
    shutil.copytree(models.model_directory(tiny_recipe.model), copy)
    return copy


def test_there_and_back_is_bit_for_bit(tiny_recipe, tiny_actor, tmp_path):
    from grpo_lib import models

    exported = models.export_to_hugging_face(tiny_actor, tiny_recipe.model, tmp_path / "export")
    assert models.differing_weights(models.model_directory(tiny_recipe.model), exported) == []
    assert not (tmp_path / "export.partial").exists()
    tokenizer = models.load_tokenizer(ModelRecipe(path=str(exported), maxtext_name="qwen3-0.6b"))
    assert tokenizer.chat_template == models.load_tokenizer(tiny_recipe.model).chat_template


def test_differing_weights_names_what_differs(tiny_recipe, model_copy):
    from safetensors.numpy import load_file, save_file

    from grpo_lib import models

    weights = load_file(model_copy / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * np.float32(1 + 1e-6)
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, model_copy / "model.safetensors")
    assert models.differing_weights(models.model_directory(tiny_recipe.model), model_copy) == [
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
    ]


def test_a_finished_conversion_is_kept(tiny_recipe, converted_base):
    from grpo_lib import models

    before = converted_base.stat().st_mtime_ns
    assert models.convert_to_maxtext(tiny_recipe.model, converted_base.parents[1]) == converted_base
    assert converted_base.stat().st_mtime_ns == before


def test_log_probabilities_agree_with_another_implementation(tiny_recipe, tiny_actor):
    from flax import nnx
    from tunix.rl import common

    from grpo_lib import models, rollout

    rng = np.random.default_rng(0)
    prompt_ids = rng.integers(3, 200, (8, 20), dtype=np.int32)
    prompt_ids[:4, :7] = 0  # padding on the left
    completion_ids = rng.integers(3, 200, (8, 12), dtype=np.int32)
    ours = np.asarray(models.per_token_logps(tiny_actor, prompt_ids, completion_ids, pad_id=0, eos_id=1))
    graph, state = nnx.split(rollout.load_hugging_face(models.model_directory(tiny_recipe.model)))
    theirs = np.asarray(
        common.compute_per_token_logps(
            graph, state, prompt_tokens=prompt_ids, completion_tokens=completion_ids, pad_id=0, eos_id=1
        )
    )
    # Random tokens are far from what the model was trained on, so log-probabilities are large and so is the effect of
    # MaxText's bfloat16 product with the tied embedding.
    assert np.abs(ours - theirs).mean() < 0.02
    assert np.abs(ours - theirs).max() < 0.2


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_model_names_what_is_missing(model_copy, name):
    from grpo_lib import models

    (model_copy / name).unlink()
    with pytest.raises(CourseError, match=r"model\.path") as caught:
        models.model_directory(ModelRecipe(path=str(model_copy), maxtext_name="qwen3-0.6b"))
    assert name.split(".")[-1] in str(caught.value)


def test_a_missing_model_is_named():
    from grpo_lib import models

    with pytest.raises(CourseError, match=r"model\.path=/nowhere"):
        models.model_directory(ModelRecipe(path="/nowhere", maxtext_name="qwen3-0.6b"))


def test_weights_cut_short_leave_no_checkpoint_behind(model_copy, tmp_path):
    from grpo_lib import models

    weights = model_copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    model = ModelRecipe(path=str(model_copy), maxtext_name="qwen3-0.6b")
    with pytest.raises(CourseError, match=r"could not convert .* the whole log is"):
        models.convert_to_maxtext(model, tmp_path / "base")
    assert not (tmp_path / "base").exists()


def test_a_missing_checkpoint_says_how_to_make_one(tiny_recipe, tmp_path):
    from grpo_lib import models

    with pytest.raises(CourseError, match="convert the model first"):
        models.load_actor(tiny_recipe.model, tmp_path / "none", 64)


def test_a_damaged_checkpoint_is_refused(tiny_recipe, converted_base, tmp_path):
    from grpo_lib import models

    damaged = tmp_path / "0" / "items"
    shutil.copytree(converted_base, damaged)
    for path in damaged.rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(CourseError, match="cannot be read"):
        models.load_actor(tiny_recipe.model, damaged, 64)
