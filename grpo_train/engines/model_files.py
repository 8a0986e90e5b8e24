"""A recipe's model on this machine: its Hugging Face directory, its sizes, and the package that samples it.

MaxText's arguments are filled in from the model's config.json, so that any size of a supported architecture works.
No JAX is imported here: what is wrong with a model is said at once.
"""

import difflib
import hashlib
import importlib.util
import reprlib
from pathlib import Path
from typing import Any

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError, first_line
from grpo_lib.common.files import read_json, read_json_if_exists, require_space
from grpo_train.recipes import ModelRecipe, Recipe, load_recipe, shipped_recipes
from grpo_train.runs.run_directory import is_address, location

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

OWN_CODE = (
    "it needs Python code from the model's folder (auto_map), which is never run; give a model whose architecture "
    "Transformers knows"
)

# Of a file of weights, what its fingerprint is made of.
SAMPLED_BLOCKS, SAMPLED_BYTES = 64, 2**18

ITEMSIZE = {"bfloat16": 2, "float32": 4}
LARGE = 2**30  # bytes of weights: on a CPU, giving memory back takes no time beside a step with as many

# Bytes that a Cloud TPU VM has for runs: its boot disk has 100 GiB (107 GB), and 16 GB are kept for the image's system
# and .venv-tpu. That takes 8, as its files and those of the cache are the same (hard links); the rest is for safety.
VM_DISK = 91e9
IN_A_BUCKET = "training.checkpoints=gs://BUCKET/FOLDER"

# How MaxText 0.2.5 scales the rotary embedding of models whose name begins with llama3.1, and of no others: the numbers
# are written into its LLaMARotaryEmbedding.
LLAMA31_SCALING = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


# What `make real-model` writes, relative to the repository.
REAL_MODEL = Path(".cache/models/smollm2-135m-instruct")


def require_engine(engine: str) -> None:
    """Refuse a `rollout.engine` that is not installed."""
    if engine == "vllm" and not importlib.util.find_spec("vllm"):
        raise CourseError("rollout.engine=vllm needs vllm-tpu, which is not installed; make setup-tpu installs it")


def check_model(model: ModelRecipe) -> None:
    """Raise CourseError for what is wrong with a model, as far as it can be said without a download."""
    require_architecture(model)
    require_path(model)
    if local_folder(model):
        model_directory(model)
        maxtext_sizes(model)


def require_path(model: ModelRecipe) -> None:
    """Refuse a `model.path` that is no folder here and cannot be the name of a model on the hub.

    A name is NAME or OWNER/NAME.  What begins with `.`, `/` or `~`, or has two slashes, was meant as a folder, and
    the hub is never asked for it.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if local_folder(model):
        return
    try:
        validate_repo_id(model.path)
    except HFValidationError:
        fix = "give a Hugging Face model directory, or a name on the hub"
        if Path(model.path) == REAL_MODEL:
            fix = "make real-model brings it"
        raise CourseError(f"model.path={model.path} is not a folder here; {fix}") from None


def model_directory(model: ModelRecipe, *, weights: bool = True) -> Path:
    """The Hugging Face directory of a recipe: a folder, relative to here or to the repository, or a hub name.

    A hub name such as Qwen/Qwen3-1.7B is downloaded once, into the hub's own cache; `weights=False` leaves out the
    weights.  Raises CourseError when the directory is missing or incomplete, or the download fails.
    """
    require_path(model)
    path = local_folder(model) or _download(model.path, weights)
    for name in ("config.json", "tokenizer.json", *(["*.safetensors"] if weights else [])):
        if not list(path.glob(name)):
            raise CourseError(f"model.path={model.path} has no {name}; give a complete Hugging Face directory")
    return path


def local_folder(model: ModelRecipe) -> Path | None:
    """The model's folder, relative to here or to the repository; None for a hub name."""
    path = Path(model.path).expanduser()
    return next((place for place in (path, environment.repo_root() / path) if place.is_dir()), None)


