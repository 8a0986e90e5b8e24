"""How much host memory the conversion of a model takes, in both directions, and what that means for Qwen2.5-32B.

    python dev/benchmarks/conversion_memory.py                       # models of 0.3, 0.6 and 1.0 GB; some minutes
    python dev/benchmarks/conversion_memory.py --layers 10 20 40 --json

Random models of Qwen2.5-32B's architecture in bfloat16, an eighth as wide, with as many layers as asked for; the
vocabulary grows with the layers.  So the parts of the model are of the shares that they have in the 32B: what a
converter holds at a time is a whole weight of all layers, and the largest are 28 % of the model.

Each model is converted to MaxText (grpo convert) and that checkpoint back to Hugging Face (the second half of an
export).  Peak memory is the largest resident set of the converter's process, as the kernel counts it; nothing can be
below the floor of one weight.  A line through the sizes separates what every conversion takes (imports) from the
growth, bytes per byte of model, and the line at the 32B's size is its need: an extrapolation, by a factor of 64.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from job import ROOT, machine, only_result_on_stdout, run_worker

PARAMETERS_32B = 32_763_876_352
BYTES_32B = 2 * PARAMETERS_32B
HOST_GB = 128  # memory of the host that the 32B is to be converted on
WIDTH, HEADS, KV_HEADS, HEAD, MLP = 640, 5, 1, 128, 3456  # of the 32B, an eighth: 5120, 40, 8, 128, 27648
VOCABULARY_PER_LAYER = 297  # 152064 / 8 / 64: the embedding's share of a layer as in the 32B
SHARD_LAYERS = 5
DIRECTIONS = {"to_maxtext": "Hugging Face to MaxText", "to_hugging_face": "MaxText to Hugging Face"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[20, 40, 64], help="of each model (%(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--worker", choices=DIRECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        with only_result_on_stdout() as stdout:
            print(json.dumps(convert(arguments.worker, arguments.folder)), file=stdout)
        return
    if len(set(arguments.layers)) < 2 or min(arguments.layers) < 1:
        sys.exit("error: --layers needs two different numbers or more: a line goes through their sizes")

    sizes: list[dict[str, Any]] = []
    for layers in arguments.layers:
        with tempfile.TemporaryDirectory(prefix="conversion-memory-") as folder:
            size = write_model(Path(folder) / "model", layers)
            sizes.append({"layers": layers, "model_bytes": size})
            for direction in DIRECTIONS:
                command = [sys.executable, __file__, "--worker", direction, "--folder", folder]
                sizes[-1][direction] = run_worker(command)
        peaks = ", ".join(f"{name} {sizes[-1][name]['peak_bytes'] / 1e9:.2f} GB" for name in DIRECTIONS)
        print(f"{layers} layers, {size / 1e9:.2f} GB: {peaks}", file=sys.stderr, flush=True)
    result = {"sizes": sizes, "growth": {name: growth(sizes, name) for name in DIRECTIONS}, "machine": machine()}
    print(table(result))
    if arguments.json:
        print(json.dumps(result))


def tensors(layers: int) -> Iterator[dict[str, tuple[int, ...]]]:
    """Names and shapes, one shard's at a time."""
    vocabulary = layers * VOCABULARY_PER_LAYER
    yield {"model.embed_tokens.weight": (vocabulary, WIDTH)}
    for first in range(0, layers, SHARD_LAYERS):
        shard: dict[str, tuple[int, ...]] = {}
        for layer in range(first, min(first + SHARD_LAYERS, layers)):
            name = f"model.layers.{layer}"
            for part, size in (("q", HEADS * HEAD), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD)):
                shard |= {f"{name}.self_attn.{part}_proj.weight": (size, WIDTH)}
                shard |= {f"{name}.self_attn.{part}_proj.bias": (size,)}
            shard |= {
                f"{name}.self_attn.o_proj.weight": (WIDTH, HEADS * HEAD),
                f"{name}.mlp.gate_proj.weight": (MLP, WIDTH),
                f"{name}.mlp.up_proj.weight": (MLP, WIDTH),
                f"{name}.mlp.down_proj.weight": (WIDTH, MLP),
                f"{name}.input_layernorm.weight": (WIDTH,),
                f"{name}.post_attention_layernorm.weight": (WIDTH,),
            }
        yield shard
    yield {"model.norm.weight": (WIDTH,), "lm_head.weight": (vocabulary, WIDTH)}


