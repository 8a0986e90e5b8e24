"""GRPO in one file: it computes what Tunix and MaxText compute, and it teaches the tiny model as much as they do."""

import functools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import of_plain_grpo
import optax
import pytest
from flax import nnx
from helpers import untied
from tunix.rl import rl_cluster

from grpo_lib import plain_grpo
from grpo_lib.common.errors import CourseError
from grpo_lib.conformance import suite
from grpo_lib.conformance.cases import cases
from grpo_lib.evaluation import evaluate
from grpo_lib.plain_grpo import Settings, group_advantages, policy_loss
from grpo_lib.problems import load_problems, training_batches
from grpo_lib.prompts import render
from grpo_lib.records import Generation
from grpo_lib.rewards import get_rewards
from grpo_train import checks, losses, training
from grpo_train.engines import conversion, tunix_sampler, weight_sync
from grpo_train.recipes import ModelRecipe, load_recipe, plain_settings
from grpo_train.tpu import random_model

PAD, EOS, VOCABULARY = 0, 1, 256  # of the tiny model's tokenizer

# Of the step that both take: prompts and group, a temperature that must divide the logits, a clip and a decay that act.
STEP = [
    "training.steps=1",
    "seed=1",  # with the batch of seed 0 the gradient of the embedding differs by 1.08e-5, just above the bar
    "training.prompts_per_step=4",
    "training.validate_every=0",
    # plain_grpo's rows.  In another order of sums MaxText, which rounds the gradient of a tied embedding to bfloat16,
    # rounds some of it the other way; test_packing.py compares the layouts with an untied one.
    "training.layout=padded",
    "training.max_grad_norm=0.1",
    "training.weight_decay=0.1",
    "grpo.group_size=8",
    "rollout.temperature=1.3",
    "problems.train=200",
]

# Of a gradient, relative.  Against the same update in float64 on an Intel Xeon with AVX-512: plain_grpo's embedding
# 1.33e-5 off ("step mean": two rows by 2^-20 each), Tunix's 2e-6; on AMD EPYC both are below 1e-5.
ROUNDING = 3e-5

# Other algorithms than GRPO: the learner and its loss against the page.  Their gradients are smaller; so is the clip.
SWITCHED = {
    "dr-grpo": ["grpo.advantage=mean", "grpo.aggregation=constant", "training.max_grad_norm=0.02"],
    "step mean": [
        "grpo.advantage=leave-one-out", "grpo.aggregation=step", "grpo.epsilon_high=0.28",
        "training.max_grad_norm=0.02",
    ],
    "masked": ["grpo.mask_truncated=true", "rollout.max_completion_length=12", "training.max_grad_norm=0.02"],
}  # fmt: skip


# --- the pieces, by known answers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "group_size", "advantages"),
    [
        ([1.0, 0, 0, 1], 2, [0.7071, -0.7071, -0.7071, 0.7071]),
        ([0.0, 0, 0, 1], 4, [-0.5, -0.5, -0.5, 1.5]),
        ([1.1] * 6, 6, [0.0] * 6),  # all earn the same, a number that has no exact binary form: nobody was better
    ],
)
def test_advantages_of_known_groups(rewards, group_size, advantages):
    np.testing.assert_allclose(group_advantages(np.array(rewards), group_size), advantages, atol=1e-5)


@pytest.mark.parametrize(("advantage", "loss"), [(1.0, -(1 + 1.2 + 0.5) / 3), (-1.0, (1 + 1.5 + 0.8) / 3)])
def test_loss_of_one_token_by_hand(advantage, loss):
    """Ratios 1, 1.5 and 0.5, ε = 0.2: only a gain is clipped, never a loss."""
    logps = np.log([[0.2], [0.3], [0.1]])
    old = np.log([[0.2], [0.2], [0.2]])
    computed = policy_loss(logps, old, np.full(3, advantage), np.ones((3, 1)), Settings())
    assert float(computed) == pytest.approx(loss)


