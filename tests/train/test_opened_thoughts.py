"""A run whose chat template opens the thoughts itself: what is cut off in them is wrong, unpaid and said."""

import shutil

import pytest

from grpo_lib import evaluation
from grpo_lib.common.files import read_jsonl
from grpo_train import checks, pipeline
from grpo_train.recipes import load_recipe
from grpo_train.runs.run_directory import open_run

SMALL = (
    *("training.steps=1", "training.prompts_per_step=4", "training.validate_every=1", "grpo.group_size=4"),
    *("problems.train=200", "problems.validation=16", "problems.test=16", "evaluation.batch_size=16"),
)


@pytest.fixture
def opening_model(root, tmp_path):
    """The tiny model, which writes its answers as ever, with a template that ends in <think>."""
    folder = shutil.copytree(root / "assets" / "tiny-base", tmp_path / "opening")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text("utf-8").rstrip() + "{{ '<think>\\n' }}", encoding="utf-8")
    return folder


@pytest.mark.long(minutes=1)
def test_who_never_ends_to_think_answers_nothing(root, opening_model, tmp_path):
    recipe = load_recipe(root / "recipes" / "tiny-cpu.yaml", [*SMALL, f"model.path={opening_model}"])
    directory = open_run(tmp_path / "run", recipe)
    said = []
    summary = pipeline.run(checks.check(recipe), directory, progress=False, log=said.append)
    records = read_jsonl(directory / "evals" / "before.jsonl")
    assert all(record["prompt"].endswith("<think>\n") for record in records)
    assert any("<answer>" in record["completion"] for record in records)
    assert not any(record[verdict] for record in records for verdict in evaluation.VERDICTS)
    assert summary["before"]["accuracy"] == summary["before"]["format_accuracy"] == 0
    (row,) = [row for row in read_jsonl(directory / "metrics.jsonl") if row["step"] == 1]
    assert row["accuracy"] == row["format"] == row["reward"] == 0
    assert [line for line in said if line.startswith("warning: 16 of 16 completions end inside <think>")]
