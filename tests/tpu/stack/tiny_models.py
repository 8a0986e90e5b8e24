"""The tiny base with an output layer of its own.  Random models of other architectures: grpo_tpu.random_model."""

import json
import shutil
from pathlib import Path

from safetensors.numpy import load_file, save_file

from grpo_tpu.random_model import TOKENIZER_FILES


def untied(folder: Path, tiny_base: Path) -> Path:
    """The tiny base with an output layer of its own, a copy of its embedding: it answers as the tied one does."""
    weights = load_file(tiny_base / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    config = json.loads((tiny_base / "config.json").read_text(encoding="utf-8")) | {"tie_word_embeddings": False}
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in TOKENIZER_FILES:
        shutil.copy(tiny_base / name, folder / name)
    return folder
