"""`grpo self-check` on virtual devices: it passes where nothing is wrong, and names each planted fault."""

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import append_jsonl
from grpo_train.engines import model_files
from grpo_train.engines.tokens import load_tokenizer
from grpo_train.recipes import load_recipe
from grpo_train.runs import machine
from grpo_train.tpu import machine_checks, self_check

SMOKE = [
    *("recipes/published/qwen3-1.7b-gsm8k-smoke.yaml", "model.path=assets/tiny-base", "model.maxtext_name=qwen3-0.6b"),
    "loss.implementation=chunked",
]


def run(root: Path, runs: Path, **variables: str) -> tuple[int, dict[str, dict]]:
    """Exit code and checks by name, on eight virtual devices."""
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-m", "grpo_train.cli", "self-check", *SMOKE, "--runs", str(runs), "--json"]
    done = subprocess.run(command, cwd=root, env=os.environ | devices | variables, capture_output=True, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((runs / "self-check-qwen3-1.7b-gsm8k-smoke.json").read_text()) == result
    return done.returncode, {check["name"]: check for check in result["checks"]}


@pytest.mark.long(minutes=2)
def test_a_healthy_machine_passes(root, tmp_path):
    code, checks = run(root, tmp_path)
    assert code == 0, checks
    assert {name for name, check in checks.items() if check["outcome"] == "not made"} == {
        *("chips", "memory", "from the host", "attention", "peak memory", "estimate")
    }
    assert "exit code 75" in checks["stopped"]["text"]
    assert "step 6" in checks["continued"]["text"]
    assert ", 0 in the second" in checks["steps"]["text"]


# Python imports it at its start.  The sampler gets the weights of the update before.
ONE_BEHIND = """
import importlib.util, sys

class Plant:
    def find_spec(self, name, path=None, target=None):
        if name != "grpo_train.engines.tunix_sampler":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            import jax
            update, kept = module.TunixSampler.update_params, []

            def behind(self, params, *rest):
                kept.append(jax.tree.map(lambda array: array.copy(), params))
                update(self, kept[-2:][0], *rest)

            module.TunixSampler.update_params = behind

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Plant())
"""


@pytest.mark.nightly(minutes=2)
def test_a_sampler_that_is_one_update_behind_is_found(root, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(ONE_BEHIND)
    code, checks = run(root, tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{root}")
    assert code == 1
    assert checks["sampler"]["outcome"] == "FAIL"
    assert "the sampler does not get the weights" in checks["sampler"]["text"]


def test_another_jax_than_the_locks_is_named(tmp_path):
    for name in ("cpu.lock", "tpu.lock"):
        (tmp_path / name).write_text("jax==0.0.1 \\\n    --hash=sha256:0\n")
    with pytest.raises(CourseError, match=r"jax .*lock has 0.0.1; make setup"):
        machine_checks._packages(tmp_path)


def test_who_holds_a_chip_is_named(tmp_path, monkeypatch):
    """A real process has the file open; on a TPU VM it is a device."""
    chip = tmp_path / "accel0"
    chip.touch()
    hold = "import sys, time; file = open(sys.argv[1]); print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", hold, chip], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        (number, command), *others = environment.chip_holders(tmp_path).items()
        # Of a long command line its beginning; how much of that is the path of Python differs from machine to machine.
        assert number == holder.pid
        assert command
        assert " ".join(map(str, holder.args)).startswith(command)
        assert not others
        monkeypatch.setattr(environment, "chip_holders", functools.partial(environment.chip_holders, tmp_path))
        with (
            monkeypatch.context() as patched,
            pytest.raises(CourseError, match=f"held by process {number} .* {number}$"),
        ):
            patched.setattr(environment, "HANDOVER_SECONDS", 0)
            environment.require_free_chips()
    finally:
        threading.Timer(0.5, holder.kill).start()
    environment.require_free_chips()  # it waits until the one that is killed has ended
    assert holder.wait() < 0


def test_a_full_disk_and_a_folder_that_cannot_rename_are_named(root, tmp_path, monkeypatch):
    recipe = load_recipe(root / SMOKE[0], SMOKE[1:])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(CourseError, match=r"0.0 GB free.*training.checkpoints=gs://"):
        model_files.require_disk(recipe, None, tmp_path / "runs" / "a")
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(CourseError, match="--rename-dir-limit"):
        machine_checks._folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "there", "needed"),
    [  # the tiny model has 820,864 weights
        ([], (), 4 + 12 * 3 + 4),  # the base, three checkpoints with two moments, the export
        (["lora.rank=4", "model.dtype=bfloat16", "model.weight_dtype=float32"], (), 4 + 6),
        (["training.checkpoints=gs://bucket/all"], (), 4 + 4),
        (["training.steps=20"], ("checkpoints/base/0/items", "export"), 12),
    ],
)
def test_disk_is_counted_for_what_is_still_to_be_written(root, tmp_path, monkeypatch, changes, there, needed):
    recipe = load_recipe(root / "recipes/tiny-cpu.yaml", ["training.checkpoint_every=20", *changes])
    for folder in there:
        (tmp_path / folder).mkdir(parents=True)
        with open(tmp_path / folder / "weights", "wb") as file:
            file.truncate(8 * 820_864)
    for spare in (1, -10_000):  # bytes: folders have some, too
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=needed * 820_864 + spare: SimpleNamespace(free=free))
        with pytest.raises(CourseError) if spare < 0 else contextlib.nullcontext():
            model_files.require_disk(recipe, tmp_path / "checkpoints" / "base", tmp_path)


