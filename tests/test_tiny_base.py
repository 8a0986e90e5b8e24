"""The shipped tiny base model: what the course, MaxText and vLLM rely on in its files."""

import json
import re
import struct
from pathlib import Path

import pytest

from grpo_lib import prompts
from grpo_lib.problems import words

BASE = Path(__file__).resolve().parents[1] / "assets" / "tiny-base"
TAGS = (prompts.REASONING_OPEN, prompts.REASONING_CLOSE, prompts.ANSWER_OPEN, prompts.ANSWER_CLOSE)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(BASE)


@pytest.fixture(scope="module")
def record():
    return json.loads((BASE / "training.json").read_text(encoding="utf-8"))


def test_files_are_there_and_small():
    names = {path.name for path in BASE.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert sum(path.stat().st_size for path in BASE.iterdir()) < 6_000_000


def test_config():
    config = json.loads((BASE / "config.json").read_text(encoding="utf-8"))
    expected = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "pad_token_id": 0,
        "eos_token_id": 1,
        "rope_theta": 1_000_000.0,
    }
    assert {key: config[key] for key in expected} == expected


def test_weights_match_the_config(record):
    blob = (BASE / "model.safetensors").read_bytes()
    header = json.loads(blob[8 : 8 + struct.unpack("<Q", blob[:8])[0]])
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    assert len(tensors) == 2 + 4 * 11
    assert {entry["dtype"] for entry in tensors.values()} == {"F32"}
    assert tensors["model.embed_tokens.weight"]["shape"] == [256, 128]
    assert tensors["model.layers.3.self_attn.k_proj.weight"]["shape"] == [64, 128]
    assert sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in tensors.values()) == (
        4 * record["parameters"]
    )


def test_tags_are_single_ordinary_tokens(tokenizer):
    for tag in TAGS:
        ids = tokenizer.encode(tag, add_special_tokens=False)
        assert len(ids) == 1
        assert ids[0] not in tokenizer.all_special_ids
    text = prompts.template_completion("12+5=17 17-3=14", "14")
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_markers_are_special_tokens(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|pad|>", "<|im_end|>")
    assert tokenizer.decode(tokenizer.encode("<|im_start|>"), skip_special_tokens=True) == ""


def test_every_digit_is_one_token(tokenizer):
    assert [tokenizer.decode([token]) for token in tokenizer.encode("1080")] == ["1", "0", "8", "0"]
    assert len(tokenizer.encode("12+5=17 17-3=14")) == 15


def test_printable_ascii_survives(tokenizer):
    text = "".join(map(chr, range(32, 127))) + "\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(tokenizer.get_vocab().values()) < 256


def test_chat_template_is_chatml(tokenizer):
    assert prompts.render(tokenizer, "How many?") == ("<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n")
    assert prompts.render(tokenizer, "How many?", system="Count.").startswith(
        "<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\n"
    )


def test_prompts_and_completions_fit_the_course(tokenizer, record):
    for problem in words.generate("train", 300, seed=5):
        prompt = tokenizer.encode(prompts.render(tokenizer, problem.question))
        completion = tokenizer.encode(prompts.template_completion(problem.solution, problem.answer))
        assert len(prompt) <= 44
        assert len(completion) + 1 <= 28
    assert record["lengths"]["prompt_max"] <= 44 and record["lengths"]["completion_max"] <= 28


def test_card_says_what_was_measured(record):
    card = (BASE / "README.md").read_text(encoding="utf-8")
    assert record["command"] in card
    for decoding, row in (("greedy", "greedy"), ("sampled", "temperature 1")):
        cells = re.search(rf"^\| {row} \|(.*)\|$", card, re.MULTILINE)[1].split("|")
        measured = record[decoding]
        names = ("strict", "strict_one_step", "strict_two_step", "lenient", "lenient_one_step", "lenient_two_step")
        assert [cell.strip() for cell in cells] == [
            *(f"{100 * measured[name]:.1f}" for name in (*names, "format")),
            f"{measured['mean_tokens']:.1f}",
        ]
    for name, (first, then) in record["habits"].items():
        assert f"| {name} | {100 * first:.0f} % | {100 * then:.0f} % |" in card
    assert [sum(shares) for shares in zip(*record["habits"].values(), strict=True)] == pytest.approx([1.0, 1.0])


def test_base_leaves_room_for_the_course(record):
    # The course is about this gap: able when it works in full, and mostly not doing so.
    assert 0.38 <= record["greedy"]["strict"] <= 0.47
    assert record["greedy"]["lenient"] <= 0.60 and record["sampled"]["lenient"] <= 0.65
