"""rehearsal: what is scaled and what is kept, how a process is started and ended.  No JAX and no training needed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grpo_lib import cli, rehearsal, runs
from grpo_lib.errors import CourseError
from grpo_lib.recipes import HardwareRecipe, load_recipe, profiles_of

ROOT = Path(__file__).resolve().parents[1]


def every_recipe() -> list[str]:
    """All recipes and all profiles, by listing, so that a new one cannot be forgotten."""
    files = sorted((ROOT / "recipes").glob("*.yaml"))
    return [str(file) for file in files] + [f"{file}@{name}" for file in files for name in profiles_of(file)]


each_recipe = pytest.mark.parametrize("path", every_recipe(), ids=lambda path: Path(path).name)


def smoke(*overrides: str):
    return load_recipe(ROOT / "recipes" / "qwen3-1.7b-gsm8k-smoke.yaml", overrides)


@each_recipe
def test_what_decides_the_code_that_runs_is_kept(path):
    recipe = load_recipe(path)
    scaled = rehearsal.rehearsal_recipe(recipe, gsm8k="/gsm8k", wandb=True)
    for section, keys in {
        "grpo": ("beta", "epsilon", "iterations"),
        "rollout": ("engine", "temperature", "top_p", "top_k"),
        "training": ("schedule", "clip", "learning_rate", "b1", "b2", "weight_decay", "keep"),
        "model": ("dtype", "remat"),
        "problems": ("source", "seed"),
    }.items():
        for key in keys:
            assert getattr(getattr(scaled, section), key) == getattr(getattr(recipe, section), key), (section, key)
    assert scaled.rewards == recipe.rewards and scaled.prompts == recipe.prompts and scaled.seed == recipe.seed
    assert scaled.hardware.colocated == recipe.hardware.colocated


@each_recipe
def test_every_axis_and_the_accumulation_stay_above_one_or_at_one(path):
    recipe = load_recipe(path)
    scaled = rehearsal.rehearsal_recipe(recipe)

    def shape(r):
        hardware = r.hardware
        sampler = hardware.sampler_count()
        tensor = hardware.sampler_tensor or sampler
        return {
            "fsdp": hardware.trainer_count() // hardware.trainer_tensor,
            "tensor": hardware.trainer_tensor,
            "sampler tensor": tensor,
            "sampler replicas": sampler // tensor,
            "gradients per step": r.plan.accumulation_steps,
            "passes": r.plan.passes,
        }

    before, after = shape(recipe), shape(scaled)
    assert {name: size > 1 for name, size in before.items()} == {name: size > 1 for name, size in after.items()}
    assert max(after.values()) <= 4 and rehearsal.device_count(scaled) <= 8
    assert scaled.micro_batch_completions % after["fsdp"] == 0


def test_axes_become_two_and_those_that_share_devices_grow_together():
    def scaled(**hardware):
        small = rehearsal.scaled_hardware(HardwareRecipe(accelerator="v6e-64", **hardware))
        return small.trainer_count(), small.trainer_tensor, small.sampler_count(), small.sampler_tensor

    assert scaled(sampler_tensor=64) == (2, 1, 2, 2)  # fsdp 64, tensor 64
    assert scaled(sampler_tensor=8) == (4, 1, 4, 2)  # fsdp 64; tensor 8 x 8 replicas, so the trainer takes 4 as well
    assert scaled(trainer_tensor=8, sampler_tensor=64) == (4, 2, 4, 4)  # no replicas: the tensor axis grows
    assert scaled(trainer_devices=32, sampler_devices=32, sampler_tensor=8) == (2, 1, 4, 2)
    assert scaled(trainer_devices=1, sampler_devices=1) == (1, 1, 1, None)
    assert rehearsal.scaled_hardware(HardwareRecipe()) == HardwareRecipe()


def test_a_micro_batch_fills_its_devices():
    recipe = smoke("hardware.sampler_tensor=2", "grpo.group_size=3", "training.micro_batch_size=24")
    scaled = rehearsal.rehearsal_recipe(recipe)
    assert scaled.hardware.trainer_count() == 4
    assert (scaled.prompts_per_step, scaled.training.micro_batch_size, scaled.grpo.group_size) == (4, 12, 3)
    several = rehearsal.rehearsal_recipe(smoke("training.micro_batch_size=8"))
    assert (several.prompts_per_step, several.training.micro_batch_size, several.grpo.group_size) == (2, 4, 4)


def test_passes_stay_several_and_sizes_by_the_device_are_said_for_all():
    changes = ["training.prompts_per_step=null", "training.prompts_per_device=2", "training.micro_batch_size=null"]
    recipe = smoke("rollout.prompts_per_device=4", "training.micro_batch_per_device=1", *changes)
    assert (recipe.plan.passes, recipe.plan.accumulation_steps) == (4, 16)
    scaled = rehearsal.rehearsal_recipe(recipe)
    assert (scaled.plan.passes, scaled.plan.accumulation_steps, scaled.prompts_per_step) == (2, 2, 2)
    assert not [key for key in scaled.batch_given if "per_device" in key]


def test_one_step_leaves_a_cosine_no_warm_up():
    recipe = smoke("training.schedule=cosine", "training.warmup_steps=5")
    assert rehearsal.rehearsal_recipe(recipe, steps=1).training.warmup_steps == 0
    assert rehearsal.rehearsal_recipe(recipe).training.warmup_steps == 1


def test_changes_are_named_with_both_values():
    recipe = smoke()
    listed = rehearsal.changes(recipe, rehearsal.rehearsal_recipe(recipe, gsm8k="/data"))
    assert "training.steps: 10 -> 2" in listed
    assert "hardware.accelerator: 'v6e-8' -> null" in listed
    assert "rollout.vllm.block_size: null -> 16" in listed
    assert not [line for line in listed if line.startswith(("rewards", "grpo.beta", "training.learning_rate"))]


def test_sizes_that_the_recipe_names_are_not_those_of_the_tiny_model():
    recipe = load_recipe(ROOT / "recipes" / "qwen2.5-3b-gsm8k-jax.yaml")
    scaled = rehearsal.rehearsal_recipe(recipe)
    assert scaled.model.sizes == {} and scaled.model.path == "assets/tiny-base"
    assert any(line.startswith("model.sizes: ") for line in rehearsal.changes(recipe, scaled))


def test_what_was_not_rehearsed_is_said():
    recipe = load_recipe(ROOT / "recipes" / "qwen2.5-3b-gsm8k-pallas.yaml")
    said = "\n".join(rehearsal.notes(recipe, rehearsal.rehearsal_recipe(recipe, engine="tunix")))
    assert "THE vLLM ENGINE WAS NOT REHEARSED" in said and ".venv-tpu/bin/grpo rehearse" in said
    assert "loss.implementation=pallas: the kernel was interpreted here" in said
    assert "word problems stood in" in said
    assert "(Llama, Qwen2.5) are not rehearsed" in said
    tiny = load_recipe(ROOT / "recipes" / "tiny-cpu.yaml")
    assert rehearsal.notes(tiny, rehearsal.rehearsal_recipe(tiny)) == []


def test_tracking_goes_offline_or_off():
    recipe = smoke("tracking.wandb=online")
    assert rehearsal.rehearsal_recipe(recipe, wandb=True).tracking.wandb == "offline"
    assert rehearsal.rehearsal_recipe(recipe, wandb=False).tracking.wandb == "off"


def test_gsm8k_is_taken_where_it_is(monkeypatch, tmp_path):
    monkeypatch.delenv("GSM8K_DIR", raising=False)
    assert rehearsal.gsm8k_folder(smoke()) is None
    assert rehearsal.gsm8k_folder(smoke("problems.path=/data")) == "/data"
    monkeypatch.setenv("GSM8K_DIR", str(tmp_path))
    assert rehearsal.gsm8k_folder(smoke()) is None  # an empty folder
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").touch()
    assert rehearsal.gsm8k_folder(smoke()) == str(tmp_path)


def test_engine_is_the_recipes_where_it_can_run(monkeypatch):
    tiny = load_recipe(ROOT / "recipes" / "tiny-cpu.yaml")
    for can, expected in ((True, "vllm"), (False, "tunix")):
        monkeypatch.setattr(rehearsal, "vllm_can_run", lambda can=can: can)
        assert rehearsal.choose_engine(smoke()) == expected
        assert rehearsal.choose_engine(smoke(), "tunix") == "tunix"
        assert rehearsal.choose_engine(tiny) == "tunix"
    with pytest.raises(CourseError, match="--engine vllm: vllm is not installed"):
        rehearsal.choose_engine(tiny, "vllm")
    with pytest.raises(CourseError, match="choose auto, tunix or vllm"):
        rehearsal.choose_engine(tiny, "sglang")


def outcome(tmp_path, monkeypatch, code: str, **options) -> tuple[rehearsal.Rehearsal, list[str]]:
    """Rehearse with `code` in place of the training."""
    monkeypatch.setattr(rehearsal, "_command", lambda recipe, file, directory: [sys.executable, "-c", code])
    lines: list[str] = []
    recipe = smoke()
    scaled = rehearsal.rehearsal_recipe(recipe)
    return rehearsal.rehearse(recipe, scaled, tmp_path / "runs" / "trial", say=lines.append, **options), lines


def test_output_is_shown_and_kept_and_a_failure_is_one(tmp_path, monkeypatch):
    result, lines = outcome(tmp_path, monkeypatch, "import sys; print('out'); sys.exit('went wrong')")
    assert not result.green and result.exit_code == 1
    assert "out" in lines and "went wrong" in lines
    assert sorted(Path(result.log).read_text().split("\n")) == sorted([*lines, ""])
    assert "FAILED (exit code 1)" in rehearsal.verdict(result)


def test_green_needs_a_summary_and_a_report(tmp_path, monkeypatch):
    result, _ = outcome(tmp_path, monkeypatch, "pass")
    assert result.exit_code == 0 and not result.green
    run = tmp_path / "runs" / "trial"
    run.mkdir()
    (run / "report.html").touch()
    (run / "summary.json").write_text("{}")
    (run / "sync.json").write_text(json.dumps({"weights": 13, "mean_gap": 0.002}))
    with pytest.raises(CourseError, match="--overwrite"):
        outcome(tmp_path, monkeypatch, "pass")
    result, _ = outcome(tmp_path, monkeypatch, "pass", overwrite=True)
    assert result.green and "13 weights arrived, gap 2.0e-03 nats" in rehearsal.verdict(result)


def test_the_process_sees_virtual_devices_and_no_accelerator(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    code = "import os; print(os.environ['JAX_PLATFORMS'], os.environ['XLA_FLAGS'].split()[-1])"
    _, lines = outcome(tmp_path, monkeypatch, code)
    assert lines == ["cpu --xla_force_host_platform_device_count=2"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_rehearsal_and_its_code_comes_back(tmp_path, number):
    child = "import sys, time\ntry: print('ready', flush=True); time.sleep(60)\nexcept KeyboardInterrupt: sys.exit(130)"
    code = (
        "import signal, sys; from pathlib import Path; from grpo_lib import rehearsal as r\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.exit(r.run_logged([sys.executable, '-c', {child!r}], {{}}, Path({str(tmp_path / 'log')!r}), print))"
    )
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout.readline() == "ready\n"
        started = time.monotonic()
        parent.send_signal(number)
        assert parent.wait(timeout=20) == (130 if number == signal.SIGINT else 128 + signal.SIGTERM)
        assert time.monotonic() - started < 20


def test_notebooks_write_to_the_repositorys_runs_alone(tmp_path):
    recipe = smoke()
    with pytest.raises(CourseError, match="leave out --runs"):
        rehearsal.rehearse(recipe, rehearsal.rehearsal_recipe(recipe), tmp_path / "trial", notebooks=True)


def invoke(*arguments: str):
    return CliRunner().invoke(cli.app, ["rehearse", *arguments])


def test_the_command_lists_what_it_scales_and_hands_on_the_exit_code(tmp_path, monkeypatch):
    monkeypatch.setattr(rehearsal, "vllm_can_run", lambda: False)
    monkeypatch.setattr(rehearsal, "_command", lambda *_: [sys.executable, "-c", "print('at work'); exit(3)"])
    path = str(ROOT / "recipes" / "qwen2.5-3b-gsm8k-pallas.yaml")
    done = invoke(path, "--runs", str(tmp_path))
    assert done.exit_code == 3
    for expected in (
        "training.steps: 100 -> 2", "THE vLLM ENGINE WAS NOT REHEARSED", "the kernel was interpreted", "at work",
        "rehearsal of qwen2.5-3b-gsm8k-pallas: FAILED (exit code 3)",
    ):  # fmt: skip
        assert expected in done.output
    as_json = invoke(path, "--runs", str(tmp_path), "--json", "--steps", "3")
    result = json.loads(as_json.stdout.splitlines()[-1])
    assert as_json.exit_code == 3 and not result["green"] and "training.steps: 100 -> 3" in result["changes"]


def test_the_command_never_replaces_a_run_unasked(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.yaml").touch()
    done = invoke(str(ROOT / "recipes" / "tiny-cpu.yaml"), "--runs", str(tmp_path), "--run", "mine")
    assert isinstance(done.exception, CourseError) and "--overwrite" in str(done.exception)
    assert (tmp_path / "mine" / "recipe.yaml").exists()


def test_a_base_that_was_converted_before_is_linked_and_another_folder_refused(tmp_path):
    base = tmp_path / "base"
    with pytest.raises(CourseError, match=r"--base .* is no MaxText checkpoint .*grpo convert"):
        runs.link_base(tmp_path / "run", base)
    (base / "0" / "items").mkdir(parents=True)
    runs.link_base(tmp_path / "run", base)
    runs.link_base(tmp_path / "run", tmp_path / "another")  # what the run has is kept
    assert (tmp_path / "run" / "checkpoints" / "base").resolve() == base
