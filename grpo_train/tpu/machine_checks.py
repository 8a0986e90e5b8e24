"""What the chips of this machine are and do, for `grpo self-check`.  In a process of its own, which lets them go again.

platform, checks = measure(recipe, processes=1)       # JAX starts here
"""

import contextlib
import dataclasses
import importlib.util
import re
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_train import losses
from grpo_train.engines import model_files
from grpo_train.engines.prompt_check import check_prompts
from grpo_train.engines.tokens import Renderer, load_tokenizer
from grpo_train.recipes import Recipe, dump_recipe
from grpo_train.runs import machine, multihost, tracking
from grpo_train.runs.run_directory import is_address, location

# Bytes of an array that is moved; rows and columns of the matrices that are multiplied on a TPU, and on a CPU.
MOVED = 2**28
WIDTH, CPU_WIDTH = 8192, 1024
ROUNDS = 10
# The relative error of a float32 product: 1e-7 to 1e-6 where it is computed in float32, 3e-3 in bfloat16.
FLOAT32_ERROR = 1e-5
# How far a loss may be from plain JAX in float32: a value in nats, and the gradient, in parts of it (both ways round
# the slope of the logits to bfloat16).  Chunks round the logits, too.  A tile of 1024 tokens left out is 0.007 nats.
NATS = {"pallas": 1e-3, "chunked": 2e-2}
SLOPE = 1e-2
SMALL = (48, 128, 5003)  # tokens, width and vocabulary without a TPU


NOT_MADE = "not made"


class NotMade(Exception):
    """A check that cannot be made here; the text says why."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the page.  `outcome` is pass, FAIL or NOT_MADE; `text` what was found, or what to do."""

    name: str
    outcome: str
    text: str
    seconds: float


def examine(checks: dict[str, Callable[..., str]], *arguments: Any) -> list[Check]:
    """Make each check: it returns what it found, or raises; an error ends one check, and not the others."""
    done = []
    for name, check in checks.items():
        started = time.monotonic()
        try:
            outcome, text = "pass", check(*arguments)
        except NotMade as reason:
            outcome, text = NOT_MADE, str(reason)
        except Exception as error:  # whatever a machine may do on its first day
            outcome, text = "FAIL", f"{type(error).__name__}: {error}".removeprefix("CourseError: ")
        done.append(Check(name, outcome, " ".join(text.split()), time.monotonic() - started))
    return done


def without_jax(recipe: Recipe, runs: Path) -> dict[str, Callable[[], str]]:
    """The checks that need no chip; `runs`: the folder of all runs, of several hosts one that they share."""

    def checkpoints() -> str:
        return _folder(location(recipe.training.checkpoints or runs))

    return {
        "packages": lambda: _packages(environment.repo_root() / "requirements"),
        "chips": _chips,
        "folder of runs": lambda: _folder(runs),
        "checkpoints": checkpoints,
        "model": lambda: _model(recipe),
        "tokenizer": lambda: _tokenizer(recipe),
        "prompt": lambda: _prompt(recipe),
        "tracking": lambda: _tracking(recipe),
    }


def measure(
    recipe: Recipe,
    processes: int,
    coordinator: str | None = None,
    process: int | None = None,
    more: dict[str, Callable[[Recipe], str]] | None = None,
) -> tuple[str, list[Check]]:
    """(JAX's platform, the checks of its devices, and those in `more`).  With several processes all of them call it."""
    connected: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if processes > 1:
        connected = multihost.distributed_context(coordinator, processes, process, digest=dump_recipe(recipe))
    with connected:
        checks = {
            "devices": _devices,
            "memory": _memory,
            "precision": _precision,
            "products": _products,
            "from the host": _from_the_host,
            "between chips": _between_chips,
            "loss": _loss,
        }
        return jax.default_backend(), examine(checks | (more or {}), recipe)


