"""`grpo …` as a user runs it: exit codes, one line per error, kills."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from grpo_train import cli


@pytest.fixture
def grpo(root, monkeypatch, capsys):
    """Runs a command in this process: most of a command's seconds are its imports."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["grpo", *map(str, arguments)])
        monkeypatch.chdir(root)
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        shown = capsys.readouterr()
        return SimpleNamespace(returncode=end.value.code or 0, stdout=shown.out, stderr=shown.err)

    return run


def assert_one_line_error(done, *words):
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: ")
    for word in words:
        assert str(word) in done.stderr


def test_help_lists_the_commands(grpo, root):
    command = [sys.executable, "-m", "grpo_tpu.cli", "--help"]
    shown = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    for command in ("config", "convert", "train", "evaluate", "report"):
        assert command in shown
        assert grpo(command, "--help").returncode == 0


def test_config_prints_the_resolved_recipe(grpo):
    done = grpo("config", "recipes/tiny-cpu.yaml", "training.steps=2", "--json")
    assert json.loads(done.stdout.splitlines()[-1])["training"]["steps"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["config", "recipes/tiny-cpu.yaml", "training.stepz=2"], ["training.stepz", "steps?"]),
        (["train", "recipes/tiny-cpu.yaml", "training.steps=many"], ["training.steps", "many"]),
        (["train", "recipes/nothing.yaml"], ["recipes/nothing.yaml", "tiny-cpu"]),
        (["train", "recipes/tiny-cpu.yaml", "rewards=[niceness]"], ["niceness", "check_answer"]),
        (
            ["train", "recipes/tiny-cpu.yaml", "problems.source=gsm8k", "problems.path=/none"],
            ["problems.path", "/none"],
        ),
        (["train", "recipes/tiny-cpu.yaml", "--base", "/none"], ["--base /none", "grpo convert"]),
        (["evaluate", "recipes/tiny-cpu.yaml", "problems.source=gsm8k", "problems.path=/none"], ["problems.path"]),
        (["report", "recipes"], ["not a run"]),
    ],
)
def test_an_error_is_one_line_and_leaves_nothing_behind(grpo, tmp_path, arguments, words):
    runs = ["--runs", tmp_path / "runs"] if arguments[0] == "train" else []
    assert_one_line_error(grpo(*arguments, *runs), *words)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_exists_is_not_touched(grpo, tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes.txt").write_text("mine")
    done = grpo("train", "recipes/tiny-cpu.yaml", "--runs", tmp_path, "--run", "kept")
    assert_one_line_error(done, tmp_path / "kept", "not a run", "another run name")
    done = grpo("train", "recipes/tiny-cpu.yaml", "--runs", tmp_path, "--run", "kept", "--overwrite")
    assert_one_line_error(done, "not a run")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["notes.txt"]


def test_a_run_of_another_recipe_is_not_continued_and_what_differs_is_listed(grpo, tmp_path, root):
    from grpo_train.recipes import load_recipe
    from grpo_train.runs.run_directory import open_run

    open_run(tmp_path / "run", load_recipe(root / "recipes" / "tiny-cpu.yaml"))
    done = grpo("train", "recipes/tiny-cpu.yaml", "grpo.beta=0.5", "--runs", tmp_path, "--run", "run")
    assert_one_line_error(done, "grpo.beta: 0.0 != 0.5", "--overwrite", "--run NAME")


@pytest.mark.slow
def test_evaluate_answers_for_every_problem_and_keeps_an_existing_file(grpo, tmp_path):
    arguments = ["evaluate", "recipes/tiny-cpu.yaml", "problems.test=24", "--samples", "2", "--json"]
    done = grpo(*arguments, "--output", tmp_path / "out.jsonl")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["n"], summary["samples"], summary["failures"]) == (24, 2, 0)
    assert summary["pass_at_k"]["2"] > summary["pass_at_k"]["1"] == summary["sampled_accuracy"]
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [record["sample"] for record in records] == [0, 1, 2] * 24
    assert {record["model"] for record in records} == {"assets/tiny-base"}
    assert len({record["settings"] for record in records}) == 1
    assert_one_line_error(grpo(*arguments, "--output", tmp_path / "out.jsonl"), tmp_path / "out.jsonl", "--overwrite")
    again = grpo(*arguments, "--completions", tmp_path / "out.jsonl")
    assert json.loads(again.stdout.splitlines()[-1]) == summary


# --- evaluate, where others answer: no model is loaded ---

WORDS = ["evaluate", "recipes/tiny-cpu.yaml", "problems.test=30", "evaluation.batch_size=5"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--split", "dev"], ["'dev'", "validation"]),
        (["--endpoint", "http://localhost:1"], ["--endpoint", "--model NAME"]),
        (["--model", "qwen"], ["--model", "model.path"]),
        (["--endpoint", "http://localhost:1", "--model", "a", "--completions", "b"], ["--completions", "choose one"]),
        (["--completions", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["--endpoint", "localhost:1", "--model", "a"], ["must read like http://localhost:8000/v1"]),
    ],
)
def test_arguments_that_do_not_go_together_are_one_line(grpo, arguments, words):
    assert_one_line_error(grpo(*WORDS, *arguments), *words)


