"""GRPO in one file: it computes what Tunix and MaxText compute, and it teaches the tiny model as much as they do."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from grpo_lib import plain_grpo
from grpo_lib.common.errors import CourseError
from grpo_lib.plain_grpo import Settings, group_advantages, policy_loss
from grpo_lib.problems import load_problems, training_batches
from grpo_lib.prompts import render
from grpo_lib.rewards import get_rewards
from grpo_train.recipes import load_recipe, plain_settings

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2, 64, 96, 4, 2, 32, 256
PAD, EOS = 0, 1  # of the tiny model's tokenizer

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

# Other algorithms than GRPO: the learner and its loss against the page.  Their gradients are smaller; so is the clip.
SWITCHED = {
    "dr-grpo": ["grpo.advantage=mean", "grpo.aggregation=constant", "training.max_grad_norm=0.02"],
    "step mean": [
        "grpo.advantage=leave-one-out", "grpo.aggregation=step", "grpo.epsilon_high=0.28",
        "training.max_grad_norm=0.02",
    ],
}  # fmt: skip


# --- the pieces, by known answers -----------------------------------------------------------------------------


def test_advantages_of_known_groups_and_tunixs():
    from tunix.rl import algo_core

    np.testing.assert_allclose(
        group_advantages(np.array([1.0, 0, 0, 1]), 2), [0.7071, -0.7071, -0.7071, 0.7071], atol=1e-5
    )
    np.testing.assert_allclose(group_advantages(np.array([0.0, 0, 0, 1]), 4), [-0.5, -0.5, -0.5, 1.5], atol=1e-5)
    rewards = np.random.default_rng(0).choice([0.0, 0.1, 1.0, 1.1], 64)
    np.testing.assert_allclose(group_advantages(rewards, 8), algo_core.compute_advantages(rewards, 8), rtol=1e-12)
    # Where all earn the same, also a number that has no exact binary form, nobody was better.
    np.testing.assert_allclose(group_advantages(np.full(6, 1.1), 6), np.zeros(6), atol=1e-6)


def test_loss_of_one_token_by_hand():
    """Ratios 1, 1.5 and 0.5, ε = 0.2: only a gain is clipped, never a loss."""

    logps, old = np.log([[0.2], [0.3], [0.1]]), np.log([[0.2], [0.2], [0.2]])
    mask, grpo = np.ones((3, 1)), Settings()
    assert float(policy_loss(logps, old, np.array([1.0, 1, 1]), mask, grpo)) == pytest.approx(-(1 + 1.2 + 0.5) / 3)
    assert float(policy_loss(logps, old, np.array([-1.0, -1, -1]), mask, grpo)) == pytest.approx((1 + 1.5 + 0.8) / 3)


def test_off_policy_the_loss_is_the_librarys():
    from grpo_train import losses

    rng = np.random.default_rng(0)
    logps, old = rng.normal(-2, 0.5, (2, 6, 10)).astype(np.float32)
    advantages, mask = rng.normal(size=6).astype(np.float32), np.arange(10) < rng.integers(1, 11, (6, 1))
    wanted, aux = losses.policy_loss(logps, old, None, advantages, mask)
    assert float(aux["pg_clipfrac"]) > 0.1
    assert float(policy_loss(logps, old, advantages, mask, Settings())) == pytest.approx(float(wanted), rel=1e-6)


# --- the model, against Tunix's own Qwen3 ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory, root) -> Path:
    """A Qwen3 with random weights and an output matrix of its own, in Hugging Face layout."""

    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(root / "assets" / "tiny-base" / name, folder / name)

    shapes = {"lm_head": (VOCABULARY, HIDDEN), "model.embed_tokens": (VOCABULARY, HIDDEN), "model.norm": (HIDDEN,)}
    for index in range(LAYERS):
        layer = {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "self_attn.q_norm": (HEAD_DIM,),
            "self_attn.k_norm": (HEAD_DIM,),
            "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN),
            "mlp.down_proj": (HIDDEN, FFN),
        }
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:  # of a norm: not all ones, or a forgotten scale would go unnoticed
            return rng.uniform(0.5, 1.5, shape).astype(np.float32)
        return rng.normal(size=shape, scale=shape[1] ** -0.5).astype(np.float32)

    tensors = {f"{name}.weight": draw(shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def policy(directory):

    return plain_grpo.load_policy(directory)


@pytest.fixture(scope="module")
def tunix_logits(directory):
    """Tunix's own Qwen3 with the same weights, read by Tunix's own loader: tokens [B, T] -> logits [B, T, V]."""
    from grpo_train.engines import tunix_sampler

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
    prompts, completions = rng.integers(2, VOCABULARY, (rows, prompt)), rng.integers(2, VOCABULARY, (rows, completion))
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


def greedy(policy, prompts, eos: int = EOS) -> np.ndarray:

    config = policy.config._replace(eos=eos)
    return np.asarray(plain_grpo.sample(policy.weights, config, prompts, jax.random.PRNGKey(0), 10, 0.0))


def test_greedy_sampling_agrees_with_tunix(policy, tunix_logits):
    prompts, _ = random_tokens(6, 12, 1)
    # Tunix's model without a cache: all tokens again for each new one.
    tokens, ended = np.pad(prompts, ((0, 0), (0, 10))), np.zeros(6, bool)
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
        ends = np.flatnonzero(without == eos)
        stop = ends[0] + 1 if len(ends) else 10
        np.testing.assert_array_equal(with_end[:stop], without[:stop])
        assert (with_end[stop:] == PAD).all()


def test_samples_follow_the_distribution(policy):
    """The first token of 4,000 completions of one prompt, at temperature 0.5, against softmax(logits / 0.5)."""

    prompt = random_tokens(1, 12, 1)[0]
    rows = np.repeat(prompt, 4000, 0)
    drawn = np.asarray(plain_grpo.sample(policy.weights, policy.config, rows, jax.random.PRNGKey(3), 1, 0.5))[:, 0]
    logits, _ = plain_grpo.forward(policy.weights, policy.config, prompt, prompt != PAD, 1)
    wanted = np.asarray(jax.nn.softmax(logits[0, 0] / 0.5))
    assert np.abs(np.bincount(drawn, minlength=VOCABULARY) / 4000 - wanted).max() < 0.03


def test_generate_counts_tokens_and_sees_what_was_cut_off(policy, monkeypatch):

    text = policy.tokenizer.decode([50, 60])
    rows = np.array([[50, 60, EOS, PAD], [50, 60, 50, 60]])
    monkeypatch.setattr(plain_grpo, "sample", lambda *_: rows)
    short, long = plain_grpo.generate(policy, ["2+3", "a longer one"], 4)
    assert (short.text, short.tokens, short.truncated) == (text, 3, False)
    assert (long.tokens, long.truncated) == (4, True)


# --- one batch, two implementations ---------------------------------------------------------------------------


@pytest.fixture(
    scope="module", params=["tied", *(pytest.param(name, marks=pytest.mark.long) for name in ("untied", *SWITCHED))]
)
def both(request, root, converted_base, tmp_path_factory):
    """One step of MaxText and Tunix, with all that it computed on the way, and plain_grpo's policy from before it.

    tied: the course's tiny model. untied: the same with an output matrix of its own. The others: see SWITCHED.
    """
    from grpo_train import training
    from grpo_train.engines import conversion

    folder = tmp_path_factory.mktemp(request.param)
    model, checkpoint = root / "assets" / "tiny-base", converted_base
    if request.param == "untied":
        model = untie(model, folder / "model")
    changes = [*STEP, f"model.path={model}", *SWITCHED.get(request.param, [])]
    recipe = load_recipe(root / "recipes" / "tiny-cpu.yaml", changes)
    if request.param == "untied":
        checkpoint = conversion.convert_to_maxtext(recipe.model, folder / "checkpoint")
    session = training.build_session(recipe, folder / "run", load_problems(recipe.problems, "train"), checkpoint)
    theirs = watch_the_update(session)
    training.train(session)
    return SimpleNamespace(recipe=recipe, policy=plain_grpo.load_policy(model), theirs=theirs)


def untie(model: Path, folder: Path) -> Path:

    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    noise = np.random.default_rng(0).normal(size=embedding.shape, scale=0.1 * embedding.std())
    tensors["lm_head.weight"] = (embedding + noise).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}), encoding="utf-8")
    return folder


def watch_the_update(session) -> SimpleNamespace:
    """Keep what Tunix's update of the actor is given and does; filled when the session has trained one step."""
    from tunix.rl import rl_cluster

    trainer, seen = session.cluster.actor_trainer, SimpleNamespace()
    update_actor, compute_rewards = session.cluster.update_actor, session.learner._compute_rewards

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
        seen.example, seen.other_advantages, seen.before = example, others, as_plain(trainer.model)
        with session.cluster._get_mesh_and_logical_axis_rules_cm(rl_cluster.Role.ACTOR):
            loss, gradient = loss_and_gradient(trainer.model, example)
            seen.loss, seen.gradient = float(loss), as_plain(gradient)
            other = example.replace(advantages=jnp.asarray(others))
            seen.other_loss = float(loss_and_gradient(trainer.model, other)[0])
        update_actor(examples, *rest)
        seen.after = as_plain(trainer.model)
        seen.momentum = as_plain(first_moment(trainer.optimizer.opt_state))

    session.learner._compute_rewards, session.cluster.update_actor = rewards, update
    return seen


