"""What a run takes of a CPU's memory: said before it starts, and refused where there is less."""

import inspect
import json
import re
import subprocess
import sys

import pytest

from grpo_lib.common.errors import CourseError
from grpo_train.engines import cpu_memory, model_files
from grpo_train.recipes import load_recipe
from grpo_train.runs import machine

QWEN = cpu_memory.ModelSizes(
    layers=24, width=896, mlp=4864, heads=14, kv_heads=2, head=64, vocabulary=151936, tied=True
)
RECIPE = "recipes/qwen2.5-0.5b-gsm8k.yaml@cpu"
GIB = 2**30


def estimate(*overrides: str) -> cpu_memory.Estimate:
    recipe = load_recipe(RECIPE, list(overrides))
    return cpu_memory.estimate(QWEN, recipe, recipe.plan_on(1, 1), prompt_length=160)


def test_weights_are_counted_as_the_files_have_them() -> None:
    recipe = load_recipe("recipes/tiny-cpu.yaml")
    sizes = cpu_memory.sizes_of(model_files.read_config(model_files.model_directory(recipe.model)))
    assert sizes.weights == pytest.approx(model_files.weight_count(recipe), rel=0.01)
    assert QWEN.weights == pytest.approx(494_032_768, rel=0.001)  # Qwen2.5-0.5B


def test_the_shipped_recipe_fits_a_laptop_with_adapters_and_with_all_weights() -> None:
    assert 6 < estimate().gib < 8
    assert 11 < estimate("lora.rank=null").gib < 15


def test_parts_add_up_and_follow_the_recipe() -> None:
    whole = estimate("lora.rank=null")
    assert sum(whole.parts.values()) == whole.total(whole.phase) == max(map(whole.total, whole.phases))
    assert whole.phases["an update"]["moments"] == 2 * QWEN.weights * 4
    more = ["lora.rank=null", "training.micro_batch_size=16"]
    assert estimate(*more).total("an update") > whole.total("an update")
    assert estimate("lora.rank=null", "model.remat=minimal").total("an update") > whole.total("an update")
    assert estimate("lora.rank=null", "grpo.beta=0.04").gib > whole.gib  # a reference model


