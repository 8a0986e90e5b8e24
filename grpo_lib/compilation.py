"""Compile a recipe's programs for a TPU, on a machine without one: libtpu compiles ahead of time for a named slice.

    compiler = Compiler(recipe, say=print)
    compilation = compiler(programs_of(recipe)["update"])

What is compiled is what training runs: MaxText's model from models.maxtext_arguments, Tunix's own training step, the
recipe's optimizer.  No weight is made: arrays are shapes with a sharding over the slice's devices.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpo_lib import environment
from grpo_lib.errors import CourseError
from grpo_lib.files import write_text_atomic
from grpo_lib.programs import Compilation, Program
from grpo_lib.recipes import Recipe

VERSIONS = ("jax", "libtpu", "maxtext", "google-tunix", "flax", "optax")

# Little effort: most of a compilation's time is spent on scheduling, which does not change what is computed.  Enough to
# count the work of a few unrolled layers, and for a first answer.
QUICK = {"exec_time_optimization_effort": -1.0}

# Bytes behind the letters of the compiler's messages.
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def require_libtpu() -> dict[str, str]:
    """The versions that compile.  Raises CourseError where the TPU tier is not installed."""
    installed = environment.describe(devices=False)["packages"]
    found = {name: installed[name] for name in VERSIONS if name in installed}
    missing = [name for name in VERSIONS if name not in found]
    if missing:
        raise CourseError(
            f"preflight needs the TPU tier, and {', '.join(missing)} is not installed in {sys.prefix}; "
            "make setup-tpu installs it, then: .venv-tpu/bin/grpo preflight RECIPE"
        )
    return found


def prepare() -> None:
    """Let libtpu compile on a machine without a TPU.  Must come before anything imports JAX."""
    os.environ.update(
        JAX_PLATFORMS="cpu",  # constants are made here; a TPU, where there is one, stays free
        TPU_SKIP_MDS_QUERY="1",  # no metadata server is asked which TPU this machine has
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # its lock file keeps two processes off one TPU; no TPU is used here
        TPU_ACCELERATOR_TYPE="v6e-1",  # of this machine, which has none: the slice is named in every call
        TPU_WORKER_HOSTNAMES="localhost",  # without the two it complains on stderr
    )


class Compiler:
    """Compiles programs of a recipe, each once: what was compiled is kept in a folder, by program and versions."""

    def __init__(
        self,
        recipe: Recipe,
        say: Callable[[str], None] = lambda text: None,
        cache: Path | None = None,
        refresh: bool = False,
    ):
        """
        Args:
          recipe: for the optimizer; any recipe with the same schedule gives the same programs.
          say: told what is compiled, and every so often how long it has taken.
          refresh: compile again what the folder holds.
        """
        self.recipe, self.say, self.refresh = recipe, say, refresh
        self.versions = require_libtpu()
        self.cache = cache or environment.repo_root() / ".cache" / "preflight"
        self.fresh: set[Path] = set()  # files that this object has written

    def __call__(self, program: Program) -> Compilation:
        path = self.cache / f"{program.key(self.versions)}.json"
        if path.is_file() and (not self.refresh or path in self.fresh):
            with contextlib.suppress(ValueError):  # another version of this file's format is compiled again
                return Compilation.model_validate_json(path.read_text(encoding="utf-8"))
        with _ticking(program.title, self.say):
            compilation = compile_program(program, self.recipe)
        write_text_atomic(path, compilation.model_dump_json(indent=1) + "\n")
        self.fresh.add(path)
        return compilation


def compile_program(program: Program, recipe: Recipe) -> Compilation:
    """Compile one program; `refused` says so where the compiler finds no room for it on the chip.

    Raises CourseError when libtpu or MaxText cannot make what the recipe asks for.
    """
    prepare()
    started = time.monotonic()
    import jax
    from flax.linen import partitioning

    from grpo_lib import models

    # A compilation that JAX read back from its own cache would not say how large it is.
    jax.config.update("jax_enable_compilation_cache", False)
    devices = slice_devices(program.accelerator)[: program.devices]
    with models.quiet():
        config, mesh, model = abstract_model(program, devices)
        with mesh, partitioning.axis_rules(config.logical_axis_rules):
            lower = {"update": _lower_update, "logps": _lower_logps}[program.kind]
            lowered, facts = lower(program, recipe, config, mesh, model)
            try:
                compiled, refused = lowered.compile(QUICK if program.layers or program.quick else None), None
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise CourseError(f"libtpu cannot compile the {program.title}: {_first_line(error)}") from error
                compiled, refused = None, str(error)
    facts |= _model_facts(config, model)
    facts |= {
        "seconds": round(time.monotonic() - started, 1),
        "host_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }
    if refused is not None:
        arguments = sum(facts.get(part, 0) for part in ("parameter_shard", "optimizer_shard", "batch"))
        return Compilation(refused=_first_line(refused), wanted=wanted_bytes(refused, arguments), **facts)
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    return Compilation(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        flops=cost.get("flops", 0),
        traffic=cost.get("bytes accessed", 0),
        **facts,
    )


def slice_devices(accelerator: str) -> list[Any]:
    """The devices of a slice that is not there.  Raises CourseError for one whose layout MaxText does not list."""
    from jax.experimental import topologies
    from maxtext.utils.accelerator_to_spec_map import UserFacingNameToSystemCharacteristics as layouts

    if accelerator not in layouts:
        family = accelerator.partition("-")[0] + "-"
        known = ", ".join(name for name in layouts if name.startswith(family))
        raise CourseError(f"hardware.accelerator={accelerator} is no size that there is; known: {known[:200]}")
    layout = layouts[accelerator]
    topology = topologies.get_topology_desc(
        platform="tpu",
        topology_name=layout.topology_name,
        chip_config_name=layout.chip_config_name,
        chips_per_host_bounds=layout.chips_per_host_bounds,
        num_slices=1,
        wrap=layout.wrap,
    )
    return list(topology.devices)


def abstract_model(program: Program, devices: list[Any]) -> tuple[Any, Any, Any]:
    """(MaxText's config, the mesh, the actor with shapes in place of weights), as models.load_actor makes them."""
    import jax
    from flax import nnx
    from maxtext.configs import pyconfig
    from maxtext.integration.tunix.tunix_adapter import TunixMaxTextAdapter
    from maxtext.utils import maxtext_utils, model_creation_utils

    from grpo_lib import hidden_states, models

    few, length = {}, program.prompt_length + program.completion_length
    if program.layers:
        few = {
            "scan_layers": False,
            "base_num_decoder_layers": program.layers,
            "override_model_config": True,
        }
    config = pyconfig.initialize(
        models.maxtext_arguments(
            program.model,
            weights=_has_weights(program.model.path),
            **{
                "scan_layers": True,
                "max_target_length": length,
                "enable_checkpointing": False,
                "ici_fsdp_parallelism": program.devices // program.tensor,
                "ici_tensor_parallelism": program.tensor,
                "hardware": "tpu",
                "jax_cache_dir": "",
            }
            | hidden_states.maxtext_settings(program.loss, length)
            | few,
        )
    )
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config, devices), config.mesh_axes)
    _, base = model_creation_utils.create_nnx_abstract_model(config, mesh)
    model = hidden_states.adapter_for(program.loss, TunixMaxTextAdapter(base_model=base, pad_id=0))
    graph, state = nnx.split(model)
    return config, mesh, nnx.merge(graph, jax.tree.map(lambda leaf: _placed(leaf, leaf.sharding, mesh), state))


