"""`grpo …` as a person runs it: real processes, exit codes, one line per error."""

import json
import os
import shutil
import subprocess
import sys

import pytest


@pytest.fixture
def grpo(root):
    def run(*arguments, cwd=None):
        command = [sys.executable, "-m", "grpo_lib.cli", *map(str, arguments)]
        return subprocess.run(
            command, cwd=cwd or root, capture_output=True, text=True, stdin=subprocess.DEVNULL,
            env=os.environ | {"NO_COLOR": "1", "COLUMNS": "200"},
        )  # fmt: skip

    return run


def assert_one_line_error(done, *words):
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: ")
    for word in words:
        assert str(word) in done.stderr


def test_help_lists_the_commands(grpo):
    done = grpo("--help")
    assert done.returncode == 0
    for command in ("config", "convert", "train", "evaluate", "report"):
        assert command in done.stdout
        assert grpo(command, "--help").returncode == 0


def test_config_prints_the_resolved_recipe(grpo):
    done = grpo("config", "recipes/tiny-cpu.yaml", "training.steps=2", "--json")
    assert json.loads(done.stdout.splitlines()[-1])["training"]["steps"] == 2


def test_an_unknown_key_is_one_line(grpo):
    assert_one_line_error(grpo("config", "recipes/tiny-cpu.yaml", "training.stepz=2"), "training.stepz", "steps?")


def test_a_wrong_type_is_one_line(grpo):
    assert_one_line_error(grpo("train", "recipes/tiny-cpu.yaml", "training.steps=many"), "training.steps", "many")


def test_a_missing_recipe_is_one_line(grpo):
    assert_one_line_error(grpo("train", "recipes/nothing.yaml"), "recipes/nothing.yaml", "tiny-cpu")


def test_a_run_that_exists_is_not_touched(grpo, tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes.txt").write_text("mine")
    done = grpo("train", "recipes/tiny-cpu.yaml", "--runs", tmp_path, "--run", "kept")
    assert_one_line_error(done, tmp_path / "kept", "--resume", "--overwrite", "--run")
    done = grpo("train", "recipes/tiny-cpu.yaml", "--runs", tmp_path, "--run", "kept", "--overwrite")
    assert_one_line_error(done, "not a run")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["notes.txt"]


def test_resuming_with_another_recipe_lists_what_differs(grpo, tmp_path, root):
    from grpo_lib.recipes import load_recipe
    from grpo_lib.runs import open_run

    open_run(tmp_path / "run", load_recipe(root / "recipes" / "tiny-cpu.yaml"))
    done = grpo("train", "recipes/tiny-cpu.yaml", "grpo.beta=0.5", "--runs", tmp_path, "--run", "run", "--resume")
    assert_one_line_error(done, "grpo.beta: 0.0 != 0.5")


def test_a_report_of_what_is_no_run_is_one_line(grpo, tmp_path):
    assert_one_line_error(grpo("report", tmp_path), "not a run")


@pytest.mark.slow
def test_a_missing_data_folder_is_one_line_and_leaves_nothing_behind(grpo, tmp_path):
    arguments = ["recipes/tiny-cpu.yaml", "problems.source=gsm8k", f"problems.path={tmp_path / 'none'}"]
    assert_one_line_error(grpo("evaluate", *arguments), "problems.path", tmp_path / "none")
    assert_one_line_error(grpo("train", *arguments, "--runs", tmp_path / "runs"), "problems.path")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_an_unknown_reward_is_one_line_and_leaves_nothing_behind(grpo, tmp_path):
    done = grpo("train", "recipes/tiny-cpu.yaml", "rewards=[niceness]", "--runs", tmp_path / "runs")
    assert_one_line_error(done, "niceness", "check_answer")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_evaluate_answers_for_every_problem_and_keeps_an_existing_file(grpo, tmp_path):
    arguments = ["evaluate", "recipes/tiny-cpu.yaml", "problems.test=60", "--output", tmp_path / "out.jsonl", "--json"]
    done = grpo(*arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["n"] == 60
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 60
    assert_one_line_error(grpo(*arguments), tmp_path / "out.jsonl", "--overwrite")


@pytest.mark.slow
def test_damaged_weights_are_one_line(grpo, tmp_path, root):
    shutil.copytree(root / "assets" / "tiny-base", tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    done = grpo("evaluate", "recipes/tiny-cpu.yaml", f"model.path={tmp_path / 'model'}", "problems.test=10")
    assert_one_line_error(done, tmp_path / "model", "copy or convert the model again")


@pytest.mark.slow
@pytest.mark.gsm8k
def test_gsm8k_trains_and_evaluates_on_every_problem(grpo, tmp_path, gsm8k_dir):
    data = ["problems.source=gsm8k", f"problems.path={gsm8k_dir}", "rollout.max_completion_length=8"]
    done = grpo("evaluate", "recipes/tiny-cpu.yaml", *data)
    assert done.returncode == 0, done.stderr
    assert "all 1319 problems" in done.stdout
    assert "cannot solve" in done.stdout
    done = grpo(
        "train", "recipes/tiny-cpu.yaml", *data, "training.steps=2", "training.prompts_per_step=4",
        "problems.test=40", "problems.validation=20", "--runs", tmp_path, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["steps"] == 2
    assert summary["after"]["n"] == 40
