"""Tunix's own models, for its sampler: which architectures, their configs, and how they lie on several devices.

config = model_config("qwen2.5-7b", rope_theta=1_000_000, settings=settings)
mesh = sampler_mesh(jax.local_devices(), tensor=4)   # axes fsdp (rows of a batch) and tp (heads, MLP, vocabulary)
module = abstract_model(config, mesh)                # shapes in place of weights
shardings = weight_shardings(module, mesh)           # path -> NamedSharding
"""

import dataclasses
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen2 import params as qwen2_params
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params

from grpo_lib.common.errors import CourseError
from grpo_train.engines import compat, cpu_speed, model_files

# Tunix's name of a model setting -> MaxText's, config.json's.
SETTINGS = {
    "num_layers": ("num_decoder_layers", "num_hidden_layers"),
    "vocab_size": ("vocab_size", "vocab_size"),
    "embed_dim": ("emb_dim", "hidden_size"),
    "hidden_dim": ("mlp_dim", "intermediate_size"),
    "num_heads": ("num_query_heads", "num_attention_heads"),
    "head_dim": ("head_dim", "head_dim"),
    "num_kv_heads": ("num_kv_heads", "num_key_value_heads"),
    "norm_eps": ("normalization_layer_epsilon", "rms_norm_eps"),
    "use_tied_embedding": ("logits_via_embedding", "tie_word_embeddings"),
}
# Settings that `tp` devices divide among them.
DIVIDED = ("num_heads", "num_kv_heads", "head_dim", "hidden_dim", "embed_dim", "vocab_size")


class _ShardedCache:
    """A Tunix model whose KV cache is made where it belongs: rows over `fsdp`, heads over `tp`.

    Tunix 0.1.7 makes the whole cache on one device (Qwen3.init_cache; the sampler's own for Qwen2).
    """

    mesh: Mesh | None = None

    def init_cache(self, batch_size: int, cache_size: int, dtype: Any) -> dict[str, dict[str, jax.Array]]:
        return jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding),
            cache_shapes(self.config, batch_size, cache_size, self.mesh),  # type: ignore[attr-defined]
        )


class Qwen2(_ShardedCache, qwen2.Qwen2):
    """Qwen2.5."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 turns its heads more slowly than Llama 3, for longer texts: rope_type llama3 of config.json."""

    factor: float  # slow frequencies are divided by it
    low_freq_factor: float  # slow: fewer turns than this within the original length
    high_freq_factor: float  # fast, and left as they are: more turns than this
    original_max_position_embeddings: int  # tokens


@dataclasses.dataclass(slots=True)
class LlamaConfig(qwen2.ModelConfig):
    """The sizes of a Llama, told from those of a Qwen2.5 by their class."""

    rope_scaling: RopeScaling | None = None
    # The query weights have attention's factor, head_dim ** -0.5, in them, as MaxText's.  They are sampled with as they
    # are: divided by it, a bfloat16 would be rounded once more.
    scaled_queries: bool = False


class Llama(Qwen2):
    """Llama 3 and 3.1: Qwen2 without the biases of queries, keys and values, and with rotary embeddings of its own.

    Tunix 0.1.7 has a Llama 3, whose attention does not look at the config's rope_theta
    (test_tunix_still_ignores_rope_theta) and which scales no frequencies.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        for layer in self.layers:
            layer.attn.q_bias = layer.attn.k_bias = layer.attn.v_bias = nnx.static(np.float32(0))  # pyright: ignore[reportAttributeAccessIssue]
            if config.scaled_queries:
                layer.attn.scale = 1.0

    def __call__(self, input_tokens, positions, cache, attention_mask=None, segment_ids=None) -> Any:
        """As Tunix's Qwen2, which has no place for other frequencies: (logits [B, L, V], the new cache or None)."""
        x = self.embedder.encode(input_tokens)
        angles = positions[..., None] * inverse_frequencies(self.config)  # [B, L, H / 2]
        sin, cos = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
        new_cache = {}
        for number, layer in enumerate(self.layers):
            name = f"layer_{number}"
            of_layer = cache[name] if cache else None
            new_cache[name], x = layer(x, of_layer, attention_mask, sin, cos, segment_ids=segment_ids)
        x = self.final_norm(x)
        logits = self.embedder.decode(x) if self.config.use_tied_embedding else self.lm_head(x)
        return logits.astype(jnp.float32), None if cache is None else new_cache


