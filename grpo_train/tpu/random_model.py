"""A small random model of a recipe's own architecture.

    write_random_model(recipe.model, folder)     # 2 layers; the published config.json's keys and constants

The smoke test trains it; tests compare names, biases, heads, norms and the rotary embedding of the three families with
another implementation (tests/tpu/parity.py).
"""

import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_train.engines import model_files
from grpo_train.engines.tokens import load_tokenizer
from grpo_train.recipes import ModelRecipe

# The beginning of MaxText's name -> config.json's model_type, architecture, and keys that only this family has.
FAMILIES = {
    "qwen2.5": ("qwen2", "Qwen2ForCausalLM", ("use_sliding_window",)),  # no attention_bias: Qwen2.5's file has none
    "qwen3": ("qwen3", "Qwen3ForCausalLM", ("use_sliding_window", "attention_bias")),
    "llama3": ("llama", "LlamaForCausalLM", ("attention_bias", "mlp_bias", "pretraining_tp")),
}
KEYS = (
    "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "attention_dropout",
    "initializer_range", "use_cache",
)  # fmt: skip
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64, "torch_dtype": "float32"}
KV_HEADS = (2, 4)  # the larger one where the published model has as many; both divide the width
QUERIES_PER_KV = 2  # the most
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
PADDING, END = 0, 1  # ids of the tiny tokenizer


def family(model: ModelRecipe) -> str | None:
    """config.json's model_type, where a random model can be made of it."""
    names = [name for name in FAMILIES if model.maxtext_name.startswith(name)]
    # Not of experts: qwen3-30b-a3b has 3 billion active parameters.
    return FAMILIES[names[0]][0] if names and "-a" not in model.maxtext_name else None


def write_random_model(
    model: ModelRecipe, folder: str | Path, seed: int = 0, layers: int | None = None, tensor: int = 1
) -> Path:
    """Write a Hugging Face directory; `seed` decides the weights.

    A small model has at least as many key-value heads as devices share it, `tensor`.

    Its config.json is that of the recipe's model where the model is on this machine, else the one that MaxText lists
    for `maxtext_name`, with few layers and small sizes; the tokenizer is the tiny model's.  With `layers` it has that
    many, and the recipe's own widths, vocabulary and tokenizer.

    It never writes padding, as a trained model.  (Tunix takes every padding token for padding, also one that was
    sampled, and the trainer would see another text than the sampler wrote.)  The first hidden value is the same for
    all tokens, no layer adds to it, and only padding's output row reads it.
    """
    from safetensors.numpy import save_file

    folder = Path(folder)
    if layers:
        tokenizer = model_files.model_directory(model, weights=False)
        config = full_config(model) | {"num_hidden_layers": layers}
    else:
        tokenizer = environment.repo_root() / "assets" / "tiny-base"
        config = small_config(model, tensor)
    # A width's worth of small values: what a layer adds does not grow with it.
    spread = 0.1 * (SIZES["hidden_size"] / config["hidden_size"]) ** 0.5
    draw = np.random.default_rng(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        if "norm" in name:  # small values among them, which a small step changes in bfloat16, too
            weights[name] = draw.uniform(0.1, 1.9, shape).astype(np.float32)
        else:
            weights[name] = draw.normal(0, spread if len(shape) == 2 else 0.2, shape).astype(np.float32)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name][0] = 0
    embedding = weights["model.embed_tokens.weight"]
    head = weights.get("lm_head.weight", embedding)
    head[:, 0] = 0
    embedding[:, 0] = weights["model.norm.weight"][0] = 1  # a tied embedding is the head
    head[config["pad_token_id"]] = 0
    head[config["pad_token_id"], 0] = -100
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, folder / name)
    return folder


def full_config(model: ModelRecipe) -> dict[str, Any]:
    """The published config.json, with what some models leave to a default, and the tokenizer's padding."""
    defaults = {
        "tie_word_embeddings": False,
        "head_dim": None,
        "torch_dtype": "float32",
        "model_type": family(model),
    }
    config = defaults | published_config(model)
    config["pad_token_id"] = load_tokenizer(model).pad_token_id
    config["head_dim"] = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    return config


