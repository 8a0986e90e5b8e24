"""Rewards: each value of the reference reward, its holes, the repair, and the calling conventions."""

import inspect
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lib import answers, rewards
from grpo_lib.common.errors import CourseError
from grpo_lib.prompts import template_completion

PERFECT = template_completion("9 * 2 = 18", "18")
GARBAGE = template_completion("r", "?")


def one(function, completion, gold="18") -> float:
    (reward,) = function(prompts=["Q?"], completions=[completion], answer=[gold])
    assert type(reward) is float
    return reward


# REWARDS also has those that a smoke test or a benchmark adds, once it is imported.
OWN = (*rewards.REFERENCE_REWARDS, *rewards.REPAIRED_REWARDS)


def total(completion, functions=rewards.REFERENCE_REWARDS, gold="18") -> float:
    return sum(one(function, completion, gold) for function in functions)


@pytest.mark.parametrize(
    ("completion", "exact", "approximate"),
    [
        (PERFECT, 3.0, 2.0),
        (GARBAGE, 3.0, 2.0),
        (PERFECT + "\n", 3.0, 2.0),
        ("\n" + PERFECT, 3.0, 2.0),
        (PERFECT + "\n\n", 1.5, 2.0),
        (PERFECT + " ", 1.5, 2.0),
        (PERFECT.replace("><answer", ">\n<answer"), 3.0, 2.0),
        (PERFECT.replace("><answer", ">\n\n<answer"), 1.5, 2.0),
        ("So " + PERFECT, 0.0, 2.0),
        ("<answer>18</answer>", 0.0, 0.0),
        ("<answer>18", 0.0, -1.0),
        ("<answer>18</answer>" * 2, 0.0, -2.0),
        ("18", 0.0, -2.0),
        ("", 0.0, -2.0),
    ],
)
def test_format_rewards(completion: str, exact: float, approximate: float) -> None:
    assert one(rewards.match_format_exactly, completion) == exact
    assert one(rewards.match_format_approximately, completion) == approximate


@pytest.mark.parametrize(
    ("answer", "gold", "checked", "numbers"),
    [
        ("100", "100", 3.0, 1.5),
        ("$100.00", "100", 3.0, 1.5),
        ("1,080", "1080", 3.0, 1.5),
        ("1080", "1,080", 3.0, 1.5),
        ("110", "100", 0.5, 0.0),
        ("90", "100", 0.5, 0.0),
        ("111", "100", 0.25, 0.0),
        ("120", "100", 0.25, 0.0),
        ("121", "100", -1.0, 0.0),
        ("-100", "100", -1.0, 0.0),
        ("0", "0", 3.0, 1.5),
        ("1", "0", -1.0, 0.0),
        ("?", "100", 0.0, 0.0),
        ("100 or 101", "100", 0.0, 0.0),
    ],
)
def test_answer_rewards(answer: str, gold: str, checked: float, numbers: float) -> None:
    completion = template_completion("r", answer)
    assert one(rewards.check_answer, completion, gold) == checked
    assert one(rewards.check_numbers, completion, gold) == numbers


@pytest.mark.parametrize(
    ("completion", "reference", "repaired"),
    [
        (PERFECT, 9.5, 1.1),
        (GARBAGE, 5.0, 0.0),
        (template_completion("r", "17"), 5.5, 0.1),
        (template_completion("r", "15"), 5.25, 0.1),
        (template_completion("r", "99"), 4.0, 0.1),
        ("So " + PERFECT, 6.5, 1.0),
        ("<answer>18</answer>", 4.5, 1.0),
        ("<answer>18</answer>" * 2, 2.5, 0.0),
        (PERFECT.replace("</reasoning>", "") + "</reasoning>", 6.5, 0.0),
        ("18", -2.0, 0.0),
        ("", -2.0, 0.0),
    ],
)
def test_totals_of_both_rewards(completion: str, reference: float, repaired: float) -> None:
    assert total(completion) == reference
    assert total(completion, rewards.REPAIRED_REWARDS) == pytest.approx(repaired)


# A worked example as courses print it: in a triple-quoted string, which begins and ends with a line break.
WORKED_EXAMPLE = """
<reasoning>
16 - 3 - 4 = 9 eggs are left, and 9 * 2 = 18.
</reasoning>
<answer>18</answer>
"""


def test_the_published_worked_example_earns_everything() -> None:
    points = [part.points for part in rewards.explain(WORKED_EXAMPLE, "18")]
    assert points == [3.0, 2.0, 3.0, 1.5]
    assert sum(points) == 9.5
    assert [one(function, WORKED_EXAMPLE) for function in rewards.REPAIRED_REWARDS] == [1.0, 0.1]


@given(st.text(st.characters()), st.booleans())
def test_repaired_reward_never_ranks_wrong_above_right(text: str, in_tags: bool) -> None:
    completion = template_completion("r", text) if in_tags else text
    right = one(rewards.correct_answer, completion) == 1.0
    earned = total(completion, rewards.REPAIRED_REWARDS)
    assert earned >= 1.0 if right else earned <= 0.1


