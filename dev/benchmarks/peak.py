"""How fast this machine multiplies matrices, by library: XLA, PyTorch and NumPy in the same shapes.

    python dev/benchmarks/peak.py                                  # recipes/smollm2-135m-cpu.yaml
    python dev/benchmarks/peak.py recipes/tiny-cpu.yaml --json

A ratio to TRL compares two trainers *and* two matrix libraries, and on some processors the libraries differ by more
than the trainers.  The shapes are those of a step: a row of a group through the matrices of a layer (forward, the
gradient of the activations, the gradient of the weight), and one token of each completion, as sampling has it.
The libraries take turns in processes of their own, and the best of the rounds counts, in GFLOP/s.  PyTorch is that of
TRL's environment (peer_environments.py), NumPy that of this one; their matrix libraries are named.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from job import machine, only_result_on_stdout, run_worker

SECONDS = 0.2  # that a product is repeated for, at least
WAYS = (("xla", "float32"), ("torch", "float32"), ("numpy", "float32"), ("xla", "bfloat16"), ("torch", "bfloat16"))


@dataclass(frozen=True)
class Product:
    """[rows, inner] times [inner, columns]; `transposed`: the first is in memory as [inner, rows]."""

    name: str
    rows: int
    inner: int
    columns: int
    transposed: bool = False

    @property
    def operations(self) -> int:
        return 2 * self.rows * self.inner * self.columns


def products(config: dict[str, Any], tokens: int, sampled: int) -> list[Product]:
    """The largest ones of a step, from a model's config.json.

    Args:
      tokens: of a group's row.
      sampled: completions that are sampled at once.
    """
    width, mlp = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    return [
        Product("queries", tokens, width, queries),
        Product("MLP, up", tokens, width, mlp),
        Product("MLP, down", tokens, mlp, width),
        Product("head", tokens, width, config["vocab_size"]),
        Product("weight gradient: queries", width, tokens, queries, transposed=True),
        Product("weight gradient: MLP, up", width, tokens, mlp, transposed=True),
        Product("weight gradient: MLP, down", mlp, tokens, width, transposed=True),
        Product("a token: MLP, up", sampled, width, mlp),
        Product("a token: MLP, down", sampled, mlp, width),
        Product("a token: head", sampled, width, config["vocab_size"]),
    ]


# ------------------------------------------------------------------------------------------------------------- workers
# Each makes a function that computes one product, and names its matrix library.


def with_xla(product: Product, dtype: str) -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    a = jnp.ones((product.inner, product.rows) if product.transposed else (product.rows, product.inner), dtype)
    b = jnp.ones((product.inner, product.columns), dtype)
    contracted = ((0 if product.transposed else 1,), (0,))

    def multiply(left: Any, right: Any) -> Any:
        return jax.lax.dot_general(left, right, (contracted, ((), ())), preferred_element_type=jnp.float32)

    compiled = jax.jit(multiply).lower(a, b).compile()
    return lambda: compiled(a, b).block_until_ready()


def with_torch(product: Product, dtype: str) -> Callable[[], Any]:
    import torch

    a = torch.ones(product.rows, product.inner, dtype=getattr(torch, dtype))
    if product.transposed:
        a = a.T.contiguous().T
    b = torch.ones(product.inner, product.columns, dtype=getattr(torch, dtype))
    return lambda: a @ b


def with_numpy(product: Product, dtype: str) -> Callable[[], Any]:
    import numpy as np

    a = np.ones((product.rows, product.inner), dtype, order="F" if product.transposed else "C")
    b = np.ones((product.inner, product.columns), dtype)
    return lambda: a @ b


LIBRARIES = {"xla": with_xla, "torch": with_torch, "numpy": with_numpy}


def named(library: str) -> str:
    """A library's version, and the matrix library that it calls."""
    if library == "xla":
        import jax

        return f"JAX {jax.__version__}, XLA's own"
    if library == "torch":
        import torch

        return f"PyTorch {torch.__version__}, {'MKL' if torch.backends.mkl.is_available() else 'no MKL'}"
    import numpy as np

    show: Any = np.show_config  # whose types lack the argument
    blas = show(mode="dicts")["Build Dependencies"]["blas"]
    return f"NumPy {np.__version__}, {blas['name']} {blas['version']}"


