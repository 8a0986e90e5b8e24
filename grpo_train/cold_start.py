"""The cold start: supervised fine-tuning on a few worked solutions, before GRPO (DeepSeek-R1, arXiv:2501.12948, 2.3.1).

A model that never writes the answer in tags earns no reward, and GRPO has nothing to tell apart.  After some dozens of
examples it writes them, and a part of its answers is right.
"""

import functools
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from tqdm.auto import tqdm
from tunix.sft import peft_trainer

from grpo_lib.common.errors import CourseError
from grpo_lib.problems import Problem
from grpo_lib.prompts import template_completion
from grpo_train import losses
from grpo_train.checks import Ready
from grpo_train.engines import compat, conversion, maxtext_model
from grpo_train.engines.optimizer import make_optimizer
from grpo_train.recipes.schema import TrainingRecipe
from grpo_train.runs import multihost

BATCH_SIZE = 16  # examples per update
ROWS = 4  # of them at a time, for memory; on several devices all
LEARNING_RATE = 1e-4
SAVED_EVERY = 16  # updates

_SIGN = re.compile(r"(?<=\d)[-+*/=](?=\d)")  # of a calculation: between two numbers


def example(problem: Problem, render: Callable[..., str], spaces: bool = False) -> tuple[str, str]:
    """A prompt and what is to be written after it: the worked solution in tags, without what the prompt ends with.

    spaces: write "9 * 5 = 45" for "9*5=45", as many bases do (`training.cold_start_spaces`).  The problem keeps its own
    spelling: a calculation that is held out is found by it.
    """
    solution = _SIGN.sub(r" \g<0> ", problem.solution) if spaces else problem.solution
    whole = template_completion(solution, problem.answer)
    return problem.prompt(render), whole.removeprefix(problem.completion_prefix(render).rstrip())


def fine_tune(
    ready: Ready,
    pairs: Sequence[tuple[str, str]],
    checkpoint: str | Path,
    output: Path,
    *,
    epochs: int = 2,
    learning_rate: float = LEARNING_RATE,
    progress: bool = True,
) -> Path:
    """Train a MaxText checkpoint on (prompt, completion) pairs; returns the new one, the folder `output`/0/items.

    AdamW, the mean cross entropy over the completions' tokens, their end among them.  One that was interrupted goes on
    with the update after its last checkpoint; a finished one is returned as it is.

    Raises CourseError in a run of several processes.
    """
    if (output / "0" / "items").exists():
        return output / "0" / "items"
    if multihost.is_distributed():
        raise CourseError("training.cold_start: fine-tune in one process, then start all with --base and cold_start=0")
    recipe, tokenizer = ready.recipe, ready.tokenizer
    pad = tokenizer.pad_token_id
    partial = output.with_name(output.name + ".partial")
    tokenize = functools.partial(tokenizer, add_special_tokens=False, padding=True, return_tensors="np")
    prompt_ids = tokenize([prompt for prompt, _ in pairs], padding_side="left")["input_ids"]  # [N, P]
    # Of several end tokens the examples end with the tokenizer's own: it is the one to be learnt.
    completions = [text + tokenizer.eos_token for _, text in pairs]
    completion_ids = tokenize(completions, padding_side="right")["input_ids"]  # [N, C]
    epoch = np.tile(np.arange(len(pairs)), (epochs, 1))
    rows = np.random.default_rng(recipe.seed).permuted(epoch, axis=1)  # every epoch in an order of its own
    batches = np.resize(rows, (-(-epoch.size // BATCH_SIZE), BATCH_SIZE))

    def of_rows(model: Any, batch: dict[str, Any]) -> tuple[Any, dict]:
        logps, _ = losses.model_statistics(
            model, batch["prompt_ids"], batch["completion_ids"], pad, tokenizer.eos_token_id, 1.0,
            recipe.loss.implementation,
        )  # fmt: skip
        return -(logps * batch["weights"]).sum(), {}

    def batch_of(rows: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
        batch = {"prompt_ids": prompt_ids[rows], "completion_ids": completion_ids[rows]}
        tokens = batch["completion_ids"] != pad
        batch["weights"] = tokens * np.float32(parts / tokens.sum())  # the mean over the parts is the loss
        return {"batch": {name: array.reshape(parts, -1, array.shape[1]) for name, array in batch.items()}}

    with maxtext_model.quiet():
        actor = maxtext_model.load_actor(
            recipe.model, checkpoint, prompt_ids.shape[1] + completion_ids.shape[1], pad,
            devices=ready.trainer_devices, tensor=recipe.hardware.trainer_tensor,
            loss=recipe.loss.implementation, lora=recipe.lora, seed=recipe.seed,
        )  # fmt: skip
        parts = BATCH_SIZE // ROWS if actor.mesh.size == 1 else 1
        settings = TrainingRecipe(
            learning_rate=learning_rate,
            warmup_steps=0,
            b2=0.95,
            rounding=recipe.training.rounding,
            optimizer_dtype=recipe.training.optimizer_dtype,
        )
        configuration = peft_trainer.TrainingConfig(
            data_sharding_axis=(None, "fsdp"),  # pyright: ignore[reportArgumentType]  # [parts, rows, tokens]
            eval_every_n_steps=1,  # Tunix asks for it
            checkpoint_root_directory=str(partial / "updates"),
            checkpointing_options=ocp.CheckpointManagerOptions(
                should_save_fn=lambda update, _: update % SAVED_EVERY == 0, max_to_keep=1
            ),
        )
        with actor.scope():
            optimizer = make_optimizer(settings, 1, recipe.seed, recipe.model.trainer_dtype)
            trainer = peft_trainer.PeftTrainer(actor.module, optimizer, configuration)
            trainer.with_loss_fn(lambda model, batch: losses.in_micro_batches(of_rows, model, batch)[0])
            compat.keep_optimizer_state(trainer)
            if maxtext_model.is_one_cpu(actor.mesh):
                compat.donate_weights(trainer)
            trainer.train(map(batch_of, tqdm(batches, desc="cold start", unit="update", disable=not progress)))
        conversion.save_weights(actor, partial / "0" / "items")
    shutil.rmtree(partial / "updates")
    partial.rename(output)
    return output / "0" / "items"