def is_tiny(model: ModelRecipe) -> bool:
    """Whether a folder has the course's tiny model, or one that was trained from it: its config.json has the sizes."""
    folder = local_folder(model)
    tiny = environment.repo_root() / "assets" / "tiny-base"
    if not folder or not all((place / "config.json").is_file() for place in (folder, tiny)):
        return False
    config = read_json(folder / "config.json", "copy the model again")
    known = read_json(tiny / "config.json", "copy the model again")
    return all(config.get(key) == known[key] for key in SIZES)


def weight_files(model: ModelRecipe) -> Any:
    """Names, shapes and types of the model's weights, from the headers of its files, here or on the hub.

    Raises CourseError where they cannot be read.
    """
    import huggingface_hub

    folder = local_folder(model)
    try:
        if folder:
            return huggingface_hub.get_local_safetensors_metadata(folder)
        return huggingface_hub.get_safetensors_metadata(model.path)
    except Exception as error:  # of the hub's client, of the network, or of damaged files
        fix = "fetch the model again"
        if not folder:
            fix = "check the network, and HF_TOKEN for a model that asks for it; or give a folder that has the model"
        raise CourseError(
            f"the weights of model.path={model.path} cannot be read ({first_line(error)}); {fix}"
        ) from None


def contents(folder: Path) -> dict[str, list]:
    """What a model's folder holds, by file: [size in bytes, sha256 of a part of it], the same for every copy of it.

    Not when it was written, which a copy or a second download changes.  A large file is not read whole: its beginning,
    which is the header of a .safetensors, and blocks at equal distances.  Any training changes some of them.
    """
    files = [path for path in sorted(folder.iterdir()) if path.suffix in (".safetensors", ".json", ".jinja")]
    return {path.name: [path.stat().st_size, _sample_hash(path)] for path in files}


