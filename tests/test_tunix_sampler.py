"""Tunix's sampler as the course uses it: noise, end tokens, greedy generation."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tunix.generate.sampler import sample_top_p

from grpo_lib.common.errors import CourseError
from grpo_lib.engines.tunix_models import model_config
from grpo_lib.engines.tunix_sampler import TunixSampler, greedy_generate, top_k_top_p_filter
from grpo_lib.runs import multihost

pytestmark = pytest.mark.slow

PROMPTS = [f"<|im_start|>user\nAna has {n} cards.<|im_end|>\n<|im_start|>assistant\n" for n in range(3, 11)]


def test_every_call_draws_fresh_noise_and_a_seed_repeats_it(sampler, rollout_config, tiny_actor, tokenizer):
    first, second = sampler.generate(PROMPTS, rollout_config).text, sampler.generate(PROMPTS, rollout_config).text
    assert first != second
    again = TunixSampler(tiny_actor.module, tokenizer, tiny_actor.mesh, rollout_config, seed=7)
    assert again.generate(PROMPTS, rollout_config).text == first
    again.calls = 1  # what a resumed run does
    assert again.generate(PROMPTS, rollout_config).text == second


def test_a_completion_does_not_depend_on_its_neighbours(sampler, rollout_config, tiny_actor, tokenizer):
    """The same step in one micro-batch, in two, and in halves, as two processes sample it."""

    def sample(prompts, calls=1, **place):
        engine = TunixSampler(tiny_actor.module, tokenizer, tiny_actor.mesh, rollout_config, seed=7, **place)
        parts = (prompts[len(prompts) * n // calls : len(prompts) * (n + 1) // calls] for n in range(calls))
        return [text for part in parts for text in engine.generate(part, rollout_config).text]

    whole = sample(PROMPTS)
    assert len(set(whole)) > 1
    assert sample(PROMPTS, calls=2, num_rollout_micro_batches=2) == whole
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multihost, "process_slice", lambda number: slice(4, number))
        assert sample(PROMPTS) == whole[4:]


@settings(max_examples=20)  # each compiles
@given(
    scores=arrays(np.float32, (2, 12), elements=st.floats(-8, 8, width=32), unique=True),
    top_p=st.floats(0.05, 1),
    top_k=st.none() | st.integers(1, 12),
)
def test_the_cut_keeps_what_tunix_keeps(scores, top_p, top_k):
    """Against the indices that Tunix's own sampling can return, over many draws of its noise."""
    kept = np.isfinite(np.asarray(top_k_top_p_filter(scores, top_p, top_k)))
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


def test_completions_keep_their_end_token_unless_truncated(sampler, rollout_config):
    output = sampler.generate(PROMPTS, dataclasses.replace(rollout_config, temperature=0.3))
    for ids, truncated, length in zip(output.tokens, sampler.truncated, sampler.lengths, strict=True):
        assert (ids[-1] == sampler.eos_id()) is not truncated
        assert len(ids) == length <= rollout_config.max_tokens_to_generate
        assert sampler.eos_id() not in ids[:-1]


def test_greedy_generate_does_not_depend_on_the_batch(sampler, tokenizer):
    one = greedy_generate(sampler.module_and_state, tokenizer, max_completion_length=12, batch_size=8)
    other = greedy_generate(sampler.module_and_state, tokenizer, max_completion_length=12, batch_size=3)
    together = one(PROMPTS)
    assert [g.text for g in together] == [other([prompt])[0].text for prompt in PROMPTS]
    assert all(g.tokens <= 12 and (g.tokens == 12 or not g.truncated) for g in together)


def test_other_architectures_are_refused():
    with pytest.raises(CourseError, match=r"samples Qwen2\.5 and Qwen3, and this model is llama3\.1-8b"):
        model_config("llama3.1-8b", 1_000_000, {})
    with pytest.raises(CourseError, match="rope_theta"):
        model_config("qwen3-0.6b", 10_000, {})
