"""What of a recipe MaxText's own train_rl cannot express, or takes in another sense."""

from collections.abc import Iterator
from typing import Any

from grpo_train.recipes.schema import GRPORecipe, HardwareRecipe, ProblemsRecipe, RolloutRecipe, TrainingRecipe

# Keys that upstream has no option for, where they are not at their defaults.
LOST = {
    "hardware": {"processes": "see several hosts"},
    "lora": {
        "rank": "upstream's train_rl trains all weights; its lora section is for supervised fine-tuning",
        "alpha": "see lora.rank",
    },
    "prompts": {
        "thinking": "the prompts that upstream is given ask the model not to think",
        "completion_prefix": "the rewards have it in front of completions; upstream's own evaluation does not",
    },
    "loss": {"implementation": "upstream has Tunix's own loss"},
    "grpo": {
        "target_kl": "upstream reads beta once, when the update is compiled",
        "watch_kl": "upstream logs no KL without a penalty",
        "advantage": "upstream divides by the standard deviation of the group, without an option",
        "aggregation": "upstream has the mean of each completion, or of the tokens of a micro-batch",
        "epsilon_high": "upstream ignores rl.epsilon_high without its agentic learner",
        "overlong_buffer": "upstream has no option for it; Tunix's DAPO counts characters and not tokens",
        "overlong_penalty": "see grpo.overlong_buffer",
        "mask_truncated": "upstream has no option for it",
        "dynamic_sampling": "upstream has no code for it; Tunix's DAPO has the name and a TODO",
        "correction": "upstream has importance sampling for its agentic learner alone",
    },
    "training": {
        "checkpoints": "upstream writes to base_output_directory, which may be a gs:// address",
        "cold_start": "upstream has a trainer of its own for supervised fine-tuning, which train_rl does not call",
        "cold_start_spaces": "see training.cold_start",
        "optimizer": "upstream's train_rl has AdamW",
        "rounding": "upstream rounds to the nearest",
        "optimizer_dtype": "upstream keeps both in the weights' dtype",
        "stop_after": "upstream has no option for it",
        "profile_steps": "upstream's profiler counts micro-batches, from the middle of a step",
    },
    "rollout": {"max_mean_gap": "upstream does not compare sampler and trainer"},
    "evaluation": {
        "preset": "see evaluation.samples",
        "top_k": "see evaluation.samples",
        "samples": "upstream evaluates with one completion of each problem",
        "temperature": "see evaluation.samples",
        "top_p": "see evaluation.samples",
    },
    "tracking": {"wandb": "upstream logs to W&B where WANDB_MODE is set, and can then stop with a wandb.Error"},
}
# What upstream does otherwise in every run.
ALWAYS = [
    "evaluation of before and after: upstream logs percentages, by its own grader, at temperature 0.01; no record",
    "check of the first sync: upstream trains on when sampler and trainer differ",
    "a new start: upstream continues silently from the checkpoints of an earlier run of this name",
    "order and sampling noise: upstream shuffles in its own way, and gives vLLM no seed",
    "sampling defaults: vLLM takes repetition_penalty and the like from the model's generation_config.json",
]


def differing(
    changed: dict[str, Any],
    source: ProblemsRecipe,
    rollout: RolloutRecipe,
    training: TrainingRecipe,
    hardware: HardwareRecipe,
    grpo: GRPORecipe,
) -> list[str]:
    """One sentence for each field that upstream has no option for, or that means something else there, and for what it
    does otherwise in every run.  `changed`: the recipe's values that are not defaults, by section."""
    sentences = []
    for section, reasons in LOST.items():
        for key, reason in reasons.items():
            if key in changed.get(section, {}):
                sentences.append(f"{section}.{key}: {reason}")
    return [
        *sentences,
        *ALWAYS,
        *_of_problems(source, training),
        *_of_rollout(rollout),
        *_of_training(training),
        *_of_grpo(grpo, training),
        *_of_hardware(hardware),
    ]


def _of_problems(source: ProblemsRecipe, training: TrainingRecipe) -> Iterator[str]:
    if source.source not in ("words", "gsm8k"):
        yield "problems.source: upstream's rows have no kind, so answers are graded as one number in <answer> tags"
    if training.validate_every > 0:
        yield "problems.validation: upstream would measure the test set during training, so that is switched off"
        yield "training.validate_every: see problems.validation"


def _of_rollout(rollout: RolloutRecipe) -> Iterator[str]:
    if rollout.engine != "vllm":
        yield "rollout.engine: upstream samples with vLLM"
    if rollout.has_schedule:
        yield "rollout.temperature: upstream samples at one temperature, here the schedule's first"
    others = sorted(set(rollout.vllm.options) - {"max_num_seqs", "block_size"})
    if others:
        yield f"rollout.vllm.options: no option for {', '.join(others)}"


def _of_training(training: TrainingRecipe) -> Iterator[str]:
    if training.layout != "padded":
        yield "training.layout: upstream computes padded rows; loss and gradient are the same"
    if training.warmup_steps > 0:
        yield "training.warmup_steps: upstream starts at zero; ours starts at learning_rate / warmup_steps"
    if training.schedule == "constant":
        yield "training.schedule=constant: upstream gets the start of a cosine, which falls by less than 1e-5 of it"


def _of_grpo(grpo: GRPORecipe, training: TrainingRecipe) -> Iterator[str]:
    if grpo.beta == 0:
        yield "grpo.beta=0: upstream keeps the reference model in memory all the same"
    if grpo.beta > 0 and grpo.kl != "k1":
        yield f"grpo.kl: upstream's is k1, log π − log π_ref, whose gradient has no reference in it; {grpo.kl} has"
    if grpo.iterations > 1:
        yield "grpo.iterations above 1: google-tunix 0.1.7 stops at the first batch (get_old_per_token_logps)"
    if training.steps % grpo.iterations > 0:
        yield "grpo.iterations: upstream makes more updates than training.steps, up to the next multiple"


def _of_hardware(hardware: HardwareRecipe) -> Iterator[str]:
    in_slice = devices(hardware)
    if hardware.accelerator is None:
        yield "hardware.accelerator=null: upstream needs a value: the arguments have hardware=cpu"
    if hardware.colocated and hardware.trainer_devices not in (None, in_slice):
        yield "hardware.trainer_devices: upstream's colocated run takes all devices"
    if not hardware.colocated and hardware.trainer_count() + hardware.sampler_count() != in_slice:
        yield "hardware.sampler_devices: upstream's sampler takes the last devices of the slice"
    if hardware.colocated:
        yield "rollout.vllm.memory_fraction: upstream's includes what the trainer holds on the same device"
    if hardware.process_count() > 1:
        yield "several hosts: upstream is one process, which reaches the other hosts through Pathways"


def devices(hardware: HardwareRecipe) -> int | None:
    """Devices of the slice; of a recipe without one those it counts, or None where it takes what it finds."""
    counted = hardware.trainer_devices and hardware.trainer_devices + (hardware.sampler_devices or 0)
    return hardware.slice.devices if hardware.slice else counted
