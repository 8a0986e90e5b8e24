"""The sampler: weights arrive, both sides agree, and a run refuses to go on when they do not.

The last tests watch faults of Tunix 0.1.7 that grpo_lib.rollout works around: they fail when upstream mends them.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from grpo_lib import processes
from grpo_lib.errors import CourseError

pytestmark = pytest.mark.slow

PROMPTS = [f"<|im_start|>user\nAna has {n} cards.<|im_end|>\n<|im_start|>assistant\n" for n in range(3, 11)]


@pytest.fixture(scope="module")
def config():
    from tunix.rl.rollout.base_rollout import RolloutConfig

    return RolloutConfig(
        max_tokens_to_generate=12, max_prompt_length=32, kv_cache_size=44, temperature=1.0, top_p=1.0, top_k=None
    )


@pytest.fixture
def sampler(tiny_actor, tokenizer, config):
    from grpo_lib.rollout import TunixSampler

    return TunixSampler(tiny_actor.module, tokenizer, tiny_actor.mesh, config, seed=7)


@pytest.fixture
def logps(tiny_actor):
    from grpo_lib import models

    return lambda prompt_ids, ids: models.per_token_logps(tiny_actor, prompt_ids, ids, pad_id=0, eos_id=1)


def replace_weight(sampler, name, change):
    """Change one weight inside the sampler, as a faulty sync would."""
    from flax import nnx

    flat = {
        path: variable.replace(change(variable.get_value())) if ".".join(map(str, path)) == name else variable
        for path, variable in sampler._sampler.transformer_state.flat_state()
    }
    sampler._sampler.transformer_state = nnx.State.from_flat_path(flat)


def test_after_a_sync_every_weight_is_there_and_both_sides_agree(sampler, tiny_actor, config, logps):
    from grpo_lib.rollout import check_sync

    check = check_sync(sampler, tiny_actor.module, PROMPTS, config, logps)
    assert check.weights == 13
    assert check.tokens > 0
    assert check.mean_gap < 5e-3


@pytest.mark.parametrize("name", ["layers.2.attn.q_proj.w", "final_norm.w", "embedder.input_embedding"])
def test_a_weight_that_did_not_arrive_is_named(sampler, tiny_actor, config, logps, name):
    from grpo_lib.rollout import check_sync

    replace_weight(sampler, name, lambda value: value * 1.5)
    with pytest.raises(CourseError, match=name.replace(".", r"\.")):
        check_sync(sampler, tiny_actor.module, PROMPTS, config, logps)


def test_a_weight_that_is_read_wrongly_shows_as_a_gap(sampler, tiny_actor, config, logps):
    """Every weight is equal, and yet the two do not compute the same: arrival alone is not enough."""
    from grpo_lib.rollout import check_sync

    with pytest.raises(CourseError, match=r"sampler and trainer disagree.*limit"):
        check_sync(sampler, tiny_actor.module, PROMPTS, config, lambda p, c: np.asarray(logps(p, c)) - 0.5)
    with pytest.raises(CourseError, match="disagree"):
        check_sync(sampler, tiny_actor.module, PROMPTS, config, lambda p, c: np.full(c.shape, np.nan))


def test_an_actor_weight_without_a_counterpart_is_named(sampler, config, logps):
    from flax import nnx

    from grpo_lib.rollout import check_sync

    class Actor(nnx.Module):
        def __init__(self):
            self.decoder = nnx.Dict(logits_dense_of_another_kind=nnx.Param(np.zeros(3)))

    with pytest.raises(CourseError, match=r"decoder\.logits_dense_of_another_kind"):
        check_sync(sampler, Actor(), PROMPTS, config, logps)


def test_every_call_draws_fresh_noise_and_a_seed_repeats_it(sampler, config, tiny_actor, tokenizer):
    from grpo_lib.rollout import TunixSampler

    first, second = sampler.generate(PROMPTS, config).text, sampler.generate(PROMPTS, config).text
    assert first != second
    again = TunixSampler(tiny_actor.module, tokenizer, tiny_actor.mesh, config, seed=7)
    assert again.generate(PROMPTS, config).text == first
    again.calls = 1  # what a resumed run does
    assert again.generate(PROMPTS, config).text == second


def test_a_completion_does_not_depend_on_its_neighbours(sampler, config, tiny_actor, tokenizer):
    """The same step in one pass, in two, and with its rows in halves; of two processes each samples one."""
    from grpo_lib.rollout import TunixSampler

    def sample(prompts, calls=1, **place):
        engine = TunixSampler(tiny_actor.module, tokenizer, tiny_actor.mesh, config, seed=7, **place)
        size = len(prompts) // calls
        return [text for n in range(calls) for text in engine.generate(prompts[n * size : (n + 1) * size], config).text]

    half = len(PROMPTS) // 2
    whole = sample(PROMPTS[: 2 * half])
    assert len(set(whole)) > 1
    assert sample(PROMPTS[: 2 * half], calls=2, passes=2) == whole
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "share", lambda number: slice(half, number))
        assert sample(PROMPTS[: 2 * half]) == whole[half:]


@settings(max_examples=20)  # each compiles
@given(
    scores=arrays(np.float32, (2, 12), elements=st.floats(-8, 8, width=32), unique=True),
    top_p=st.floats(0.05, 1),
    top_k=st.none() | st.integers(1, 12),
)
def test_the_cut_keeps_what_tunix_keeps(scores, top_p, top_k):
    """Against the indices that Tunix's own sampling can return, over many draws of its noise."""
    import jax
    from tunix.generate.sampler import sample_top_p

    from grpo_lib.rollout import _cut

    kept = np.isfinite(np.asarray(_cut(scores, top_p, top_k)))
    keys = jax.random.split(jax.random.key(0), 64)
    drawn = np.asarray(jax.vmap(lambda key: sample_top_p(scores[:, None], key, 1.0, top_p, top_k)[0])(keys))
    for row in range(2):
        assert set(drawn[:, row]) <= set(np.flatnonzero(kept[row]))
        best = np.argmax(scores[row])
        assert kept[row, best]
        assert kept[row].sum() <= (top_k or 12)
        if top_p < 1:  # without the last one that is kept, what is left has less than top_p
            shares = np.exp(scores[row] - scores[row].max())
            considered = np.sort(shares)[::-1][: top_k or 12]
            held = np.sort(shares[kept[row]])[::-1] / considered.sum()
            assert held[:-1].sum() <= top_p + 1e-5