@pytest.mark.parametrize("function", OWN, ids=lambda function: function.__name__)
def test_calling_conventions(function) -> None:
    texts = [PERFECT, "", GARBAGE]
    golds = ["18", "1,080", "3"]
    expected = function(["Q?"] * 3, texts, golds)
    assert len(expected) == 3
    assert all(type(reward) is float for reward in expected)
    conversations = [[{"role": "assistant", "content": text}] for text in texts]
    trl = function(prompts=[[]] * 3, completions=conversations, answer=golds, completion_ids=[[0]] * 3, state=None)
    tunix = function(prompts=np.array(["Q?"] * 3), completions=texts, answer=np.array(golds), question=["Q?"] * 3)
    assert expected == trl == tunix
    assert function(prompts=["Q?"] * 2, completions=[[], [{"role": "assistant", "content": None}]], answer=["1"] * 2)
    assert function(prompts=[], completions=[], answer=[]) == []
    with pytest.raises(ValueError):
        function(prompts=["Q?"] * 2, completions=[PERFECT] * 2, answer=["18"])


def test_the_gold_number_is_asked_for_only_where_it_is_needed() -> None:
    for function in (rewards.match_format_exactly, rewards.match_format_approximately, rewards.tidy_format):
        assert function(prompts=["Q?"], completions=[PERFECT]) == [one(function, PERFECT)]
    with pytest.raises(TypeError, match="gold"):
        rewards.check_answer(prompts=["Q?"], completions=[PERFECT])


NO_REASONING = "<reasoning> is missing, </reasoning> is missing"
WITHIN, EQUAL = "the answer block says 17, gold is 18", "the answer block says 18, gold is 18: equal"
TWO_BLOCKS = "of several answers none is paid: <answer> occurs 2 times, </answer> occurs once"


@pytest.mark.parametrize(("completion", "whys"), [  # why each of OWN pays what it pays
    (template_completion("r", "17"),
     ["exactly the template", "each of the four tags occurs exactly once", f"{WITHIN}: within 10 %", WITHIN, WITHIN,
      "exactly the template, and the answer block says 17"]),
    ("<answer>17 or\n18</answer>",
     [NO_REASONING] * 2 + ["the answer block says “17 or 18”, which does not state one number"] * 3 + [NO_REASONING]),
    (PERFECT + "<answer>18",
     ["<answer> occurs 2 times"] * 2 + [EQUAL] * 2 + [TWO_BLOCKS, "<answer> occurs 2 times"]),
])  # fmt: skip
def test_explanations(completion: str, whys: list[str]) -> None:
    assert [part.why for part in rewards.explain(completion, "18", OWN)] == whys


def test_a_random_reward_is_of_the_batch_and_not_of_its_answers() -> None:
    texts = [PERFECT, GARBAGE, "\ud800", ""] * 500
    paid = rewards.random_reward(prompts=texts, completions=texts, answer=["18"] * 2000)
    assert set(paid) == {0.0, 1.0}
    assert 900 < sum(paid) < 1100  # 4.5 standard deviations
    for kind in range(4):  # the same text is paid in one place and not in another
        assert 200 < sum(paid[kind::4]) < 300
    assert paid == rewards.random_reward(prompts=texts, completions=texts)  # a resumed run has the same ones
    assert paid != rewards.random_reward(prompts=texts, completions=texts[::-1])
    assert rewards.get_rewards(["random_reward"], answers.KINDS) == [rewards.random_reward]
    (part,) = rewards.explain(PERFECT, "18", [rewards.random_reward])
    assert (part.name, part.points) == ("random_reward", 0.5)


def test_explanations_are_of_the_reference_reward_by_default() -> None:
    assert [part.name for part in rewards.explain(PERFECT, "18")] == [
        function.__name__ for function in rewards.REFERENCE_REWARDS
    ]


TAGGED = st.lists(
    st.sampled_from(("<reasoning>", "</reasoning>", "<answer>", "</answer>", "18")) | st.text(st.characters())
).map("".join)


@given(TAGGED, st.text(st.characters()) | st.just("18"))
def test_what_is_explained_is_what_is_paid_and_no_text_raises(completion: str, gold: str) -> None:
    for function in OWN:
        part = function.explain(completion, gold)
        assert (part.name, part.points) == (function.__name__, one(function, completion, gold))
        assert part.why
        assert part.why.isprintable()
        assert len(part.why) < 200


@pytest.mark.parametrize("function", OWN, ids=lambda function: function.__name__)
def test_a_trainer_sees_the_convention_and_may_pickle(function) -> None:
    assert list(inspect.signature(function).parameters) == [
        *("prompts", "completions", "answer", "kind", "thinking", "kwargs")
    ]
    assert pickle.loads(pickle.dumps(function)) is function


def test_registry() -> None:
    assert all(name == function.__name__ for name, function in rewards.REWARDS.items())
    assert rewards.get_rewards(["tidy_format", "check_answer"]) == [rewards.tidy_format, rewards.check_answer]
    with pytest.raises(CourseError, match=r"nonesuch.*tidy_format"):
        rewards.get_rewards(["check_answer", "nonesuch"])


def test_only_a_reward_that_knows_a_grader_scores_its_problems() -> None:
    assert rewards.get_rewards(["correct_answer"], {"integer", "latex", "tagged"}) == [rewards.correct_answer]
    with pytest.raises(CourseError, match=r"tidy_format.*integer.*correct_answer"):
        rewards.get_rewards(["correct_answer", "tidy_format"], {"integer"})
    texts = ["Answer: 033", "I think 33", "<answer>33</answer>"]
    golds = ["33"] * 3
    assert rewards.correct_answer(None, texts, golds, kind=["integer"] * 3) == [1.0, 0.0, 1.0]
    assert rewards.correct_answer(None, texts, golds) == [0.0, 0.0, 1.0]
    assert "33, gold is 33" in rewards.correct_answer.explain(texts[0], "33", "integer").why
