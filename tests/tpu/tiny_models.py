"""Tiny models of the architectures that the recipes use, as Hugging Face directories with the tiny base's tokenizer."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, HEAD, VOCABULARY = 128, 256, 2, 4, 2, 64, 256
PADDING = 0

SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "dtype": "float32",
    "pad_token_id": PADDING,
    "bos_token_id": None,
    "eos_token_id": 1,
}
ARCHITECTURES = {
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        # Llama 3.1's own: MaxText's llama3.1 has it built in.
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    },
}


def random_model(folder: Path, model_type: str, tiny_base: Path, tied: bool = False) -> Path:
    """A model with random weights; with biases on queries, keys and values where the architecture has them."""
    draw = np.random.default_rng(0)

    def matrix(rows, columns):
        return draw.normal(0, 0.1, (rows, columns)).astype(np.float32)

    def vector(size, mean=0.0):
        return draw.normal(mean, 0.2, size).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN), "model.norm.weight": vector(HIDDEN, 1)}
    if not tied:
        weights["lm_head.weight"] = matrix(VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        names = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{names}{norm}.weight"] = vector(HIDDEN, 1)
        for part, size in (("q", HEADS * HEAD), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD)):
            weights[f"{names}self_attn.{part}_proj.weight"] = matrix(size, HIDDEN)
            if model_type == "qwen2":
                weights[f"{names}self_attn.{part}_proj.bias"] = vector(size)
        weights[f"{names}self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD)
        for part in ("gate", "up"):
            weights[f"{names}mlp.{part}_proj.weight"] = matrix(MLP, HIDDEN)
        weights[f"{names}mlp.down_proj.weight"] = matrix(HIDDEN, MLP)
    never_writes_padding(weights)
    config = SIZES | ARCHITECTURES[model_type] | {"model_type": model_type, "tie_word_embeddings": tied}
    return _write(folder, weights, config, tiny_base)


def never_writes_padding(weights: dict[str, np.ndarray]) -> None:
    """Make padding as improbable as it is in a trained model; in place.

    Tunix takes every padding token for padding, also one that was sampled: the trainer would see another text than the
    sampler wrote, and its log-probabilities of all later tokens would be those of another text.

    The first hidden value is the same for all tokens: no layer adds to it, and only padding's output row reads it.
    """
    embedding = weights["model.embed_tokens.weight"]
    head = weights.get("lm_head.weight", embedding)  # tied: the value then adds one constant to all other logits
    head[:, 0] = 0
    embedding[:, 0] = 1
    head[PADDING] = 0
    head[PADDING, 0] = -100
    weights["model.norm.weight"][0] = 1
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0


def untied(folder: Path, tiny_base: Path) -> Path:
    """The tiny base with an output layer of its own, a copy of its embedding: it answers as the tied one does."""
    weights = load_file(tiny_base / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    config = json.loads((tiny_base / "config.json").read_text(encoding="utf-8")) | {"tie_word_embeddings": False}
    return _write(folder, weights, config, tiny_base)


def _write(folder: Path, weights: dict, config: dict, tiny_base: Path) -> Path:
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in TOKENIZER_FILES:
        shutil.copy(tiny_base / name, folder / name)
    return folder