def changed_model(root, tmp_path, config=(), **weights):
    """A recipe of the tiny model with other values in config.json, and other weights."""
    folder = shutil.copytree(root / "assets" / "tiny-base", tmp_path / "model")
    values = json.loads((folder / "config.json").read_text()) | dict(config)
    (folder / "config.json").write_text(json.dumps(values))
    tensors = load_file(folder / "model.safetensors")
    for name, value in weights.items():
        tensors["model." + name.replace("__", ".")] = value
    save_file(tensors, folder / "model.safetensors")
    return load_recipe(root / SMOKE[0], [f"model.path={folder}", SMOKE[2]])


def test_a_missing_head_and_a_weight_that_is_nan_are_named(root, tmp_path):
    untied = changed_model(root, tmp_path, {"tie_word_embeddings": False})
    with pytest.raises(CourseError, match=r"weight lm_head.weight: config.json asks .*, and the files have nothing"):
        self_check._weights(untied)
    broken = changed_model(root, tmp_path / "other", norm__weight=np.full(128, np.nan, np.float32))
    with pytest.raises(CourseError, match=r"weight model\.norm\.weight of .* is not finite"):
        self_check._weights(broken)


def test_the_tokenizer_of_another_model_is_named(root, tmp_path):
    recipe = changed_model(root, tmp_path)
    tokenizer = load_tokenizer(recipe.model)
    tokenizer.add_tokens([f"word{number}" for number in range(100)])
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(CourseError, match="349 tokens, and the model's embedding 256: it is another model's"):
        machine_checks._tokenizer(recipe)


def test_what_was_not_checked_is_not_counted_as_passed(root, tmp_path):
    """There is no hub here, and no preflight of this model: the number of weights is not known."""
    recipe = load_recipe(root / SMOKE[0], ["name=own", "model.path=somebody/model"])
    checks = machine_checks.examine(
        {
            "weights": lambda: self_check._weights(recipe),
            "disk": lambda: self_check._disk(recipe, tmp_path),
            "from the host": lambda: machine_checks._from_the_host(recipe),
        }
    )
    assert [check.outcome for check in checks] == ["FAIL", "not made", "not made"]
    assert "the weights of model.path=somebody/model cannot be read" in checks[0].text
    assert "check the network" in checks[0].text
    assert "ConnectError" not in checks[0].text
    assert self_check.page(recipe, checks).startswith(f"{recipe.name}: 1 failed, 0 passed, 2 were not made:")
    assert f"{recipe.name}: 0 checks passed, 2 were not made" in self_check.page(recipe, checks[1:])
    assert self_check.line(checks[1]).startswith("not made  disk")


