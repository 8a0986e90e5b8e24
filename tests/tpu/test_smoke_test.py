"""Smoke tests: what is scaled and what is kept, how the process is started.  Without JAX or training."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import write_text_atomic
from grpo_lib.problems import load_problems
from grpo_train import cli
from grpo_train.recipes import HardwareRecipe, load_recipe, profiles_of
from grpo_train.tpu import smoke_test

ROOT = Path(__file__).resolve().parents[2]
PALLAS = "published/qwen2.5-3b-gsm8k.yaml@pallas"
SMOKE = str(ROOT / "recipes" / "published" / "qwen3-1.7b-gsm8k-smoke.yaml")


def with_profiles() -> list[str]:
    """FILE, and FILE@PROFILE of each of its profiles, of all shipped recipes."""
    names = []
    for file in sorted((ROOT / "recipes").rglob("*.yaml")):
        names += [str(file), *(f"{file}@{profile}" for profile in profiles_of(file))]
    return names


PROFILES = with_profiles()


def smoke(*overrides: str):
    return load_recipe(SMOKE, overrides)


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: Path(path).name)
def test_what_decides_the_code_that_runs_is_kept(path):
    recipe = load_recipe(path)
    scaled = smoke_test.scaled_recipe(recipe, gsm8k="/gsm8k", wandb=True)
    kept = {
        "grpo": ("beta", "kl", "advantage", "aggregation", "epsilon", "epsilon_high", "ratio", "iterations"),
        "rollout": ("engine", "temperature"),
        "training": ("schedule", "max_grad_norm", "learning_rate", "b1", "b2", "weight_decay", "max_to_keep"),
        "model": ("dtype", "remat"),
    }
    for section, keys in kept.items():
        for key in keys:
            assert getattr(getattr(scaled, section), key) == getattr(getattr(recipe, section), key), (section, key)
    for small, full in zip(scaled.sources, recipe.sources, strict=True):
        assert (small.source, small.difficulty, small.seed) == (full.source, full.difficulty, full.seed)
    assert scaled.rewards == recipe.rewards
    assert scaled.prompts == recipe.prompts
    assert scaled.seed == recipe.seed
    assert scaled.hardware.colocated == recipe.hardware.colocated


def test_problems_of_the_hub_have_stand_ins_in_their_columns(monkeypatch, tmp_path):
    monkeypatch.setattr(smoke_test.environment, "cache_dir", lambda: tmp_path)
    recipe = load_recipe(ROOT / "recipes" / "published" / "qwen2.5-32b-dapo-math.yaml")
    scaled = smoke_test.scaled_recipe(recipe, placeholders=smoke_test.placeholders(recipe))
    assert (scaled.problems.source, scaled.problems.test_source) == ("dapo-math", "aime")
    train, held_out, test = (load_problems(scaled.problems, split) for split in ("train", "validation", "test"))
    assert len(train) == 256
    assert held_out
    assert len(test) == 16
    assert {problem.kind for problem in [*train, *held_out, *test]} == {"integer"}
    own = load_recipe(ROOT / "recipes" / "published" / "qwen2.5-32b-dapo-math.yaml", ["problems.path=/data"])
    assert smoke_test.scaled_recipe(own, placeholders=smoke_test.placeholders(own)).problems.path == "/data"
    assert smoke_test.placeholders(smoke()) is None


def test_each_of_several_tasks_is_scaled_and_has_its_placeholders(monkeypatch, tmp_path):
    monkeypatch.setattr(smoke_test.environment, "cache_dir", lambda: tmp_path)
    recipe = smoke(
        "problems=[{source: words, test: 5}, {source: dapo-math, test_source: aime, weight: 3, prompts: {user: dapo}}]",
        "rewards=[correct_answer]",
    )
    scaled = smoke_test.scaled_recipe(recipe, placeholders=smoke_test.placeholders(recipe))
    for small, full in zip(scaled.tasks, recipe.tasks, strict=True):
        assert (small.name, small.weight, small.prompts) == (full.name, full.weight, full.prompts)
    tasks = [problem.task for problem in load_problems(scaled.problems, "test")]
    assert tasks == ["words"] * 5 + ["dapo-math"] * 16


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        *((path, []) for path in PROFILES),
        # An odd group on four devices; several rollouts and gradients in one process.
        (SMOKE, ["hardware.sampler_tensor=2", "grpo.group_size=3", "training.micro_batch_size=24"]),
        (SMOKE, ["rollout.micro_batch_size=4", "training.micro_batch_size=8"]),
    ],
    ids=lambda value: Path(value).name if isinstance(value, str) else " ".join(value),
)
def test_every_axis_and_the_accumulation_stay_above_one_or_at_one(path, changes):
    recipe = load_recipe(path, changes)
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

    before = shape(recipe)
    after = shape(scaled)
    assert {name: size > 1 for name, size in before.items()} == {name: size > 1 for name, size in after.items()}
    assert max(after.values()) <= 4
    assert smoke_test.device_count(scaled) <= 8
    assert scaled.plan.micro_batch_size % after["fsdp"] == 0


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


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: Path(path).name)
@pytest.mark.parametrize("engine", ["tunix", "vllm"])
def test_the_shipped_recipes_take_the_tiny_model_as_it_is(path, engine):
    """They share the conversion of it that `--base` names."""
    assert smoke_test.tiny_heads(smoke_test.scaled_recipe(load_recipe(path), engine=engine)) == 1


@pytest.mark.parametrize("trainer", [1, 2, 4, 8])
@pytest.mark.parametrize("sampler", [1, 2, 4, 8])
@pytest.mark.parametrize("engine", ["tunix", "vllm"])
def test_the_tiny_model_has_heads_for_every_mesh(tmp_path, trainer, sampler, engine):
    recipe = smoke(f"hardware.trainer_tensor={trainer}", f"hardware.sampler_tensor={sampler}")
    scaled = smoke_test.scaled_recipe(recipe, engine=engine)
    tiny = smoke_test.tiny_recipe(scaled, tmp_path)
    heads = smoke_test.tiny_heads(scaled)
    if heads == 1:
        assert tiny == scaled
        assert scaled.hardware.trainer_tensor == 1
        assert scaled.sampler_tensor() <= 2
        return
    assert tiny.model.path == str(tmp_path)
    assert heads % scaled.hardware.trainer_tensor == 0
    assert heads % scaled.sampler_tensor() == 0
    assert any(f"its key-value head {heads} times" in note for note in smoke_test.notes(recipe, scaled))


def test_tensor_parallelism_that_the_recipes_own_model_cannot_have_is_refused(tmp_path):
    recipe = load_recipe(ROOT / "recipes" / "published" / "qwen2.5-3b-gsm8k.yaml", ["hardware.trainer_tensor=4"])
    scaled = smoke_test.scaled_recipe(recipe, engine="tunix")
    with pytest.raises(
        CourseError, match="trainer_tensor=4 does not divide the model's 2 key-value heads; take 1 or 2"
    ):
        smoke_test.run(recipe, scaled, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


LLAMA = ["training.prompts_per_step=1", "hardware.trainer_tensor=4", "rollout.vllm.memory_fraction=0.2"]


@pytest.mark.slow
@pytest.mark.long(minutes=2)
@pytest.mark.parametrize(
    ("file", "changes"),
    [
        pytest.param("published/qwen3-1.7b-gsm8k-smoke", ["hardware.trainer_tensor=2"], marks=pytest.mark.nightly),
        pytest.param("published/qwen2.5-32b-dapo-math", ["hardware.trainer_tensor=8"], marks=pytest.mark.nightly),
        ("llama3.1-8b-gsm8k", LLAMA),
    ],
)
def test_tensor_parallel_training_passes(root, tmp_path, file, changes):
    command = [sys.executable, "-m", "grpo_train.cli", "smoke-test", f"recipes/{file}.yaml", *changes]
    done = subprocess.run([*command, "--runs", tmp_path, "--engine", "tunix"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout.splitlines()[-1]
    assert "remove the folder" not in done.stdout


@pytest.mark.parametrize(
    ("file", "changes", "engine", "listed"),
    [
        (
            PALLAS,
            [],
            "tunix",
            ["vLLM ENGINE", "loss.implementation=pallas", "word problems"],
        ),
        ("llama3.1-8b-gsm8k.yaml", [], "tunix", ["vLLM ENGINE", "word problems"]),
        ("llama3.1-8b-gsm8k.yaml", [], None, ["word problems"]),
        (
            SMOKE,
            ["model.maxtext_name=gemma2-2b"],
            None,
            ["word problems", "gemma2-2b"],
        ),
        ("tiny-cpu.yaml", [], None, []),
    ],
)
def test_what_is_not_covered_is_listed(file, changes, engine, listed):
    recipe = load_recipe(ROOT / "recipes" / file, changes)
    notes = smoke_test.notes(recipe, smoke_test.scaled_recipe(recipe, engine=engine))
    assert len(notes) == len(listed)
    for words in listed:
        assert any(words in note for note in notes), words


@pytest.mark.parametrize(("wandb", "mode"), [(True, "offline"), (False, "off")])
def test_tracking_goes_offline_or_off(wandb, mode):
    assert smoke_test.scaled_recipe(smoke("tracking.wandb=online"), wandb=wandb).tracking.wandb == mode


def test_gsm8k_is_taken_where_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("GSM8K_DIR", str(tmp_path))
    assert smoke_test.gsm8k_folder(smoke()) is None  # an empty folder
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").touch()
    assert smoke_test.gsm8k_folder(smoke()) == str(tmp_path)
    assert smoke_test.gsm8k_folder(smoke("problems.path=/data")) == "/data"


@pytest.mark.parametrize(("can", "expected"), [(True, "vllm"), (False, "tunix")])
def test_engine_is_the_recipes_where_it_can_run(monkeypatch, can, expected):
    monkeypatch.setattr(smoke_test, "vllm_can_run", lambda: can)
    assert smoke_test.choose_engine(smoke()) == expected
    tiny = load_recipe(ROOT / "recipes" / "tiny-cpu.yaml")
    assert smoke_test.choose_engine(smoke(), "tunix") == smoke_test.choose_engine(tiny) == "tunix"
    with contextlib.nullcontext() if can else pytest.raises(CourseError, match="vllm"):
        smoke_test.choose_engine(tiny, "vllm")


def outcome(tmp_path, monkeypatch, code: str, *, train: str = "", changes=(), **options):
    """Run with `code` in place of the random model's test, and `train` in place of the training; and what was shown."""

    def command(recipe, *_):  # with -c, Python leaves the arguments that follow to the program
        return [sys.executable, "-c", code if recipe.name.endswith("-random") else train]

    monkeypatch.setattr(smoke_test, "command_line", command)
    lines: list[str] = []
    recipe = smoke(*changes)
    scaled = smoke_test.scaled_recipe(recipe)
    return smoke_test.run(recipe, scaled, tmp_path / "runs" / "trial", log=lines.append, **options), lines


