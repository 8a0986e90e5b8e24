"""`grpo …` as a person runs it: real processes, exit codes, one line per error."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time

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
    assert_one_line_error(done, tmp_path / "kept", "not a run", "another run name")
    done = grpo("train", "recipes/tiny-cpu.yaml", "--runs", tmp_path, "--run", "kept", "--overwrite")
    assert_one_line_error(done, "not a run")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["notes.txt"]


def test_a_run_of_another_recipe_is_not_continued_and_what_differs_is_listed(grpo, tmp_path, root):
    from grpo_lib.recipes import load_recipe
    from grpo_lib.runs import open_run

    open_run(tmp_path / "run", load_recipe(root / "recipes" / "tiny-cpu.yaml"))
    done = grpo("train", "recipes/tiny-cpu.yaml", "grpo.beta=0.5", "--runs", tmp_path, "--run", "run")
    assert_one_line_error(done, "grpo.beta: 0.0 != 0.5", "--overwrite", "--run NAME")


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
    arguments = ["evaluate", "recipes/tiny-cpu.yaml", "problems.test=60", "--samples", "2", "--json"]
    done = grpo(*arguments, "--output", tmp_path / "out.jsonl")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["n"], summary["samples"], summary["failures"]) == (60, 2, 0)
    assert summary["pass_at_k"]["2"] > summary["pass_at_k"]["1"] == summary["sampled_accuracy"]
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [record["sample"] for record in records] == [0, 1, 2] * 60
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
        (["--split", "train"], ["--split train"]),
        (["--endpoint", "http://localhost:1"], ["--endpoint", "--model NAME"]),
        (["--model", "qwen"], ["--model", "model.path"]),
        (["--temperature", "0.7"], ["--temperature", "--samples"]),
        (["--samples", "2", "--temperature", "0"], ["--temperature"]),
        (["--endpoint", "http://localhost:1", "--model", "a", "--completions", "b"], ["--completions", "choose one"]),
        (["--completions", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["--endpoint", "localhost:1", "--model", "a"], ["the address must read like"]),
        (["--extra", "{}"], ["--extra", "--endpoint"]),
        (["--endpoint", "http://localhost:1", "--model", "a", "--extra", "{top_k: 1}"], ["--extra is not JSON"]),
        (["--endpoint", "http://localhost:1", "--model", "a", "--extra", "[1]"], ["--extra is not a JSON object"]),
        (["--endpoint", "http://localhost:1", "--model", "a", "--extra", '{"n": 2}'], ["extra must not hold n,"]),
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
    assert "solved, in the mean of the samples" in done.stdout
    assert "pass@1 66.7%, pass@2 66.7%, pass@3 66.7%, maj@3 66.7%" in done.stdout


def test_evaluate_asks_a_server_and_goes_on_after_a_kill(grpo, tmp_path, root, monkeypatch):
    from test_sources import Server

    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setenv("MY_KEY", "sk-mine")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-other")
    output = tmp_path / "served.jsonl"
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        server.slow = 0.02
        arguments = [
            *WORDS, "evaluation.max_completion_length=99", "--endpoint", server.url, "--model", "tiny",
            "--samples", "2", "--temperature", "0.5", "--output", output, "--extra", '{"top_k": -1}',
            "--api-key-env", "MY_KEY",
        ]  # fmt: skip
        command = [sys.executable, "-m", "grpo_lib.cli", *map(str, arguments)]
        child = subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 60
        while len(server.seen) < 35 and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        child.kill()
        child.communicate()
        partial = tmp_path / "served.jsonl.partial"
        kept = 5 * (len(partial.read_text().splitlines()) - 1)
        assert 30 <= kept < 90 and not output.exists()
        for old, new in (("0.5", "0.6"), ('{"top_k": -1}', '{"top_k": 5}')):
            changed = grpo(*[new if argument == old else argument for argument in arguments])
            assert_one_line_error(changed, partial, "settings differ", "remove it")
        before = len(server.seen)
        done = grpo(*arguments)
        assert done.returncode == 0, done.stderr
        assert "0.0% of all 30 problems solved" in done.stdout and "pass@2 0.0%" in done.stdout  # it always says 2
        assert len(server.seen) - before == 90 - kept
        assert {(body["max_tokens"], body["top_k"]) for body, _, _ in server.seen} == {(99, -1)}
        assert {headers["Authorization"] for _, _, headers in server.seen} == {"Bearer sk-mine"}
        assert sum(body["temperature"] == 0.5 for body, _, _ in server.seen[before:]) == 60 - max(0, kept - 30)
        server.shutdown()
    finished = output.read_bytes()
    assert finished.count(b"\n") == 90 and not partial.exists()
    done = grpo(*arguments, "--overwrite")
    assert_one_line_error(done, server.url, "start it")
    assert output.read_bytes() == finished and not partial.exists()


def test_ctrl_c_says_on_one_line_how_to_go_on(monkeypatch):
    from test_sources import Server, interrupted

    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        server.slow = 25.0
        arguments = [*WORDS, "--endpoint", server.url, "--model", "tiny"]
        said, code, seconds = interrupted("from grpo_lib.cli import main; main()", arguments, server, requests=5)
        assert seconds < 3 and code == 130
        assert said.startswith("interrupted; what") and len(said.splitlines()) == 1
        server.shutdown()


def test_other_files_of_a_model_have_another_digest(tmp_path):
    from grpo_lib import cli

    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1" * 9)
    os.utime(weights, ns=(1, 1))
    digests = [cli._digest(tmp_path)]
    (tmp_path / ".DS_Store").write_text("nothing")
    assert cli._digest(tmp_path) == digests[0]
    os.utime(weights, ns=(1, 2))  # as many other bytes
    digests.append(cli._digest(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    digests.append(cli._digest(tmp_path))
    assert len(set(digests)) == 3


@pytest.mark.slow
def test_damaged_weights_are_one_line(grpo, tmp_path, root):
    shutil.copytree(root / "assets" / "tiny-base", tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    done = grpo("evaluate", "recipes/tiny-cpu.yaml", f"model.path={tmp_path / 'model'}", "problems.test=10")
    assert_one_line_error(done, tmp_path / "model", "copy or convert the model again")


@pytest.mark.slow
@pytest.mark.gsm8k
@pytest.mark.skipif(not os.environ.get("GRPO_GSM8K"), reason="training and evaluation on GSM8K: set GRPO_GSM8K=1")
def test_gsm8k_trains_and_evaluates(grpo, tmp_path, gsm8k_dir, converted_base):
    data = ["problems.source=gsm8k", f"problems.path={gsm8k_dir}", "rollout.max_completion_length=8"]
    done = grpo("evaluate", "recipes/tiny-cpu.yaml", *data)
    assert done.returncode == 0, done.stderr
    assert "all 1319 problems" in done.stdout
    assert "cannot solve" in done.stdout
    done = grpo(
        "train", "recipes/tiny-cpu.yaml", *data, "training.steps=2", "training.prompts_per_step=4",
        "problems.train=400", "problems.test=40", "problems.validation=20", "rollout.max_prompt_length=200",
        "rollout.overlong_prompts=skip", "--base", converted_base, "--runs", tmp_path, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "left out of training:" in done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["steps"] == 2
    assert summary["after"]["n"] == 40
