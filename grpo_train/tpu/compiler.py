"""Compile a recipe's programs for a TPU, on a machine without one: libtpu compiles ahead of time for a named slice.

    compiler = Compiler(recipe.training, recipe.grpo.iterations, print)
    compilation = compiler(programs_of(recipe)["update"])

What is compiled is what training runs: MaxText's model from maxtext_arguments, Tunix's own training step, the recipe's
optimizer; with Tunix's engine its sampler, too, on its own model.  No weight is made: arrays are shapes with a sharding
over the slice's devices.
"""

import functools
import logging
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.linen import partitioning

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError, first_line
from grpo_lib.common.files import write_text_atomic
from grpo_train.engines import maxtext_model, model_files
from grpo_train.engines.optimizer import make_optimizer, sum_in
from grpo_train.recipes.schema import TrainingRecipe
from grpo_train.recipes.slices import parse_slice
from grpo_train.runs import machine
from grpo_train.tpu.compile_jobs import (
    AttentionKernel,
    Compilation,
    CutSampler,
    Program,
    ProgramTime,
    SingleUpdate,
)
from grpo_train.tpu.program_time import program_time

VERSIONS = ("jax", "libtpu", "maxtext", "google-tunix", "flax", "optax")

# Low effort: most of a compilation's time is spent on scheduling, which does not change what is computed.  Enough to
# count the work of a few unrolled layers, and for a first answer.
QUICK = {"exec_time_optimization_effort": -1.0}


def require_libtpu() -> dict[str, str]:
    """The versions that compile.  Raises CourseError where the TPU tier is not installed."""
    installed = machine.describe(devices=False)["packages"]
    if missing := [name for name in VERSIONS if name not in installed]:
        raise CourseError(
            f"preflight needs the TPU tier, and {', '.join(missing)} is not installed in {sys.prefix}; "
            "make setup-tpu installs it, then: .venv-tpu/bin/grpo preflight RECIPE"
        )
    return {name: installed[name] for name in VERSIONS}


def prepare() -> None:
    """Let libtpu compile on a machine without a TPU.  Call it before JAX looks for devices."""
    jax.config.update("jax_platforms", "cpu")  # constants are made here; a TPU, where there is one, stays free
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1",  # do not ask the metadata server which TPU this machine has
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # its lock file keeps two processes off one TPU; no TPU is used here
        TPU_ACCELERATOR_TYPE="v6e-1",  # a placeholder: every call names its slice; without the two, warnings on stderr
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_NAME="none",  # tpu-inference 0.31.0 asks the metadata server for these two, without a timeout
        TPU_WORKER_ID="0",
    )

    # libtpu's scheduler writes what it simulated (program_time.simulated_seconds) to a file, and nothing to stderr.
    os.environ.setdefault("TPU_LOG_DIR", _log_folder().name)
    os.environ.setdefault("TPU_MIN_LOG_LEVEL", "0")
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    os.environ.setdefault("TPU_VMODULE", "latency_hiding_scheduler=1")


@functools.cache
def _log_folder() -> tempfile.TemporaryDirectory:
    """A folder that goes with this process."""
    return tempfile.TemporaryDirectory(prefix="grpo-libtpu-", ignore_cleanup_errors=True)


class Compiler:
    """Compiles programs of a recipe, with a cache on disk by program and versions."""

    def __init__(
        self, training: TrainingRecipe, iterations: int, log: Callable[[str], None], cache: Path | None = None
    ) -> None:
        self.training, self.iterations = training, iterations  # of them the optimizer is made
        self.log = log
        self.versions = require_libtpu()
        self.cache = cache or environment.cache_dir() / "preflight"

    def __call__(self, program: Program) -> Compilation:
        path = self.cache / f"{program.key(self.versions)}.json"
        if path.is_file():
            return Compilation.model_validate_json(path.read_text(encoding="utf-8"))
        self.log(f"compiling the {program.title}")
        started = time.monotonic()
        compilation = compile_program(program, self.training, self.iterations)
        self.log(f"  {time.monotonic() - started:.0f} s")
        write_text_atomic(path, compilation.model_dump_json(indent=1) + "\n")
        return compilation


