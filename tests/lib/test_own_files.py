"""Problems from files of the user's: what is read, what is counted, and one line for whatever is wrong."""

import csv
import io
import json

import pytest

from grpo_lib.common.errors import CourseError
from grpo_lib.problems import describe_filtering, load_problems
from grpo_train.recipes import load_recipe
from grpo_train.recipes.schema import ProblemsRecipe
from grpo_train.runs.run_directory import open_run

ROWS = [{"prompt": f"What is {n} plus 2?", "target": str(n + 2)} for n in range(40)]
COLUMNS = {"question": "prompt", "answer": "target"}


def recipe(path, **fields) -> ProblemsRecipe:
    return ProblemsRecipe(source="file", path=str(path), columns=COLUMNS, **fields)


def as_csv(rows, delimiter=",") -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, rows[0], delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_jsonl(rows) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def write_parquet(path, rows):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def splits(problems) -> dict[str, list]:
    return {split: load_problems(problems, split) for split in ("train", "validation", "test")}


def write(path):
    """ROWS as a file of this name."""
    if path.suffix == ".parquet":
        return write_parquet(path, ROWS)
    text = as_jsonl(ROWS) if path.suffix == ".jsonl" else as_csv(ROWS, ";" if path.stem == "semicolons" else ",")
    if path.stem == "windows":
        return path.write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
    return path.write_text(text, encoding="utf-8")


NAMES = ("own.csv", "semicolons.csv", "windows.csv", "own.jsonl", "windows.jsonl", "own.parquet")


@pytest.mark.parametrize("name", NAMES)
def test_one_file_is_cut_into_three_splits_that_share_nothing(tmp_path, name):
    write(tmp_path / name)
    found = splits(recipe(tmp_path / name))
    assert [len(part) for part in found.values()] == [33, 3, 4]
    pairs = {(problem.question, problem.answer) for part in found.values() for problem in part}
    assert pairs == {(row["prompt"], row["target"]) for row in ROWS}
    assert len({problem.id for part in found.values() for problem in part}) == 40
    said = describe_filtering(recipe(tmp_path / name))
    assert "40 rows, 40 problems: 0 duplicates removed" in said and "4 of them held out as test problems" in said
    odd = "byte order mark taken off, Windows line ends read"
    assert (odd in said) == name.startswith("windows")


def test_a_folder_has_a_file_of_each_and_test_questions_leave_train(tmp_path):
    (tmp_path / "train.csv").write_text(as_csv(ROWS), encoding="utf-8")
    leaked = [ROWS[n] | {"prompt": f" {ROWS[n]['prompt']}".replace(" plus", "  plus")} for n in (3, 7)]
    (tmp_path / "test.jsonl").write_text(as_jsonl([*leaked, {"prompt": "What is 90 plus 2?", "target": 92}]))
    found = splits(recipe(tmp_path))
    assert [len(part) for part in found.values()] == [35, 3, 3]
    trained = {problem.question for split in ("train", "validation") for problem in found[split]}
    assert trained == {row["prompt"] for row in ROWS} - {ROWS[3]["prompt"], ROWS[7]["prompt"]}
    assert "2 left out of training, because they are test problems" in describe_filtering(recipe(tmp_path))
    elsewhere = recipe(tmp_path / "train.csv", test_path=str(tmp_path / "test.jsonl"))
    assert splits(elsewhere) == found


def test_questions_of_gsm8ks_test_file_leave_its_train_file(tmp_path):
    lines = [json.dumps({"question": f"What is {n} plus 2?", "answer": f"It is.\n#### {n + 2}"}) for n in range(40)]
    (tmp_path / "train.jsonl").write_bytes("\r\n".join([*lines, *lines[:3]]).encode("utf-8-sig"))
    (tmp_path / "test.jsonl").write_text("\n".join(lines[:10]), encoding="utf-8")
    own = ProblemsRecipe(source="gsm8k", path=str(tmp_path))
    found = splits(own)
    assert [len(part) for part in found.values()] == [27, 3, 10]
    assert not {p.question for p in found["test"]} & {p.question for p in found["train"] + found["validation"]}
    said = describe_filtering(own)
    assert "train.jsonl: 43 rows, 40 problems: 3 duplicates removed" in said
    assert "byte order mark taken off, Windows line ends read; " in said
    assert said.endswith("10 left out of training, because they are test problems")


