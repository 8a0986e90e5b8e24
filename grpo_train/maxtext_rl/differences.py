"""What of a recipe MaxText's own train_rl cannot express, or takes in another sense."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_train.maxtext_rl.problem_files import eval_batches, number_of_tests, only_source
from grpo_train.recipes import Recipe
from grpo_train.recipes.schema import GRPORecipe


def not_expressible(recipe: Recipe, tests: int | None = None) -> list[str]:
    """One sentence for each value of the recipe that upstream's options cannot express, beginning with its key.

    `tests` is the number of test problems that were written; by default those that the recipe names.
    """
    found = [*_lost(recipe), *_switches(recipe.grpo), *_other_meaning(recipe)]
    tests = tests or number_of_tests(only_source(recipe))
    batches, size = eval_batches(recipe, tests)
    if (evaluated := batches * size) < tests:
        found.append(f"problems.test: upstream drops an incomplete last batch, so it evaluates {evaluated} of {tests}")
    return found


def _lost(recipe: Recipe) -> Iterator[str]:
    """Fields that upstream has no option for."""
    training, rollout = recipe.training, recipe.rollout
    if recipe.hardware.processes not in (None, 1):
        yield "hardware.processes: see several hosts"
    if only_source(recipe).source in ("dapo-math", "aime", "math500"):
        yield "problems.source: upstream's rows have no kind, so answers are graded as one number in <answer> tags"
    if training.validate_every > 0:
        yield "problems.validation: upstream would measure the test set during training, so that is switched off"
        yield "training.validate_every: see problems.validation"
    if training.checkpoints is not None:
        yield "training.checkpoints: upstream writes to base_output_directory, which may be a gs:// address"
    if training.profile_steps is not None:
        yield "training.profile_steps: upstream's profiler_steps counts micro-batches, from the middle of a step"
    if rollout.engine != "vllm":
        yield "rollout.engine: upstream samples with vLLM"
    if rollout.vllm.kv_blocks is not None:
        yield "rollout.vllm.kv_blocks: no option for it; the KV cache takes what memory_fraction leaves"
    if rollout.final_temperature is not None:
        yield "rollout.final_temperature: upstream samples at one temperature"
        yield "rollout.temperature_stages: see rollout.final_temperature"
    if recipe.lora.rank is not None:
        yield "lora.rank: upstream's train_rl trains all weights; its lora section is for supervised fine-tuning"
        yield "lora.alpha: see lora.rank"
    if recipe.loss.implementation != "jax":
        yield "loss.implementation: upstream has Tunix's own loss"
    if training.layout != "padded":
        yield "training.layout: upstream computes padded rows; loss and gradient are the same"
    if recipe.evaluation.samples:
        yield "evaluation.samples: upstream evaluates with one completion of each problem"
        if recipe.evaluation.temperature:
            yield "evaluation.temperature: see evaluation.samples"
        if recipe.evaluation.top_p < 1:
            yield "evaluation.top_p: see evaluation.samples"
    if recipe.evaluation_completion_length != rollout.max_completion_length:
        yield "evaluation.max_completion_length: upstream evaluates with the length of the rollout"
    if recipe.tracking.wandb != "off":
        yield "tracking.wandb: upstream logs to W&B where WANDB_MODE is set, and can then stop with a wandb.Error"
        yield "tracking.project: upstream's project is called tunix"


def _switches(grpo: GRPORecipe) -> Iterator[str]:
    """Parts of the algorithm for which upstream has no option, or one that does something else."""
    if grpo.advantage != "std":
        yield "grpo.advantage: upstream divides by the standard deviation of the group, without an option"
    if grpo.aggregation == "constant":
        yield "grpo.aggregation: upstream cannot divide by a constant; the arguments have the mean of a completion"
    if grpo.aggregation == "step":
        yield "grpo.aggregation: upstream takes the mean over the tokens of each micro-batch, not of the step"
    if grpo.epsilon_high not in (None, grpo.epsilon):
        yield "grpo.epsilon_high: upstream ignores rl.epsilon_high without its agentic learner"
    if grpo.overlong_buffer is not None:
        yield "grpo.overlong_buffer: upstream has no option for it; Tunix's DAPO counts characters and not tokens"
        yield "grpo.overlong_penalty: see grpo.overlong_buffer"
    if grpo.dynamic_sampling is not None:
        yield "grpo.dynamic_sampling: upstream has no code for it; Tunix's DAPO has the name and a TODO"
    if grpo.correction != "none":
        yield "grpo.correction: upstream has importance sampling for its agentic learner alone"
        yield "grpo.correction_cap: see grpo.correction"
    if grpo.target_kl is not None:
        yield "grpo.target_kl: upstream reads beta once, when the update is compiled"
    if grpo.watch_kl is not None:
        yield "grpo.watch_kl: upstream logs no KL without a penalty"


def _other_meaning(recipe: Recipe) -> Iterator[str]:
    """Fields that mean something else upstream, and what it does otherwise in every run."""
    hardware, grpo, training = recipe.hardware, recipe.grpo, recipe.training
    yield "evaluation of before and after: upstream logs percentages, by its own grader, at temperature 0.01; no record"
    yield "check of the first sync: upstream trains on when sampler and trainer differ"
    yield "a new start: upstream continues silently from the checkpoints of an earlier run of this name"
    yield "order and sampling noise: upstream shuffles in its own way, and gives vLLM no seed"
    yield "sampling defaults: vLLM takes repetition_penalty and the like from the model's generation_config.json"
    if training.warmup_steps > 0:
        yield "training.warmup_steps: upstream starts at zero; ours starts at learning_rate / warmup_steps"
    if training.schedule == "constant":
        yield "training.schedule=constant: upstream gets the start of a cosine, which falls by less than 1e-5 of itself"
    if grpo.beta == 0:
        yield "grpo.beta=0: upstream keeps the reference model in memory all the same"
    elif grpo.kl != "k1":
        yield f"grpo.kl: upstream's is k1, log π − log π_ref, whose gradient has no reference in it; {grpo.kl} has"
    if grpo.iterations > 1:
        yield "grpo.iterations above 1: google-tunix 0.1.7 stops at the first batch (get_old_per_token_logps)"
    if training.steps % grpo.iterations > 0:
        yield "grpo.iterations: upstream makes more updates than training.steps, up to the next multiple"
    if hardware.accelerator is None:
        yield "hardware.accelerator=null: upstream needs a value: the arguments have hardware=cpu"
    found = devices(recipe)
    if hardware.colocated and hardware.trainer_devices not in (None, found):
        yield "hardware.trainer_devices: upstream's colocated run takes all devices"
    if not hardware.colocated and hardware.trainer_count() + hardware.sampler_count() != found:
        yield "hardware.sampler_devices: upstream's sampler takes the last devices of the slice"
    if hardware.colocated:
        yield "rollout.vllm.memory_fraction: upstream's includes what the trainer holds on the same device"
    if hardware.process_count() > 1:
        yield "several hosts: upstream is one process, which reaches the other hosts through Pathways"


def devices(recipe: Recipe) -> int | None:
    """Devices of the slice; of a recipe without one those it counts, or None where it takes what it finds."""
    hardware = recipe.hardware
    if hardware.slice:
        return hardware.slice.devices
    return hardware.trainer_devices and hardware.trainer_devices + (hardware.sampler_devices or 0)
