"""Compile training steps of MaxText that others published with their time, for docs/estimates.md.

    .venv-tpu/bin/python dev/tools/compile_published.py            # those that programs.json has not
    .venv-tpu/bin/python dev/tools/compile_published.py NAME …     # ten minutes of a core each
    .venv-tpu/bin/python dev/tools/compile_published.py --kernel   # bundles, without and with segment ids

Settings are in assets/estimates/published.yaml; the time of the whole step goes into programs.json beside it, and what
was compiled is kept in .cache/published.  The compiler says nothing of attention's kernel: the bundles of its loops
count, a cycle each.  They are read from a listing, which a process of its own makes, since libtpu takes its flags once.
`make_estimates.py predict` reads the result.  What is left out of the settings: the flags that this libtpu refuses.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import read_json, write_json_atomic, write_text_atomic
from grpo_train.recipes.slices import parse_slice
from grpo_train.runs import machine
from grpo_train.tpu import compiler
from grpo_train.tpu.compile_jobs import ProgramTime
from grpo_train.tpu.op_costs import RATES
from grpo_train.tpu.program_time import kernel_bundles, program_time

FOLDER = environment.repo_root() / "assets" / "estimates"
KERNELS = ("splash_mha_fwd", "splash_mha_dkv")  # forward; all gradients in one
LENGTH, BLOCK, HEAD_DIM = 8192, 2048, 128
BLOCKS = LENGTH // BLOCK
# Of the BLOCKS² blocks of a row and head, those above the diagonal are left out.
COMPUTED = BLOCKS * (BLOCKS + 1) // 2
LISTED_HEADS = 2
# The predictions were made without segment ids, which tell the texts of a row apart; MaxText's steps have them.
PLAIN, SEGMENTED = KINDS = ("plain", "segmented")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of published.yaml")
    parser.add_argument("--kernel", action="store_true", help="only the bundles of attention's kernel, in a minute")
    parser.add_argument("--list-kernel", choices=KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.list_kernel:
        list_kernel(segmented=arguments.list_kernel == SEGMENTED)
        return
    if arguments.kernel:
        compiler.require_libtpu()
        print(*(f"{kind}: {kernels_bundles(kind)}" for kind in KINDS), sep="\n")
        return
    published = yaml.safe_load((FOLDER / "published.yaml").read_text(encoding="utf-8"))
    file = FOLDER / "programs.json"
    programs = read_json(file, "")
    wanted = arguments.names or [name for name in published["steps"] if name not in programs]
    if unknown := [name for name in wanted if name not in published["steps"]]:
        raise SystemExit(f"{unknown[0]} is not in published.yaml; known: {', '.join(published['steps'])}")
    compiler.require_libtpu()
    bundles = kernels_bundles()
    for name in wanted:
        step = published["steps"][name]
        text = compiled(name, [*published["settings"], *step["settings"]], step, published["flags"])
        time = timed(text, step, bundles)
        programs[name] = facts(step, time, bundles)
        write_json_atomic(file, programs)
        print(f"{name}: {time.seconds:.2f} s")


def facts(step: dict[str, Any], time: ProgramTime, bundles: dict[str, int]) -> dict[str, Any]:
    versions = machine.describe(devices=False)["packages"]
    by = ", ".join(f"{package} {versions[package]}" for package in ("maxtext", "jax"))
    what = f"{step['what']}, {step['slice']}, compiled by {by}; attention's kernel by its bundles"
    return {"what": what, "libtpu": time.libtpu, "bundles": bundles, "whole": time.model_dump(mode="json")}


def timed(text: str, step: dict[str, Any], bundles: dict[str, int]) -> ProgramTime:
    """The time of a step; a call of a kernel takes the blocks that it computes, of all rows and heads of a chip."""
    generation = parse_slice(step["slice"]).chip.generation
    turns = step["rows"] * step["heads"] * COMPUTED
    seconds = {kernel: turns * count / RATES[generation].clock for kernel, count in bundles.items()}
    libtpu = machine.describe(devices=False)["packages"].get("libtpu", "")
    return program_time(text, generation, kernel_seconds=seconds, libtpu=libtpu)


def compiled(name: str, settings: list[str], step: dict[str, Any], flags: list[str]) -> str:
    """The optimised HLO of a step, of .cache/published where the same was compiled by the same versions."""
    made_of = json.dumps([settings, step, flags, compiler.require_libtpu()], sort_keys=True)
    digest = hashlib.sha256(made_of.encode()).hexdigest()[:12]
    kept = environment.cache_dir() / "published" / f"{name}-{digest}.hlo"
    if not kept.is_file():
        rows = f"per_device_batch_size={step['rows']}"
        os.environ["LIBTPU_INIT_ARGS"] = " ".join([*flags, "--xla_tpu_spmd_rng_bit_generator_unsafe=true"])
        write_text_atomic(kept, compiled_step([*settings, rows], step["slice"]).as_text())
    return kept.read_text(encoding="utf-8")


def compiled_step(settings: list[str], accelerator: str) -> Any:
    """MaxText's training step for a slice, in the order of its own train_compile.main, which returns nothing."""
    compiler.prepare()
    import jax

    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
    from flax.core.spmd import logical_axis_rules
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train, train_compile
    from maxtext.utils import maxtext_utils, sharding

    base = Path(pyconfig.__file__).parent / "base.yml"
    target = [f"compile_topology={accelerator}", "compile_topology_num_slices=1"]
    with tempfile.TemporaryDirectory(prefix="published-") as output:
        given = [str(base), *target, f"base_output_directory={output}", *settings]
        config = pyconfig.initialize(["train_compile", *given])
    train_compile.validate_config(config)
    mesh = train_compile.get_topology_mesh(config)
    inputs, keywords, state, _, model = train_compile.get_shaped_inputs(mesh, config)
    weights, state = sharding.maybe_update_params_sharding_with_opt(config, state)
    state = sharding.build_zero1_input_state_mesh_shardings(config, state, weights)
    batch = sharding.get_input_data_sharding(config, mesh)
    functional = maxtext_utils.get_functional_train_with_signature
    step, *placed = functional(train.train_step, batch, state, model, config, weights)
    rules = logical_axis_rules(config.logical_axis_rules)
    return train_compile.jit_and_compile(step, inputs, keywords, mesh, *placed, config, rules)