def failed(checks: Iterable[Check]) -> list[Check]:
    """Those that failed."""
    return [check for check in checks if check.outcome == "FAIL"]


def _packages(locks: Path) -> str:
    """The versions that decide what is computed are the lock's."""
    lock = locks / ("tpu.lock" if importlib.util.find_spec("vllm") else "cpu.lock")
    locked = dict(re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(encoding="utf-8"), re.M))
    here = machine.describe(devices=False)
    packages = here["packages"]
    wrong = {name: version for name, version in packages.items() if locked.get(name, version) != version}
    if wrong:
        installed = ", ".join(f"{name} {version}" for name, version in wrong.items())
        asked = locked[next(iter(wrong))]
        target = "make setup-tpu" if lock.name == "tpu.lock" else "make setup"
        raise CourseError(f"{installed}: {lock.name} has {asked}; {target} installs it")
    platforms = jax.config.jax_platforms or "not set"
    return (
        f"jax {packages['jax']} and {len(packages) - 1} others are those of {lock.name}; "
        f"{machine.operating_system()}, Python {here['python']}, {here['memory_gib']} GiB of memory, "
        f"JAX_PLATFORMS {platforms}"
    )


def _chips() -> str:
    environment.require_free_chips()
    if not environment.has_accelerator():
        raise NotMade("no TPU on this machine")
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="utf-8")
    pages = "on" if "[always]" in huge else "off: docs/tpu-vm.md says how they make starting faster"
    return f"no process holds them; transparent huge pages {pages}"


def _folder(folder: Any) -> str:
    """What a run does to files: write, append, rename a folder with something in it, read, delete."""
    trial = folder / f".self-check-{secrets.token_hex(4)}"
    renamed = trial.with_name(f"{trial.name}-renamed")
    try:
        trial.mkdir(parents=True)
        (trial / "rows").write_text("first\n")
        if not is_address(folder):  # a bucket that is no folder gets whole files only
            with open(trial / "rows", "a") as rows:
                rows.write("second\n")
            written = trial
            trial = trial.rename(renamed)
            if written.exists() or (trial / "rows").read_text() != "first\nsecond\n":
                raise OSError("what was written is not what is read")
    except Exception as error:  # of a file system or of a bucket's client
        raise CourseError(
            f"{folder} cannot do what a run needs ({type(error).__name__}: {error}); mount a bucket with "
            "--implicit-dirs --rename-dir-limit=10000 (docs/tpu-vm.md), or take another folder"
        ) from None
    finally:
        with contextlib.suppress(Exception):
            (trial / "rows").unlink()
            trial.rmdir()
    return f"{folder}: written, appended, renamed and deleted"


def _tracking(recipe: Recipe) -> str:
    return tracking.require(recipe.tracking) or f"wandb: {recipe.tracking.wandb}"


def _model(recipe: Recipe) -> str:
    """config.json and the tokenizer are here, or the hub gives them: that asks for the token where one is needed."""
    folder = model_files.model_directory(recipe.model, weights=False)
    return f"{recipe.model.path}: {_config(folder).get('model_type')}, its small files are in {folder}"


def _config(folder: Path) -> dict[str, Any]:
    return model_files.read_config(folder)


def _tokenizer(recipe: Recipe) -> str:
    tokenizer = load_tokenizer(recipe.model)
    config = _config(model_files.model_directory(recipe.model, weights=False))
    if len(tokenizer) > config["vocab_size"]:
        raise CourseError(
            f"the tokenizer has {len(tokenizer)} tokens, and the model's embedding {config['vocab_size']}: it is "
            "another model's"
        )
    text = "Janet has 16 eggs.\n<reasoning>16 - 3 = 13</reasoning>"
    read = tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids)
    if read != text:
        raise CourseError(f"the tokenizer makes {read!r} of {text!r}: it is not this model's, or its files are damaged")
    return f"{len(tokenizer)} tokens, ends with {tokenizer.eos_token!r}, pads with {tokenizer.pad_token!r}"


