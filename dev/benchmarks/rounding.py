"""Do small steps arrive in bfloat16 weights?  SmolLM2-135M, 20 supervised updates, its weights kept in three ways.

    make real-model
    python dev/benchmarks/rounding.py                # minutes on two cores
    python dev/benchmarks/rounding.py --json         # and write assets/reference/rounding.json

All three begin with the same weights (rounded to bfloat16 once), see the same batches of four worked word problems and
compute in float32; only the optimizer differs.  The loss is the cross entropy of the solutions, on 32 other problems.
`applied`: <Δw, u> / <u, u> of the stored weights, the mean of all updates; `moved`: the share of the weights that an
update changes; `seconds`: the median of the updates, which compute the same but for the rounding; the three take turns.
2e-5 is to this model's weights about what 3e-6 is to those of a model of 1.7 to 8 billion parameters.
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

import hand_jitted  # noqa: F401  # prepares the environment, so before jax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from job import ROOT, machine
from tqdm import tqdm

from grpo_lib import plain_grpo
from grpo_lib.common.files import write_json_atomic
from grpo_lib.problems import load_problems
from grpo_lib.prompts import template_completion
from grpo_train.engines.optimizer import rounded
from grpo_train.engines.tokens import Renderer
from grpo_train.recipes import Recipe, load_recipe

RECIPE = ROOT / "recipes/smollm2-135m-cpu.yaml"
RATES = (3e-6, 2e-5)
STORAGE = {"float32": None, "bfloat16, nearest": "nearest", "bfloat16, stochastic": "stochastic"}
UPDATES, BATCH, OTHERS, WARMUP = 20, 4, 32, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="write assets/reference/rounding.json")
    arguments = parser.parse_args()
    recipe = load_recipe(RECIPE)
    policy = plain_grpo.load_policy(ROOT / recipe.model.path)
    batches, others = rows_of(recipe, policy)
    result: dict[str, Any] = {"command": "python dev/benchmarks/rounding.py --json", "updates": UPDATES, "runs": []}
    started = time.perf_counter()
    for rate in RATES:
        for run in compare(policy, rate, batches, others):
            result["runs"].append(run)
            loss = f"loss {run['before']:.3f} -> {run['after']:.3f}"
            arrived = f"applied {run['applied']:.3f}   moved {run['moved']:.2%}"
            tqdm.write(f"{rate:g}  {run['weights']:22}{loss}   {arrived}   {run['seconds']:.2f} s an update")
    result |= {"seconds": round(time.perf_counter() - started), "machine": machine()}
    if arguments.json:
        write_json_atomic(ROOT / "assets/reference/rounding.json", result)


def rows_of(recipe: Recipe, policy: plain_grpo.Policy) -> tuple[list[Any], Any]:
    """The batches, and what is measured on: pairs of token ids, (prompts [N, P], completions [N, C])."""
    render = Renderer(recipe.prompts, policy.tokenizer)
    problems = load_problems(recipe.problems, "train")[: OTHERS + UPDATES * BATCH]
    end = policy.tokenizer.eos_token
    solutions = [template_completion(problem.solution, problem.answer) + end for problem in problems]
    prompts = plain_grpo.encode(policy, [problem.prompt(render) for problem in problems])
    ids = policy.tokenizer(solutions, add_special_tokens=False)["input_ids"]
    width = max(map(len, ids))
    pad = policy.config.pad
    completions = np.array([row + [pad] * (width - len(row)) for row in ids], np.int32)
    pairs = [(prompts[at : at + BATCH], completions[at : at + BATCH]) for at in range(OTHERS, len(problems), BATCH)]
    return pairs, (prompts[:OTHERS], completions[:OTHERS])


def compare(policy: plain_grpo.Policy, rate: float, batches: list[Any], others: Any) -> list[dict[str, Any]]:
    """All ways of storing, in turn on each batch: a machine that slows down slows them alike."""
    measure = jax.jit(functools.partial(loss_of, policy.config))
    arms = {name: start(policy, rate, name) for name in STORAGE}
    updates: dict[str, list[tuple[float, float, float]]] = {name: [] for name in STORAGE}
    before = {name: float(measure(weights, *others)) for name, (weights, *_) in arms.items()}
    for batch in tqdm(batches, desc=f"{rate:g}", leave=False):
        for name, (weights, state, update) in arms.items():
            started = time.perf_counter()
            weights, state, share = update(weights, state, *batch)
            applied = float(state.applied)  # waits for the update
            moved = float(share)
            updates[name].append((applied, moved, time.perf_counter() - started))
            arms[name] = weights, state, update
    runs = []
    for name, (weights, *_) in arms.items():
        all_applied, all_moved, all_seconds = zip(*updates[name], strict=True)
        run = {
            "rate": rate,
            "weights": name,
            "before": before[name],
            "after": float(measure(weights, *others)),
            "applied": float(np.mean(all_applied)),
            "moved": float(np.mean(all_moved)),
            "seconds": float(np.median(all_seconds)),
        }
        runs.append(run)
    return runs


def loss_of(config: Any, weights: Any, prompts: Any, completions: Any) -> jax.Array:
    """The mean cross entropy of the completions' tokens, computed in float32."""
    full = jax.tree.map(lambda array: array.astype(jnp.float32), weights)
    logps = plain_grpo.per_token_logps(full, config, prompts, completions, 1.0)
    mask = completions != config.pad
    return -(logps * mask).sum() / mask.sum()


def start(policy: plain_grpo.Policy, rate: float, name: str) -> tuple[Any, Any, Any]:
    """(weights, the optimizer's state, the update), of weights that are stored as `name` says."""
    weights = jax.tree.map(lambda array: jnp.asarray(array, jnp.bfloat16), policy.weights)
    if STORAGE[name] is None:
        weights = jax.tree.map(lambda array: array.astype(jnp.float32), weights)
    schedule = optax.warmup_constant_schedule(rate / WARMUP, rate, WARMUP)
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b1=0.9, b2=0.99, weight_decay=0.0))
    optimizer = rounded(chain, STORAGE[name] or "nearest", "float32", seed=0)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(weights: Any, state: Any, prompts: Any, completions: Any) -> tuple[Any, Any, jax.Array]:
        gradients = jax.grad(functools.partial(loss_of, policy.config))(weights, prompts, completions)
        changes, state = optimizer.update(gradients, state, weights)
        new = optax.apply_updates(weights, changes)
        changed = jax.tree.map(lambda after, before: (after != before).sum(), new, weights)
        moved = sum(jax.tree.leaves(changed))
        return new, state, moved / sum(array.size for array in jax.tree.leaves(weights))

    return weights, optimizer.init(weights), update


if __name__ == "__main__":
    main()
