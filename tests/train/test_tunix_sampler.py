"""Tunix's sampler as the course uses it: noise, end tokens, greedy generation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tunix.models.qwen3 import model as qwen3

from grpo_lib.common.errors import CourseError
from grpo_train import losses
from grpo_train.engines import cluster, cpu_speed, model_files, tunix_models, tunix_sampler
from grpo_train.engines.tunix_models import model_config
from grpo_train.engines.tunix_sampler import TunixSampler, greedy_generate, make_sampler, row_keys
from grpo_train.runs import multihost

pytestmark = pytest.mark.slow

PROMPTS = [f"<|im_start|>user\nAna has {n} cards.<|im_end|>\n<|im_start|>assistant\n" for n in range(3, 11)]


def test_every_call_draws_fresh_noise_and_a_seed_repeats_it(sampler, rollout_config, tiny_actor, tokenizer):
    first = sampler.generate(PROMPTS, rollout_config).text
    second = sampler.generate(PROMPTS, rollout_config).text
    assert first != second
    again = TunixSampler(tiny_actor.module, tokenizer, tiny_actor.mesh, rollout_config, seed=7)
    assert again.generate(PROMPTS, rollout_config).text == first
    again.calls = 1  # what a resumed run does
    assert again.generate(PROMPTS, rollout_config).text == second


@given(st.lists(st.lists(st.sampled_from([-np.inf, -1.0, 0.0, 2.0]), min_size=4, max_size=4), min_size=1, max_size=5))
def test_the_largest_value_is_where_argmax_finds_it(rows):
    values = jnp.asarray(rows, jnp.float32)
    assert np.array_equal(cpu_speed.first_largest(values), jnp.argmax(values, axis=-1))


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


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_what_is_kept_as_a_token_is_drawn_is_what_a_second_look_at_it_gives(
    sampler, rollout_config, tiny_actor, tokenizer, temperature
):
    config = dataclasses.replace(rollout_config, temperature=temperature)
    plain = TunixSampler(tiny_actor.module, tokenizer, tiny_actor.mesh, rollout_config, seed=7)
    sampler.scored_rows = 3
    assert sampler.generate(PROMPTS, config).text == plain.generate(PROMPTS, config).text
    looked_again = plain.last_scored(3, 12).logps  # it has kept none
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tunix_sampler.common, "compute_per_token_logps", None)  # nothing is computed
        kept = sampler.last_scored(3, 12).logps
    for one, other in zip(kept, looked_again, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    # More rows than were kept, another temperature, other weights: a second look.
    assert len(sampler.last_scored(8, 12).logps) == 8
    assert np.abs(sampler.last_scored(3, 12, 2.0).logps[0] - kept[0]).max() > 0.01
    sampler.update_params(jax.tree.map(lambda weight: 1.05 * weight, tiny_actor.weights()))
    assert np.abs(sampler.last_scored(3, 12).logps[0] - kept[0]).max() > 0.01


def test_completions_keep_their_end_token_unless_truncated(sampler, rollout_config):
    output = sampler.generate(PROMPTS, dataclasses.replace(rollout_config, temperature=0.3))
    for ids, truncated, length in zip(output.tokens, sampler.truncated, sampler.lengths, strict=True):
        assert (ids[-1] == sampler.eos_id()) is not truncated
        assert len(ids) == length <= rollout_config.max_tokens_to_generate
        assert sampler.eos_id() not in ids[:-1]


def test_greedy_generate_does_not_depend_on_the_batch(sampler, tokenizer):
    by_eight = greedy_generate(sampler.module_and_state, tokenizer, max_completion_length=12, batch_size=8)
    by_three = greedy_generate(sampler.module_and_state, tokenizer, max_completion_length=12, batch_size=3)
    together = by_eight(PROMPTS)
    assert [generation.text for generation in together] == [by_three([prompt])[0].text for prompt in PROMPTS]
    for generation in together:
        assert generation.tokens <= 12
        assert generation.tokens == 12 or not generation.truncated


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (("gemma2-2b", 10_000), r"samples Qwen2\.5, Qwen3, Llama 3 and 3\.1, and this model is gemma2-2b"),
        (("llama (yarn)", 10_000), r"this model is llama \(yarn\)"),
        (("qwen2 (llama3)", 10_000), r"this model is qwen2 \(llama3\)"),
        (("qwen3-0.6b", 10_000), "rope_theta"),
    ],
)
def test_other_architectures_are_refused(model, words):
    with pytest.raises(CourseError, match=words):
        model_config(*model, {})


def test_the_frequencies_of_llama31_are_maxtexts():
    from maxtext.layers.embeddings import LLaMARotaryEmbedding

    sizes = {"num_heads": 1, "num_kv_heads": 1, "embed_dim": 128, "hidden_dim": 8, "vocab_size": 8, "head_dim": 128}
    published = {"rope_scaling": tunix_models.RopeScaling(**model_files.LLAMA31_SCALING), "num_layers": 1}
    config = model_config("llama3.1-8b", 500_000, sizes | published | {"norm_eps": 1e-5})
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    timescale = LLaMARotaryEmbedding(1, 500_000, mesh, embedding_dims=128).timescale.flatten()[
        ::2
    ]  # each is twice there
    found = tunix_models.inverse_frequencies(config)
    np.testing.assert_allclose(found, 1 / timescale, rtol=1e-5)
    plain = tunix_models.inverse_frequencies(dataclasses.replace(config, rope_scaling=None))
    np.testing.assert_allclose(found[-1] * 8, plain[-1])  # the slowest one
    assert found[0] == plain[0] == 1


class Letters:
    """A tokenizer whose tokens are letters, from 2 on."""

    eos_token_id = 1

    def __call__(self, texts, add_special_tokens):
        return {"input_ids": [[ord(letter) - ord("a") + 2 for letter in text] for text in texts]}

    encode = None  # Tunix asks for it, and TunixSampler does not call it

    def decode(self, ids):
        return "".join(chr(number + ord("a") - 2) for number in ids)

    bos_id = staticmethod(lambda: None)
    eos_id = staticmethod(lambda: 1)
    pad_id = staticmethod(lambda: 0)


OTHER_FAMILIES = [pytest.param(name, marks=pytest.mark.long) for name in ("qwen2.5-0.5b", "llama3.1-8b")]


@pytest.fixture(scope="module", params=["qwen3-0.6b", *OTHER_FAMILIES])
def models(request):
    """(Tunix's model, the one that shares prompts), with the same random weights, and heads that share keys."""
    sizes = {"num_layers": 2, "embed_dim": 32, "hidden_dim": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    sizes |= {"vocab_size": 28, "norm_eps": 1e-6, "use_tied_embedding": True}
    if request.param.startswith("llama3.1"):
        sizes |= {"rope_scaling": tunix_models.RopeScaling(8, 1, 4, 16), "scaled_queries": True}
    config = model_config(request.param, 1e6, sizes)
    stock = nnx.eval_shape(lambda: tunix_models.require_family(request.param).model(config, rngs=nnx.Rngs(0)))
    weights = nnx.state(stock)
    rng = np.random.default_rng(0)
    for path, weight in weights.flat_state():  # Tunix's are so small that every token would be as likely as another
        scale = 0.7 if "embedder" in path else 0.3
        values = np.ones(weight.shape) if "norm" in str(path) else rng.normal(0, scale, weight.shape)
        weight.set_value(jnp.asarray(values, jnp.float32))
    nnx.update(stock, weights)
    shared = tunix_models.abstract_model(config)
    nnx.update(shared, weights)
    return stock, shared


@pytest.mark.parametrize(
    ("group", "limit", "sampling"),
    [
        (1, 20, {}),
        (2, 20, {"temperature": 0.8, "top_p": 1.0}),
        (8, 20, {"temperature": 1.0, "top_p": 1.0}),
        (8, 1, {"temperature": 1.0, "top_p": 1.0}),
        (5, 20, {}),  # 32 rows are not so many groups
    ],
)
def test_a_shared_prompt_gives_the_texts_of_tunix(models, group, limit, sampling):
    """Tokens of the stock sampler, for prompts of 1 to 9 letters."""
    prompts = []
    rng = np.random.default_rng(0)
    for _ in range(0, 32, group):
        prompts += ["".join(rng.choice(list("abcdefgh"), rng.integers(1, 10)))] * group
    prompts = prompts[:32]
    keys = row_keys(jax.random.PRNGKey(0), np.arange(32))
    found = []
    for model in models:
        sampler = make_sampler(model, Letters(), 32)
        sampler.group = group
        more = sampling | ({"seed": jnp.array(keys)} if sampling else {})  # a copy: it is donated
        found.append(sampler(prompts, max_generation_steps=limit, max_prompt_length=9, **more))
    stock, shared = found
    assert shared.text == stock.text
    assert all(map(np.array_equal, shared.tokens, stock.tokens))
    assert len(set(stock.text)) > 2
    if limit > 1 and sampling:
        assert {len(ids) < limit for ids in stock.tokens} == {True, False}  # some end early, some are truncated


def test_top_k_of_one_is_greedy(models):
    sampler = make_sampler(models[0], Letters(), 32)
    options = {"max_generation_steps": 20, "max_prompt_length": 9}
    cut = sampler(["abc"] * 4, temperature=1.0, top_p=1.0, top_k=1, seed=jax.random.PRNGKey(0), **options)
    assert cut.text == sampler(["abc"] * 4, **options).text


CUTS = st.tuples(st.none() | st.integers(1, 12), st.floats(0.05, 1.0))
# No two of a row are equal: which of them a cut leaves is not defined.
ROW = st.lists(st.integers(-32, 32), min_size=9, max_size=9, unique=True)
NUMBERS = st.lists(ROW, min_size=3, max_size=3).map(lambda rows: np.array(rows, np.float32) / 4)


def allowed(scores, top_k, top_p):
    """Of each row [V] the tokens that top-k and top-p leave, by hand; and the probability of the others."""
    found, left_out = [], []
    for row in np.asarray(scores, np.float64):
        probabilities = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        order = np.argsort(-probabilities, kind="stable")[: top_k or len(row)]
        among_k = probabilities[order] / probabilities[order].sum()
        kept = order[np.cumsum(among_k) - among_k <= top_p]
        found.append(set(kept.tolist()))
        left_out.append(1 - probabilities[kept].sum())
    return found, left_out


@settings(max_examples=15)  # each compiles
@given(NUMBERS, CUTS)
def test_only_tokens_within_top_k_and_top_p_are_drawn_and_the_rest_is_what_is_left_out(scores, cuts):
    top_k, top_p = cuts
    tokens, left_out = allowed(scores, top_k, top_p)
    # Where the edge is within rounding, either side is right.
    nudged = [allowed(scores, top_k, min(top_p * (1 + nudge), 1.0)) for nudge in (-1e-5, 1e-5)]
    assume(all(others[0] == tokens for others in nudged))
    np.testing.assert_allclose(losses.mass_left_out(jnp.asarray(scores), 1.0, top_k, top_p), left_out, atol=2e-6)
    cut = tunix_sampler._cuts({"top_k": top_k, "top_p": top_p}, scores.shape[1])
    if not cut:
        assert all(len(row) == scores.shape[1] for row in tokens) or top_p == 1
        return
    rows = np.repeat(scores, 40, axis=0)
    keys = row_keys(jax.random.PRNGKey(0), np.arange(len(rows)))
    drawn = np.argmax(tunix_sampler._draw_from_cut(jnp.asarray(rows), keys, **cut), axis=1).reshape(len(scores), -1)
    assert all(set(row.tolist()) <= these for row, these in zip(drawn, tokens, strict=True))


def test_within_a_cut_tokens_are_drawn_in_proportion():
    scores = jnp.log(jnp.array([0.4, 0.1, 0.3, 0.2]))
    keys = row_keys(jax.random.PRNGKey(1), np.arange(6000))
    drawn = tunix_sampler._draw_from_cut(jnp.tile(scores, (6000, 1)), keys, top_k=3, top_p=0.7)
    # top-k leaves 0.4, 0.3, 0.2 of 0.9; before the third of them 7/9 have been counted, which is more than 0.7.
    np.testing.assert_allclose(np.asarray(drawn).mean(axis=0), [4 / 7, 0, 3 / 7, 0], atol=0.03)
    assert float(losses.mass_left_out(scores, 1.0, 3, 0.7)) == pytest.approx(0.3, abs=1e-6)


def test_a_cut_of_a_rollout_keeps_the_noise_of_rows(sampler, rollout_config, tiny_actor, tokenizer):
    """In micro-batches as at once; a cut that leaves all tokens is none; of one token it is greedy."""

    def sample(calls=1, **cuts):
        config = dataclasses.replace(rollout_config, **cuts)
        engine = TunixSampler(
            tiny_actor.module, tokenizer, tiny_actor.mesh, config, seed=7, num_rollout_micro_batches=calls
        )
        parts = (PROMPTS[len(PROMPTS) * n // calls : len(PROMPTS) * (n + 1) // calls] for n in range(calls))
        return [text for part in parts for text in engine.generate(part, config).text]

    whole, cut = sample(), sample(top_k=4, top_p=0.9)
    assert sample(top_k=100_000) == whole != cut == sample(calls=2, top_k=4, top_p=0.9)
    greedy = greedy_generate(sampler.module_and_state, tokenizer, max_completion_length=12, batch_size=8)
    assert sample(top_k=1) == [answer.text for answer in greedy(PROMPTS)]


def test_a_temperature_that_is_an_array_is_sampled_at_and_compiles_nothing_new(models):
    """At 0.5, by which numbers are divided without rounding, with the texts of the number 0.5."""
    sampler = make_sampler(models[1], Letters(), 32)
    rows = ["abc", "defg"] * 4
    options = {"max_generation_steps": 20, "max_prompt_length": 9, "top_p": 1.0}
    noise = functools.partial(row_keys, jax.random.PRNGKey(0), np.arange(8))

    def at(temperature, **more):
        seed = tunix_sampler.RowNoise(noise(), jnp.full(8, temperature))
        return sampler(rows, temperature=1.0, seed=seed, **options | more).text

    texts = at(0.5)
    compiled = sampler._compiled_decode_fn._cache_size()
    assert at(2.0) != texts
    assert sampler._compiled_decode_fn._cache_size() == compiled
    assert texts == sampler(rows, temperature=0.5, seed=noise(), **options).text
    assert at(0.5, top_k=3) == sampler(rows, temperature=0.5, seed=noise(), **options, top_k=3).text


def test_a_shared_prompt_is_kept_once(models):
    """Of what the sampler holds while it decodes: the cache of 16 rows, groups of 8, against one row each."""

    def held(model, group):
        sampler = make_sampler(model, Letters(), 32)
        sampler.group = group
        sampler.eos_ids = jnp.array([1])
        settings = (32, False, None, 1.0, None, None, jax.random.PRNGKey(0), None)
        state = sampler.init_sample_state(jnp.full((16, 12), 2), *settings)
        state = jax.eval_shape(sampler._prefill_fn, sampler._flattened_transformer_state, state)
        layer = state.cache["layer_0"]
        return sum(layer[name].size for name in layer if "key" in name or "value" in name or name in "kv")

    stock, shared = models
    assert held(shared, 1) == held(stock, 1) == 2 * 16 * 32 * 2 * 8  # k and v, rows, tokens, heads, size
    assert held(shared, 8) == 2 * (2 * 12 + 16 * 20) * 2 * 8


def test_the_sampler_of_a_recipe_knows_its_groups(tiny_recipe, tiny_actor, tokenizer, rollout_config):
    engine = cluster.sampler_class(
        tiny_recipe.rollout, tiny_recipe.model, tiny_recipe.plan, tensor=1, seed=0, max_length=lambda: 44
    )
    made = engine(tiny_actor.module, tokenizer, tiny_actor.mesh, rollout_config)
    assert made._sampler.group == tiny_recipe.grpo.group_size
    model = made.module_and_state()[0]
    assert type(model.layers[0].attn) is cpu_speed.Attention3
    assert type(tunix_models.abstract_model(model.config, made.mesh).layers[0].attn) is qwen3.Attention