@pytest.mark.slow
def test_loss_and_advantages_agree_with_the_conformance_suite():
    """With gradients, and on its hard cases: one token, none, ratios of 10⁶, groups without variance, padding left."""
    found = {finding.row.name: finding for finding in suite.check(of_plain_grpo.adapter)}
    assert {name: one.text for name, one in found.items() if one.status in (suite.DIFFERS, suite.ERROR)} == {}
    assert sum(one.status == suite.AGREES for one in found.values()) == 17


def test_off_policy_the_loss_is_the_librarys():
    case = cases()["mixed"]
    logps, old, advantages = (np.float32(one) for one in (case.logps, case.old_logps, case.advantages))
    mask = case.mask
    wanted, aux = losses.policy_loss(logps, losses.PolicyBatch(old, None, advantages, mask))
    assert float(aux["pg_clipfrac"]) > 0.1
    assert float(policy_loss(logps, old, advantages, mask, Settings())) == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.parametrize(
    "aggregation", ["completion", *(pytest.param(each, marks=pytest.mark.long) for each in ("constant", "step"))]
)
def test_masked_completions_are_as_if_they_were_not_there(policy, aggregation):
    """The update of four completions, two of them cut, and that of the two others: loss and weights."""
    prompts, completions = random_tokens(4, 12, 10)
    completions[[0, 2], -1] = EOS + 1  # to the last token, and no end
    completions[completions == EOS] = EOS + 1
    completions[[1, 3], 6:] = PAD
    completions[[1, 3], 5] = EOS
    advantages = np.array([1.0, -0.5, 2.0, 1.5], np.float32)
    settings = Settings(aggregation=aggregation, mask_truncated=True)
    keep = optax.GradientTransformation(
        lambda weights: jax.tree.map(jnp.zeros_like, weights),
        lambda gradient, state, weights: (jax.tree.map(jnp.zeros_like, gradient), gradient),
    )

    def update(rows):
        weights = jax.tree.map(jnp.array, policy.weights)  # a copy: the update reuses its memory
        return plain_grpo.update(
            weights, keep.init(weights), policy.config._replace(pad=PAD, ends=(EOS,)), keep, settings, prompts[rows],
            completions[rows], advantages[rows],
        )  # fmt: skip

    _, gradient, loss = update([0, 1, 2, 3])
    _, wanted, wanted_loss = update([1, 3])
    assert float(loss) == pytest.approx(float(wanted_loss), abs=1e-6)
    assert max(relative_errors(jax.tree.map(np.asarray, gradient), jax.tree.map(np.asarray, wanted)).values()) < 1e-5


# --- the model, against Tunix's own -------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["qwen3-8b", pytest.param("llama3-8b", marks=pytest.mark.long)])
def directory(tmp_path_factory, request) -> Path:
    """A model with random weights and an output matrix of its own, in Hugging Face layout."""
    return random_model.write_random_model(
        ModelRecipe(path="nobody/nothing", maxtext_name=request.param), tmp_path_factory.mktemp("model")
    )


@pytest.fixture(scope="module")
def policy(directory):
    return plain_grpo.load_policy(directory)


@pytest.fixture(scope="module")
def tunix_logits(directory):
    """Tunix's own model with the same weights, read by Tunix's own loader: tokens [B, T] -> logits [B, T, V]."""
    graph, state = nnx.split(tunix_sampler.load_hugging_face(directory))

    @jax.jit
    def logits(tokens):
        valid = tokens != PAD
        length = tokens.shape[1]
        mask = jnp.tril(jnp.ones((length, length), bool))[None] & valid[:, None]
        return nnx.merge(graph, state)(tokens, jnp.maximum(jnp.cumsum(valid, 1) - 1, 0), None, mask)[0]

    return logits


