"""The page in which the model learns (docs/tab) does the same GRPO as grpo_lib."""

import functools
import importlib.util
import json
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_lib import plain_grpo
from grpo_lib.prompts import render

SETTINGS = plain_grpo.Settings(
    prompts_per_step=16,
    max_completion_length=24,
    rewards=("correct_answer", "tidy_format"),
    learning_rate=3e-4,
    system="",
)


@pytest.fixture(scope="session")
def tab(root: Path):
    """dev/tools/tab.py."""
    spec = importlib.util.spec_from_file_location("tab", root / "dev" / "tools" / "tab.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def folder(tab, tmp_path_factory) -> Path:
    """A folder with what the tests in Node read."""
    folder = tmp_path_factory.mktemp("tab")
    (folder / "data.json").write_text(json.dumps(tab.data_of()))
    shutil.copy(tab.ENGINE, folder / "engine.wasm")
    tab.flat_weights().tofile(folder / "weights.f32")
    return folder


@pytest.fixture(scope="session")
def node(root: Path, folder: Path):
    """Runs tests/tab/NAME.mjs and returns what it says last."""
    program = shutil.which("node")
    if program is None:
        pytest.skip("node: no Node.js found; install it (in Debian: nodejs)")

    def run(name: str, *options: str):
        command = [program, str(root / "tests" / "tab" / f"{name}.mjs"), str(folder), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def first_step(tab, folder: Path):
    """The first step of the course's own recipe, by plain_grpo: 16 groups of 8."""
    from grpo_lib.problems import training_batches, words
    from grpo_lib.rewards import get_rewards

    policy = plain_grpo.load_policy(tab.MODEL)
    to_prompt = functools.partial(render, policy.tokenizer, system="")
    batch = next(training_batches(words.generate("train", 1000, seed=0), to_prompt, SETTINGS.prompts_per_step, 0))
    prompts = np.repeat(plain_grpo.encode(policy, batch["prompts"]), SETTINGS.group_size, 0)
    golds = np.repeat(batch["answer"], SETTINGS.group_size)
    key = jax.random.PRNGKey(0)
    ids = np.asarray(plain_grpo.sample(policy.weights, policy.config, prompts, key, 24, 1.0))
    texts = policy.tokenizer.batch_decode(ids, skip_special_tokens=True)
    rewards = np.sum([reward(None, texts, answer=golds) for reward in get_rewards(SETTINGS.rewards)], 0)
    advantages = plain_grpo.group_advantages(rewards, SETTINGS.group_size)
    logps = np.asarray(plain_grpo.per_token_logps(policy.weights, policy.config, prompts, ids, 1.0))
    old = logps + 0.3 * np.random.default_rng(0).standard_normal(logps.shape).astype(np.float32)
    step = {"policy": policy, "advantages": advantages, "logps": logps, "mask": ids != policy.config.pad}
    for name, old_logps in (("on_policy", None), ("off_policy", old)):
        step[name] = _loss_and_gradient(policy, prompts, ids, advantages, old_logps)
    step["updated"] = _updated(policy, prompts, ids, advantages)

    def groups(rows):
        return [rows[i : i + SETTINGS.group_size] for i in range(0, len(rows), SETTINGS.group_size)]

    unpadded = [row[row != policy.config.pad].tolist() for row in ids]
    sent = {
        "prompts": [row[row != policy.config.pad].tolist() for row in prompts[:: SETTINGS.group_size]],
        "completions": groups(unpadded),
        "rewards": groups(rewards.tolist()),
        "old_logps": groups([row[: len(tokens)].tolist() for row, tokens in zip(old, unpadded, strict=True)]),
        "settings": vars(SETTINGS),
    }
    (folder / "first_step.json").write_text(json.dumps(sent))
    greedy = plain_grpo.sample(policy.weights, policy.config, prompts[:: SETTINGS.group_size], key, 24, 0.0)
    step["greedy"] = [row[row != policy.config.pad].tolist() for row in np.asarray(greedy)]
    return step


def _loss_and_gradient(policy, prompts, ids, advantages, old_logps):
    mask = ids != policy.config.pad

    def loss_of(weights):
        logps = plain_grpo.per_token_logps(weights, policy.config, prompts, ids, 1.0)
        old = jax.lax.stop_gradient(logps) if old_logps is None else old_logps
        return plain_grpo.policy_loss(logps, old, jnp.asarray(advantages, jnp.float32), mask, SETTINGS)

    return jax.value_and_grad(loss_of)(policy.weights)


def _updated(policy, prompts, ids, advantages):
    optimizer = plain_grpo.make_optimizer(SETTINGS)
    weights = jax.tree.map(jnp.array, policy.weights)  # update gives its own away
    state = optimizer.init(weights)
    changed = jnp.asarray(advantages, jnp.float32)
    return plain_grpo.update(weights, state, policy.config, optimizer, SETTINGS, prompts, ids, changed)[0]


def _flat(tab, weights, layers: int) -> np.ndarray:
    """plain_grpo's weights in the engine's order."""
    parts = []
    for name in tab.names_of_weights(layers):
        part = np.asarray(weights[name.removeprefix("model.").removesuffix(".weight")])
        parts.append((part.T if "_proj" in name else part).ravel())
    return np.concatenate(parts)


def _distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def test_the_first_step_is_that_of_plain_grpo(tab, node, folder, first_step):
    """Log-probabilities, advantages, both losses with their gradients, greedy answers, and the weights after AdamW."""
    ours = node("first_step")
    layers = first_step["policy"].config.layers
    logps = np.concatenate([logp for group in ours["logps"] for logp in group])
    assert np.abs(logps - first_step["logps"][first_step["mask"]]).max() < 1e-4
    assert np.ravel(ours["advantages"]) == pytest.approx(first_step["advantages"], abs=1e-6)
    assert ours["greedy"] == first_step["greedy"]
    for name in ("on_policy", "off_policy"):
        loss, gradient = first_step[name]
        assert ours[name]["loss"] == pytest.approx(float(loss), rel=1e-4, abs=1e-6), name
        assert ours[name]["norm"] == pytest.approx(float(optax.global_norm(gradient)), rel=1e-4), name
        written = np.fromfile(folder / f"gradient_{name}.f32", np.float32)
        assert _distance(written, _flat(tab, gradient, layers)) < 1e-4, name
    start = tab.flat_weights()
    change = np.fromfile(folder / "updated.f32", np.float32) - start
    assert _distance(change, _flat(tab, first_step["updated"], layers) - start) < 1e-3
