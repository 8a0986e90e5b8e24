"""Worker of step_time.py: TRL's GRPOTrainer on the CPU, in the environment .venv-trl.

    .venv-trl/bin/python dev/benchmarks/trl_grpo.py /tmp/job.json

Settings are those of the recipe.  Where TRL's own default differs from what the course trains with, the line below
says so.  TRL pads each batch to its own longest prompt and completion; that is its advantage and stays.

What else was tried to make it faster, in seconds per step of recipes/tiny-cpu.yaml: medians of steps 4 to 14, a process
each; TRL 1.16, torch 2.13, two virtual cores of an AMD EPYC with AVX-512 and without AMX.  The machine was shared, and
runs of one setting spread by a tenth: each figure stands beside one that was measured just before or after it.

- freed memory kept, as the course's trainer keeps it (environment.prepare): 0.69, 0.88, 0.73 and 0.81 against 0.79,
  0.90, 0.81 and 0.78.  In use.
- on top of that: a static cache for generation 0.81 against 0.73 and 0.81; micro-batches of 32 0.94, eager attention
  1.09 and one thread instead of two 1.36 against 0.88; autocast to bfloat16, which this processor multiplies, 1.30
  against 0.81; torch.compile did not finish 14 steps in 100 s.  None in use.
- without it: huge pages (THP_MEM_ALLOC_ENABLE=1) 1.06, and micro-batches of 32 0.75, against 0.79.  None in use.
- in use by default: fused AdamW, torch's fused attention (sdpa), data loaded in this process, no padding to a multiple.
  The model has no dropout.  GRPOTrainer has no packing and no padding-free batches, and does not compile generation.
"""

from __future__ import annotations

import os
import tempfile
import time
from itertools import pairwise
from typing import Any

from job import Job, result, worker_main

from grpo_lib.common import environment

environment.prepare()  # before torch: freed memory is kept, as for the course's trainer
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")


def train(job: Job) -> dict[str, Any]:
    import torch
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from transformers.utils import logging
    from trl import GRPOConfig, GRPOTrainer

    from grpo_lib.rewards import get_rewards

    logging.set_verbosity_error()
    disable_progress_bars()
    rollout, grpo, training = (job.recipe[section] for section in ("rollout", "grpo", "training"))
    ends: list[float] = []
    rollouts: list[float] = []

    class StepTimer(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    class TimedTrainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            started = time.perf_counter()
            output = super()._generate_and_score_completions(inputs)
            rollouts.append(time.perf_counter() - started)
            return output

    with tempfile.TemporaryDirectory(prefix="step-time-") as directory:
        config = GRPOConfig(
            output_dir=directory,
            max_steps=job.steps,
            seed=job.recipe["seed"],
            per_device_train_batch_size=len(job.prompts[0]) * grpo["group_size"],
            num_generations=grpo["group_size"],
            max_completion_length=rollout["max_completion_length"],
            temperature=rollout["temperature"],
            top_p=1.0,
            top_k=0,
            beta=grpo["beta"],
            epsilon=grpo["epsilon"],
            loss_type="grpo",  # the mean over completions of the mean over tokens; TRL's default is DAPO's
            learning_rate=training["learning_rate"],
            lr_scheduler_type="constant_with_warmup",  # default: linear to zero
            warmup_steps=training["warmup_steps"],
            adam_beta1=training["b1"],
            adam_beta2=training["b2"],
            weight_decay=training["weight_decay"],
            max_grad_norm=training["max_grad_norm"],
            shuffle_dataset=False,  # the job's prompts are in the order of the steps
            gradient_checkpointing=False,  # default: on, which would compute the forward pass twice
            bf16=job.recipe["model"]["dtype"] == "bfloat16",  # its autocast; else float32
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            logging_steps=1,
            disable_tqdm=True,
        )
        prompts = [prompt for step in job.prompts for prompt in step]
        answers = [answer for step in job.answers for answer in step]
        model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(job.model, padding_side="left", trust_remote_code=False)
        trainer = TimedTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=get_rewards(job.recipe["rewards"]),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts, "answer": answers}),
            callbacks=[StepTimer()],
        )
        trainer.train()
    seconds = [end - start for start, end in pairwise(ends)]
    log = [row for row in trainer.state.log_history if "reward" in row]
    return result(
        "trl",
        seconds,
        rollouts,
        [whole - part for whole, part in zip(seconds, rollouts, strict=True)],
        [row["reward"] for row in log],
        [row["completions/mean_length"] for row in log],
        packages=("trl", "torch", "transformers", "accelerate"),
    )


if __name__ == "__main__":
    worker_main(train, __doc__)
