"""A look at the machine before hours are spent on it: `grpo self-check RECIPE`, on every host.

    checks = run(recipe, Path("runs"), log=print)
    print(page(recipe, checks))

First what needs no JAX: packages, chips, folders, the model's files.  Then the devices, in their own process.  Then
a short training in the recipe's precision and layout, of random weights: on a TPU with the recipe's own widths and
batch and two layers, elsewhere as small as the smoke test's.  It is stopped with SIGTERM and continued.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import read_jsonl, write_text_atomic
from grpo_train.engines import model_files
from grpo_train.engines.weight_sync import MAX_MEAN_GAP
from grpo_train.recipes import Recipe, dump_recipe, parse_recipe
from grpo_train.runs.checkpoints import checkpoint_root
from grpo_train.runs.preemption import EXIT_CODE
from grpo_train.tpu import compiler, machine_checks, preflight, random_model, smoke_test
from grpo_train.tpu.machine_checks import NOT_MADE, Check, NotMade, failed
from grpo_train.tpu.memory import GIB

STEPS = 6
LAYERS = 2
RATE = 1e-2
DEVICE_SECONDS = 600  # for all checks of devices: a chip that hangs is found, too
SEQUENCES = 64  # in the check of vLLM's kernel, at most: its reference takes one after the other
# Of a token's output: the kernel rounds probabilities and outputs to bfloat16, which has 8 bits.
ATTENTION_ERROR = 0.03


def run(
    recipe: Recipe,
    runs: Path,
    *,
    processes: int = 1,
    coordinator: str | None = None,
    process: int | None = None,
    log: Callable[[str], None] = print,
) -> list[Check]:
    """All checks, in order; `log` gets each line when it is known.

    Args:
      runs: the folder that the recipe's run will be in; of several hosts, the one that they share.
      processes, coordinator, process: as for grpo train.
    """

    def shown(checks: list[Check]) -> list[Check]:
        for check in checks:
            log(line(check))
        return checks

    directory = runs / recipe.name
    of_files = {
        "weights": lambda: _weights(recipe),
        "disk": lambda: _disk(recipe, directory),
    }
    checks = shown(machine_checks.examine(machine_checks.without_jax(recipe, runs) | of_files))
    on_tpu = False
    try:
        platform, of_devices = _apart(
            machine_checks.measure, recipe, processes, coordinator, process, {"attention": _attention}
        )
        on_tpu = platform == "tpu"
    except CourseError as error:
        of_devices = [Check("devices", "FAIL", str(error), 0.0)]
    checks += shown(of_devices)
    if failed(checks):
        return checks + shown([Check("training", NOT_MADE, "first fix what failed", 0.0)])
    place = []
    if processes > 1:
        place += ["--processes", str(processes)]
    if coordinator is not None:
        place += ["--coordinator", coordinator, "--process", str(process)]
    drills = {
        "stopped": _until_stopped,
        "continued": _to_the_end,
        "sampler": _sampler,
        "steps": _steps,
        "peak memory": _peak_memory,
        "estimate": _estimate,
    }
    training = _prepare(recipe, runs, on_tpu, place)
    return checks + shown(machine_checks.examine(drills, training))


def _apart[T](function: Callable[..., T], *arguments: Any) -> T:
    """In a process of its own, which lets its devices go again.  Raises CourseError, also when it takes too long."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result(DEVICE_SECONDS)
        except Exception as error:
            for child in multiprocessing.active_children():
                child.kill()
            raise CourseError(str(error) or f"no answer for {DEVICE_SECONDS} seconds") from error


def line(check: Check) -> str:
    """A check on one line."""
    return f"{check.outcome:<10}{check.name:<16}{check.text}  ({check.seconds:.1f} s)"


def page(recipe: Recipe, checks: list[Check]) -> str:
    """What failed, and the verdict; on a TPU also how long a start of the whole model will take."""
    not_made = sum(check.outcome == NOT_MADE for check in checks)
    wrong = failed(checks)
    if wrong:
        passed = len(checks) - len(wrong) - not_made
        counts = f"{recipe.name}: {len(wrong)} failed, {passed} passed, {not_made} were not made:"
        return "\n".join([counts, *map(line, wrong)])
    verdict = f"{recipe.name}: {len(checks) - not_made} checks passed, {not_made} were not made"
    if not environment.has_accelerator():  # elsewhere the model of the training is a small one
        return verdict
    layers = model_files.maxtext_sizes(recipe.model)["base_num_decoder_layers"]
    [minutes] = [check.seconds / 60 for check in checks if check.name == "stopped"]
    # Conversion, loading, and vLLM's programs grow with the layers, imports and MaxText's scanned programs do not.
    return (
        f"{verdict}\na start took {minutes:.1f} minutes with {LAYERS} layers, to the end of its first steps; with all "
        f"{layers} it will take {minutes:.0f} to {minutes * layers / LAYERS:.0f}, and in addition the download of the "
        "weights and the evaluation before the training"
    )