def _lower_update(program, recipe, config, mesh, model):
    """Tunix's training step of one micro-batch, jitted and donated as tunix.sft.peft_trainer (0.1.7) does it."""
    import jax
    import optax
    from flax import nnx
    from tunix.rl.algo_core import grpo_loss_fn
    from tunix.rl.grpo.grpo_learner import GRPOConfig
    from tunix.sft.peft_trainer import PeftTrainer

    from grpo_lib import losses
    from grpo_lib.training import make_optimizer

    # The accumulation's length is a constant in the program, and 1 accumulates too.
    chain = optax.MultiSteps(make_optimizer(recipe), 2)
    optimizer = nnx.eval_shape(lambda model: nnx.Optimizer(model, chain, wrt=nnx.Param), model)
    graph, state = nnx.split(optimizer)
    specs = nnx.get_partition_spec(state)
    state = jax.tree.map(lambda leaf, spec: _placed(leaf, jax.sharding.NamedSharding(mesh, spec), mesh), state, specs)
    optimizer = nnx.merge(graph, state)
    algorithm = GRPOConfig(beta=0.04 if program.reference else 0.0, num_iterations=2 if program.old else 1)
    algorithm.temperature = program.temperature
    policy_loss = grpo_loss_fn
    if program.loss != "jax":
        algorithm.kl_loss_mode = "low_var_kl"  # Tunix's own is compiled with its default: as large, another formula
        policy_loss = functools.partial(losses.grpo_loss, implementation=program.loss)

    def loss(model, train_example, algo_config):
        return policy_loss(model, train_example, algo_config=algorithm, pad_id=0, eos_id=1)

    trainer = SimpleNamespace(
        _lora_enabled=False,
        _has_aux=True,
        loss_fn=loss,
        gen_model_input_fn=lambda example: {"train_example": example, "algo_config": algorithm},
    )

    def train_step(model, optimizer, inputs):
        return PeftTrainer._train_step(trainer, model, optimizer, inputs)

    batch = _micro_batch(program, mesh)
    traced = nnx.jit(train_step, donate_argnames=("optimizer",)).trace(model, optimizer, batch)
    lowered = traced.lower(lowering_platforms=("tpu",))
    return lowered, {"optimizer_shard": _shard_bytes(state), "batch": _shard_bytes(batch)}


