"""Faults of upstream that grpo_train/engines/compat.py works around: a test here fails when upstream has fixed one."""

import importlib
import inspect
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file
from tunix.rl import common, rl_cluster
from tunix.rl.rollout.vanilla_rollout import VanillaRollout
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

from grpo_train.engines import compat, cpu_speed

pytestmark = pytest.mark.slow

PROMPTS = [f"<|im_start|>user\nAna has {n} cards.<|im_end|>\n<|im_start|>assistant\n" for n in range(3, 11)]


def test_tunix_still_samples_the_same_noise_without_a_seed(sampler, rollout_config):
    """Tunix 0.1.7.  When this fails, TunixSampler need not make a seed for every call."""
    first, second = (VanillaRollout.generate(sampler, PROMPTS, rollout_config).text for _ in range(2))
    assert first == second


def test_tunix_still_cuts_off_the_end_token(sampler, rollout_config):
    """Tunix 0.1.7.  When this fails, compat.keep_end_tokens can go."""
    output = VanillaRollout.generate(sampler, PROMPTS, rollout_config)
    assert all(sampler.eos_id() not in ids for ids in output.tokens)


def test_tunix_still_forgets_the_temperature_of_old_logps():
    """Tunix 0.1.7.  When this fails, compat.old_logps_from_actor is no longer needed with this engine."""
    assert "temperature" in inspect.signature(common.compute_per_token_logps).parameters
    assert "temperature" not in inspect.getsource(VanillaRollout.get_per_token_logps)


def test_tunix_still_copies_the_policy_after_each_sync():
    """Tunix 0.1.7.  When this fails, compat.sync_without_snapshot can go."""
    assert "pinned_host" in inspect.getsource(rl_cluster.RLCluster.sync_weights)


def test_tunix_still_samples_inside_the_mesh():
    """Tunix 0.1.7.  When this fails, compat.sample_outside_the_mesh can go."""
    assert "_get_mesh_and_logical_axis_rules_cm(Role.ROLLOUT)" in inspect.getsource(rl_cluster.RLCluster.generate)


def test_tunix_still_copies_the_optimizer_s_state():
    """Tunix 0.1.7.  When this fails, compat.keep_optimizer_state can go, which does not."""
    trainer = SimpleNamespace(optimizer=nnx.Optimizer(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), optax.adam(1), wrt=nnx.Param))
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))

    def addresses() -> set[int]:
        return {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(nnx.state(trainer.optimizer, nnx.OptState))}

    with mesh:
        before = addresses()
        PeftTrainer._shard_optimizer(trainer, mesh)
        copied = addresses()
        assert not before & copied
        compat.keep_optimizer_state(trainer)
        trainer._shard_optimizer(mesh)
        assert addresses() == copied


def test_tunix_still_keeps_the_old_weights():
    """Tunix 0.1.7.  When this fails, compat.donate_weights can go, with which the new ones take their place."""
    trainer = PeftTrainer(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), optax.sgd(1.0), TrainingConfig(eval_every_n_steps=1))
    trainer.with_loss_fn(lambda model, x: (model(x) ** 2).mean()).with_gen_model_input_fn(lambda x: {"x": x})

    def step() -> tuple[int, int]:
        """Where the kernel is before and after an update."""
        update, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)
        before = trainer.model.kernel.get_value().unsafe_buffer_pointer()
        update(jnp.ones((2, 64)))
        return before, trainer.model.kernel.get_value().unsafe_buffer_pointer()

    before, after = step()
    assert before != after
    compat.donate_weights(trainer)
    trainer.clear_jit_cache()
    before, after = step()
    assert before == after


def test_maxtext_still_draws_a_model_before_it_loads_one():
    """MaxText 0.2.5.  When this fails, compat.load_without_drawing can go."""
    from maxtext.utils import model_creation_utils

    source = inspect.getsource(model_creation_utils.from_pretrained)
    assert source.index("create_nnx_sharded_model(") < source.index("ckptr.restore(")


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_tunix_still_ignores_rope_theta(family):
    """Tunix 0.1.7.  When this fails, compat.require_rope_theta or tunix_models.Llama can go."""
    definition = importlib.import_module(f"tunix.models.{family}.model")
    tied = {"llama3": "weight_tying", "qwen3": "use_tied_embedding"}[family]
    model = {"llama3": "Llama3", "qwen3": "Qwen3"}[family]
    sizes = {"num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "embed_dim": 8, "hidden_dim": 8, "head_dim": 8}

    def logits(theta):
        config = definition.ModelConfig(**sizes, vocab_size=16, rope_theta=theta, norm_eps=1e-6, **{tied: True})
        tokens = jnp.arange(8)[None]
        mask = jnp.tril(jnp.ones((1, 8, 8), bool))
        return getattr(definition, model)(config, rngs=nnx.Rngs(0))(tokens, jnp.arange(8)[None], None, mask)[0]

    assert jnp.array_equal(logits(10_000), logits(1_000_000))


def test_tunix_still_takes_a_batch_for_this_process_s_part(monkeypatch):
    """Tunix 0.1.7.  When this fails, compat.shard_whole_batches may no longer be needed: try without it."""
    from tunix.sft import sharding_utils

    parts = []
    monkeypatch.setattr(jax, "make_array_from_process_local_data", lambda sharding, data: parts.append(data))
    with jax.sharding.Mesh(np.array(jax.devices()[:1]), ("fsdp",)):
        sharding_utils.shard_input(np.zeros((4, 2)), ("fsdp",))
    assert [part.shape for part in parts] == [(4, 2)]


def test_tunix_still_logs_to_wandb_unasked(monkeypatch, tmp_path):
    """Tunix 0.1.7.  When this fails, compat.hide_wandb can go."""
    from tunix.sft.metrics_logger import MetricsLoggerOptions

    started = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: started.append(options), run=None))
    for backend in MetricsLoggerOptions(log_dir=str(tmp_path)).create_backends():
        backend.close()
    assert len(started) == 1


