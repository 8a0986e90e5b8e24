"""A recipe's model in MaxText: convert from Hugging Face, load as a Tunix actor, check parity, export back.

MaxText's own converters do the work (maxtext.checkpoint_conversion); this module fills in their arguments from the
model's config.json, so that any size of a supported architecture can be used, and keeps their logs out of the way.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lib import environment, hidden_states, losses, processes
from grpo_lib.errors import CourseError
from grpo_lib.recipes import ModelRecipe

environment.prepare()

import jax  # noqa: E402  (the environment is prepared before JAX reads it)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from flax.linen import partitioning as nn_partitioning  # noqa: E402

# Shards of a converted checkpoint.  MaxText's own default is 16; a tiny model needs fewer.
CONVERTER_DEVICES = 4

# Tokens that models reserve and never write, for tokenizers without a padding token of their own: Llama-3.1's, Qwen's.
PADDING_TOKENS = ("<|finetune_right_pad_id|>", "<|fim_pad|>", "<|endoftext|>")

# config.json key -> MaxText key, for the sizes that MaxText lets a config override.
SIZES = {
    "hidden_size": "base_emb_dim",
    "intermediate_size": "base_mlp_dim",
    "num_hidden_layers": "base_num_decoder_layers",
    "num_attention_heads": "base_num_query_heads",
    "num_key_value_heads": "base_num_kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "tie_word_embeddings": "logits_via_embedding",
}

# How MaxText 0.2.5 scales the rotary embedding of models whose name begins with llama3.1, and of no others: the numbers
# are written into its LLaMARotaryEmbedding.
LLAMA31_SCALING = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class Actor:
    """A MaxText model behind Tunix's call signature, with what is needed to run it."""

    module: nnx.Module  # TunixMaxTextAdapter
    config: Any  # MaxText HyperParameters
    mesh: jax.sharding.Mesh
    loss: str = "jax"  # the recipe's loss.implementation, by which log-probabilities are computed

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """The mesh and MaxText's logical axis rules, which every forward pass needs."""
        with self.mesh, nn_partitioning.axis_rules(self.config.logical_axis_rules):
            yield

    def parameter_count(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self.module, nnx.Param)))


def model_directory(model: ModelRecipe) -> Path:
    """The Hugging Face directory of a recipe: a folder, relative to here or to the repository, or a hub name.

    A hub name such as Qwen/Qwen3-1.7B is downloaded once, into the hub's own cache.
    Raises CourseError when the directory is missing or incomplete, or the download fails.
    """
    path = Path(model.path).expanduser()
    if not path.is_absolute() and not path.exists():
        path = environment.repo_root() / path
    if not path.is_dir():
        path = _download(model.path)
    for name, meaning in (("config.json", "sizes"), ("tokenizer.json", "tokenizer")):
        if not (path / name).is_file():
            raise CourseError(
                f"model.path={model.path} has no {name} ({meaning}); give a complete Hugging Face directory"
            )
    if not list(path.glob("*.safetensors")):
        raise CourseError(
            f"model.path={model.path} has no *.safetensors (weights); give a complete Hugging Face directory"
        )
    return path


def _download(name: str) -> Path:
    """Fetch a model from the Hugging Face hub; HF_TOKEN is used where the model asks for it."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name):
        raise CourseError(f"model.path={name} is not a folder; give a Hugging Face model directory, or a hub name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "tokenizer*"]))
    except GatedRepoError:
        raise CourseError(
            f"model.path={name} asks for its licence to be accepted on the hub; accept it and set HF_TOKEN"
        ) from None
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        raise CourseError(
            f"model.path={name} is no folder here and could not be fetched from the hub ({reason}); "
            "give a Hugging Face model directory"
        ) from None


def load_tokenizer(model: ModelRecipe):
    """The model's own tokenizer, padding on the left, as generation needs it.

    The padding token is one of its own that no text holds: Tunix takes padding out of what the trainer sees, so a
    padding token that also ends a turn (or is missing, for which Tunix takes the end token) would hide the end of
    every turn from the trainer while the sampler sees it.  One that ends a text does the same wherever the model writes
    it: Qwen's chat models pad with <|endoftext|>, which their generation_config.json names as a second end token.
    Raises CourseError when there is no such token.
    """
    from transformers import AutoTokenizer

    directory = model_directory(model)
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    if tokenizer.eos_token_id is None:
        raise CourseError(f"the tokenizer of model.path={model.path} names no end token; give it an eos_token")
    written = {tokenizer.eos_token_id, *_end_tokens(directory)}
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in written:
        vocabulary = tokenizer.get_vocab()
        free = [token for token in PADDING_TOKENS if token in vocabulary and vocabulary[token] not in written]
        if not free:
            raise CourseError(
                f"the tokenizer of model.path={model.path} has no padding token of its own; "
                "give it a pad_token that is not its end token"
            )
        tokenizer.pad_token = free[0]
    return tokenizer


def _end_tokens(directory: Path) -> list[int]:
    """Ids at which the model's own generation_config.json ends a text; none without such a file."""
    file = directory / "generation_config.json"
    ends = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def maxtext_sizes(model: ModelRecipe) -> dict[str, Any]:
    """MaxText's keys for sizes and for the constants of norm and rotary embedding, read from config.json.

    Raises CourseError when the recipe's `model.sizes` says something else: preflight relied on it.
    """
    config = json.loads((model_directory(model) / "config.json").read_text(encoding="utf-8"))
    sizes = {maxtext: config[key] for key, maxtext in SIZES.items() if key in config} | _constants(model, config)
    for key, value in model.sizes.items():
        if sizes.get(key, value) != value:
            raise CourseError(f"model.sizes.{key}={value}, but config.json of {model.path} says {sizes[key]}")
    return model.sizes | sizes


