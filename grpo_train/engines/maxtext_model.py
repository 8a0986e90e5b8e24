"""A recipe's model in MaxText: its tokenizer, its settings, and the actor that Tunix trains."""

import contextlib
import functools
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.linen import partitioning as nn_partitioning

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError, first_line
from grpo_train.engines import compat, cpu_memory
from grpo_train.engines.model_files import maxtext_sizes, model_directory, require_heads, unreadable
from grpo_train.recipes import ModelRecipe
from grpo_train.recipes.schema import LoRARecipe
from grpo_train.runs import multihost
from grpo_train.runs.run_directory import location


@dataclass(frozen=True)
class Actor:
    """A MaxText model behind Tunix's call signature, with what is needed to run it."""

    module: Any  # TunixMaxTextAdapter
    config: Any  # MaxText HyperParameters
    mesh: jax.sharding.Mesh
    loss: str = "jax"  # the recipe's loss.implementation, by which log-probabilities are computed
    lora: LoRARecipe | None = None
    base: Any = None  # with adapters: the model without them, which shares its arrays

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """The mesh and MaxText's logical axis rules, which every forward pass needs."""
        with self.mesh, nn_partitioning.axis_rules(self.config.logical_axis_rules):
            yield

    def weights(self) -> nnx.State:
        """The policy's weights; those of adapters are added to the matrices that they belong to."""
        if not (self.lora and self.lora.rank):
            return nnx.state(self.module, nnx.Param)
        from grpo_train.engines import lora  # here, because it imports MaxText

        return lora.merged(self.module, self.lora.alpha / self.lora.rank)

    def parameter_count(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self.base or self.module, nnx.Param)))


def multiply_as_exactly_as_stored(dtype: str) -> None:
    """On a TPU, let float32 models multiply in float32.  MaxText asks for it; the sampler and the loss would otherwise
    multiply in bfloat16."""
    if dtype == "float32" and jax.default_backend() == "tpu":
        jax.config.update("jax_default_matmul_precision", "highest")


def maxtext_overrides(model: ModelRecipe, *, sizes: dict[str, Any], tokenizer_path: str | Path) -> dict[str, Any]:
    """MaxText keys that describe a model, the same for our training and for MaxText's own train_rl.

    `sizes`: as maxtext_sizes returns them; empty keeps MaxText's own for `maxtext_name`.
    """
    return {
        "model_name": model.maxtext_name,
        "override_model_config": bool(sizes),
        **sizes,
        "tokenizer_type": "huggingface",
        "tokenizer_path": tokenizer_path,
        "weight_dtype": model.trainer_dtype,
        "dtype": model.dtype,
        "matmul_precision": "highest" if model.dtype == "float32" else "default",
        "attention": "dot_product",  # also what MaxText's own rl.yml takes on a TPU
        "remat_policy": model.remat,
        "per_device_batch_size": 1,
        "log_config": False,
        "use_multimodal": False,
    }


def maxtext_arguments(model: ModelRecipe, *, weights: bool = True, **more: Any) -> list[str]:
    """Arguments for MaxText's pyconfig: the architecture of `maxtext_name` at the sizes of config.json.

    Args:
      weights: False needs no model directory: the sizes are the recipe's `model.sizes`, else MaxText's own file.
      more: further MaxText keys; they win over those set here.
    """
    from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR

    sizes = maxtext_sizes(model) if weights else model.sizes
    # Every host of a slice comes here, and only one of them converts: no weights are asked for.
    tokenizer = model_directory(model, weights=False) if weights else model.path
    settings = {
        **maxtext_overrides(model, sizes=sizes, tokenizer_path=tokenizer),
        "run_name": "grpo",
        "skip_jax_distributed_system": True,
        "jax_cache_dir": os.environ.get("JAX_COMPILATION_CACHE_DIR", ""),
        "hardware": "cpu" if jax.default_backend() == "cpu" else "tpu",
        **more,
    }
    return ["maxtext", f"{MAXTEXT_CONFIGS_DIR}/base.yml", *(f"{key}={value}" for key, value in settings.items())]