def test_gsm8ks_own_files_have_nothing_to_say_and_a_question_with_two_answers_is_refused(tmp_path):
    lines = [json.dumps({"question": f"What is {n} plus 2?", "answer": f"It is.\n#### {n + 2}"}) for n in range(40)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines[10:]), encoding="utf-8")
    (tmp_path / "test.jsonl").write_text("\n".join(lines[:10]), encoding="utf-8")
    own = ProblemsRecipe(source="gsm8k", path=str(tmp_path))
    assert describe_filtering(own) is None
    other = lines[12].replace("#### 14", "#### 15")
    (tmp_path / "train.jsonl").write_text("\n".join([*lines[10:], other]), encoding="utf-8")
    with pytest.raises(CourseError, match=r"train.jsonl, line 31: the answer is '15', but .*line 3 gives"):
        load_problems(own, "train")
    skipped = own.model_copy(update={"conflicts": "skip"})
    assert "31 rows, 29 problems: 1 duplicates removed, 1 problems with two answers" in describe_filtering(skipped)
    assert len(load_problems(skipped, "train")) == 27


def test_duplicates_and_conflicts_are_counted(tmp_path):
    rows = [*ROWS, *ROWS[:5], {"prompt": "What is 1 plus 2?", "target": "4"}]
    path = tmp_path / "own.csv"
    path.write_text(as_csv(rows), encoding="utf-8")
    with pytest.raises(CourseError, match=r"line 47, column target: the answer is '4', but .*line 3 gives"):
        load_problems(recipe(path), "train")
    said = describe_filtering(recipe(path, conflicts="skip"))
    assert "46 rows, 39 problems: 6 duplicates removed, 1 problems with two answers skipped" in said


def test_kinds_nested_columns_solutions_and_numbers(tmp_path):
    path = tmp_path / "own.jsonl"
    rows = [{"q": {"text": f"Q{n}"}, "a": n, "work": f"by {n}"} for n in range(10)]
    path.write_text(as_jsonl(rows), encoding="utf-8")
    columns = {"question": "q.text", "answer": "a", "solution": "work"}
    own = ProblemsRecipe(source="file", path=str(path), columns=columns, kind="integer")
    (problem,) = load_problems(own, "test")
    assert (problem.answer, problem.solution, problem.kind) == (problem.question[1:], f"by {problem.answer}", "integer")
    path.write_text(as_jsonl([row | {"a": f"w\n#### {n}.50"} for n, row in enumerate(rows)]), encoding="utf-8")
    tagged = ProblemsRecipe(source="file", path=str(path), columns={"question": "q.text", "answer": "a"})
    (problem,) = load_problems(tagged, "test")
    assert (problem.answer, problem.solution) == (f"{problem.question[1:]}.5", "w")
    path.write_text(as_jsonl([row | {"a": r"\frac{1}{2}"} for row in rows]), encoding="utf-8")
    latex = load_problems(ProblemsRecipe(source="file", path=str(path), columns=columns, kind="latex"), "test")
    assert [(problem.answer, problem.kind) for problem in latex] == [(r"\frac{1}{2}", "latex")]


