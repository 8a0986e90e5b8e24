"""`grpo check` and the public cases: what they catch, and what they and grading say, in English and in Chinese."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest

from grpo_lib.common.errors import CourseError
from grpo_teach import cases, check, grading, mutants, words
from grpo_teach.limited import Failed
from grpo_teach.notebooks import Exercise, exercises_in

EXERCISES = grading.teachers_exercises()
OF_TEXT = {"0.2", "1.2", "2.2", "8.1"}  # values that have no shape
CHINESE = "## 3.2 一組的優勢值"
WRONG = "def advantages(rewards, G):\n    r = np.asarray(rewards).reshape(-1, G)\n    "
# What a student has written for 3.2, and what `grpo check` says about it in English and in Chinese.
SAID = {
    "standard deviation with n": (
        "return ((r - r.mean(1, keepdims=True)) / (r.std(1, keepdims=True) + 1e-6)).ravel()",
        ["case 1 of 2: advantages([1.1, 0.1, 0.0, 0.0], 4)", "expected  [1.495, -0.374", "got       [1.725, -0.4313"],
        ["第 1 個測試（共 2 個）：advantages([1.1, 0.1, 0.0, 0.0], 4)", "應為", "得到", "2 個公開測試對了 0 個"],
    ),
    "a row for each group": (
        "return (r - r.mean(1, keepdims=True)) / (r.std(1, ddof=1, keepdims=True) + 1e-6)",
        ["float64, shape (4,)", "float64, shape (1, 4)", "0 of 2 public cases are right"],
        ["float64，shape (1, 4)"],
    ),
    "no return": ("r - 1", ["got       None"], ["得到      None"]),
    "an error": (
        "return np.asarray(rewards).mean(1)",
        ["an error: AxisError: axis 1 is out of bounds", "(line 5: return np.asarray(rewards).mean(1))"],
        ["錯誤：AxisError", "（第 5 行：return np.asarray(rewards).mean(1)）"],
    ),
    "a package that grading lacks": (
        "import scipy",
        ["No module named 'scipy'", "(line 5: import scipy)", "only NumPy and Python's own library"],
        ["No module named 'scipy'", "（第 5 行：import scipy）", "只有 NumPy 和 Python 標準函式庫"],
    ),
    "the given line left below": (
        "raise NotImplementedError()",
        ["line 5 still raises NotImplementedError; take it out"],
        ["第 5 行還有 raise NotImplementedError()，請刪掉"],
    ),
    "a syntax error": (
        "return (r",
        ["SyntaxError in the cell of the function, line 5: return (r  '(' was never closed"],
        ["函式那一格有 SyntaxError，第 5 行：return (r"],
    ),
}
# The same of a whole cell.
CELLS_SAID = {
    "unwritten": (
        'def advantages(rewards, G):\n    """Text."""\n    raise NotImplementedError()\n',
        ["is still to be written in"],
        ["還沒寫"],
    ),
    "another name": (
        "def advantage(rewards, G):\n    return rewards\n",
        ["the cell has no function advantages; it has advantage"],
        ["那一格裡沒有函式 advantages；有的是 advantage"],
    ),
    "the same error in every case": (
        "def advantages(rewards, G):\n    return nothing\n",
        ["1 more: the same error"],
        ["另外 1 個測試：同樣的錯誤"],
    ),
    "a wrong array, then an error": (
        "def advantages(rewards, G):\n    return rewards[:2] if G == 4 else nothing\n",
        [
            "case 1 of 2",
            "case 2 of 2",
            "name 'nothing' is not defined",
            "what the function needs must be in its own cell",
        ],
        ["第 2 個測試（共 2 個）", "函式需要的東西，都要寫在它自己那一格裡"],
    ),
    "an error outside of the function": (
        "def advantages(rewards, G):\n    return rewards\n\n\nprint(advantages(1) / 2)\n",
        ["ends with an error, before any case: TypeError: ", "(line 5: print(advantages(1) / 2))"],
        ["還沒開始測試，函式那一格就出錯了：TypeError", "（第 5 行："],
    ),
    "a function by another way than def": (
        "advantages = lambda rewards, G: rewards\n",
        ["advantages must be written with def"],
        ["advantages 必須用 def 來寫"],
    ),
    "a line of Jupyter": (
        "%matplotlib inline\ndef advantages(rewards, G):\n    return rewards\n",
        ["line 1: %matplotlib inline  lines with % or ! are Jupyter's own"],
        ["% 或 ! 開頭的行是 Jupyter 的"],
    ),
    "a dict": (
        "def advantages(rewards, G):\n    return {1: 2}\n",
        ["a list or an array expected, a dict returned"],
        ["應傳回串列或陣列，卻傳回字典（dict）"],
    ),
}


def verdicts(exercise: Exercise, code: str) -> list[bool]:
    """Whether each public case is right, of code that this repository has written."""
    space: dict = {}
    exec(code, space)
    found = []
    for one in check.public_cases(exercise):
        try:
            value = one.by(space[one.function], *one.inputs) if one.by else space[one.function](*one.inputs)
        except Exception as error:
            value = Failed(f"{type(error).__name__}: {error}")
        found.append(check.is_right(one, value))
    return found


def notebook(path: Path, number: str, code: str, title: str = "") -> Path:
    """The teacher's notebook with other code in one exercise, and with its title."""
    exercise = EXERCISES[number]
    read = nbformat.read(exercise.path, 4)
    cell_id = f"ex-{number.replace('.', '-')}"
    for cell in read.cells:
        if cell.id == cell_id:
            cell.source = code
        if cell.id == f"{cell_id}-text" and title:
            cell.source = title
    nbformat.write(read, path)
    return path


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a mistake may divide by 0
@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
def test_one_usual_mistake_at_most_passes_the_public_cases_and_no_shape(exercise) -> None:
    assert all(verdicts(exercise, exercise.code))
    passed = [name for name, code in mutants.mistakes(exercise).items() if all(verdicts(exercise, code))]
    assert len(passed) <= 1, passed
    shapes = {} if exercise.number in OF_TEXT else mutants.other_shapes(exercise)
    assert [name for name, code in shapes.items() if all(verdicts(exercise, code))] == []


