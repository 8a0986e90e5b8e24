"""What a policy loss costs: memory, traffic and work on a TPU by its compiler's count, and seconds on this CPU.

    .venv-tpu/bin/python dev/benchmarks/policy_loss.py                       # one v6e chip, [8, 1024, 151936], D 2048
    .venv-tpu/bin/python dev/benchmarks/policy_loss.py --accelerator v5p-8 --shape 4,768,128256,4096 --untied
    .venv/bin/python dev/benchmarks/policy_loss.py                           # without libtpu: the seconds alone

Every row is log-probability, entropy and gradient of B x T tokens, in bfloat16 on one chip; it needs no TPU.  The
compiler counts a loop's body once: each is compiled by itself too, and added for every other time that it runs.  It
does not look into a Pallas kernel: a block is read, or written, whenever the grid moves on to another one, and that is
counted here from the grid and the blocks of the very call that was compiled.

The lower bound is roofline.py's: the time of the work at the chip's peak, or of the traffic, whichever is longer.
`logits` starts from logits that are there; `hidden` from hidden states, with the head's matmul.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from job import ROOT, only_result_on_stdout

from grpo_lib.common.errors import CourseError
from grpo_train.recipes.slices import parse_slice
from grpo_train.tpu import compiler
from grpo_train.tpu.roofline import Work

compiler.prepare()

import jax  # noqa: E402
import jax.extend  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from grpo_train import losses  # noqa: E402

sys.path.append(str(ROOT / "notebooks" / "further"))
import kernels  # noqa: E402  (of notebook 07)

GIB = 2**30
WAYS = (("logits", "jax"), ("logits", "pallas"), ("hidden", "jax"), ("hidden", "chunked"), ("hidden", "pallas"))
TIMED = ("jax", "chunked")  # off a TPU the kernel is interpreted, and its time means nothing
ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Shape:
    """B sequences of T tokens, V words, D numbers to a hidden state."""

    sequences: int
    tokens: int
    vocabulary: int
    width: int
    tied: bool = True

    @classmethod
    def parse(cls, text: str, tied: bool) -> Shape:
        """Read B,T,V,D."""
        try:
            sizes = [int(part) for part in text.split(",")]
        except ValueError:
            sizes = []
        if len(sizes) != 4 or min(sizes) < 1:
            sys.exit(f"error: --shape {text} is not four numbers B,T,V,D such as 8,1024,151936,2048")
        return cls(*sizes, tied)

    def inputs(self, source: str, dtype: Any) -> list[tuple[tuple[int, ...], Any]]:
        """(shape, dtype) of what the loss is differentiated by, and of target ids and weights."""
        tokens = (self.sequences, self.tokens)
        head = (self.vocabulary, self.width) if self.tied else (self.width, self.vocabulary)
        leading = [(*tokens, self.vocabulary)] if source == "logits" else [(*tokens, self.width), head]
        return [*((shape, dtype) for shape in leading), (tokens, jnp.int32), (tokens, jnp.float32)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="v6e-1", help="its chip is compiled for: v6e-1, v5e-1, v5p-8")
    parser.add_argument("--shape", default="8,1024,151936,2048", help="B,T,V,D of one chip")
    parser.add_argument("--untied", action="store_true", help="the head is [D, V], and not a tied embedding [V, D]")
    parser.add_argument("--only", default="", help="rows such as hidden/pallas,logits/jax; the default is all")
    parser.add_argument("--cpu-shape", default="2,64,151936,256", help="B,T,V,D of what is timed on this CPU")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    arguments = parser.parse_args()
    ways = [way for way in WAYS if not arguments.only or "/".join(way) in arguments.only.split(",")]
    if not ways:
        sys.exit(f"error: --only {arguments.only} names no row; rows: {', '.join('/'.join(way) for way in WAYS)}")
    shape, small = (Shape.parse(text, not arguments.untied) for text in (arguments.shape, arguments.cpu_shape))
    with only_result_on_stdout() as stdout:
        result: dict[str, Any] = {"accelerator": arguments.accelerator, "shape": dataclasses.asdict(shape)}
        try:
            result |= {"versions": compiler.require_libtpu(), "rows": compiled(arguments.accelerator, shape, ways)}
        except CourseError as error:
            print(f"no TPU compiler: {error}", file=sys.stderr)
            result |= {"versions": {}, "rows": []}
        result |= {"cpu_shape": dataclasses.asdict(small), "cpu_seconds": timed(small)}
        print("\n".join(table(result)), file=stdout)
        if arguments.json:
            print(json.dumps(result), file=stdout)


# What is compiled and timed.


def value_and_gradient(source: str, implementation: str, vocab_axis: int) -> Callable:
    """(inputs, target ids, weights) -> ((Σ weight log π, entropy), gradients with respect to the inputs)."""

    def total(inputs, ids, weight):
        if (source, implementation) == ("logits", "pallas"):
            logps, entropy = kernels.from_logits(inputs[0], ids)
        else:
            given = {"logits": inputs[0]} if source == "logits" else {"hidden": inputs[0], "head": inputs[1]}
            logps, entropy = losses.token_statistics(ids, implementation=implementation, vocab_axis=vocab_axis, **given)
        return jnp.sum(logps * weight), entropy

    return jax.value_and_grad(total, has_aux=True)


def compiled(accelerator: str, shape: Shape, ways: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """One row for each way, from the TPU compiler."""
    jax.config.update("jax_enable_compilation_cache", False)
    chip = parse_slice(accelerator).chip
    device = compiler.slice_devices(accelerator)[0]
    rows = []
    for source, implementation in ways:
        print(f"compiling {source}/{implementation}", file=sys.stderr, flush=True)
        function = value_and_gradient(source, implementation, vocab_axis=0 if shape.tied else 1)
        *inputs, ids, weight = (on(device, *given) for given in shape.inputs(source, jnp.bfloat16))
        program = jax.make_jaxpr(function)(inputs, ids, weight)
        # A training step makes the logits and needs them for nothing else: their place can be taken.
        whole = compile_for_tpu(function, (inputs, ids, weight), donate=(0,) if source == "logits" else ())
        memory = whole.memory_analysis()
        own = cost(whole)  # in which the body of a loop counts once
        for length, body in loops(program.jaxpr):
            once = cost(compile_body(body, device))
            more = length - 1
            own = Work(flops=own.flops + more * once.flops, traffic=own.traffic + more * once.traffic)
        kernels = [kernel_count(call) for call in kernel_calls(program.jaxpr)]
        work = Work(
            flops=own.flops + sum(kernel["flops"] for kernel in kernels),
            traffic=own.traffic + sum(kernel["bytes"] for kernel in kernels),
        )
        row = {
            "source": source,
            "implementation": implementation,
            "temporaries": memory.temp_size_in_bytes,
            "compiler_traffic": own.traffic,
            "kernels": kernels,
            "traffic": work.traffic,
            "flops": work.flops,
            "compute_seconds": work.flops / chip.flops,
            "memory_seconds": work.traffic / chip.bandwidth,
            "bound_seconds": work.seconds(chip),
        }
        rows.append(row)
    return rows


def on(device: Any, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(device))


def compile_for_tpu(function: Callable, arguments: tuple, donate: tuple[int, ...] = ()) -> Any:
    return jax.jit(function, donate_argnums=donate).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()


def cost(program: Any) -> Work:
    counted = program.cost_analysis() or {}
    return Work(flops=counted.get("flops", 0), traffic=counted.get("bytes accessed", 0))


# What the compiler does not count.


def equations(jaxpr: Any, inside: Callable[[Any], bool]) -> Iterator[Any]:
    """All equations, also those inside others for which `inside` is true."""
    for equation in jaxpr.eqns:
        yield equation
        if not inside(equation):
            continue
        for parameter in equation.params.values():
            for part in parameter if isinstance(parameter, tuple | list) else (parameter,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from equations(inner, inside)


def loops(jaxpr: Any) -> list[tuple[int, Any]]:
    """(times, equation) of every loop that runs more than once."""
    found = equations(jaxpr, lambda equation: equation.primitive.name not in ("scan", "pallas_call"))
    return [(one.params["length"], one) for one in found if one.primitive.name == "scan" and one.params["length"] > 1]


def compile_body(loop: Any, device: Any) -> Any:
    """A loop's body as a program, which may write over what it hands to its next run."""
    body = loop.params["jaxpr"]
    arguments = [on(device, value.shape, value.dtype) for value in body.in_avals]
    # Before what is cut along the loop comes what is carried, and before that what stays.
    cut = sum(whole.aval.shape != own.shape for whole, own in zip(loop.invars, body.in_avals, strict=True))
    carried = sum(whole.aval.shape == own.shape for whole, own in zip(loop.outvars, body.out_avals, strict=True))
    end = len(arguments) - cut
    return compile_for_tpu(
        jax.extend.core.jaxpr_as_fun(body), tuple(arguments), donate=tuple(range(end - carried, end))
    )


