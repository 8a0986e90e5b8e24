"""Train the tiny model with your three functions of exercise 10.1 (A2), and test it.

    .venv/bin/python assignment-a/train_loop.py exercises/10_assignment_a.ipynb --seed 1 --output a5/grpo-1.jsonl

Takes the cell of the functions from a notebook, or a .py file with the three functions (for A5).  All the rest of the
file is in grpo_lib/plain_grpo.py: the model, sampling, the optimizer.  The output has one line per problem.
"""

import argparse
import functools
import time
from pathlib import Path
from typing import Any

from grpo_lib.common import environment

environment.prepare()  # before JAX is imported

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from grpo_lib import plain_grpo  # noqa: E402
from grpo_lib.common import files  # noqa: E402
from grpo_lib.evaluation import evaluate  # noqa: E402
from grpo_lib.problems import training_batches  # noqa: E402
from grpo_lib.problems.words import generate  # noqa: E402
from grpo_lib.prompts import render  # noqa: E402
from grpo_lib.rewards import get_rewards  # noqa: E402

EXERCISE = "10.1"
per_token_logps = jax.jit(plain_grpo.per_token_logps, static_argnames=("config", "temperature"))


def read_functions(path: Path) -> dict[str, Any]:
    """The functions that a notebook's cell or a .py file defines."""
    if path.suffix != ".ipynb":
        return functions_of(path.read_text("utf-8"), str(path))
    from grpo_teach.notebooks import read_exercises  # the process that is graded does without

    return functions_of(read_exercises(path)[EXERCISE].code, str(path))


def functions_of(code: str, name: str) -> dict[str, Any]:
    """What `code` defines; errors call it `name`."""
    for name in ("group_advantages", "policy_loss", "update"):  # cut out
        vars(plain_grpo).pop(name, None)
    space: dict[str, Any] = {"__name__": "functions"}
    exec(compile(code, name, "exec"), space)
    return space


def train(functions: dict[str, Any], options: argparse.Namespace) -> plain_grpo.Policy:
    """The loop: sample, reward, advantages, updates."""
    settings = plain_grpo.Settings(
        steps=options.steps, max_completion_length=24, learning_rate=3e-4, system="", seed=options.seed
    )
    policy = plain_grpo.load_policy(options.model)
    reference = policy.weights  # of the KL penalty: the base
    problems = generate("train", 20_000, seed=options.problems)
    to_prompt = functools.partial(render, policy.tokenizer, system="")
    batches = training_batches(problems, to_prompt, settings.prompts_per_step, settings.seed)
    width = plain_grpo.encode(policy, [to_prompt(problem.question) for problem in problems]).shape[1]
    optimizer = plain_grpo.make_optimizer(settings)
    opt_state = optimizer.init(policy.weights)
    key = jax.random.PRNGKey(settings.seed)
    G = settings.group_size
    reward_functions = get_rewards(["correct_answer", "tidy_format"])

    def logps_of(weights: Any, prompts: Any, completions: Any) -> jax.Array:
        return per_token_logps(weights, policy.config, prompts, completions, settings.temperature)

    for step in range(1, settings.steps + 1):
        rows = next(batches)
        prompts = np.repeat(plain_grpo.encode(policy, rows["prompts"], width), G, 0)  # [B, P]
        step_key = jax.random.fold_in(key, step)
        ids = plain_grpo.sample(
            policy.weights, policy.config, prompts, step_key, settings.max_completion_length, settings.temperature
        )  # [B, C]
        texts = policy.tokenizer.batch_decode(np.asarray(ids), skip_special_tokens=True)
        golds = np.repeat(rows["answer"], G)
        rewards = np.sum([reward(None, texts, answer=golds) for reward in reward_functions], 0)
        batch = {
            "prompts": prompts,
            "completions": ids,
            "mask": ids != policy.config.pad,
            "reference_logps": logps_of(reference, prompts, ids),
            "advantages": functions["group_advantages"](rewards, G),
        }
        policy.weights, opt_state = functions["update"](
            policy.weights, opt_state, optimizer, logps_of, batch, options.iterations, options.epsilon, options.beta
        )
        print(f"step {step}/{settings.steps}  reward {rewards.mean():.3f}", flush=True)
    return policy


def test(policy: plain_grpo.Policy, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One record per problem of the split: its greedy completion and whether that is right."""
    problems = generate(options.split, 500, seed=options.problems)
    answer = functools.partial(plain_grpo.generate, policy, max_completion_length=24)
    to_prompt = functools.partial(render, policy.tokenizer, system="")
    run = evaluate(answer, problems, render=to_prompt, batch_size=250, progress=False)
    return [
        {"id": record["id"], "right": record["strict"], "completion": record["completion"]} for record in run.records
    ]


def values(functions: dict[str, Any], cases: dict[str, list]) -> dict[str, list | str]:
    """What the functions return for given arguments, or an error; `update` for a policy that is a table of logits."""
    sgd = optax.sgd(0.5)

    def of_table(table: Any, prompts: Any, completions: Any) -> jax.Array:  # [C, V] -> [B, C]
        return jnp.take_along_axis(jax.nn.log_softmax(table)[None], completions[..., None], -1)[..., 0]

    def called(name: str, arguments: list) -> list:
        if name == "update":
            table = jnp.array(arguments[0])
            batch = {key: jnp.array(value) for key, value in arguments[1].items()}
            result, _ = functions[name](table, sgd.init(table), sgd, of_table, batch, *arguments[2:])
        else:
            arrays = [np.array(argument) if isinstance(argument, list) else argument for argument in arguments]
            result = functions[name](*arrays)
        return np.asarray(result, float).tolist()

    def all_of(name: str) -> list | str:
        try:
            return [called(name, arguments) for arguments in cases[name]]
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    return {name: all_of(name) for name in cases}


def parser_of_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("functions", type=Path, help="a notebook with exercise 10.1, or a .py file")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--iterations", type=int, default=2, help="μ: updates per batch")
    parser.add_argument("--epsilon", type=float, default=0.2, help="ε: clip range")
    parser.add_argument("--beta", type=float, default=0.01, help="β: weight of the KL penalty")
    parser.add_argument("--seed", type=int, default=0, help="of sampling and of the training order")
    parser.add_argument("--problems", type=int, default=0, help="seed of the problems")
    parser.add_argument("--split", default="validation", choices=["validation", "test"])
    parser.add_argument("--output", type=Path, help="one JSON line per problem")
    base = environment.repo_root() / "assets" / "tiny-base"
    parser.add_argument("--model", type=Path, default=base, help="the base, which is also the reference")
    return parser


def main() -> None:
    options = parser_of_options().parse_args()
    started = time.monotonic()
    functions = read_functions(options.functions)
    records = test(train(functions, options), options)
    if options.output:
        files.write_jsonl_atomic(options.output, records)
    share = sum(record["right"] for record in records) / len(records)
    print(f"{share:.1%} of {len(records)} {options.split} problems right, in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
