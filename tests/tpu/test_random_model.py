"""Small random models of the recipes' architectures: their files, and faults that conversion, parity and sync find.

Transformers in PyTorch is in tests/tpu/stack/test_random_model.py.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from parity import LENGTH, changed_config, mean_gap, published
from safetensors.numpy import load_file

from grpo_lib import plain_grpo
from grpo_lib.common.errors import CourseError
from grpo_train.engines import conversion, maxtext_model, model_files, tunix_models, weight_sync
from grpo_train.engines.tokens import load_tokenizer
from grpo_train.recipes import ModelRecipe, load_recipe
from grpo_train.tpu import random_model

ROOT = Path(__file__).resolve().parents[2]
LAYER = "decoder.layers."
PROMPTS = [f"<|im_start|>user\nAna has {n} cards.<|im_end|>\n<|im_start|>assistant\n" for n in range(3, 11)]


def plain_llama(folder: Path) -> ModelRecipe:
    """A config.json without weights: Llama with plain rotary embeddings, tied."""
    folder.mkdir()
    config = json.loads((ROOT / "assets/tiny-base/config.json").read_text())
    config |= {
        "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 1e5, "mlp_bias": False, "num_attention_heads": 8,
        "num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return ModelRecipe(path=str(folder), maxtext_name="llama3-8b")


# --- files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, kind, tied, heads, own",
    [
        ("qwen2.5-7b", "qwen2", False, (8, 4), {"rope_theta": 1e6, "rms_norm_eps": 1e-6}),
        ("qwen2.5-1.5b", "qwen2", True, (4, 2), {"rope_theta": 1e6}),
        ("qwen3-1.7b", "qwen3", True, (8, 4), {"rope_theta": 1e6, "attention_bias": False}),
        ("qwen3-8b", "qwen3", False, (8, 4), {"rope_theta": 1e6}),
        ("llama3.1-8b", "llama", False, (8, 4), {"rope_theta": 5e5, "rms_norm_eps": 1e-5, "mlp_bias": False}),
    ],
)
def test_config_json_is_that_of_the_architecture(name, kind, tied, heads, own, tmp_path):
    folder = random_model.write_random_model(published(name), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == kind
    assert config["tie_word_embeddings"] == tied
    assert own.items() <= config.items()
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == heads
    assert ("attention_bias" in config) == (kind != "qwen2")  # the published file of Qwen2.5 has no such key
    of_llama31 = model_files.LLAMA31_SCALING | {"rope_type": "llama3"}
    assert (config.get("rope_scaling") == of_llama31) == (kind == "llama")
    weights = load_file(folder / "model.safetensors")
    biases = {key.split(".")[-2] for key in weights if key.endswith("bias")}
    assert biases == ({"q_proj", "k_proj", "v_proj"} if kind == "qwen2" else set())
    assert ("lm_head.weight" in weights) != tied
    assert any("q_norm" in key for key in weights) == (kind == "qwen3")
    model = ModelRecipe(path=str(folder), maxtext_name=name)
    assert model_files.maxtext_sizes(model)["rope_max_timescale"] == own["rope_theta"]


def test_every_recipe_gets_its_own_architecture():
    kinds = {random_model.family(load_recipe(file).model) for file in (ROOT / "recipes").rglob("*.yaml")}
    assert kinds == {"qwen2", "qwen3", "llama"}
    three = load_recipe(ROOT / "recipes" / "published" / "qwen2.5-3b-gsm8k.yaml").model
    assert random_model.small_config(three)["num_key_value_heads"] == 2  # the recipe's sizes, not those of the 1.5B
    assert random_model.small_config(published("qwen2.5-14b", logits_via_embedding=True))["tie_word_embeddings"] is True
    assert random_model.family(published("qwen3-30b-a3b")) is None
    with pytest.raises(CourseError, match="gemma2-2b"):
        random_model.small_config(published("gemma2-2b"))


def test_the_seed_decides_the_weights(tmp_path):
    folders = [
        random_model.write_random_model(published("qwen2.5-7b"), tmp_path / str(number), seed)
        for number, seed in enumerate((0, 0, 1))
    ]
    first, again, other = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert first == again != other


def test_a_local_config_json_wins(tmp_path):
    folder = random_model.write_random_model(published("qwen2.5-7b"), tmp_path / "model")
    folder = changed_config(folder, tmp_path / "changed", {"rope_theta": 77.0, "tie_word_embeddings": True})
    local = random_model.small_config(ModelRecipe(path=str(folder), maxtext_name="qwen2.5-7b"))
    assert (local["rope_theta"], local["tie_word_embeddings"]) == (77.0, True)


@pytest.mark.parametrize("name", ["qwen2.5-1.5b", "qwen3-1.7b"])
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_devices_that_share_a_small_model_find_a_head_each(name, tensor):
    assert random_model.small_config(published(name), tensor)["num_key_value_heads"] % tensor == 0


@pytest.mark.parametrize("heads", [2, 4, 8])
def test_the_tiny_model_with_more_heads_computes_the_same(tmp_path, heads):
    tiny = plain_grpo.load_policy(ROOT / "assets" / "tiny-base")
    wider = plain_grpo.load_policy(random_model.write_tiny_model(tmp_path, heads))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_key_value_heads"] == heads
    assert config["num_attention_heads"] % heads == 0
    tokens = plain_grpo.encode(tiny, PROMPTS)

    def log_probabilities(policy):
        return plain_grpo.per_token_logps(policy.weights, policy.config, tokens[:, :-8], tokens[:, -8:], 1.0)

    np.testing.assert_allclose(log_probabilities(wider)[0], log_probabilities(tiny)[0], atol=1e-4)


# --- faults ---------------------------------------------------------------------------------------------------


class Model:
    """A random model and its actor, whose weights a test may change."""

    def __init__(self, name: str, folder: Path):
        source = plain_llama(folder / "published") if name == "llama3-8b" else published(name)
        self.folder = random_model.write_random_model(source, folder / "model")
        self.recipe = ModelRecipe(path=str(self.folder), maxtext_name=name)
        self.checkpoint = conversion.convert_to_maxtext(self.recipe, folder / "maxtext")
        self.actor = self.load(self.recipe)
        self.values = weight_sync.by_name(nnx.state(self.actor.module, nnx.Param))
        # Mean gaps of log-probabilities in nats: of the same model at most, and of a fault at least.  MaxText
        # multiplies by a tied embedding in bfloat16.
        tied = "lm_head.weight" not in load_file(self.folder / "model.safetensors")
        self.same, self.fault = (0.01, 0.02) if tied else (1e-5, 1e-4)

    def load(self, recipe: ModelRecipe) -> maxtext_model.Actor:
        return maxtext_model.load_actor(recipe, self.checkpoint, LENGTH, random_model.PADDING)

    def change(self, names: list[str], change) -> None:
        """`change` takes the values of the weights of these names and returns the new ones."""
        self.put(self.values | dict(zip(names, change(*(self.values[name] for name in names)), strict=True)))

    def put(self, values: dict[str, object]) -> None:
        state = nnx.state(self.actor.module, nnx.Param)
        names = weight_sync.by_name(state)
        assert {name: value.shape for name, value in names.items()} == {n: v.shape for n, v in values.items()}
        flat = zip(names, state.flat_state(), strict=True)
        nnx.update(
            self.actor.module,
            nnx.State.from_flat_path({path: variable.replace(values[name]) for name, (path, variable) in flat}),
        )


# Untied with biases; tied; tied without norms of queries and keys, and with another rotary base; untied, with scaled
# rotary embeddings and MaxText's other order of queries and keys.
FAMILIES = [
    pytest.param("qwen2.5-7b", marks=pytest.mark.long),
    pytest.param("qwen3-1.7b", marks=pytest.mark.nightly),  # the family of the course's own model
    pytest.param("llama3-8b", marks=pytest.mark.long),
    pytest.param("llama3.1-8b", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=FAMILIES)
def random(request, tmp_path_factory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def model(random):
    random.put(random.values)
    return random


def heads_reversed(*kernels):
    """Of key and value kernels, [width, layers, heads, size]."""
    return [kernel[:, :, ::-1] for kernel in kernels]


def layers_reversed(kernel):
    return [kernel[:, ::-1]]


def zeroed(bias):
    return [0 * bias]


def swapped(one, other):
    return [other, one]


# What is wrong: the families that have such weights ("" for all), the weights, and what is done to them.
FAULTS = {
    "q bias dropped": ("qwen2.5", ["self_attention.query.bias"], zeroed),
    "v bias dropped": ("qwen2.5", ["self_attention.value.bias"], zeroed),
    "q and k norm swapped": ("qwen3", ["self_attention.query_norm.scale", "self_attention.key_norm.scale"], swapped),
    "gate and up swapped": ("", ["mlp.wi_0.kernel", "mlp.wi_1.kernel"], swapped),
    "k and v heads reversed": ("", ["self_attention.key.kernel", "self_attention.value.kernel"], heads_reversed),
    "k heads reversed": ("", ["self_attention.key.kernel"], heads_reversed),
    "layers in reverse": ("", ["mlp.wo.kernel"], layers_reversed),
}


@pytest.mark.slow
def test_maxtext_computes_the_same_model(model):
    assert mean_gap(model.actor, model.folder) < model.same


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_parity_finds(model, fault):
    families, names, change = FAULTS[fault]
    if not model.recipe.maxtext_name.startswith(families):
        pytest.skip("this family has no such weights")
    model.change([LAYER + name for name in names], change)
    assert mean_gap(model.actor, model.folder) > model.fault


@pytest.mark.slow
def test_parity_finds_a_wrong_rope_theta(model, tmp_path, monkeypatch):
    from maxtext.checkpoint_conversion.utils.hf_model_configs import HF_MODEL_CONFIGS

    name = model.recipe.maxtext_name
    monkeypatch.setitem(HF_MODEL_CONFIGS, name, HF_MODEL_CONFIGS[name])  # loading enters the wrong one there
    wrong = changed_config(model.folder, tmp_path / "wrong", {"rope_theta": 10_000.0})
    actor = model.load(model.recipe.model_copy(update={"path": str(wrong)}))
    assert mean_gap(actor, model.folder) > model.fault


@pytest.mark.slow
def test_it_goes_to_maxtext_and_back(model, tmp_path):
    exported = conversion.export_to_hugging_face(model.actor, model.recipe, tmp_path / "export")
    assert conversion.differing_weights(model.folder, exported) == []


@pytest.fixture
def check(model, rollout_config, monkeypatch):
    """The check of the first sync, after `change`: of the tables by which Tunix's sampler gets its weights."""
    from grpo_train.engines.tunix_sampler import TunixSampler

    tokenizer = load_tokenizer(model.recipe)
    # Not compiled: a program of these shapes may have been made from the tables as they are.
    monkeypatch.setattr(weight_sync, "_translated", weight_sync._translated.__wrapped__)

    def logps(prompt_ids, ids):
        return maxtext_model.per_token_logps(model.actor, prompt_ids, ids, pad_id=0, eos_id=1)

    def run():
        sampler = TunixSampler(model.actor.module, tokenizer, model.actor.mesh, rollout_config, seed=7)
        return weight_sync.check_sync(sampler, model.actor.weights(), PROMPTS, rollout_config, logps)

    return run


