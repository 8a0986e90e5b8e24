"""course: executing notebooks, moving old runs aside, and what may be published. No JAX needed."""

from pathlib import Path

import nbformat
import psutil
import pytest
import rehearse
import run_notebooks
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from grpo_lib.common.errors import CourseError


def notebook(*sources: str) -> nbformat.NotebookNode:
    parameters = new_code_cell(
        'import os\n\nRECIPE = os.environ["GRPO_RECIPE"]\nRUN = os.environ["GRPO_RUN"]',
        metadata={"tags": ["parameters"]},
    )
    about_tiny = new_markdown_cell("its habits", metadata={"tags": ["tiny-model"]})
    cells = [new_markdown_cell("# title"), about_tiny, parameters, *map(new_code_cell, sources)]
    kernel = {"name": "grpo-course", "display_name": "GRPO course", "language": "python"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})


def write_all(folder: Path, *sources: str) -> Path:
    """Write a small notebook for each of the course, and these cells."""
    (folder / "further").mkdir(parents=True)
    for name in run_notebooks.NOTEBOOKS:
        nbformat.write(notebook("shown = RUN.upper()\nprint(shown)", *sources), folder / f"{name}.ipynb")
    return folder


@pytest.fixture(autouse=True)
def a_short_course(monkeypatch):
    monkeypatch.setattr(run_notebooks, "PRELOADED", dict.fromkeys(run_notebooks.NOTEBOOKS, "json"))  # takes no time
    monkeypatch.setattr(run_notebooks, "NOTEBOOKS", (*run_notebooks.NOTEBOOKS[:2], run_notebooks.NOTEBOOKS[-1]))
    monkeypatch.setenv("GRPO_RUN", "the/environment")  # a default of the tool, but not for the kernels of a course


def test_all_are_executed_with_the_parameters(tmp_path):
    run_dir = run_notebooks.run_course(
        "recipes/other.yaml", "trial", write_all(tmp_path / "notebooks", "print('hello')"), tmp_path / "runs"
    )
    assert run_dir == tmp_path / "runs" / "trial"
    for name in run_notebooks.NOTEBOOKS:
        executed = nbformat.read(run_dir / "notebooks" / f"{name}.ipynb", as_version=4)
        cells = run_notebooks.code_cells(executed)
        assert cells[1].source == '# Parameters\nRECIPE = "recipes/other.yaml"\nRUN = "trial"\n'
        assert [cell.outputs[0].text for cell in cells[2:]] == ["TRIAL\n", "hello\n"]


def test_text_about_the_tiny_model_is_removed_for_another_one(tmp_path):
    folder = write_all(tmp_path / "notebooks")
    run_dir = run_notebooks.run_course("recipes/other.yaml", "trial", folder, tmp_path / "runs", tiny=False)
    executed = nbformat.read(run_dir / "notebooks" / "00_setup.ipynb", as_version=4)
    assert [cell.source for cell in executed.cells if cell.cell_type == "markdown"] == ["# title"]


@pytest.mark.parametrize(
    ("code", "words"),
    [("{}['reward']", r"00_setup\.ipynb, cell 3: KeyError: 'reward'"), ("import os; os._exit(9)", r"00_setup\.ipynb")],
)
def test_first_error_stops_and_names_cell_and_exception(tmp_path, code, words):
    with pytest.raises(run_notebooks.NotebookFailed, match=words) as failure:
        run_notebooks.run_course(
            "recipes/tiny-cpu.yaml", "course", write_all(tmp_path / "notebooks", code), tmp_path / "runs"
        )
    assert "\n" not in str(failure.value)
    kernels = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    assert not [p for p in kernels if "ipykernel" in " ".join(p.cmdline())]  # nor the one that was waiting


def test_existing_run_is_moved_aside_not_overwritten(tmp_path):
    run_dir = tmp_path / "course"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text("first")
    run_notebooks.move_aside(run_dir)
    (aside,) = tmp_path.glob("course-*/metrics.jsonl")
    assert not run_dir.exists()
    assert aside.read_text() == "first"


def test_hash_follows_the_code_and_nothing_else():
    first, second = notebook("1 + 1"), notebook("1 + 1")
    second.cells[0].source = "# another title"
    second.cells[2].outputs = [new_output("stream", name="stdout", text="2")]
    assert run_notebooks.source_sha256(first) == run_notebooks.source_sha256(second)
    assert run_notebooks.source_sha256(first) != run_notebooks.source_sha256(notebook("1 + 2"))


