"""The real TPU compiler on the tiny model: libtpu compiles for v6e without a TPU.

Each command runs once, as a reader types it, and the tests read what it said.  --quick: the compiler is the same, and
is asked for less effort.
"""

import json
import os
import re
import subprocess
import sys

import pytest

from grpo_lib.preflight import Result

TINY = [
    "--quick",
    "model.dtype=bfloat16",
    "hardware.accelerator=v6e-4",
    "rollout.max_prompt_length=64",
    "training.micro_batch_size=8",
]
# 98,304 completions of 88 tokens at once: their activations alone are more than the memory of four chips.
ABSURD = ["training.prompts_per_step=12288", "training.micro_batch_size=98304"]

COMMANDS = {
    "fits": TINY,
    "again": TINY,
    "absurd": [*TINY, *ABSURD],
    "pallas": [*TINY, "loss.implementation=pallas", "grpo.beta=0.04"],
}


def grpo(root, cache, arguments):
    """`grpo preflight`, in a process of its own as a reader runs it, with a cache of its own."""
    code = (
        "import functools, pathlib, sys\n"
        "from grpo_lib import cli, compilation\n"
        "compilation.Compiler = functools.partial(compilation.Compiler, cache=pathlib.Path(sys.argv.pop(1)))\n"
        "cli.main()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, str(cache), "preflight", "recipes/tiny-cpu.yaml", "--json", *arguments],
        cwd=root,
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )


@pytest.fixture(scope="module")
def done(root, tmp_path_factory):
    """Every command's process, in order; they share a cache that begins empty."""
    cache = tmp_path_factory.mktemp("preflight")
    return {name: grpo(root, cache, arguments) for name, arguments in COMMANDS.items()}


@pytest.fixture(scope="module")
def results(done):
    for process in done.values():
        assert process.returncode in (0, 1), process.stderr
    return {name: Result.model_validate_json(process.stdout.splitlines()[-1]) for name, process in done.items()}


@pytest.fixture(scope="module")
def sizes(root):
    """The tiny model's sizes, from its own config.json."""
    return json.loads((root / "assets" / "tiny-base" / "config.json").read_text(encoding="utf-8"))


def parameters(sizes):
    """Of a tied Qwen3: embedding; per layer four projections, a gated MLP and four norms; a last norm."""
    width, head, heads, kv = (
        sizes[key] for key in ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads")
    )
    attention = width * head * (2 * heads + 2 * kv)
    layer = attention + 3 * width * sizes["intermediate_size"] + 2 * width + 2 * head
    return sizes["vocab_size"] * width + sizes["num_hidden_layers"] * layer + width


def test_the_tiny_recipe_compiles_and_fits(done, results):
    assert done["fits"].returncode == 0
    assert results["fits"].fits and results["fits"].margin > 0
    assert results["fits"].floor.seconds > 0
    assert results["fits"].trials == ()


def test_the_kernel_s_loss_is_compiled_for_the_update_and_for_the_reference(results):
    result = results["pallas"]
    assert result.fits and len(result.programs) == 2
    assert any("the compiler does not count inside a kernel" in note for note in result.notes)
    # The same weights, optimizer and batch; the reference's log-probabilities come beside them.
    jax, pallas = results["fits"].programs[0].says, result.programs[0].says
    assert (pallas.parameter_shard, pallas.optimizer_shard) == (jax.parameter_shard, jax.optimizer_shard)
    assert pallas.batch == jax.batch + 4 * 8 * 24 // 4


def test_the_compiler_s_sizes_are_those_of_the_parameters(results, sizes):
    """Two derivations that share nothing: shapes in config.json, and the arguments of what was compiled."""
    says = results["fits"].programs[0].says
    count, own = parameters(sizes), says.parameter_shard + says.optimizer_shard + says.batch
    assert says.parameters == count
    assert says.parameter_bytes == 2 * count  # bfloat16
    # Two moments and the accumulated gradients; norms are not split, so a shard is a little more than a quarter.
    assert says.optimizer_shard == pytest.approx(3 * 2 * count / 4, rel=0.01)
    # In memory small arrays are padded to whole tiles, which is much for a model of this size.
    assert own <= says.arguments < 2 * own
    # Tunix donates the optimizer's state and not the weights: those come out anew.
    assert says.optimizer_shard <= says.aliased < says.arguments
    assert says.parameter_shard <= says.outputs - says.aliased < 2 * says.parameter_shard


def test_the_counted_work_is_that_of_the_model(results, sizes):
    """A forward and a backward pass take 6 flops to a parameter and token, 8 with recomputation, and attention."""
    update = next(part for part in results["fits"].floor.parts if part.name == "policy update")
    tokens_per_chip = 8 * 88 / 4
    attention = 2 * 2 * 88 * sizes["num_attention_heads"] * sizes["head_dim"] * sizes["num_hidden_layers"]
    assert 6 * parameters(sizes) < update.work.flops / tokens_per_chip < 8 * parameters(sizes) + 4 * attention


def test_a_second_call_compiles_nothing(done, results):
    assert "compiling the policy update" in done["fits"].stderr
    assert "compiling" not in done["again"].stderr
    assert results["again"] == results["fits"]


def test_an_absurd_micro_batch_is_refused_with_a_change_that_fits(done, results):
    absurd = results["absurd"]
    assert done["absurd"].returncode == 1
    assert not absurd.fits
    assert "compiler refuses the policy update" in absurd.problem
    says = absurd.programs[0].says
    assert says.refused and says.wanted > 31.24 * 2**30 / 4
    assert set(absurd.remedy) == {"training.micro_batch_size"}
    assert absurd.remedy["training.micro_batch_size"] < 98304
    assert absurd.trials[-1].fits and absurd.trials[-1].margin > 0


def test_versions_and_command_are_in_the_result(results):
    assert set(results["fits"].versions) >= {"jax", "libtpu", "maxtext", "google-tunix"}
    assert results["fits"].command == "grpo preflight recipes/tiny-cpu.yaml " + " ".join([*TINY[1:], "--quick"])


def test_progress_is_on_stderr_alone(done):
    assert re.search(r"^compiling the policy update", done["fits"].stderr, re.MULTILINE)
    assert len(done["fits"].stdout.splitlines()) == 1