@pytest.mark.slow
def test_every_weight_is_synced_and_one_that_is_not_is_named(model, check, monkeypatch):
    weights, *lost = {
        "qwen2.5-7b": (15, ("OTHER_WEIGHTS", "lm_head.w"), ("LAYER_WEIGHTS", "attn.q_bias")),
        "qwen3-1.7b": (13, ("LAYER_WEIGHTS", "attn.k_norm.w")),
        "llama3-8b": (11, ("LAYER_WEIGHTS", "attn.k_proj.w")),
        "llama3.1-8b": (12, ("LAYER_WEIGHTS", "attn.k_proj.w")),
    }[model.recipe.maxtext_name]
    assert check().weights == weights
    for table, name in lost:
        given = getattr(weight_sync, table)
        with monkeypatch.context() as patch:
            patch.setattr(weight_sync, table, {key: value for key, value in given.items() if key != name})
            with pytest.raises(CourseError, match=rf"weight \S*{re.escape(given[name])}"):
                check()


@pytest.mark.slow
def test_a_sync_into_another_model_shows_as_a_gap(check, monkeypatch):
    given = weight_sync.LAYER_WEIGHTS
    gate = "mlp.gate_proj.kernel"
    up = "mlp.up_proj.kernel"
    monkeypatch.setattr(weight_sync, "LAYER_WEIGHTS", given | {gate: given[up], up: given[gate]})
    with pytest.raises(CourseError, match="sampler and trainer disagree"):
        check()


@pytest.mark.slow
def test_heads_of_llama31_in_the_order_of_the_others_show_as_a_gap(model, check, monkeypatch):
    if model.recipe.maxtext_name != "llama3.1-8b":
        pytest.skip("its heads are as the sampler's")
    monkeypatch.setattr(tunix_models, "has_llama_heads", lambda _: False)
    with pytest.raises(CourseError, match="sampler and trainer disagree"):
        check()
