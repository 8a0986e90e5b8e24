"""`grpo …` as a user runs it: exit codes, one line per error, Ctrl-C."""

import errno
import fcntl
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import Program, result_of, wait_for

from grpo_lib.common.files import read_jsonl, write_jsonl_atomic
from grpo_lib.problems import words
from grpo_train.cli import options
from grpo_train.cli import train as train_command
from grpo_train.cli.train import step_line
from grpo_train.engines import model_files
from grpo_train.recipes import load_recipe, plan_table
from grpo_train.runs.run_directory import one_at_a_time, open_run

TRAIN = ["train", "recipes/tiny-cpu.yaml"]
SHORT_PROMPTS = "rollout.max_prompt_length=3"
WORDS = ["evaluate", "recipes/tiny-cpu.yaml", "problems.test=30", "evaluation.batch_size=5"]


def assert_one_line_error(done, *words):
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: "), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert [word for word in words if str(word) not in done.stderr] == [], done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["config", "recipes/tiny-cpu.yaml", "training.stepz=2"], ["training.stepz", "steps?"]),
        ([*TRAIN, "training.steps=many"], ["training.steps", "many"]),
        (["config", "recipes/tiny-cpu.yaml", "rewards=[niceness]"], ["niceness"]),
        (["config", "recipes/tiny-cpu.yaml", "model.maxtext_name=qwen3-0.6"], ["near: qwen3-0.6b"]),
        (["config", "recipes/tiny-cpu.yaml", "model.sizes.base_num_decoder_layers=63"], ["layers=63", "says"]),
        (["config", "recipes/tiny-cpu.yaml", "training=3"], ["training=3: it is a section"]),
        (["train", "recipes/nothing.yaml"], ["recipes/nothing.yaml", "tiny-cpu"]),
        ([*TRAIN, "rewards=[niceness]"], ["niceness"]),
        (
            [*TRAIN, "problems.source=gsm8k", "problems.path=/none"],
            ["problems.path", "/none"],
        ),
        ([*TRAIN, "--base", "/none"], ["--base /none"]),
        (["convert", "recipes/tiny-cpu.yaml", "--output", "/etc/hostname/x"], ["/etc/hostname/x", "name another"]),
        (["evaluate", "recipes/tiny-cpu.yaml", "problems.source=gsm8k", "problems.path=/none"], ["problems.path"]),
        (["report", "recipes"], ["not a run"]),
        ([*TRAIN, "--processes", "3"], ["finds by itself", "give --coordinator HOST:PORT and --process 0 to 2"]),
        ([*TRAIN, "--processes", "3", "--process", "1"], ["--coordinator and --process go together"]),
        ([*TRAIN, "--processes", "3", "--coordinator", "a:1"], ["--coordinator and --process go together"]),
        ([*TRAIN, "--process", "1"], ["add --processes N"]),
        ([*TRAIN, "hardware.processes=2", "--processes", "4"], ["--processes 4 and hardware.processes=2 differ"]),
        ([*TRAIN, "--processes", "2", "--process", "2", "--coordinator", "a:1"], ["--process 2", "from 0 to 1"]),
        ([*TRAIN, "--processes", "2", "--process", "0", "--coordinator", "here"], ["'here' is not HOST:PORT"]),
        ([*TRAIN, "--processes", "2", "--process", "0", "--coordinator", "a:65536"], ["is not HOST:PORT"]),
        ([*WORDS, "--split", "dev"], ["'dev'", "validation"]),
        ([*WORDS, "--completions", "nowhere.jsonl"], ["nowhere.jsonl"]),
        ([*WORDS, "--completions", "docs"], ["docs", "Is a directory"]),
        ([*WORDS, "--output", "/proc/nope/answers.jsonl"], ["/proc/nope", "name another"]),
        ([*TRAIN, "--run", "../../escape"], ["--run", "'../../escape' is not a name"]),
        ([*TRAIN, "--run", ""], ["--run ''"]),
        ([*TRAIN, "training.checkpoints=/proc/nope"], ["training.checkpoints /proc/nope", "another folder"]),
        ([*TRAIN, "rollout.engine=vllm"], ["rollout.engine=vllm", "make setup-tpu"]),
        ([*TRAIN, "model.path=nowhere/at-all"], ["model.path=nowhere/at-all", "hub"]),
        ([*WORDS, "--probe", "partial-prompt", "--samples", "2"], ["--probe", "--samples"]),
        # What only the tokenizer knows.
        pytest.param([*TRAIN, SHORT_PROMPTS], [SHORT_PROMPTS, "longest"], marks=pytest.mark.slow),
        # The options.
        (["trian"], ["'trian'", "train"]),
        (["train"], ["RECIPE", "grpo train --help"]),
        ([*WORDS, "--probe", "x"], ["--probe", "partial-prompt"]),
        ([*WORDS, "--samples", "0"], ["--samples", "x>=1"]),
        ([*WORDS, "--nonsense"], ["--nonsense"]),
        ([*TRAIN, "--runs", "/proc/nope"], ["--runs /proc/nope cannot be written"]),
        ([*TRAIN, "--runs", "training.stop_after=8h30m"], ["training.stop_after=8h30m is a change", "folder"]),
        ([*TRAIN, "--runs", "gs://bucket/runs"], ["--runs gs:", "training.checkpoints=gs://"]),
    ],
)
def test_an_error_is_one_line_and_leaves_nothing_behind(grpo, tmp_path, arguments, words):
    command, *rest = arguments
    runs = ["--runs", tmp_path / "runs"] if command == "train" else []
    assert_one_line_error(grpo(command, *runs, *rest), *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["problems", "a=b", "seed/1=2"])