def kernel_calls(jaxpr: Any) -> list[Any]:
    """The Pallas calls that a TPU runs; each also occurs once more, to be interpreted."""
    found = equations(jaxpr, lambda equation: equation.primitive.name != "pallas_call")
    return [one for one in found if one.primitive.name == "pallas_call" and not one.params["interpret"]]


def kernel_count(call: Any) -> dict[str, Any]:
    """A kernel's traffic and work: bytes of the blocks that its grid fetches and writes back, and its matmuls.

    Pallas keeps a block where it is as long as the grid's next step uses the same one.  At the edges of an array a
    block is shorter; there it counts as far as the array reaches.
    """
    mapping = call.params["grid_mapping"]
    steps = np.indices(mapping.grid).reshape(len(mapping.grid), -1).T  # in the order in which they run, last axis first
    blocks = []
    for block in mapping.block_mappings:
        index = jax.vmap(jax.extend.core.jaxpr_as_fun(block.index_map_jaxpr))(*jnp.asarray(steps.T, jnp.int32))
        index = np.stack([np.asarray(axis) for axis in index], -1)
        new = np.concatenate([[True], (index[1:] != index[:-1]).any(-1)])
        sizes = block_sizes(block)
        lengths = block.array_aval.shape
        reach = []  # of a block: less than its size at the end of the array
        for axis, (size, length) in enumerate(zip(sizes, lengths, strict=True)):
            reach.append(np.minimum(size, length - index[new, axis] * size))
        bytes_moved = block.array_aval.dtype.itemsize * np.prod(np.stack(reach, -1), -1)
        blocks.append(
            {
                "array": list(lengths),
                "block": sizes,
                "moves": int(new.sum()),
                "bytes": int(bytes_moved.sum()),
            }
        )
    dots = equations(call.params["jaxpr"], lambda equation: True)
    matmuls = sum(matmul_flops(equation) for equation in dots if equation.primitive.name == "dot_general")
    return {
        "kernel": call.params["jaxpr"].debug_info.func_name,
        "grid": list(mapping.grid),
        "blocks": blocks,
        "bytes": sum(block["bytes"] for block in blocks),
        "flops": matmuls * math.prod(mapping.grid),
    }


