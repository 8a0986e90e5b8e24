"""The real TPU compiler on small programs whose time on a v6e follows from arithmetic."""

import json
import subprocess
import sys

import pytest

from grpo_train.recipes.slices import CHIPS

# In a process of its own: libtpu is loaded with variables of its own.
CODE = """
import json
from grpo_train.tpu import compiler
compiler.prepare()
import jax, jax.numpy as jnp
from grpo_train.tpu.program_time import program_time
jax.config.update("jax_enable_compilation_cache", False)
devices = compiler.slice_devices("v6e-1")

def time(function, *shapes):
    place = jax.sharding.NamedSharding(jax.sharding.Mesh(devices[:1], "x"), jax.sharding.PartitionSpec())
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for dtype, shape in shapes]
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",))
    return program_time(lowered.compile().as_text(), "v6e").seconds

half, whole = jnp.bfloat16, jnp.float32
square = (half, (8192, 8192))
print(json.dumps({
    "product": time(lambda a, b: a @ b, square, square),
    "sum": time(lambda a, b: a + b, (whole, (32768, 4096)), (whole, (32768, 4096))),
    "loop": time(lambda a: jax.lax.scan(lambda c, _: ((c @ c).astype(c.dtype), None), a, length=7)[0], square),
}))
"""


@pytest.fixture(scope="module")
def seconds(root):
    done = subprocess.run([sys.executable, "-c", CODE], cwd=root, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_small_programs_take_what_arithmetic_says(seconds):
    chip = CHIPS["v6e"]
    at_peak = 2 * 8192**3 / chip.flops
    # By the compiler's own cycles this product reaches 0.70 of the peak (libtpu 0.0.44).
    assert at_peak <= seconds["product"] <= 1.5 * at_peak
    assert seconds["sum"] == pytest.approx(3 * 4 * 32768 * 4096 / chip.bandwidth, rel=0.15)
    assert seconds["loop"] == pytest.approx(7 * seconds["product"], rel=0.15)
