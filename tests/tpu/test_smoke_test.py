"""Smoke tests: what is scaled and what is kept, how the process is started.  Without JAX or training."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grpo_lib.common.errors import CourseError
from grpo_lib.problems import load_problems
from grpo_tpu import cli, smoke_test
from grpo_train.recipes import HardwareRecipe, load_recipe, profiles_of

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
PROFILES = [f"{file}{profile}" for file in RECIPES for profile in ("", *(f"@{name}" for name in profiles_of(file)))]
each_recipe = pytest.mark.parametrize("path", PROFILES, ids=lambda path: Path(path).name)


def smoke(*overrides: str):
    return load_recipe(ROOT / "recipes" / "qwen3-1.7b-gsm8k-smoke.yaml", overrides)


@each_recipe
def test_what_decides_the_code_that_runs_is_kept(path):
    recipe = load_recipe(path)
    scaled = smoke_test.scaled_recipe(recipe, gsm8k="/gsm8k", wandb=True)
    for section, keys in {
        "grpo": ("beta", "kl", "advantage", "aggregation", "epsilon", "epsilon_high", "ratio", "iterations"),
        "rollout": ("engine", "temperature"),
        "training": ("schedule", "max_grad_norm", "learning_rate", "b1", "b2", "weight_decay", "max_to_keep"),
        "model": ("dtype", "remat"),
    }.items():
        for key in keys:
            assert getattr(getattr(scaled, section), key) == getattr(getattr(recipe, section), key), (section, key)
    for small, full in zip(scaled.sources, recipe.sources, strict=True):
        assert (small.source, small.difficulty, small.seed) == (full.source, full.difficulty, full.seed)
    assert scaled.rewards == recipe.rewards and scaled.prompts == recipe.prompts and scaled.seed == recipe.seed
    assert scaled.hardware.colocated == recipe.hardware.colocated


def test_problems_of_the_hub_have_stand_ins_in_their_columns(monkeypatch, tmp_path):
    monkeypatch.setattr(smoke_test.environment, "repo_root", lambda: tmp_path)
    recipe = load_recipe(ROOT / "recipes" / "qwen2.5-32b-dapo-math.yaml")
    scaled = smoke_test.scaled_recipe(recipe, placeholders=smoke_test.placeholders(recipe))
    assert (scaled.problems.source, scaled.problems.test_source) == ("dapo-math", "aime")
    train, held_out, test = (load_problems(scaled.problems, split) for split in ("train", "validation", "test"))
    assert len(train) == 256 and held_out and len(test) == 16
    assert {problem.kind for problem in [*train, *held_out, *test]} == {"integer"}
    assert any("used instead" in note for note in smoke_test.notes(recipe, scaled))
    own = load_recipe(ROOT / "recipes" / "qwen2.5-32b-dapo-math.yaml", ["problems.path=/data"])
    assert smoke_test.scaled_recipe(own, placeholders=smoke_test.placeholders(own)).problems.path == "/data"
    assert smoke_test.placeholders(smoke()) is None


def test_each_of_several_tasks_is_scaled_and_has_its_placeholders(monkeypatch, tmp_path):
    monkeypatch.setattr(smoke_test.environment, "repo_root", lambda: tmp_path)
    dapo = "{source: dapo-math, test_source: aime, weight: 3, prompts: {user: dapo}}"
    recipe = smoke(f"problems=[{{source: words, test: 5}}, {dapo}]", "rewards=[correct_answer]")
    scaled = smoke_test.scaled_recipe(recipe, placeholders=smoke_test.placeholders(recipe))
    assert [(task.name, task.weight, task.prompts) for task in scaled.tasks] == [
        (task.name, task.weight, task.prompts) for task in recipe.tasks
    ]
    test = load_problems(scaled.problems, "test")
    assert [problem.task for problem in test] == ["words"] * 5 + ["dapo-math"] * 16
    assert any("dapo-math: word problems in its columns" in note for note in smoke_test.notes(recipe, scaled))


@each_recipe
def test_every_axis_and_the_accumulation_stay_above_one_or_at_one(path):
    recipe = load_recipe(path)
    scaled = smoke_test.scaled_recipe(recipe)

    def shape(r):
        hardware = r.hardware
        sampler = hardware.sampler_count()
        tensor = hardware.sampler_tensor or sampler
        return {
            "fsdp": hardware.trainer_count() // hardware.trainer_tensor,
            "tensor": hardware.trainer_tensor,
            "sampler tensor": tensor,
            "sampler replicas": sampler // tensor,
            "processes": hardware.process_count() if r.rollout.engine == "tunix" else 1,
            "gradients per step": r.plan.accumulation_steps,
            "rollouts per step": r.plan.num_rollout_micro_batches,
        }

    before, after = shape(recipe), shape(scaled)
    assert {name: size > 1 for name, size in before.items()} == {name: size > 1 for name, size in after.items()}
    assert max(after.values()) <= 4 and smoke_test.device_count(scaled) <= 8
    assert scaled.micro_batch_completions % after["fsdp"] == 0


@pytest.mark.parametrize(
    "hardware, expected",
    [
        ({"sampler_tensor": 64}, (2, 1, 2, 2)),  # fsdp 64, tensor 64
        ({"sampler_tensor": 8}, (4, 1, 4, 2)),  # fsdp 64; tensor 8 x 8 replicas, so the trainer takes 4 as well
        ({"trainer_tensor": 8, "sampler_tensor": 64}, (4, 2, 4, 4)),  # no replicas: the tensor axis grows
        ({"trainer_devices": 32, "sampler_devices": 32, "sampler_tensor": 8}, (2, 1, 4, 2)),
        ({"trainer_devices": 1, "sampler_devices": 1}, (1, 1, 1, None)),
    ],
)
def test_axes_become_two_and_those_that_share_devices_grow_together(hardware, expected):
    small = smoke_test.scaled_hardware(HardwareRecipe(accelerator="v6e-64", **hardware))
    assert (small.trainer_count(), small.trainer_tensor, small.sampler_count(), small.sampler_tensor) == expected
    assert smoke_test.scaled_hardware(HardwareRecipe()) == HardwareRecipe()


def test_a_micro_batch_fills_its_devices():
    recipe = smoke("hardware.sampler_tensor=2", "grpo.group_size=3", "training.micro_batch_size=24")
    scaled = smoke_test.scaled_recipe(recipe)
    assert scaled.hardware.trainer_count() == 4
    assert (scaled.prompts_per_step, scaled.training.micro_batch_size, scaled.grpo.group_size) == (4, 12, 3)
    several = smoke_test.scaled_recipe(smoke("training.micro_batch_size=8"))
    assert (several.prompts_per_step, several.training.micro_batch_size, several.grpo.group_size) == (2, 4, 4)


def test_rollout_micro_batches_stay_several():
    recipe = smoke("rollout.micro_batch_size=4", "training.micro_batch_size=8")
    scaled = smoke_test.scaled_recipe(recipe)
    assert recipe.plan.num_rollout_micro_batches > 1 and recipe.plan.accumulation_steps > 2
    assert (scaled.plan.num_rollout_micro_batches, scaled.plan.accumulation_steps, scaled.prompts_per_step) == (2, 2, 2)


def test_as_many_temperatures_as_steps():
    recipe = smoke("rollout.final_temperature=0.7", "rollout.temperature_stages=4")
    stages = [smoke_test.scaled_recipe(recipe, steps=steps).rollout.temperature_stages for steps in (2, 3, 9)]
    assert stages == [2, 3, 4]
    assert smoke_test.scaled_recipe(recipe, steps=1).rollout.final_temperature is None


def test_what_is_not_covered_is_listed():
    recipe = load_recipe(ROOT / "recipes" / "qwen2.5-3b-gsm8k-pallas.yaml")
    text = "\n".join(smoke_test.notes(recipe, smoke_test.scaled_recipe(recipe, engine="tunix")))
    assert "THE vLLM ENGINE WAS NOT TESTED" in text and ".venv-tpu/bin/grpo smoke-test" in text
    assert "loss.implementation=pallas: the kernel ran in interpret mode" in text
    assert "word problems were used instead" in text
    llama = load_recipe(ROOT / "recipes" / "llama3.1-8b-gsm8k.yaml")
    text = "\n".join(smoke_test.notes(llama, smoke_test.scaled_recipe(llama, engine="tunix")))
    assert "a random Llama is converted and not trained" in text
    assert "trained" not in "\n".join(smoke_test.notes(llama, smoke_test.scaled_recipe(llama)))
    other = smoke("model.maxtext_name=gemma2-2b")
    assert "no random model of gemma2-2b can be made" in smoke_test.notes(other, smoke_test.scaled_recipe(other))[-1]
    tiny = load_recipe(ROOT / "recipes" / "tiny-cpu.yaml")
    assert smoke_test.notes(tiny, smoke_test.scaled_recipe(tiny)) == []


def test_tracking_goes_offline_or_off():
    recipe = smoke("tracking.wandb=online")
    assert smoke_test.scaled_recipe(recipe, wandb=True).tracking.wandb == "offline"
    assert smoke_test.scaled_recipe(recipe, wandb=False).tracking.wandb == "off"


def test_gsm8k_is_taken_where_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("GSM8K_DIR", str(tmp_path))
    assert smoke_test.gsm8k_folder(smoke()) is None  # an empty folder
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").touch()
    assert smoke_test.gsm8k_folder(smoke()) == str(tmp_path)
    assert smoke_test.gsm8k_folder(smoke("problems.path=/data")) == "/data"


def test_engine_is_the_recipes_where_it_can_run(monkeypatch):
    tiny = load_recipe(ROOT / "recipes" / "tiny-cpu.yaml")
    for can, expected in ((True, "vllm"), (False, "tunix")):
        monkeypatch.setattr(smoke_test, "vllm_can_run", lambda can=can: can)
        assert smoke_test.choose_engine(smoke()) == expected
        assert smoke_test.choose_engine(smoke(), "tunix") == smoke_test.choose_engine(tiny) == "tunix"
    for engine, message in (("vllm", "--engine vllm: vllm is not installed"), ("sglang", "choose auto, tunix or vllm")):
        with pytest.raises(CourseError, match=message):
            smoke_test.choose_engine(tiny, engine)


def outcome(tmp_path, monkeypatch, code: str, *, train: str = "", changes=(), **options):
    """Run with `code` in place of the random model's test, and `train` in place of the training; and what was shown."""

    def command(name, recipe, *_):  # with -c, Python leaves the arguments that follow to the program
        return [sys.executable, "-c", code if recipe.name.endswith("-random") else train]

    monkeypatch.setattr(smoke_test, "_command", command)
    lines: list[str] = []
    recipe = smoke(*changes)
    scaled = smoke_test.scaled_recipe(recipe)
    return smoke_test.run(recipe, scaled, tmp_path / "runs" / "trial", log=lines.append, **options), lines


