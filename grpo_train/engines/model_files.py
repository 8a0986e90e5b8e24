"""A recipe's model on this machine: its Hugging Face directory, and the package that samples it.  It imports no JAX."""

import importlib.util
from pathlib import Path

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError, first_line
from grpo_train.recipes import ModelRecipe


def require_engine(engine: str) -> None:
    """Refuse a `rollout.engine` that is not installed."""
    if engine == "vllm" and not importlib.util.find_spec("vllm"):
        raise CourseError("rollout.engine=vllm needs vllm-tpu, which is not installed; make setup-tpu installs it")


def model_directory(model: ModelRecipe, *, weights: bool = True) -> Path:
    """The Hugging Face directory of a recipe: a folder, relative to here or to the repository, or a hub name.

    A hub name such as Qwen/Qwen3-1.7B is downloaded once, into the hub's own cache; `weights=False` leaves out the
    weights.  Raises CourseError when the directory is missing or incomplete, or the download fails.
    """
    path = local_folder(model) or _download(model.path, weights)
    for name in ("config.json", "tokenizer.json", *(["*.safetensors"] if weights else [])):
        if not list(path.glob(name)):
            raise CourseError(f"model.path={model.path} has no {name}; give a complete Hugging Face directory")
    return path


def local_folder(model: ModelRecipe) -> Path | None:
    """The model's folder, relative to here or to the repository; None for a hub name."""
    path = Path(model.path).expanduser()
    return next((place for place in (path, environment.repo_root() / path) if place.is_dir()), None)


def _download(name: str, weights: bool) -> Path:
    """Fetch a model from the Hugging Face hub; HF_TOKEN is used where the model asks for it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError

    try:
        return Path(
            snapshot_download(
                name, allow_patterns=["*.json", "*.jinja", "tokenizer*", *(["*.safetensors"] if weights else [])]
            )
        )
    except GatedRepoError:
        raise CourseError(
            f"model.path={name} asks for its licence to be accepted on the hub; accept it and set HF_TOKEN"
        ) from None
    except (HFValidationError, OSError) as error:  # no such model, no network, no space, …
        raise CourseError(
            f"model.path={name} is not a folder here and could not be fetched from the hub ({first_line(error)}); "
            "give a Hugging Face model directory" + ", or run make real-model" * name.startswith(".cache/")
        ) from None
