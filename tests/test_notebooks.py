"""The committed notebooks: outputs of a real run of exactly this code, fit to be read without a kernel."""

import ast
import re
from pathlib import Path

import nbformat
import pytest

from grpo_lib import course

each_notebook = pytest.mark.parametrize("name", course.NOTEBOOKS)


def load(root: Path, name: str) -> nbformat.NotebookNode:
    return nbformat.read(root / "notebooks" / f"{name}.ipynb", as_version=4)


@each_notebook
def test_outputs_are_from_this_code(root: Path, name: str) -> None:
    notebook = load(root, name)
    recorded = notebook.metadata.get("grpo", {}).get("source_sha256")
    assert recorded == course.source_sha256(notebook), f"{name}: run `make notebooks` and commit the result"


@each_notebook
def test_all_code_was_executed_in_order(root: Path, name: str) -> None:
    cells = course.code_cells(load(root, name))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell.source.strip() for cell in cells)


@each_notebook
def test_outputs_are_fit_to_be_read(root: Path, name: str) -> None:
    # No errors, no warnings, no paths of the author's machine, no widgets.
    assert course.publication_problems(load(root, name)) == []


@each_notebook
def test_the_kernel_is_the_one_that_setup_registers(root: Path, name: str) -> None:
    assert load(root, name).metadata.kernelspec.name == "grpo-course"


@each_notebook
def test_one_cell_sets_the_parameters(root: Path, name: str) -> None:
    notebook = load(root, name)
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    assert course.parameters_of(notebook) == {"RECIPE": "recipes/tiny-cpu.yaml", "RUN": "course"}


@each_notebook
def test_opens_with_what_you_learn_and_closes_with_what_is_next(root: Path, name: str) -> None:
    text = [cell.source for cell in load(root, name).cells if cell.cell_type == "markdown"]
    assert text[0].startswith("# ") and "what you will learn" in "\n".join(text[:2]).lower()
    assert "what is next" in text[-1].lower()


@each_notebook
def test_cells_are_short_and_ask_for_nothing(root: Path, name: str) -> None:
    for cell in course.code_cells(load(root, name)):
        assert len(cell.source.splitlines()) <= 25
        if not cell.source.lstrip().startswith(("%", "!")):
            calls = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call)]
            assert not [call for call in calls if getattr(call.func, "id", "") in ("input", "getpass")]


@each_notebook
def test_pictures_and_links_are_in_the_repo(root: Path, name: str) -> None:
    for cell in load(root, name).cells:
        if cell.cell_type == "markdown":
            assert not re.search(r"!\[[^\]]*\]\(https?:", cell.source), "a picture is loaded from the web"
            for link in re.findall(r"\]\((?!https?:|#|attachment:)([^)#\s]+)", cell.source):
                # What a run writes is not there before the run.
                assert "runs/" in link or (root / "notebooks" / link).exists(), link