def test_what_the_program_says_is_shown_and_upstreams_noise_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")  # the process sees virtual devices and no accelerator
    code = "import os, sys; print(os.environ['JAX_PLATFORMS'], os.environ['XLA_FLAGS'].split()[-1]); "
    failing = "print('noise', file=sys.stderr); print('error: wrong', file=sys.stderr); sys.exit('Error in passing')"
    result, lines = outcome(tmp_path, monkeypatch, code + failing)
    assert not result.passed and result.exit_code == 1
    said = "cpu --xla_force_host_platform_device_count=2"
    assert lines[1:] == [said]  # after our own
    kept = Path(result.log_file).read_text().splitlines()
    assert sorted(kept) == sorted([said, "noise", "error: wrong", "Error in passing"])
    assert smoke_test.verdict(result).splitlines()[0] == result.error == "error: wrong"
    assert "FAILED (exit code 1)" in smoke_test.verdict(result)
    killed, _ = outcome(tmp_path, monkeypatch, "import os; os.kill(os.getpid(), 9)")
    assert killed.exit_code == 128 + 9
    raised, _ = outcome(tmp_path, monkeypatch, "", train="import sys; 1 / 0")
    assert raised.error == "ZeroDivisionError: division by zero"


def test_a_recipe_for_several_hosts_runs_as_two_processes(tmp_path, monkeypatch):
    hosts = ["hardware.accelerator=v4-16", "hardware.sampler_tensor=4", "rollout.engine=tunix"]
    code = "import sys, os; print(*sys.argv[-6:], os.environ['XLA_FLAGS'].split()[-1])"
    result, lines = outcome(tmp_path, monkeypatch, code, changes=hosts)
    assert (result.processes, result.devices) == (2, 4)
    first, second = sorted(lines[1:3], key=lambda line: line.split("--process ")[1])
    assert first.startswith("--coordinator 127.0.0.1:") and first.split()[1] == second.split()[1]
    assert "--processes 2 --process 1 --xla_force_host_platform_device_count=2" in second
    lost, _ = outcome(tmp_path, monkeypatch, code + "; os.kill(os.getpid(), 9 * (sys.argv[-1] == '1'))", changes=hosts)
    assert lost.exit_code == 128 + 9
    recipe = smoke(*hosts, "grpo.dynamic_sampling=3")
    scaled = smoke_test.scaled_recipe(recipe)
    assert (scaled.hardware.processes, scaled.hardware.sampler_tensor) == (2, 2)
    random = smoke_test.random_recipe(recipe, scaled, tmp_path / "model")
    assert random.hardware == scaled.hardware and random.model.maxtext_name == recipe.model.maxtext_name
    assert scaled.grpo.dynamic_sampling == 3 and random.grpo.dynamic_sampling is None


