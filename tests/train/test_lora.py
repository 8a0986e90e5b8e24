"""Adapters: the policy has them, the sampler and the export have their products, the reference has none of it."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from maxtext.checkpoint_conversion import to_huggingface
from tunix.rl import common, rl_cluster

from grpo_lib.common.errors import CourseError
from grpo_train import checks, training
from grpo_train.engines import cluster, conversion, lora, maxtext_model, tunix_sampler, watched_kl, weight_sync
from grpo_train.recipes import load_recipe
from grpo_train.recipes.schema import LoRARecipe

pytestmark = pytest.mark.slow

LAYERS = 4  # of the tiny model, and a rank: MaxText's own converter cannot tell one from the other
PROMPTS = np.arange(24).reshape(4, 6) % 90 + 20
COMPLETIONS = np.arange(20).reshape(4, 5) % 70 + 30


def logps(actor) -> np.ndarray:
    return np.asarray(maxtext_model.per_token_logps(actor, PROMPTS, COMPLETIONS, pad_id=0, eos_id=1))


@pytest.fixture(scope="module")
def load(tiny_recipe, converted_base):
    def make(rank, loss="jax", trained=True):
        """With B drawn at random in the place of a training."""
        actor = maxtext_model.load_actor(
            tiny_recipe.model, converted_base, 64, loss=loss, lora=LoRARecipe(rank=rank, alpha=8.0)
        )
        if trained:
            rng = np.random.default_rng(0)
            for path, variable in nnx.state(actor.module, nnx.LoRAParam).flat_state():
                if path[-1].endswith(lora.B):
                    variable.set_value(jnp.asarray(rng.normal(0, 0.1, variable.get_value().shape), jnp.float32))
                    nnx.update(actor.module, nnx.State.from_flat_path({path: variable}))
        return actor

    return make


@pytest.mark.long
def test_only_adapters_are_trained_and_all_of_them(load):
    actor = load(2)

    def loss(module):
        logits, _ = module(PROMPTS, np.tile(np.arange(6), (4, 1)), None, None)
        return logits.std()

    with actor.scope():
        gradient = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(actor.module)
    flat = dict(gradient.flat_state())
    assert len(flat) == 14
    assert all(path[-1].endswith((lora.A, lora.B)) for path in flat)
    for path, variable in flat.items():
        assert np.abs(variable.get_value()).max() > 0, path


@pytest.mark.long
def test_a_loss_from_hidden_states_sees_the_adapters(load):
    np.testing.assert_allclose(logps(load(3, "chunked")), logps(load(3)), atol=1e-4)


@pytest.mark.long
def test_the_export_answers_as_the_policy_does(load, tiny_recipe, tmp_path):
    actor = load(LAYERS)
    directory = conversion.export_to_hugging_face(actor, tiny_recipe.model, tmp_path / "export")
    assert conversion.read_weights(directory).keys() == conversion.read_weights("assets/tiny-base").keys()
    exported = tunix_sampler.load_hugging_face(directory)
    theirs = common.compute_per_token_logps(*nnx.split(exported), PROMPTS, COMPLETIONS, pad_id=0, eos_id=1)
    assert np.abs(np.asarray(theirs) - logps(actor)).mean() < weight_sync.MAX_MEAN_GAP["float32"]


@pytest.mark.long
def test_the_kl_from_a_base_in_host_memory_is_that_from_the_shared_one(load, tiny_actor, sampler, rollout_config):
    sampler.generate(["Ana has 3 cards.", "Ben has 4."] * 4, rollout_config)
    actor = load(LAYERS)
    in_host_memory = watched_kl.in_host_memory(tiny_actor)
    shared = watched_kl.without_adapters(actor)

    def kl(actor, base, temperature=1.0):
        return watched_kl.kl_from_base(sampler, actor, base(), 8, 12, temperature)

    assert kl(tiny_actor, in_host_memory) == pytest.approx(0, abs=1e-9)
    scored = sampler.last_scored(8, 12)
    policy, base = (
        np.asarray(maxtext_model.per_token_logps(model, scored.prompt_ids, scored.completion_ids, 0, 1))
        for model in (actor, tiny_actor)
    )
    written = [len(ids) for ids in scored.logps]
    difference = np.concatenate([(b - p)[:length] for p, b, length in zip(policy, base, written, strict=True)])
    expected = np.mean(np.exp(difference) - difference - 1)
    assert kl(actor, in_host_memory) == pytest.approx(expected, rel=1e-4)
    assert expected > 0.01
    assert kl(actor, shared) == pytest.approx(expected, rel=1e-4)
    # Flatter distributions are nearer to each other.
    assert 0.01 < kl(actor, shared, temperature=2.0) < 0.9 * expected


def test_the_kl_is_watched_once_in_a_step():
    cluster = SimpleNamespace(global_steps=0)
    values = iter((0.5, 0.6, 0.7))
    metrics = watched_kl.measured_every(3, cluster, lambda: next(values))
    found = []
    for cluster.global_steps in (0, 0, 1, 1, 2, 2, 3, 4, 5):  # counted from 0; most steps sample twice
        found += [(cluster.global_steps + 1, value) for value, _ in metrics(prompts=[]).values()]
    assert found == [(1, 0.5), (1, 0.5), (3, 0.6), (3, 0.6), (6, 0.7)]


@pytest.mark.long
def test_after_one_step_the_sampler_has_the_merged_policy(root, converted_base, tmp_path):
    changes = ["training.steps=1", "training.validate_every=0", "problems.train=200", "training.prompts_per_step=4"]
    changes += [f"lora.rank={LAYERS}", "training.learning_rate=0.03", "training.warmup_steps=0", "grpo.beta=0.01"]
    recipe = load_recipe(root / "recipes" / "tiny-cpu.yaml", changes)
    session = training.build_session(checks.check(recipe), tmp_path, converted_base)
    assert session.cluster.inference_worker.get_model("reference") is not None
    (row,) = training.train(session)
    assert abs(row["kl"]) < 1e-5  # of the first step: the reference is the base
    # The base shares its arrays, although the update has made new ones, of the weights that it does not train, too.
    actors = weight_sync.by_name(nnx.state(session.actor.module, nnx.Param))
    shared = weight_sync.by_name(nnx.state(session.actor.base, nnx.Param))
    assert not any(name.endswith((lora.A, lora.B)) for name in shared)
    for name, value in shared.items():
        assert actors[name].unsafe_buffer_pointer() == value.unsafe_buffer_pointer(), name
    sampler = session.sampler
    weight_sync.check_weights(sampler, weight_sync.by_name(session.actor.weights()))
    scored = sampler.last_scored(8, 24)
    base = maxtext_model.Actor(session.actor.base, session.actor.config, session.actor.mesh)

    def gap_to_the_sampler(actor):
        ours = np.asarray(maxtext_model.per_token_logps(actor, scored.prompt_ids, scored.completion_ids, 0, 1))
        pairs = zip(scored.logps, ours, strict=True)
        return np.mean([np.abs(sampled - row[: len(sampled)]).mean() for sampled, row in pairs])

    assert gap_to_the_sampler(session.actor) < 2e-3
    assert gap_to_the_sampler(base) > 0.05

    # As upstream would: the adapters alone.  The check names a matrix that kept the base's values.
    sampler.update_params = type(sampler).update_params.__get__(sampler)
    sampler.update_params(nnx.state(session.actor.module, nnx.Param))
    with pytest.raises(CourseError, match=r"weight layers\.0\..* differs from the actor's"):
        weight_sync.check_weights(sampler, weight_sync.by_name(session.actor.weights()))


def test_tunix_still_sends_the_adapters_alone(load):
    """RLCluster.sync_weights; cluster.sync_whole_weights is for that."""
    actor = load(1)
    sent = []
    sampler = SimpleNamespace(update_params=lambda params, filter_types=None: sent.append(params))
    synced = SimpleNamespace(actor_trainer=SimpleNamespace(model=actor.module), rollout=sampler, global_steps=0)
    rl_cluster.RLCluster.sync_weights(synced)
    assert {type(variable) for _, variable in sent[0].flat_state()} == {nnx.LoRAParam}
    cluster.sync_whole_weights(synced, actor)
    rl_cluster.RLCluster.sync_weights(synced)
    assert {type(variable) for _, variable in sent[1].flat_state()} == {nnx.Param}


def test_maxtext_s_converter_still_guesses_the_layers_axis_from_the_rank():
    """With as many layers as ranks it merges along the wrong axis, without a word; conversion.py merges before it."""
    rng = np.random.default_rng(0)
    key = "params-decoder-layers-mlp-wi_0-kernel"
    errors = {}
    for rank in (2, LAYERS):
        a = rng.normal(size=(LAYERS, LAYERS, rank))  # as qwix makes them
        b = rng.normal(size=(rank, LAYERS, 6))
        delta = to_huggingface._get_lora_delta(key, {f"{key}{lora.A}": a, f"{key}{lora.B}": b}, 1.0)
        errors[rank] = np.abs(delta - np.einsum("ilr,rlo->ilo", a, b)).max()
    assert errors[2] < 1e-5
    assert errors[LAYERS] > 1
