"""The small files of an export: both spellings of Transformers 4 and 5, and no end token lost."""

import json
from types import SimpleNamespace

import pytest
from transformers import AutoConfig, AutoTokenizer

from grpo_train.engines import conversion, export_files
from grpo_train.recipes import ModelRecipe

LLAMA31 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
# As the four are published for Transformers 4; version 5 reads and writes them, as the exporter does.
PUBLISHED = {
    "Qwen3": ({"model_type": "qwen3", "rope_theta": 1000000, "rope_scaling": None}, 1e6, None),
    "Qwen2.5": ({"model_type": "qwen2", "rope_theta": 1000000.0}, 1e6, None),
    "SmolLM2": ({"model_type": "llama", "rope_theta": 100000, "tie_word_embeddings": True}, 1e5, None),
    "Llama 3.1": ({"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": LLAMA31}, 5e5, LLAMA31),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_config_json_has_both_spellings_and_reads_as_published(name, tmp_path):
    published, theta, scaling = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(published))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_theta" not in written  # what Transformers 4 would not find
    both = export_files.rope_for_both(written)
    assert (both["rope_theta"], both["rope_scaling"]) == (theta, scaling)
    assert both["rope_parameters"] == written["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(both))
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.rope_parameters == written["rope_parameters"]


@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full", "sliding")}},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": None},
        {},
    ],
)
def test_other_rotary_embeddings_are_left_alone(config):
    assert export_files.rope_for_both(config) == config


def test_part_of_a_head_that_is_rotated_stands_outside_the_scaling():
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    both = export_files.rope_for_both({"rope_parameters": rope})
    assert both == {"rope_parameters": rope, "rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_scaling": None}


@pytest.mark.parametrize(
    ("base", "written", "kept"),
    [
        ("Qwen2TokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast"),
        ("Qwen2Tokenizer", "TokenizersBackend", "Qwen2Tokenizer"),
        (None, "Qwen2Tokenizer", "Qwen2Tokenizer"),
        ("TokenizersBackend", "TokenizersBackend", "PreTrainedTokenizerFast"),
        ("NobodysTokenizer", "TokenizersBackend", "PreTrainedTokenizerFast"),
        (None, None, "PreTrainedTokenizerFast"),
    ],
)
def test_the_tokenizer_has_a_class_that_both_versions_have(base, written, kept):
    found = export_files.tokenizer_for_both({"tokenizer_class": written}, {"tokenizer_class": base})
    assert found == {"tokenizer_class": kept}


def test_special_tokens_are_a_list_under_the_name_that_both_versions_know():
    found = export_files.tokenizer_for_both({"extra_special_tokens": ["<a>"], "is_local": True}, {})
    assert found == {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["<a>"]}
    named = {"extra_special_tokens": {"image_token": "<a>"}}
    assert export_files.tokenizer_for_both(named, {}).items() > named.items()


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 9}, [7, 8]),
        ({"eos_token_id": 8}, {}, [8, 7]),
        ({}, {"eos_token_id": 9}, [9, 7]),
        ({}, {"eos_token_id": None}, 7),
    ],
)
def test_every_end_token_is_named(generation, config, ends):
    tokenizer = SimpleNamespace(eos_token_id=7, pad_token_id=0, bos_token_id=None)
    found = export_files.with_every_end(generation | {"top_k": 20}, config, tokenizer)
    assert found == {"top_k": 20, "eos_token_id": ends, "pad_token_id": 0}


@pytest.mark.slow
def test_an_export_has_the_three_files(tiny_recipe, converted_base, tmp_path):
    model: ModelRecipe = tiny_recipe.model
    folder = conversion.export_weights(lambda _: converted_base, model, tmp_path / "export")
    names = ("config", "tokenizer_config", "generation_config")
    config, tokenizer, generation = (json.loads((folder / f"{name}.json").read_text()) for name in names)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e6
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert generation == {"eos_token_id": 1, "pad_token_id": 0}
    read = AutoTokenizer.from_pretrained(folder)
    assert read.extra_special_tokens == ["<|im_start|>"]
