"""The generator of word problems: reproducible, split by construction, and its solutions right."""

import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lib.problems import words

CALCULATION = re.compile(r"([1-9][0-9]*)([-+*])([1-9][0-9]*)=([1-9][0-9]*)")
seeds = st.integers(min_value=0, max_value=2**32)


def test_problems_depend_on_split_and_seed_alone():
    for split in words.SPLITS:
        problems = words.generate(split, 100, seed=1)
        assert problems[:20] == words.generate(split, 20, seed=1)
        assert len({p.question for p in problems} & {p.question for p in words.generate(split, 100)}) < 20
    # Fixed here on purpose: results of the course are only comparable while the problems stay what they are.
    assert words.generate("train", 1, seed=0)[0].solution == "2*5=10"


@settings(max_examples=20, deadline=None)
@given(st.dictionaries(st.sampled_from(words.SPLITS), seeds, min_size=3))
def test_splits_share_no_question_whatever_the_seeds(seed_of):
    train, validation, test = ({p.question for p in words.generate(s, 100, seed_of[s])} for s in words.SPLITS)
    assert not train & validation and not train & test and not validation & test


def test_validation_and_test_hold_no_question_twice_and_train_holds_over_20000():
    for split in ("validation", "test"):
        assert len({p.question for p in words.generate(split, 1000, seed=0)}) == 1000
    assert len({p.question for p in words.generate("train", 25_000, seed=0)}) > 20_000


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(words.SPLITS), seeds, st.sampled_from([*words.DIFFICULTIES]))
def test_solutions_are_right_and_follow_from_the_question(split, seed, difficulty):
    problems = words.generate(split, 100, seed, difficulty)
    assert len({p.id for p in problems}) == len(problems)
    for problem in problems:
        calculations = problem.solution.split(" ")
        assert problem.steps == len(calculations)
        before = None
        for calculation in calculations:
            a, operator, b, result = CALCULATION.fullmatch(calculation).groups()
            a, b, result = int(a), int(b), int(result)
            assert before in (None, a), "a step takes up the result of the one before"
            assert result == (a + b if operator == "+" else a - b if operator == "-" else a * b)
            assert result > 0
            before = result
        stated = sorted(re.findall(r"[0-9]+", problem.question))
        first, *rest = (CALCULATION.fullmatch(step).groups() for step in calculations)
        needed = sorted([first[0], first[2], *(step[2] for step in rest)])
        if words.has_distractor(problem.question):
            assert not Counter(needed) - Counter(stated) and len(stated) == len(needed) + 1  # one number too many
        else:
            assert stated == needed  # all that the solution needs
        assert problem.answer == str(before)
        assert problem.source == "words"


@settings(max_examples=20, deadline=None)
@given(seeds, st.sampled_from([*words.DIFFICULTIES]))
def test_no_training_problem_needs_a_held_out_calculation_and_test_problems_do(seed, difficulty):
    train, test = (words.generate(split, 300, seed, difficulty) for split in ("train", "test"))
    assert not any(words.needs_held_out(problem.solution) for problem in train)
    assert any(words.needs_held_out(problem.solution) for problem in test)


def test_a_distractor_is_about_somebody_else():
    found = [p for p in words.generate("test", 1000) if words.has_distractor(p.question)]
    assert 5 < len(found) < 50
    for problem in found:
        other = re.search(r"Later (\w+) finds", problem.question)[1]
        assert f"does {other} have" not in problem.question and problem.steps == 1


def test_hard_problems_have_numbers_that_standard_ones_have_not():
    hard, standard = ({p.solution for p in words.generate("test", 500, 0, name)} for name in ("hard", "standard"))
    assert not hard & standard


def test_both_numbers_of_steps_occur():
    steps = [p.steps for p in words.generate("test", 1000, seed=0)]
    assert set(steps) == {1, 2}
    assert steps.count(2) / len(steps) == pytest.approx(words.TWO_STEP_SHARE, abs=0.05)