def load_actor(
    model: ModelRecipe,
    checkpoint: str | Path,
    max_length: int,
    pad_id: int = 0,
    *,
    devices: list[Any] | None = None,
    tensor: int = 1,
    loss: str = "jax",
    lora: LoRARecipe | None = None,
    seed: int = 0,
) -> Actor:
    """Load a MaxText checkpoint as an actor for sequences of at most `max_length` tokens; all processes together.

    Args:
      devices: where the model lives: exactly these, the first by default.  Its mesh has len(devices) / tensor of them
        on the axis `fsdp` and `tensor` on the axis `tensor`.
      lora: the adapters, if it has a rank; `seed` draws them.

    Raises CourseError when the checkpoint is missing, cut short or of another shape.
    """
    devices = list(devices or jax.devices()[:1])
    lora = lora or LoRARecipe()
    weights = location(checkpoint)
    if not weights.is_dir():
        raise CourseError(
            f"checkpoint {weights} does not exist; convert the model first (notebook 01, or grpo convert)"
        )
    with quiet():
        from maxtext.configs import pyconfig
        from maxtext.utils import maxtext_utils, model_creation_utils

        from grpo_train.engines import cpu_speed
        from grpo_train.engines import lora as adapters
        from grpo_train.losses import hidden_states  # here, as MaxText: a tokenizer does not need it, and it takes 5 s

        register_architecture(model)
        arguments = maxtext_arguments(
            model,
            load_parameters_path=weights,
            scan_layers=True,
            max_target_length=max_length,
            enable_checkpointing=True,
            ici_fsdp_parallelism=len(devices) // tensor,
            ici_tensor_parallelism=tensor,
            **hidden_states.maxtext_settings(loss, max_length),
            **adapters.maxtext_settings(lora),
        )
        config = pyconfig.initialize(arguments)
        require_heads(config.num_kv_heads, tensor)
        mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config, devices), config.mesh_axes)
        create = functools.partial(model_creation_utils.from_pretrained, wrap_with_tunix_adapter=True)
        if is_one_cpu(mesh):
            create = compat.load_without_drawing
            if cpu_memory.is_large(model):
                environment.return_large_blocks()  # for the whole process, from now on
        try:
            module = create(config, mesh=mesh, tokenizer_pad_id=pad_id)
        except (ValueError, KeyError, OSError) as error:
            raise _loading_error(weights, config, mesh, error) from error
    modules: list[Any] = [module]  # the one that trains comes first
    if lora.rank:
        with quiet(), mesh, nn_partitioning.axis_rules(config.logical_axis_rules):
            modules.insert(0, adapters.with_adapters(modules[0], mesh, config, seed))
    for module in modules:
        compat.make_keys_plain(module)
        if is_one_cpu(mesh):
            if not lora.rank:  # it gives a product another shape, in which qwix does not know the matrix
                cpu_speed.multiply_in_two_dimensions(module)
            cpu_speed.unroll_layers(module)
            hidden_states.allow_narrow_head(module)
    environment.release_freed_memory()
    trained, *base = (hidden_states.adapter_for(loss, module) for module in modules)
    return Actor(trained, config, mesh, loss, lora, *base)


def is_one_cpu(mesh: jax.sharding.Mesh) -> bool:
    """Whether one CPU device computes all, for which the course has forms of its own (cpu_speed, losses.slots)."""
    return mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"


def _loading_error(checkpoint: Any, config: Any, mesh: Any, error: Exception) -> CourseError:
    """What to do about a model that was not loaded: the checkpoint is at fault where the model can be built without it.

    Nobody should remove a conversion, which may have taken an hour, because of another mistake.
    """
    from maxtext.utils import model_creation_utils

    try:
        model_creation_utils.create_nnx_abstract_model(config, mesh)  # shapes and places, no weights
    except Exception as reason:
        return CourseError(
            f"the model cannot be placed on {mesh.size} devices ({first_line(reason)}); change "
            "hardware.trainer_tensor or hardware.trainer_devices"
        )
    return CourseError(
        f"checkpoint {checkpoint} cannot be read ({first_line(error)}); remove the folder and convert the model again"
    )


def per_token_logps(
    actor: Actor, prompt_ids, completion_ids, pad_id: int, eos_id: int, temperature: float | jax.Array = 1.0
) -> np.ndarray:
    """log π(token) of completions [B, C], padded on the right, after prompts [B, P], padded on the left: [B, C].

    As the loss computes them.  In a multi-process run all processes call it with the same ids.
    """
    from grpo_train import losses

    ids = multihost.shard_batch((prompt_ids, completion_ids), actor.mesh)
    with actor.scope():
        compute = losses.logps_at(temperature)
        logps = compute(*nnx.split(actor.module), *ids, pad_id, eos_id, temperature, actor.loss)
    return multihost.to_numpy(logps)


def left_out(
    actor: Actor,
    prompt_ids,
    completion_ids,
    pad_id: int,
    eos_id: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
) -> np.ndarray:
    """The probability that top-k and top-p leave out at each token of the completions, [B, C]; as per_token_logps."""
    from grpo_train import losses

    ids = multihost.shard_batch((prompt_ids, completion_ids), actor.mesh)
    cut = (temperature, actor.loss, top_k, top_p)
    with actor.scope():
        return multihost.to_numpy(losses.left_out(*nnx.split(actor.module), *ids, pad_id, eos_id, *cut))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the information logs and warnings of the libraries underneath out of the reader's way; errors stay."""
    from absl import logging as absl_logging

    before = absl_logging.get_verbosity()
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        absl_logging.set_verbosity(before)  # MaxText's converter turns information logs on when it is imported
        logging.disable(disabled)


def register_architecture(model: ModelRecipe) -> None:
    """Tell MaxText's converters the sizes of this model: their table of MaxText 0.2.5 has the published ones only."""
    from maxtext.checkpoint_conversion.utils.hf_model_configs import HF_MODEL_CONFIGS
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_directory(model, weights=False), trust_remote_code=False)
    except Exception as error:  # of a damaged file
        raise unreadable(model, "config.json", error) from error
    HF_MODEL_CONFIGS[model.maxtext_name] = config
    compat.complete_converter_tables(model.maxtext_name, config)