# ----------------------------------------------------------------------------------------------------- without JAX


def _disk(recipe: Recipe, directory: Path) -> str:
    free = model_files.require_disk(recipe, directory / "checkpoints" / "base", directory)
    if free is None:
        raise NotMade("the number of weights is not known; the line about weights says why")
    return free


def _weights(recipe: Recipe) -> str:
    """Names and shapes are those of config.json; where the weights are here, all are finite."""
    from safetensors import safe_open

    if not random_model.family(recipe.model):
        raise NotMade(f"the names of {recipe.model.maxtext_name}'s weights are not known here")
    folder = model_files.local_folder(recipe.model)
    shapes: dict[str, tuple[int, ...]] = {}
    for metadata in model_files.weight_files(recipe.model).files_metadata.values():
        shapes |= {name: tuple(tensor.shape) for name, tensor in metadata.tensors.items()}
    for name, shape in random_model.weight_shapes(random_model.full_config(recipe.model)).items():
        if shapes.get(name) != shape:
            found = f"the shape {shapes[name]}" if name in shapes else "nothing"
            raise CourseError(f"weight {name}: config.json asks for {shape}, and the files have {found}")
    for file in sorted(folder.glob("*.safetensors")) if folder else ():
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (it is no dict)
                if not np.isfinite(tensors.get_tensor(name)).all():
                    raise CourseError(f"weight {name} of {file.name} is not finite; fetch the model again")
    checked = "all finite" if folder else "on the hub; not read yet"
    count = sum(map(math.prod, shapes.values()))
    return f"{count:,} in {len(shapes)} arrays, {checked}"


# ---------------------------------------------------------------------------------------------- on the chips, with JAX


