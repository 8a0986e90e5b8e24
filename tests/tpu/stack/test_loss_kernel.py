"""The real TPU compiler on the loss kernels: at the recipes' shapes, over a mesh as training shards it, within VMEM.

libtpu compiles for chips that are not there.  Everything is compiled once, in a process of its own: what it needs in
the environment is not for the other tests.
"""

import json
import re
import subprocess
import sys

import pytest

GIB = 2**30

# Model -> V, D, whether the head is a tied embedding, tokens of a completion: those of the recipes.
SHAPES = {
    "qwen2.5-3b": (151936, 2048, True, 768),
    "llama3.1-8b": (128256, 4096, False, 768),
    "qwen2.5-7b": (152064, 3584, False, 768),
    "qwen2.5-32b": (152064, 5120, False, 768),
}
SLICES = {"v6e-8": 8, "v5p-8": 4}  # those of the recipes, and their chips
# Sequences, tokens, vocabulary: lengths that no tile divides; and one token, a vocabulary smaller than a tile, and an
# odd one, which XLA hands to a program with T as the last axis in memory, so that it is copied before the kernel.
RAGGED = ((3, 1023, 50304), (5, 77, 30080), (8, 1, 151936), (2, 77, 250), (3, 100, 5003))
SEQUENCES = 2  # to a device

COMPILE = """
import json, sys
sys.path.append("notebooks/further")
from grpo_train.tpu import compiler
compiler.prepare()
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import kernels
from grpo_train.losses import pallas_kernel
jax.config.update("jax_enable_compilation_cache", False)

def facts(function, arguments, specs, mesh, donate=()):
    placed = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
              for (shape, dtype), spec in zip(arguments, specs)]
    lowered = jax.jit(function, donate_argnums=donate).trace(*placed).lower(lowering_platforms=("tpu",))
    program = lowered.compile(compiler.QUICK)
    memory, text = program.memory_analysis(), program.as_text()
    return {"temporaries": memory.temp_size_in_bytes, "aliased": memory.alias_size_in_bytes,
            "kernels": text.count('custom_call_target="tpu_custom_call"'), "gathers": text.count("all-gather"),
            "scatters": text.count("reduce-scatter") + text.count("all-reduce")}

def gradient(statistics, inputs):
    def total(*arguments):
        logps, entropy = statistics(*arguments[:-1])
        return jnp.sum(logps * arguments[-1]), entropy
    return jax.value_and_grad(total, tuple(range(inputs)), has_aux=True)

def from_logits(accelerator, batch, tokens, vocabulary, dtype):
    mesh, _ = spread(accelerator, 1, 1)
    shape = (batch, tokens)
    arguments = (((*shape, vocabulary), dtype), (shape, jnp.int32), (shape, jnp.float32))
    function = gradient(lambda logits, ids: kernels.from_logits(logits, ids, 0.9), 1)
    return facts(function, arguments, (P(), P(), P()), mesh, (0,))

def from_hidden(accelerator, devices, tensor, batch, tokens, vocabulary, width, tied):
    mesh, partition = spread(accelerator, devices, tensor)
    shape, spec, axis = (batch, tokens), P("fsdp"), 0 if tied else 1
    head = (vocabulary, width) if tied else (width, vocabulary)
    split = P("tensor", "fsdp") if tied else P("fsdp", "tensor")
    arguments = (((*shape, width), jnp.bfloat16), (head, jnp.bfloat16), (shape, jnp.int32), (shape, jnp.float32))
    function = gradient(
        lambda hidden, head, ids: pallas_kernel.from_hidden(hidden, head, ids, 0.9, axis, partition), 2)
    return facts(function, arguments, (spec, split, spec, spec), mesh)

def spread(accelerator, devices, tensor):
    chips = np.array(compiler.slice_devices(accelerator)[:devices]).reshape(-1, tensor)
    mesh = Mesh(chips, ("fsdp", "tensor"))
    return mesh, pallas_kernel.Partition(mesh, ("fsdp",), ("tensor",) if tensor > 1 else ())

for name, kind, *arguments in json.loads(sys.argv[1]):
    print("RESULT", json.dumps([name, {"logits": from_logits, "hidden": from_hidden}[kind](*arguments)]), flush=True)
"""


def programs():
    """(name, kind, arguments) of everything that is compiled."""
    for accelerator, chips in SLICES.items():
        for model, (vocabulary, width, tied, tokens) in SHAPES.items():
            mesh = (accelerator, chips, 1, SEQUENCES * chips, tokens)
            yield f"{accelerator} {model} hidden", "hidden", *mesh, vocabulary, width, tied
        for dtype in ("bfloat16", "float32"):
            yield f"{accelerator} logits {dtype}", "logits", accelerator, SEQUENCES, 768, 151936, dtype
    for tokens in RAGGED:
        yield f"ragged {tokens}", "logits", "v6e-1", *tokens, "bfloat16"
        yield f"ragged hidden {tokens}", "hidden", "v6e-1", 1, 1, *tokens, 256, True
    yield "tensor", "hidden", "v6e-8", 8, 2, 8, 768, 151936, 2048, True


@pytest.fixture(scope="module")
def compiled(root):
    """The compiler's numbers of each program, by name."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(list(programs()))], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = re.findall(r"^RESULT (.*)", done.stdout, re.MULTILINE)
    return dict(json.loads(line) for line in lines)


@pytest.mark.parametrize("accelerator", SLICES)
@pytest.mark.parametrize("model", SHAPES)
def test_fused_with_the_head_it_compiles_at_every_recipe_s_shape(compiled, accelerator, model):
    vocabulary, width, _, tokens = SHAPES[model]
    found = compiled[f"{accelerator} {model} hidden"]
    assert found["kernels"] == 1
    assert found["gathers"]
    assert found["scatters"]
    # The head is gathered once; in addition a chunk of logits, hidden states in float32 and what XLA needs for both.
    head = 2 * vocabulary * width
    hidden = 4 * SEQUENCES * tokens * width
    assert found["temporaries"] < head + 4 * hidden + 0.4 * GIB
    # Logits of one device alone would be more than that.
    assert found["temporaries"] - head < 4 * SEQUENCES * tokens * vocabulary


@pytest.mark.parametrize("accelerator", SLICES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_gradient_takes_the_place_of_the_logits(compiled, accelerator, dtype):
    found = compiled[f"{accelerator} logits {dtype}"]
    assert found["kernels"] == 2
    assert not found["gathers"]
    assert found["aliased"] == SEQUENCES * 768 * 151936 * (2 if dtype == "bfloat16" else 4)
    assert found["temporaries"] < 0.1 * GIB


@pytest.mark.parametrize("shape", RAGGED, ids=str)
def test_every_shape_compiles_and_long_ragged_ones_are_not_padded(compiled, shape):
    sequences, tokens, vocabulary = shape
    found = compiled[f"ragged {shape}"]
    assert found["kernels"] == 2
    assert compiled[f"ragged hidden {shape}"]["kernels"] == 1
    if shape in RAGGED[:2]:
        assert found["temporaries"] < 0.2 * 2 * sequences * tokens * vocabulary


def test_a_vocabulary_over_several_devices_is_not_gathered(compiled):
    assert compiled["tensor"]["kernels"] == 1
    assert compiled["tensor"]["temporaries"] < compiled["v6e-8 qwen2.5-3b hidden"]["temporaries"]
