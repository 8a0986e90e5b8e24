"""The last hidden states of a MaxText model under Tunix, for losses that make no logits [B, T, V].

MaxText 0.2.5 leaves the head out of a training forward pass when its num_vocab_tiling is above 1, and keeps the hidden
states for whoever computes the loss: its own pre-training does it in tiles.  Its train_rl refuses that setting, because
the adapter that it gives Tunix knows logits only.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from maxtext.integration.tunix.tunix_adapter import TunixMaxTextAdapter
from maxtext.layers.nnx_decoders import NNXDecoder

from grpo_lib.common.errors import CourseError
from grpo_train.losses.pallas_kernel import Partition

# The axes of MaxText's mesh over which it lays a batch and a vocabulary, of those that a recipe can make longer than 1.
MESH_AXES = {"batch": ("data", "fsdp"), "vocabulary": ("tensor",)}


def maxtext_settings(implementation: str, max_length: int) -> dict[str, int]:
    """Extra MaxText settings per loss implementation.  `max_length`: the config's max_target_length."""
    # Any number above 1 that divides the length of a sequence keeps the head out of the forward pass.
    return {} if implementation == "jax" else {"num_vocab_tiling": max_length}


def adapter_for(implementation: str, adapter: TunixMaxTextAdapter) -> TunixMaxTextAdapter:
    """The adapter that an implementation needs, around the same model."""
    if implementation == "jax":
        return adapter
    return HiddenStatesAdapter(
        base_model=adapter.base, use_no_op_mappings=adapter.use_no_op_mappings, pad_id=adapter._pad_id
    )


class HiddenStatesAdapter(TunixMaxTextAdapter):
    """Tunix's view of a MaxText model, which gives the last hidden states and no logits.

    Its MaxText config needs `maxtext_settings`.
    """

    def hidden_states(self, input_tokens, positions, attention_mask=None, segment_ids=None, **more) -> jax.Array:
        """[B, L, D], before the last norm."""
        super().__call__(input_tokens, positions, None, attention_mask, segment_ids=segment_ids, **more)
        kept: Any = nnx.pop(self.base, nnx.Intermediate)
        (hidden,) = kept["decoder"]["hidden_states"].get_value()
        return hidden

    def normalised(self, hidden: jax.Array) -> jax.Array:
        """Hidden states as the head takes them."""
        return self.base.decoder.decoder_norm(hidden)

    def head(self) -> tuple[jax.Array, int, float]:
        """(the head as MaxText multiplies by it, its vocab_axis, what its logits are divided by).

        Raises CourseError for a head that is more than a matrix.
        """
        config, decoder = self.base.config, self.base.decoder
        for setting in ("final_logits_soft_cap", "dropout_rate", "quantize_logits_proj", "logits_dot_in_fp32"):
            if getattr(config, setting, None):
                raise CourseError(f"MaxText's {setting} is set, which only loss.implementation=jax can follow")
        if not config.logits_via_embedding:
            return decoder.logits_dense.kernel.get_value().astype(config.dtype), 1, 1.0
        # MaxText rounds a tied embedding to bfloat16, whatever the dtype of the model.
        embedding = self.base.token_embedder.embedding.get_value().astype(jnp.bfloat16).astype(config.dtype)
        return embedding, 0, math.sqrt(config.emb_dim) if config.normalize_embedding_logits else 1.0

    def partition(self) -> Partition | None:
        """How MaxText lays a batch and the head over the mesh; None for one device."""
        shape = self.base.mesh.shape
        if self.base.mesh.size == 1:
            return None
        axes = {name: tuple(axis for axis in group if shape.get(axis, 1) > 1) for name, group in MESH_AXES.items()}
        return Partition(self.base.mesh, axes["batch"] or ("fsdp",), axes["vocabulary"])


def allow_narrow_head(module: nnx.Module) -> None:
    """Let a MaxText model leave out logits that nobody needs, see `narrow_head`; until it is asked it makes all."""

    @functools.cache
    def with_narrow_head(decoder: type[NNXDecoder]) -> type[NNXDecoder]:
        class Narrow(decoder):
            head_places: slice | None = None  # None: all

            def apply_output_head(self, shared_embedding, y, *arguments, **named):  # y [B, L, D]
                hidden = y if self.head_places is None else y[:, self.head_places]
                return super().apply_output_head(shared_embedding, hidden, *arguments, **named)

        return Narrow

    for _, part in nnx.iter_graph(module):
        if isinstance(part, NNXDecoder):
            part.__class__ = with_narrow_head(type(part))


def narrow_head(module: nnx.Module, places: slice) -> bool:
    """Ask a copy of a model for the logits of these places alone; False where it is one that makes all."""
    decoders = [part for _, part in nnx.iter_graph(module) if hasattr(type(part), "head_places")]
    for decoder in decoders:
        decoder.head_places = places
    return bool(decoders)