def test_what_the_program_says_is_shown_and_upstreams_noise_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")  # the process sees virtual devices and no accelerator
    code = (
        "import os, sys; print(os.environ['JAX_PLATFORMS'], os.environ['XLA_FLAGS'].split()[-1]); "
        "print('noise', file=sys.stderr); print('error: wrong', file=sys.stderr); sys.exit('Error in passing')"
    )
    result, lines = outcome(tmp_path, monkeypatch, code)
    assert not result.passed
    assert (result.exit_code, result.error) == (1, "error: wrong")
    said = "cpu --xla_force_host_platform_device_count=2"
    assert lines[1:] == [said]  # after our own
    logged = Path(result.log_file).read_text()
    # Two write to the file, the program's stderr and we: a line of one may break a line of the other.
    for words in (said, "noise", "error: wrong", "Error in passing"):
        assert logged.count(words) == 1, words
    assert result.error in smoke_test.verdict(result)
    assert "exit code 1" in smoke_test.verdict(result)


@pytest.mark.parametrize(
    ("code", "train", "exit_code", "error"),
    [
        ("import os; os.kill(os.getpid(), 9)", "", 128 + 9, None),
        ("", "1 / 0", 1, "ZeroDivisionError: division by zero"),
        # As XLA ends a process, after what vLLM says at each start on a CPU.
        (
            "",
            "import os; os.write(2, b'F1 stuck\\nF1127 01:11 stuck\\nError getting name'); os.abort()",
            134,
            "F1127 01:11 stuck",
        ),
    ],
)
def test_how_it_ended_is_reported(tmp_path, monkeypatch, code, train, exit_code, error):
    result, _ = outcome(tmp_path, monkeypatch, code, train=train)
    assert (result.exit_code, result.error) == (exit_code, error)