def random_tokens(rows: int, prompt: int, completion: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts of different lengths, padded on the left, and completions padded on the right."""
    rng = np.random.default_rng(1)
    prompts = rng.integers(2, VOCABULARY, (rows, prompt))
    completions = rng.integers(2, VOCABULARY, (rows, completion))
    for row in range(rows):
        prompts[row, : rng.integers(0, prompt // 2)] = PAD
        completions[row, rng.integers(completion // 2, completion + 1) :] = PAD
    return prompts.astype(np.int32), completions.astype(np.int32)


def test_log_probabilities_agree_with_tunix(policy, tunix_logits):

    prompts, completions = random_tokens(6, 12, 10)
    ours = np.asarray(plain_grpo.per_token_logps(policy.weights, policy.config, prompts, completions, 1.0))
    logps = jax.nn.log_softmax(tunix_logits(np.concatenate([prompts, completions], 1))[:, 11:-1])
    theirs = np.take_along_axis(np.asarray(logps), completions[..., None], -1)[..., 0]
    real = completions != PAD
    np.testing.assert_allclose(ours[real], theirs[real], atol=2e-5)


def greedy(policy, prompts, *ends: int) -> np.ndarray:
    config = policy.config._replace(ends=ends or (EOS,))
    return np.asarray(plain_grpo.sample(policy.weights, config, prompts, jax.random.PRNGKey(0), 10, 0.0))


def test_greedy_sampling_agrees_with_tunix(policy, tunix_logits):
    prompts, _ = random_tokens(6, 12, 1)
    # Tunix's model without a cache: all tokens again for each new one.
    tokens = np.pad(prompts, ((0, 0), (0, 10)))
    ended = np.zeros(6, bool)
    for index in range(12, 22):
        chosen = np.asarray(tunix_logits(tokens))[:, index - 1].argmax(-1)
        tokens[:, index] = np.where(ended, PAD, chosen)
        ended |= chosen == EOS
    np.testing.assert_array_equal(greedy(policy, prompts), tokens[:, 12:])


def test_sampling_stops_at_the_end_token(policy):
    prompts, _ = random_tokens(6, 12, 1)
    free = greedy(policy, prompts)
    eos = int(free[0, 3])  # a token that the model does write
    for with_end, without in zip(greedy(policy, prompts, eos), free, strict=True):
        stop = [*without, eos].index(eos) + 1
        np.testing.assert_array_equal(with_end, np.where(np.arange(10) < stop, without, PAD))


def test_every_end_token_of_the_generation_config_ends_a_completion(directory, policy, tmp_path, monkeypatch):
    """Qwen's case: a turn ends with the tokenizer's token or another one, and that one is its padding, too."""
    prompts, _ = random_tokens(6, 12, 1)
    free = greedy(policy, prompts)
    other = int(free[0, 3])  # a token that the model does write
    copy = shutil.copytree(directory, tmp_path / "model")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, other]}))
    vocabulary = {**policy.tokenizer.get_vocab(), "<|fim_pad|>": PAD}

    class Tokenizer(SimpleNamespace):
        def __len__(self):
            return len(vocabulary)

        def get_vocab(self):
            return vocabulary

    tokenizer = Tokenizer(name_or_path=str(copy), eos_token_id=EOS, pad_token_id=other, pad_token="?")
    monkeypatch.setattr(plain_grpo.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    read = plain_grpo.load_policy(copy)
    assert read.config.ends == (EOS, other)
    assert read.tokenizer.pad_token == "<|fim_pad|>"

    stopped = greedy(policy, prompts, *read.config.ends)
    for with_ends, without in zip(stopped, free, strict=True):
        stop = next((place for place, token in enumerate(without) if token in (EOS, other)), 9) + 1
        np.testing.assert_array_equal(with_ends, np.where(np.arange(10) < stop, without, PAD))
    monkeypatch.setattr(plain_grpo, "sample", lambda *_: np.array([[50, 60, other, PAD], [50, 60, 50, 60]]))
    both = plain_grpo.Policy(policy.weights, policy.config._replace(ends=(EOS, other)), policy.tokenizer)
    assert [row.truncated for row in plain_grpo.generate(both, ["2+3", "4"], 4)] == [False, True]


def test_samples_follow_the_distribution(policy):
    """The first token of 4,000 completions of one prompt, at temperature 0.5, against softmax(logits / 0.5)."""

    prompt = random_tokens(1, 12, 1)[0]
    rows = np.repeat(prompt, 4000, 0)
    drawn = np.asarray(plain_grpo.sample(policy.weights, policy.config, rows, jax.random.PRNGKey(3), 1, 0.5))[:, 0]
    logits, _ = plain_grpo.forward(policy.weights, policy.config, prompt, prompt != PAD, 1)
    wanted = np.asarray(jax.nn.softmax(logits[0, 0] / 0.5))
    assert np.abs(np.bincount(drawn, minlength=VOCABULARY) / 4000 - wanted).max() < 0.03


def test_generate_counts_tokens_and_sees_what_was_cut_off(policy, monkeypatch):
    rows = np.array([[50, 60, EOS, PAD], [50, 60, 50, 60]])
    monkeypatch.setattr(plain_grpo, "sample", lambda *_: rows)
    texts = policy.tokenizer.batch_decode([[50, 60], [50, 60, 50, 60]])
    assert plain_grpo.generate(policy, ["2+3", "a longer one"], 4) == [
        Generation(texts[0], 3, False),
        Generation(texts[1], 4, True),
    ]


# --- one batch, two implementations ---------------------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("tied", marks=pytest.mark.long(minutes=4)),
        *(pytest.param(name, marks=pytest.mark.nightly(minutes=4)) for name in ("untied", "dr-grpo")),
        pytest.param("step mean", marks=pytest.mark.nightly),
    ],
)
def both(request, root, converted_base, tmp_path_factory):
    """One step of MaxText and Tunix, with all that it computed on the way, and plain_grpo's policy from before it.

    tied: the course's tiny model. untied: the same with an output matrix of its own. The others: see SWITCHED.
    """
    folder = tmp_path_factory.mktemp(request.param)
    model = root / "assets" / "tiny-base"
    checkpoint = converted_base
    if request.param == "untied":
        model = untied(folder / "model", model, noise=0.1)
    changes = [*STEP, f"model.path={model}", *SWITCHED.get(request.param, [])]
    recipe = load_recipe(root / "recipes" / "tiny-cpu.yaml", changes)
    if request.param == "untied":
        checkpoint = conversion.convert_to_maxtext(recipe.model, folder / "checkpoint")
    session = training.build_session(checks.check(recipe), folder / "run", checkpoint)
    theirs = watch_the_update(session)
    training.train(session)
    return SimpleNamespace(recipe=recipe, policy=plain_grpo.load_policy(model), theirs=theirs)


def watch_the_update(session) -> SimpleNamespace:
    """Keep what Tunix's update of the actor is given and does; filled when the session has trained one step."""
    seen = SimpleNamespace()
    trainer = session.cluster.actor_trainer
    update_actor = session.cluster.update_actor
    compute_rewards = session.learner._compute_rewards

    def rewards(*arguments, **more):
        seen.rewards = compute_rewards(*arguments, **more)
        return seen.rewards

    @nnx.jit
    def loss_and_gradient(model, example):
        inputs = {"train_example": example, "algo_config": session.learner.algo_config}
        (loss, _), gradient = nnx.value_and_grad(trainer.loss_fn, has_aux=True)(model, **inputs)
        return loss, gradient

    def update(examples, *rest):
        (example,) = examples
        others = np.random.default_rng(0).normal(size=example.advantages.shape).astype(np.float32)
        seen.example = example
        seen.other_advantages = others
        seen.before = as_plain(trainer.model)
        with session.cluster._get_mesh_and_logical_axis_rules_cm(rl_cluster.Role.ACTOR):
            loss, gradient = loss_and_gradient(trainer.model, example)
            seen.loss = float(loss)
            seen.gradient = as_plain(gradient)
            other = example.replace(advantages=jnp.asarray(others))
            seen.other_loss = float(loss_and_gradient(trainer.model, other)[0])
        update_actor(examples, *rest)
        seen.after = as_plain(trainer.model)
        seen.momentum = as_plain(optax.tree.get(trainer.optimizer.opt_state, "mu"))  # Adam's

    session.learner._compute_rewards = rewards
    session.cluster.update_actor = update
    return seen


def as_plain(tree) -> dict[str, np.ndarray]:
    """MaxText's parameters, or a tree of the same shape, by plain_grpo's names and in its shapes."""
    state = nnx.state(tree, nnx.Param) if isinstance(tree, nnx.Module) else tree
    names = {"embedder.input_embedding": "embed_tokens", "final_norm.w": "norm", "lm_head.w": "lm_head"}
    arrays = {}
    for tunix_name, _, weight in weight_sync.translate(weight_sync.by_name(state)):
        array = np.asarray(weight)
        name = names.get(tunix_name) or tunix_name.replace("attn.", "self_attn.").rsplit(".", 1)[0]
        if name.endswith("o_proj"):
            array = array.reshape(-1, array.shape[-1])  # [heads, head_dim, D] -> [heads * head_dim, D]
        elif name.endswith("_proj"):
            array = array.reshape(len(array), -1)  # [D, heads, head_dim] -> [D, heads * head_dim]
        arrays[name] = array.T if name == "lm_head" else array
    return arrays


def plain_update(both, optimizer, advantages):
    """plain_grpo's update of the batch that Tunix had, with (weights, opt_state, loss) as NumPy arrays."""

    weights = jax.tree.map(jnp.array, both.policy.weights)  # a copy: the update reuses its memory
    example = both.theirs.example
    result = plain_grpo.update(
        weights, optimizer.init(weights), both.policy.config, optimizer, plain_settings(both.recipe),
        np.asarray(example.prompt_ids), np.asarray(example.completion_ids), advantages,
    )  # fmt: skip
    return jax.tree.map(np.asarray, result)


def norm(arrays) -> float:
    """The Euclidean norm over all arrays."""
    return float(np.sqrt(sum(np.square(array).sum() for array in arrays.values())))


def relative_errors(ours, theirs) -> dict[str, float]:
    """|ours - theirs| / |theirs| of each weight, by the Euclidean norm of that weight alone: the strictest of the
    usual ones, since no small weight can hide behind a large one."""
    assert ours.keys() == theirs.keys()
    distances = {name: np.linalg.norm(ours[name] - theirs[name]) for name in theirs}
    return {name: float(distances[name] / np.linalg.norm(theirs[name])) for name in theirs}


@pytest.mark.slow
def test_same_rewards_and_advantages(both):
    recipe = both.recipe
    policy = both.policy
    example = both.theirs.example
    to_prompt = functools.partial(render, policy.tokenizer, system="")
    problems = load_problems(recipe.problems, "train")
    batch = next(training_batches(problems, to_prompt, recipe.plan.prompts_per_step, recipe.seed))
    prompts = np.repeat(plain_grpo.encode(policy, batch["prompts"], example.prompt_ids.shape[1]), 8, 0)
    np.testing.assert_array_equal(prompts, example.prompt_ids)
    completions = policy.tokenizer.batch_decode(np.asarray(example.completion_ids), skip_special_tokens=True)
    golds = np.repeat(batch["answer"], 8)
    rewards = np.sum([reward(None, completions, answer=golds) for reward in get_rewards(recipe.rewards)], 0)
    np.testing.assert_allclose(rewards, both.theirs.rewards, rtol=1e-12)
    assert np.any(example.advantages)
    np.testing.assert_allclose(
        group_advantages(rewards, 8, recipe.grpo.advantage), example.advantages, rtol=1e-5, atol=1e-7
    )


@pytest.mark.slow
def test_same_loss(both):
    """On policy the advantages of a group cancel, and the loss is rounding alone; with others it is a number."""
    sgd = optax.sgd(0.1)
    *_, loss = plain_update(both, sgd, np.asarray(both.theirs.example.advantages))
    assert abs(loss - both.theirs.loss) < 1e-6
    *_, loss = plain_update(both, sgd, both.theirs.other_advantages)
    assert abs(loss) > 0.01
    assert float(loss) == pytest.approx(both.theirs.other_loss, rel=1e-5)


@pytest.mark.slow
def test_same_gradients(both):
    """An optimizer that changes nothing, and whose state is the gradient, shows what the compiled update computes."""
    keep = optax.GradientTransformation(
        lambda weights: jax.tree.map(jnp.zeros_like, weights),
        lambda gradient, state, weights: (jax.tree.map(jnp.zeros_like, gradient), gradient),
    )
    _, gradient, _ = plain_update(both, keep, np.asarray(both.theirs.example.advantages))
    assert max(relative_errors(gradient, both.theirs.gradient).values()) < ROUNDING


@pytest.mark.slow
def test_same_weights_after_the_update(both):
    recipe = both.recipe
    theirs = both.theirs
    assert relative_errors(both.policy.weights, theirs.before) == dict.fromkeys(theirs.before, 0.0)
    assert norm(theirs.gradient) > 2 * recipe.training.max_grad_norm  # the clip acts
    optimizer = plain_grpo.make_optimizer(plain_settings(recipe))
    weights, state, _ = plain_update(both, optimizer, np.asarray(theirs.example.advantages))
    assert max(relative_errors(weights, theirs.after).values()) < 1e-5
    # AdamW's first step hardly depends on the size of the gradient, so the clip shows in its state: its first moment.
    momentum = optax.tree.get(state, "mu")
    assert max(relative_errors(momentum, theirs.momentum).values()) < ROUNDING
    clipped = norm(momentum) / (1 - recipe.training.b1)
    assert clipped == pytest.approx(recipe.training.max_grad_norm, rel=1e-4)
    # What the step changed, without the weight that it started from.  Adam divides a gradient by its own size, and so
    # makes rounding as large as a gradient where that is near 0: the bar is 1 %, not 1e-5.
    ours, wanted = ({name: after[name] - theirs.before[name] for name in after} for after in (weights, theirs.after))
    assert max(relative_errors(ours, wanted).values()) < 0.01
    rate = recipe.training.learning_rate / recipe.training.warmup_steps  # the schedule's first, not 0
    assert np.abs(wanted["embed_tokens"]).max() == pytest.approx(rate, rel=0.1)


# --- alone ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.long
def test_it_lifts_the_tiny_model_as_far_as_the_course_does(root, tiny_recipe):
    """The course's own recipe, all of its steps: greedy accuracy on the 1,000 test problems."""
    policy = plain_grpo.load_policy(root / tiny_recipe.model.path)
    to_prompt = functools.partial(render, policy.tokenizer, system="")
    problems = load_problems(tiny_recipe.problems, "test")
    length = tiny_recipe.rollout.max_completion_length
    generate = functools.partial(plain_grpo.generate, policy, max_completion_length=length)

    def accuracy() -> float:
        return evaluate(generate, problems, render=to_prompt, batch_size=250, progress=False).summary()["accuracy"]

    course = json.loads((root / "assets" / "reference" / "course" / "summary.json").read_text(encoding="utf-8"))
    assert accuracy() == pytest.approx(course["before"]["accuracy"], abs=0.005)
    rows = list(plain_grpo.train(plain_settings(tiny_recipe), load_problems(tiny_recipe.problems, "train"), policy))
    assert [row["step"] for row in rows] == list(range(1, tiny_recipe.training.steps + 1))
    assert accuracy() >= 0.93


@pytest.mark.parametrize(
    "change",
    ["grpo.beta=0.1", "grpo.iterations=2", "training.schedule=cosine", "lora.rank=2",
     "prompts.user=boxed"],
)  # fmt: skip
def test_a_switch_that_the_plain_loop_has_not_is_refused(root, change):

    with pytest.raises(CourseError, match=change.partition("=")[0]):
        plain_settings(load_recipe(root / "recipes" / "tiny-cpu.yaml", [change]))


def test_another_architecture_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gemma"}')
    with pytest.raises(ValueError, match="gemma"):
        plain_grpo.load_policy(tmp_path)
