"""A recipe before its accelerator is rented: the tiny model, two steps, virtual CPU devices, the same way through.

    rehearsal = rehearsal_recipe(load_recipe("recipes/llama3.1-8b-gsm8k.yaml"), engine="vllm")
    changes(recipe, rehearsal)                 # what was scaled: "training.steps: 3738 -> 2", ...
    rehearse(recipe, rehearsal, "runs/rehearsal-llama3.1-8b-gsm8k")

A rehearsal runs in a process of its own, because the number of virtual devices must be known before JAX is imported,
and because a TPU on this machine is left alone.  What it cannot cover: the tiny model is a Qwen3, so weight names and
layers of other architectures stay unrehearsed; so do speed, memory and several hosts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from grpo_lib import environment
from grpo_lib.errors import CourseError
from grpo_lib.files import write_text_atomic
from grpo_lib.recipes import HardwareRecipe, Recipe, dump_recipe, parse_recipe

STEPS = 2
LARGEST_GROUP = 4  # more completions of a prompt add time, and no path through the code
COMPLETION = 24  # tokens: a whole solution of the tiny model, as in recipes/tiny-cpu.yaml
PROMPT = 256  # tokens: a word problem with the system prompt takes up to 200 of the tiny tokenizer's
TINY_MODEL = {"path": "assets/tiny-base", "maxtext_name": "qwen3-0.6b", "sizes": {}}
# GSM8K's first 256 training problems hold some 30 that the tiny tokenizer writes in PROMPT tokens; the test problems
# are never left out, and the longest of the first 16 is within the 512 tokens that the tiny model reads.
PROBLEMS = {"train": 256, "validation": 64, "test": 16}
# A page of the KV cache, sequences at once, and pages for all of them at full length (512 tokens).
VLLM = {"block_size": 16, "max_sequences": 16, "kv_blocks": 512}

ARCHITECTURE_NOTE = (
    "the tiny model is a Qwen3: the weight names and layers of other architectures (Llama, Qwen2.5) are not rehearsed"
)


@dataclass
class Rehearsal:
    """How a rehearsal went.  Gaps are between sampler and trainer, in nats per token."""

    recipe: str
    engine: str
    devices: int
    green: bool
    exit_code: int
    seconds: float
    log: str
    run: str
    report: str | None = None
    weights: int | None = None
    mean_gap: float | None = None
    changes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def rehearsal_recipe(
    recipe: Recipe, *, steps: int = STEPS, engine: str | None = None, gsm8k: str | None = None, wandb: bool = False
) -> Recipe:
    """The recipe with everything scaled down that costs time, and nothing that decides which code runs.

    Args:
      engine: rollout.engine of the rehearsal; None keeps the recipe's.
      gsm8k: folder with GSM8K's jsonl files, for recipes that train on it; None takes the word problems instead.
      wandb: whether Weights & Biases is installed, so that a recipe that tracks can do so offline.
    """
    data = recipe.model_dump(mode="json")
    data["name"] = f"rehearsal-{recipe.name}"
    data["model"] |= TINY_MODEL
    hardware = scaled_hardware(recipe.hardware)
    data["hardware"] = hardware.model_dump(mode="json")
    data["problems"] |= {split: min(n, getattr(recipe.problems, split) or n) for split, n in PROBLEMS.items()}
    if recipe.problems.source == "gsm8k":
        data["problems"] |= {"path": gsm8k} if gsm8k else {"source": "words", "path": None}

    rollout, real = data["rollout"], data["problems"]["source"] != "words"
    rollout["engine"] = engine or recipe.rollout.engine
    rollout["max_completion_length"] = min(COMPLETION, recipe.rollout.max_completion_length)
    if real or recipe.rollout.max_prompt_length != "auto":
        rollout["max_prompt_length"] = PROMPT
    if real:  # the tiny tokenizer needs about three times the tokens of a real one
        rollout["overlong_prompts"] = "skip"
    if rollout["engine"] == "vllm":
        rollout["vllm"] |= VLLM | {"max_sequences": min(VLLM["max_sequences"], recipe.rollout.vllm.max_sequences)}

    data["grpo"]["group_size"] = min(LARGEST_GROUP, recipe.grpo.group_size)
    sizes, passes = _scaled_batch(recipe, hardware, data["grpo"]["group_size"])
    rollout |= passes
    data["training"] |= sizes | {
        "steps": steps,
        "warmup_steps": min(1 if steps > 1 else 0, recipe.training.warmup_steps),
        "checkpoint_every": 1,
        "validate_every": steps if recipe.training.validate_every else 0,
    }
    evaluation = data["evaluation"]
    evaluation["batch_size"] = min(PROBLEMS["test"], recipe.evaluation.batch_size)
    if evaluation["max_completion_length"]:
        evaluation["max_completion_length"] = min(COMPLETION, evaluation["max_completion_length"])
    if recipe.tracking.wandb == "online":
        data["tracking"]["wandb"] = "offline" if wandb else "off"
    return parse_recipe(data, origin=f"rehearsal of {recipe.name}")


def scaled_hardware(hardware: HardwareRecipe) -> HardwareRecipe:
    """The same mesh axes at size 2: each axis of size 1 stays, and no axis is added.

    Where trainer and sampler share their devices and need different numbers of them, the larger number holds for both
    and the other side's outermost axis grows with it.
    """
    trainer, sampler = hardware.trainer_count(), hardware.sampler_count()
    fsdp, tensor = trainer // hardware.trainer_tensor, hardware.trainer_tensor
    sampler_tensor = hardware.sampler_tensor or sampler
    replicas = sampler // sampler_tensor
    fsdp, tensor, replicas, sampler_tensor = (min(2, axis) for axis in (fsdp, tensor, replicas, sampler_tensor))
    trainer, sampler = fsdp * tensor, replicas * sampler_tensor
    if hardware.colocated:
        together = max(trainer, sampler)
        tensor = tensor if fsdp > 1 else together
        sampler_tensor = sampler_tensor if replicas > 1 else together
        trainer = sampler = together
    return HardwareRecipe(
        trainer_devices=None if hardware.colocated and trainer == 1 else trainer,
        trainer_tensor=tensor,
        sampler_devices=None if hardware.colocated else sampler,
        sampler_tensor=sampler_tensor if hardware.sampler_tensor else None,
    )


def device_count(rehearsal: Recipe) -> int:
    """Virtual devices that a rehearsal needs."""
    hardware = rehearsal.hardware
    return hardware.trainer_count() + (0 if hardware.colocated else hardware.sampler_count())


def changes(recipe: BaseModel, rehearsal: BaseModel, section: str = "") -> list[str]:
    """What differs, as `section.key: recipe's -> rehearsal's`."""
    found = []
    for key in type(recipe).model_fields:
        ours, theirs = getattr(recipe, key), getattr(rehearsal, key)
        if isinstance(ours, BaseModel):
            found += changes(ours, theirs, f"{section}{key}.")
        elif ours != theirs:
            found.append(f"{section}{key}: {_shown(ours)} -> {_shown(theirs)}")
    return found


def notes(recipe: Recipe, rehearsal: Recipe) -> list[str]:
    """What the reader of a green rehearsal must not conclude from it."""
    found = []
    if recipe.rollout.engine == "vllm" and rehearsal.rollout.engine != "vllm":
        found.append(
            "THE vLLM ENGINE WAS NOT REHEARSED: Tunix's sampler stood in for it. "
            "To rehearse it: make setup-tpu; .venv-tpu/bin/grpo rehearse RECIPE"
        )
    if recipe.loss.implementation == "pallas":
        found.append(
            "loss.implementation=pallas: the kernel was interpreted here, operation by operation; whether the TPU "
            "compiler takes it is seen by make test-tpu"
        )
    if recipe.problems.source != rehearsal.problems.source:
        found.append(
            f"problems.source={recipe.problems.source}: its files are not at hand (problems.path, or GSM8K_DIR), so "
            "word problems stood in for them"
        )
    if not recipe.model.maxtext_name.startswith("qwen3"):
        found.append(ARCHITECTURE_NOTE)
    return found


def choose_engine(recipe: Recipe, wanted: str = "auto") -> str:
    """The engine to rehearse with: the recipe's where it can run here.

    Raises CourseError when vLLM was asked for and is not installed.
    """
    if wanted not in ("auto", "tunix", "vllm"):
        raise CourseError(f"--engine {wanted}: choose auto, tunix or vllm")
    if wanted == "vllm" and not vllm_can_run():
        raise CourseError("--engine vllm: vllm is not installed here; use make setup-tpu, then .venv-tpu/bin/grpo")
    if wanted != "auto":
        return wanted
    return recipe.rollout.engine if recipe.rollout.engine != "vllm" or vllm_can_run() else "tunix"


def vllm_can_run() -> bool:
    """Whether vLLM is installed, and with it what lets vLLM-TPU run on a CPU (in the repository's tests)."""
    return importlib.util.find_spec("vllm") is not None and _vllm_on_cpu().is_file()


def wandb_can_run() -> bool:
    """Whether Weights & Biases is installed."""
    return importlib.util.find_spec("wandb") is not None


def gsm8k_folder(recipe: Recipe) -> str | None:
    """Where GSM8K's files are: problems.path, else the folder in GSM8K_DIR if it holds them."""
    folder = os.environ.get("GSM8K_DIR")
    here = folder and (Path(folder) / "train.jsonl").is_file() and (Path(folder) / "test.jsonl").is_file()
    return recipe.problems.path or (str(Path(folder).resolve()) if here else None)


def rehearse(
    recipe: Recipe,
    rehearsal: Recipe,
    directory: str | Path,
    *,
    overwrite: bool = False,
    notebooks: bool = False,
    base: str | Path | None = None,
    say: Callable[[str], None] = print,
) -> Rehearsal:
    """Run a rehearsal in a process of its own, and report what came of it.

    Args:
      directory: the run's folder.  The log is kept beside it, as NAME.log.
      notebooks: run the course's notebooks instead of `grpo train`; they write to the repository's `runs/`.
      base: the tiny model as a MaxText checkpoint in the recipe's dtype, from an earlier rehearsal; None converts it.
      say: receives every line of the rehearsal's output.

    Raises:
      CourseError: the folder is in use and `overwrite` is not set, or notebooks were asked for another folder.
    """
    directory = Path(directory).resolve()
    if directory.exists() and any(directory.iterdir()) and not overwrite:
        raise CourseError(f"run {directory} exists; add --overwrite to replace it, or --run NAME for another name")
    if notebooks and directory.parent != environment.repo_root() / "runs":
        raise CourseError("--notebooks write to the repository's own runs/; leave out --runs")
    if notebooks and base:
        raise CourseError("--notebooks convert the model themselves; leave out --base")
    file = environment.repo_root() / ".cache" / "rehearsals" / f"{directory.name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(file, dump_recipe(rehearsal))
    log = directory.with_name(f"{directory.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)

    result = Rehearsal(
        recipe=recipe.name, engine=rehearsal.rollout.engine, devices=device_count(rehearsal), green=False,
        exit_code=1, seconds=0.0, log=str(log), run=str(directory),
        changes=changes(recipe, rehearsal), notes=notes(recipe, rehearsal),
    )  # fmt: skip
    command = _notebook_command(rehearsal, file, directory) if notebooks else _command(rehearsal, file, directory)
    if not notebooks:
        command += ["--overwrite"] * overwrite + (["--base", str(base)] if base else [])
    started = time.monotonic()
    result.exit_code = run_logged(command, _variables(result.devices), log, say)
    result.seconds = time.monotonic() - started
    if result.exit_code == 0:
        _read_outcome(result, directory)
    return result


def verdict(result: Rehearsal) -> str:
    """One line: green with what was seen, or how it ended and where to read on."""
    if not result.green:
        return f"rehearsal of {result.recipe}: FAILED (exit code {result.exit_code}); its output is in {result.log}"
    gap = f"gap {result.mean_gap:.1e} nats" if result.mean_gap is not None else "gap unknown"
    return (
        f"rehearsal of {result.recipe}: green ({result.seconds:.0f} s, engine {result.engine}): "
        f"{result.weights} weights arrived, {gap}, report {result.report}"
    )


def run_logged(command: list[str], variables: dict[str, str], log: Path, say: Callable[[str], None]) -> int:
    """Run a command, hand each line of its output to `say` and to the log; returns its exit code.

    The command has a session of its own, so that Ctrl-C reaches it once and not twice: from here.  Whatever ends this
    process ends the command too.  A command that a signal ended gives 128 and the signal's number, as in a shell.
    """
    with (
        open(log, "w", encoding="utf-8") as file,
        subprocess.Popen(
            command, env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        ) as process,
        _signals_passed_on(process),
    ):  # fmt: skip
        for line in process.stdout:
            file.write(line)
            file.flush()
            say(line.rstrip("\n"))
        code = process.wait()
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _signals_passed_on(process: subprocess.Popen) -> Iterator[None]:
    """Send SIGINT, SIGTERM and SIGHUP to a process instead of obeying them; it decides how to end."""
    passed_on = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda n, _: process.send_signal(n)) for number in passed_on}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if process.poll() is None:
            process.kill()