def work(library: str, dtype: str, shapes: list[Product]) -> dict[str, Any]:
    if library == "xla":
        from grpo_lib.common import environment

        environment.prepare()
    found = {}
    for product in shapes:
        multiply = LIBRARIES[library](product, dtype)
        found[product.name] = product.operations / fastest(multiply) / 1e9
    return {"library": named(library), "gigaflops": found}


def fastest(multiply: Callable[[], Any]) -> float:
    """Seconds of one product: the fastest of several, after two that do not count."""
    multiply()
    multiply()
    rounds: list[float] = []
    until = time.perf_counter() + SECONDS
    while len(rounds) < 3 or time.perf_counter() < until:
        started = time.perf_counter()
        multiply()
        rounds.append(time.perf_counter() - started)
    return min(rounds)


# ---------------------------------------------------------------------------------------------------------- the program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="recipes/smollm2-135m-cpu.yaml")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-torch", action="store_true", help="without PyTorch, which needs 1.4 GB of disk")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--worker", nargs=3, metavar=("LIBRARY", "TYPE", "SHAPES"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        library, dtype, shapes = arguments.worker
        with only_result_on_stdout() as stdout:
            print(json.dumps(work(library, dtype, [Product(**each) for each in json.loads(shapes)])), file=stdout)
        return
    ways = [way for way in WAYS if not (arguments.no_torch and way[0] == "torch")]
    with only_result_on_stdout() as stdout:
        shapes = shapes_of(arguments.recipe)
        pythons = dict.fromkeys(LIBRARIES, sys.executable)
        if not arguments.no_torch:
            from peer_environments import TRL, ensure

            pythons["torch"] = str(ensure(TRL))
        result = measure(ways, shapes, pythons, arguments.rounds) | {"recipe": arguments.recipe, "machine": machine()}
        print(table(result, shapes), file=stdout)
        if arguments.json:
            print(json.dumps(result), file=stdout)


def shapes_of(recipe: str) -> list[Product]:
    """The products of a step of this recipe.  Raises CourseError for a bad recipe."""
    from grpo_lib.problems import load_problems
    from grpo_train.engines import model_files, tokens
    from grpo_train.recipes import load_recipe

    resolved = load_recipe(recipe)
    plan = resolved.plan_on(1, 1)
    config = model_files.read_config(model_files.model_directory(resolved.model, weights=False))
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    render = tokens.Renderer(resolved.prompts, tokens.load_tokenizer(resolved.model))
    _, longest, _ = tokens.fit_prompts(resolved.rollout, render, load_problems(resolved.problems, "train"))
    of_group = longest - 1 + plan.group_size * (1 + resolved.rollout.max_completion_length)
    return products(config, of_group, sampled=plan.rollout_micro_batch_completions)


def measure(ways: Any, shapes: list[Product], pythons: dict[str, str], rounds: int) -> dict[str, Any]:
    """GFLOP/s of each way and shape, the best of the rounds, and the libraries' names."""
    given = json.dumps([vars(product) for product in shapes])
    best: dict[str, dict[str, float]] = {}
    libraries: dict[str, str] = {}
    for _ in range(rounds):  # in turn, so that all meet the same machine
        for library, dtype in ways:
            done = run_worker([pythons[library], os.path.abspath(__file__), "--worker", library, dtype, given])
            column = best.setdefault(f"{library} {dtype}", {})
            libraries[library] = done["library"]
            for name, speed in done["gigaflops"].items():
                column[name] = round(max(speed, column.get(name, 0.0)), 1)
    return {"gigaflops": best, "libraries": libraries, "rounds": rounds}


def table(result: dict[str, Any], shapes: list[Product]) -> str:
    columns = result["gigaflops"]
    lines = [f"{'GFLOP/s':<28} {'shape':<22}" + "".join(f"{name:>16}" for name in columns)]
    for product in shapes:
        shape = f"{product.rows} x {product.inner} x {product.columns}"
        speeds = "".join(f"{column[product.name]:16.0f}" for column in columns.values())
        lines.append(f"{product.name:<28} {shape:<22}{speeds}")
    machine_line = f"{result['machine']['processor']}: {', '.join(result['machine']['units'])}"
    return "\n".join([*lines, "", *result["libraries"].values(), machine_line])


if __name__ == "__main__":
    main()
