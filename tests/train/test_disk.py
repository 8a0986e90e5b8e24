"""The disk: what a run writes is counted beforehand, and a VM that is too small for it is named before a download."""

import socket
from pathlib import Path

import pytest

from grpo_lib.common.errors import CourseError
from grpo_train import checks
from grpo_train.engines import model_files
from grpo_train.recipes import load_recipe, profiles_of, shipped_recipes

ALL = [
    path
    for file in shipped_recipes()
    for path in (str(file), *(f"{file}@{profile}" for profile in profiles_of(file)))
]  # fmt: skip
LLAMA = "recipes/llama3.1-8b-gsm8k.yaml"
BUCKET = "training.checkpoints=gs://bucket/folder"


@pytest.mark.parametrize("path", ALL, ids=lambda path: Path(path).name)
def test_a_recipe_for_one_host_fits_its_disk_or_asks_for_a_bucket(path):
    recipe = load_recipe(path)
    weights, line = model_files.counted_weights(recipe), model_files.vm_disk(recipe)
    if not recipe.hardware.accelerator or recipe.hardware.process_count() > 1:
        assert line is None
        return
    assert weights and line
    if weights * sum(model_files.disk_use(recipe).values()) > 85e9:
        assert line.endswith(f"set {model_files.IN_A_BUCKET}")
    in_a_bucket = model_files.vm_disk(load_recipe(path, [BUCKET]))
    assert in_a_bucket and model_files.IN_A_BUCKET not in in_a_bucket  # with it, every one of them fits


def test_all_weights_of_llama_need_a_bucket_and_its_adapters_do_not():
    assert "set training.checkpoints=gs://" in (model_files.vm_disk(load_recipe(LLAMA)) or "")
    assert "set " not in (model_files.vm_disk(load_recipe(f"{LLAMA}@lora")) or "set ")


@pytest.fixture
def offline(monkeypatch):
    """No address can be reached, so that a download fails the test."""

    def refuse(*_, **__):
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_a_disk_that_is_too_small_is_one_line_before_anything_is_downloaded(offline, monkeypatch, tmp_path, gsm8k_dir):
    """A disk of 107 GB with 91 free, as a TPU VM has it; the command and a notebook's cell ask the same."""
    monkeypatch.setattr(
        "shutil.disk_usage", lambda _: type("Usage", (), {"total": 107 * 10**9, "used": 16 * 10**9, "free": 91 * 10**9})
    )
    monkeypatch.setattr(model_files, "require_engine", lambda _: None)  # vLLM, in this environment
    data = f"problems.path={gsm8k_dir}"
    with pytest.raises(CourseError, match=r"91\.0 GB free.*set training\.checkpoints=gs://") as refused:
        checks.check(load_recipe(LLAMA, [data]), run=tmp_path / "run")
    assert "\n" not in str(refused.value)
    found = model_files.require_disk(load_recipe(LLAMA, [BUCKET]), tmp_path / "base", tmp_path / "run")
    assert found and "48." in found  # download, base and export