def first_moment(opt_state):
    """Adam's running mean of the clipped gradient, wherever it is in an optimizer's state (Tunix wraps MultiSteps
    around the recipe's optimizer)."""

    def is_adam(node) -> bool:
        return isinstance(node, optax.ScaleByAdamState)

    (adam,) = filter(is_adam, jax.tree.leaves(opt_state, is_leaf=is_adam))
    return adam.mu


def as_plain(tree) -> dict[str, np.ndarray]:
    """MaxText's parameters, or a tree of the same shape, by plain_grpo's names and in its shapes."""

    from grpo_train.engines import weight_sync

    state = nnx.state(tree, nnx.Param) if isinstance(tree, nnx.Module) else tree
    names = {"embedder.input_embedding": "embed_tokens", "final_norm.w": "norm", "lm_head.w": "lm_head"}
    found = {}
    for name, _, array in weight_sync.translate(weight_sync.by_name(state)):
        array, own = np.asarray(array), names.get(name) or name.replace("attn.", "self_attn.").rsplit(".", 1)[0]
        if own.endswith("o_proj"):
            array = array.reshape(-1, array.shape[-1])  # [heads, head_dim, D] -> [heads * head_dim, D]
        elif own.endswith("_proj"):
            array = array.reshape(len(array), -1)  # [D, heads, head_dim] -> [D, heads * head_dim]
        found[own] = array.T if own == "lm_head" else array
    return found


