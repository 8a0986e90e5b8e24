"""course: executing notebooks, moving old runs aside, and what may be published. No JAX needed."""

import json
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from grpo_lib import course
from grpo_lib.errors import CourseError


def notebook(*sources: str) -> nbformat.NotebookNode:
    parameters = new_code_cell('RECIPE = "recipes/tiny-cpu.yaml"\nRUN = "course"', metadata={"tags": ["parameters"]})
    return new_notebook(cells=[new_markdown_cell("# title"), parameters, *map(new_code_cell, sources)])


def write_all(folder: Path, **sources: str) -> Path:
    """Write a small notebook for each of the course; `sources` maps its number, as in n03, to a cell that is added."""
    folder.mkdir()
    for name in course.NOTEBOOKS:
        extra = [sources[f"n{name[:2]}"]] if f"n{name[:2]}" in sources else []
        nbformat.write(notebook("shown = RUN.upper()\nprint(shown)", *extra), folder / f"{name}.ipynb")
    return folder


@pytest.fixture(autouse=True)
def no_preload(monkeypatch):
    monkeypatch.setattr(course, "PRELOAD", "json")  # the real one takes seconds, and is not the point here


def test_all_are_executed_with_the_parameters(tmp_path, capsys):
    folder = write_all(tmp_path / "notebooks", **{f"n{name[:2]}": "print(greeting)" for name in course.NOTEBOOKS})
    start = "greeting = 'hello'"
    run_dir = course.run_course("recipes/other.yaml", "trial", folder, tmp_path / "runs", kernel_start=start)
    assert run_dir == tmp_path / "runs" / "trial"
    for name in course.NOTEBOOKS:
        executed = nbformat.read(run_dir / "notebooks" / f"{name}.ipynb", as_version=4)
        cells = course.code_cells(executed)
        assert [cell.execution_count for cell in cells] == [1, 2, 3, 4]
        assert cells[1].source == "RECIPE = 'recipes/other.yaml'\nRUN = 'trial'"
        assert [cell.outputs[0].text for cell in cells[2:]] == ["TRIAL\n", "hello\n"]
    printed = capsys.readouterr().out
    assert all(name in printed for name in course.NOTEBOOKS) and "peak memory" in printed


def test_first_error_stops_and_names_cell_and_exception(tmp_path, capsys):
    folder = write_all(tmp_path / "notebooks", n02="{}['reward']")
    with pytest.raises(course.NotebookFailed, match=r"02_reward_design\.ipynb, cell 3: KeyError: 'reward'") as failure:
        course.run_course("recipes/tiny-cpu.yaml", "course", folder, tmp_path / "runs")
    assert "\n" not in str(failure.value)
    done = sorted(path.stem for path in (tmp_path / "runs" / "course" / "notebooks").iterdir())
    assert done == list(course.NOTEBOOKS[:3])
    kernels = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    assert not [p for p in kernels if "ipykernel" in " ".join(p.cmdline())]


def test_kernel_that_dies_is_one_line(tmp_path):
    folder = write_all(tmp_path / "notebooks", n00="import os; os._exit(9)")
    with pytest.raises(course.NotebookFailed, match=r"00_setup\.ipynb: its kernel stopped"):
        course.run_course("recipes/tiny-cpu.yaml", "course", folder, tmp_path / "runs")


def test_existing_run_is_moved_aside_not_overwritten(tmp_path, capsys):
    run_dir = tmp_path / "course"
    for content in ("first", "second"):
        run_dir.mkdir()
        (run_dir / "metrics.jsonl").write_text(content)
        course.move_aside(run_dir)
    aside = sorted(tmp_path.glob("course-*/metrics.jsonl"))
    assert not run_dir.exists() and {path.read_text() for path in aside} == {"first", "second"}
    assert capsys.readouterr().out.count("was there already") == 2


def test_missing_and_damaged_notebooks_are_named(tmp_path):
    with pytest.raises(CourseError, match=r"00_setup\.ipynb: no such notebook"):
        course.run_course("recipes/tiny-cpu.yaml", "course", tmp_path, tmp_path / "runs")
    (tmp_path / "00_setup.ipynb").write_text("{")
    with pytest.raises(CourseError, match=r"00_setup\.ipynb: not a notebook"):
        course.run_course("recipes/tiny-cpu.yaml", "course", tmp_path, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_hash_follows_the_code_and_nothing_else():
    first, second = notebook("1 + 1"), notebook("1 + 1")
    second.cells[0].source = "# another title"
    second.cells[2].outputs = [new_output("stream", name="stdout", text="2")]
    course.set_parameters(second, {"RUN": "other"})
    assert course.source_sha256(first) == course.source_sha256(second)
    assert course.source_sha256(first) != course.source_sha256(notebook("1 + 2"))


def test_in_place_writes_outputs_and_hash(tmp_path):
    folder = write_all(tmp_path / "notebooks")
    course.run_course("recipes/tiny-cpu.yaml", "course", folder, tmp_path / "runs", in_place=True)
    for name in course.NOTEBOOKS:
        published = nbformat.read(folder / f"{name}.ipynb", as_version=4)
        assert published.metadata["grpo"]["source_sha256"] == course.source_sha256(published)
        assert published.metadata.kernelspec.name == "grpo-course"
        assert course.code_cells(published)[1].outputs[0].text == "COURSE\n"
        assert course.parameters_of(published)["RUN"] == "course"


def test_in_place_publishes_all_or_nothing(tmp_path):
    folder = write_all(tmp_path / "notebooks", n03="import os\nprint(os.path.expanduser('~/somewhere'))")
    before = {path: path.read_text() for path in folder.iterdir()}
    with pytest.raises(CourseError, match=r"03_grpo_training\.ipynb is not published: cell 3 shows a path"):
        course.run_course("recipes/tiny-cpu.yaml", "course", folder, tmp_path / "runs", in_place=True)
    assert {path: path.read_text() for path in folder.iterdir()} == before


def test_what_keeps_outputs_from_being_published(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_notarealtoken")
    outputs = {
        "stderr": new_output("stream", name="stderr", text="a warning"),
        "path": new_output("execute_result", {"text/plain": "PosixPath('/home/someone/x')"}),
        "secret": new_output("stream", name="stdout", text="token hf_notarealtoken"),
        "error": new_output("error", ename="ValueError", evalue="", traceback=[]),
        "widget": new_output("display_data", {"application/vnd.jupyter.widget-view+json": {"model_id": "0"}}),
    }
    for word, output in outputs.items():
        book = notebook("x")
        book.cells[-1].outputs = [output]
        problems = course.publication_problems(book)
        assert len(problems) == 1 and word in problems[0]
    fine = notebook("x")
    fine.cells[-1].outputs = [new_output("display_data", {"image/png": "/home/aaaa", "text/plain": "<Figure>"})]
    assert course.publication_problems(fine) == []


def test_result_is_the_last_five_lines(tmp_path, capsys):
    side = {"accuracy": 0.42, "n": 1000, "lenient_accuracy": 0.55}
    summary = {
        "before": side,
        "after": {**side, "accuracy": 0.9},
        "difference": 0.48,
        "difference_interval": [0.45, 0.51],
        "mcnemar_p": 1e-100,
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    course.print_result(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["before", "after", "interval", "p", "report"]
    assert "42.0%" in lines[0] and "+45.0 to +51.0" in lines[2] and "1.0e-100" in lines[3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "recipes/none.yaml"], "none.yaml"),
        (["--run", "../elsewhere"], "--run '../elsewhere'"),
    ],
)
def test_bad_arguments_are_one_line(arguments, message, capsys):
    assert course.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