def _attention(recipe: Recipe) -> str:
    """vLLM's kernel as a replica of the sampler calls it, against tpu-inference's own reference in float32.

    Prompts, one of them of full length, then a token more of each.
    """
    if jax.default_backend() != "tpu":
        raise NotMade("vLLM's kernel is a program for the TPU; grpo preflight compiles it")
    if recipe.rollout.engine != "vllm" or not recipe.hardware.accelerator or recipe.rollout.max_prompt_length == "auto":
        raise NotMade("only of rollout.engine=vllm, with hardware.accelerator and rollout.max_prompt_length")
    from tpu_inference.kernels.ragged_paged_attention.v3 import kernel

    program: Any = preflight.programs_of(recipe)["attention"]
    attend, cache, fresh, _ = compiler.attention(program, jax.local_devices()[: program.devices])
    pages, page = cache.shape[:2]
    tokens, kv_heads, size = fresh[0][1].shape
    rows = program.sequences
    count = min(rows, SEQUENCES)
    longest = min(program.prompt_length, tokens // 2)
    others = min((tokens - longest) // count, longest)
    prompts = np.zeros(rows, np.int32)  # tokens of each
    prompts[:count] = [longest, *[others] * (count - 1)]
    decoded = (prompts > 0).astype(np.int32)  # a token more of each
    draw = np.random.default_rng(0)
    used = count * pages // rows
    places = np.resize(draw.permutation(used).astype(np.int32), pages)  # the pages of each sequence

    def table(lengths: np.ndarray, added: np.ndarray, decoding: int) -> list[np.ndarray]:
        starts = np.append(0, added.cumsum()).astype(np.int32)
        return [lengths, places, starts, np.array([decoding, decoding, count], np.int32)]

    tables = [table(prompts, prompts, 0), table(prompts + decoded, decoded, count)]
    fresh = jax.tree.map(lambda array: jnp.asarray(draw.normal(size=array.shape), array.dtype), fresh)
    found, _ = jax.jit(attend)(jnp.zeros(cache.shape, cache.dtype), fresh, tables)
    with jax.default_matmul_precision("highest"):
        exact_cache = jnp.zeros(kernel.get_kv_cache_shape(used, page, kv_heads, size, jnp.float32))
        exact_fresh = jax.tree.map(lambda array: array.astype(jnp.float32), fresh)
        expected, _ = attend(exact_cache, exact_fresh, tables, kernel.ref_ragged_paged_attention)
    norm = functools.partial(np.linalg.norm, axis=(1, 2))  # of each token's output

    def error(ours: Any, exact: Any) -> float:
        ours, exact = np.asarray(ours, np.float32), np.asarray(exact)
        return float((norm(ours[: len(exact)] - exact) / norm(exact)).max())

    worst = max(error(ours, exact) for ours, exact in zip(found, expected, strict=True))
    text = f"vLLM's kernel differs from its reference by {worst:.1e} of a token's output (at most {ATTENTION_ERROR})"
    if not worst <= ATTENTION_ERROR:
        raise CourseError(f"{text}: it would write other text than the trainer scores; set rollout.engine=tunix")
    return f"{text}; {count} sequences in blocks of {page}, {len(expected[0])} tokens of prompts"


# ---------------------------------------------------------------------------------------------------- the training


@dataclasses.dataclass(frozen=True)
class Training:
    """A short training of random weights: its command, what it writes, and the variables of its process."""

    recipe: Recipe
    command: list[str]
    directory: Path
    log_file: Path
    variables: dict[str, str]


def _prepare(recipe: Recipe, runs: Path, on_tpu: bool, place: list[str]) -> Training:
    """Write the random model and the recipe of the training.  Each host writes its own model, the same."""
    cache = environment.cache_dir() / "self-check"
    model = cache / f"{recipe.name}-model"
    scaled = smoke_test.scaled_recipe(
        recipe, steps=STEPS, engine=smoke_test.choose_engine(recipe), placeholders=smoke_test.placeholders(recipe)
    )
    data = smoke_test.random_recipe(recipe, scaled, model).model_dump(mode="json")
    data["name"] = f"self-check-{recipe.name}"
    # So large a step moves what the model says by more than rounding does: a sampler that is one behind shows.
    data["training"] |= {"learning_rate": RATE, "stop_after": None, "cold_start": 0}
    data["training"]["checkpoints"] = recipe.training.checkpoints
    if on_tpu:  # all of the recipe's own, but for the number of layers and of steps, and the problems
        for section in ("hardware", "rollout", "grpo", "loss", "lora"):
            data[section] = getattr(recipe, section).model_dump(mode="json")
        data["grpo"]["dynamic_sampling"] = None
        sizes = {"prompts_per_step", "micro_batch_size"}
        per_device = {f"{size}_per_device" for size in sizes}
        data["training"] |= recipe.training.model_dump(include=sizes | per_device | {"layout"})
    else:
        data["hardware"]["processes"] = None
    small = parse_recipe(data, origin=f"self-check of {recipe.name}")
    random_model.write_random_model(
        recipe.model, model, recipe.seed, LAYERS if on_tpu else None, small.hardware.trainer_tensor
    )
    file = cache / f"{recipe.name}.yaml"
    write_text_atomic(file, dump_recipe(small))
    directory = runs.resolve() / small.name
    shutil.rmtree(directory, ignore_errors=True)
    if small.training.checkpoints:
        checkpoint_root(small.training, directory).rmtree(missing_ok=True)
    log_file = cache / f"{recipe.name}.log"  # of this host
    log_file.unlink(missing_ok=True)
    variables = {}
    if not on_tpu:
        devices = f"--xla_force_host_platform_device_count={smoke_test.device_count(small)}"
        variables = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {devices}", "JAX_PLATFORMS": "cpu"}
    command = [*smoke_test.command_line(small, file, directory, on_cpu=not on_tpu), *place]
    return Training(small, command, directory, log_file, variables)


def _until_stopped(training: Training) -> str:
    """SIGTERM to the whole group, as a scheduler sends it, when the first step is done."""
    code = _run(training, stop=True)
    if code != EXIT_CODE:
        raise CourseError(f"SIGTERM ended the training with code {code}, not {EXIT_CODE}: {_reason(training)}")
    return f"SIGTERM after {len(_rows(training))} steps: saved, exit code {EXIT_CODE}, no process left"


def _to_the_end(training: Training) -> str:
    code = _run(training)
    if code:
        raise CourseError(f"the same command did not continue (exit code {code}): {_reason(training)}")
    steps = [row["step"] for row in _rows(training)]
    if steps != list(range(1, STEPS + 1)):
        raise CourseError(f"the run has the steps {steps}, and not each of {STEPS} once")
    environment.require_free_chips()
    return f"the same command went on to step {STEPS}; evaluated, exported, reported"


def _run(training: Training, stop: bool = False) -> int:
    """The training's exit code; with `stop` it gets a SIGTERM.  Raises CourseError where it leaves a process behind."""
    with open(training.log_file, "a", encoding="utf-8") as output:
        process = subprocess.Popen(
            training.command,
            env=os.environ | training.variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        while process.poll() is None:
            if stop and (training.directory / "metrics.jsonl").exists():
                os.killpg(process.pid, signal.SIGTERM)
                stop = False
            time.sleep(0.05)
    except BaseException:  # Ctrl-C, too: the group does not get it from the terminal
        os.killpg(process.pid, signal.SIGKILL)
        raise
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
        raise CourseError("the training ended and left processes behind; they were killed")
    return process.returncode


def _rows(training: Training) -> list[dict[str, Any]]:
    return read_jsonl(training.directory / "metrics.jsonl")


def _reason(training: Training) -> str:
    return f"{smoke_test.last_error(training.log_file)}; its output is in {training.log_file}"


def _sampler(training: Training) -> str:
    """After the first sync, by the run's own check, and after each update, by its metrics."""
    check = json.loads((training.directory / "sync.json").read_text(encoding="utf-8"))
    rollout = training.recipe.rollout
    limit = rollout.max_mean_gap or MAX_MEAN_GAP[training.recipe.model.dtype]
    gap = max(row["sampler_trainer_gap"] for row in _rows(training))
    if not gap <= limit:
        raise CourseError(
            f"after an update sampler and trainer differ by {gap:.2g} nats per token (limit {limit}): the sampler does "
            "not get the weights that were trained, or not in time"
        )
    return (
        f"{rollout.engine}: {check['weights']} weights arrived; log-probabilities differ from the trainer's by "
        f"{check['mean_gap']:.1e} nats per token at the first sync, by {gap:.1e} at most later"
    )


def _steps(training: Training) -> str:
    """Finite losses; the second step compiles nothing, nor does any later one, but for new shapes of rows."""
    rows = _rows(training)
    if not all(row["loss"] is not None for row in rows):
        raise CourseError("a loss is not a finite number; grpo report shows the steps")
    # The first step of each of the two processes has the most.
    *later, _, _ = sorted(rows, key=lambda row: row["compilations"])
    again = [row["step"] for row in later if row["compilations"]]
    as_needed = training.variables and training.recipe.rollout.engine == "vllm"  # vllm_on_cpu
    if not as_needed and again and (training.recipe.plan.layout == "padded" or len(again) == len(later)):
        raise CourseError(f"programs are compiled again in the steps {again}, and not only in the first of a process")
    first, second = rows[:2]
    applied = min(row.get("update_applied", 1.0) for row in rows)
    fastest = min(row["seconds"] for row in rows)
    return (
        f"{len(rows)} finite losses, update_applied {applied:.3f}; first "
        f"step {first['seconds']:.0f} s, with {first['compilations']:.0f} programs compiled before and in it, "
        f"{second['compilations']:.0f} in the second; later steps {fastest:.2f} s"
    )


def _peak_memory(training: Training) -> str:
    """Beside preflight's count of the same model, which is compiled on this machine's CPU."""
    peaks = [row["peak_memory_gib"] for row in _rows(training) if "peak_memory_gib" in row]
    if not peaks or not training.recipe.hardware.accelerator or training.recipe.rollout.max_prompt_length == "auto":
        raise NotMade("these devices report no memory, or the recipe lacks what preflight must know")
    counted = _apart(_counted, training.recipe)
    return f"{max(peaks):.2f} GiB on the fullest chip, with {LAYERS} layers; preflight counts {counted / GIB:.2f}"


def _estimate(training: Training) -> str:
    """A measured update beside preflight's estimate of the same two layers, compiled on this machine's CPU."""
    if training.variables:
        raise NotMade("an estimate is of a TPU, and there is none here")
    if not training.recipe.hardware.accelerator or training.recipe.rollout.max_prompt_length == "auto":
        raise NotMade("the recipe lacks what preflight must know")
    measured = min(row["seconds_update"] for row in _rows(training))
    estimated = _apart(_estimated_update, training.recipe)
    if estimated is None:
        raise NotMade("the compiled update has no estimate; remove .cache/preflight if it is older than estimates")
    return (
        f"update {measured:.3g} s measured, {estimated:.3g} s estimated for full length, with {LAYERS} layers; "
        f"measured / estimated {measured / estimated:.2f}"
    )


def _estimated_update(recipe: Recipe) -> float | None:
    """Seconds of the updates of a step, if they can be told.  In a process that has no devices yet."""
    time = _compiler(recipe)(preflight.programs_of(recipe)["update"]).time
    return recipe.plan.accumulation_steps * recipe.grpo.iterations * time.seconds if time else None


def _compiler(recipe: Recipe) -> compiler.Compiler:
    return compiler.Compiler(recipe.training, recipe.grpo.iterations, lambda _: None)


def _counted(recipe: Recipe) -> int:
    """Bytes on the fullest chip, by preflight.  In a process that has no devices yet."""
    return max(chip.largest for chip in preflight.examine(recipe, _compiler(recipe)).chips)