@pytest.mark.parametrize("title", ["", CHINESE], ids=["English", "Chinese"])
@pytest.mark.parametrize("name", SAID)
def test_a_failed_check_says_input_expected_got_and_the_students_line(grpo, tmp_path, name, title) -> None:
    body, english, chinese = SAID[name]
    path = notebook(tmp_path / "03.ipynb", "3.2", f"import numpy as np\n\n{WRONG}{body}\n", title)
    done = grpo("check", "3.2", path)
    assert done.returncode == 2
    shown = done.stdout + done.stderr
    assert [said for said in (chinese if title else english) if said not in shown] == [], shown


@pytest.mark.parametrize("title", ["", CHINESE], ids=["English", "Chinese"])
@pytest.mark.parametrize("name", CELLS_SAID)
def test_a_check_says_what_is_wrong_with_a_cell(grpo, tmp_path, name, title) -> None:
    code, english, chinese = CELLS_SAID[name]
    done = grpo("check", "3.2", notebook(tmp_path / "03.ipynb", "3.2", code, title))
    assert done.returncode == 2
    shown = done.stdout + done.stderr
    assert [said for said in (chinese if title else english) if said not in shown] == [], shown


TESTS_SAID = {
    "none": ("", "the cell with the public cases is not there, or is empty"),
    "all taken out": ("# case(advantages, ([1.0], 1), [0.0])\n", "the cell with the public cases is not there"),
    "a call of the student's": ("\nadvantages([1.0], 1)\n", "line 2 of the public cases calls advantages"),
}


@pytest.mark.parametrize("name", TESTS_SAID)
def test_a_check_says_what_is_wrong_with_the_cell_of_the_cases(name) -> None:
    test, said = TESTS_SAID[name]
    with pytest.raises(CourseError, match=said):
        check.check(replace(EXERCISES["3.2"], test=test), print)


def test_one_of_two_functions_may_be_unwritten_while_the_other_is_checked() -> None:
    code = "def mean_gradients(*_):\n    raise NotImplementedError()\n\n\ndef kl(*_):\n    return 1.0\n"
    said: list[str] = []
    with pytest.raises(CourseError, match="public cases are right"):
        check.check(replace(EXERCISES["3.6"], code=code), said.append)
    assert any("kl(" in line for line in said)
    assert any("NotImplementedError" in line for line in said)


def test_values_that_look_equal_are_shown_with_all_digits() -> None:
    one = cases.Case("third", (), 0.33333, 1e-6, None)
    assert [line.split()[-1] for line in cases.told(one, 0.333334, "en")[1:]] == ["0.33333", "0.333334"]


def test_a_cell_that_ends_with_the_expected_error_has_no_points_for_it() -> None:
    """5.3 wants a ValueError of pass@k with more samples than there are; a cell that raises one defines nothing."""
    exercise = EXERCISES["5.3"]
    assert any(one.want is ValueError for one in check.public_cases(exercise))
    assert {graded.points for graded in grading.grade(exercise, "raise ValueError('k')", [7])} == {0}


def test_a_check_shows_what_the_function_prints(capfd) -> None:
    code = f"import numpy as np\n\n{WRONG}print('looked at', r.shape)\n    return r\n"
    with pytest.raises(CourseError):
        check.check(replace(EXERCISES["3.2"], code=code), print)
    assert "looked at (1, 4)" in capfd.readouterr().err