def test_completions_keep_their_end_token_unless_truncated(sampler, config):
    output = sampler.generate(PROMPTS, dataclasses.replace(config, temperature=0.3))
    for ids, truncated, length in zip(output.tokens, sampler.truncated, sampler.lengths, strict=True):
        assert (ids[-1] == sampler.eos_id()) is not truncated
        assert len(ids) == length <= config.max_tokens_to_generate
        assert sampler.eos_id() not in ids[:-1]


def test_greedy_generate_does_not_depend_on_the_batch(sampler, tokenizer):
    from grpo_lib.rollout import greedy_generate

    one = greedy_generate(sampler.module_and_state, tokenizer, max_completion_length=12, batch_size=8)
    other = greedy_generate(sampler.module_and_state, tokenizer, max_completion_length=12, batch_size=3)
    together = one(PROMPTS)
    assert [g.text for g in together] == [other([prompt])[0].text for prompt in PROMPTS]
    assert all(g.tokens <= 12 and (g.tokens == 12 or not g.truncated) for g in together)


def test_other_architectures_are_refused():
    from grpo_lib.rollout import _require_qwen3

    with pytest.raises(CourseError, match="Qwen3 models only"):
        _require_qwen3("llama3.1-8b", 1_000_000)
    with pytest.raises(CourseError, match="rope_theta"):
        _require_qwen3("qwen3-0.6b", 10_000)


def test_upstream_still_samples_the_same_noise_without_a_seed(sampler, config):
    """Tunix 0.1.7.  When this fails, TunixSampler need not make a seed for every call."""
    from tunix.rl.rollout.vanilla_rollout import VanillaRollout

    first, second = (VanillaRollout.generate(sampler, PROMPTS, config).text for _ in range(2))
    assert first == second


def test_upstream_still_cuts_off_the_end_token(sampler, config):
    """Tunix 0.1.7.  When this fails, TunixSampler need not append it."""
    from tunix.rl.rollout.vanilla_rollout import VanillaRollout

    output = VanillaRollout.generate(sampler, PROMPTS, config)
    assert all(sampler.eos_id() not in ids for ids in output.tokens)


def test_upstream_still_forgets_the_temperature_of_old_log_probabilities():
    """Tunix 0.1.7.  When this fails, old_logps_from_actor is no longer needed with this engine."""
    import inspect

    from tunix.rl import common
    from tunix.rl.rollout.vanilla_rollout import VanillaRollout

    assert "temperature" in inspect.signature(common.compute_per_token_logps).parameters
    assert "temperature" not in inspect.getsource(VanillaRollout.get_per_token_logps)


def test_upstream_still_ignores_rope_theta():
    """Tunix 0.1.7.  When this fails, _require_qwen3 may let other values through."""
    import jax.numpy as jnp
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3

    def logits(theta):
        config = qwen3.ModelConfig(
            num_layers=1,
            vocab_size=16,
            embed_dim=8,
            hidden_dim=8,
            num_heads=1,
            head_dim=8,
            num_kv_heads=1,
            rope_theta=theta,
            norm_eps=1e-6,
            use_tied_embedding=True,
        )
        tokens = jnp.arange(8)[None]
        mask = jnp.tril(jnp.ones((1, 8, 8), bool))
        return qwen3.Qwen3(config, rngs=nnx.Rngs(0))(tokens, jnp.arange(8)[None], None, mask)[0]

    assert jnp.array_equal(logits(10_000), logits(1_000_000))
