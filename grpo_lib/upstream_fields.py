"""Which upstream keys carry a field of the recipe, and what of a recipe MaxText's own train_rl cannot say.

MAPPED and NOT_MAPPED together name every field; grpo_lib.upstream makes the arguments.
"""

from __future__ import annotations

from collections.abc import Callable

from grpo_lib.recipes import Recipe

# Recipe field -> the upstream keys that carry it.
MAPPED: dict[str, tuple[str, ...]] = {
    "name": ("run_name",),
    "seed": ("data_shuffle_seed", "init_weights_seed"),
    "model.path": ("tokenizer_path", "load_parameters_path"),
    "model.maxtext_name": ("model_name",),
    "model.sizes": ("override_model_config",),
    "model.dtype": ("dtype", "weight_dtype", "matmul_precision"),
    "model.remat": ("remat_policy",),
    "hardware.accelerator": ("hardware", "chips_per_vm", "use_pathways"),
    "hardware.trainer_devices": ("trainer_devices_fraction",),
    "hardware.trainer_tensor": ("ici_tensor_parallelism", "ici_fsdp_parallelism"),
    "hardware.sampler_devices": ("sampler_devices_fraction",),
    "hardware.sampler_tensor": ("rollout_tensor_parallelism", "rollout_data_parallelism"),
    "problems.source": ("dataset_name", "eval_dataset_name", "hf_train_files", "hf_eval_files"),
    "problems.path": ("hf_train_files", "hf_eval_files"),
    "problems.train": ("hf_train_files",),
    "problems.test": ("hf_eval_files", "num_test_batches"),
    "problems.seed": ("hf_train_files", "hf_eval_files"),
    "prompts.system": ("data_template_path", "dataset_processor_path"),
    "rollout.vllm.memory_fraction": ("hbm_utilization_vllm",),
    "rollout.vllm.max_sequences": ("max_num_seqs",),
    "rollout.vllm.block_size": ("vllm_block_size",),
    "rollout.prompts_per_pass": ("rollout_micro_batch_size",),
    "rollout.prompts_per_device": ("rollout_micro_batch_size",),
    "rollout.max_prompt_length": ("max_prefill_predict_length", "max_target_length"),
    "rollout.overlong_prompts": ("hf_train_files",),
    "rollout.max_completion_length": ("max_target_length",),
    "rollout.temperature": ("decode_sampling_temperature",),
    "rollout.top_p": ("decode_sampling_nucleus_p",),
    "rollout.top_k": ("decode_sampling_top_k",),
    "rewards": ("reward_functions_path", "reward_functions"),
    "grpo.group_size": ("rl.num_generations",),
    "grpo.iterations": ("rl.num_iterations", "num_batches"),
    "grpo.beta": ("rl.grpo_beta",),
    "grpo.epsilon": ("rl.grpo_epsilon",),
    "training.steps": ("num_batches", "train_fraction", "num_epoch"),
    "training.prompts_per_step": ("batch_size",),
    "training.prompts_per_process": ("batch_size",),
    "training.prompts_per_device": ("batch_size",),
    "training.micro_batch_size": ("train_micro_batch_size",),
    "training.micro_batch_per_device": ("train_micro_batch_size",),
    "training.learning_rate": ("learning_rate",),
    "training.warmup_steps": ("warmup_steps_fraction",),
    "training.schedule": ("learning_rate_schedule_steps",),
    "training.b1": ("adam_b1",),
    "training.b2": ("adam_b2",),
    "training.weight_decay": ("adam_weight_decay",),
    "training.clip": ("gradient_clipping_threshold",),
    "training.checkpoint_every": ("checkpoint_period",),
    "training.keep": ("max_num_checkpoints_to_keep",),
    "evaluation.batch_size": ("eval_batch_size", "num_test_batches"),
}

Lost = dict[str, tuple[Callable[[Recipe], bool], str]]

