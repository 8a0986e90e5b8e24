"""The cold start: which problems it takes, and that an interrupted one ends like one that was not."""

import dataclasses

import jax
import numpy as np
import pytest
from etils import epath
from hypothesis import given
from hypothesis import strategies as st

from grpo_lib import analysis
from grpo_lib.problems import Problem, take_different, words
from grpo_lib.prompts import template_completion
from grpo_lib.records import grade
from grpo_train import checks, cold_start, pipeline
from grpo_train.recipes import load_recipe
from grpo_train.runs import checkpoints

OVERRIDES = ["problems.train=200", "problems.test=20", "training.cold_start=64"]


@given(st.lists(st.sampled_from("abcdef")), st.integers(0, 8))
def test_no_problem_is_both_taught_and_trained_on(questions, count):
    taught, rest = take_different([Problem("", text, "", "1", "words") for text in questions], count)
    names = [problem.question for problem in taught]
    assert len(set(names)) == len(names) == min(count, len(set(questions)))
    assert [problem.question for problem in rest] == [text for text in questions if text not in names]


@pytest.mark.parametrize(
    ("solution", "spaced"),
    [
        ("9*5=45 45-1=44", "9 * 5 = 45 45 - 1 = 44"),
        ("9 * 5 = 45", "9 * 5 = 45"),
        ("She has 48/2 = 24 twenty-four-hour clips.", "She has 48 / 2 = 24 twenty-four-hour clips."),
    ],
)
def test_spaces_are_put_into_the_example_and_not_into_the_problem(solution, spaced):
    problem = Problem("", "How many?", solution, "44", "words")
    prompt, completion = cold_start.example(problem, str.upper, spaces=True)
    assert (prompt, completion) == ("HOW MANY?", template_completion(spaced, "44"))
    assert cold_start.example(problem, str.upper) == (prompt, template_completion(solution, "44"))
    assert problem.solution == solution


@given(st.integers(0, 99))
def test_both_spellings_are_graded_and_analysed_alike(seed):
    [problem] = words.generate("train", 1, seed)
    texts = [cold_start.example(problem, str, spaces)[1] for spaces in (False, True)]
    plain, spaced = (list(analysis.calculations(text)) for text in texts)
    assert plain == spaced != []
    assert grade(texts[0], problem.answer) == grade(texts[1], problem.answer)
    assert grade(texts[1], problem.answer)["strict"]
    # And one whose calculations are false.
    false = dataclasses.replace(problem, solution=problem.solution.replace("=", "=1"), answer="0")
    record = {"solution": problem.solution, "gold": problem.answer}
    found = []
    for spaces in (False, True):
        text = cold_start.example(false, str, spaces)[1]
        found.append(analysis.causes(record | {"completion": text} | grade(text, problem.answer)))
    assert found == [frozenset({"skill"})] * 2


@pytest.mark.long
def test_an_interrupted_cold_start_ends_with_the_same_weights(root, tmp_path, monkeypatch):
    recipe = load_recipe(root / "recipes" / "lessons" / "tiny-hard.yaml", OVERRIDES)
    ready = checks.check(recipe)
    monkeypatch.setattr(cold_start, "SAVED_EVERY", 3)

    def breaks_off(batches, **_):
        yield from batches[:5]
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(cold_start, "tqdm", breaks_off)
        pipeline.start(ready, tmp_path / "killed")
    assert not (tmp_path / "killed" / "checkpoints" / "start").exists()
    resumed, whole = (pipeline.start(ready, tmp_path / name) for name in ("killed", "whole"))
    converted = pipeline.convert(recipe, tmp_path / "whole")
    ours, theirs, base = (
        jax.tree.leaves(checkpoints.read(epath.Path(folder))) for folder in (resumed, whole, converted)
    )
    assert all(map(np.array_equal, ours, theirs))
    assert not all(map(np.array_equal, ours, base))
