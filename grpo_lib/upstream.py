"""A recipe as arguments for MaxText's own `maxtext.trainers.post_train.rl.train_rl`, and a launcher for it.

    grpo config RECIPE --as maxtext --problems FOLDER | xargs python -m grpo_lib.upstream

The first argument is MaxText's configs/post_train/rl.yml, the others are `key=value`.  Rewards, prompt and problems
are ours, through upstream's options: see grpo_lib.upstream_functions and grpo_lib.upstream_problems.  What upstream
has no option for is listed by `not_expressible`; grpo_lib.upstream_fields says of every field where it goes.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_lib import environment
from grpo_lib.errors import CourseError
from grpo_lib.recipes import ModelRecipe, Recipe
from grpo_lib.rewards import get_rewards
from grpo_lib.upstream_fields import DIFFERENCES, NOT_MAPPED, devices
from grpo_lib.upstream_problems import (
    TEMPLATE,
    TEST,
    TRAIN,
    batches,
    eval_batches,
    local_folder,
    number_of_tests,
    prompt_length,
)

# Steps of the cosine for one step of a recipe whose learning rate is constant.
FLAT = 1000
# Options of MaxTextVllmRollout that google-tunix 0.1.7 does not have.
MISSING_OPTIONS = ("server_mode_submission_threshold", "server_mode_submission_timeout_s")
# What must be there before the models are loaded, and the command that makes it.
MADE_BY = {
    "load_parameters_path": "grpo convert",
    "hf_train_files": "grpo config --as maxtext --problems",
    "hf_eval_files": "grpo config --as maxtext --problems",
    "data_template_path": "grpo config --as maxtext --problems",
}


def arguments(
    recipe: Recipe, problems: str | Path, checkpoint: str | Path, output: str | Path, tests: int | None = None
) -> list[str]:
    """The arguments of `train_rl` for a recipe: the path of rl.yml, then `key=value`.

    Args:
      problems: the folder that `upstream_problems.write_problems` fills.
      checkpoint: the recipe's model in MaxText's format, its `0/items` folder (`grpo convert`).
      output: where upstream makes its run.
      tests: test problems that were written; by default those that the recipe names.

    Raises CourseError when MaxText is not installed, a reward is unknown, or `rollout.max_prompt_length: auto` or the
    model's sizes cannot be worked out because its files cannot be read.
    """
    get_rewards(recipe.rewards)
    base = _maxtext_folder() / "configs" / "post_train" / "rl.yml"
    values = settings(recipe, Path(problems), Path(checkpoint), Path(output), tests)
    return [str(base), *(f"{key}={_text(value)}" for key, value in values.items())]


def settings(
    recipe: Recipe, problems: Path, checkpoint: Path, output: Path, tests: int | None = None
) -> dict[str, Any]:
    """The same as a mapping, key by key."""
    whole, size = eval_batches(recipe, tests)
    functions = Path(__file__).with_name("upstream_functions.py")
    return {
        "run_name": recipe.name,
        "base_output_directory": output.resolve(),
        "data_shuffle_seed": recipe.seed,
        "init_weights_seed": recipe.seed,
        **_model(recipe.model, checkpoint),
        **_hardware(recipe),
        "dataset_name": recipe.problems.source,
        "eval_dataset_name": recipe.problems.source,
        "hf_train_files": problems.resolve() / TRAIN,
        "hf_eval_files": problems.resolve() / TEST,
        "data_template_path": problems.resolve() / TEMPLATE,
        "dataset_processor_path": functions,
        "reward_functions_path": functions,
        "reward_functions": ",".join(recipe.rewards),
        **_sampling(recipe),
        "rl.num_generations": recipe.grpo.group_size,
        "rl.num_iterations": recipe.grpo.iterations,
        "rl.grpo_beta": recipe.grpo.beta,
        "rl.grpo_epsilon": recipe.grpo.epsilon,
        "rl.loss_algo": "grpo",
        **_training(recipe),
        "eval_batch_size": size,
        "num_test_batches": whole,
        "eval_interval": recipe.training.steps + 1,  # never: it would look at the test problems
    }


def not_expressible(recipe: Recipe, tests: int | None = None) -> list[str]:
    """One sentence for everything in the recipe that upstream's options cannot say, beginning with its name."""
    lost = [f"{name}: {why}" for name, (applies, why) in (NOT_MAPPED | DIFFERENCES).items() if applies(recipe)]
    tests, (whole, size) = tests or number_of_tests(recipe.problems), eval_batches(recipe, tests)
    if whole * size < tests:
        lost.append(
            f"problems.test: upstream drops an incomplete last batch, so it evaluates {whole * size} of {tests}"
        )
    return lost


