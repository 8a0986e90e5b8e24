"""The small files of an export, so that Transformers 4 and 5 read the same model.

Transformers 5, which writes them, has spellings of its own.  Version 4, and what is built on it, does not know them:
without `rope_theta` it takes 10,000 and says nothing.  Version 5 reads the older spellings, too.
"""

from pathlib import Path
from typing import Any

from grpo_lib.common.files import read_json, read_json_if_exists, write_json_atomic
from grpo_train.engines.model_files import rotary_embedding

REMEDY = "export the model again"

# Tokenizer classes that both versions have: PreTrainedTokenizerFast reads any tokenizer.json.
ANY_TOKENIZER = "PreTrainedTokenizerFast"
TOKENIZER_CLASSES = (
    ANY_TOKENIZER,
    "Qwen2Tokenizer", "Qwen2TokenizerFast",
    "LlamaTokenizer", "LlamaTokenizerFast",
    "GPT2Tokenizer", "GPT2TokenizerFast",
    "GemmaTokenizer", "GemmaTokenizerFast",
)  # fmt: skip


def write_for_both(export: Path, base: Path, tokenizer: Any) -> None:
    """Rewrite an export's config.json and tokenizer_config.json, and add its generation_config.json.

    Args:
      export: a Hugging Face directory as Transformers 5 has written it.
      base: that of the model which was trained; what it says about its tokenizer and its end tokens is kept.
      tokenizer: the base's, as `load_tokenizer` gives it.
    """
    config = read_json(export / "config.json", REMEDY)
    of_tokenizer = read_json(export / "tokenizer_config.json", REMEDY)
    base_tokenizer = read_json_if_exists(base / "tokenizer_config.json")
    generation = read_json_if_exists(base / "generation_config.json")
    write_json_atomic(export / "config.json", rope_for_both(config))
    write_json_atomic(export / "tokenizer_config.json", tokenizer_for_both(of_tokenizer, base_tokenizer))
    write_json_atomic(export / "generation_config.json", with_every_end(generation, config, tokenizer))


def rope_for_both(config: dict[str, Any]) -> dict[str, Any]:
    """config.json with Transformers 4's `rope_theta` and `rope_scaling` beside version 5's `rope_parameters`.

    Unchanged where there is one rotary embedding for each type of layer, which version 4 spells in as many ways as it
    has models, and where the file has no `rope_parameters`.
    """
    rope: dict[str, Any] = dict(config.get("rope_parameters") or {})
    if "rope_theta" not in rope:
        return config
    both = config | {"rope_theta": rope.pop("rope_theta")}
    if "partial_rotary_factor" in rope:
        both["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind, _ = rotary_embedding(config)
    return both | {"rope_scaling": None if kind == "default" else rope}


def tokenizer_for_both(written: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json with a class and a list of special tokens that both versions know.

    The class is the one that the base names, where both have it.
    """
    kept = {key: value for key, value in written.items() if key not in ("is_local", "local_files_only")}
    named = base.get("tokenizer_class") or written.get("tokenizer_class")
    kept["tokenizer_class"] = named if named in TOKENIZER_CLASSES else ANY_TOKENIZER
    special = kept.get("extra_special_tokens")
    if isinstance(special, list):  # version 4 wants names for them under this key
        del kept["extra_special_tokens"]
        kept["additional_special_tokens"] = special
    return kept


def with_every_end(generation: dict[str, Any], config: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The base's generation_config.json with the tokenizer's end token among its own.

    Where the base has none, config.json's end tokens are its own, as they are for Transformers.
    """
    own = generation.get("eos_token_id", config.get("eos_token_id"))
    ends = own if isinstance(own, list) else [own]
    ends = list(dict.fromkeys(end for end in [*ends, tokenizer.eos_token_id] if end is not None))
    missing = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}
    # A null is left out: Transformers 4 writes none either.
    filled = {key: value for key, value in (missing | generation).items() if value is not None}
    return filled | {"eos_token_id": ends if len(ends) > 1 else ends[0]}