def kernels_bundles(kind: str = PLAIN) -> dict[str, int]:
    """Bundles of one block of each kernel, from the listing that libtpu writes of it."""
    # The loop over heads and blocks turns twice more, to fill and to empty its pipeline.
    turns = LISTED_HEADS * BLOCKS**2 + 2
    with tempfile.TemporaryDirectory(prefix="bundles-") as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        command = [sys.executable, __file__, "--list-kernel", kind]
        subprocess.run(command, check=True, env=os.environ | {"LIBTPU_INIT_ARGS": flags}, stdout=subprocess.DEVNULL)
        return {kernel: bundles_in(Path(folder), kernel, turns) for kernel in KERNELS}


def bundles_in(folder: Path, kernel: str, turns: int) -> int:
    """Bundles of one turn of a kernel's loop that turns so often, of the listings in a folder.

    Raises CourseError where there is no such loop.
    """
    for listing in sorted(folder.glob(f"*{kernel}*-final_bundles.txt")):
        for address, limit in kernel_bundles(listing.read_text(encoding="utf-8", errors="replace")):
            if limit == turns:
                return address
    raise CourseError(f"no listing of {kernel} has a loop of {turns} turns; this libtpu may write it another way")


def list_kernel(segmented: bool) -> None:
    """Compile attention's kernel and its gradient alone, with the blocks of published.yaml."""
    compiler.prepare()
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    jax.config.update("jax_enable_compilation_cache", False)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")
    sizes = splash.BlockSizes(**{f"block_{name}": BLOCK for name in names}, use_fused_bwd_kernel=True)
    mask = masks.MultiHeadMask([masks.CausalMask((LENGTH, LENGTH))] * LISTED_HEADS)
    attention = splash.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)
    mesh = jax.sharding.Mesh(compiler.slice_devices("v6e-1")[:1], "chip")
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    given = jax.ShapeDtypeStruct((LISTED_HEADS, LENGTH, HEAD_DIM), jnp.bfloat16, sharding=whole)
    ids = jax.ShapeDtypeStruct((LENGTH,), jnp.int32, sharding=whole)

    def total(queries, keys, values, ids):
        segments = splash.SegmentIds(q=ids, kv=ids) if segmented else None
        attended: Any = attention(queries, keys, values, segments)
        return attended.astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(total, argnums=(0, 1, 2))).trace(given, given, given, ids)
    traced.lower(lowering_platforms=("tpu",)).compile({"xla_tpu_scoped_vmem_limit_kib": "98304"})


if __name__ == "__main__":
    main()