def _constants(model: ModelRecipe, config: dict[str, Any]) -> dict[str, Any]:
    """Norm epsilon and rotary base of a config.json, by MaxText's keys.

    They can differ between the sizes of one family, and MaxText's own file may be that of another size.  The sampler
    reads config.json: with another value it would not sample the model that is trained.

    Raises CourseError when config.json scales the rotary embedding in another way than MaxText.
    """
    rope = (config.get("rope_scaling") or {}) | (config.get("rope_parameters") or {})  # transformers 4, transformers 5
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = {} if kind == "default" else {key: rope.get(key) for key in LLAMA31_SCALING}
    known = LLAMA31_SCALING if model.maxtext_name.startswith("llama3.1") else {}
    if scaling != known or kind not in ("default", "llama3"):
        raise CourseError(
            f"config.json of {model.path} has rope_scaling {rope or None}, but MaxText gives {model.maxtext_name} "
            f"{known or 'none'}; give a model.maxtext_name of the same kind, or another model"
        )
    constants = {
        "normalization_layer_epsilon": config.get("rms_norm_eps"),
        "rope_max_timescale": rope.get("rope_theta", config.get("rope_theta")),
    }
    return {key: value for key, value in constants.items() if value is not None}


def maxtext_arguments(model: ModelRecipe, *, weights: bool = True, **more: Any) -> list[str]:
    """Arguments for MaxText's pyconfig: the architecture of `maxtext_name` at the sizes of config.json.

    Args:
      weights: False needs no model directory: the sizes are the recipe's `model.sizes`, else MaxText's own file.
      more: further MaxText keys; they win over those set here.
    """
    import maxtext

    sizes = maxtext_sizes(model) if weights else model.sizes
    settings = {
        "model_name": model.maxtext_name,
        "override_model_config": bool(sizes),
        **sizes,
        "tokenizer_type": "huggingface",
        "tokenizer_path": model_directory(model) if weights else model.path,
        "weight_dtype": model.dtype,
        "dtype": model.dtype,
        "matmul_precision": "highest" if model.dtype == "float32" else "default",
        "attention": "dot_product",  # also what MaxText's own rl.yml takes on a TPU
        "remat_policy": model.remat,
        "per_device_batch_size": 1,
        "run_name": "grpo",
        "log_config": False,
        "use_multimodal": False,
        "skip_jax_distributed_system": True,
        "jax_cache_dir": os.environ.get("JAX_COMPILATION_CACHE_DIR", ""),
        "hardware": "cpu" if jax.default_backend() == "cpu" else "tpu",
        **more,
    }
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    return ["maxtext", str(base), *(f"{key}={_argument(value)}" for key, value in settings.items())]


def convert_to_maxtext(model: ModelRecipe, output: str | Path) -> Path:
    """Convert the recipe's Hugging Face directory to a MaxText checkpoint; returns its `0/items` folder.

    A finished conversion is kept: calling again returns it.  The folder appears only when it is complete.
    Of several processes the first converts, and the others wait.
    """
    items = Path(output).resolve() / "0" / "items"
    if processes.is_first() and not items.is_dir():
        _convert_to_maxtext(model, items.parents[1])
    processes.wait("conversion")
    return items


