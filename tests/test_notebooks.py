"""The committed notebooks hold the outputs of a real run of exactly this code, fit to be read without a kernel."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
import run_notebooks

from grpo_train.engines import model_files
from grpo_train.recipes import dump_recipe, load_recipe


@pytest.fixture(scope="module", params=run_notebooks.NOTEBOOKS)
def path(request: pytest.FixtureRequest, root: Path) -> Path:
    return root / "notebooks" / f"{request.param}.ipynb"


@pytest.fixture(scope="module")
def notebook(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def test_outputs_are_from_this_code(notebook) -> None:
    recorded = notebook.metadata.get("grpo", {}).get("source_sha256")
    assert recorded == run_notebooks.source_sha256(notebook), "run `make notebooks` and commit the result"


def test_all_code_was_executed_in_order_and_its_outputs_can_be_published(notebook) -> None:
    counts = [cell.execution_count for cell in run_notebooks.code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1))
    assert run_notebooks.publication_problems(notebook) == []


def test_kernel_and_parameters_are_those_of_the_course(notebook) -> None:
    assert notebook.metadata.kernelspec.name == "grpo-course"
    lines = (f'{key} = os.environ.get("GRPO_{key}") or "{value}"' for key, value in run_notebooks.PARAMETERS.items())
    tagged = (cell.source for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    assert list(tagged) == ["\n".join(["import os\n", *lines])]


def test_every_picture_has_an_alternative_text(notebook) -> None:
    outputs = [output for cell in run_notebooks.code_cells(notebook) for output in cell.outputs]
    for kind in ("image/png", "image/svg+xml"):
        pictures = [output for output in outputs if kind in output.get("data", {})]
        assert all(len(output.metadata.get(kind, {}).get("alt", "")) > 20 for output in pictures)


def test_pictures_and_links_are_in_the_repo(notebook, path: Path) -> None:
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert not re.search(r"!\[[^\]]*\]\(https?:", text), "a picture is loaded from the web"
    links = re.findall(r"\]\((?!https?:|#|attachment:)([^)#\s]+)", text)
    assert [link for link in links if "runs/" not in link and not (path.parent / link).exists()] == []


@pytest.mark.parametrize("name", ["x" * 300, "../course", "", ".hidden", "a b"])
def test_a_name_that_no_run_can_have_is_one_line(capsys, name) -> None:
    assert run_notebooks.main(["--run", name]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --run ") and len(said.splitlines()) == 1 and len(said) < 300


@pytest.fixture
def name(root: Path, tmp_path: Path) -> Iterator[str]:
    """Of a run in runs/, which is removed at the end."""
    yield f"test-{tmp_path.name}"
    for folder in (root / "runs").glob(f"test-{tmp_path.name}*"):
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.long
def test_the_evaluation_can_be_read_with_no_training(root: Path, monkeypatch, name) -> None:
    """Notebook 05 and the report, in a clone in which nothing was trained: they read the shipped run."""
    monkeypatch.setattr(run_notebooks, "NOTEBOOKS", ("05_evaluation",))
    run_dir = run_notebooks.run_course("recipes/tiny-cpu.yaml", name, root / "notebooks", root / "runs")
    executed = nbformat.read(run_dir / "notebooks" / "05_evaluation.ipynb", as_version=4)
    text = "".join(o.get("text", "") for cell in run_notebooks.code_cells(executed) for o in cell.outputs)
    assert "this is the shipped run" in text
    assert (root / "runs" / f"{name}-shipped" / "report.html").stat().st_size > 100_000


SMALL = ["training.steps=2", "training.validate_every=2", "evaluation.batch_size=16"]
SIZES = "train: 60, validation: 8, test: 16"
TASKS = f"problems=[{{name: small-numbers, {SIZES}}}, {{name: large-numbers, difficulty: hard, {SIZES}}}]"


@pytest.mark.slow
@pytest.mark.nightly(minutes=7)
@pytest.mark.parametrize(
    ("recipe", "changes", "notebooks"),
    [
        ("lessons/tiny-tasks.yaml", [*SMALL, TASKS], ("02_reward_design", "04_grpo_training", "05_evaluation")),
        # With the real model, which CI brings only after this.
        ("smollm2-135m-cpu.yaml@two-steps", [], run_notebooks.NOTEBOOKS),
    ],
)
def test_the_notebooks_run_with_another_recipe(root, monkeypatch, tmp_path, name, recipe, changes, notebooks) -> None:
    """One of several tasks, in the notebooks that read them, and one of a real language model, in all."""
    monkeypatch.setattr(run_notebooks, "NOTEBOOKS", notebooks)
    chosen = load_recipe(root / "recipes" / recipe, changes)
    if not model_files.local_folder(chosen.model):
        pytest.skip("smollm2: make real-model brings it")
    (tmp_path / "recipe.yaml").write_text(dump_recipe(chosen))
    tiny = chosen.model.path == run_notebooks.TINY_MODEL
    run_dir = run_notebooks.run_course(
        str(tmp_path / "recipe.yaml"), name, root / "notebooks", root / "runs", tiny=tiny
    )
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 2
