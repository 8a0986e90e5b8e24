"""The real TPU compiler on the tiny model: libtpu compiles for v6e without a TPU.

Each command runs once, as a user types it, and the tests read its output.  --quick: the same compiler with low effort.
"""

import json
import re
import subprocess
import sys

import pytest
import yaml

from grpo_train.tpu.change_table import AS_IT_IS
from grpo_train.tpu.preflight import Result

TINY = [
    "--quick",
    "model.dtype=bfloat16",
    "hardware.accelerator=v6e-4",
    "rollout.max_prompt_length=64",
    "training.micro_batch_size=8",
]
# 98,304 completions of 88 tokens at once: their activations alone are more than the memory of four chips.
ABSURD = ["training.prompts_per_step=12288", "training.micro_batch_size=98304", "rollout.micro_batch_size=16"]

COMMANDS = {
    "fits": TINY,
    "again": TINY,
    "absurd": [*TINY, *ABSURD],
    "two processes": [*TINY, "hardware.processes=2", "hardware.sampler_tensor=2"],
    "pallas": [*TINY, "loss.implementation=pallas", "grpo.beta=0.04"],
    "vllm": [*TINY, "rollout.engine=vllm"],
    "no kernel": [*TINY, "rollout.engine=vllm", "rollout.vllm.options={block_size: 17}"],
}


# A process of its own that keeps what it compiles in the folder of its first argument.
CODE = """
import functools, pathlib, sys
from grpo_train import cli
from grpo_train.tpu import compiler
compiler.Compiler = functools.partial(compiler.Compiler, cache=pathlib.Path(sys.argv.pop(1)))
cli.main()
"""


@pytest.fixture(scope="module")
def done(root, tmp_path_factory):
    """`grpo preflight` in a process of its own for every command, in order; they share a cache that begins empty."""
    start = [sys.executable, "-c", CODE, str(tmp_path_factory.mktemp("cache"))]
    start += ["preflight", "recipes/tiny-cpu.yaml", "--json"]
    return {
        name: subprocess.run([*start, *arguments], cwd=root, capture_output=True, text=True)
        for name, arguments in COMMANDS.items()
    }


@pytest.fixture(scope="module")
def results(done):
    compiled = {name: process for name, process in done.items() if name != "no kernel"}
    for process in compiled.values():
        assert process.returncode in (0, 1), process.stderr
    return {name: Result.model_validate_json(process.stdout.splitlines()[-1]) for name, process in compiled.items()}


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


def test_the_tiny_recipe_compiles_and_fits_and_a_second_call_compiles_nothing(done, results):
    fits = results["fits"]
    assert fits.fits
    assert fits.margin > 0
    assert fits.lower_bound.seconds > 0
    assert fits.hints == ()
    assert "compiling" in done["fits"].stderr
    assert len(done["fits"].stdout.splitlines()) == 1
    assert done["again"].stderr == ""  # nor looks for a TPU, of which libtpu would speak
    assert results["again"] == fits


def test_the_kernel_s_loss_is_compiled_for_the_update_and_for_the_reference(results):
    result = results["pallas"]
    assert [program.kind for program in result.programs] == ["update", "logps", "prefill", "decode"]
    # The same weights, optimizer and batch; the reference's log-probabilities are added, in packed rows of 96 tokens.
    jax = results["fits"].programs[0].compilation
    pallas = result.programs[0].compilation
    assert (pallas.parameter_shard, pallas.optimizer_shard) == (jax.parameter_shard, jax.optimizer_shard)
    assert pallas.batch == jax.batch + 4 * 8 * 96 // 4


def test_the_compiler_s_sizes_are_those_of_the_parameters(results, sizes):
    """Two independent derivations: shapes in config.json, and the arguments of what was compiled."""
    found = results["fits"].programs[0].compilation
    count = parameters(sizes)
    given = found.parameter_shard + found.optimizer_shard + found.batch
    assert found.parameters == count
    assert found.parameter_bytes == 2 * count  # bfloat16
    # Two moments and the accumulated gradients in float32; norms are not split, so a shard is a little over a quarter.
    assert found.optimizer_shard == pytest.approx(3 * 4 * count / 4, rel=0.01)
    # In memory small arrays are padded to whole tiles, which is much for a model of this size.
    assert given <= found.arguments < 2 * given
    # Tunix donates the optimizer's state and not the weights: those are outputs.
    assert found.optimizer_shard <= found.aliased < found.arguments
    assert found.parameter_shard <= found.outputs - found.aliased < 2 * found.parameter_shard