def compile_program(program: Program, training: TrainingRecipe, iterations: int) -> Compilation:
    """Compile one program; `oom_message` is set where it does not fit the chip.

    Raises CourseError when libtpu or MaxText cannot make what the recipe asks for.
    """
    prepare()
    # A compilation that JAX reads back from its own cache does not report its size.
    jax.config.update("jax_enable_compilation_cache", False)
    devices = slice_devices(program.accelerator)[: program.devices]
    with maxtext_model.quiet():
        if program.kind in ("prefill", "decode"):
            return _compile(program, *_lower_sampler(program, devices))
        if isinstance(program, AttentionKernel):
            return _compile(program, _lower_attention(program, devices), {})
        config, mesh, model = abstract_model(program, devices)
        with mesh, partitioning.axis_rules(config.logical_axis_rules):
            if program.kind == "logps":
                lowered, more = _lower_logps(program, mesh, model)
            else:
                optimizer = make_optimizer(training, iterations, seed=0, weights=program.model.trainer_dtype)
                lowered, more = _lower_update(program, optimizer, mesh, model)
            return _compile(program, lowered, _model_facts(config, model) | more)


# Facts that are bytes among a program's arguments on one chip.
ARGUMENTS = ("parameter_shard", "optimizer_shard", "sampler_shard", "cache_shard", "batch")


def _compile(program: Program, lowered: Any, facts: dict[str, int]) -> Compilation:
    """The compiler's report, with these facts."""
    written = len(_scheduler_log())
    started = time.process_time()
    try:
        compiled = lowered.compile(QUICK if program.layers or program.quick else None)
    except jax.errors.JaxRuntimeError as error:
        message = str(error).strip().partition("\n")[0][:300]
        # A kernel runs out of a core's own memory, which nothing in a recipe's HBM changes.
        if "RESOURCE_EXHAUSTED" not in str(error) or program.kind == "attention":
            raise CourseError(f"libtpu cannot compile the {program.title}: {message}") from error
        arguments = sum(facts.get(name, 0) for name in ARGUMENTS)
        needed = bytes_needed(str(error), arguments)
        return Compilation(oom_message=message, bytes_needed=needed, **facts)
    cpu_seconds = time.process_time() - started
    memory = compiled.memory_analysis()
    cost = compiled.cost_analysis() or {}
    estimated, not_estimated = _estimated(program, compiled, _scheduler_log()[written:])
    return Compilation(
        time=estimated,
        not_estimated=not_estimated,
        cpu_seconds=cpu_seconds,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        flops=cost.get("flops", 0),
        traffic=cost.get("bytes accessed", 0),
        **facts,
    )


def _scheduler_log() -> str:
    """What libtpu has written in this process; empty where it writes elsewhere."""
    file = Path(os.environ["TPU_LOG_DIR"]) / "tpu_driver.INFO"
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _estimated(program: Program, compiled: Any, log: str) -> tuple[ProgramTime | None, str | None]:
    """(the estimated time of one run, None), or (None, why there is none); it is no reason to refuse a recipe."""
    if program.layers or program.quick:
        return None, "it was compiled with low effort, whose products are up to ten times slower"
    generation = parse_slice(program.accelerator).chip.generation
    libtpu = machine.describe(devices=False)["packages"]["libtpu"]
    try:
        return program_time(compiled.as_text(), generation, log=log, libtpu=libtpu), None
    except CourseError as error:
        return None, str(error)


def slice_devices(accelerator: str) -> list[Any]:
    """Devices of a slice that this machine does not have.  Raises CourseError if MaxText does not list its layout."""
    from jax.experimental import topologies
    from maxtext.utils.accelerator_to_spec_map import UserFacingNameToSystemCharacteristics as layouts

    if accelerator not in layouts:
        known = ", ".join(name for name in layouts if name.startswith(f"{accelerator.partition('-')[0]}-"))
        raise CourseError(f"hardware.accelerator={accelerator} is not a known slice; known: {known[:200]}")
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


