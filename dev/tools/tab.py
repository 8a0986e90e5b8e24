"""GRPO in a tab: `make tab` builds the page from docs/tab and the tiny model, `make tab-engine` its engine.

The page is one HTML file with everything in it: scripts, texts, the engine, and the model's weights in float16.  The
engine, docs/tab/engine.wasm, is committed, so that `make tab` needs no compiler; it is compiled by clang and lld (in
Debian: `apt-get install clang lld`).
"""

import argparse
import base64
import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from grpo_lib.common.errors import CourseError  # noqa: E402
from grpo_lib.common.files import read_json  # noqa: E402
from grpo_lib.problems import words  # noqa: E402

TAB = ROOT / "docs" / "tab"
ENGINE = TAB / "engine.wasm"
MODEL = ROOT / "assets" / "tiny-base"
PAGE = ROOT / "build" / "grpo-in-a-tab.html"

SEQUENCES = 16  # completions at a time: the largest group, and how many questions are validated at once
MAX_PROMPT = 64  # tokens; the longest word problem has 52
MAX_COMPLETION = 24  # tokens, as in recipes/tiny-cpu.yaml

FLAGS = (
    "--target=wasm32", "-O3", "-std=c11", "-msimd128", "-mbulk-memory", "-ffreestanding", "-fno-builtin", "-nostdlib",
    "-fvisibility=hidden", "-Wall", "-Wextra", "-Wl,--no-entry", "-Wl,--export-dynamic", "-Wl,--strip-all",
)  # fmt: skip

# In the order in which they need each other.
SHARED_MODULES = ("random", "words", "loop")
WORKER_MODULES = (*SHARED_MODULES, "answers", "rewards", "tokenizer", "engine", "own_reward", "worker")
PAGE_MODULES = (*SHARED_MODULES, "settings", "chart", "experiments", "recorded", "readings", "page")
_IMPORT = re.compile(r"^import [^;]*;\n", re.M)
_EXPORT = re.compile(r"^export ", re.M)


def sizes(config: dict[str, Any]) -> dict[str, Any]:
    """The constants of the engine's source, from a model's config.json."""
    heads, head_dim = config["num_attention_heads"], config["head_dim"]
    return {
        "VOCABULARY": config["vocab_size"],
        "HIDDEN": config["hidden_size"],
        "INTERMEDIATE": config["intermediate_size"],
        "LAYERS": config["num_hidden_layers"],
        "HEADS": heads,
        "KV_HEADS": config["num_key_value_heads"],
        "HEAD_DIM": head_dim,
        "ATTENTION_SCALE": f"{head_dim**-0.5!r}f",
        "RMS_NORM_EPS": f"{config['rms_norm_eps']!r}f",
        "END": config["eos_token_id"],
        "WIDEST_INPUT": max(config["intermediate_size"], config["hidden_size"], heads * head_dim),
        "SEQUENCES": SEQUENCES,
        "MAX_PROMPT": MAX_PROMPT,
        "MAX_COMPLETION": MAX_COMPLETION,
        "MAX_LENGTH": MAX_PROMPT + MAX_COMPLETION,
    }


