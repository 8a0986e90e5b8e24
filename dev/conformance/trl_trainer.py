"""What the adapter of TRL asks: a GRPOTrainer whose completions, rewards and log-probabilities are those of a case."""

import functools
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

MODEL = str(Path(__file__).parents[2] / "assets" / "tiny-base")  # its tokenizer; no forward pass is computed
HELD = {}  # the case that is asked about, and its log-probabilities


class Trainer(GRPOTrainer):
    def _get_per_token_logps_and_entropies(self, *arguments, **named):
        return HELD["logps"], torch.zeros_like(HELD["logps"]), None

    def _generate(self, prompts):
        case, end = HELD["case"], self.eos_token_ids[0] if hasattr(self, "eos_token_ids") else 1
        rows = [row[kept].tolist() for row, kept in zip(case.tokens + 9, case.mask, strict=True)]
        ids = [row if cut else [*row[:-1], end] for row, cut in zip(rows, case.truncated, strict=True)]
        return [[9]] * len(ids), ids, None, [""] * len(ids), None, {}, None, None


@functools.cache
def trainer(rows, parts, group_size, length, columns, **settings):
    rewards = [lambda prompts, completions, k=k, **_: HELD["case"].rewards[:, k].tolist() for k in range(columns)]
    for k, reward in enumerate(rewards):
        reward.__name__ = f"reward_{k}"
    args = GRPOConfig(
        tempfile.mkdtemp(), per_device_train_batch_size=rows // parts, gradient_accumulation_steps=parts,
        num_generations=group_size, max_completion_length=length, bf16=False, use_cpu=True, report_to=[], **settings,
    )  # fmt: skip
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(MODEL),
        AutoTokenizer.from_pretrained(MODEL, padding_side="left"),
    )
    made = Trainer(model, rewards, args, Dataset.from_dict({"prompt": ["?"] * rows}), processing_class=tokenizer)
    made.model.train()  # this and the next as its training loop does
    made.current_gradient_accumulation_steps = parts
    return made