def _model(model: ModelRecipe, checkpoint: Path) -> dict[str, Any]:
    """Architecture, sizes and number format; the same values as grpo_lib.models.maxtext_arguments, by test."""
    folder = local_folder(model)
    sizes = model.sizes
    if folder:
        from grpo_lib import models  # imports JAX

        sizes = models.maxtext_sizes(model)
    return {
        "model_name": model.maxtext_name,
        "override_model_config": bool(sizes),
        **sizes,
        "tokenizer_type": "huggingface",
        "tokenizer_path": folder or model.path,
        "load_parameters_path": checkpoint.resolve(),
        "convert_checkpoint_if_possible": False,  # `grpo convert` has done it
        "checkpoint_storage_use_ocdbt": True,  # as it writes them; rl.yml's false is for Pathways
        "checkpoint_storage_use_zarr3": True,
        "scan_layers": True,
        "weight_dtype": model.dtype,
        "dtype": model.dtype,
        "matmul_precision": "highest" if model.dtype == "float32" else "default",
        "attention": "dot_product",
        "remat_policy": model.remat,
        "use_multimodal": False,
        "per_device_batch_size": 1,
        "log_config": False,
    }


def _hardware(recipe: Recipe) -> dict[str, Any]:
    """Upstream splits the devices of a slice only where it sees Pathways and two machines or more.

    Both switches are used for nothing else, so a split on one machine counts half of its chips as a machine.
    """
    hardware, found = recipe.hardware, devices(recipe)
    if found is None and not hardware.colocated:
        raise CourseError(
            f"hardware.sampler_devices={hardware.sampler_devices} needs hardware.trainer_devices, or an accelerator"
        )
    trainer, sampler = hardware.trainer_count(), hardware.sampler_count()
    chips = hardware.slice.chip.chips_per_host if hardware.slice else found or 1
    if not hardware.colocated:
        chips = max(1, min(chips, found // 2))
    tensor = hardware.sampler_tensor or (sampler if found else -1)
    return {
        "hardware": "tpu" if hardware.accelerator else "cpu",
        "use_pathways": not hardware.colocated,
        "chips_per_vm": chips,
        "trainer_devices_fraction": 1.0 if hardware.colocated else _fraction(trainer, found),
        "sampler_devices_fraction": 1.0 if hardware.colocated else _fraction(sampler, found),
        "ici_fsdp_parallelism": -1,  # what the tensor axis leaves
        "ici_tensor_parallelism": hardware.trainer_tensor,
        "rollout_tensor_parallelism": tensor,
        "rollout_data_parallelism": sampler // tensor if found else (-1 if tensor > 0 else 1),
        "rollout_expert_parallelism": 1,
    }


def _sampling(recipe: Recipe) -> dict[str, Any]:
    rollout, prompt = recipe.rollout, prompt_length(recipe)
    return {
        "max_prefill_predict_length": prompt,
        "max_target_length": prompt + rollout.max_completion_length,
        "decode_sampling_temperature": rollout.temperature,
        "decode_sampling_top_k": rollout.top_k or -1,  # vLLM's spelling of "off"
        "decode_sampling_nucleus_p": rollout.top_p,
        "hbm_utilization_vllm": rollout.vllm.memory_fraction,
        "max_num_seqs": rollout.vllm.max_sequences,
        "vllm_block_size": rollout.vllm.block_size,
    }


def _training(recipe: Recipe) -> dict[str, Any]:
    training, plan = recipe.training, recipe.plan
    steps = training.steps if training.schedule == "cosine" else FLAT * (training.steps + training.warmup_steps)
    return {
        "batch_size": plan.prompts_per_step,
        "num_batches": batches(recipe),
        "train_fraction": 1.0,
        "num_epoch": 1,
        "train_micro_batch_size": plan.micro_batch_prompts,
        "rollout_micro_batch_size": plan.prompts_per_pass,
        "learning_rate": training.learning_rate,
        "learning_rate_schedule_steps": steps,
        "warmup_steps_fraction": _fraction(training.warmup_steps, steps),
        "adam_b1": training.b1,
        "adam_b2": training.b2,
        "adam_weight_decay": training.weight_decay,
        "gradient_clipping_threshold": training.clip,
        "enable_checkpointing": True,
        "checkpoint_period": training.checkpoint_every,
        "max_num_checkpoints_to_keep": training.keep,
    }


def _fraction(part: int, whole: int) -> float:
    """part / whole, such that int(fraction * whole) is `part` again, as upstream computes it."""
    fraction = part / whole
    return fraction if int(fraction * whole) == part else (part + 0.5) / whole


def _maxtext_folder() -> Path:
    """Where MaxText is installed, without importing it."""
    spec = importlib.util.find_spec("maxtext")
    if spec is None or not spec.submodule_search_locations:
        raise CourseError("MaxText is not installed here; make setup, or make setup-tpu, installs it")
    return Path(next(iter(spec.submodule_search_locations)))


def add_missing_options() -> None:
    """Let MaxText 0.2.5 make its rollout with google-tunix 0.1.7, which is older than what it was written against.

    `MaxTextVllmRollout` reads two options of agentic rollouts from Tunix's RolloutConfig and hands them to VllmConfig.
    Neither class has them: AttributeError, then TypeError.  Here the first gets them as None and the second drops
    them.  tests/tpu/test_upstream.py fails when Tunix has them.
    """
    from maxtext.integration.vllm import maxtext_vllm_rollout
    from tunix.rl.rollout.base_rollout import RolloutConfig

    given = maxtext_vllm_rollout.VllmConfig

    @functools.wraps(given, updated=())
    def without_missing(**options: Any) -> Any:
        return given(**{name: value for name, value in options.items() if name not in dropped})

    accepted = inspect.signature(given).parameters
    dropped = {name for name in MISSING_OPTIONS if name not in accepted}
    for name in MISSING_OPTIONS:
        if not hasattr(RolloutConfig, f"rollout_vllm_{name}"):
            setattr(RolloutConfig, f"rollout_vllm_{name}", None)
    if dropped:
        maxtext_vllm_rollout.VllmConfig = without_missing


def send_untied_head() -> None:
    """Have the output layer of untied Qwen models arrive in the sampler: vllm_engine.untied_lm_head_mapping says why.

    Here MaxText's adapter of the model is asked for its mapping by Tunix, so the answer is changed there.
    """
    from maxtext.integration.tunix.tunix_adapter import TunixMaxTextAdapter

    from grpo_lib.vllm_engine import untied_lm_head_mapping

    given = TunixMaxTextAdapter.to_hf_mappings

    @functools.wraps(given)
    def to_hf_mappings(self) -> dict[str, tuple]:
        return untied_lm_head_mapping(given(self), self.base.config.model_name)

    TunixMaxTextAdapter.to_hf_mappings = to_hf_mappings


def hide_wandb() -> None:
    """Have Tunix find no W&B, for then it does without.

    google-tunix 0.1.7 logs to W&B wherever the package is installed, asks for a key, and closes it when training ends;
    JAX's own measurements still go there, and the first program that is compiled after that, in the evaluation, stops
    the run with "You must call wandb.init() before wandb.log()", in the mode disabled too.
    """
    sys.modules["wandb"] = None


def train(arguments: Sequence[str]) -> None:
    """Run MaxText's train_rl, unmodified, with the arguments that `arguments` made.

    Raises CourseError when something that they name is not there.
    """
    given = dict(argument.partition("=")[::2] for argument in arguments[1:])
    for key, command in MADE_BY.items():
        if key not in given or not Path(given[key]).exists():
            raise CourseError(f"{key}={given.get(key, '')} does not exist; {command} makes it")
    if os.environ.setdefault("WANDB_MODE", "disabled") == "disabled":
        hide_wandb()
    from grpo_lib import models

    add_missing_options()
    send_untied_head()
    if given.get("override_model_config") == "true":
        models.register_architecture(ModelRecipe(path=given["tokenizer_path"], maxtext_name=given["model_name"]))
    from maxtext.trainers.post_train.rl import train_rl

    train_rl.main(["train_rl", *arguments])


def main() -> None:
    """Entry point of `python -m grpo_lib.upstream`: a CourseError is one line on stderr and exit code 2."""
    environment.prepare()
    try:
        if len(sys.argv) < 3:
            raise CourseError("give the arguments that `grpo config RECIPE --as maxtext` prints")
        train(sys.argv[1:])
    except CourseError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    main()
