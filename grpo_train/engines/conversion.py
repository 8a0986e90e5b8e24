"""A Hugging Face directory to a MaxText checkpoint and back, by MaxText's own converters.

The converters run in a process of their own, on the CPU: they read the whole model onto every device that they see,
which must not be chips that hold a training, and their memory is free again afterwards.  Where JAX has nothing but one
CPU, a small model is converted in this process: a new one would import for ten times as long as it converts.
"""

import contextlib
import functools
import gc
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np
from flax import nnx

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_train.engines import compat, export_files
from grpo_train.engines.maxtext_model import Actor, maxtext_arguments, model_directory, quiet, register_architecture
from grpo_train.engines.tokens import load_tokenizer
from grpo_train.recipes import ModelRecipe
from grpo_train.runs import multihost
from grpo_train.runs.run_directory import has_base, is_address, location

SMALL = 2**26  # bytes of weights that are converted in this process


def convert_to_maxtext(model: ModelRecipe, output: str | Path) -> Any:
    """Convert the recipe's Hugging Face directory to a MaxText checkpoint; returns its `0/items` folder.

    A finished conversion is kept: calling again returns it.  The folder appears only when it is complete; in a bucket
    (gs://BUCKET/FOLDER, to which Orbax writes directly) it is complete when Orbax's mark of success is there.
    In a multi-process run process 0 converts, and the others wait.

    Raises CourseError, in process 0, when the folder holds something else, or MaxText cannot convert the model.
    """
    base = location(output)
    if multihost.is_main_process() and not has_base(base):
        source = model_directory(model)
        if is_address(base):
            if (base / "0").exists():  # an interrupted conversion; nothing else under the address is touched
                (base / "0").rmtree()
            _run_converter(
                _to_maxtext,
                Path(tempfile.mkdtemp(prefix="conversion-")) / "conversion.log",
                model,
                source,
                base,
                "0/items",
            )
        else:
            if base.exists() and (not base.is_dir() or any(base.iterdir())):
                raise CourseError(
                    f"{base} has other files, and no MaxText checkpoint (0/items); give another folder, or remove it"
                )
            partial = base.with_name(base.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            _run_converter(_to_maxtext, partial / "conversion.log", model, source, partial, "0/items")
            partial.rename(base)  # an empty folder gives way
    multihost.barrier("conversion")
    return base / "0" / "items"


def export_to_hugging_face(actor: Actor, model: ModelRecipe, output: str | Path) -> Path:
    """Write the actor's weights as a Hugging Face directory with tokenizer; returns the directory.

    All processes together; see `export_weights`.
    """
    return export_weights(functools.partial(save_weights, actor), model, output)


def export_weights(find: Callable[[Path], Any], model: ModelRecipe, output: str | Path) -> Path:
    """Write weights as a Hugging Face directory with the tokenizer of the recipe's model; returns the directory.

    MaxText's converter reads a checkpoint.  All processes ask `find(folder)` where it is, which may write it to that
    folder, and process 0 converts it.  MaxText 0.2.5 reads a run's own, too: `model_params` of actors without adapters.
    An existing directory is replaced only when the new one is complete.
    """
    output = Path(output).resolve()
    partial = output.with_name(output.name + ".partial")
    if multihost.is_main_process():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    multihost.barrier("the folder of the export")
    result, log = partial / "result", partial / "conversion.log"
    weights = find(partial / "weights" / "0" / "items")
    if multihost.is_main_process():
        export_checkpoint(model, weights, result, log)
        shutil.rmtree(output, ignore_errors=True)
        result.rename(output)
        shutil.rmtree(partial)
    multihost.barrier("the export")
    return output


def save_weights(actor: Actor, folder: Path) -> Path:
    """Write the actor's weights as a MaxText checkpoint, `folder` being its `0/items`; all processes together.

    Returns the folder.
    """
    return save_tree(nnx.to_pure_dict(actor.weights())["base"], folder)


def save_tree(weights: Any, folder: Path) -> Path:
    """The same for a tree of a model's weights by MaxText's names."""
    import orbax.checkpoint as ocp

    with quiet(), ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder, {"params": {"params": weights}}, force=True)
    return folder


