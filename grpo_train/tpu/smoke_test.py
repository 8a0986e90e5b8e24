"""Smoke-test a recipe on virtual CPU devices before a TPU is rented: small models, two steps, the same code path.

    scaled = scaled_recipe(load_recipe("recipes/llama3.1-8b-gsm8k.yaml"), engine="vllm")
    changes(recipe, scaled)                 # what was scaled down: "training.steps: 3738 -> 2", ...
    run(recipe, scaled, "runs/smoke-test-llama3.1-8b-gsm8k")

Two models go through `grpo train`, from the data to the report: a random one of the recipe's own architecture, then the
tiny trained Qwen3.  (Whether MaxText computes what others compute is tested in tests/tpu.)  Each runs in a process
of its own, because the number of virtual devices must be known before JAX is imported, and so that a TPU on this
machine is not used; a recipe for several hosts runs as two processes.  What upstream prints goes to the log file only.
Not covered: speed and memory.
"""

import importlib.util
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import read_jsonl, write_text_atomic
from grpo_lib.problems import competition
from grpo_train.engines import model_files
from grpo_train.recipes import HardwareRecipe, ProblemsRecipe, Recipe, differences, dump_recipe, parse_recipe
from grpo_train.tpu import random_model
from grpo_train.tpu.placeholder_problems import write_placeholders

STEPS = 2
LARGEST_GROUP = 4  # more completions of a prompt take time and cover no more code
COMPLETION = 24  # tokens: a whole solution of the tiny model, as in recipes/tiny-cpu.yaml
PROMPT = 256  # tokens: a word problem with the system prompt takes up to 200 of the tiny tokenizer's
TINY_MODEL = {"path": "assets/tiny-base", "maxtext_name": "qwen3-0.6b", "sizes": {}}
# Of GSM8K's first 256 training problems about 30 fit PROMPT tokens of the tiny tokenizer.  Test problems are never
# left out; the longest of the first 16 fits the 512 tokens that the tiny model reads.
PROBLEMS = {"train": 256, "validation": 64, "test": 16}
# Tokens of a KV cache block, sequences at once, and blocks for all of them at full length (512 tokens).
VLLM = {"block_size": 16, "max_num_seqs": 16, "num_gpu_blocks_override": 512}
PROCESSES = 2  # of a smoke test, where the recipe has more
# How a line of the log begins that says what went wrong: ours, else XLA's last word, else the end of a traceback.
ERRORS = (
    re.compile("error: "),
    re.compile(r"F\d{4} "),
    re.compile(r"[\w.]*(Error|Exception|Interrupt)(:|$)"),
    re.compile(r"\S"),
)
VARIABLES = {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "WANDB_MODE": "offline"}