def _convert_to_maxtext(model: ModelRecipe, output: Path) -> None:
    directory = model_directory(model)
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    log = partial / "conversion.log"
    # With one device MaxText 0.2.5 hands lazy tensors to Orbax 0.12, which has no handler for them.
    _run_converter(_to_maxtext, CONVERTER_DEVICES, log, model, directory, partial)
    if not (partial / "0" / "items").is_dir():
        raise CourseError(f"MaxText wrote no checkpoint; its log is {log}")
    shutil.rmtree(output, ignore_errors=True)  # a folder without a checkpoint in it
    partial.rename(output)


def load_actor(
    model: ModelRecipe,
    checkpoint: str | Path,
    max_length: int,
    pad_id: int = 0,
    *,
    devices: list[jax.Device] | None = None,
    tensor: int = 1,
    loss: str = "jax",
) -> Actor:
    """Load a MaxText checkpoint as an actor for sequences of at most `max_length` tokens.  Several processes load it
    together.

    Args:
      devices: where the model lives: exactly these, the first by default.  Its mesh has len(devices) / tensor of them
        on the axis `fsdp` and `tensor` on the axis `tensor`.
      loss: the recipe's loss.implementation.

    Raises CourseError when the checkpoint is missing, cut short or of another shape.
    """
    devices = list(devices or jax.devices()[:1])
    checkpoint = Path(checkpoint).resolve()
    if not checkpoint.is_dir():
        raise CourseError(
            f"checkpoint {checkpoint} does not exist; convert the model first (notebook 01, or grpo convert)"
        )
    with quiet():
        from maxtext.configs import pyconfig
        from maxtext.utils import maxtext_utils, model_creation_utils

        register_architecture(model)
        config = pyconfig.initialize(
            maxtext_arguments(
                model,
                load_parameters_path=checkpoint,
                scan_layers=True,
                max_target_length=max_length,
                enable_checkpointing=True,
                ici_fsdp_parallelism=len(devices) // tensor,
                ici_tensor_parallelism=tensor,
                **hidden_states.maxtext_settings(loss, max_length),
            )
        )
        mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config, devices), config.mesh_axes)
        try:
            module = model_creation_utils.from_pretrained(
                config, mesh=mesh, wrap_with_tunix_adapter=True, tokenizer_pad_id=pad_id
            )
        except (ValueError, KeyError, OSError) as error:
            reason = str(error).splitlines()[0][:200]
            raise CourseError(
                f"checkpoint {checkpoint} cannot be read ({reason}); remove the folder and convert the model again"
            ) from error
    make_keys_plain(module)
    return Actor(hidden_states.adapter_for(loss, module), config, mesh, loss)


def make_keys_plain(module: nnx.Module) -> None:
    """Keep the module's random keys as the numbers that they are made of, which JAX takes as keys, too.

    Between several processes JAX 0.11 moves arrays to other memory, as Tunix does with the policy after each sync, but
    no typed keys ("device_put's second argument must be … addressable devices").
    """
    keys = nnx.state(module, nnx.RngKey)
    nnx.update(module, jax.tree.map(jax.random.key_data, keys))


def export_to_hugging_face(actor: Actor, model: ModelRecipe, output: str | Path) -> Path:
    """Write the actor's weights as a Hugging Face directory with tokenizer; returns the directory.

    MaxText's converter reads a checkpoint, so the weights are written as one first, into a folder that is removed.
    An existing directory is replaced only when the new one is complete.  Several processes write the checkpoint
    together, and the first converts it.
    """
    import orbax.checkpoint as ocp

    output = Path(output).resolve()
    partial = output.with_name(output.name + ".partial")
    if processes.is_first():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    processes.wait("the folder of the export")
    weights, result, log = partial / "weights" / "0" / "items", partial / "result", partial / "conversion.log"
    with quiet(), ocp.PyTreeCheckpointer() as checkpointer:
        parameters = nnx.to_pure_dict(nnx.state(actor.module.base, nnx.Param))
        checkpointer.save(weights, {"params": {"params": parameters}})
    if processes.is_first():
        # The converter reads the whole model onto every device that it sees: not onto chips that hold a training.
        _run_converter(_to_hugging_face, 1, log, model, weights, result)
        if not list(result.glob("*.safetensors")):
            raise CourseError(f"MaxText wrote no weights; its log is {log}")
        shutil.rmtree(output, ignore_errors=True)
        result.rename(output)
        shutil.rmtree(partial)
    processes.wait("the export")
    return output