def _variables(devices: int) -> dict[str, str]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags.strip(),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "WANDB_MODE": "offline",
    }


def _vllm_on_cpu() -> Path:
    return environment.repo_root() / "tests" / "tpu" / "vllm_on_cpu.py"


def _command(rehearsal: Recipe, file: Path, directory: Path) -> list[str]:
    starter = [str(_vllm_on_cpu())] if rehearsal.rollout.engine == "vllm" else []
    options = ["train", str(file), "--run", directory.name, "--runs", str(directory.parent)]
    return [sys.executable, *starter, "-m", "grpo_lib.cli", *options]


def _notebook_command(rehearsal: Recipe, file: Path, directory: Path) -> list[str]:
    command = [sys.executable, "-m", "grpo_lib.course", "--recipe", str(file), "--run", directory.name]
    if rehearsal.rollout.engine == "vllm":  # in every kernel, before anything imports vLLM
        folder = str(_vllm_on_cpu().parent)
        command += ["--kernel-start", f"import sys; sys.path.append({folder!r}); import vllm_on_cpu as v; v.install()"]
    return command


def _read_outcome(result: Rehearsal, directory: Path) -> None:
    """Green is a run that left what a run leaves; an exit code of 0 alone is not."""
    summary, sync, report = (directory / name for name in ("summary.json", "sync.json", "report.html"))
    result.green = summary.is_file() and report.is_file()
    result.report = str(report) if report.is_file() else None
    if sync.is_file():
        check = json.loads(sync.read_text(encoding="utf-8"))
        result.weights, result.mean_gap = check["weights"], check["mean_gap"]


def _scaled_batch(recipe: Recipe, hardware: HardwareRecipe, group_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(training's sizes, rollout's), said for all processes together.

    As few prompts as fill the devices, in two gradients where the recipe has several, and in several passes likewise.
    """
    plan, fsdp = recipe.plan, hardware.trainer_count() // hardware.trainer_tensor
    unit = fsdp // math.gcd(fsdp, group_size)  # prompts whose completions spread evenly over the devices
    prompts = 2 * unit if plan.accumulation_steps > 1 else unit * math.ceil(min(2, plan.prompts_per_step) / unit)
    said = any(key.startswith("training.micro_batch") for key in recipe.batch_given)
    micro_batch = prompts * group_size // min(2, plan.accumulation_steps)
    pass_prompts = prompts // 2 if prompts % 2 == 0 else 1
    return {
        "prompts_per_step": prompts,
        "prompts_per_process": None,
        "prompts_per_device": None,
        "micro_batch_size": micro_batch if said else None,
        "micro_batch_per_device": None,
    }, {
        "prompts_per_pass": pass_prompts if plan.passes > 1 else None,
        "prompts_per_device": None,
    }


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return repr(value) if len(value) < 40 else f"{value[:36]!r}..."
    return "null" if value is None else str(value)