def test_the_operating_system_is_named(root):
    text = machine_checks._packages(root / "requirements")
    assert machine.operating_system() in text
    assert "kernel" in text


def test_a_model_that_asks_for_a_token_is_named(root, monkeypatch):
    import httpx
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError

    def refuse(*_, **__):
        raise GatedRepoError("gated", response=httpx.Response(401, request=httpx.Request("GET", "https://hub")))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(CourseError, match="accept it and set HF_TOKEN"):
        machine_checks._model(load_recipe(root / "recipes/llama3.1-8b-gsm8k.yaml"))


def test_fewer_hosts_or_devices_than_the_recipe_has_are_named(root):
    recipe = load_recipe(root / SMOKE[0], [*SMOKE[1:], "hardware.processes=2", "rollout.engine=tunix"])
    with pytest.raises(CourseError, match=r"2 hosts .*process 0 of 1; start this on all hosts"):
        machine_checks._devices(recipe)
    with pytest.raises(CourseError, match=r"needs 8 devices.*start this on a v6e-8"):
        machine_checks._devices(load_recipe(root / SMOKE[0]))
    with pytest.raises(CourseError, match=r"needs 8 devices.*set hardware.accelerator to this machine"):
        machine_checks._devices(load_recipe(root / "recipes/tiny-cpu.yaml", ["hardware.trainer_devices=8"]))


@pytest.mark.parametrize(
    ("accelerator", "kind", "wrong"),
    [
        ("v6e-8", "TPU v6 lite", None),
        ("v6e-8", "TPU v5 lite", "v6e-8 is TPU v6 lite or TPU v6e, and here are 8 of TPU v5 lite"),
        ("v5e-8", "TPU v5 lite", None),
        ("v5p-16", "TPU v4", "v5p-16 is TPU v5 or TPU v5p, and here are 8 of TPU v4"),
    ],
)
def test_another_kind_of_chip_than_the_recipes_is_named(root, monkeypatch, accelerator, kind, wrong):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="tpu", device_kind=kind)] * 8)
    recipe = load_recipe(root / SMOKE[0], [f"hardware.accelerator={accelerator}", "hardware.processes=1"])
    with pytest.raises(CourseError, match=wrong) if wrong else contextlib.nullcontext():
        machine_checks._devices(recipe)


@pytest.mark.parametrize("limit", [0.5, 0.01])
def test_the_recipes_own_limit_of_the_gap_decides(root, tmp_path, limit):
    recipe = load_recipe(root / SMOKE[0], [*SMOKE[1:], f"rollout.max_mean_gap={limit}"])
    (tmp_path / "sync.json").write_text(json.dumps({"weights": 13, "mean_gap": 0.3}))
    append_jsonl(tmp_path / "metrics.jsonl", {"step": 1, "sampler_trainer_gap": 0.3})
    with pytest.raises(CourseError, match=r"limit 0\.01") if limit < 0.3 else contextlib.nullcontext():
        self_check._sampler(self_check.Training(recipe, [], tmp_path, tmp_path / "log", {}))


def test_the_page_says_how_long_a_start_will_take(root, monkeypatch):
    recipe = load_recipe(root / SMOKE[0], SMOKE[1:])  # of four layers
    checks = [self_check.Check("stopped", "pass", "", 180.0), self_check.Check("memory", "not made", "", 0.0)]
    assert "minutes" not in self_check.page(recipe, checks)
    monkeypatch.setattr(environment, "has_accelerator", lambda: True)
    page = self_check.page(recipe, checks)
    assert "3.0 minutes with 2 layers" in page
    assert "all 4 it will take 3 to 6" in page