def maxtext_config(program: Program) -> Any:
    """MaxText's config of the actor on the program's devices."""
    from maxtext.configs import pyconfig

    from grpo_train.engines import lora
    from grpo_train.losses import hidden_states

    length = program.prompt_length + program.completion_length
    settings: dict[str, Any] = {
        "scan_layers": not program.layers,
        "max_target_length": length,
        "enable_checkpointing": False,
        "ici_fsdp_parallelism": program.devices // program.tensor,
        "ici_tensor_parallelism": program.tensor,
        "hardware": "tpu",
        "jax_cache_dir": "",
        **hidden_states.maxtext_settings(program.loss, length),
        **lora.maxtext_settings(program.lora),
    }
    if program.layers:
        settings |= {"base_num_decoder_layers": program.layers, "override_model_config": True}
    folders = (Path(program.model.path), environment.repo_root() / program.model.path)
    weights = any((folder / "config.json").is_file() for folder in folders)
    if weights:
        maxtext_model.register_architecture(program.model)
    return pyconfig.initialize(maxtext_model.maxtext_arguments(program.model, weights=weights, **settings))


def abstract_model(program: Program, devices: list[Any]) -> tuple[Any, Any, Any]:
    """(MaxText's config, the mesh, the actor with shapes in place of weights), as load_actor makes them."""
    from maxtext.integration.tunix.tunix_adapter import TunixMaxTextAdapter
    from maxtext.utils import maxtext_utils, model_creation_utils

    from grpo_train.engines import lora
    from grpo_train.losses import hidden_states

    config = maxtext_config(program)
    model_files.require_heads(config.num_kv_heads, program.tensor)
    try:
        mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config, devices), config.mesh_axes)
    except NotImplementedError as error:  # of jax.experimental.mesh_utils: axes that do not fit a slice's rows of chips
        raise CourseError(
            f"hardware.trainer_tensor={program.tensor}: the {len(devices)} chips of {program.accelerator} cannot be "
            f"split so ({first_line(error)}); take another number"
        ) from None
    _, base = model_creation_utils.create_nnx_abstract_model(config, mesh)
    if program.lora.rank:
        with mesh, partitioning.axis_rules(config.logical_axis_rules):
            base = lora.shapes_with_adapters(base, config)
    model = hidden_states.adapter_for(program.loss, TunixMaxTextAdapter(base_model=base, pad_id=0))
    graph, state = nnx.split(model)
    return config, mesh, nnx.merge(graph, jax.tree.map(lambda leaf: _placed(leaf, leaf.sharding, mesh), state))