def test_a_folder_of_runs_may_have_any_name_that_is_no_key_with_a_value(grpo, name):
    assert grpo("config", "recipes/tiny-cpu.yaml", "--runs", name).returncode == 0


def test_a_command_to_give_next_names_the_program_that_runs(monkeypatch):
    """On a TPU VM it is not on the PATH."""
    monkeypatch.setattr("sys.argv", [".venv-tpu/bin/grpo", "self-check"])
    assert options.program() == ".venv-tpu/bin/grpo"
    monkeypatch.setattr("sys.argv", ["/somewhere/grpo_train/cli/__main__.py", "self-check"])
    assert options.program() == "grpo"


COMMANDS_WITH_A_MODEL = ["train", "convert", "evaluate", "config", "self-check", "preflight"]


@pytest.mark.parametrize("path", ["./nope", "/tmp/nope", "~/nope", "runs/nowhere/export", ".cache/models/nope", "a//b"])
@pytest.mark.parametrize("command", COMMANDS_WITH_A_MODEL)
def test_a_folder_that_is_not_there_is_never_called_a_name_on_the_hub(grpo, tmp_path, command, path):
    runs = [] if command in ("evaluate", "preflight") else ["--runs", tmp_path / "runs"]
    done = grpo(command, "recipes/tiny-cpu.yaml", f"model.path={path}", *runs)
    assert_one_line_error(done, f"model.path={path} is not a folder here", "give a Hugging Face model directory")
    assert "fetched" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", COMMANDS_WITH_A_MODEL)