@dataclass
class SmokeTest:
    """The outcome of a smoke test.  Gaps are in nats per token: between sampler and trainer, of the tiny model."""

    recipe: str
    engine: str
    devices: int
    passed: bool
    exit_code: int
    seconds: float
    log_file: str
    run: str
    processes: int = 1
    error: str | None = None  # the line that says what went wrong
    architecture: str | None = None  # of the random model that went through
    report: str | None = None
    weights: int | None = None
    mean_gap: float | None = None
    update_applied: float | None = None  # the least of all steps, of the model of the recipe's architecture
    changes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def scaled_recipe(
    recipe: Recipe,
    *,
    steps: int = STEPS,
    engine: str | None = None,
    gsm8k: str | None = None,
    placeholders: dict[str, Path] | None = None,
    wandb: bool = False,
) -> Recipe:
    """The recipe with everything that takes time scaled down, and everything that selects code paths kept.

    Args:
      engine: rollout.engine to use; None keeps the recipe's.
      gsm8k: folder with GSM8K's jsonl files, for recipes that train on it; None uses the word problems instead.
      placeholders: files by source, in place of those on the hub (problems.placeholders).
      wandb: whether Weights & Biases is installed, so that a recipe that tracks can do so offline.
    """
    data = recipe.model_dump(mode="json")
    data["name"] = f"smoke-test-{recipe.name}"
    data["model"] |= TINY_MODEL
    # vLLM has all devices in one process, wherever it runs.
    processes = min(PROCESSES, recipe.hardware.process_count()) if recipe.rollout.engine == "tunix" else 1
    hardware = scaled_hardware(recipe.hardware, processes)
    data["hardware"] = hardware.model_dump(mode="json")
    problems = [_scaled_problems(source, gsm8k, placeholders or {}) for source in recipe.sources]
    data["problems"] = problems if recipe.tasks else problems[0]

    rollout = data["rollout"]
    real = any(source["source"] != "words" for source in problems)
    rollout["engine"] = engine or recipe.rollout.engine
    rollout["max_completion_length"] = min(COMPLETION, recipe.rollout.max_completion_length)
    if real or recipe.rollout.max_prompt_length != "auto":
        rollout["max_prompt_length"] = PROMPT
    if real:  # the tiny tokenizer needs about three times the tokens of a real one
        rollout["overlong_prompts"] = "filter"
    if rollout["engine"] == "vllm":
        rollout["vllm"]["options"] = recipe.rollout.vllm.options | VLLM

    group_size = data["grpo"]["group_size"] = min(LARGEST_GROUP, recipe.grpo.group_size)
    if buffer := recipe.grpo.overlong_buffer:
        data["grpo"]["overlong_buffer"] = min(buffer, rollout["max_completion_length"] // 3)
    # As few prompts as fill the devices; in two micro-batches where the recipe has several, for the gradient and for
    # the rollout.
    plan = recipe.plan
    fsdp = hardware.trainer_count() // hardware.trainer_tensor
    # Prompts that spread evenly over the processes, and their completions over the devices.
    unit = math.lcm(processes, fsdp // math.gcd(fsdp, group_size))
    several = plan.accumulation_steps > 1 or (processes > 1 and plan.num_rollout_micro_batches > 1)
    prompts = 2 * unit if several else unit * math.ceil(min(2, plan.prompts_per_step) / unit)
    rollout["micro_batch_size"] = max(1, prompts // 2) if plan.num_rollout_micro_batches > 1 else None
    rollout["micro_batch_size_per_device"] = None  # sizes are those of all devices here
    training = recipe.training
    micro_batch = None
    if training.micro_batch_size or training.micro_batch_size_per_device:
        micro_batch = prompts * group_size // min(2, plan.accumulation_steps)
    data["training"] |= {
        "prompts_per_step": prompts,
        "prompts_per_step_per_device": None,
        "micro_batch_size": micro_batch,
        "micro_batch_size_per_device": None,
        "steps": steps,
        "warmup_steps": min(1 if steps > 1 else 0, training.warmup_steps),
        "checkpoint_every": 1,
        "profile_steps": None,
        "validate_every": steps if training.validate_every else 0,
    }
    data["evaluation"]["batch_size"] = min(PROBLEMS["test"], recipe.evaluation.batch_size)
    if recipe.tracking.wandb == "online":
        data["tracking"]["wandb"] = "offline" if wandb else "off"
    return parse_recipe(data, origin=f"smoke test of {recipe.name}")


def random_recipe(recipe: Recipe, scaled: Recipe, folder: str | Path) -> Recipe:
    """`scaled`, with a random model of the recipe's architecture in `folder`."""
    data = scaled.model_dump(mode="json")
    data["name"] += "-random"
    data["model"] |= {"path": str(folder), "maxtext_name": recipe.model.maxtext_name}
    data["evaluation"]["samples"] = 0  # nothing to measure
    for source in data["problems"] if scaled.tasks else [data["problems"]]:
        source["test"] = 2
    data["grpo"]["dynamic_sampling"] = None  # random text is never right, and every group would be left out
    # Nor is it paid for: without a gradient the update would be weight decay alone, which is too small to be measured.
    data["rewards"] = list(dict.fromkeys([*data["rewards"], "random_reward"]))
    return parse_recipe(data, origin=f"smoke test of {recipe.name}")


def tiny_recipe(scaled: Recipe, folder: str | Path) -> Recipe:
    """`scaled`, with the tiny trained model in `folder` where tensor parallelism needs more heads than it has."""
    if tiny_heads(scaled) == 1:
        return scaled
    data = scaled.model_dump(mode="json")
    data["model"]["path"] = str(folder)
    return parse_recipe(data, origin=scaled.name)


def tiny_heads(scaled: Recipe) -> int:
    """The key-value heads that the tiny model must have for the mesh; its own number is 1, with 2 query heads.

    The trainer's devices share the key-value heads, those of a sampler's replica the query heads.
    """
    trainer, sampler = scaled.hardware.trainer_tensor, scaled.sampler_tensor()
    if trainer == 1 and sampler <= 2:
        return 1
    return max(trainer, sampler)


def scaled_hardware(hardware: HardwareRecipe, processes: int = 1) -> HardwareRecipe:
    """The same mesh axes at size 2; axes of size 1 stay.

    Where trainer and sampler share their devices and need different numbers of them, both get the larger number, and
    the other side's outermost axis grows with it.  Each of several processes has a whole replica of the sampler.
    """
    trainer, sampler = hardware.trainer_count(), hardware.sampler_count()
    sampler_tensor = hardware.sampler_tensor or sampler
    fsdp = min(2, trainer // hardware.trainer_tensor)
    tensor = min(2, hardware.trainer_tensor)
    replicas = min(2, sampler // sampler_tensor)
    sampler_tensor = min(2, sampler_tensor)
    trainer, sampler = fsdp * tensor, replicas * sampler_tensor
    if hardware.colocated:
        together = max(trainer, sampler, processes * (sampler_tensor if hardware.sampler_tensor else 1))
        if fsdp < 2:
            tensor = together
        if replicas < 2:
            sampler_tensor = together
        trainer = sampler = together
    return HardwareRecipe(
        trainer_devices=None if hardware.colocated and trainer == 1 else trainer,
        trainer_tensor=tensor,
        sampler_devices=None if hardware.colocated else sampler,
        sampler_tensor=sampler_tensor if hardware.sampler_tensor else None,
        processes=processes if processes > 1 else None,
    )


def device_count(scaled: Recipe) -> int:
    """Virtual devices that a smoke test needs."""
    hardware = scaled.hardware
    return hardware.trainer_count() + (0 if hardware.colocated else hardware.sampler_count())


def changes(recipe: Recipe, scaled: Recipe) -> list[str]:
    """What was scaled down, as `section.key: before -> after`."""
    return [line.replace(" != ", " -> ", 1) for line in differences(recipe, scaled)]


def _scaled_problems(problems: ProblemsRecipe, gsm8k: str | None, placeholders: dict[str, Path]) -> dict[str, Any]:
    data = problems.model_dump(mode="json")
    for split, most in PROBLEMS.items():
        data[split] = min(most, getattr(problems, split) or most)
    if problems.source == "gsm8k":
        path = problems.path or gsm8k
        if path:
            data["path"] = path
        else:
            data |= {"source": "words", "path": None}
    for source, path in (("source", "path"), ("test_source", "test_path")):
        if not data[path] and (file := placeholders.get(data[source])):
            data[path] = str(file)
    return data


def notes(recipe: Recipe, scaled: Recipe) -> list[str]:
    """What a smoke test that passes does not cover, and where its models differ from what one expects."""
    missing = [*_engine_notes(recipe, scaled), *_problem_notes(recipe, scaled), *_model_notes(recipe, scaled)]
    return list(dict.fromkeys(missing))  # two sources may have the same note


def _engine_notes(recipe: Recipe, scaled: Recipe) -> Iterator[str]:
    if recipe.rollout.engine == "vllm" and scaled.rollout.engine != "vllm":
        yield (
            "THE vLLM ENGINE WAS NOT TESTED: Tunix's sampler was used instead. "
            "To test it: make setup-tpu; .venv-tpu/bin/grpo smoke-test RECIPE"
        )
    if recipe.loss.implementation == "pallas":
        yield (
            "loss.implementation=pallas: the kernel ran in interpret mode; make test-tpu compiles it with the TPU "
            "compiler"
        )


def _problem_notes(recipe: Recipe, scaled: Recipe) -> list[str]:
    pairs = list(zip(recipe.sources, scaled.sources, strict=True))
    missing = [
        f"problems.source={ours.source}: its files were not found (problems.path, or GSM8K_DIR); "
        "word problems were used instead"
        for ours, used in pairs
        if ours.source != used.source
    ]
    stand_ins = [
        f"problems.source={ours.source}: word problems in its columns were used instead"
        for ours, used in pairs
        if ours.source == used.source != "gsm8k" and ours.path != used.path
    ]
    return missing + stand_ins


def _model_notes(recipe: Recipe, scaled: Recipe) -> Iterator[str]:
    if random_model.family(recipe.model) is None:
        yield (
            f"no random model of {recipe.model.maxtext_name} can be made: its weight names and layers are not tested"
        )
    if (heads := tiny_heads(scaled)) > 1:
        yield (
            f"the tiny model has its key-value head {heads} times, so that as many devices can share it; it "
            "computes the same"
        )
    processes = recipe.hardware.process_count()
    if processes > 1 and scaled.hardware.process_count() == 1:
        yield f"the recipe is for {processes} processes; one was tested"


def choose_engine(recipe: Recipe, engine: str = "auto") -> str:
    """The engine to use: the recipe's where it can run here.

    Raises CourseError when vLLM is requested and not installed.
    """
    if engine == "auto":
        return "vllm" if recipe.rollout.engine == "vllm" and vllm_can_run() else "tunix"
    if engine == "vllm" and not vllm_can_run():
        raise CourseError("--engine vllm: vllm is not installed here; use make setup-tpu, then .venv-tpu/bin/grpo")
    return engine


def vllm_can_run() -> bool:
    """Whether vLLM is installed; `vllm_on_cpu` makes vLLM-TPU run on a CPU."""
    return importlib.util.find_spec("vllm") is not None


def gsm8k_folder(recipe: Recipe) -> str | None:
    """Where GSM8K's files are: problems.path, else the folder in GSM8K_DIR if it holds them."""
    paths = [source.path for source in recipe.sources if source.source == "gsm8k"]
    if paths and paths[0]:
        return paths[0]
    folder = os.environ.get("GSM8K_DIR")
    if folder and (Path(folder) / "train.jsonl").is_file() and (Path(folder) / "test.jsonl").is_file():
        return str(Path(folder).resolve())
    return None


def placeholders(recipe: Recipe) -> dict[str, Path] | None:
    """Files for a recipe whose problems are on the hub, written by us; None for another recipe."""
    if not any(source.test_source or source.source in competition.KINDS for source in recipe.sources):
        return None
    return write_placeholders(environment.cache_dir() / "placeholders")


def run(
    recipe: Recipe,
    scaled: Recipe,
    directory: str | Path,
    *,
    overwrite: bool = False,
    base: str | Path | None = None,
    log: Callable[[str], None] = print,
) -> SmokeTest:
    """Test the random model, then train the tiny one by the scaled recipe, and report the outcome.

    Args:
      directory: the run directory of the tiny model; the other's is NAME-random, its model NAME-model, and the tiny
        model with more heads NAME-tiny.  All output is in NAME.log; `log` gets the lines that are our own.
      base: the tiny model as a MaxText checkpoint in the recipe's dtype, from an earlier smoke test; None converts it.

    Raises CourseError when the directory is in use and `overwrite` is not set, or where tensor parallelism does not
    fit the recipe's own model, or `base`.
    """
    heads = tiny_heads(scaled)
    if random_model.family(recipe.model):
        published = random_model.published_config(recipe.model)
        model_files.require_heads(published["num_key_value_heads"], recipe.hardware.trainer_tensor)
    if base and heads > 1:
        raise CourseError(f"--base has the tiny model, and here it needs {heads} key-value heads; leave out --base")
    directory = Path(directory).resolve()
    random_run = directory.with_name(f"{directory.name}-random")
    if directory.exists() and any(directory.iterdir()) and not overwrite:
        raise CourseError(f"run {directory} exists; add --overwrite to replace it, or --run NAME for another name")
    shutil.rmtree(random_run, ignore_errors=True)  # no run that somebody wants to keep
    log_file = directory.with_name(f"{directory.name}.log")
    log_file.parent.mkdir(parents=True, exist_ok=True)
    log_file.unlink(missing_ok=True)
    started = time.monotonic()
    exit_code = 0
    if architecture := random_model.family(recipe.model):
        log(f"a random model, architecture {architecture}:")
        random = random_recipe(recipe, scaled, directory.with_name(f"{directory.name}-model"))
        tensor = scaled.hardware.trainer_tensor
        random_model.write_random_model(recipe.model, random.model.path, recipe.seed, tensor=tensor)
        exit_code = _run_logged(random, random_run, [], log_file, log)
    if not exit_code:
        log(f"the tiny trained model, {scaled.training.steps} steps:")
        tiny = tiny_recipe(scaled, directory.with_name(f"{directory.name}-tiny"))
        if heads > 1:
            random_model.write_tiny_model(tiny.model.path, heads)
        more = ["--overwrite"] if overwrite else []
        if base:
            more += ["--base", str(base)]
        exit_code = _run_logged(tiny, directory, more, log_file, log)
    result = SmokeTest(
        recipe=recipe.name,
        engine=scaled.rollout.engine,
        devices=device_count(scaled),
        passed=False,
        exit_code=exit_code,
        seconds=time.monotonic() - started,
        log_file=str(log_file),
        run=str(directory),
        processes=scaled.hardware.process_count(),
        changes=changes(recipe, scaled),
        notes=notes(recipe, scaled),
    )
    # Exit code 0 alone is not enough: a run that passed has written these.
    written = ("summary.json", "sync.json", "report.html")
    if exit_code or not all((directory / name).is_file() for name in written):
        result.error = last_error(log_file)
        return result
    result.passed = True
    result.architecture = architecture
    result.report = str(directory / "report.html")
    check = json.loads((directory / "sync.json").read_text(encoding="utf-8"))
    result.weights = check["weights"]
    result.mean_gap = check["mean_gap"]
    run = random_run if (random_run / "metrics.jsonl").is_file() else directory
    rows = read_jsonl(run / "metrics.jsonl")
    result.update_applied = min(row.get("update_applied", 1.0) for row in rows)  # float32 weights take all of it
    return result


def verdict(result: SmokeTest) -> str:
    """The outcome in one line; a failure in two."""
    start = f"smoke test of {result.recipe}:"
    if not result.passed:
        failure = f"{start} FAILED (exit code {result.exit_code}); its output is in {result.log_file}"
        return f"{result.error}\n{failure}" if result.error else failure
    tested = f"engine {result.engine}"
    if result.architecture:
        tested += f", architecture {result.architecture}"
    return (
        f"{start} passed ({result.seconds:.0f} s, {tested}): {result.weights} weights arrived, "
        f"gap {result.mean_gap:.1e} nats, update_applied {result.update_applied:.3f}, report {result.report}"
    )


def _run_logged(recipe: Recipe, directory: Path, more: list[str], log_file: Path, log: Callable[[str], None]) -> int:
    """Train by a recipe, in as many processes as it has; returns the first exit code that is not 0.

    All output goes to the log file, and what the first process says, its stdout, to `log`, too.  Ctrl-C reaches all
    processes, SIGTERM is passed on.  A process ended by a signal returns 128 + the signal's number, as in a shell.
    """
    file = environment.cache_dir() / "smoke-tests" / f"{directory.name}.yaml"
    write_text_atomic(file, dump_recipe(recipe))
    count = recipe.hardware.process_count()
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={device_count(recipe) // count}"
    with socket.create_server(("127.0.0.1", 0)) as server:  # a free port
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
    processes = []
    for number in range(count):
        arguments = [*command_line(recipe, file, directory), *more]
        if count > 1:
            arguments += ["--coordinator", coordinator, "--processes", str(count), "--process", str(number)]
        with open(log_file, "a", encoding="utf-8") as output:
            process = subprocess.Popen(
                arguments,
                env=os.environ | VARIABLES | {"XLA_FLAGS": flags},
                stdin=subprocess.DEVNULL,
                stdout=output if number else subprocess.PIPE,
                stderr=output,
                text=True,
                errors="replace",
            )
        processes.append(process)

    def terminate_all(*_: Any) -> None:
        for process in processes:
            process.terminate()

    before = signal.signal(signal.SIGTERM, terminate_all)
    with open(log_file, "a", encoding="utf-8", buffering=1) as output:
        for line in processes[0].stdout:
            output.write(line)
            log(line.rstrip("\n"))
    codes = [process.wait() for process in processes]
    signal.signal(signal.SIGTERM, before)
    failures = [code for code in codes if code]
    if not failures:
        return 0
    return failures[0] if failures[0] > 0 else 128 - failures[0]


def last_error(log_file: Path) -> str | None:
    lines = log_file.read_text(encoding="utf-8", errors="replace").splitlines()
    for sign in ERRORS:
        matching = [line for line in lines if sign.match(line)]
        if matching:
            return matching[-1]
    return None


def command_line(recipe: Recipe, file: Path, directory: Path, on_cpu: bool = True) -> list[str]:
    starter = ["-m", "grpo_train.tpu.vllm_on_cpu"] if on_cpu and recipe.rollout.engine == "vllm" else []
    train = [sys.executable, *starter, "-m", "grpo_train.cli", "train", str(file)]
    return [*train, "--runs", str(directory.parent), "--run", directory.name]