def read_weights(directory: str | Path) -> dict[str, np.ndarray]:
    """All tensors of a Hugging Face directory by name."""
    from safetensors.numpy import load_file

    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise CourseError(f"{directory} has no *.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def differing_weights(one: str | Path, other: str | Path) -> list[str]:
    """Names of tensors that are missing on one side or not equal bit for bit."""
    a, b = read_weights(one), read_weights(other)
    return sorted(
        name
        for name in a.keys() | b.keys()
        if name not in a or name not in b or a[name].dtype != b[name].dtype or not np.array_equal(a[name], b[name])
    )


def per_token_logps(actor: Actor, prompt_ids, completion_ids, pad_id: int, eos_id: int, temperature: float = 1.0):
    """log pi(token) of each completion token, [B, C], by Tunix's own function on the MaxText model, or the loss's.

    Args:
      prompt_ids: [B, P], padded on the left.
      completion_ids: [B, C], padded on the right.

    Of several processes all call it, with the same ids; the result is spread over their devices (`processes.on_host`).
    """
    from tunix.rl import common

    prompt_ids, completion_ids = processes.spread((prompt_ids, completion_ids), actor.mesh)
    graphdef, state = nnx.split(actor.module)
    compute = common.compute_per_token_logps
    if actor.loss != "jax":
        compute = functools.partial(losses.per_token_logps, implementation=actor.loss)
    with actor.scope():
        return compute(
            graphdef,
            state,
            prompt_tokens=jnp.asarray(prompt_ids),
            completion_tokens=jnp.asarray(completion_ids),
            pad_id=pad_id,
            eos_id=eos_id,
            temperature=temperature,
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the information logs and warnings of the libraries underneath out of the reader's way; errors stay."""
    from absl import logging as absl_logging

    before, root = absl_logging.get_verbosity(), logging.getLogger().level
    absl_logging.set_verbosity(absl_logging.ERROR)
    logging.getLogger().setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        absl_logging.set_verbosity(before)
        logging.getLogger().setLevel(root)


def register_architecture(model: ModelRecipe) -> None:
    """Tell MaxText's converters the sizes of this model.

    They look up `HF_MODEL_CONFIGS[model_name]`, which holds the published sizes only, and reject other names: the
    table is the extension point that MaxText 0.2.5 offers for a size it has no entry for.
    """
    from maxtext.checkpoint_conversion.utils.hf_model_configs import HF_MODEL_CONFIGS
    from transformers import AutoConfig

    HF_MODEL_CONFIGS[model.maxtext_name] = AutoConfig.from_pretrained(model_directory(model))


def _argument(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _run_converter(convert: Callable, devices: int, log: Path, model: ModelRecipe, source: Path, output: Path) -> None:
    """Run one of the two functions below in a process of its own, on the CPU.

    Raises CourseError, which names the log, when it fails.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    arguments = [convert.__name__, model.model_dump_json(), str(source), str(output)]
    with open(log, "w", encoding="utf-8") as file:
        done = subprocess.run(
            [sys.executable, "-m", "grpo_lib.models", *arguments],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    if done.returncode:
        last = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip()][-1:]
        raise CourseError(f"MaxText could not convert {source} ({' '.join(last)[:200]}); the whole log is {log}")


def _to_maxtext(model: ModelRecipe, directory: str, output: str) -> None:
    from maxtext.checkpoint_conversion import to_maxtext

    register_architecture(model)
    to_maxtext.main(
        maxtext_arguments(model, base_output_directory=output, scan_layers=True),
        hf_model_path=directory,
        save_dtype=model.dtype,
        simulated_cpu_devices_count=CONVERTER_DEVICES,
    )


def _to_hugging_face(model: ModelRecipe, checkpoint: str, output: str) -> None:
    from absl import flags
    from maxtext.checkpoint_conversion import to_huggingface

    register_architecture(model)
    flags.FLAGS(["grpo"])
    flags.FLAGS.hf_model_path = str(model_directory(model))
    to_huggingface.main(
        maxtext_arguments(model, load_parameters_path=checkpoint, base_output_directory=output, scan_layers=True)
    )


if __name__ == "__main__":  # the process that _run_converter starts
    _task = {function.__name__: function for function in (_to_maxtext, _to_hugging_face)}[sys.argv[1]]
    _task(ModelRecipe.model_validate_json(sys.argv[2]), *sys.argv[3:])