@pytest.mark.skipif(sys.platform != "linux", reason="glibc keeps freed memory for a process")
def test_what_an_earlier_run_of_the_process_has_freed_is_free() -> None:
    code = """
import numpy as np, psutil
from grpo_lib.common import environment
environment.prepare()
from grpo_train.engines import cpu_memory
from grpo_train.recipes import load_recipe
from grpo_train.runs import machine

def resident():
    return psutil.Process().memory_info().rss

before = resident()
arrays = [np.ones(2**14) for _ in range(2**13)]  # 1 GiB
del arrays
kept = resident() - before
machine.free_memory = lambda: asked.append(resident() - before)
asked = []
recipe = load_recipe("recipes/tiny-cpu.yaml")
sizes = cpu_memory.ModelSizes(layers=2, width=8, mlp=8, heads=2, kv_heads=1, head=4, vocabulary=16, tied=True)
cpu_memory.require(sizes, recipe, recipe.plan_on(1, 1), 32)
print(kept, asked[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    kept, asked = map(int, done.stdout.split())
    assert kept > GIB // 2  # else there is nothing to show
    assert asked < GIB // 4


def test_one_that_does_not_fit_is_refused_in_one_line(monkeypatch) -> None:
    recipe = load_recipe(RECIPE, ["lora.rank=null"])
    plan = recipe.plan_on(1, 1)
    monkeypatch.setattr(machine, "free_memory", lambda: 9 * GIB)
    with pytest.raises(CourseError, match=r"needs 1\d\.\d GiB .* 9\.0 GiB free: set lora\.rank=16 ") as refused:
        cpu_memory.require(QWEN, recipe, plan, 160)
    assert "\n" not in str(refused.value)
    monkeypatch.setattr(machine, "free_memory", lambda: 16 * GIB)
    assert cpu_memory.require(QWEN, recipe, plan, 160).gib < 16
    monkeypatch.setattr(machine, "free_memory", lambda: None)  # not known: then nothing is compared
    cpu_memory.require(QWEN, recipe, plan, 160)


def test_a_run_is_refused_before_it_writes_anything(grpo, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda: GIB // 2)
    done = grpo("train", "recipes/tiny-cpu.yaml", "--runs", tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "0.5 GiB free" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("overrides", [[], ["training.micro_batch_size=16"], ["lora.rank=null", "grpo.beta=0.04"]])
def test_each_change_that_is_advised_takes_less(overrides, monkeypatch) -> None:
    recipe = load_recipe(RECIPE, overrides)
    plan = recipe.plan_on(1, 1)
    needed = cpu_memory.estimate(QWEN, recipe, plan, 160).gib
    monkeypatch.setattr(machine, "free_memory", lambda: 2 * GIB)
    with pytest.raises(CourseError) as refused:
        cpu_memory.require(QWEN, recipe, plan, 160)
    _, _, advice = str(refused.value).partition("GiB free")
    changes = re.findall(r"[a-z_]+\.[a-z_]+=\w+", advice)
    assert ("set" in advice) == bool(changes)
    for change in changes:
        changed = load_recipe(RECIPE, [*overrides, change])
        assert cpu_memory.estimate(QWEN, changed, changed.plan_on(1, 1), 160).gib < needed


def test_constants_of_other_modules_are_theirs() -> None:
    from grpo_train import cold_start, training
    from grpo_train.losses import token_logps

    prompts = inspect.signature(training.check_first_sync).parameters["prompts"].default
    assert (cpu_memory.CHUNK, cpu_memory.COLD_START_ROWS) == (token_logps.CHUNK, cold_start.ROWS)
    assert prompts == cpu_memory.SCORED_PROMPTS


@pytest.mark.parametrize("completion", [8, 24, 192])
def test_attention_is_counted_in_slots_where_it_is_computed_so(completion) -> None:
    from grpo_train.losses import slots

    recipe = load_recipe("recipes/tiny-cpu.yaml", [f"rollout.max_completion_length={completion}"])
    plan = recipe.plan_on(1, 1)
    rows, width = plan.row_shapes(37, completion)[-1]
    sizes = slots.SlotSizes(36, plan.group_size, completion + 1)
    counted = cpu_memory._pairs(recipe, plan, 37, rows, width)
    assert (counted < rows * width**2) == sizes.pays(width)


NAMES = {"": ("max", "current", "inactive_file"), "memory": ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")}


@pytest.mark.parametrize("version", NAMES)
@pytest.mark.parametrize("folder", ["", "batch/job"])
def test_free_memory_is_that_of_the_container(tmp_path, version, folder) -> None:
    limit, used, cached = NAMES[version]
    mine = tmp_path / "mine"
    mine.write_text(f"7:pids:/\n4:{version}:/batch/job/step\n")
    assert (machine.free_memory(tmp_path, mine) or 0) > GIB // 4  # no limit
    group = tmp_path / version / folder  # the root, as a container sees it, or one above the process's own
    group.mkdir(parents=True, exist_ok=True)
    texts = ((limit, "1000000\n"), (used, "600000\n"), ("stat", f"anon 5\n{cached} 200000\n"))
    for name, text in texts:
        (group / f"memory.{name}").write_text(text)
    assert machine.free_memory(tmp_path, mine) == 600_000
    (group / f"memory.{limit}").write_text("max\n" if version == "" else f"{2**63 - 4096}\n")
    assert (machine.free_memory(tmp_path, mine) or 0) > GIB // 4


@pytest.mark.long(minutes=1)
def test_a_run_takes_about_what_it_said() -> None:
    small = ["training.prompts_per_step=4", "problems.test=8", "problems.validation=8", "training.validate_every=0"]
    command = [sys.executable, "dev/benchmarks/step_memory.py", "recipes/tiny-cpu.yaml", *small, "--json"]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    assert 0.6 < result["estimate_over_measured"] < 1.4