def _lower_update(program, own_optimizer, mesh, model):
    """Tunix's training step of one micro-batch, jitted and donated as tunix.sft.peft_trainer (0.1.7) does it."""
    from tunix.rl.algo_core import grpo_loss_fn
    from tunix.rl.grpo.grpo_learner import GRPOConfig
    from tunix.sft.peft_trainer import PeftTrainer

    from grpo_train import losses
    from grpo_train.losses import packing

    if program.layout == "groups":
        packing.share_prompts(model)
    # How many gradients are added up is a constant in the program.
    single = isinstance(program, SingleUpdate)
    chain = own_optimizer if single else optax.MultiSteps(own_optimizer, 2)
    trained = nnx.LoRAParam if program.lora.rank else nnx.Param

    def optimizer_of(model):
        return sum_in(nnx.Optimizer(model, chain, wrt=trained), program.optimizer_dtype)

    optimizer = nnx.eval_shape(optimizer_of, model)
    graph, state = nnx.split(optimizer)
    state = jax.tree.map(
        lambda leaf, spec: _placed(leaf, jax.sharding.NamedSharding(mesh, spec), mesh),
        state,
        nnx.get_partition_spec(state),
    )
    optimizer = nnx.merge(graph, state)
    algorithm: Any = GRPOConfig(beta=0.04 if program.reference else 0.0, num_iterations=2 if program.old else 1)
    algorithm.temperature = program.temperature
    policy_loss = grpo_loss_fn
    if program.loss != "jax" or program.rows:
        algorithm.kl_loss_mode = "low_var_kl"  # Tunix's own is compiled with its default: as large, another formula
        policy_loss = functools.partial(losses.grpo_loss, implementation=program.loss)

    def loss(model, train_example, algo_config):
        return policy_loss(model, train_example, algo_config=algorithm, pad_id=0, eos_id=1)

    trainer = SimpleNamespace(
        _lora_enabled=program.lora.rank is not None,
        _has_aux=True,
        loss_fn=loss,
        gen_model_input_fn=lambda example: {"train_example": example, "algo_config": algorithm},
    )

    def train_step(model, optimizer, inputs):
        return PeftTrainer._train_step(trainer, model, optimizer, inputs)

    batch = _micro_batch(program, mesh)
    traced = nnx.jit(train_step, donate_argnames=("optimizer",)).trace(model, optimizer, batch)
    return traced.lower(lowering_platforms=("tpu",)), {
        "optimizer_shard": _shard_bytes(state),
        "batch": _shard_bytes(batch),
    }


def _lower_logps(program, mesh, model):
    """Tunix's log-probabilities of a micro-batch, as its inference worker calls them."""
    from tunix.rl import common

    from grpo_train import losses

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


def _lower_sampler(program, devices):
    """Prefill or decoding by Tunix's sampler: its own jitted functions, with the state of sampling donated."""
    from tunix.generate import sampler as tunix

    from grpo_train.engines import tunix_models, tunix_sampler

    config = maxtext_config(program)
    mesh = tunix_models.sampler_mesh(devices, program.tensor)
    # Tunix's model with shapes in place of weights, as TunixSampler makes it.
    model_config = tunix_models.model_config(
        config.model_name,
        config.rope_max_timescale,
        tunix_models.maxtext_settings(config),
        config.dtype,
        mesh.shape["tp"],
    )
    module = tunix_models.abstract_model(model_config, mesh)
    shardings = tunix_models.weight_shardings(module, mesh)
    state = nnx.state(module, nnx.Param)
    for path, variable in state.flat_state():
        variable.set_value(_placed(variable.get_value(), shardings[path], mesh))
    nnx.update(module, state)
    # What it is asked while it is traced: which tokens are padding, and which end a completion.
    tokenizer = SimpleNamespace(encode=None, decode=None, bos_id=lambda: None, eos_id=lambda: 1, pad_id=lambda: 0)
    rows = program.sequences
    length = program.prompt_length + program.completion_length
    sampler = tunix_sampler.make_sampler(module, tokenizer, length, mesh)
    sampler.eos_ids = jnp.array([1])

    def array(dtype, *lengths):
        return jax.ShapeDtypeStruct((rows, *lengths), dtype, sharding=tunix_models.row_sharding(mesh))

    cache = tunix_models.cache_shapes(module.config, rows, length, mesh)
    arrays = {
        "token_buffer": array(jnp.int32, length),
        "positions": array(jnp.int32, length),
        "done": array(jnp.bool_),
        "seed": array(jnp.uint32, 2),
    }
    cut = {"top_p": 1.0, "top_k": None}
    if isinstance(program, CutSampler):
        cut = {"top_p": program.top_p, "top_k": program.top_k}
    # As Sampler.init_sample_state makes it.  Decoding gets it from prefill, which leaves everything where it was: the
    # state is donated.
    sampling: Any = tunix._SamplingState
    state = sampling(
        decoding_step=program.prompt_length - 1,
        num_input_tokens=program.prompt_length,
        cache=cache,
        total_sampling_steps=length,
        logits_buffer=None,
        logprobs_buffer=None,
        forbidden_token_ids=None,
        temperature=program.temperature,
        sampling_parameters=cut,
        sampling_mode="top_p",
        beam_search_sampling_state=None,
        **arrays,
    )
    weights = sampler._flattened_transformer_state
    with tunix_sampler.NO_MESH:
        if program.kind == "prefill":
            traced = sampler._compiled_prefill_fn.trace(weights, state, None, echo=False)
        else:
            traced = sampler._compiled_decode_fn.trace(weights, state)
        return traced.lower(lowering_platforms=("tpu",)), {
            "sampler_shard": _shard_bytes(weights),
            "cache_shard": _shard_bytes(cache),
            "batch": _shard_bytes(arrays),
        }


def _lower_attention(program: AttentionKernel, devices: list[Any]) -> Any:
    """Attention with one layer's cache.  Raises CourseError where tpu-inference has no kernel of these shapes."""
    # At its import it reports, as an error, that this machine has no chips; maxtext_model.quiet takes this back.
    logging.disable(logging.ERROR)
    try:
        attend, *shapes = attention(program, devices)
        # tpu-inference 0.31.0 asks jax.devices() which TPU this is (get_tpu_version, get_device_name).
        with mock.patch.object(jax, "devices", lambda *_: devices):
            return jax.jit(attend, donate_argnums=0).trace(*shapes).lower(lowering_platforms=("tpu",))
    except Exception as error:  # JAX's, Mosaic's and tpu-inference's have no type in common
        config = maxtext_config(program)
        blocks = program.page_size or "as many as it chooses"
        raise CourseError(
            f"rollout.engine=vllm: tpu-inference has no attention kernel for {config.num_query_heads} query and "
            f"{config.num_kv_heads} key-value heads of {config.head_dim} numbers on {program.tensor} chips of "
            f"{program.accelerator}, in blocks of {blocks} tokens "
            f"({first_line(error)}); change hardware.sampler_tensor or rollout.vllm.options"
        ) from error


def attention(program: AttentionKernel, devices: list[Any]) -> tuple[Callable[..., Any], Any, Any, Any]:
    """(attend, cache, fresh, tables): attention as vLLM's models call it, and the shapes of its arguments.

    `fresh` are queries, keys and values, [tokens, heads, numbers of a head] each, of prompts and of decoding.  `tables`
    are, for each of the two, how many tokens a sequence has so far, its pages in the cache, where its new tokens begin,
    and how many sequences decode; see ragged_paged_attention.
    """
    from tpu_inference import utils
    from tpu_inference.layers.common.attention_interface import sharded_ragged_paged_attention
    from tpu_inference.layers.vllm.backends.flash_attn import PallasAttentionBackend as Backend
    from tpu_inference.runner.kv_cache import get_kv_cache_shape_with_mesh

    config = maxtext_config(program)
    size = utils.get_padded_head_dim(config.head_dim)
    dtype = jnp.dtype(program.model.dtype)
    mesh = jax.sharding.Mesh(np.array(devices).reshape(1, -1), ("data", "model"))
    rows = program.sequences
    length = program.prompt_length + program.completion_length
    limits: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=length), scheduler_config=SimpleNamespace(max_num_seqs=rows)
    )
    page = program.page_size or max(Backend.get_page_size(limits), Backend.get_min_page_size(limits))
    pages = rows * -(-length // page)
    heads = utils.get_padded_num_heads(config.num_query_heads, program.tensor)
    kv_heads = utils.get_padded_num_heads(config.num_kv_heads, program.tensor)
    cache = get_kv_cache_shape_with_mesh(mesh, pages, page, kv_heads, size, dtype)

    array = functools.partial(_array, mesh)
    kernel = functools.partial(sharded_ragged_paged_attention, mesh, attention_sink=None)

    def attend(cache, fresh, tables, attention=kernel):
        outputs = []
        for inputs, table in zip(fresh, tables, strict=True):
            output, cache = attention(*inputs, cache, *table, sm_scale=config.head_dim**-0.5)
            outputs.append(output)
        return outputs, cache

    def queries_keys_values(tokens):
        return [array(("data", "model"), dtype, tokens, count, size) for count in (heads, kv_heads, kv_heads)]

    decoded = 1 << (rows - 1).bit_length()  # a token of each sequence, filled up to a power of two
    fresh = [queries_keys_values(program.tokens), queries_keys_values(decoded)]
    tables = [[array(("data",), jnp.int32, count) for count in (rows, pages, rows + 1, 3)] for _ in fresh]
    return attend, array((None, None, "model"), dtype, *cache), fresh, tables


def _micro_batch(program: Program, mesh: Any) -> Any:
    """A micro-batch as Tunix shards it, rows over the axis fsdp; packed rows have prompts and completions in one."""
    from grpo_train.losses.packing import Example

    array = functools.partial(_array, mesh, ("fsdp",))
    if program.rows is None:
        rows, prompt, width = program.sequences, program.prompt_length, program.completion_length
        more = {"advantages": array(jnp.float32, rows)}
    else:
        rows, width = program.rows
        prompt = 0
        more = {
            "advantages": array(jnp.float32, rows, width),
            "segment_ids": array(jnp.int32, rows, width),
            "segment_positions": array(jnp.int32, rows, width),
            "weights": array(jnp.float32, rows, width),
        }
    logps = array(jnp.float32, rows, width)
    example: Any = Example  # flax.struct hides its fields
    return example(
        prompt_ids=array(jnp.int32, rows, prompt),
        prompt_mask=array(jnp.bool_, rows, prompt),
        completion_ids=array(jnp.int32, rows, width),
        completion_mask=array(jnp.bool_, rows, width),
        ref_per_token_logps=logps if program.reference else None,
        old_per_token_logps=logps if program.old else None,
        **more,
    )


def _array(mesh: Any, axes: tuple[str | None, ...], dtype: Any, *lengths: int) -> jax.ShapeDtypeStruct:
    """A shape whose first axes are split over these of the mesh."""
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(lengths, dtype, sharding=sharding)


def _placed(leaf: Any, sharding: Any, mesh: Any) -> Any:
    """A shape with its sharding; without one it is replicated."""
    sharding = sharding or jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _model_facts(config: Any, model: Any) -> dict[str, int]:
    parameters = jax.tree.leaves(nnx.state(model, nnx.Param))
    itemsize = jnp.dtype(config.dtype).itemsize
    embedding = config.vocab_size * config.emb_dim * itemsize
    count = sum(math.prod(leaf.shape) for leaf in parameters)
    return {
        "parameters": count,
        "parameter_bytes": count * itemsize,
        "parameter_shard": _shard_bytes(parameters),
        "num_layers": config.num_decoder_layers,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
        "embedding_bytes": 0 if config.logits_via_embedding else embedding,
        "largest_weight": max(embedding, config.mlp_dim * config.emb_dim * itemsize),
        "width": max(config.emb_dim, config.mlp_dim),
    }


def _shard_bytes(tree: Any) -> int:
    """Bytes of a tree of arrays on one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def bytes_needed(message: str, arguments: int) -> float | None:
    """Bytes that a program needs in addition to its arguments, from the out-of-memory message; None if not in it.

    libtpu 0.0.44 writes "Used 37.02G of 31.24G hbm" after it has placed everything, and "the total memory required for
    HLO temporaries (180.00G) exceeds available HBM (31.24G)" when that alone is too much.
    """
    found = re.search(r"(Used |for HLO temporaries \()([\d.]+)([KMGT]?)", message)
    if not found:
        return None
    kind, number, unit = found.groups()
    size = float(number) * 2 ** (10 * "_KMGT".index(unit or "_"))
    return size - arguments if kind == "Used " else size