def inverse_frequencies(config: LlamaConfig) -> jax.Array:
    """By how much each pair of a head's values turns from one position to the next: [head_dim / 2], in radians.

    Scaled as in the reference code of Llama 3.1 (github.com/meta-llama/llama-models, models/llama3/model.py) and in
    Transformers (modeling_rope_utils.py, _compute_llama3_parameters).
    """
    plain = 1 / config.rope_theta ** (jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    turns = scaling.original_max_position_embeddings * plain / (2 * jnp.pi)  # within the original length
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = jnp.clip((turns - low) / (high - low), 0, 1)  # 0: slow, 1: fast, a mixture of both in between
    return kept * plain + (1 - kept) * plain / scaling.factor


class Qwen3(_ShardedCache, qwen3.Qwen3):
    """Qwen3."""


@dataclasses.dataclass(frozen=True)
class Family:
    """An architecture of Tunix's."""

    maxtext: str  # how MaxText's names of it begin
    hugging_face: str  # its model_type in config.json, and the kind of its rotary embeddings where they are scaled
    model: Any  # the class
    config: type  # its ModelConfig
    loader: ModuleType  # which weight of a file is which of the model


FAMILIES = (
    Family("qwen2.5-", "qwen2", Qwen2, qwen2.ModelConfig, qwen2_params),
    Family("llama3-", "llama", Llama, LlamaConfig, qwen2_params),
    Family("llama3.1-", "llama (llama3)", Llama, LlamaConfig, qwen2_params),
    Family("qwen3-", "qwen3", Qwen3, qwen3.ModelConfig, qwen3_params),
)


def require_family(name: str) -> Family:
    """The family of a model, by MaxText's name, or by model_type and kind of rotary embeddings of config.json.

    Raises CourseError for a model that is not sampled here: one with rotary embeddings of another kind (yarn, dynamic,
    linear), for one.
    """
    for family in FAMILIES:
        if name == family.hugging_face or name.startswith(family.maxtext):
            return family
    raise CourseError(
        f"rollout.engine=tunix samples Qwen2.5, Qwen3, Llama 3 and 3.1, and this model is {name or 'unnamed'}; "
        "use rollout.engine=vllm, on a slice of one host"
    )


def has_llama_heads(config: Any) -> bool:
    """Whether a MaxText model is a Llama 3.1, whose block has query weights with attention's factor in them.

    The two values of a head that turn together are then neighbours; in all other models they are half a head apart.
    """
    return config.model_name.startswith("llama3.1")


def maxtext_settings(config: Any) -> dict[str, Any]:
    """The settings for `model_config` of a MaxText model's config."""
    settings = {name: getattr(config, maxtext) for name, (maxtext, _) in SETTINGS.items()}
    if has_llama_heads(config):
        settings |= {"rope_scaling": RopeScaling(**model_files.LLAMA31_SCALING), "scaled_queries": True}
    return settings


def hugging_face_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The settings for `model_config` of a config.json.

    Raises CourseError where its rotary embeddings are scaled like Llama 3.1's, by numbers that make no sense.
    """
    settings = {name: config.get(key) for name, (_, key) in SETTINGS.items()}
    kind, rope = model_files.rotary_embedding(config)
    if kind == "llama3":
        settings["rope_scaling"] = _rope_scaling(rope)
    return settings


def _rope_scaling(rope: dict[str, Any]) -> RopeScaling:
    given = {field.name: rope.get(field.name) for field in dataclasses.fields(RopeScaling)}
    for name, value in given.items():
        if not isinstance(value, int | float) or not value > 0:
            raise CourseError(
                f"config.json: {name} of rope_scaling is {value!r}, no positive number; copy or download the model "
                "again"
            )
    scaling = RopeScaling(**given)
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise CourseError(
            f"config.json: low_freq_factor of rope_scaling, {scaling.low_freq_factor}, is not below high_freq_factor, "
            f"{scaling.high_freq_factor}; copy or download the model again"
        )
    return scaling


def model_config(
    name: str, rope_theta: float | None, settings: dict[str, Any], dtype: Any = jnp.float32, tensor: int = 1
) -> Any:
    """Tunix's ModelConfig, from `settings` (maxtext_settings, hugging_face_settings), of a model that computes in
    `dtype` and has its weights in it.

    `tensor` devices hold the model together.  Where they are more than its key-value heads, the heads are repeated, so
    that each device has one: the config then has `tensor` of them (as vLLM does it).

    Raises CourseError for a model that Tunix 0.1.7 cannot sample, or that `tensor` devices cannot divide.
    """
    family = require_family(name)
    if family.model is Qwen3:
        compat.require_rope_theta(rope_theta)
    elif not rope_theta:
        raise CourseError(f"rollout.engine=tunix: config.json of this {name} model has no rope_theta")
    if not settings.get("head_dim"):  # config.json of Qwen2.5 does not say it
        settings = settings | {"head_dim": settings["embed_dim"] // settings["num_heads"]}
    kv_heads = settings["num_kv_heads"]
    if tensor > kv_heads and tensor % kv_heads == 0:
        settings = settings | {"num_kv_heads": tensor}
    for key in DIVIDED:
        if settings[key] % tensor:
            raise CourseError(
                f"hardware.sampler_tensor={tensor} does not divide the model's {SETTINGS[key][1]} of {settings[key]}; "
                "take a divisor of it"
            )
    made = family.config(rope_theta=rope_theta, dtype=dtype, param_dtype=dtype, **settings)
    return dataclasses.replace(made, shd_config=made.shd_config.get_default_sharding(is_sampling=True))


def abstract_model(config: Any, mesh: Mesh | None = None) -> Any:
    """The model with shapes in place of weights; with a mesh, its KV cache is made on it.

    In float32 on one CPU it computes a group's prompt once.
    """
    kind = next(family.model for family in FAMILIES if type(config) is family.config)
    module: Any = nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))
    module.mesh = mesh
    if is_float32_on_one_cpu(config, mesh):
        cpu_speed.share_prompts(module)
    return module


def is_float32_on_one_cpu(config: Any, mesh: Mesh | None) -> bool:
    """Whether a sampler of this model computes so; `mesh`: its devices, None for one."""
    return mesh is None and jax.default_backend() == "cpu" and config.dtype == jnp.float32


def sampler_mesh(devices: Any, tensor: int) -> Mesh:
    """`tensor` neighbouring devices hold the model together; the rows of a batch are spread over such groups."""
    return Mesh(np.array(devices).reshape(-1, tensor), ("fsdp", "tp"))


def weight_shardings(module: nnx.Module, mesh: Mesh) -> dict[tuple, NamedSharding]:
    """Path of a weight -> its sharding, as Tunix's ShardingConfig says for sampling."""
    return {
        path: NamedSharding(mesh, variable.get_value())
        for path, variable in nnx.get_partition_spec(nnx.state(module, nnx.Param)).flat_state()
    }


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over the axis fsdp, for arrays [B, ...]."""
    return NamedSharding(mesh, PartitionSpec("fsdp"))


def cache_shapes(config: Any, rows: int, length: int, mesh: Mesh | None) -> dict[str, dict[str, Any]]:
    """Shapes of the KV cache of `rows` sequences: k and v of a layer are [rows, length, kv heads, head size]."""
    shape = (rows, length, config.num_kv_heads, config.head_dim)
    heads = mesh and NamedSharding(mesh, PartitionSpec("fsdp", None, "tp", None))
    values = jax.ShapeDtypeStruct(shape, config.dtype, sharding=heads)
    end_index = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=mesh and row_sharding(mesh))
    layer = {"k": values, "v": values, "end_index": end_index}
    return {f"layer_{number}": dict(layer) for number in range(config.num_layers)}
