"""XLA's CPU compiler copies an operand of a weight gradient, transposed: a report for upstream, with its reproduction.

    python dev/benchmarks/xla_weight_gradient.py            # needs JAX alone

A dense layer y = x W on x [B, T, D] has the weight gradient dW = x^T dy, a sum over B and T.  JAX's rule for it is one
dot_general that contracts two dimensions of each operand, with dy first.  XLA's CPU compiler makes the first operand
two-dimensional by a transposing copy, dy [B, T, F] -> [F, B T], and fuses into that copy whatever computes dy: here the
derivative of SiLU, element by element, then reads its inputs with a stride of F numbers.  With rows folded before the
product, x.reshape(B T, D), the same gradient contracts one dimension and the compiled program holds no copy.

Expected: the same program for both, since the reshape only relabels contiguous memory.
The course works around it in engines/cpu_speed.py (multiply_in_two_dimensions); its test fails once XLA has no copy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp

B, T, D, F = 16, 208, 128, 384  # a micro-batch of recipes/tiny-cpu.yaml, and its MLP
ROUNDS = 40


def loss(weight, x, slope, fold: bool):
    """Sum of slope * silu(x W); `fold`: batch and position as one dimension in the product."""
    y = (x.reshape(B * T, D) @ weight).reshape(B, T, F) if fold else x @ weight
    return (jax.nn.silu(y) * slope).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    arguments = parser.parse_args()
    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    shapes = ((D, F), (B, T, D), (B, T, F))
    inputs = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    gradient = jax.jit(jax.grad(loss), static_argnums=3)
    ways = {"as JAX writes it": False, "folded": True}
    seconds: dict[str, list[float]] = {}
    for _ in range(ROUNDS):  # interleaved, so that both meet the same machine
        for name, fold in ways.items():
            started = time.perf_counter()
            jax.block_until_ready(gradient(*inputs, fold))
            seconds.setdefault(name, []).append(time.perf_counter() - started)
    result = {"jax": jax.__version__, "platform": jax.default_backend(), "ways": {}}
    for name, fold in ways.items():
        program = gradient.lower(*inputs, fold).compile().as_text()
        result["ways"][name] = {
            "milliseconds": round(1e3 * statistics.median(seconds[name][3:]), 2),
            "copies": program.count(" copy("),
        }
        print("{:<18} {milliseconds:7.2f} ms, {copies} copies".format(name, **result["ways"][name]))
    one, other = (gradient(*inputs, fold) for fold in ways.values())
    result["difference"] = float(jnp.abs(one - other).max() / jnp.abs(one).max())
    print(f"largest difference of the gradients, of the largest entry: {result['difference']:.0e}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