def test_evaluate_grades_saved_completions(grpo, tmp_path):
    from grpo_lib.problems import words

    problems = words.generate("test", 30, 0)
    rows = [
        {"id": p.id, "completion": f"<reasoning>.</reasoning><answer>{p.answer if i < 20 else 'none'}</answer>"}
        for i, p in enumerate(problems[:28])
    ]
    path, output = tmp_path / "rows.jsonl", tmp_path / "graded.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = grpo(*WORDS, "--completions", path, "--output", output)
    assert done.returncode == 0, done.stderr
    assert "66.7% of all 30 problems solved (95 % interval 48.8% to 80.8%)" in done.stdout
    assert "2 of 30 completions failed and count as wrong" in done.stdout and "pass@" not in done.stdout
    assert len(output.read_text().splitlines()) == 30 and not (tmp_path / "graded.jsonl.partial").exists()
    done = grpo(*WORDS, "--completions", path, "--output", output, "--overwrite", "--json")
    assert json.loads(done.stdout)["failures"] == 2
    assert_one_line_error(grpo(*WORDS, "--completions", path, "--samples", "3"), path, "leave out --samples")

    path.write_text("".join(json.dumps(row) + "\n" for row in rows for _ in range(3)))
    assert_one_line_error(grpo(*WORDS, "--completions", path), path, "--samples 3")
    done = grpo(*WORDS, "--completions", path, "--samples", "3")
    assert "solved, averaged over samples" in done.stdout
    assert "pass@1 66.7%, pass@2 66.7%, pass@3 66.7%, maj@3 66.7%" in done.stdout


def test_evaluate_asks_a_server_and_goes_on_after_a_kill(grpo, tmp_path, root, monkeypatch):
    from test_endpoint import Server

    from grpo_lib.problems import words

    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    output = tmp_path / "served.jsonl"
    with Server() as server:
        server.slow = 0.05
        arguments = [
            *WORDS, "evaluation.max_completion_length=99", "--endpoint", server.url, "--model", "tiny",
            "--samples", "2", "rollout.temperature=0.5", "--output", output,
        ]  # fmt: skip
        command = [sys.executable, "-m", "grpo_tpu.cli", *map(str, arguments)]
        child = subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 60
        while len(server.seen) < 35 and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        child.kill()
        child.communicate()
        partial = tmp_path / "served.jsonl.partial"
        kept = 5 * (len(partial.read_text().splitlines()) - 1)
        assert 30 <= kept < 90 and not output.exists()
        changed = grpo(*[str(argument).replace("=0.5", "=0.6") for argument in arguments])
        assert_one_line_error(changed, partial, "settings differ", "remove it")
        before = len(server.seen)
        done = grpo(*arguments)
        assert done.returncode == 0, done.stderr
        # The server answers twice the first number of a question.
        problems = words.generate("test", 30, 0)
        right = sum(int(p.answer) == 2 * int(re.search(r"\d+", p.question)[0]) for p in problems) / 30
        assert right > 0
        assert f"{right:.1%} of all 30 problems solved" in done.stdout and f"pass@2 {right:.1%}" in done.stdout
        assert len(server.seen) - before == 90 - kept
        assert {body["max_tokens"] for body, _, _ in server.seen} == {99}
        assert {headers["Authorization"] for _, _, headers in server.seen} == {"Bearer sk-mine"}
        assert sum(body["temperature"] == 0.5 for body, _, _ in server.seen[before:]) == 60 - max(0, kept - 30)
        finished, clean = output.read_bytes(), tmp_path / "clean.jsonl"
        server.slow = 0.0
        assert grpo(*arguments[:-1], clean).returncode == 0
        assert finished == clean.read_bytes() and finished.count(b"\n") == 90 and not partial.exists()
    done = grpo(*arguments, "--overwrite")
    assert_one_line_error(done, server.url, "start it")
    assert output.read_bytes() == finished and not partial.exists()


# What a shell runs in the background ignores SIGINT, and so would its children: a Python child listens again.
CTRL_C = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from grpo_train.cli import main
main()
"""


def test_ctrl_c_says_on_one_line_how_to_go_on(root, monkeypatch):
    from test_endpoint import Server

    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    with Server() as server:
        server.slow = 25.0
        arguments = [*WORDS, "--endpoint", server.url, "--model", "tiny"]
        child = subprocess.Popen(
            [sys.executable, "-c", CTRL_C, *arguments],
            cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while len(server.seen) < 5 and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        started = time.monotonic()
        child.send_signal(signal.SIGINT)
        said = child.communicate(timeout=20)[1]
    assert time.monotonic() - started < 10 and child.returncode == 130
    assert said.startswith("interrupted; finished work") and len(said.splitlines()) == 1


@pytest.mark.slow
def test_damaged_weights_are_one_line(grpo, tmp_path, root):
    shutil.copytree(root / "assets" / "tiny-base", tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    done = grpo("evaluate", "recipes/tiny-cpu.yaml", f"model.path={tmp_path / 'model'}", "problems.test=10")
    assert_one_line_error(done, tmp_path / "model", "copy or convert the model again")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.gsm8k
def test_gsm8k_trains_and_evaluates(grpo, tmp_path, gsm8k_dir, converted_base):
    data = ["problems.source=gsm8k", f"problems.path={gsm8k_dir}", "rollout.max_completion_length=8"]
    done = grpo("evaluate", "recipes/tiny-cpu.yaml", *data)
    assert done.returncode == 0, done.stderr
    assert "all 1319 problems" in done.stdout
    done = grpo(
        "train", "recipes/tiny-cpu.yaml", *data, "training.steps=2", "training.prompts_per_step=4",
        "problems.train=400", "problems.test=40", "problems.validation=20", "rollout.max_prompt_length=200",
        "rollout.overlong_prompts=filter", "--base", converted_base, "--runs", tmp_path, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "filtered out of training:" in done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["steps"] == 2
    assert summary["after"]["n"] == 40
