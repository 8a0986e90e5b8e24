"""Which devices train and which sample, and Tunix's RLCluster on them: actor, reference model, sampler, optimizer."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath
from flax import nnx
from tunix.rl import rl_cluster as rl
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft import metrics_logger

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_train.engines import adaptive_beta, maxtext_model, tunix_sampler
from grpo_train.engines.optimizer import add_sum, drop_sum, make_optimizer, sum_in
from grpo_train.losses import packing, slots
from grpo_train.recipes.batch_plan import BatchPlan
from grpo_train.recipes.schema import DType, HardwareRecipe, ModelRecipe, RolloutRecipe, TrainingRecipe
from grpo_train.runs import checkpoints, multihost


@dataclass(frozen=True)
class Models:
    """What a cluster trains, and what it needs for that."""

    actor: maxtext_model.Actor
    reference: Any  # the model of the KL penalty, or None without one
    tokenizer: Any


@dataclass(frozen=True)
class UpdateSettings:
    """How the actor is updated."""

    training: TrainingRecipe
    iterations: int  # updates per step
    seed: int  # of the noise of stochastic rounding
    weights: DType  # dtype of the actor's
    adapts_beta: bool = False  # whether the optimizer's state has a place for it


@dataclass(frozen=True)
class SamplingSettings:
    """How and where completions are sampled."""

    sampler: Callable  # by sampler_class
    config: RolloutConfig
    devices: list[Any] | None  # None: the actor's mesh


@dataclass(frozen=True)
class RunFiles:
    """Where a run leaves its checkpoints and metrics."""

    name: str  # of the run
    checkpoints: Path  # folder, for Tunix's checkpoint manager with `checkpoint_options`
    checkpoint_options: Any
    log_directory: Path  # of TensorBoard
    metric_backends: list[Callable]  # factories for Tunix's MetricsLogger


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
    found = len(devices)
    count = len({device.process_index for device in devices})
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
    from grpo_train.engines.vllm_sampler import EngineSettings, VllmSampler

    engine = EngineSettings(model=model, vllm=rollout.vllm, max_length=max_length(), tensor=tensor, seed=seed)
    return functools.partial(VllmSampler, engine=engine)


def make_cluster(
    plan: BatchPlan, models: Models, updates: UpdateSettings, sampling: SamplingSettings, files: RunFiles
) -> rl.RLCluster:
    """Tunix's RLCluster for a recipe; it restores the newest checkpoint in `files.checkpoints`, if there is one."""
    actor = models.actor
    sampler_mesh = actor.mesh
    if sampling.devices is not None:
        sampler_mesh = jax.sharding.Mesh(np.array(sampling.devices), ("fsdp",))
    optimizer = make_optimizer(updates.training, updates.iterations, updates.seed, updates.weights)
    if updates.adapts_beta:
        optimizer = optax.chain(optimizer, adaptive_beta.keep_factor())
    count = updates.training.steps * updates.iterations
    saved_sum = checkpoints.has_gradient_sum(epath.Path(files.checkpoints) / "actor")  # Tunix adds the role
    # Tunix restores while it makes the trainer: the state must be as it was saved.
    begins_with_sum = plan.gradients_summed > 1 if saved_sum is None else saved_sum
    micro_batch_size = plan.micro_batch_prompts * plan.micro_batches_in_loss
    training_config = rl.RLTrainingConfig(
        actor_optimizer=optimizer,
        # Tunix counts updates; a step here is a batch, with all its updates.
        max_steps=count,
        eval_every_n_steps=count + 1,
        # Of all processes together: each sees the whole batch.
        mini_batch_size=plan.prompts_per_step,
        # None: no sum of gradients beside the one gradient.
        train_micro_batch_size=micro_batch_size if begins_with_sum else None,
        rollout_micro_batch_size=plan.rollout_micro_batch_size,
        compute_logps_micro_batch_size=plan.micro_batch_prompts,
        # Tunix's default is 2; several processes run one program at a time (see multihost).
        max_inflight_computations=1 if multihost.is_distributed() else 2,
        checkpoint_root_directory=str(files.checkpoints),
        checkpointing_options=files.checkpoint_options,
        metrics_logging_options=metrics_logger.MetricsLoggerOptions(
            log_dir=str(files.log_directory), backend_kwargs={"custom_backend": files.metric_backends}
        ),
        pbar_description=files.name,
    )
    roles = (rl.Role.ACTOR, rl.Role.REFERENCE, rl.Role.ROLLOUT)
    cluster_config = rl.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, actor.mesh) | {rl.Role.ROLLOUT: sampler_mesh},
        role_to_logical_axis_rule=dict.fromkeys(roles, actor.config.logical_axis_rules),
        rollout_engine=sampling.sampler,
        rollout_config=sampling.config,
        training_config=training_config,
    )
    cluster = rl.RLCluster(
        actor=actor.module,
        reference=models.reference,
        tokenizer=models.tokenizer,
        cluster_config=cluster_config,
    )
    trainer = cluster.actor_trainer
    if begins_with_sum and plan.gradients_summed == 1:
        drop_sum(trainer.optimizer)
    elif plan.gradients_summed > 1 and not begins_with_sum:
        add_sum(trainer.optimizer, trainer.model, plan.gradients_summed)
        configs: list[Any] = [training_config, trainer.config]
        for config in configs:
            config.train_micro_batch_size = micro_batch_size
            config.gradient_accumulation_steps = plan.gradients_summed
        trainer._iter_steps = trainer.train_steps * plan.gradients_summed  # it counts micro-batches
    sum_in(trainer.optimizer, updates.training.optimizer_dtype)
    return cluster