def write_model(folder: Path, layers: int) -> int:
    """A random Hugging Face folder with the tiny model's tokenizer, written shard by shard; its weights in bytes."""
    import ml_dtypes
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    places: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(tensors(layers)):
        file = f"model-{number:05d}.safetensors"
        weights = {
            name: (generator.standard_normal(shape, dtype=np.float32) * 0.02).astype(ml_dtypes.bfloat16)
            for name, shape in shard.items()
        }
        save_file(weights, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
        total += sum(weight.nbytes for weight in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "torch_dtype": "bfloat16",
        "hidden_size": WIDTH, "intermediate_size": MLP, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "vocab_size": layers * VOCABULARY_PER_LAYER, "tie_word_embeddings": False,
        "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "initializer_range": 0.02, "attention_dropout": 0.0, "use_cache": True, "use_sliding_window": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / "assets" / "tiny-base" / name, folder)
    return total


def convert(direction: str, folder: Path) -> dict[str, float]:
    """Peak memory of the converter's process, and the seconds that it took; the only child of this one."""
    from grpo_train.engines import conversion
    from grpo_train.recipes import ModelRecipe

    # As the recipe of the 32B does: MaxText has no file of its own for it.
    model = ModelRecipe(path=str(folder / "model"), maxtext_name="qwen2.5-14b", dtype="bfloat16")
    started = time.perf_counter()
    if direction == "to_maxtext":
        conversion.convert_to_maxtext(model, folder / "base")
    else:
        conversion.export_checkpoint(model, folder / "base" / "0" / "items", folder / "export", folder / "export.log")
        if differing := conversion.differing_weights(folder / "model", folder / "export"):
            sys.exit(f"error: there and back changed {differing[0]}")
    seconds = time.perf_counter() - started
    # ru_maxrss counts KiB on Linux and bytes on macOS.
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"peak_bytes": peak, "seconds": round(seconds, 1)}


def growth(sizes: list[dict[str, Any]], direction: str) -> dict[str, float]:
    """A line through the peaks by least squares, and its value at the size of the 32B."""
    model = [size["model_bytes"] for size in sizes]
    slope, intercept = np.polyfit(model, [size[direction]["peak_bytes"] for size in sizes], 1)
    return {
        "bytes_per_byte": round(float(slope), 3),
        "intercept_gb": round(float(intercept) / 1e9, 3),
        "stated_32b_gb": round(float(intercept + slope * BYTES_32B) / 1e9, 1),
    }


def table(result: dict[str, Any]) -> str:
    lines = [f"{'model, GB':>10}" + "".join(f"{label + ', peak GB (ratio)':>44}" for label in DIRECTIONS.values())]
    for size in result["sizes"]:
        model = size["model_bytes"]
        line = f"{model / 1e9:>10.2f}"
        for name in DIRECTIONS:
            peak = size[name]["peak_bytes"]
            cell = f"{peak / 1e9:.2f} ({peak / model:.2f})"
            line += f"{cell:>44}"
        lines.append(line)
    for name, label in DIRECTIONS.items():
        growth = result["growth"][name]
        fits = "fits" if growth["stated_32b_gb"] < HOST_GB else "does not fit"
        fitted = f"{growth['intercept_gb']:.2f} GB and {growth['bytes_per_byte']:.2f} bytes per byte of model"
        stated = f"Qwen2.5-32B ({BYTES_32B / 1e9:.1f} GB): {growth['stated_32b_gb']:.0f} GB by this line"
        lines.append(f"{label}: {fitted}; {stated}, {fits} {HOST_GB} GB")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
