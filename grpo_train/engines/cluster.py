"""Which devices train and which sample, and Tunix's RLCluster on them: actor, reference model, sampler, optimizer."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from tunix.rl import rl_cluster as rl
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft import metrics_logger

from grpo_lib.common.errors import CourseError
from grpo_train.engines import adaptive_beta, maxtext_model, tunix_sampler
from grpo_train.engines.optimizer import make_optimizer, sum_in
from grpo_train.losses import packing
from grpo_train.recipes.batch_plan import BatchPlan
from grpo_train.recipes.schema import DType, HardwareRecipe, ModelRecipe, RolloutRecipe, TrainingRecipe
from grpo_train.runs import multihost


def assign_devices(
    hardware: HardwareRecipe, engine: str, sampler_tensor: int, devices: list[Any]
) -> tuple[list[Any], list[Any]]:
    """The devices that train and those that sample, of all that JAX finds in all processes: the first ones train; the
    same or the next ones sample.  With several processes all devices train, and each process samples on its own.

    Args:
      engine: rollout.engine.
      sampler_tensor: devices per replica of the sampler.

    Raises CourseError when they are fewer than the recipe needs, do not divide as it says, or belong to several
    processes and the recipe wants them to do different things.
    """
    found, count = len(devices), len({device.process_index for device in devices})
    if count > 1:
        _require_same_roles(hardware, engine, found, count)
    trainer, sampler = hardware.trainer_count(found), hardware.sampler_count(found)
    needed = trainer if hardware.colocated else trainer + sampler
    if needed > found:
        roles = f"{trainer} that train" + ("" if hardware.colocated else f", {sampler} that sample")
        raise CourseError(
            f"hardware needs {needed} devices ({roles}) and JAX finds {found} here; run it on "
            f"{hardware.accelerator or 'such a machine'}, or change hardware.trainer_devices and sampler_devices"
        )
    for name, parts, whole in (
        ("trainer_tensor", hardware.trainer_tensor, trainer),
        ("sampler_tensor", sampler_tensor, sampler // count),  # each process samples on its own
    ):
        if whole % parts:
            where = f"its {whole} devices" if count == 1 else f"the {whole} devices of a process"
            raise CourseError(f"hardware.{name}={parts} must divide {where}")
    if count > 1:
        return list(devices), [device for device in devices if device.process_index == jax.process_index()]
    first = 0 if hardware.colocated else trainer
    return list(devices[:trainer]), list(devices[first : first + sampler])


def _require_same_roles(hardware: HardwareRecipe, engine: str, found: int, count: int) -> None:
    """Refuse a recipe whose processes would not all do the same."""
    reason = f"{count} processes train and sample on all their devices: "
    if engine != "tunix":
        raise CourseError(
            f"rollout.engine={engine} needs all devices in one process (tpu-inference 0.31.0), and "
            f"there are {count}; use a slice of one host, or rollout.engine=tunix"
        )
    if not hardware.colocated:
        raise CourseError(f"{reason}set hardware.sampler_devices to null")
    if hardware.trainer_count(found) != found:
        raise CourseError(f"{reason}set hardware.trainer_devices to {found}, or to null")


def sampler_class(
    rollout: RolloutRecipe,
    model: ModelRecipe,
    plan: BatchPlan,
    *,
    tensor: int | None,
    seed: int,
    max_length: Callable[[], int],
) -> Callable:
    """The class from which Tunix makes the sampler.

    Args:
      tensor: devices per replica; None: all.
      max_length: tokens of the longest prompt and its completion, of training and evaluation; vLLM asks for it.
    """
    if rollout.engine == "tunix":
        return functools.partial(
            tunix_sampler.TunixSampler,
            seed=seed,
            num_rollout_micro_batches=plan.num_rollout_micro_batches,
            tensor=tensor or 1,
            group_size=plan.group_size,
        )
    from grpo_train.engines.vllm_sampler import VllmSampler

    return functools.partial(
        VllmSampler, model=model, settings=rollout.vllm, max_length=max_length(), tensor=tensor, seed=seed
    )


def make_cluster(
    name: str,
    training: TrainingRecipe,
    iterations: int,
    seed: int,
    weights: DType,
    plan: BatchPlan,
    actor: maxtext_model.Actor,
    reference: Any,
    tokenizer: Any,
    rollout_config: RolloutConfig,
    *,
    adapts_beta: bool = False,
    sampler: Callable,
    sampler_devices: list[Any] | None,
    checkpoints: Path,
    checkpoint_options: Any,
    log_directory: Path,
    metric_backends: list[Callable],
) -> rl.RLCluster:
    """Tunix's RLCluster for a recipe; it restores the newest checkpoint in `checkpoints`, if there is one.

    Args:
      name: of the run.
      iterations: updates per step.
      seed: of the noise of stochastic rounding.
      weights: dtype of the actor's.
      adapts_beta: whether the optimizer's state has a place for it.
      sampler: by sampler_class; sampler_devices: where it samples, None: on the actor's mesh.
      reference: the model of the KL penalty, or None without one.
      checkpoints: the folder of the run's checkpoints, for Tunix's checkpoint manager with `checkpoint_options`.
      metric_backends: factories for Tunix's MetricsLogger.
    """
    roles = (rl.Role.ACTOR, rl.Role.REFERENCE, rl.Role.ROLLOUT)
    sampler_mesh = actor.mesh if sampler_devices is None else jax.sharding.Mesh(np.array(sampler_devices), ("fsdp",))
    optimizer = make_optimizer(training, iterations, seed, weights)
    if adapts_beta:
        optimizer = optax.chain(optimizer, adaptive_beta.keep_factor())
    cluster = rl.RLCluster(
        actor=actor.module,
        reference=reference,
        tokenizer=tokenizer,
        cluster_config=rl.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, actor.mesh) | {rl.Role.ROLLOUT: sampler_mesh},
            role_to_logical_axis_rule=dict.fromkeys(roles, actor.config.logical_axis_rules),
            rollout_engine=sampler,
            rollout_config=rollout_config,
            training_config=rl.RLTrainingConfig(
                actor_optimizer=optimizer,
                # Tunix counts updates; a step here is a batch, with all its updates.
                max_steps=training.steps * iterations,
                eval_every_n_steps=training.steps * iterations + 1,
                # Of all processes together: each sees the whole batch.
                mini_batch_size=plan.prompts_per_step,
                train_micro_batch_size=plan.micro_batch_prompts * plan.micro_batches_in_loss,
                rollout_micro_batch_size=plan.rollout_micro_batch_size,
                compute_logps_micro_batch_size=plan.micro_batch_prompts,
                # Tunix's default is 2; several processes run one program at a time (see multihost).
                max_inflight_computations=1 if multihost.is_distributed() else 2,
                checkpoint_root_directory=str(checkpoints),
                checkpointing_options=checkpoint_options,
                metrics_logging_options=metrics_logger.MetricsLoggerOptions(
                    log_dir=str(log_directory), backend_kwargs={"custom_backend": metric_backends}
                ),
                pbar_description=name,
            ),
        ),
    )
    sum_in(cluster.actor_trainer.optimizer, training.optimizer_dtype)
    return cluster


def pack_micro_batches(cluster: rl.RLCluster, plan: BatchPlan, rollout_config: RolloutConfig, aggregation: str) -> None:
    """Lay each micro-batch in the plan's rows, in Tunix's place for preparing the inputs of an update.

    `aggregation` is one of Tunix's aggregate_loss; rows of several completions keep it as weights of their tokens.
    """
    trainer = cluster.actor_trainer
    prepare = trainer._prepare_inputs
    if plan.layout == "groups":
        packing.share_prompts(trainer.model)
    pack = functools.partial(
        packing.pack,
        layout=plan.layout,
        shapes=plan.row_shapes(rollout_config.max_prompt_length, rollout_config.max_tokens_to_generate),
        group_size=plan.group_size,
        aggregation=aggregation,
        micro_batches=plan.micro_batches_in_loss,
    )
    trainer._prepare_inputs = lambda input_data: prepare(pack(input_data))


def sync_whole_weights(cluster: rl.RLCluster, actor: maxtext_model.Actor) -> None:
    """Let each sync send the sampler all weights, where google-tunix 0.1.7 sends the adapters of an actor alone."""
    update = cluster.rollout.update_params
    cluster.rollout.update_params = lambda params, filter_types=None: update(actor.weights(), (nnx.Param,))