def write_tiny_model(folder: str | Path, kv_heads: int) -> Path:
    """Write the tiny trained model with its key-value head `kv_heads` times; it computes what the tiny model computes.

    Its two query heads read one key-value head.  With copies of that one, each query head reads its own.  Where there
    are more copies than query heads, these are copied, too, and what they add up to is divided again.
    """
    from safetensors.numpy import load_file, save_file

    folder = Path(folder)
    tiny = environment.repo_root() / "assets" / "tiny-base"
    config = json.loads((tiny / "config.json").read_text(encoding="utf-8"))
    copies = max(1, kv_heads // config["num_attention_heads"])  # of each query head
    weights = load_file(tiny / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):  # [one head's values, D]
            weights[name] = np.tile(weight, (kv_heads, 1))
        elif name.endswith("q_proj.weight"):  # [heads' values, D]: the copies of a head are next to each other
            by_head = weight.reshape(config["num_attention_heads"], config["head_dim"], -1)
            weights[name] = np.repeat(by_head, copies, axis=0).reshape(-1, weight.shape[1])
        elif name.endswith("o_proj.weight"):  # [D, heads' values]
            by_head = weight.reshape(len(weight), config["num_attention_heads"], config["head_dim"])
            weights[name] = np.repeat(by_head / copies, copies, axis=1).reshape(len(weight), -1)
    config["num_key_value_heads"] = kv_heads
    config["num_attention_heads"] *= copies
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in TOKENIZER_FILES:
        shutil.copy(tiny / name, folder / name)
    return folder


def small_config(model: ModelRecipe, tensor: int = 1) -> dict[str, Any]:
    """config.json of the random model; its key-value heads are a multiple of `tensor`."""
    kind = family(model)
    published = published_config(model)
    _, architecture, own_keys = next(known for known in FAMILIES.values() if known[0] == kind)
    rope = dict(published.get("rope_parameters") or {}) | dict(published.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", published.get("rope_theta"))
    scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    most = max(published["num_key_value_heads"], KV_HEADS[0])
    kv_heads = max(number for number in KV_HEADS if number <= most)
    kv_heads = math.lcm(kv_heads, tensor)
    group = published["num_attention_heads"] // published["num_key_value_heads"]
    tiny = json.loads((environment.repo_root() / "assets/tiny-base/config.json").read_text())
    config: dict[str, Any] = {"architectures": [architecture], "model_type": kind}
    config |= {key: published[key] for key in (*KEYS, *own_keys) if key in published}
    config["rope_theta"] = theta
    if scaled:
        config["rope_scaling"] = rope
    return {
        **config,
        **SIZES,
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * min(group, QUERIES_PER_KV),
        "vocab_size": tiny["vocab_size"],
        "pad_token_id": PADDING,
        "bos_token_id": None,
        "eos_token_id": END,
    }


def published_config(model: ModelRecipe) -> dict[str, Any]:
    """config.json of the recipe's model where it is on this machine, else what MaxText lists for `maxtext_name`."""
    if not family(model):
        raise CourseError(f"model.maxtext_name={model.maxtext_name}: random models are of {', '.join(FAMILIES)} only")
    with warnings.catch_warnings(action="ignore"):  # of torch, which this table imports where it is installed
        from maxtext.checkpoint_conversion.utils.hf_model_configs import HF_MODEL_CONFIGS

    try:  # a smoke test does not ask the hub (HF_HUB_OFFLINE)
        return model_files.read_config(model_files.model_directory(model, weights=False))
    except CourseError:
        # Its table has no Llama without scaled rotary embeddings: that of Llama 3.1, without them.
        name = model.maxtext_name.replace("llama3-", "llama3.1-")
        if name not in HF_MODEL_CONFIGS:
            raise CourseError(f"MaxText has no {model.maxtext_name} in its table of Hugging Face models") from None
        config = {"rope_theta": 500_000.0} | HF_MODEL_CONFIGS[name].to_dict()
        if name != model.maxtext_name:
            config |= {"rope_scaling": None, "rope_parameters": None}
        return config | {key: model.sizes[size] for key, size in model_files.SIZES.items() if size in model.sizes}


def weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of such a model."""
    width, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (width, queries),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }
    if config["model_type"] == "qwen2":
        layer |= {
            "self_attn.q_proj.bias": (queries,),
            "self_attn.k_proj.bias": (keys,),
            "self_attn.v_proj.bias": (keys,),
        }
    if config["model_type"] == "qwen3":
        layer |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes
