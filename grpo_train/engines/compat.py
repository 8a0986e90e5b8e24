"""Workarounds of faults in the released versions of Tunix, MaxText, vLLM-TPU and JAX.

Each function says which version, what goes wrong without it, and the test that fails on the day it is no longer needed
(of tests/train/test_compat.py, where no file is named).  What has a fault is imported where it is worked around.

TunixSampler itself works around one more fault of google-tunix 0.1.7: without a seed, every call draws the same noise
(test_tunix_still_samples_the_same_noise_without_a_seed).
"""

import contextlib
import copy
import ctypes
import dataclasses
import functools
import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from grpo_lib.common.errors import CourseError
from grpo_train.runs import multihost

# ------------------------------------------------------------------------------------------------------------- Tunix


def keep_end_tokens(output: Any, sampled: np.ndarray) -> Any:
    """A RolloutOutput whose completions keep their end token.

    google-tunix 0.1.7, VanillaRollout: a completion is cut before its end token, so the policy never learns to stop.
    Which of several it was, the output does not say.  One that fills all places never had one.
    Args:
      sampled: [B, C], all that was sampled; behind the end of a completion there may be anything.
    Test: test_tunix_still_cuts_off_the_end_token.
    """
    whole = [row[: len(ids) + 1] for row, ids in zip(sampled, output.tokens, strict=True)]
    return dataclasses.replace(output, tokens=whole)


def reshard_on_devices() -> None:
    """Let Tunix move weights to the sampler's devices without a way through the host.

    google-tunix 0.1.7, rl/reshard.py, without Pathways: jax.device_put, which does not; see multihost.reshard.  Its
    vLLM engine has no option for it.
    Test: test_tunix_still_reshards_through_the_host (tests/train/test_multihost.py).
    """
    from tunix.rl import reshard

    reshard._get_reshard_fn_jax_device_put = lambda **_: functools.partial(jax.tree.map, multihost.reshard)


def sync_without_snapshot(cluster: Any) -> None:
    """Where each batch is used for one update: sync without a copy of the policy in the host's memory.

    google-tunix 0.1.7, RLCluster.sync_weights makes it each time, for log-probabilities that only several updates need.
    Test: test_tunix_still_copies_the_policy_after_each_sync.
    """

    def sync_weights() -> None:
        cluster.rollout.update_params(nnx.state(cluster.actor_trainer.model, nnx.Param), (nnx.Param,))
        cluster.global_steps += 1

    cluster.sync_weights = sync_weights
    cluster._anchor_policy_state = None


def sample_outside_the_mesh(cluster: Any) -> None:
    """Let vLLM's engine sample without the mesh as a context: a jitted function is compiled again inside of one.

    google-tunix 0.1.7 generates inside `with mesh:`; the engine has compiled its programs before, outside of it.
    Test: test_tunix_still_samples_inside_the_mesh.
    """
    from tunix.rl.rl_cluster import Role

    given = cluster._get_mesh_and_logical_axis_rules_cm
    plain = contextlib.nullcontext((cluster.r2m[Role.ROLLOUT], None))
    cluster._get_mesh_and_logical_axis_rules_cm = lambda role: plain if role == Role.ROLLOUT else given(role)


def keep_optimizer_state(trainer: Any) -> None:
    """Let the optimizer's state stay where it is: beside the sampler there may be no room for a second one.

    google-tunix 0.1.7, PeftTrainer._shard_optimizer: before the first update all of it is copied, by a constraint on
    how it lies outside of a jitted function.  What lies as it should is not moved here.
    Test: test_tunix_still_copies_the_optimizer_s_state.
    """

    def shard(mesh: Any) -> None:
        state = nnx.state(trainer.optimizer, nnx.optimizer.OptState)
        nnx.update(trainer.optimizer, jax.device_put(state, nnx.get_named_sharding(state, mesh), donate=True))

    trainer._shard_optimizer = shard


def donate_weights(trainer: Any) -> None:
    """Let an update write the new weights where the old ones are.

    google-tunix 0.1.7, PeftTrainer.jit_train_and_eval_step: the update may write over the optimizer's state only, so
    that old and new weights are in memory together; with adapters, those of the base and a copy of them.
    Nothing else may use the old ones afterwards: arrays of Actor.weights() that a reader keeps are gone after a step,
    and the sampler has none meanwhile (cluster.share_memory_with_sampler).
    Test: test_tunix_still_keeps_the_old_weights.
    """
    given = trainer.jit_train_and_eval_step

    def jit(skip_jit: bool = False, cache_nnx_graph: bool = False) -> Any:
        is_new = trainer._jitted_train_step_fn is None
        steps = given(skip_jit, cache_nnx_graph)
        if skip_jit or not is_new:
            return steps
        step = nnx.jit(trainer.create_train_step_fn(), donate_argnames=("model", "optimizer"))
        bind = nnx.cached_partial if cache_nnx_graph else functools.partial
        # Tunix looks for the jitted function in `.func` of what it finds here.
        trainer._jitted_train_step_fn = functools.partial(bind(step, trainer.model, trainer.optimizer))
        return given(skip_jit, cache_nnx_graph)

    trainer.jit_train_and_eval_step = jit


def require_rope_theta(rope_theta: float | None) -> None:
    """Refuse a Qwen3 model with a rotary base of its own.

    google-tunix 0.1.7, models/qwen3: rope_theta is accepted and ignored, so another value would be silently wrong.
    Test: test_tunix_still_ignores_rope_theta.
    """
    if rope_theta != 1_000_000:
        raise CourseError(f"rollout.engine=tunix needs rope_theta 1000000, and this model has {rope_theta}")


def old_logps_from_actor(cluster: Any, actor: Any) -> None:
    """Take the old log-probabilities of several updates per batch from the actor's snapshot of the last sync.

    google-tunix 0.1.7 asks the rollout engine for them. Its vLLM engine answers with lists of different lengths
    (TypeError in RLCluster.get_old_per_token_logps); its own sampler forgets the temperature that the loss divides by.
    The snapshot is what the ratio means by the old policy: at the first update the ratio is 1.
    Tests: test_tunix_still_forgets_the_temperature_of_old_logps, tests/tpu/stack/test_vllm.py.
    """
    from tunix.rl import rl_cluster, utils
    from tunix.sft import sharding_utils

    from grpo_train import losses

    pad, eos = cluster.rollout.pad_id(), cluster.rollout.eos_id()

    def of_snapshot(prompt_tokens, completion_tokens, micro_batch_size=None):
        snapshot = utils.put_params_on_memory_kind(cluster._anchor_policy_state, cluster._default_memory_kind)
        graphdef, _ = nnx.split(actor.module)
        temperature = cluster.get_rollout_config(mode=rl_cluster.Mode.TRAIN).temperature
        slices = utils.chunk_slices_by_size(len(prompt_tokens), micro_batch_size or len(prompt_tokens))
        with actor.scope():
            batches = (
                sharding_utils.shard_input((prompt_tokens[rows], completion_tokens[rows]), ("fsdp",)) for rows in slices
            )
            parts = [
                losses.logps_at(temperature)(graphdef, snapshot, *batch, pad, eos, temperature, actor.loss)
                for batch in batches
            ]
        return jnp.concatenate(parts)  # [B, C]

    cluster.get_old_per_token_logps = of_snapshot


def shard_whole_batches(cluster: Any, mesh: Any) -> None:
    """Multi-process runs: let trainer and reference model take batches that each process has whole.

    google-tunix 0.1.7, sharding_utils.shard_input: a batch is taken for this process's part of it, and copied to every
    device where it does not divide by the devices of all processes; RLCluster slices global arrays by local sizes.
    Test: test_tunix_still_takes_a_batch_for_this_process_s_part (and test_several_processes.py trains with two).
    """

    def sharded(logps: Callable) -> Callable:
        def compute(*, prompt_tokens, completion_tokens, micro_batch_size, **more):
            slices = (slice(at, at + micro_batch_size) for at in range(0, len(prompt_tokens), micro_batch_size))
            batches = (multihost.shard_batch((prompt_tokens[rows], completion_tokens[rows]), mesh) for rows in slices)
            return jnp.concatenate(  # [B, C]
                [multihost.to_numpy(logps(prompt_tokens=p, completion_tokens=c, **more)) for p, c in batches]
            )

        return compute

    cluster.actor_trainer._prepare_inputs = functools.partial(multihost.shard_batch, mesh=mesh)
    cluster.get_ref_per_token_logps = sharded(cluster.get_ref_per_token_logps)
    cluster.get_old_per_token_logps = sharded(cluster.get_old_per_token_logps)


# --------------------------------------------------------------------------------------------------------------- JAX


def make_keys_plain(module: Any) -> None:
    """Keep the module's random keys as the numbers that they are made of, which JAX takes as keys, too.

    JAX 0.11: between several processes arrays can be moved to other memory, as Tunix does with the policy after each
    sync, but typed keys cannot ("device_put's second argument must be … addressable devices").
    Test: test_jax_still_refuses_typed_keys (tests/train/test_multihost.py).
    """
    nnx.update(module, jax.tree.map(jax.random.key_data, nnx.state(module, nnx.RngKey)))


# ------------------------------------------------------------------------------------------------- MaxText and Orbax


def load_without_drawing(config: Any, *, mesh: Any, tokenizer_pad_id: int) -> Any:
    """On one CPU, what MaxText's from_pretrained makes of a checkpoint for Tunix.

    MaxText 0.2.5 first draws a whole model, and lets Orbax read all weights at once, each into memory of its own before
    it is an array: 9.7 GiB for the 1.8 of Qwen2.5-0.5B, and 45 s.  Here it is 4.2 GiB and 7 s.
    Test: test_maxtext_still_draws_a_model_before_it_loads_one.
    """
    import orbax.checkpoint as ocp
    from maxtext.integration.tunix.tunix_adapter import TunixMaxTextAdapter
    from maxtext.utils import model_creation_utils

    config = model_creation_utils.verify_and_sync_scan_layers(config)
    create, abstract = model_creation_utils.create_nnx_abstract_model(config, mesh)
    graph, weights, rest = nnx.split(abstract, nnx.Param, ...)
    target = {"params": {"params": nnx.to_pure_dict(weights)}}
    sizes = [shape.size * shape.dtype.itemsize for shape in jax.tree.leaves(target)]
    reader = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=math.ceil(max(sizes) / 1e9))
    arguments = ocp.args.PyTreeRestore(
        target, restore_args=ocp.checkpoint_utils.construct_restore_args(target), partial_restore=True
    )
    with ocp.Checkpointer(reader) as checkpointer:
        saved = checkpointer.restore(config.load_parameters_path, args=arguments)
    nnx.replace_by_pure_dict(weights, saved["params"]["params"])
    with jax.set_mesh(mesh):  # the compiler leaves out what draws the weights
        rest = jax.jit(lambda: nnx.state(create(), nnx.Not(nnx.Param)))()
    model: Any = TunixMaxTextAdapter(
        base_model=nnx.merge(graph, weights, rest),
        use_no_op_mappings="maxtext_config" in config.vllm_additional_config,
        pad_id=tokenizer_pad_id,
    )
    model.config = None
    return model


@functools.cache  # Orbax takes a handler once
def save_lazy_tensors() -> None:
    """Let MaxText's converter save its lazy tensors, each read, written and dropped before the next one is read.

    MaxText 0.2.5 has a handler for them, but of Orbax's old interface, and saves by the new one, which refuses them.
    With several simulated devices it makes arrays of all of them instead, and Orbax holds each once more while it
    writes: twice the model in memory. Registered for this process, under the name that MaxText saves weights by.
    Test: test_maxtext_still_cannot_save_lazy_tensors.
    """
    from maxtext.checkpoint_conversion.to_maxtext import LazyTensor
    from orbax.checkpoint import v1 as ocp
    from orbax.checkpoint.experimental.v1._src.serialization import numpy_leaf_handler, registry

    class OneAfterAnother(numpy_leaf_handler.NumpyLeafHandler):
        async def serialize(self, params, serialization_context):
            save = super().serialize

            async def write() -> None:
                for param in params:
                    loaded = dataclasses.replace(param, value=np.asarray(param.value))
                    await (await save([loaded], serialization_context))

            return write()

    class Handler(ocp.handlers.PyTreeHandler):  # pyright: ignore[reportGeneralTypeIssues]  # final; it cannot be told this otherwise
        def __init__(self, **settings: Any):
            leaves = registry.StandardLeafHandlerRegistry()
            leaves.add(LazyTensor, LazyTensor, OneAfterAnother, secondary_typestrs=["np.ndarray"])
            super().__init__(leaf_handler_registry=leaves, **settings)

    # The checkpoint names its handler, and is to be read by Orbax's own, where this one is not known.
    Handler.__module__, Handler.__qualname__ = ocp.handlers.PyTreeHandler.__module__, "PyTreeHandler"
    ocp.handlers.register_handler(Handler, checkpointable_name="items")


# ------------------------------------------------------------------------------------------- MaxText and vLLM on TPU

# MaxText's name of the output layer of an untied model.
ACTOR_HEAD = "base.decoder.logits_dense.kernel"
# Options of MaxTextVllmRollout that google-tunix 0.1.7 does not have.
MISSING_OPTIONS = ("server_mode_submission_threshold", "server_mode_submission_timeout_s")


def complete_converter_tables(name: str, config: Any) -> None:
    """Enter what the tables of MaxText's converters lack for this model.

    MaxText 0.2.5: qwen3-1.7b and the -base names are in some of the tables only, and the converter refuses them
    ("Unsupported model name").  Whether Qwen2.5 has biases is read from attention_bias, which its published config.json
    has not: the export ends with "q_proj.bias not found in hf_shape_map".  Llama without scaled rotary embeddings is in
    no table; its weights have the names and shapes of Qwen2.5's (model_files.maxtext_sizes).
    Tests: test_maxtext_still_lacks_qwen3_1_7b_and_llama3,
    test_maxtext_still_reads_biases_from_a_key_that_qwen2_has_not.
    """
    from maxtext.checkpoint_conversion.utils.hf_shape import HF_SHAPE
    from maxtext.checkpoint_conversion.utils.param_mapping import HOOK_FNS, PARAM_MAPPING
    from maxtext.utils.globals import HF_IDS

    HF_IDS.setdefault(name, config.name_or_path)
    if config.model_type == "qwen3":
        HF_SHAPE.setdefault(name, HF_SHAPE["qwen3-0.6b"])
    if config.model_type == "qwen2":
        config.attention_bias = True
    if config.model_type == "llama":
        for table in (HF_SHAPE, HOOK_FNS, PARAM_MAPPING):
            table.setdefault(name, table["qwen2.5-1.5b"])


def untied_lm_head_mapping(mapping: dict[str, tuple], model_name: str) -> dict[str, tuple]:
    """MaxText's weight mapping, with the name that the engine has for the output layer of untied Qwen2.5 and Qwen3.

    MaxText 0.2.5 sends it to `model.lm_head`; tpu-inference 0.31.0 calls it `lm_head.weight` in these two families
    (in Llama's, `model.lm_head` is right); google-tunix 0.1.7 only logs that there is no such key.  The engine then
    samples from a random output layer.
    Test: tests/tpu/stack/test_vllm.py.
    """
    if not model_name.startswith(("qwen2.5", "qwen3")) or ACTOR_HEAD not in mapping:
        return mapping
    return mapping | {ACTOR_HEAD: ("lm_head.weight", mapping[ACTOR_HEAD][1])}


def untied_qwen2_config(config: Any) -> Any:
    """A Hugging Face config from which tpu-inference can build an untied Qwen2.5; for vLLM's `hf_overrides`.

    tpu-inference 0.31.0 (models/jax/qwen2.py) evaluates `hf_config.text_config.hidden_size` as the default of a
    getattr, even when it is not needed, and a text model has no text_config: AttributeError.
    Test: tests/tpu/stack/test_vllm.py.
    """
    if config.model_type == "qwen2" and not config.tie_word_embeddings and not hasattr(config, "text_config"):
        config.text_config = copy.deepcopy(config)
    return config


@functools.cache  # once for the process
def end_forks_with_the_run() -> None:
    """Let the processes that the engine forks end when this one does, and not before.

    tpu-inference 0.31.0 forks a scheduler for each replica of the sampler.  It inherits our handler of SIGTERM, which a
    signal to the group (`sky cancel`, a shutdown) runs there, too: the engine's next call fails, and the step under way
    is lost.  And when this process is killed, each lives on, since it holds the others' pipes, and holds the chips.
    Test: tests/tpu/stack/test_vllm.py.
    """
    set_option = ctypes.CDLL(None).prctl
    death_signal = 1  # PR_SET_PDEATHSIG

    def in_fork() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        set_option(death_signal, signal.SIGKILL)

    os.register_at_fork(after_in_child=in_fork)


def set_noise(llm: Any, key: Any) -> None:
    """Set the random key of the engine's next call.

    tpu-inference 0.31.0 takes no seed with a request; its runner splits one key from step to step, made from the
    engine's own seed. Without this a resumed run would sample the noise of its first steps again.
    Test: test_upstream_still_takes_no_seed_with_a_request (tests/tpu/stack/test_compat.py).
    """
    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    runner.rng_params_for_sampling = jax.device_put(
        key, jax.sharding.NamedSharding(runner.mesh, jax.sharding.PartitionSpec())
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    if hasattr(scheduler, "_round_robin_next_rank"):  # the replica decides a row's noise: not what was asked before
        scheduler._round_robin_next_rank = 0


@contextlib.contextmanager
def weights_in(dtype: str, directory: Path) -> Iterator[Path]:
    """A model's directory for vLLM's loader: itself, or a temporary copy with its float32 weights in this dtype.

    tpu-inference 0.31.0 loads some weights as they are stored, and bfloat16 values beside float32 keys stop its
    attention (AssertionError, without a word).
    Test: test_training_and_evaluation_come_to_their_ends_through_vllm (tests/tpu/stack/test_rehearsal.py), whose 05
    stops there without it.
    """
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    def stored(file: Path) -> set[str]:
        with safe_open(file, "np") as weights:
            return {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118 - a file, not a dictionary

    files = list(directory.glob("*.safetensors"))
    if dtype == "float32" or not any("F32" in stored(file) for file in files):
        yield directory
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for path in directory.iterdir():
            if path.suffix == ".safetensors":
                weights = {name: array.astype(jnp.dtype(dtype)) for name, array in load_file(path).items()}
                save_file(weights, copy / path.name, metadata={"format": "pt"})
            elif path.is_file():
                shutil.copy(path, copy / path.name)
        yield copy


# ------------------------------------------------------------------------------------------- MaxText's own train_rl


def add_missing_options() -> None:
    """Let MaxText 0.2.5 make its rollout with google-tunix 0.1.7, which is older than what it was written against.

    `MaxTextVllmRollout` reads two options of agentic rollouts from Tunix's RolloutConfig and hands them to VllmConfig.
    Neither class has them: AttributeError, then TypeError. Here the first gets them as None and the second drops them.
    Test: tests/tpu/stack/test_maxtext_rl.py.
    """
    from maxtext.integration.vllm import maxtext_vllm_rollout
    from tunix.rl.rollout.base_rollout import RolloutConfig

    given = maxtext_vllm_rollout.VllmConfig

    @functools.wraps(given, updated=())
    def without_missing(**options: Any) -> Any:
        return given(**{name: value for name, value in options.items() if name not in MISSING_OPTIONS})

    for name in MISSING_OPTIONS:
        setattr(RolloutConfig, f"rollout_vllm_{name}", None)
    maxtext_vllm_rollout.VllmConfig = without_missing


def send_untied_head() -> None:
    """Sync the output layer of untied Qwen models to the sampler: see untied_lm_head_mapping.

    In train_rl Tunix asks MaxText's adapter for the mapping, so it is changed there.
    Test: tests/tpu/stack/test_maxtext_rl.py.
    """
    from maxtext.integration.tunix.tunix_adapter import TunixMaxTextAdapter

    given = TunixMaxTextAdapter.to_hf_mappings
    TunixMaxTextAdapter.to_hf_mappings = lambda self: untied_lm_head_mapping(given(self), self.base.config.model_name)


def hide_wandb() -> None:
    """Hide W&B from Tunix, which then does without it.

    google-tunix 0.1.7 logs to W&B wherever the package is installed, asks for a key, and closes it when training ends;
    JAX's own measurements still go there, and the first program that is compiled after that, in the evaluation, stops
    the run with "You must call wandb.init() before wandb.log()", even in the mode disabled.
    Test: test_tunix_still_logs_to_wandb_unasked.
    """
    sys.modules["wandb"] = None