# Recipe field -> (whether it says something that is lost, what).
NOT_MAPPED: Lost = {
    "hardware.processes": (lambda recipe: recipe.hardware.processes not in (None, 1), "see several hosts"),
    "problems.validation": (
        lambda recipe: recipe.training.validate_every > 0,
        "upstream has no third set: what it measures during training is the test set, so that is switched off",
    ),
    "training.validate_every": (lambda recipe: recipe.training.validate_every > 0, "see problems.validation"),
    "training.checkpoints": (
        lambda recipe: recipe.training.checkpoints is not None,
        "upstream keeps its checkpoints in its own run; base_output_directory may be a gs:// address",
    ),
    "rollout.engine": (lambda recipe: recipe.rollout.engine != "vllm", "upstream samples with vLLM"),
    "rollout.vllm.kv_blocks": (
        lambda recipe: recipe.rollout.vllm.kv_blocks is not None,
        "no option for num_gpu_blocks_override: the KV cache takes what memory_fraction leaves",
    ),
    "loss.implementation": (lambda recipe: recipe.loss.implementation != "jax", "upstream has Tunix's own loss"),
    "evaluation.max_completion_length": (
        lambda recipe: recipe.evaluation_completion_length != recipe.rollout.max_completion_length,
        "upstream evaluates with the length of the rollout",
    ),
    "tracking.wandb": (
        lambda recipe: recipe.tracking.wandb != "off",
        "upstream logs to W&B as the variable WANDB_MODE says, and not at all where it is not set; with W&B its "
        "evaluation after training can stop with a wandb.Error",
    ),
    "tracking.project": (lambda recipe: recipe.tracking.wandb != "off", "upstream's project is called tunix"),
}

# The same for what a mapped field, or the whole run, means here and not there.
DIFFERENCES: Lost = {
    "evaluation of before and after": (
        lambda recipe: True,
        "upstream logs percentages, by its own grader, at temperature 0.01; no record of each answer, no interval, "
        "no report.html",
    ),
    "check of the first sync": (lambda recipe: True, "upstream trains on when sampler and trainer differ"),
    "a new start": (
        lambda recipe: True,
        "upstream continues from the checkpoints that an earlier run of this name left, without saying so",
    ),
    "order and sampling noise": (
        lambda recipe: True,
        "seed decides both, but upstream shuffles in its own way and gives vLLM no seed",
    ),
    "sampling defaults of the model": (
        lambda recipe: True,
        "vLLM takes what is not set, such as repetition_penalty, from the model's generation_config.json",
    ),
    "warm-up": (
        lambda recipe: recipe.training.warmup_steps > 0,
        "upstream starts at zero, so that its first step does not move; ours starts at learning_rate / warmup_steps",
    ),
    "training.schedule=constant": (
        lambda recipe: recipe.training.schedule == "constant",
        "upstream knows only the cosine: it gets the first thousandth of one, which falls by less than 1e-5 of itself",
    ),
    "grpo.beta=0": (lambda recipe: recipe.grpo.beta == 0, "upstream keeps the reference model in memory all the same"),
    "grpo.beta": (
        lambda recipe: recipe.grpo.beta > 0,
        "upstream estimates the KL by Tunix's default, log π − log π_ref (k1), and not as the GRPO paper does (k3)",
    ),
    "grpo.iterations above 1": (
        lambda recipe: recipe.grpo.iterations > 1,
        "with google-tunix 0.1.7 upstream stops at the first batch (TypeError in get_old_per_token_logps)",
    ),
    "grpo.iterations": (
        lambda recipe: recipe.training.steps % recipe.grpo.iterations > 0,
        "upstream counts whole batches: it makes more updates than training.steps, up to the next multiple",
    ),
    "hardware.accelerator=null": (
        lambda recipe: recipe.hardware.accelerator is None,
        "upstream must be told: the list says hardware=cpu",
    ),
    "hardware.trainer_devices": (
        lambda recipe: recipe.hardware.colocated and recipe.hardware.trainer_devices not in (None, devices(recipe)),
        "upstream's colocated run takes all devices",
    ),
    "hardware.sampler_devices": (
        lambda recipe: (
            not recipe.hardware.colocated
            and recipe.hardware.trainer_count() + recipe.hardware.sampler_count() != devices(recipe)
        ),
        "upstream's sampler takes the last devices of the slice, not those after the trainer's",
    ),
    "rollout.vllm.memory_fraction": (
        lambda recipe: recipe.hardware.colocated,
        "upstream's share counts what the trainer holds on the same device; ours is the sampler's own",
    ),
    "several hosts": (
        lambda recipe: recipe.hardware.process_count() > 1,
        "upstream is one process, which reaches the other hosts through Pathways; it does not start jax.distributed",
    ),
}


def devices(recipe: Recipe) -> int | None:
    """Devices of the slice; of a recipe without one those it counts, or None where it takes what it finds."""
    hardware = recipe.hardware
    if hardware.slice:
        return hardware.slice.devices
    return hardware.trainer_devices and hardware.trainer_devices + (hardware.sampler_devices or 0)
