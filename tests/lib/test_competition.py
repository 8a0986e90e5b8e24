"""Competition mathematics in its published layouts: the wrapper, duplicates, golds, splits, and errors by row.

All problems here are invented; no row of a published data set is in this repository.
"""

import json
import os
import re
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from grpo_lib.common.errors import CourseError
from grpo_lib.problems import Problem, describe_filtering, load_problems
from grpo_lib.problems.competition import Counts, data_sets, load, published_prompt
from grpo_lib.problems.competition import rows as row_files
from grpo_train.recipes import ProblemsRecipe

FIXTURE = Path(__file__).parent / "gsm8k_fixture"
WRAPPER = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n",
    '\n\nRemember to put your answer on its own line after "Answer:".',
)


def chat(problem: str, gold: str = "7", index: object = "a1", **message) -> dict:
    """A row of DAPO-Math-17k."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": WRAPPER[0] + problem + WRAPPER[1], "role": "user"} | message],
        "ability": "MATH",
        "reward_model": {"ground_truth": gold, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def processed(problem: str, gold: str, index: str) -> dict:
    """A row of the processed copy; its column `solution` is the answer."""
    return chat(problem, gold, index) | {"prompt": problem, "solution": gold}


def save(folder: Path, rows: list, kind: str = "parquet", name: str = "rows") -> Path:
    file = folder / f"{name}.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def answers(source: str, path: Path, **options) -> dict[str, str]:
    return {problem.question: problem.answer for problem in load(source, str(path), **options)[0]}


# --- layouts ------------------------------------------------------------------------------------------------

SUMS = [f"Find the number that is {n} more than {n}." for n in range(3)]
GOLDS = ["0", "2", "4"]


def in_columns(**columns: list) -> list[dict]:
    """The rows of the three problems in a layout of plain columns: these, and the question, the solution, the gold."""
    columns = {"problem": SUMS, "solution": ["Add."] * 3, "answer": GOLDS} | columns
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


PUBLISHED = [chat(SUMS[n], GOLDS[n], f"u{n}") for n in range(3)]
PROCESSED = [processed(SUMS[n], GOLDS[n], f"u{n}") for n in range(3)]
LAYOUTS = {
    # Name: source, rows, the id of the second row.
    "published": ("dapo-math", PUBLISHED, "u1"),
    "processed": ("dapo-math", PROCESSED, "u1"),
    "HuggingFaceH4": ("aime", in_columns(id=[60, 61, 62], answer=["000", "002", "004"]), "61"),
    "AI-MO": ("aime", in_columns(id=[0, 1, 2], url=["u"] * 3), "1"),
    "MathArena": ("aime", in_columns(problem_idx=[1, 2, 3], problem_type=["Algebra"] * 3), "2"),
    "MATH-500": ("math500", in_columns(level=[1] * 3, unique_id=["t/0", "t/1", "t/2"]), "t/1"),
    "MATH": ("math", in_columns(unique_id=["m/0", "m/1", "m/2"]), "m/1"),
}


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_same_problems(tmp_path, name, kind):
    source, rows, number = LAYOUTS[name]
    repeated = [row for row in rows for _ in range(4)]  # as DAPO-Math-17k has each a hundred times
    problems, counts = load(source, str(save(tmp_path, repeated, kind)))
    assert counts == Counts(rows=12, duplicates=9, conflicts=0, kept=3)
    assert [problem.question for problem in problems] == SUMS
    assert [problem.answer for problem in problems] == GOLDS
    assert problems[1] == Problem(
        id=f"{source}-{number}",
        question=SUMS[1],
        solution="" if "prompt" in rows[1] else "Add.",  # DAPO's rows have no worked solution
        answer="2",
        source=source,
        kind="latex" if source.startswith("math") else "integer",
    )  # fmt: skip


def test_latex_golds_stay_as_they_are(tmp_path):
    golds = [r"\left( 3, \frac{\pi}{2} \right)", r"2\sqrt{3}", "007", r"\text{Evelyn}"]
    rows = [{"problem": f"P{n}", "solution": "", "answer": g, "unique_id": f"t/{n}"} for n, g in enumerate(golds)]
    assert list(answers("math500", save(tmp_path, rows)).values()) == golds


def test_a_folder_is_read_in_sorted_order(tmp_path):
    save(tmp_path, [chat("Second", "2", "b"), chat("First", "1", "a")], "jsonl", "part-1")
    save(tmp_path, [chat("First", "1", "a")], "parquet", "part-0")
    (tmp_path / "README.md").write_text("not rows")
    assert list(answers("dapo-math", tmp_path)) == ["First", "Second"]


def test_large_files_come_in_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "BATCH_ROWS", 3)
    rows = [chat(f"P{n % 5}", str(n % 5), f"u{n % 5}") for n in range(17)]
    problems, counts = load("dapo-math", str(save(tmp_path, rows)))
    assert [problem.answer for problem in problems] == ["0", "1", "2", "3", "4"]
    assert counts == Counts(17, 12, 0, 5)
    with pytest.raises(CourseError, match=r"rows.parquet, row 17, column"):
        load("dapo-math", str(save(tmp_path, [*rows, chat("P9", "two", "u9")])))


# --- the wrapper --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "problem",
    [
        "Solve the system x + y = 3, x - y = 1 for x.",  # lstrip and rstrip with characters would eat both ends
        "Answer: is it? Remember to answer", '\n\nthe ":." answer is its own line after', "$x$", "Ünï → 求 x",
        "Solve the following math problem step by step. ", "{question}", WRAPPER[0] + "inside" + WRAPPER[1],
        "x" + WRAPPER[1], "\n\n.", "\x00\u2028",
    ],
)  # fmt: skip
def test_only_the_wrapper_is_taken_off(tmp_path, problem):
    assert list(answers("dapo-math", save(tmp_path, [chat(problem)]))) == [problem]
    assert published_prompt(problem) == chat(problem)["prompt"][0]["content"]


def test_a_plain_text_may_have_the_wrapper_or_not(tmp_path):
    rows = [processed("Plain.", "1", "a"), processed(published_prompt("Wrapped."), "2", "b")]
    assert answers("dapo-math", save(tmp_path, rows)) == {"Plain.": "1", "Wrapped.": "2"}


# --- duplicates and golds -----------------------------------------------------------------------------------


def test_two_golds_for_one_problem(tmp_path):
    file = save(
        tmp_path,
        [chat("P", "1", "a"), chat("Q", "5", "b"), chat("P", "1", "c"), chat("P", "2", "d"), chat("Q", "05", "e")],
    )
    with pytest.raises(CourseError, match=r"row 3, column reward_model.*conflicts=skip"):
        load_problems(recipe(file), "train")
    assert [p.question for p in load_problems(recipe(file, conflicts="skip"), "train")] == ["Q"]
    problems, counts = load("dapo-math", str(file), conflicts="skip")
    assert [(problem.question, problem.answer) for problem in problems] == [("Q", "5")]
    assert counts == Counts(rows=5, duplicates=3, conflicts=1, kept=1)


@pytest.mark.parametrize(
    ("source", "gold", "canonical"),
    [
        ("dapo-math", "34", "34"),
        ("dapo-math", "-12", "-12"),
        ("dapo-math", "+5", "5"),
        ("dapo-math", "-0", "0"),
        ("dapo-math", " 007\n", "7"),
        ("dapo-math", "123456789012345678901234567890", "123456789012345678901234567890"),
        ("aime", "000", "0"),
        ("aime", "999", "999"),
        ("aime", "0033", "33"),
    ],
)
def test_integer_golds_have_one_spelling(tmp_path, source, gold, canonical):
    row = chat("P", gold) if source == "dapo-math" else HF | {"answer": gold}
    assert answers(source, save(tmp_path, [row])) == {"P": canonical}


def test_a_file_is_read_once_until_it_changes(tmp_path, monkeypatch):
    file = save(tmp_path, [chat("P", "1")], "jsonl")
    real = data_sets.read_rows
    read = []
    monkeypatch.setattr(data_sets, "read_rows", lambda *arguments: read.append(1) or real(*arguments))
    first, _ = load("dapo-math", str(file))
    first.clear()  # what is handed out belongs to the caller
    assert answers("dapo-math", file) == {"P": "1"}
    assert len(read) == 1
    save(tmp_path, [chat("P", "2")], "jsonl")
    os.utime(file, ns=(1, 1))
    assert answers("dapo-math", file) == {"P": "2"}


# --- errors -------------------------------------------------------------------------------------------------

GOOD = chat("P0", "1", "u0")
HF = {"id": 1, "problem": "P", "solution": "", "answer": "033"}


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("source", "row", "column"),
    [
        ("dapo-math", GOOD | {"reward_model": {"ground_truth": None, "style": ""}}, "reward_model.ground_truth"),
        ("dapo-math", chat("P1", "3.5"), "reward_model.ground_truth"),
        ("dapo-math", chat("P1", ""), "reward_model.ground_truth"),
        ("dapo-math", chat("P1", "x" * 500), "reward_model.ground_truth"),
        ("dapo-math", GOOD | {"prompt": None}, "prompt"),
        ("dapo-math", chat("P1", content="P1"), "prompt"),
        ("dapo-math", chat("P1", content=WRAPPER[0] + "P1"), "prompt"),
        ("dapo-math", chat("P1", content=WRAPPER[0][:-2] + WRAPPER[1]), "prompt"),
        ("dapo-math", chat(" "), "prompt"),
        ("dapo-math", chat("P1", role="assistant"), "prompt"),
        ("dapo-math", GOOD | {"prompt": []}, "prompt"),
        ("dapo-math", GOOD | {"prompt": GOOD["prompt"] * 2}, "prompt"),
        ("dapo-math", chat("P1", "1", None), "extra_info.index"),
        ("dapo-math", chat("P1", "1", "u0"), "extra_info.index"),  # of another problem
        ("aime", HF | {"answer": "1000"}, "answer"),
        ("aime", HF | {"answer": "-1"}, "answer"),
        ("math500", {"problem": "P", "solution": "", "answer": None, "unique_id": "t/2"}, "answer"),
    ],
)
def test_a_bad_row_is_named_with_its_column(tmp_path, source, kind, row, column):
    first = {
        "dapo-math": GOOD,
        "aime": HF,
        "math500": {"problem": "P0", "solution": "", "answer": "3", "unique_id": "t/1"},
    }
    file = save(tmp_path, [first[source], row, first[source]], kind)
    with pytest.raises(CourseError, match=rf"rows\.{kind}, row 1, column {column}: ") as error:
        load(source, str(file))
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("source", "known"),
    [("dapo-math", "prompt, reward_model.ground_truth, extra_info.index"), ("aime", "problem, answer, id"),
     ("math500", "problem, answer, unique_id")],
)  # fmt: skip
def test_other_columns_are_listed_with_those_that_are_known(tmp_path, kind, source, known):
    file = save(tmp_path, [{"problem": "P", "solution": "", "answer": "3", "other": 1}], kind)
    with pytest.raises(CourseError, match=rf"rows\.{kind} .*answer, other, problem, solution.* {re.escape(known)}"):
        load(source, str(file))


BAD_FILES = {
    "empty.jsonl": b"\n", "zero.parquet": b"", "text.parquet": b"not parquet", "half.jsonl": b'{"prompt": "P',
    "bytes.jsonl": b'{"prompt": "\xff"}', "deep.jsonl": b"[" * 100_000, "rows.csv": b"prompt\n",
}  # fmt: skip


@pytest.mark.parametrize("name", [*BAD_FILES, "none.parquet", "folder", "absent"])
def test_a_bad_file_is_named(tmp_path, name):
    (tmp_path / "folder").mkdir()
    pq.write_table(pa.Table.from_pylist([GOOD]).schema.empty_table(), tmp_path / "none.parquet")
    if name in BAD_FILES:
        (tmp_path / name).write_bytes(BAD_FILES[name])
    with pytest.raises(CourseError, match=re.escape(name)):
        load("dapo-math", str(tmp_path / name))


# --- splits -------------------------------------------------------------------------------------------------


def recipe(path: Path | None, source: str = "dapo-math", **fields) -> ProblemsRecipe:
    return ProblemsRecipe(source=source, path=path and str(path), **fields)


def test_splits_are_disjoint_and_stable(tmp_path):
    rows = [chat(f"P{n}", str(n), f"u{n}") for n in range(40)]
    train, validation = (load_problems(recipe(save(tmp_path, rows * 3)), split) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (36, 4)
    assert not {p.question for p in train} & {p.question for p in validation}
    turned = recipe(save(tmp_path, rows[::-1], "jsonl", "turned"))
    assert {p.id for p in load_problems(turned, "validation")} == {p.id for p in validation}
    assert load_problems(recipe(save(tmp_path, rows), train=5), "train") == train[:5]


def test_the_test_split_comes_from_test_source(tmp_path):
    train = save(tmp_path, [chat("P", "1")], name="train")
    test = save(tmp_path, [HF], name="test")
    aime = load_problems(recipe(train, test_source="aime", test_path=str(test)), "test")
    assert [(p.source, p.answer, p.kind) for p in aime] == [("aime", "33", "integer")]
    gsm8k = load_problems(recipe(train, test_source="gsm8k", test_path=str(FIXTURE)), "test", n=2)
    assert [(p.source, p.kind) for p in gsm8k] == [("gsm8k", "tagged")] * 2
    with pytest.raises(CourseError, match=r"problems.test_source=aime"):
        load_problems(recipe(train), "test")


@pytest.mark.parametrize("source", ["math500", "gsm8k"])
def test_a_missing_test_path_is_named(tmp_path, source):
    with pytest.raises(CourseError, match=r"problems.test_path=absent"):
        load_problems(recipe(tmp_path, test_source=source, test_path="absent"), "test")


def test_a_test_problem_is_not_trained_on(tmp_path):
    rows = [chat(f"P{n}", str(n), f"u{n}") for n in range(40)]
    test = save(tmp_path, [HF | {"problem": " P7\n", "id": 1}, HF | {"problem": "P90", "id": 2}], name="test")
    judged = recipe(save(tmp_path, rows), test_source="aime", test_path=str(test))
    splits = {split: {p.question for p in load_problems(judged, split)} for split in ("train", "validation")}
    assert splits["train"] | splits["validation"] == {f"P{n}" for n in range(40)} - {"P7"}
    assert not splits["train"] & splits["validation"]
    assert "; 1 left out of training, because they are test problems" in describe_filtering(judged)
    assert "left out of training" not in describe_filtering(recipe(save(tmp_path, rows)))


def test_a_test_set_has_no_other_split(tmp_path):
    aime = recipe(save(tmp_path, [HF]), "aime")
    assert [p.id for p in load_problems(aime, "test")] == ["aime-1"]
    for split in ("train", "validation"):
        with pytest.raises(CourseError, match=r"problems.source=aime .*problems.test_source=aime"):
            load_problems(aime, split)


@pytest.mark.parametrize(
    "fields", [{"source": "gsm8k", "test_source": "aime"}, {"source": "dapo-math", "test_path": "x"}]
)
def test_the_schema_refuses_a_test_source_that_would_not_be_used(fields):
    with pytest.raises(ValidationError, match=r"test_source|test split"):
        ProblemsRecipe(**fields)


# --- the hub ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["published", "HuggingFaceH4", "MATH-500", "MATH"])
def test_the_hub_gives_what_a_file_gives(tmp_path, monkeypatch, name):
    source, rows, _ = LAYOUTS[name]
    real = datasets.load_dataset
    file = save(tmp_path, rows * 2)

    def load_dataset(path, split, **options):
        if options:
            return real(path, split=split, **options)
        assert (path, split) == row_files.HUB[source]
        return datasets.Dataset.from_list(rows * 2)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data_sets._read.cache_clear()
    assert load(source) == load(source, str(file))
    data_sets._read.cache_clear()


@pytest.mark.parametrize(
    ("fields", "split", "named"),
    [
        ({"test_source": "aime"}, "test", "HuggingFaceH4/aime_2024.*problems.test_path"),
        ({}, "train", "DAPO-Math-17k.*no network.*problems.path"),
    ],
)
def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch, fields, split, named):
    def refuse(**_):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(CourseError, match=rf"\A.*{named}.*\Z"):
        load_problems(recipe(None, **fields), split)