def test_a_notebook_that_is_not_there_is_said(grpo, tmp_path) -> None:
    done = grpo("check", "3.2", tmp_path / "04.ipynb")
    assert done.returncode == 2 and done.stderr.strip().endswith("04.ipynb is not there")


@pytest.mark.parametrize(("title", "said"), [("", "cases pass (2 of 2;"), (CHINESE, "公開測試全部通過（2 個；")])
def test_a_passed_check_says_its_seconds(grpo, tmp_path, title, said) -> None:
    done = grpo("check", "3.2", notebook(tmp_path / "03.ipynb", "3.2", EXERCISES["3.2"].code, title))
    assert done.returncode == 0 and said in done.stdout


def test_a_case_in_a_notebook_says_the_same_without_a_traceback() -> None:
    space: dict = {}
    exec(mutants.mistakes(EXERCISES["3.2"])["a row for each group"], space)
    with pytest.raises(cases.WrongValue, match=r"(?s)expected .*shape \(4,\).*got .*shape \(1, 4\)") as stopped:
        exec(EXERCISES["3.2"].public, space)
    assert stopped.value._render_traceback_() == str(stopped.value).splitlines()


def test_a_teacher_counts_hidden_parts_with_a_students_own_inputs(grpo, tmp_path) -> None:
    path = notebook(tmp_path / "03.ipynb", "3.2", mutants.mistakes(EXERCISES["3.2"])["without eps"])
    command = ["check", "3.2", path, "--hidden-count", "--student", "ada", "--json"]
    counts = [json.loads(grpo(*command).stdout) for _ in range(2)]
    assert counts == [{"exercise": "3.2", "right": 2, "parts": 3}] * 2


@pytest.mark.parametrize(("chinese", "remark"), [(False, "empty: nothing was written"), (True, "空白：什麼都還沒寫")])
def test_an_empty_notebook_is_one_remark(grpo, tmp_path, chinese, remark) -> None:
    cells = []
    for number in ("1.1", "1.2", "1.3"):
        [name] = EXERCISES[number].functions
        cell_id = f"ex-{number.replace('.', '-')}"
        cells.append(
            nbformat.v4.new_markdown_cell(f"## {number} {'轉換' if chinese else 'Title'}", id=f"{cell_id}-text")
        )
        cells.append(nbformat.v4.new_code_cell(f"def {name}(*_): raise NotImplementedError()", id=cell_id))
    (tmp_path / "in").mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "in" / "ada.ipynb")
    assert grpo("grade", tmp_path / "in", "--output", tmp_path / "out").returncode == 0
    [row] = csv.DictReader((tmp_path / "out" / "grades.csv").open(encoding="utf-8-sig"))
    assert row["remarks"] == remark


WRONG_KINDS = {
    "a row for each group": ("shape (1, 3), expected (3,)", "shape 是 (1, 3)，應為 (3,)"),
    "None": ("returned None", "傳回了 None"),
    "text": ("a list or an array expected, text returned", "應傳回串列或陣列，卻傳回文字"),
    "over the batch, not the group": ("0 of 3 inputs right", "3 組輸入對了 0 組"),
}


@pytest.mark.parametrize("kind", WRONG_KINDS)
def test_a_remark_says_what_kind_of_value_came(kind) -> None:
    codes = mutants.mistakes(EXERCISES["3.2"])
    codes |= {"None": "def advantages(*_): pass", "text": "def advantages(*_): return '1'"}
    for language, said in zip(("en", "zh"), WRONG_KINDS[kind], strict=True):
        [graded] = grading.grade(EXERCISES["3.2"], codes[kind], [0], language)
        assert said in [reason for _, reason in graded.missed]


def test_a_limit_is_told_in_chinese() -> None:
    assert words.reason("stopped after 10 seconds", "zh") == "計算超過 10 秒，已停止"


def test_every_part_has_a_chinese_name() -> None:
    names = {one.part.name for exercise in EXERCISES.values() for one in grading.planned(exercise, 0)}
    assert names == grading._chinese_names().keys()


def test_an_exercise_is_in_the_language_of_its_text(root) -> None:
    """Some titles in Chinese notebooks have no Chinese word, such as pass@k."""
    path = root / "teaching" / "exercises" / "03_policy_update.ipynb"
    notebook = nbformat.read(path, as_version=4)
    [text] = [cell for cell in notebook.cells if "## 3.6" in cell.source]
    text.source = "## 3.6 k1, k2, k3\n\n寫出三個估計式。"
    found = exercises_in(nbformat.writes(notebook).encode(), path)
    assert (found["3.6"].language, found["3.1"].language) == ("zh", "en")
