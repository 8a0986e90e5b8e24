"""On a TPU VM: .venv-tpu/bin/python -m pytest tests/tpu/on_tpu

The kernel is compiled and compared with plain JAX, then the course's recipe takes two steps on the chips.
"""

import os

os.environ["JAX_PLATFORMS"] = ""  # tests/conftest.py chooses the CPU; here JAX chooses, before it is imported

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_train import losses

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "tpu", reason=f"on_tpu: needs a TPU, and JAX finds {jax.default_backend()}"
)


@pytest.mark.parametrize("source", ["logits", "hidden"])
def test_the_kernel_agrees_with_plain_jax(source):
    rng = np.random.default_rng(0)
    shapes = {"logits": (2, 256, 32000)} if source == "logits" else {"hidden": (2, 256, 512), "head": (512, 32000)}
    inputs = {name: jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for name, shape in shapes.items()}
    ids = jnp.asarray(rng.integers(0, 32000, (2, 256)))

    def total(inputs, implementation):
        logps, entropy = losses.token_statistics(ids, implementation=implementation, **inputs)
        return logps.sum(), (logps, entropy)

    run = jax.jit(jax.value_and_grad(total, has_aux=True), static_argnums=1)
    assert "tpu_custom_call" in run.lower(inputs, "pallas").compile().as_text()
    found, expected = run(inputs, "pallas"), run(inputs, "jax")
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.float32(ours), np.float32(theirs), rtol=2e-2, atol=2e-2 * float(abs(theirs).max())
        )


def test_two_steps_of_grpo(root, tmp_path):
    from grpo_train import pipeline
    from grpo_train.recipes import load_recipe

    changes = ["hardware.trainer_devices=1", "training.steps=2", "problems.validation=16", "problems.test=64"]
    rows = []
    pipeline.run(load_recipe(root / "recipes" / "tiny-cpu.yaml", changes), tmp_path, rows.append, progress=False)
    assert [row["step"] for row in rows] == [1, 2] and all(np.isfinite(row["loss"]) for row in rows)