def export_checkpoint(model: ModelRecipe, weights: Any, output: Path, log: Path) -> None:
    """Write a MaxText checkpoint (`0/items`) as a Hugging Face directory with the tokenizer of the recipe's model."""
    _run_converter(_to_hugging_face, log, model, weights, output, "*.safetensors")
    export_files.write_for_both(output, model_directory(model, weights=False), load_tokenizer(model))


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
    differing = set(a) ^ set(b)
    for name in set(a) & set(b):
        if a[name].dtype != b[name].dtype or not np.array_equal(a[name], b[name]):
            differing.add(name)
    return sorted(differing)


def _run_converter(convert: Callable, log: Path, model: ModelRecipe, source: Any, output: Any, made: str) -> None:
    """Run one of the two functions below, `convert`, here or in a process of its own.

    Raises CourseError, which names the log, when it fails, or leaves nothing that matches `made` in `output`.
    """
    run = _run_here if _is_small(source) and _has_only_cpus() else _run_in_process
    with open(log, "w", encoding="utf-8") as file:
        done = run(convert, file, model, str(source), str(output))
    if not done or not list(output.glob(made)):
        lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
        last = lines[-1][:200] if lines else ""
        raise CourseError(f"MaxText could not convert {source} ({last}); the whole log is {log}")


def _is_small(source: Any) -> bool:
    """Whether a folder on this machine has few weights."""
    if is_address(source):
        return False
    return sum(path.stat().st_size for path in Path(source).rglob("*") if path.is_file()) <= SMALL


def _has_only_cpus() -> bool:
    """True where JAX computes on CPUs of this process alone.  Chips, which another process may hold, are not asked."""
    return not environment.has_accelerator() and (
        jax.process_count() == 1 and all(device.platform == "cpu" for device in jax.devices())
    )


def _run_here(convert: Callable, log: TextIO, *arguments: Any) -> bool:
    with quiet():
        importlib.import_module("maxtext.checkpoint_conversion.to_maxtext")
    gc.freeze()  # the converter collects garbage after each weight, and would look through all libraries each time
    with quiet(), contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        try:
            convert(*arguments)
        except Exception:
            traceback.print_exc()  # its last line is the error, as where a process ends with it
            return False
        finally:
            gc.unfreeze()
    return True


def _run_in_process(convert: Callable, log: TextIO, model: ModelRecipe, *folders: str) -> bool:
    arguments = [convert.__name__, model.model_dump_json(), *folders]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1"
    done = subprocess.run(
        [sys.executable, "-m", "grpo_train.engines.conversion", *arguments],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )
    return done.returncode == 0


def _to_maxtext(model: ModelRecipe, directory: str, output: str) -> None:
    from maxtext.checkpoint_conversion import to_maxtext

    register_architecture(model)
    compat.save_lazy_tensors()
    to_maxtext.main(
        maxtext_arguments(model, base_output_directory=output, scan_layers=True),
        lazy_load_tensors=True,
        hf_model_path=directory,
        save_dtype=model.trainer_dtype,
        simulated_cpu_devices_count=1,  # with more, all tensors become arrays before the first is written
    )


def _to_hugging_face(model: ModelRecipe, checkpoint: str, output: str) -> None:
    from absl import flags
    from maxtext.checkpoint_conversion import to_huggingface

    register_architecture(model)
    flags.FLAGS(["grpo"])
    flags.FLAGS.hf_model_path = str(model_directory(model))
    to_huggingface.main(
        maxtext_arguments(
            model,
            load_parameters_path=checkpoint,
            base_output_directory=output,
            scan_layers=True,
            weight_dtype=model.dtype,  # as the sampler has them, and what was evaluated
        )
    )


if __name__ == "__main__":  # the process that _run_converter starts
    environment.return_large_blocks()
    globals()[sys.argv[1]](ModelRecipe.model_validate_json(sys.argv[2]), *sys.argv[3:])
