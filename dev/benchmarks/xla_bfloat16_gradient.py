"""XLA's CPU compiler multiplies bfloat16 slowly where a weight gradient needs it: a report for upstream.

    python dev/benchmarks/xla_bfloat16_gradient.py       # JAX alone, on a processor with AVX-512 BF16 or AMX

A dense layer y = x W on x [T, D] has the weight gradient dW = x^T dy, which contracts the *first* dimension of both
operands.  Where the processor multiplies bfloat16, XLA's product y = x W runs at about twice the speed of float32.
The gradient from the same bfloat16 arrays does not; the same numbers with x given as [D, T] do.  A transpose in the
program does not help: it takes as long as it saves.

Expected: a weight gradient as fast as the forward product, since both have the same number of operations.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

T, D, F = 1472, 576, 1536  # four rows of a group, and the MLP of SmolLM2-135M
ROUNDS = 40

# What is computed, as dot_general's contracted dimensions, and the shapes of its operands.
FORMS = {
    "forward, x W": (((1,), (0,)), (T, D), (D, F)),
    "weight gradient, x^T dy": (((0,), (0,)), (T, D), (T, F)),
    "the same, x given transposed": (((1,), (0,)), (D, T), (T, F)),
}


def product(contracted: tuple) -> Callable:
    """A product with float32 sums."""
    return jax.jit(lambda a, b: jax.lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=jnp.float32))


def transposed_inside(x: jax.Array, dy: jax.Array) -> jax.Array:
    """The gradient from x [T, D] that XLA is asked to transpose first."""
    turned = jax.lax.optimization_barrier(x.T)
    return jax.lax.dot_general(turned, dy, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def programs(dtype: str) -> dict[str, tuple[Callable, jax.Array, jax.Array]]:
    """Each form with its operands."""
    made = {}
    for name, (contracted, left, right) in FORMS.items():
        made[name] = product(contracted), jnp.ones(left, dtype), jnp.ones(right, dtype)
    gradient = made["weight gradient, x^T dy"]
    made["the same, transposed in the program"] = jax.jit(transposed_inside), *gradient[1:]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    arguments = parser.parse_args()
    result = {"jax": jax.__version__, "platform": jax.default_backend(), "gigaflops": {}}
    ways = {(dtype, name): made for dtype in ("float32", "bfloat16") for name, made in programs(dtype).items()}
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):  # interleaved, so that all meet the same machine
        for way, (run, a, b) in ways.items():
            started = time.perf_counter()
            run(a, b).block_until_ready()
            best[way] = min(best[way], time.perf_counter() - started)
    for (dtype, name), seconds in best.items():
        speed = round(2 * T * D * F / seconds / 1e9)
        result["gigaflops"][f"{dtype}: {name}"] = speed
        print(f"{dtype:<9} {name:<36} {speed:5} GFLOP/s")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