HOSTS = ["hardware.accelerator=v4-16", "hardware.sampler_tensor=4", "rollout.engine=tunix"]


def test_a_recipe_for_several_hosts_runs_as_two_processes(tmp_path, monkeypatch):
    code = (
        "import sys, os; line = ' '.join([*sys.argv[-6:], os.environ['XLA_FLAGS'].split()[-1]]); "
        "sys.stdout.write(line + chr(10)); "  # at once: the two write to one file, and print writes word by word
        "os.kill(os.getpid(), 9 * (sys.argv[-1] == '1'))"  # one of the two is lost
    )
    result, lines = outcome(tmp_path, monkeypatch, code, changes=HOSTS)
    assert (result.processes, result.devices, result.exit_code) == (2, 4, 128 + 9)
    first, second = sorted(Path(result.log_file).read_text().splitlines(), key=lambda line: line.split("--process ")[1])
    assert lines[1:] == [first]  # which speaks for both
    assert first.startswith("--coordinator 127.0.0.1:")
    assert first.split()[1] == second.split()[1]
    assert "--processes 2 --process 1 --xla_force_host_platform_device_count=2" in second


def test_the_random_model_runs_on_the_devices_of_the_recipe(tmp_path):
    recipe = smoke(*HOSTS, "grpo.dynamic_sampling=3")
    scaled = smoke_test.scaled_recipe(recipe)
    assert (scaled.hardware.processes, scaled.hardware.sampler_tensor) == (2, 2)
    random = smoke_test.random_recipe(recipe, scaled, tmp_path / "model")
    assert random.hardware == scaled.hardware
    assert random.model.maxtext_name == recipe.model.maxtext_name
    assert scaled.grpo.dynamic_sampling == 3
    assert random.grpo.dynamic_sampling is None


