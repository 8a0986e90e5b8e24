"""GSM8K from the real builder and from files, held-out problems, and training batches.

gsm8k_fixture/ holds invented problems in the layout of the original data.
"""

import json
import os
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import requests

from grpo_lib.common.errors import CourseError
from grpo_lib.problems import (
    Problem,
    batch_of_step,
    gsm8k,
    load_problems,
    loading,
    training_batches,
    words,
    write_tfds,
)
from grpo_train.recipes import ProblemsRecipe, load_recipe

FIXTURE = Path(__file__).parent / "gsm8k_fixture"
FILES = {path.stem: path for path in FIXTURE.glob("*.jsonl")}
ROWS = {"train": 7473, "test": 1319}


def ask_for(source: str, path: Path | None = None, **fields) -> ProblemsRecipe:
    return ProblemsRecipe(source=source, path=path and str(path), **fields)


def questions(problems: list[Problem]) -> set[str]:
    return {problem.question for problem in problems}


# --- files --------------------------------------------------------------------------------------------------


def test_a_row_becomes_a_problem():
    assert gsm8k.from_folder(FIXTURE, "train")[1] == Problem(
        id="gsm8k-train-00001",
        question="Ola walks 4 km in the morning and twice as far in the evening. How far does Ola walk?",
        solution="In the evening it is 4 * 2 = 8 km.\nAltogether 4 + 8 = 12 km.",
        answer="12",
        source="gsm8k",
        steps=2,
    )


def test_golds_are_canonical_and_lines_are_lines():
    train, test = (gsm8k.from_folder(FIXTURE, split) for split in ROWS)
    assert [p.answer for p in train] == ["36", "12", "1080", "-5", "7.5", "45", "12", "67", "10000", "24", "6", "100"]
    assert train[5].steps is None  # a solution without annotations
    assert len(test) == 4
    assert "\u2028" in test[2].question  # a line separator is no line break


def test_the_gold_stands_after_the_last_mark(tmp_path):
    (tmp_path / "test.jsonl").write_text(
        r'{"question": "How many?", "answer": "#### is not the end.\n#### 3"}' + "\n\n"
    )
    assert gsm8k.from_folder(tmp_path, "test")[0].answer == "3"


GOOD = '{"question": "How many?", "answer": "One. #### 1"}'


