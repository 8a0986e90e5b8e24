"""LoRA (arXiv:2106.09685): of a matrix W only A and B are trained, in W + (alpha / rank) A B, by MaxText and qwix.

A sampler and a Hugging Face directory take whole matrices, so `merged` makes them.  Tunix 0.1.7 sends a sampler the
adapters alone, and its vLLM engine skips what it has no name for: it would go on with the base's weights, silently
(test_tunix_still_sends_the_adapters_alone).
"""

import functools
import json
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from maxtext.integration.tunix.tunix_adapter import TunixMaxTextAdapter
from maxtext.utils import lora_utils

from grpo_train.recipes.schema import LoRARecipe

A, B = "_lora_a", "_lora_b"  # qwix's names, after that of the matrix


def maxtext_settings(lora: LoRARecipe) -> dict[str, str]:
    """Extra MaxText settings; empty for a full training."""
    settings = {"enable_lora": True, "lora_rank": lora.rank, "lora_alpha": lora.alpha}
    return {"lora": json.dumps(settings)} if lora.rank else {}


def with_adapters(
    adapter: TunixMaxTextAdapter, mesh: jax.sharding.Mesh, config: Any, seed: int = 0
) -> TunixMaxTextAdapter:
    """The model with adapters, B = 0, on the matrices that MaxText recommends for the architecture.

    Its other weights are the variables of `adapter` themselves: an update, which makes new arrays of weights that it
    does not train, too, gives them to both models.  Call it before anything changes how the model's layers
    compute: qwix finds a matrix where it is multiplied by.
    """
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def drawn(path: tuple, shape: jax.ShapeDtypeStruct) -> jax.Array:
        key = jax.random.fold_in(jax.random.PRNGKey(seed), zlib.crc32(".".join(map(str, path)).encode()))
        return jax.jit(_initial, static_argnums=(1, 2, 3), out_shardings=everywhere)(
            key, shape.shape, shape.dtype, path[-1].endswith(B)
        )

    return TunixMaxTextAdapter(
        base_model=shapes_with_adapters(adapter.base, config, drawn),
        use_no_op_mappings=adapter.use_no_op_mappings,
        pad_id=adapter._pad_id,
    )


def shapes_with_adapters(
    base: nnx.Module, config: Any, value: Callable[[tuple, jax.ShapeDtypeStruct], Any] = lambda _, shape: shape
) -> nnx.Module:
    """MaxText's own function on shapes alone, with what `base` has in their places; `value` fills those of adapters.

    On arrays it would copy the whole model, and fails where several processes hold them (MaxText 0.2.5 puts a sharded
    adapter on single devices).
    """
    # Without a mesh it places nothing.
    adapted = nnx.eval_shape(lambda model: lora_utils.apply_lora_to_model(model, None, config), base)
    nnx.pop(adapted, nnx.Intermediate)  # of the forward pass in which qwix adds the adapters
    graph, state = nnx.split(adapted)
    filled = dict(nnx.state(base).flat_state())
    places = {}
    for path, variable in state.flat_state():
        places[path] = filled[path] if path in filled else variable.replace(value(path, variable.get_value()))
    return nnx.merge(graph, nnx.State.from_flat_path(places))


def _initial(key: jax.Array, shape: tuple[int, ...], dtype: Any, zero: bool) -> jax.Array:
    """A: uniform, by He's rule for as many inputs as its first axis has, as qwix draws it; B: 0."""
    if zero:
        return jnp.zeros(shape, dtype)
    bound = math.sqrt(6 / shape[0])
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def put_adapters(module: nnx.Module, saved: Any) -> None:
    """Give the model the adapters of a checkpoint: a tree of arrays by the model's names, as Tunix saves them."""
    filled = {}
    for path, variable in nnx.state(module, nnx.LoRAParam).flat_state():
        value = saved
        for name in path:
            value = value[str(name)]
        filled[path] = variable.replace(jnp.asarray(value["value"]))
    nnx.update(module, nnx.State.from_flat_path(filled))


def merged(module: nnx.Module, scale: float) -> nnx.State:
    """The weights without adapters: matrices that have some are W + scale A B, in the dtype of W.

    `scale` is alpha / rank.

    In bfloat16 an entry of the product that is below 0.2 % of W's is rounded away, and the sampler stays behind the
    policy, which adds W x and A B x.  The metric sampler_trainer_gap shows how far.
    """
    added, base = (dict(state.flat_state()) for state in nnx.state(module, nnx.LoRAParam, nnx.Param))
    for path, variable in base.items():
        *before, name = path
        if a := added.get((*before, f"{name}{A}")):
            b = added[(*before, f"{name}{B}")]
            weight = variable.get_value()
            base[path] = variable.replace(
                _with_product(
                    weight,
                    a.get_value(),
                    b.get_value(),
                    variable.get_metadata()["param_scan_axis"],
                    scale,
                    weight.sharding,
                )
            )
    return nnx.State.from_flat_path(base)


@functools.partial(jax.jit, static_argnames=("axis", "scale", "sharding"))
def _with_product(
    weight: jax.Array, a: jax.Array, b: jax.Array, axis: int, scale: float, sharding: jax.sharding.Sharding
) -> jax.Array:
    """W + scale A B of a stack of layers: W [..., L, ...], A [inputs, L, rank], B [rank, L, outputs], L on `axis`."""
    product = jnp.einsum("ilr,rlo->lio", a, b, precision="highest", preferred_element_type=jnp.float32)
    stacked = jnp.moveaxis(weight, axis, 0)
    product = jnp.moveaxis(product.reshape(stacked.shape), 0, axis)
    return jax.lax.with_sharding_constraint((weight + scale * product).astype(weight.dtype), sharding)