def block_sizes(block: Any) -> list[int]:
    return [getattr(size, "block_size", size) or 1 for size in block.block_shape]


def matmul_flops(equation: Any) -> int:
    """2 operations for each number of the result and each number that is summed for it."""
    (summed, _), _ = equation.params["dimension_numbers"]
    left, result = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return 2 * math.prod(result) * math.prod(left[axis] for axis in summed)


# Seconds.


def timed(shape: Shape) -> dict[str, float]:
    """Median seconds of value and gradient from hidden states, in float32, on this machine's CPU."""
    rng = np.random.default_rng(0)
    hidden, head, (tokens, _), _ = shape.inputs("hidden", jnp.float32)
    inputs = [jnp.asarray(rng.normal(size=size), dtype) for size, dtype in (hidden, head)]
    ids = jnp.asarray(rng.integers(0, shape.vocabulary, tokens), jnp.int32)
    seconds = {}
    for implementation in TIMED:
        run = jax.jit(value_and_gradient("hidden", implementation, vocab_axis=0 if shape.tied else 1))
        step = functools.partial(run, inputs, ids, jnp.ones(tokens, jnp.float32))
        jax.block_until_ready(step())
        rounds = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            jax.block_until_ready(step())
            rounds.append(time.perf_counter() - started)
        seconds[implementation] = round(statistics.median(rounds), 3)
    return seconds


# Output for the user.


def table(result: dict[str, Any]) -> Iterator[str]:
    shape = Shape(**result["shape"])
    if result["rows"]:
        chip = parse_slice(result["accelerator"]).chip
        yield (
            f"[B, T, V] = [{shape.sequences}, {shape.tokens}, {shape.vocabulary}], D = {shape.width}, bfloat16, "
            f"{'tied' if shape.tied else 'untied'} head, on one {chip.generation} chip"
        )
        yield "                    GiB of       GiB of traffic            TFLOP       lower bound, ms at the peak"
        yield "from/way          memory   compiler   kernels   together            compute   traffic   longer"
    for row in result["rows"]:
        name = f"{row['source']}/{row['implementation']}"
        kernels = row["traffic"] - row["compiler_traffic"]
        cells = [
            f"{name:<16}",
            f"{row['temporaries'] / GIB:>8.2f}",
            f"{row['compiler_traffic'] / GIB:>11.2f}",
            f"{kernels / GIB:>10.2f}",
            f"{row['traffic'] / GIB:>11.2f}",
            f"{row['flops'] / 1e12:>8.2f}",
            f"{1e3 * row['compute_seconds']:>11.1f}",
            f"{1e3 * row['memory_seconds']:>10.1f}",
            f"{1e3 * row['bound_seconds']:>9.1f}",
        ]
        yield "".join(cells)
    for row in result["rows"]:
        for kernel in row["kernels"]:
            yield f"{row['source']}/{row['implementation']}: {kernel['kernel']}, grid {kernel['grid']}"
            for block in kernel["blocks"]:
                moved = f"{block['moves']} x {block['block']} of {block['array']}"
                yield f"    {moved:<56}{block['bytes'] / GIB:>8.3f} GiB"
    small = Shape(**result["cpu_shape"])
    size = f"[{small.sequences}, {small.tokens}, {small.vocabulary}], D = {small.width}"
    seconds_of_each = [f"{name} {seconds:.2f} s" for name, seconds in result["cpu_seconds"].items()]
    yield f"on this CPU, {size}, float32: {', '.join(seconds_of_each)}"


if __name__ == "__main__":
    main()