@pytest.mark.parametrize("command, devices, tensor, rows", [("fits", 4, 1, 128), ("two processes", 2, 2, 64)])
def test_the_sampler_s_sizes_are_those_of_the_model(results, sizes, command, devices, tensor, rows):
    """128 completions on four replicas of one chip; or 64 in each process, on one replica of two."""
    found = {program.kind: program for program in results[command].programs}
    assert list(found) == ["update", "prefill", "decode"]
    head, layers, width = (sizes[key] for key in ("head_dim", "num_hidden_layers", "hidden_size"))
    assert sizes["num_key_value_heads"] == 1  # of two chips each has it
    weights = parameters(sizes) + (2 * width * head * layers if tensor == 2 else 0)
    own_rows = rows * tensor // devices
    cache = own_rows * 88 * head * layers * 2 * 2  # keys and values, bfloat16
    for kind in ("prefill", "decode"):
        made = found[kind].compilation
        assert made.sampler_shard == pytest.approx(2 * weights / tensor, rel=0.01)  # norms of a head are not split
        assert made.cache_shard == cache + own_rows * 4 * layers  # and where the rows end
        own = made.sampler_shard + made.cache_shard + made.batch
        assert own <= made.arguments < 2 * own  # small arrays are padded to whole tiles
        assert made.aliased >= made.cache_shard  # the cache is written where it is
        assert made.outputs - made.aliased < 4096
        assert made.temporaries > 0
    (chip,) = results[command].chips
    lines = {line.name: line for line in chip.lines}
    decode = found["decode"].compilation
    assert lines["sampler weights"].bytes + lines["KV cache"].bytes == decode.arguments - decode.batch
    # The largest weight, an MLP's: whole, and its part on a chip.
    assert lines["sync: one weight"].bytes == 2 * width * sizes["intermediate_size"] * (1 + tensor) // tensor


def test_the_counted_work_is_that_of_the_model(results, sizes):
    """A forward and a backward pass take 6 flops to a parameter and token, 8 with recomputation, and attention."""
    update = next(part for part in results["fits"].lower_bound.parts if part.name == "policy update")
    tokens_per_chip = 8 * 88 / 4
    attention = 2 * 2 * 88 * sizes["num_attention_heads"] * sizes["head_dim"] * sizes["num_hidden_layers"]
    assert 6 * parameters(sizes) < update.work.flops / tokens_per_chip < 8 * parameters(sizes) + 4 * attention


def test_the_attention_kernel_of_vllm_is_compiled_or_the_recipe_is_refused_in_one_line(done, results, sizes):
    update, kernel = results["vllm"].programs
    assert (update.kind, kernel.kind) == ("update", "attention")
    # One layer's cache is written where it is: keys and values of 128 x 88 tokens at least, in bfloat16.
    assert kernel.compilation.code > 0
    assert kernel.compilation.aliased >= 2 * 2 * sizes["head_dim"] * 128 * 88
    refusal = done["no kernel"].stderr.splitlines()[-1]
    assert (done["no kernel"].returncode, done["no kernel"].stdout) == (2, "")
    assert "in blocks of 17 tokens" in refusal
    assert refusal.startswith("error: rollout.engine=vllm: tpu-inference has no attention kernel for 2 query and 1 ")


def test_an_absurd_micro_batch_does_not_fit_and_hints_are_given(done, results):
    absurd = results["absurd"]
    found = absurd.programs[0].compilation
    assert done["absurd"].returncode == 1
    assert not absurd.fits
    assert found.oom_message
    assert found.bytes_needed > 31.24 * 2**30 / 4
    assert absurd.hints[0].startswith("training.micro_batch_size=49152")


# Each is a change of the recipe as it is: one that is compiled, one that only makes a step longer, one that is refused.
FEWER_ROWS = "rollout.micro_batch_size=8"
MORE_PROMPTS = "training.prompts_per_step=32+rollout.micro_batch_size=16"
REFUSED = "training.micro_batch_size=9"


@pytest.mark.nightly(minutes=10)
def test_changes_are_compared_at_full_effort(root, tmp_path):
    """The real compiler makes an estimate for each change that is possible, in the order of what it should cost."""
    settings = yaml.safe_load((root / "recipes" / "tiny-cpu.yaml").read_text(encoding="utf-8"))
    settings["hardware"] = {"accelerator": "v6e-1"}
    settings["rollout"]["max_prompt_length"] = 64
    settings["model"]["dtype"] = "bfloat16"
    settings["training"]["micro_batch_size"] = 8
    recipe = tmp_path / "tiny-v6e.yaml"
    recipe.write_text(yaml.safe_dump(settings), encoding="utf-8")
    command = [sys.executable, "-c", CODE, str(tmp_path), "preflight", str(recipe), "--compare", "--json"]
    done = subprocess.run([*command, FEWER_ROWS, MORE_PROMPTS, REFUSED], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {row["change"]: row for row in json.loads(done.stdout.splitlines()[-1])["changes"]}
    assert list(rows) == [AS_IT_IS, FEWER_ROWS, MORE_PROMPTS, REFUSED]
    assert "not possible" in rows.pop(REFUSED)["slice"]
    assert all(" to " in row["update, s"] and "≥" not in row["step, s"] for row in rows.values())
    decoding, hours = (
        {name: float(re.search(r" to ([\d.e-]+)", row[column])[1]) for name, row in rows.items()}  # all at full length
        for column in ("decoding, s", "run, hours")
    )
    # Half of the rows at once are two batches, and each takes as many turns of the loop as the whole did.
    assert decoding[FEWER_ROWS] > decoding[AS_IT_IS]
    assert decoding[MORE_PROMPTS] == pytest.approx(2 * decoding[AS_IT_IS], rel=0.1)
    assert hours[MORE_PROMPTS] > hours[AS_IT_IS]
