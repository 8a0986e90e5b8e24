"""The cold start: which problems it takes, and that an interrupted one ends like one that was not."""

import jax
import numpy as np
import pytest
from etils import epath
from hypothesis import given
from hypothesis import strategies as st

from grpo_lib.problems import Problem, take_different
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