def test_passing_needs_a_summary_and_a_report(tmp_path, monkeypatch):
    result, _ = outcome(tmp_path, monkeypatch, "pass")
    assert result.exit_code == 0 and not result.passed
    run = tmp_path / "runs" / "trial"
    run.mkdir(exist_ok=True)
    (run / "report.html").touch()
    (run / "summary.json").write_text("{}")
    (run / "sync.json").write_text(json.dumps({"weights": 13, "mean_gap": 0.002}))
    with pytest.raises(CourseError, match="--overwrite"):
        outcome(tmp_path, monkeypatch, "pass")
    result, _ = outcome(tmp_path, monkeypatch, "pass", overwrite=True)
    assert result.passed and "architecture qwen3): 13 weights arrived, gap 2.0e-03" in smoke_test.verdict(result)


def test_the_command_lists_what_it_scales_and_hands_on_the_exit_code(tmp_path, monkeypatch):
    monkeypatch.setattr(smoke_test, "vllm_can_run", lambda: False)
    monkeypatch.setattr(smoke_test, "_command", lambda *_: [sys.executable, "-c", "print('at work'); exit(3)"])
    arguments = [str(ROOT / "recipes" / "qwen2.5-3b-gsm8k-pallas.yaml"), "--runs", str(tmp_path)]
    done = CliRunner().invoke(cli.app, ["smoke-test", *arguments])
    assert done.exit_code == 3
    for expected in (
        "training.steps: 100 -> 2", "THE vLLM ENGINE WAS NOT TESTED", "the kernel ran in interpret mode", "at work",
        "smoke test of qwen2.5-3b-gsm8k-pallas: FAILED (exit code 3)",
    ):  # fmt: skip
        assert expected in done.output
    as_json = CliRunner().invoke(cli.app, ["smoke-test", *arguments, "--json", "--steps", "3"])
    result = json.loads(as_json.stdout.splitlines()[-1])
    assert as_json.exit_code == 3 and not result["passed"] and "training.steps: 100 -> 3" in result["changes"]