def _sample_hash(path: Path) -> str:
    size = path.stat().st_size
    found = hashlib.sha256()
    with open(path, "rb") as file:
        for number in range(SAMPLED_BLOCKS):
            file.seek(number * size // SAMPLED_BLOCKS)
            found.update(file.read(SAMPLED_BYTES))
    return found.hexdigest()[:16]


def disk_use(recipe: Recipe) -> dict[str, int]:
    """Bytes a weight of what a run writes: of the download, the base, checkpoints while one more is written, and the
    export, for which the weights are saved once more where the checkpoint has adapters alone."""
    weight = ITEMSIZE[recipe.model.trainer_dtype]
    # The sum of gradients is saved, too, and takes nothing: it is zero between two updates, and Orbax compresses
    # (33.6 MB of zeros to 2.8 kB).
    moments = 2 * ITEMSIZE[recipe.training.optimizer_dtype]
    kept = min(recipe.training.max_to_keep + 1, -(-recipe.training.steps // recipe.training.checkpoint_every))
    return {
        "download": 2,
        "base": weight,
        "checkpoints": 0 if recipe.lora.rank else kept * (weight + moments),  # those of adapters are small
        "export": ITEMSIZE[recipe.model.dtype] + (weight if recipe.lora.rank else 0),
    }


def weight_count(recipe: Recipe) -> int | None:
    """Weights of the recipe's model: by its files, here or on the hub, else as `grpo preflight` has counted them.

    None where neither is known: a recipe of one's own whose model has not been downloaded, without a network.
    """
    try:
        return sum(weight_files(recipe.model).parameter_count.values())
    except CourseError:
        return counted_weights(recipe)


def counted_weights(recipe: Recipe) -> int | None:
    """Weights of the model of a shipped recipe, from a saved preflight; None for another model."""
    folder = environment.repo_root() / "assets" / "preflight"
    shipped = map(load_recipe, shipped_recipes())
    names = [recipe.name, *(other.name for other in shipped if other.model.path == recipe.model.path)]
    counts = (read_json_if_exists(folder / f"{name}.json").get("parameters") for name in names)
    return next(filter(None, counts), None)


def vm_disk(recipe: Recipe) -> str | None:
    """A sentence about a run on the disk of the TPU VM that the recipe names, and the remedy where it is too small.

    None for a recipe that names no slice of one host, or whose weights are not known.
    """
    weights, hardware = counted_weights(recipe), recipe.hardware
    if not weights or not hardware.accelerator or hardware.process_count() > 1:
        return None
    use = disk_use(recipe)
    if recipe.training.checkpoints is not None and is_address(recipe.training.checkpoints):
        use.pop("checkpoints")
    written = weights * sum(use.values())
    line = f"a run writes {written / 1e9:.0f} GB, and the disk of a {hardware.accelerator} VM has {VM_DISK / 1e9:.0f}"
    return line if written <= VM_DISK else f"{line}: set {IN_A_BUCKET}"


def require_disk(recipe: Recipe, base: str | Path | None, run: Path | None = None) -> str | None:
    """Refuse what the disks have no space for, before anything is downloaded or written; else say what was found.

    None where the number of weights is not known: then nothing was compared, and what reads the weights next says why.

    What is there already does not count again, nor do buckets.  Args: the folder of the base, if one is to be made, and
    of the run.
    """
    require_path(recipe.model)
    places: dict[str, str | Path | None] = {"base": base}
    if not local_folder(recipe.model):
        places["download"] = _hub_folder(recipe.model.path)
    if run:
        elsewhere = recipe.training.checkpoints
        places["checkpoints"] = f"{elsewhere}/{run.name}" if elsewhere else run / "checkpoints" / "actor"
        places["export"] = run / "export"
    weights = weight_count(recipe)
    if weights is None:
        return None
    needs = []
    for name, bytes_each in disk_use(recipe).items():
        place = places.get(name)
        if not place or is_address(place):
            continue
        folder = location(place)
        written = sum(file.lstat().st_size for file in folder.rglob("*"))
        needs.append((folder, max(0, weights * bytes_each - written)))
    return require_space(needs, f"set {IN_A_BUCKET}, take a larger disk, or a smaller training.max_to_keep")


def _hub_folder(name: str) -> str:
    """Where a model of the hub is downloaded to."""
    from huggingface_hub import constants, file_download

    return f"{constants.HF_HUB_CACHE}/{file_download.repo_folder_name(repo_id=name, repo_type='model')}"


def _download(name: str, weights: bool) -> Path:
    """Fetch a model from the Hugging Face hub; HF_TOKEN is used where the model asks for it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError

    patterns = ["*.json", "*.jinja", "tokenizer*"]
    if weights:
        patterns.append("*.safetensors")
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except GatedRepoError:
        raise CourseError(
            f"model.path={name} asks for its licence to be accepted on the hub; accept it and set HF_TOKEN"
        ) from None
    except OSError as error:  # no such model, no network, no space, …
        raise CourseError(
            f"model.path={name} is not a folder here and could not be fetched from the hub ({first_line(error)}); "
            "give a Hugging Face model directory"
        ) from None


def unreadable(model: ModelRecipe, part: str, error: Exception) -> CourseError:
    """What to do about a model's config or tokenizer that Transformers does not load."""
    if "trust_remote_code" in str(error):
        return CourseError(f"the {part} of model.path={model.path}: {OWN_CODE}")
    return CourseError(
        f"the {part} of model.path={model.path} cannot be read ({first_line(error)}); copy or download the model again"
    )


def require_architecture(model: ModelRecipe) -> None:
    """Refuse a `model.maxtext_name` that MaxText does not have, before it says so in many lines."""
    maxtext: Any = importlib.util.find_spec("maxtext")  # not imported, which takes seconds
    names = [file.stem for file in (Path(maxtext.origin).parent / "configs" / "models").glob("*.yml")]
    if model.maxtext_name not in names:
        raise CourseError(
            f"model.maxtext_name={model.maxtext_name} is no architecture of MaxText; near: "
            f"{', '.join(difflib.get_close_matches(model.maxtext_name, names, n=3, cutoff=0))}"
        )


def maxtext_sizes(model: ModelRecipe) -> dict[str, Any]:
    """MaxText's keys for sizes and for the constants of norm and rotary embedding, read from config.json.

    Raises CourseError when the recipe's `model.sizes` says something else (preflight relied on it), or when config.json
    scales the rotary embedding in another way than MaxText.
    """
    config = read_config(model_directory(model, weights=False))
    sizes = {maxtext: config[key] for key, maxtext in SIZES.items() if key in config} | _constants(model, config)
    for key, value in model.sizes.items():
        if sizes.get(key, value) != value:
            raise CourseError(f"model.sizes.{key}={value}, but config.json of {model.path} says {sizes[key]}")
    return model.sizes | sizes


def require_heads(kv_heads: int | None, tensor: int) -> None:
    """Refuse tensor parallelism that does not divide a model's key-value heads; None: their number is not known yet.

    MaxText gives each device whole heads.
    """
    if kv_heads and kv_heads % tensor:
        fitting = [str(number) for number in range(1, kv_heads + 1) if kv_heads % number == 0]
        raise CourseError(
            f"hardware.trainer_tensor={tensor} does not divide the model's {kv_heads} key-value heads; take "
            f"{' or '.join(fitting)}"
        )


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a model's folder.  Raises CourseError where it is damaged, or names code of the model's own."""
    file = directory / "config.json"
    remedy = "copy or download the model again"
    config = read_json(file, remedy)
    for key in SIZES:
        if not isinstance(config.get(key), int | float | None):
            raise CourseError(f"{file}: {key} is {reprlib.repr(config[key])}, not a number; {remedy}")
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key), dict | None):
            raise CourseError(f"{file}: {key} is {reprlib.repr(config[key])}, not an object; {remedy}")
    if "auto_map" in config and not _known_to_transformers(config):
        raise CourseError(f"{file}: {OWN_CODE}")
    return config


def _known_to_transformers(config: dict[str, Any]) -> bool:
    from transformers import CONFIG_MAPPING  # only here: it takes seconds, and few models have code of their own

    return config.get("model_type") in CONFIG_MAPPING


def rotary_embedding(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Its kind (`default`: not scaled) and settings, rope_theta among them, from config.json of Transformers 4 or 5."""
    rope: dict[str, Any] = (
        {"rope_theta": config.get("rope_theta")}
        | (config.get("rope_scaling") or {})
        | (config.get("rope_parameters") or {})
    )
    return rope.get("rope_type", rope.get("type", "default")), rope


def _constants(model: ModelRecipe, config: dict[str, Any]) -> dict[str, Any]:
    """Norm epsilon and rotary base by MaxText's keys: its own file may be that of another size, with other values."""
    kind, rope = rotary_embedding(config)
    scaling = {} if kind == "default" else {key: rope.get(key) for key in LLAMA31_SCALING}
    known = LLAMA31_SCALING if model.maxtext_name.startswith("llama3.1") else {}
    if scaling != known or kind not in ("default", "llama3"):
        raise CourseError(
            f"config.json of {model.path} has rope_scaling {rope or None}, but MaxText gives {model.maxtext_name} "
            f"{known or 'none'}; give a model.maxtext_name of the same kind, or another model"
        )
    constants = {
        "normalization_layer_epsilon": config.get("rms_norm_eps"),
        "rope_max_timescale": rope.get("rope_theta"),
    }
    if config.get("model_type") == "llama" and kind == "default":
        # MaxText's block for Llama folds the scale of the queries into their weights, and its Llamas have no tied
        # embedding.  Its block for Qwen2.5 computes the same, from the weights as they are published.
        constants |= {"decoder_block": "qwen2", "normalize_embedding_logits": False}
    return {key: value for key, value in constants.items() if value is not None}