def test_in_place_writes_outputs_and_hash(tmp_path):
    folder = write_all(tmp_path / "notebooks")
    run_notebooks.run_course("recipes/tiny-cpu.yaml", "course", folder, tmp_path / "runs", in_place=True)
    for name in run_notebooks.NOTEBOOKS:
        published = nbformat.read(folder / f"{name}.ipynb", as_version=4)
        assert published.metadata["grpo"]["source_sha256"] == run_notebooks.source_sha256(published)
        assert run_notebooks.code_cells(published)[1].outputs[0].text == "COURSE\n"
        assert not any("papermill" in cell.metadata for cell in [published, *published.cells])
        assert len(published.cells) == 4  # no injected parameters, and nothing is left out


def test_in_place_publishes_all_or_nothing(tmp_path):
    folder = write_all(tmp_path / "notebooks")
    before = {path: path.read_text() for path in folder.glob("*.ipynb")}
    executed = {path.stem: nbformat.read(path, as_version=4) for path in sorted(before)}
    executed["01_checkpoint_conversion"].cells[-1].outputs = [new_output("stream", text="/home/someone/x")]
    with pytest.raises(CourseError, match=r"01_checkpoint_conversion\.ipynb is not published: cell None shows a path"):
        run_notebooks.publish(executed, folder)
    assert {path: path.read_text() for path in folder.glob("*.ipynb")} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "recipes/none.yaml", "--run", "course"], "none.yaml"),
        (["--run", "../elsewhere"], "--run '../elsewhere'"),
        ([], "--run 'the/environment'"),
    ],
)
def test_bad_arguments_and_variables_are_one_line(arguments, message, capsys):
    assert run_notebooks.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


CHOICE = "kind = 'long' if len(RUN) > 6 else 'short'\nfor letter in 'ab':\n    if letter == 'a':\n        print(kind)"


def test_a_notebook_that_goes_another_way_is_found_by_its_line(tmp_path):
    folder = write_all(tmp_path / "notebooks", CHOICE)
    run_notebooks.run_course("recipes/tiny-cpu.yaml", "course", folder, tmp_path / "runs", in_place=True)
    committed = folder / "00_setup.ipynb"
    ways = list(nbformat.read(committed, as_version=4).metadata.grpo.ways.values())
    assert ways == [[[1, False], [3, False], [3, True]]]

    run_dir = run_notebooks.run_course("recipes/tiny-cpu.yaml", "a-rehearsal", folder, tmp_path / "runs")
    executed = nbformat.read(run_dir / "notebooks" / "00_setup.ipynb", as_version=4)
    [other] = rehearse.other_ways(committed, executed)
    assert "kind = 'long' if len(RUN) > 6" in other and other.endswith("(yes; tiny recipe: no)")


def test_the_way_of_a_function_belongs_to_the_cell_that_has_it(tmp_path):
    late = "# one\n# two\ndef kind():\n    return 'long' if len(RUN) > 6 else 'short'"
    folder = write_all(tmp_path / "notebooks", late, "print(kind())")
    run_notebooks.run_course("recipes/tiny-cpu.yaml", "course", folder, tmp_path / "runs", in_place=True)
    committed = folder / "00_setup.ipynb"
    run_dir = run_notebooks.run_course("recipes/tiny-cpu.yaml", "a-rehearsal", folder, tmp_path / "runs")
    executed = nbformat.read(run_dir / "notebooks" / "00_setup.ipynb", as_version=4)
    [other] = rehearse.other_ways(committed, executed)
    assert "return 'long' if len(RUN) > 6" in other


def test_the_overrides_reach_the_notebooks(tmp_path):
    folder = write_all(tmp_path / "notebooks", "import os\nprint(os.environ['GRPO_OVERRIDES'], OVERRIDES)")
    run_dir = run_notebooks.run_course(
        "recipes/tiny-cpu.yaml", "course", folder, tmp_path / "runs", overrides="training.steps=2 seed=1"
    )
    executed = nbformat.read(run_dir / "notebooks" / "00_setup.ipynb", as_version=4)
    assert executed.cells[-1].outputs[0].text == "training.steps=2 seed=1 training.steps=2 seed=1\n"