def compile_engine(to: Path) -> None:
    """Compile docs/tab/engine for the tiny model.  Raises CourseError without clang, or where it fails."""
    clang = shutil.which("clang")
    if clang is None:
        raise CourseError("make tab-engine: no clang; install clang and lld (the engine that is committed needs none)")
    defined = [f"-D{name}={value}" for name, value in sizes(_config()).items()]
    command = [clang, *FLAGS, *defined, "-o", str(to), str(TAB / "engine" / "model.c")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or done.stderr:
        raise CourseError(f"make tab-engine: clang says\n{done.stderr}")


def _config() -> dict[str, Any]:
    return read_json(MODEL / "config.json", "copy the tiny model again")


def names_of_weights(layers: int) -> list[str]:
    """The checkpoint's tensors in the engine's order."""
    of_layer = (
        *("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.q_norm"),
        *("self_attn.k_norm", "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj"),
        "mlp.down_proj",
    )
    inside = [f"model.layers.{layer}.{name}.weight" for layer in range(layers) for name in of_layer]
    return ["model.embed_tokens.weight", *inside, "model.norm.weight"]


def flat_weights(model: Path = MODEL) -> np.ndarray:
    """All weights of a checkpoint in one array of float32, in the engine's order."""
    from safetensors.numpy import load_file

    tensors = load_file(model / "model.safetensors")
    config = read_json(model / "config.json", "copy the tiny model again")
    parts = [tensors[name].ravel() for name in names_of_weights(config["num_hidden_layers"])]
    return np.concatenate(parts).astype(np.float32)


def data_of(model: Path = MODEL) -> dict[str, Any]:
    """What the scripts take from the course: the model's sizes, its tokenizer, the tables of the word problems."""
    config = read_json(model / "config.json", "copy the tiny model again")
    tokenizer = read_json(model / "tokenizer.json", "copy the tiny model again")
    added = [{key: token[key] for key in ("id", "content", "special")} for token in tokenizer["added_tokens"]]
    bpe = tokenizer["model"]
    return {
        "config": {"rope_parameters": config["rope_parameters"]},
        "tokenizer": {"vocab": bpe["vocab"], "merges": bpe["merges"], "added": added},
        "words": tables_of_words(),
    }


def tables_of_words() -> dict[str, Any]:
    """The tables of grpo_lib.problems.words, under the names that docs/tab/words.mjs has for them."""
    difficulties = {name: {"terms": it.terms, "factors": it.factors} for name, it in words.DIFFICULTIES.items()}
    return {
        "names": words.NAMES,
        "things": words.THINGS,
        "firstSentences": words.FIRST_SENTENCES,
        "secondSentences": words.SECOND_SENTENCES,
        "distractor": words.DISTRACTOR,
        "lastSentence": words.LAST_SENTENCE,
        "difficulties": difficulties,
        "twoStepShare": words.TWO_STEP_SHARE,
        "distractorShare": words.DISTRACTOR_SHARE,
        "byHeart": words.BY_HEART,
        "hashBuckets": words.HASH_BUCKETS,
    }


def script_of(*modules: str) -> str:
    """Modules of docs/tab as one script, in this order: without their imports, and with nothing exported."""
    scripts = [(TAB / f"{name}.mjs").read_text() for name in modules]
    return _EXPORT.sub("", _IMPORT.sub("", "\n".join(scripts)))


def page(course: dict[str, str] | None = None) -> str:
    """The whole page as HTML; `course` is where it links to the course, for each of its languages."""
    texts = read_json(TAB / "texts.json", "take it from git again")
    data = json.dumps({"data": data_of(), "texts": texts, "course": course})
    parts = {
        "PAGE_CSS": (TAB / "page.css").read_text(),
        "LOOP_TEXT": html.escape((TAB / "loop.mjs").read_text()),
        "DATA": data.replace("</", "<\\/"),
        "ENGINE": _base64(ENGINE.read_bytes()),
        "WEIGHTS": _base64(flat_weights().astype("<f2").tobytes()),
        "WORKER": script_of(*WORKER_MODULES),
        "PAGE": script_of(*PAGE_MODULES),
    }
    skeleton = (TAB / "page.html").read_text()
    return re.sub(r"@([A-Z_]+)@", lambda match: parts[match[1]], skeleton)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", action="store_true", help="compile the engine")
    if parser.parse_args().engine:
        compile_engine(ENGINE)
        print(f"{ENGINE.relative_to(ROOT)}: {ENGINE.stat().st_size / 1000:.0f} kB")
        return
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
    print(f"{PAGE.relative_to(ROOT)}: {PAGE.stat().st_size / 1e6:.2f} MB; open it in a browser")


if __name__ == "__main__":
    try:
        main()
    except CourseError as error:
        sys.exit(str(error))