def test_passing_needs_a_summary_and_a_report(tmp_path, monkeypatch):
    result, _ = outcome(tmp_path, monkeypatch, "pass")
    assert result.exit_code == 0
    assert not result.passed
    files = {
        "report.html": "",
        "summary.json": "{}",
        "sync.json": json.dumps({"weights": 13, "mean_gap": 0.002}),
        "metrics.jsonl": '{"update_applied": 0.96}\n{"update_applied": 1.02}\n',
    }
    for name, text in files.items():
        write_text_atomic(tmp_path / "runs" / "trial" / name, text)
    with pytest.raises(CourseError, match="--overwrite"):
        outcome(tmp_path, monkeypatch, "pass")
    result, _ = outcome(tmp_path, monkeypatch, "pass", overwrite=True)
    assert result.passed
    assert (result.weights, result.mean_gap, result.architecture) == (13, 0.002, "qwen3")
    assert result.update_applied == 0.96


@pytest.mark.parametrize(("more", "listed"), [([], "steps: 100 -> 2"), (["--json", "--steps", "3"], "steps: 100 -> 3")])
def test_the_command_lists_what_it_scales_and_hands_on_the_exit_code(tmp_path, monkeypatch, more, listed):
    monkeypatch.setattr(smoke_test, "vllm_can_run", lambda: False)
    monkeypatch.setattr(smoke_test, "command_line", lambda *_: [sys.executable, "-c", "print('at work'); exit(3)"])
    recipe = str(ROOT / "recipes" / PALLAS)
    done = CliRunner().invoke(cli.command_line(), ["smoke-test", recipe, "--runs", str(tmp_path), *more])
    assert done.exit_code == 3
    assert "at work" in done.output
    assert listed in done.output
    if more:
        assert not json.loads(done.stdout.splitlines()[-1])["passed"]