def _lower_logps(program, recipe, config, mesh, model):
    """Tunix's log-probabilities of a micro-batch, as its inference worker asks for them."""
    from flax import nnx
    from tunix.rl import common

    from grpo_lib import losses

    graph, state = nnx.split(model)
    batch = _micro_batch(program, mesh)
    if program.loss == "jax":
        compute, more = common.compute_per_token_logps, {"stop_gradient": True, "return_logits": False}
    else:
        compute, more = losses.per_token_logps, {"implementation": program.loss}
    traced = compute.trace(
        graph,
        state,
        prompt_tokens=batch.prompt_ids,
        completion_tokens=batch.completion_ids,
        pad_id=0,
        eos_id=1,
        temperature=program.temperature,
        **more,
    )
    return traced.lower(lowering_platforms=("tpu",)), {"batch": _shard_bytes((batch.prompt_ids, batch.completion_ids))}


def _micro_batch(program: Program, mesh: Any) -> Any:
    """A micro-batch as Tunix shards it: sequences over the axis fsdp."""
    import jax
    import jax.numpy as jnp
    from tunix.rl.common import TrainExample

    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))

    def array(dtype, *lengths):
        return jax.ShapeDtypeStruct((program.sequences, *lengths), dtype, sharding=sharding)

    prompt, completion = program.prompt_length, program.completion_length
    return TrainExample(
        prompt_ids=array(jnp.int32, prompt),
        prompt_mask=array(jnp.bool_, prompt),
        completion_ids=array(jnp.int32, completion),
        completion_mask=array(jnp.bool_, completion),
        advantages=array(jnp.float32),
        ref_per_token_logps=array(jnp.float32, completion) if program.reference else None,
        old_per_token_logps=array(jnp.float32, completion) if program.old else None,
    )


def _placed(leaf: Any, sharding: Any, mesh: Any) -> Any:
    """A shape with its sharding; without one it lies whole on every device."""
    import jax

    if sharding is None:
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _model_facts(config: Any, model: Any) -> dict[str, int]:
    import jax
    from flax import nnx

    parameters = jax.tree.leaves(nnx.state(model, nnx.Param))
    embedding = config.vocab_size * config.emb_dim * parameters[0].dtype.itemsize
    return {
        "parameters": sum(math.prod(leaf.shape) for leaf in parameters),
        "parameter_bytes": sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in parameters),
        "parameter_shard": _shard_bytes(parameters),
        "num_layers": config.num_decoder_layers,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
        "looked_up": 0 if config.logits_via_embedding else embedding,
        "width": max(config.emb_dim, config.mlp_dim),
    }


def _shard_bytes(tree: Any) -> int:
    """Bytes of a tree of arrays on one device."""
    import jax

    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _has_weights(path: str) -> bool:
    return any((folder / "config.json").is_file() for folder in (Path(path), environment.repo_root() / path))


def wanted_bytes(message: str, arguments: int) -> float | None:
    """What a refused program would have taken beside its arguments; None where the compiler's message does not say.

    libtpu 0.0.44 writes "Used 37.02G of 31.24G hbm" after it has placed everything, and "the total memory required for
    HLO temporaries (180.00G) exceeds available HBM (31.24G)" when that alone is too much.
    """
    if found := re.search(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", message):
        return float(found[1]) * UNITS[found[2]] - arguments
    if found := re.search(r"memory required for HLO temporaries \(([\d.]+)([KMGT]?)\)", message):
        return float(found[1]) * UNITS[found[2]]
    return None


def _first_line(error: Any) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


@contextlib.contextmanager
def _ticking(title: str, say: Callable[[str], None], every: float = 15) -> Iterator[None]:
    """Say what is going on, and every few seconds that it still does."""
    done, started = threading.Event(), time.monotonic()

    def tick():
        while not done.wait(every):
            say(f"  … {time.monotonic() - started:.0f} s")

    say(f"compiling the {title}")
    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        say(f"  {time.monotonic() - started:.0f} s")
