"""The generator of word problems: reproducible, split by construction, and its solutions right."""

import operator
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lib.common.errors import CourseError
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


def test_validation_and_test_hold_no_question_twice_and_train_holds_over_20000():
    held_out = words.generate("validation", 1000, seed=0) + words.generate("test", 1000, seed=0)
    assert len({problem.question for problem in held_out}) == 2000
    assert len({p.question for p in words.generate("train", 25_000, seed=0)}) > 20_000


OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(words.SPLITS), seeds, st.sampled_from([*words.DIFFICULTIES]))
def test_solutions_are_right_and_follow_from_the_question(split, seed, difficulty):
    problems = words.generate(split, 100, seed, difficulty)
    assert len({p.id for p in problems}) == len(problems)
    # The split is that of the question's text, so whatever the seeds are, two splits share none.
    assert {words.split_of(p.question) for p in problems} == {split}
    for problem in problems:
        steps = [CALCULATION.fullmatch(step).groups() for step in problem.solution.split(" ")]
        assert all(OPERATORS[sign](int(a), int(b)) == int(result) > 0 for a, sign, b, result in steps)
        # A step takes up the result of the one before, and the last one is the answer.
        assert [a for a, *_ in steps[1:]] + [problem.answer] == [result for *_, result in steps]
        assert (problem.steps, problem.source) == (len(steps), "words")
        stated = Counter(re.findall(r"[0-9]+", problem.question))
        needed = Counter([steps[0][0], *(b for _, _, b, _ in steps)])
        assert not needed - stated  # all that the solution needs, and with a distractor one number too many
        assert (stated - needed).total() == words.has_distractor(problem.question)


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
        assert f"does {other} have" not in problem.question
        assert problem.steps == 1


def test_hard_problems_have_numbers_that_standard_ones_have_not():
    hard, standard = ({p.solution for p in words.generate("test", 500, 0, name)} for name in ("hard", "standard"))
    assert not hard & standard


def test_more_problems_than_there_are_is_an_error_and_no_endless_loop(monkeypatch):
    monkeypatch.setattr(words, "MOST_DRAWS", 100)  # of the 5,000 that a pool of some ten thousands needs
    with pytest.raises(CourseError, match=r"problems\.test=10000000: word problems \(hard\) have about \d+"):
        words.generate("test", 10_000_000, difficulty="hard")


def test_both_numbers_of_steps_occur():
    steps = [p.steps for p in words.generate("test", 1000, seed=0)]
    assert set(steps) == {1, 2}
    assert steps.count(2) / len(steps) == pytest.approx(words.TWO_STEP_SHARE, abs=0.05)