def test_maxtext_still_cannot_save_lazy_tensors():
    """MaxText 0.2.5, Orbax 0.12.  When this fails, compat.save_lazy_tensors can go, if memory stays as it is."""
    from maxtext.checkpoint_conversion.to_maxtext import LazyTensor
    from orbax.checkpoint import v1 as ocp

    lazy = LazyTensor(lambda: np.zeros(2), (2,), "float32")
    with pytest.raises(ValueError, match=r"not registered.*LazyTensor"):
        ocp.handlers.PyTreeHandler().validate_leaves_handleable({"weight": lazy})


def test_maxtext_still_lacks_qwen3_1_7b_and_llama3():
    """MaxText 0.2.5.  When this fails, compat.complete_converter_tables need not enter names."""
    from maxtext.checkpoint_conversion.utils import hf_model_configs, hf_shape, param_mapping
    from maxtext.utils import globals as maxtext_globals

    # The files: a conversion in this process may have completed the tables.
    lists = {module: '"qwen3-1.7b"' in Path(module.__file__).read_text(encoding="utf-8")
             for module in (hf_model_configs, hf_shape, maxtext_globals)}  # fmt: skip
    assert list(lists.values()) == [True, False, False]
    assert '"llama3-8b"' not in Path(param_mapping.__file__).read_text(encoding="utf-8")


def test_maxtext_still_reads_biases_from_a_key_that_qwen2_has_not():
    """MaxText 0.2.5.  When this fails, compat.complete_converter_tables need not set attention_bias."""
    from maxtext.checkpoint_conversion.utils.hf_shape import HF_SHAPE
    from transformers import Qwen2Config

    config = Qwen2Config(num_hidden_layers=1)
    name = "qwen2.5-7b"
    bias = "model.layers.0.self_attn.q_proj.bias"
    assert bias not in HF_SHAPE[name](config.to_dict())
    assert bias in HF_SHAPE[name](config.to_dict() | {"attention_bias": True})


def test_maxtext_still_has_no_setting_for_unrolled_layers():
    """MaxText 0.2.5.  When this fails, cpu_speed.unroll_layers can be that setting."""
    from maxtext.configs.types import MaxTextConfig

    # Those that there are: of checkpoints for decoding, and of an attention kernel.
    assert {n for n in MaxTextConfig.model_fields if "unroll" in n} == {"force_unroll", "ring_scan_unroll"}


def test_xla_still_copies_the_operand_of_a_weight_gradient():
    """JAX 0.11.  When this fails, cpu_speed.multiply_in_two_dimensions can go."""

    def dense(x, weight, flat):
        return (x.reshape(-1, 16) @ weight).reshape(4, 6, 48) if flat else x @ weight

    def loss(weight, x, slope, flat):
        return (jax.nn.silu(dense(x, weight, flat)) * slope).sum()

    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 48), (4, 6, 16), (4, 6, 48))]
    programs = [jax.jit(jax.grad(loss), static_argnums=3).lower(*arrays, flat).compile() for flat in (False, True)]
    copies = [program.as_text().count(" copy(") for program in programs]
    assert copies[0] > 0
    assert copies[1] == 0


@pytest.mark.parametrize(
    ("workaround", "swapped"),
    [
        ("multiply_in_two_dimensions", "TwoDimensions"),
        pytest.param("unroll_layers", "Unrolled", marks=pytest.mark.long),
    ],
)
def test_a_model_with_other_products_or_without_a_scan_gives_the_same_numbers(tiny_recipe, workaround, swapped):
    from test_losses import one_layer

    actor = one_layer(tiny_recipe, layers=2)
    found = []
    ids = jnp.arange(2, 26).reshape(2, 12)
    positions = jnp.tile(jnp.arange(12), (2, 1))

    def total(module):
        return (module(ids, positions, None, None)[0] ** 2).mean()

    with actor.scope():
        found.append(nnx.value_and_grad(total)(actor.module))
        getattr(cpu_speed, workaround)(actor.module)
        assert [part for _, part in nnx.iter_graph(actor.module) if type(part).__name__ == swapped]
        found.append(nnx.value_and_grad(total)(actor.module))
    (loss, gradient), (their_loss, their_gradient) = found
    assert float(loss) == pytest.approx(float(their_loss), rel=1e-6)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(their_gradient), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * float(abs(one).max()))


def test_weights_of_another_dtype_are_copied_while_they_are_loaded(tmp_path, root):
    base = root / "assets" / "tiny-base"
    with compat.weights_in("float32", base) as loaded:
        assert loaded == base
    with compat.weights_in("bfloat16", base) as loaded:
        assert {array.dtype for array in load_file(loaded / "model.safetensors").values()} == {jnp.dtype("bfloat16")}
        assert (loaded / "config.json").read_text() == (base / "config.json").read_text()
        kept = Path(shutil.copytree(loaded, tmp_path / "rounded"))
    assert not loaded.exists()
    with compat.weights_in("bfloat16", kept) as loaded:
        assert loaded == kept
