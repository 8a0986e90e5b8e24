"""Models of the tests of both tiers, and how far a MaxText actor is from another implementation of the same weights.

That is transformers in PyTorch where it is installed (.venv-tpu), else Tunix, by its own loader.
"""

import functools
import importlib.util
import json
import shutil
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from tunix.rl import common

from grpo_train.engines import maxtext_model, tunix_sampler
from grpo_train.recipes import ModelRecipe
from grpo_train.tpu.random_model import END, PADDING

ROWS, PROMPT, COMPLETION = 8, 96, 32  # half of the rows have padding
LENGTH = PROMPT + COMPLETION


def published(name: str, **sizes) -> ModelRecipe:
    """A model that is not on this machine."""
    return ModelRecipe(path="nobody/nothing", maxtext_name=name, sizes=sizes)


def changed_config(folder: Path, copy: Path, change: dict) -> Path:
    """A copy of a model's folder; its config.json has these values."""
    file = Path(shutil.copytree(folder, copy)) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    return copy


def mean_gap(actor: maxtext_model.Actor, folder: Path) -> float:
    """Mean absolute difference of the log-probabilities of the same random tokens, in nats; both in float32."""
    vocabulary = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    ids = np.random.default_rng(0).integers(END + 1, vocabulary, (ROWS, LENGTH), dtype=np.int32)
    ids[: ROWS // 2, : PROMPT // 3] = PADDING
    prompts, completions = ids[:, :PROMPT], ids[:, PROMPT:]
    ours = np.asarray(maxtext_model.per_token_logps(actor, prompts, completions, PADDING, END))
    theirs = _torch_logps(folder, ids) if importlib.util.find_spec("torch") else _tunix_logps(folder, ids)
    return float(np.abs(ours - theirs).mean())


def _torch_logps(folder: Path, ids: np.ndarray) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.from_numpy(ids.astype(np.int64))
    mask = tokens != PADDING
    with torch.no_grad():
        logits = model(input_ids=tokens, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    logps = torch.log_softmax(logits[:, PROMPT - 1 : -1], dim=-1)
    return logps.gather(2, tokens[:, PROMPT:, None])[..., 0].numpy()  # [B, C]


def _tunix_logps(folder: Path, ids: np.ndarray) -> np.ndarray:
    compute = functools.partial(common.compute_per_token_logps, pad_id=PADDING, eos_id=END)
    with jax.default_matmul_precision("highest"):
        graph, state = nnx.split(tunix_sampler.load_hugging_face(folder))
        return np.asarray(compute(graph, state, prompt_tokens=ids[:, :PROMPT], completion_tokens=ids[:, PROMPT:]))