@pytest.mark.parametrize(
    "line",
    [
        '{"question": "How ma', "[1, 2]", '{"question": "How many?"}', '{"question": 3, "answer": "#### 3"}',
        '{"question": " ", "answer": "#### 3"}', '{"question": "How many?", "answer": "Three. ### 3"}',
        '{"question": "How many?", "answer": "#### two"}', '{"question": "How many?", "answer": "Three. ####"}',
        pytest.param(r'{"question": "How \ud83d many?", "answer": "#### 3"}', id="half of a pair of surrogates"),
        pytest.param("[" * 100_000, id="nested"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path, line):
    (tmp_path / "train.jsonl").write_text(f"{GOOD}\n{line}\n{GOOD}\n")
    with pytest.raises(CourseError, match=r"train.jsonl, line 2\b"):
        gsm8k.from_folder(tmp_path, "train")


@pytest.mark.parametrize(
    ("path", "split", "named"),
    [
        ("absent", "test", "absent: test.jsonl cannot be read"),
        ("train.jsonl", "test", "train.jsonl: test.jsonl cannot be read"),
        (".", "train", "train.jsonl is empty"),
        (".", "test", "test.jsonl cannot be read"),
        ("none", "test", "none: test.jsonl cannot be read"),
    ],
)
def test_a_bad_folder_is_named(tmp_path, path, split, named):
    (tmp_path / "train.jsonl").write_text("\n")
    (tmp_path / "test.jsonl").write_bytes(b'{"question": "\xff"}')
    (tmp_path / "none").mkdir()
    with pytest.raises(CourseError, match=named):
        gsm8k.from_folder(tmp_path / path, split)


@pytest.mark.gsm8k
def test_the_real_files(gsm8k_dir):
    problems = {split: gsm8k.from_folder(gsm8k_dir, split) for split in ROWS}
    assert {split: len(found) for split, found in problems.items()} == ROWS
    everything = problems["train"] + problems["test"]
    assert len({p.id for p in everything}) == len(questions(everything)) == sum(ROWS.values())
    assert all("<<" not in p.solution and "####" not in p.solution and p.solution for p in everything)
    assert all(p.answer.lstrip("-").replace(".", "", 1).isdigit() for p in everything)


# --- the builder of tensorflow-datasets ---------------------------------------------------------------------


def place_downloads(data_dir: Path, files: dict[str, Path]) -> None:
    """Put files where the real builder keeps its downloads, so that it finds them and asks no server."""
    import tensorflow_datasets.text.gsm8k
    from tensorflow_datasets.core.download import checksums, resource

    folder = data_dir / "downloads" / "gsm8k"
    folder.mkdir(parents=True)
    for name, url in tensorflow_datasets.text.gsm8k.gsm8k._URLS.items():
        copy = folder / resource.get_dl_fname(url)
        shutil.copy(files[name], copy)
        resource.write_info_file(url, copy, "gsm8k", f"{name}.jsonl", checksums.compute_url_info(copy))


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise requests.ConnectionError

    monkeypatch.setattr(requests.Session, "request", refuse)


def test_the_real_builder_gives_what_the_files_give(tmp_path, no_network):
    place_downloads(tmp_path, FILES)
    for _ in ("prepared", "read again"):
        for split in ROWS:
            assert gsm8k.from_tfds(split, tmp_path) == gsm8k.from_folder(FIXTURE, split)


@pytest.mark.gsm8k
def test_the_real_builder_on_the_real_data(tmp_path, gsm8k_dir, no_network):
    # The builder insists on the Socratic variants too, which nothing here uses; invented rows stand in.
    place_downloads(tmp_path, FILES | {split: gsm8k_dir / f"{split}.jsonl" for split in ROWS})
    for split in ROWS:
        assert gsm8k.from_tfds(split, tmp_path) == gsm8k.from_folder(gsm8k_dir, split)


def test_no_network_and_nothing_prepared_is_an_error(tmp_path, no_network, monkeypatch, capfd):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    with pytest.raises(CourseError, match=f"{tmp_path}.*problems.path=FOLDER"):
        load_problems(ask_for("gsm8k"), "test")
    assert not (tmp_path / "gsm8k").exists()
    assert capfd.readouterr().err == ""


def test_a_builder_that_fails_is_an_error(tmp_path, no_network):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"question": "How many?"\n')
    place_downloads(tmp_path, FILES | {"test": broken})
    with pytest.raises(CourseError, match=r"delete .*gsm8k"):
        gsm8k.from_tfds("test", tmp_path)


def test_neither_reading_nor_importing_takes_tensorflow_or_jax(tmp_path):
    place_downloads(tmp_path, FILES)
    program = (
        "import sys; from grpo_lib.problems import gsm8k; gsm8k.from_tfds('test', sys.argv[1]); "
        "print({'tensorflow', 'jax'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", program, tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"NO_PROXY": "*"})
    assert result.stdout.splitlines()[-1:] == ["set()"], result.stderr


# --- loading ------------------------------------------------------------------------------------------------


def assert_no_leak(recipe: ProblemsRecipe) -> dict[str, list[Problem]]:
    found = {split: load_problems(recipe, split) for split in words.SPLITS}
    assert all(found.values())
    train, validation, test = (questions(found[split]) for split in words.SPLITS)
    assert not train & validation
    assert not train & test
    assert not validation & test
    return found


def test_no_split_leaks_into_another():
    assert_no_leak(ask_for("gsm8k", FIXTURE))
    assert_no_leak(ask_for("words", train=5000, validation=500, test=1000))


@pytest.mark.gsm8k
def test_no_split_of_gsm8k_leaks_into_another(gsm8k_dir):
    found = assert_no_leak(ask_for("gsm8k", gsm8k_dir))
    assert {split: len(problems) for split, problems in found.items()} == ROWS | {"train": 6973, "validation": 500}
    # Fixed here on purpose: validation curves only compare while the problems stay what they are.
    assert [p.id for p in found["validation"][:3]] == [f"gsm8k-train-{n:05d}" for n in (46, 69, 89)]


def test_held_out_problems_do_not_depend_on_the_order_of_the_input():
    problems = gsm8k.from_folder(FIXTURE, "train")
    parts = [questions(part) for part in loading.hold_out(problems)]
    assert parts == [questions(part) for part in loading.hold_out(problems[::-1])]
    assert len(parts[1]) == 1
    assert len(parts[0]) == 11


@pytest.mark.parametrize("numbers", [[], [0], [0] * 20, [*range(30)] * 2, [n % 7 for n in range(60)]])
def test_a_question_that_occurs_twice_is_never_on_both_sides(numbers):
    problems = [Problem(str(i), f"Question {n}?", "", "1", "gsm8k") for i, n in enumerate(numbers)]
    train, validation = loading.hold_out(problems)
    assert not questions(train) & questions(validation)
    assert train or not problems
    assert sorted([*train, *validation], key=lambda p: int(p.id)) == problems


@pytest.mark.parametrize(
    ("settings", "split", "n", "count"),
    [
        ({"source": "gsm8k", "path": FIXTURE, "train": 3}, "train", None, 3),
        ({"source": "gsm8k", "path": FIXTURE, "train": 3}, "train", 99, 11),
        ({"source": "gsm8k", "path": FIXTURE}, "test", None, 4),
        ({"source": "gsm8k", "path": FIXTURE}, "test", 2, 2),
        ({"source": "words", "test": 7}, "test", None, 7),
        ({"source": "words"}, "test", None, loading.WORD_PROBLEMS["test"]),
    ],
)
def test_limits(settings, split, n, count):
    found = load_problems(ask_for(**settings), split, n=n)
    assert len(found) == count
    assert load_problems(ask_for(**settings), split, n=2) == found[:2]


def test_word_problems_are_those_of_the_seed():
    assert load_problems(ask_for("words", seed=5), "test", n=3) == words.generate("test", 3, seed=5)


def test_what_cannot_be_loaded_is_refused(tmp_path):
    with pytest.raises(CourseError, match="dev"):
        load_problems(ask_for("words"), "dev")
    (tmp_path / "train.jsonl").write_text(GOOD)
    with pytest.raises(CourseError, match="at least 10"):
        load_problems(ask_for("gsm8k", tmp_path), "validation")


# --- batches ------------------------------------------------------------------------------------------------


as_prompt = "<user>{}".format


def numbered(count: int) -> list[Problem]:
    return [Problem(str(i), f"Question {i}?", "", str(i), "words") for i in range(count)]


def test_a_batch_is_arrays_of_text():
    batch = next(training_batches(numbered(10), as_prompt, batch_size=4, seed=0))
    assert set(batch) == {"prompts", "answer", "kind"}
    for array in batch.values():
        assert type(array) is np.ndarray
        assert array.shape == (4,)
        assert array.dtype.kind == "U"
    assert [f"<user>Question {answer}?" for answer in batch["answer"]] == batch["prompts"].tolist()


def test_epochs_and_seeds_differ_and_repeat_themselves():
    def epochs(seed: int) -> list[tuple[str, ...]]:
        batches = islice(training_batches(numbered(50), as_prompt, 30, seed), 5)  # two of them belong to two epochs
        answers = [answer for batch in batches for answer in batch["answer"].tolist()]
        return [tuple(answers[start : start + 50]) for start in range(0, 150, 50)]

    assert epochs(0) == epochs(0)
    orders = [order for seed in (0, 1, 2**40) for order in epochs(seed)]
    assert len(set(orders)) == 9
    assert {len(set(order)) for order in orders} == {50}


@pytest.mark.parametrize(
    ("few", "many", "batch_size", "weight"), [(1, 9, 4, 0.1), (3, 5, 16, 1.0), (2, 7, 1, 2.5), (9, 1, 5, 10.0)]
)
def test_tasks_alternate_by_their_weights_and_each_has_its_epochs(few, many, batch_size, weight):
    counts = {"a": few, "b": many}
    weights = {"a": 1.0, "b": weight}
    problems = []
    for task, count in counts.items():
        problems += [Problem(f"{task}/{i}", f"{task} {i}?", "", str(i), "words", task=task) for i in range(count)]
    batches = list(islice(training_batches(problems, as_prompt, batch_size, seed=3, weights=weights), 40))
    tasks = [task for batch in batches for task in batch["task"].tolist()]
    for n in range(1, len(tasks) + 1):
        assert abs(tasks[:n].count("b") - n * weight / (1 + weight)) <= 2
    prompts = [text for batch in batches for text in batch["prompts"].tolist()]
    for task, count in counts.items():
        asked = [text for text, of_task in zip(prompts, tasks, strict=True) if of_task == task]
        assert all(text.startswith(f"<user>{task} ") for text in asked)
        for start in range(0, len(asked) - count + 1, count):
            assert len(set(asked[start : start + count])) == count
    late = batch_of_step(problems, as_prompt, batch_size, seed=3, weights=weights)(17)
    assert late["prompts"].tolist() == batches[17]["prompts"].tolist()


def test_several_tasks_have_names_ids_and_prompts_of_their_own(root):
    plain = {"source": "words"}
    hard = {"source": "words", "name": "hard", "difficulty": "hard", "prompts": {"user": "boxed"}}
    tasks = load_recipe(root / "recipes" / "tiny-cpu.yaml", [f"problems={json.dumps([plain, hard])}"]).tasks
    found = load_problems(tasks, "test", 3)
    assert [problem.task for problem in found] == ["words"] * 3 + ["hard"] * 3
    assert len({problem.id for problem in found}) == 6
    assert found[3].id.startswith("hard/")
    assert [problem.question for problem in found[:3]] == [p.question for p in load_problems(tasks[0], "test", 3)[:3]]

    def render(question: str, prompts=None) -> str:
        return f"{prompts.user if prompts else 'the recipe'}: {question}"

    assert [problem.prompt(render).partition(":")[0] for problem in found] == ["the recipe"] * 3 + ["boxed"] * 3
    broken = load_recipe(root / "recipes" / "tiny-cpu.yaml", ["problems=[{source: gsm8k, name: g, path: nowhere}]"])
    with pytest.raises(CourseError, match=r"task g: problems\.path=nowhere"):
        load_problems(broken.tasks, "train")


def test_problems_are_written_for_tfds_and_read_back_by_number(tmp_path):
    """Written twice: the second data set replaces the first."""
    import tensorflow_datasets as tfds

    for count in (20, 7):
        problems = words.generate("train", count)
        write_tfds({"train": problems}, tmp_path)
        rows = tfds.data_source("word_problems", split="train", data_dir=tmp_path)
        read = sorted(rows[number]["question"].decode() for number in range(len(rows)))
        assert read == sorted(problem.question for problem in problems)