def plain_update(both, optimizer, advantages):
    """plain_grpo's update of the batch that Tunix had, with (weights, opt_state, loss) as NumPy arrays."""

    weights = jax.tree.map(jnp.array, both.policy.weights)  # a copy: the update reuses its memory
    example = both.theirs.example
    result = plain_grpo.update(
        weights, optimizer.init(weights), both.policy.config, optimizer, plain_settings(both.recipe),
        np.asarray(example.prompt_ids), np.asarray(example.completion_ids), advantages,
    )  # fmt: skip
    return jax.tree.map(np.asarray, result)


def relative_errors(ours, theirs) -> dict[str, float]:
    """|ours - theirs| / |theirs| of each weight, by the Euclidean norm of that weight alone: the strictest of the
    usual ones, since no small weight can hide behind a large one."""
    assert ours.keys() == theirs.keys()
    norm = np.linalg.norm
    return {name: float(norm(ours[name] - theirs[name]) / norm(theirs[name])) for name in theirs}


@pytest.mark.slow
def test_same_rewards_and_advantages(both):

    recipe, policy, example = both.recipe, both.policy, both.theirs.example
    to_prompt = functools.partial(render, policy.tokenizer, system="")
    problems = load_problems(recipe.problems, "train")
    batch = next(training_batches(problems, to_prompt, recipe.prompts_per_step, recipe.seed))
    prompts = np.repeat(plain_grpo.encode(policy, batch["prompts"], example.prompt_ids.shape[1]), 8, 0)
    np.testing.assert_array_equal(prompts, example.prompt_ids)
    completions = policy.tokenizer.batch_decode(np.asarray(example.completion_ids), skip_special_tokens=True)
    golds = np.repeat(batch["answer"], 8)
    rewards = np.sum([reward(None, completions, answer=golds) for reward in get_rewards(recipe.rewards)], 0)
    np.testing.assert_allclose(rewards, both.theirs.rewards, rtol=1e-12)
    assert np.any(example.advantages)
    ours = group_advantages(rewards, 8, recipe.grpo.advantage)
    np.testing.assert_allclose(ours, example.advantages, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_same_loss(both):
    """On policy the advantages of a group cancel, and the loss is rounding alone; with others it is a number."""

    example, sgd = both.theirs.example, optax.sgd(0.1)
    *_, loss = plain_update(both, sgd, np.asarray(example.advantages))
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
    errors = relative_errors(gradient, both.theirs.gradient)
    print("gradients:", max(errors.items(), key=lambda item: item[1]))
    assert max(errors.values()) < 1e-5


@pytest.mark.slow
def test_same_weights_after_the_update(both):

    recipe, theirs = both.recipe, both.theirs
    assert relative_errors(both.policy.weights, theirs.before) == dict.fromkeys(theirs.before, 0.0)
    total = np.sqrt(sum(np.square(part).sum() for part in theirs.gradient.values()))
    assert total > 2 * recipe.training.max_grad_norm  # the clip acts
    optimizer = plain_grpo.make_optimizer(plain_settings(recipe))
    weights, state, _ = plain_update(both, optimizer, np.asarray(theirs.example.advantages))
    errors = relative_errors(weights, theirs.after)
    print("weights:", max(errors.items(), key=lambda item: item[1]))
    assert max(errors.values()) < 1e-5
    # AdamW's first step hardly depends on the size of the gradient, so the clip shows in its state: its first moment.
    momentum = first_moment(state)
    assert max(relative_errors(momentum, theirs.momentum).values()) < 1e-5
    clipped = np.sqrt(sum(np.square(part).sum() for part in momentum.values())) / (1 - recipe.training.b1)
    assert clipped == pytest.approx(recipe.training.max_grad_norm, rel=1e-4)
    # What the step changed, without the weight that it started from.  Adam divides a gradient by its own size, and so
    # makes rounding as large as a gradient where that is near 0: the bar is 1 %, not 1e-5.
    ours, wanted = ({name: after[name] - theirs.before[name] for name in after} for after in (weights, theirs.after))
    errors = relative_errors(ours, wanted)
    print("changes:", max(errors.items(), key=lambda item: item[1]))
    assert max(errors.values()) < 0.01
    rate = recipe.training.learning_rate / recipe.training.warmup_steps  # the schedule's first, not 0
    assert np.abs(wanted["embed_tokens"]).max() == pytest.approx(rate, rel=0.1)


# --- alone ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.long
def test_it_lifts_the_tiny_model_as_far_as_the_course_does(root, tiny_recipe):
    """The course's own recipe, all of its steps: greedy accuracy on the 1,000 test problems."""
    from grpo_lib.evaluation import evaluate

    policy = plain_grpo.load_policy(root / tiny_recipe.model.path)
    to_prompt = functools.partial(render, policy.tokenizer, system="")
    problems = load_problems(tiny_recipe.problems, "test")
    length = tiny_recipe.evaluation_completion_length
    generate = functools.partial(plain_grpo.generate, policy, max_completion_length=length)

    def accuracy() -> float:
        return evaluate(generate, problems, render=to_prompt, batch_size=250, progress=False).summary()["accuracy"]

    before = accuracy()
    rows = list(plain_grpo.train(plain_settings(tiny_recipe), load_problems(tiny_recipe.problems, "train"), policy))
    after = accuracy()
    print(f"plain_grpo alone: {before:.1%} -> {after:.1%} of {len(problems)} problems")
    assert [row["step"] for row in rows] == list(range(1, tiny_recipe.training.steps + 1))
    course = json.loads((root / "assets" / "reference" / "course" / "summary.json").read_text(encoding="utf-8"))
    assert before == pytest.approx(course["before"]["accuracy"], abs=0.005)
    assert after >= 0.93


@pytest.mark.parametrize(
    "change",
    ["grpo.beta=0.1", "grpo.iterations=2", "training.schedule=cosine", "lora.rank=2", "rollout.final_temperature=0.7",
     "prompts.user=boxed"],
)  # fmt: skip
def test_a_switch_that_the_plain_loop_has_not_is_refused(root, change):

    with pytest.raises(CourseError, match=change.partition("=")[0]):
        plain_settings(load_recipe(root / "recipes" / "tiny-cpu.yaml", [change]))


def test_another_architecture_is_refused(directory, tmp_path):

    shutil.copytree(directory, tmp_path / "llama")
    config = json.loads((directory / "config.json").read_text(encoding="utf-8")) | {"model_type": "llama"}
    (tmp_path / "llama" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match="holds a llama model; plain_grpo reads qwen3"):
        plain_grpo.load_policy(tmp_path / "llama")