def _prompt(recipe: Recipe) -> str:
    return check_prompts(recipe, Renderer(recipe.prompts, load_tokenizer(recipe.model)))


def _devices(recipe: Recipe) -> str:
    hardware = recipe.hardware
    devices = jax.devices()
    found = f"{len(devices)} of {devices[0].device_kind}, process {jax.process_index()} of {jax.process_count()}"
    hosts = hardware.process_count()
    if jax.process_count() != hosts:
        raise CourseError(
            f"the recipe is for {hosts} hosts with a process each, and here is {found}; start this on all hosts, or "
            "set hardware.accelerator to this slice"
        )
    if environment.has_accelerator() and devices[0].platform == "cpu":
        raise CourseError(f"this machine has a TPU, and JAX uses {found}; set JAX_PLATFORMS=tpu,cpu")
    needed = hardware.trainer_count() + (0 if hardware.colocated else hardware.sampler_count())
    if devices[0].platform == "tpu" and hardware.accelerator:
        needed = hardware.slice.devices
        kinds = hardware.slice.chip.kinds
        if devices[0].device_kind not in kinds:
            raise CourseError(
                f"hardware.accelerator={hardware.accelerator} is {' or '.join(kinds)}, and here are {found}; set it to "
                "this slice"
            )
    if len(devices) < needed:
        fix = "set hardware.accelerator to this machine's slice"
        if hardware.accelerator:
            fix = f"start this on a {hardware.accelerator}, or set hardware.accelerator to what you have"
        raise CourseError(f"the recipe needs {needed} devices, and here are {found}; {fix}")
    return found


def _memory(recipe: Recipe) -> str:
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) / 2**30 for device in jax.local_devices()]
    if not (recipe.hardware.accelerator and all(limits)):
        raise NotMade("these devices report no memory")
    expected = recipe.hardware.slice.chip.usable_gib
    if min(limits) < 0.98 * expected:
        raise CourseError(
            f"a chip has {min(limits):.2f} GiB, and preflight counts on {expected}; look for a process that holds some"
        )
    return f"{min(limits):.2f} GiB a chip; preflight counts on {expected}"


