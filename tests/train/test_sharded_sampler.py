"""Tunix's sampler over several devices: the same texts, its share of the weights on each; wrong weights are found."""

import json

import numpy as np
import pytest
from flax import nnx
from helpers import Program, devices

from grpo_lib.common.errors import CourseError
from grpo_train.engines import conversion, tunix_models, weight_sync
from grpo_train.engines.tunix_sampler import TunixSampler
from grpo_train.recipes import ModelRecipe
from grpo_train.tpu import random_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def qwen25(tmp_path_factory):
    """(an untied random Qwen2.5, its MaxText checkpoint)."""
    folder = tmp_path_factory.mktemp("qwen25")
    model = ModelRecipe(path=str(folder / "model"), maxtext_name="qwen2.5-7b", dtype="float32")
    random_model.write_random_model(model, model.path)
    return model, conversion.convert_to_maxtext(model, folder / "base")


@pytest.fixture(scope="module")
def found(qwen25, tmp_path_factory):
    model, base = qwen25
    said = tmp_path_factory.mktemp("sharded") / "said.txt"
    program = "import sys, run_sharded_sampler; run_sharded_sampler.main(*sys.argv[1:])"
    sampled = Program(program, model.path, model.maxtext_name, base, output=said, XLA_FLAGS=devices(4))
    return json.loads(sampled.lines()[-1])


@pytest.mark.long
def test_the_texts_do_not_depend_on_the_devices(found):
    texts = found["1"]["texts"]
    assert len(texts[0]) == 6
    assert len(set(texts[0])) > 1
    for places in ("4x1", "2x2", "1x4"):
        assert (found[places]["texts"], found[places]["tokens"]) == (texts, found["1"]["tokens"]), places


@pytest.mark.long
def test_a_device_holds_its_share_of_the_weights_and_one_layer_more_during_a_sync(found):
    for places, share in (("4x1", 1), ("2x2", 2), ("1x4", 4)):
        held, during, weights = found[places]["held"], found[places]["during"], found["weights"]
        weights += found["kv"] * (max(share // found["kv_heads"], 1) - 1)  # heads are repeated
        assert held == pytest.approx(weights / share, rel=0.05), places
        assert during <= held + 2 * found["layer"], places  # the trainer's slice, and the sampler's


@pytest.mark.long
def test_sampler_and_trainer_agree_wherever_they_are(found):
    assert all(found[places]["gap"] < 5e-3 for places in ("1", "4x1", "2x2"))


@pytest.mark.parametrize(("tensor", "word"), [(3, "num_attention_heads of 8"), (5, "num_attention_heads of 8")])
def test_a_model_that_the_devices_cannot_divide_is_refused(tensor, word):
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "hidden_dim": 8, "embed_dim": 8, "vocab_size": 8}
    with pytest.raises(CourseError, match=rf"hardware\.sampler_tensor={tensor} does not divide the model's {word}"):
        tunix_models.model_config("qwen2.5-7b", 1e6, sizes, tensor=tensor)


def test_a_sampler_without_a_weight_says_so(tiny_actor, tokenizer, rollout_config, monkeypatch):
    monkeypatch.delitem(weight_sync.OTHER_WEIGHTS, "final_norm.w")
    # Not compiled: a program of these shapes may have been made from the whole table.
    monkeypatch.setattr(weight_sync, "_translated", weight_sync._translated.__wrapped__)
    sampler = TunixSampler(tiny_actor.module, tokenizer, tiny_actor.mesh, rollout_config, seed=7)
    actor = weight_sync.by_name(nnx.state(tiny_actor.module, nnx.Param))
    assert not np.asarray(sampler.weights()["final_norm.w"]).any()
    with pytest.raises(CourseError, match=r"decoder\.decoder_norm\.scale of the actor has no counterpart"):
        weight_sync.check_weights(sampler, actor)