def pack_micro_batches(
    cluster: rl.RLCluster, plan: BatchPlan, rollout_config: RolloutConfig, aggregation: str, shortest_prompt: int
) -> None:
    """Lay each micro-batch in the plan's rows, in Tunix's place for preparing the inputs of an update.

    Args:
      aggregation: one of Tunix's aggregate_loss; rows of several completions keep it as weights of their tokens.
      shortest_prompt: tokens of the shortest training prompt.
    """
    trainer = cluster.actor_trainer
    prepare = trainer._prepare_inputs
    unscored = 0
    if plan.layout == "groups":
        model: Any = trainer.model
        packing.share_prompts(model)
        if maxtext_model.is_one_cpu(cluster.r2m[rl.Role.ACTOR]) and model.base.config.dtype == jnp.float32:
            completion = 1 + rollout_config.max_tokens_to_generate
            sizes = slots.SlotSizes(rollout_config.max_prompt_length - 1, plan.group_size, completion)
            slots.attend_in_slots(model, sizes)
            unscored = shortest_prompt - 1
    pack = functools.partial(
        packing.pack,
        layout=plan.layout,
        shapes=plan.row_shapes(rollout_config.max_prompt_length, rollout_config.max_tokens_to_generate),
        group_size=plan.group_size,
        aggregation=aggregation,
        micro_batches=plan.micro_batches_in_loss,
        unscored=unscored,
    )
    trainer._prepare_inputs = lambda input_data: prepare(pack(input_data))


def share_memory_with_sampler(cluster: rl.RLCluster, is_large: bool) -> None:
    """On one CPU, let the sampler have no weights while the policy is updated: after it they are others anyway.

    Gradients need the memory.  And where both have one type, some of the sampler's arrays are the policy's own, as JAX
    hands on what a program does not change; an update that writes over them must be the only one that has them.

    Args:
      is_large: sampling and update each begin with the memory that the other has given back (model_files.LARGE).
    """
    sampler: Any = cluster.rollout
    trainer = cluster.actor_trainer
    prepare, update = trainer._prepare_inputs, sampler.update_params

    def drop() -> None:
        if sampler.has_weights:
            sampler.drop_weights()
            if is_large:
                environment.release_freed_memory()

    def prepare_inputs(input_data: Any) -> Any:
        drop()
        return prepare(input_data)

    def update_params(params: Any, filter_types: Any = None) -> None:
        drop()
        if is_large:
            environment.release_freed_memory()  # of the update
        update(params, filter_types)

    trainer._prepare_inputs, sampler.update_params = prepare_inputs, update_params


def sync_whole_weights(cluster: rl.RLCluster, actor: maxtext_model.Actor) -> None:
    """Let each sync send the sampler all weights, where google-tunix 0.1.7 sends the adapters of an actor alone."""
    update = cluster.rollout.update_params
    cluster.rollout.update_params = lambda params, filter_types=None: update(actor.weights(), (nnx.Param,))