def _precision(recipe: Recipe) -> str:
    """A product of float32 matrices as a float32 recipe computes it (pipeline sets the precision)."""
    a, b = np.random.default_rng(0).normal(size=(2, 512, 512)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        found = np.asarray(jnp.matmul(a, b), np.float64)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    error = float(np.abs(found - exact).max() / np.abs(exact).max())
    if not error < FLOAT32_ERROR:
        raise CourseError(f"a float32 product is {error:.1e} off, and at most {FLOAT32_ERROR:.0e} is expected")
    return f"a float32 product is {error:.1e} off"


def _loss(recipe: Recipe) -> str:
    """The recipe's way to log-probabilities, entropies and the gradient, against plain JAX in float32, of a completion.

    At the model's width and vocabulary; without a TPU at small ones, and the kernel in interpret mode.
    """
    way = recipe.loss.implementation
    if way == "jax":
        raise NotMade("loss.implementation=jax is the reference itself; with pallas its kernel would be compared")
    config = _config(model_files.model_directory(recipe.model, weights=False))
    sizes = (recipe.rollout.max_completion_length, config["hidden_size"], config["vocab_size"])
    tokens, width, vocabulary = sizes if jax.default_backend() == "tpu" else map(min, sizes, SMALL)
    tied = config.get("tie_word_embeddings", False)
    shape = (vocabulary, width) if tied else (width, vocabulary)
    hidden_key, head_key, ids_key = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(hidden_key, (1, tokens, width), recipe.model.dtype)
    head = jax.random.normal(head_key, shape, recipe.model.dtype) / width**0.5
    ids = jax.random.randint(ids_key, (1, tokens), 0, vocabulary)

    def total(inputs, way):
        logps, entropy = losses.token_statistics(
            ids,
            hidden=inputs[0],
            head=inputs[1],
            temperature=recipe.rollout.first_temperature,
            implementation=way,
            vocab_axis=0 if tied else 1,
        )
        return jnp.sum(logps * jnp.linspace(-1, 1, tokens)), (logps, entropy)

    run = jax.jit(jax.value_and_grad(total, has_aux=True), static_argnums=1)
    (_, values), slopes = run((hidden, head), way)
    with jax.default_matmul_precision("highest"):
        (_, exact_values), exact_slopes = run((hidden.astype(jnp.float32), head.astype(jnp.float32)), "jax")
    nats = max(float(abs(ours - exact).max()) for ours, exact in zip(values, exact_values, strict=True))
    slope = max(
        float(jnp.linalg.norm(ours - exact) / jnp.linalg.norm(exact))
        for ours, exact in zip(slopes, exact_slopes, strict=True)
    )
    text = (
        f"{way}: {nats:.1e} nats (at most {NATS[way]}) and {slope:.1e} of the gradient (at most {SLOPE}) from plain "
        f"JAX; {tokens} tokens, width {width}, vocabulary {vocabulary}"
    )
    if not (nats <= NATS[way] and slope <= SLOPE):
        raise CourseError(f"{text}; set loss.implementation=jax")
    return text


def _products(recipe: Recipe) -> str:
    """The rate of bfloat16 products, as a share of the vendor's peak."""
    on_tpu = jax.default_backend() == "tpu"
    width = WIDTH if on_tpu else CPU_WIDTH
    matrix = jnp.ones((width, width), jnp.bfloat16)
    rate = 2 * width**3 / _seconds(jax.jit(lambda x: x @ x), matrix)
    if not (on_tpu and recipe.hardware.accelerator):
        return f"{rate / 1e9:.0f} GFLOP/s a device"
    share = rate / recipe.hardware.slice.chip.flops
    if share < 0.3:
        raise CourseError(f"a chip multiplies at {share:.0%} of its peak; look for a process that uses it")
    return f"{rate / 1e12:.0f} TFLOP/s a chip, {share:.0%} of its peak"


def _from_the_host(recipe: Recipe) -> str:
    if jax.default_backend() == "cpu":
        raise NotMade("the devices are this machine's CPU, and nothing would be moved")
    device = jax.local_devices()[0]
    array = np.ones(MOVED // 4, np.float32)
    there = _seconds(lambda x: jax.device_put(x, device), array)
    on_device = jax.device_put(array, device)
    started = time.monotonic()
    np.asarray(on_device)
    back = time.monotonic() - started
    return f"{MOVED / there / 1e9:.1f} GB/s to a device, {MOVED / back / 1e9:.1f} GB/s back"


def _between_chips(recipe: Recipe) -> str:
    """From the trainer's layout to the sampler's: rows over all devices, then columns."""
    devices = jax.local_devices()
    if len(devices) == 1:
        raise NotMade("one device")
    mesh = jax.sharding.Mesh(np.array(devices), ("all",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("all"))
    columns = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "all"))
    side = 1024 * len(devices)
    array = jax.device_put(np.ones((side, MOVED // 4 // side), np.float32), rows)
    seconds = _seconds(lambda x: multihost.reshard(x, columns), array)
    if jax.default_backend() == "cpu":  # how fast says nothing about chips
        return f"an array was moved between all {len(devices)} devices of this host"
    return f"{array.nbytes / seconds / 1e9:.1f} GB/s through all {len(devices)} devices of this host"


def _seconds(function: Callable[[Any], Any], argument: Any) -> float:
    """The least of some rounds; the first one compiles."""
    times = []
    for _ in range(ROUNDS):
        started = time.monotonic()
        jax.block_until_ready(function(argument))
        times.append(time.monotonic() - started)
    return min(times)