def test_before_make_real_model_its_recipe_names_it(grpo, tmp_path, monkeypatch, command):
    monkeypatch.setattr(model_files, "local_folder", lambda _: None)  # on this machine it may have been run
    runs = [] if command in ("evaluate", "preflight") else ["--runs", tmp_path / "runs"]
    done = grpo(command, "recipes/smollm2-135m-cpu.yaml@two-steps", *runs)
    assert_one_line_error(done, "model.path=.cache/models/smollm2-135m-instruct is not a folder here")
    assert done.stderr.endswith("make real-model brings it\n")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_before_anything_is_written(grpo, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    for command in (TRAIN, ["convert", "recipes/tiny-cpu.yaml"]):
        assert_one_line_error(grpo(*command, "--runs", tmp_path / "runs"), "0.0 GB free", "=gs://BUCKET/FOLDER")
    assert list(tmp_path.iterdir()) == []


def test_help_version_and_a_reader_that_has_seen_enough(grpo, root):
    assert grpo("train", "-h").stdout == grpo("train", "--help").stdout != ""
    assert grpo("--version").stdout.strip() == importlib.metadata.version("grpo-hands-on")
    assert grpo().returncode == 2
    done = subprocess.run(
        f"{sys.executable} -m grpo_train.cli config recipes/tiny-cpu.yaml | head -n 1",
        shell=True, cwd=root, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("name: tiny-cpu\n", "")


def test_a_run_that_exists_is_not_touched(grpo, tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes.txt").write_text("mine")
    command = [*TRAIN, "--runs", tmp_path, "--run", "kept"]
    assert_one_line_error(grpo(*command), tmp_path / "kept", "not a run", "another run name")
    assert_one_line_error(grpo(*command, "--overwrite"), "not a run")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["notes.txt"]


def test_a_step_on_the_terminal(root):
    row = {
        "step": 1, "reward": 0.5, "accuracy": 0.25, "format": 1.0, "completions/mean_length": 12.0, "loss": None,
        "seconds_rollout": 1.0, "seconds_update": 2.0, "seconds": 3.5, "tasks/sums/accuracy": 0.125,
    }  # fmt: skip
    assert step_line(row, load_recipe(root / "recipes" / "tiny-cpu.yaml")) == (
        "reward 0.500  accuracy 25.0%  format 100.0%  length 12.0  loss nan  rollout 1.00  update 2.00  seconds 3.50"
    )
    tasks = load_recipe(root / "recipes" / "tiny-cpu.yaml", ["problems=[{name: sums}]", "grpo.beta=0.1"])
    shown = step_line(row | {"kl": 0.001, "validation_accuracy": 0.75}, tasks)
    assert "  sums 12.5%  " in shown
    assert "  kl 0.001  " in shown
    assert shown.endswith("  validation 75.0%")


def test_a_finished_run_says_so_and_is_not_trained_again(grpo, tmp_path, root):
    recipe = load_recipe(root / "recipes" / "tiny-cpu.yaml")
    run = open_run(tmp_path / "run", recipe)
    derived = [f"# {line}".rstrip() for line in plan_table(recipe).splitlines()]
    assert (run / "recipe.yaml").read_text().splitlines()[-len(derived) :] == derived
    (run / "export").mkdir()
    for file in ("export/config.json", "report.html"):
        (run / file).write_text("{}")
    (run / "summary.json").write_text(json.dumps({"before": {"accuracy": 0.25}, "after": {"accuracy": 0.5}}))
    done = grpo(*TRAIN, "--runs", tmp_path, "--run", "run")
    assert done.returncode == 0
    assert "finished: 25.0% -> 50.0%" in done.stdout
    assert "--overwrite" in done.stdout
    assert sorted(path.name for path in run.iterdir()) == [
        "environment.json", "export", "recipe.yaml", "report.html", "summary.json"
    ]  # fmt: skip


@pytest.mark.parametrize("content", ["", "{", "[1]", "{}", '{"before": 1, "after": 2}'])
def test_a_run_with_a_damaged_summary_is_not_finished_and_goes_on(grpo, tmp_path, root, monkeypatch, content):
    """It writes its summary again; what `train` does then is not done here."""
    run = open_run(tmp_path / "run", load_recipe(root / "recipes" / "tiny-cpu.yaml"))
    (run / "export").mkdir()
    for file, text in {"export/config.json": "{}", "report.html": "", "summary.json": content}.items():
        (run / file).write_text(text)
    went_on = []
    monkeypatch.setattr(train_command, "_train", lambda *arguments: went_on.append(arguments[1]))
    done = grpo(*TRAIN, "--runs", tmp_path, "--run", "run")
    assert (done.returncode, done.stderr, went_on) == (0, "", [tmp_path / "run"])


HOLD = """
import sys, time
from pathlib import Path
from grpo_train.runs.run_directory import one_at_a_time
run = Path(sys.argv[1])
with one_at_a_time(run), one_at_a_time(run.parent / "." / ".." / run.parent.name / run.name):  # of one process, twice
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_second_training_in_a_run_is_refused_until_the_first_has_ended_or_was_killed(grpo, tmp_path, root):
    run = open_run(tmp_path / "run", load_recipe(root / "recipes" / "tiny-cpu.yaml"))
    first = Program(HOLD, run, output=tmp_path / "said.txt")
    assert wait_for(lambda: first.said() == "held\n")
    for overwrite in ([], ["--overwrite"]):
        done = grpo(*TRAIN, "--runs", tmp_path, "--run", "run", *overwrite)
        assert_one_line_error(done, "another process", run, "--run NAME")
    assert sorted(path.name for path in run.iterdir()) == ["environment.json", "recipe.yaml"]
    first.kill()
    first.join()
    with one_at_a_time(run):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_shared_disk_without_locks_can_be_trained_on(tmp_path, monkeypatch, number):
    """As NFS without its lock daemon, or a bucket's mount, answers."""

    def refuse(*_):
        raise OSError(number, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with one_at_a_time(tmp_path / "run"):
        pass


def test_a_run_of_another_recipe_is_not_continued_and_what_differs_is_listed(grpo, tmp_path, root):
    open_run(tmp_path / "run", load_recipe(root / "recipes" / "tiny-cpu.yaml"))
    done = grpo(*TRAIN, "grpo.beta=0.5", "--runs", tmp_path, "--run", "run")
    assert_one_line_error(done, "grpo.beta: 0.0 != 0.5", "--overwrite", "--run run-2")


@pytest.mark.slow
def test_evaluate_answers_for_every_problem_and_keeps_an_existing_file(grpo, tmp_path):
    arguments = ["evaluate", "recipes/tiny-cpu.yaml", "problems.test=24", "--samples", "2", "--json"]
    summary = result_of(grpo(*arguments, "--output", tmp_path / "out.jsonl"))
    assert (summary["n"], summary["samples"], summary["failures"]) == (24, 2, 0)
    assert summary["pass_at_k"]["2"] > summary["pass_at_k"]["1"] == summary["sampled_accuracy"]
    assert [record["sample"] for record in read_jsonl(tmp_path / "out.jsonl")] == [0, 1, 2] * 24
    assert_one_line_error(grpo(*arguments, "--output", tmp_path / "out.jsonl"), tmp_path / "out.jsonl", "--overwrite")
    assert result_of(grpo(*arguments, "--completions", tmp_path / "out.jsonl")) == summary


@pytest.mark.slow
def test_the_probe_asks_with_the_beginning_of_each_question(grpo, tmp_path):
    """The tiny model has read no question to its end as its own text: what it goes on with is an answer."""
    arguments = ["evaluate", "recipes/tiny-cpu.yaml", "problems.test=24", "--probe", "partial-prompt", "--json"]
    found = result_of(grpo(*arguments, "--output", tmp_path / "probe.jsonl"))
    assert (found["n"], found["exact"], found["failures"]) == (24, 0, 0)
    assert found["words"] < 0.5
    asked = {problem.id: problem.question for problem in words.generate("test", 24, 0)}
    for record in read_jsonl(tmp_path / "probe.jsonl"):
        assert record["prompt"] == record["question"]
        assert f"{record['question']} {record['solution']}" == " ".join(asked[record["id"]].split())
        assert 0.5 < len(record["question"].split()) / len(asked[record["id"]].split()) < 0.7


# --- evaluate, where another program has answered: no model is loaded ---


def test_evaluate_grades_saved_completions(grpo, tmp_path):
    rows = [
        {"id": p.id, "completion": f"<reasoning>.</reasoning><answer>{p.answer if i < 20 else 'none'}</answer>"}
        for i, p in enumerate(words.generate("test", 30, 0)[:28])
    ]
    path = tmp_path / "rows.jsonl"
    output = tmp_path / "graded.jsonl"
    write_jsonl_atomic(path, rows)
    graded = result_of(grpo(*WORDS, "--completions", path, "--output", output, "--json"))
    assert (graded["n"], graded["failures"], graded["accuracy"]) == (30, 2, pytest.approx(2 / 3))  # two are missing
    said = grpo(*WORDS, "--completions", path).stdout
    assert all(text in said for text in ("66.7% of all 30", f"within 10 % {graded['partial_accuracy']:.1%}, format "))
    assert len(output.read_text().splitlines()) == 30
    assert not (tmp_path / "graded.jsonl.partial").exists()
    assert_one_line_error(grpo(*WORDS, "--completions", path, "--samples", "3"), path, "--samples")

    assert said.startswith("2 of 30 completions failed")  # before the number that they make smaller
    write_jsonl_atomic(path, rows[:14])
    done = grpo(*WORDS, "--completions", path, "--output", tmp_path / "few.jsonl")
    assert_one_line_error(done, "completions of 14 of the 30 problems", "problems.test")
    assert not (tmp_path / "few.jsonl").exists()

    write_jsonl_atomic(path, [row for row in rows for _ in range(3)])
    assert_one_line_error(grpo(*WORDS, "--completions", path), path, "--samples 3")
    graded = result_of(grpo(*WORDS, "--completions", path, "--samples", "3", "--json"))
    assert graded["maj_at_k"] == graded["pass_at_k"]["3"] == pytest.approx(2 / 3)


def test_evaluate_is_told_of_thoughts_that_a_template_opened(grpo, tmp_path):
    path = tmp_path / "rows.jsonl"
    write_jsonl_atomic(
        path, [{"id": p.id, "completion": f"<answer>{p.answer}</answer>"} for p in words.generate("test", 10, 0)]
    )
    arguments = ["evaluate", "recipes/tiny-cpu.yaml", "problems.test=10", "--json"]
    graded = [result_of(grpo(*arguments, "--completions", path, *more))["accuracy"] for more in ([], ["--thinking"])]
    assert graded == [1, 0]
    assert_one_line_error(grpo(*arguments, "--thinking"), "--completions")


@pytest.mark.slow
def test_the_tiny_model_on_other_problems_says_why_it_solves_none(grpo, root):
    gsm8k = ["evaluate", "recipes/tiny-cpu.yaml", "problems.source=gsm8k", "problems.test=3"]
    gsm8k += [f"problems.path={root / 'tests/lib/gsm8k_fixture'}", "rollout.max_completion_length=8"]
    assert "tiny model" in grpo(*gsm8k).stdout.splitlines()[-1]
    assert set(result_of(grpo(*gsm8k, "--json"))) >= {"accuracy", "n"}
    assert "tiny model" not in grpo("evaluate", "recipes/tiny-cpu.yaml", "problems.test=12").stdout


# What a shell runs in the background ignores SIGINT, and so would its children: a Python child listens again.
CTRL_C = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from grpo_train.cli import main
main()
"""


def test_ctrl_c_says_on_one_line_how_to_go_on(root):
    child = subprocess.Popen(
        [sys.executable, "-c", CTRL_C, *WORDS, "--completions", "/dev/stdin"],
        cwd=root, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    child.stdin.write("\n" * 2**20)  # more than a pipe holds, so now the command reads, and waits for the rest
    child.send_signal(signal.SIGINT)
    said = child.communicate(timeout=20)[1]
    assert child.returncode == 130
    assert said.startswith("interrupted")
    assert len(said.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.long
def test_an_interrupted_evaluation_goes_on_with_a_copy_of_the_model(grpo, tmp_path, root):
    """What a second download of the model looks like: the same files, written at another time."""
    model = Path(shutil.copytree(root / "assets" / "tiny-base", tmp_path / "model"))
    output = tmp_path / "graded.jsonl"
    command = [
        "evaluate", "recipes/tiny-cpu.yaml", f"model.path={model}", "problems.test=60", "evaluation.batch_size=5",
        "--output", str(output),
    ]  # fmt: skip
    child = subprocess.Popen([sys.executable, "-c", CTRL_C, *command], cwd=root, stderr=subprocess.DEVNULL)
    partial = output.with_name("graded.jsonl.partial")
    wait_until = time.monotonic() + 120
    while not (partial.exists() and partial.read_text().count("\n") > 5) and time.monotonic() < wait_until:
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    assert child.wait(60) == 130
    kept = partial.read_text().count("\n")
    assert kept > 5
    for path in model.iterdir():
        os.utime(path, (0, 0))
    done = grpo(*command)
    assert done.returncode == 0, done.stderr
    assert output.read_text().count("\n") >= 60


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
    assert result_of(grpo("evaluate", "recipes/tiny-cpu.yaml", *data, "--json"))["n"] == 1319
    summary = result_of(grpo(
        *TRAIN, *data, "training.steps=2", "training.prompts_per_step=4",
        "problems.train=400", "problems.test=40", "problems.validation=20", "rollout.max_prompt_length=200",
        "rollout.overlong_prompts=filter", "--base", converted_base, "--runs", tmp_path, "--json",
    ))  # fmt: skip
    assert (summary["steps"], summary["after"]["n"]) == (2, 40)