GOOD = '{"prompt": "P?", "target": "1"}\n'


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "question,target\nP?,1\n", "has no column prompt, but question, target; set problems.columns="),
        ("a.csv", "", "a.csv is empty"),
        ("a.csv", "prompt,target\n", "a.csv is empty"),
        ("a.csv", "prompt,target\nP?,one\n", "line 2, column target: 'one' is not one number, as problems.kind=tagged"),
        ("a.csv", 'prompt,target\n"P\nQ",1\nR,\n', "line 4, column target: '' is not a text; repair the row"),
        ("a.csv", "prompt,target\nP, or Q,1\n", "line 2 has more fields than the first line; put quotes"),
        ("a.csv", 'prompt,target\n"P,1\n', "is not CSV"),
        ("a.csv", 'prompt,target\n\n"P\n",1\n\nQ,one\n', "line 6, column target: 'one' is not one number"),
        ("a.csv", b"prompt,target\nP?,1\n\xff,1\n", "line 3 is not UTF-8; save the file as UTF-8"),
        ("a.csv", "prompt,target\nP?,1\n".encode("utf-16"), "line 1 is not UTF-8"),
        ("a.jsonl", "\n", "a.jsonl is empty"),
        ("a.jsonl", f"{GOOD}{{'prompt': 1}}\n", "line 2 is not JSON"),
        ("a.jsonl", f'{GOOD}{{"prompt": "Q', "line 2 is not JSON"),
        ("a.jsonl", f"{GOOD}[1]\n", "line 2 is a JSON list, and not an object"),
        ("a.jsonl", f"{GOOD}{'[' * 100_000}", "line 2 has too many brackets in each other; repair the line"),
        ("a.jsonl", f'{GOOD}{{"prompt": "\\ud800", "target": "1"}}', "line 2, column prompt: half a character"),
        ("a.jsonl", f'{GOOD}{{"prompt": "Q"}}', "line 2, column target: None is not a text"),
        ("a.jsonl", f'{GOOD}{{"prompt": "Q", "target": true}}', "line 2, column target: True is not a text"),
        ("a.jsonl", f'{GOOD}{{"prompt": "Q", "target": NaN}}', "line 2, column target: 'nan' is not one number"),
        ("a.parquet", "prompt,target\n", "a.parquet is not Parquet"),
        ("a.jsonl", GOOD * 3, "tenth of 1 problems is none; use at least 10, or test_path"),
        ("a.txt", GOOD, "is no such file; give a .csv, .jsonl, .parquet file, or a folder with train.csv"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    with pytest.raises(CourseError) as caught:
        load_problems(recipe(path), "test")
    assert words in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert path.name in str(caught.value)


def test_a_run_goes_on_with_the_same_problems_alone(root, tmp_path):
    path = tmp_path / "own.csv"
    write(path)
    columns = "problems.columns={question: prompt, answer: target}"
    own = load_recipe(root / "recipes" / "tiny-cpu.yaml", ["problems.source=file", f"problems.path={path}", columns])
    directory = open_run(tmp_path / "run", own)
    open_run(directory, own)
    path.write_text(as_csv(ROWS[1:]), encoding="utf-8")
    with pytest.raises(CourseError, match=r"began with another content of .*own\.csv; put the file back"):
        open_run(directory, own)


def test_a_folder_must_have_both_files_once(tmp_path):
    with pytest.raises(CourseError, match=r"problems\.path=.* has no file train"):
        load_problems(recipe(tmp_path), "train")
    for name in ("train.csv", "train.jsonl"):
        (tmp_path / name).write_text(GOOD, encoding="utf-8")
    with pytest.raises(CourseError, match=r"has train\.csv and train\.jsonl"):
        load_problems(recipe(tmp_path), "train")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"source": "file"}, "source=file needs path"),
        ({"columns": COLUMNS}, "columns is for a file of yours: set source to file"),
        ({"source": "gsm8k", "kind": "latex"}, "kind is for a file of yours"),
        ({"source": "gsm8k", "test_path": "a"}, "test_path=a needs test_source"),
    ],
)
def test_settings_that_do_not_fit(fields, words):
    with pytest.raises(ValueError, match=words):
        ProblemsRecipe(**fields)
