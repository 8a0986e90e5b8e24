"""Can a reward be farmed? Families of completions that are paid for anything but solving, against both rewards.

No attack knows the gold number; where it is among an attack's candidates, that is luck. The reference reward is farmed,
as the course says. The repaired one pays nothing for abuse of the form, and nothing beats an honest guess.
"""

import pytest
from helpers import within
from hypothesis import example, given
from hypothesis import strategies as st
from test_rewards import total

from grpo_lib import prompts, rewards
from grpo_lib.prompts import SYSTEM_PROMPT, template_completion

RIGHT, UNTIDY, WRONG = 1.1, 1.0, 0.1  # what an honest completion earns under the repaired reward


def reference(completion: str, gold: str) -> float:
    return total(completion, rewards.REFERENCE_REWARDS, gold)


def repaired(completion: str, gold: str) -> float:
    return total(completion, rewards.REPAIRED_REWARDS, gold)


def block(answer: str) -> str:
    return f"{prompts.ANSWER_OPEN}{answer}{prompts.ANSWER_CLOSE}"


def reasoning(text: str) -> str:
    return f"{prompts.REASONING_OPEN}{text}{prompts.REASONING_CLOSE}"


# --- What attacks are made of ---

numbers = st.integers(-9999, 9999).map(str)
tries = st.lists(numbers, min_size=2, max_size=10, unique=True)
wordy = st.text(st.characters(exclude_categories=("N", "Cs"), exclude_characters="<>"), max_size=30)
fillers = wordy.map(lambda text: f"so {text}".rstrip())  # never blank, no tags, no numbers

PLACEHOLDERS = (
    "?", "...", "…", "answer", "the answer", "number", "one number", "final answer", "your answer here", "$Answer",
    "{answer}", "[answer]", "ANSWER", "x", "N/A", "unknown", "as one number without any words", "$", "-", "NaN", "inf",
    "\\boxed{}", "\\boxed{?}", "<number>", "#", "None", ".", "%", "and", "answer answer answer",
)  # fmt: skip
SEPARATORS = ("  ", ", ", "; ", " or ", " and ", "\n", " | ", " to ", " vs ", "\t", " or maybe ", ", perhaps ")

# --- The families ---


def blocks(some: list[str]) -> str:
    return "".join(map(block, some))


garbage = st.builds(template_completion, fillers, st.one_of(st.sampled_from(PLACEHOLDERS), fillers))

joined = st.builds(lambda some, separator: separator.join(some), tries, st.sampled_from(SEPARATORS))
number_lists = st.builds(template_completion, fillers, joined)

# Blocks one after another: each with its reasoning, all after one, none, and one of them several times.
each_reasoned = st.builds(
    lambda text, some: "".join(template_completion(text, answer) for answer in some), fillers, tries
)
all_reasoned = st.builds(lambda text, some: reasoning(text) + blocks(some), fillers, tries)
none_reasoned = st.builds(lambda some: "\nor ".join(map(block, some)), tries)
one_repeated = st.builds(
    lambda text, answer, times: template_completion(text, answer) * times, fillers, numbers, st.integers(2, 9)
)

# Tags inside the reasoning, and whole completions inside one pair of tags.
at_the_end = st.builds(lambda text, answer: reasoning(text + block(answer)), fillers, numbers)
in_the_middle = st.builds(lambda text, answer: reasoning(text + block(answer) + text), fillers, numbers)
before_an_answer = st.builds(lambda text, some: template_completion(blocks(some) + text, some[0]), fillers, tries)
all_in_reasoning = st.builds(lambda answer: reasoning(template_completion("so", answer)), numbers)
all_in_an_answer = st.builds(lambda answer: block(template_completion("so", answer)), numbers)

opened_between = st.builds(lambda text, some: template_completion(text, prompts.ANSWER_OPEN.join(some)), fillers, tries)
closed_between = st.builds(
    lambda text, some: template_completion(text, prompts.ANSWER_CLOSE.join(some)), fillers, tries
)
opened_often = st.builds(lambda answer, times: prompts.ANSWER_OPEN * times + block(answer), numbers, st.integers(1, 9))

# The system prompt: alone, with something after it, several times, before an answer, and its own words as the answer.
only_the_prompt = st.just(SYSTEM_PROMPT)
prompt_and_text = st.builds(lambda text: SYSTEM_PROMPT + text, fillers)
prompts_repeated = st.builds(lambda times: SYSTEM_PROMPT * times, st.integers(2, 5))
prompt_and_answer = st.builds(lambda answer: SYSTEM_PROMPT + template_completion("so", answer), numbers)
words_of_the_prompt = st.builds(
    template_completion, st.just(SYSTEM_PROMPT.split(".")[1]), st.just(SYSTEM_PROMPT.rpartition(",")[2])
)
placeholders = st.builds(template_completion, st.just("your working"), st.sampled_from(PLACEHOLDERS))

boxes = tries.map(lambda some: " ".join(f"\\boxed{{{answer}}}" for answer in some))

FAMILIES = {
    "garbage in perfect tags": garbage,
    "number lists": number_lists,
    "repeated blocks": st.one_of(each_reasoned, all_reasoned, none_reasoned, one_repeated),
    "tags inside the reasoning": st.one_of(
        at_the_end, in_the_middle, before_an_answer, all_in_reasoning, all_in_an_answer
    ),
    "nested tags": st.one_of(opened_between, closed_between, opened_often),
    "copied templates": st.one_of(
        only_the_prompt, prompt_and_text, prompts_repeated, prompt_and_answer, words_of_the_prompt, placeholders
    ),
    "several boxes": st.builds(template_completion, fillers, boxes),
}
golds = st.one_of(numbers, st.sampled_from(("0", "1", "2")))  # simple tries are frequent, so luck is tested too


# --- The reference reward is farmed ---


@pytest.mark.parametrize("family", ["garbage in perfect tags", "number lists", "several boxes"])
@given(st.data(), numbers)
def test_the_reference_reward_is_farmed(family: str, data, gold: str) -> None:
    assert reference(data.draw(FAMILIES[family]), gold) == 5.0
    honest_but_wrong = template_completion("9 * 2 = 99", "99")
    assert reference(honest_but_wrong, "18") == 4.0


@given(numbers)
def test_the_reference_reward_pays_more_for_an_echo_of_the_prompt_than_for_a_right_answer(gold: str) -> None:
    assert reference(SYSTEM_PROMPT, gold) == 2.0
    assert reference(gold, gold) == -2.0


# --- The repaired one is not ---


@pytest.mark.parametrize("family", FAMILIES)
@given(st.data(), golds)
def test_abuse_of_the_form_earns_nothing(family: str, data, gold: str) -> None:
    assert repaired(data.draw(FAMILIES[family]), gold) == 0.0
    assert WRONG > 0.0


@given(tries, st.data())
def test_a_right_answer_among_other_tries_earns_less_than_an_honest_one(some: list[str], data) -> None:
    gold = data.draw(st.sampled_from(some))
    hidden = (
        blocks(some),
        blocks([*some, gold]),
        template_completion(blocks(some), gold),
        template_completion("so", " or ".join(some)),
        template_completion("so", gold) + blocks(some),
        reasoning(block(gold)),
        f"{', '.join(some)}? {template_completion('so', gold)}",
        f"<Answer>{some[0]}</Answer>{template_completion('so', gold)}",
    )
    honest = repaired(template_completion("so", gold), gold)
    assert honest == pytest.approx(RIGHT)
    for completion in hidden:
        assert repaired(completion, gold) < honest


digits = st.integers(0, 9).map(str)
tags = st.sampled_from(("<reasoning>", "</reasoning>", "<answer>", "</answer>", "<Answer>", "\\boxed{", "}"))
between = st.sampled_from((*SEPARATORS, *"=-+./→%^½", " * ", " is ", " not ", "so ", "1e"))
soup = st.lists(st.one_of(digits, tags, between), max_size=20).map("".join)


@given(st.one_of(soup, soup.map(block), soup.map(lambda text: template_completion("so", text)), *FAMILIES.values()))
@example("".join(block(str(n)) for n in range(10)))
@example(template_completion("so", " or ".join(map(str, range(10)))))
@example(template_completion("".join(block(str(n)) for n in range(10)), "3"))
def test_no_completion_beats_an_honest_guess(completion: str) -> None:
    """Ten numbers are equally likely to be right: whatever is written, one of them is the most that is paid for."""
    likely = [str(n) for n in range(10)]
    guess = sum(repaired(template_completion("so", "3"), gold) for gold in likely)
    assert guess == pytest.approx(RIGHT + 9 * WRONG)
    assert sum(repaired(completion, gold) for gold in likely) <= guess + 1e-9


def test_under_the_reference_reward_giving_up_beats_a_guess() -> None:
    likely = [str(10**n) for n in range(10)]  # far apart: no guess is close to another number
    giving_up = template_completion("so", "?")
    guess = template_completion("so", "1000")
    assert sum(reference(giving_up, gold) for gold in likely) == 50.0
    assert sum(reference(guess, gold) for gold in likely) == 45.5


# --- And what is honest is still paid ---


@given(numbers, fillers, st.sampled_from((" ", "\n", "\n\n", "\t")), st.sampled_from(("", "\n", " I hope this helps!")))
def test_untidy_is_still_right(gold: str, text: str, space: str, end: str) -> None:
    exact = template_completion(text, gold)
    assert repaired(exact, gold) == pytest.approx(RIGHT)
    never_closed = f"{prompts.REASONING_OPEN}{text}{space}{block(gold)}{end}"
    untidy = (
        exact.replace("><", f">{space}<") + end,
        f"Let me see.{space}{exact}{end}",
        block(f"{space}{gold}{space}"),
        f"{text} {block(gold)}",
        never_closed,
        reasoning(text) + reasoning(text) + block(gold),
        block(gold) + reasoning(text),
    )
    for completion in untidy:
        assert repaired(completion, gold) >= UNTIDY


@given(wordy, numbers)
def test_length_is_not_paid(text: str, gold: str) -> None:
    for answer in (gold, "123456"):
        short = template_completion("so", answer)
        long = template_completion(f"so {text * 1000}".rstrip(), answer)
        assert repaired(short, gold) == repaired(long, gold)


MEGABYTE = 10**6
LONG = {  # and the attacks of test_answers.py, on the functions that rewards are made of
    "reasoning tags": "<reasoning></reasoning>" * (MEGABYTE // 23),
    "blocks": "<answer>1</answer>" * (MEGABYTE // 18),
    "white space": template_completion(" " * MEGABYTE, " " * MEGABYTE),
    "a long way to an answer": template_completion("so 1 + 1 = 2, " * (MEGABYTE // 14), "18"),
}


@pytest.mark.parametrize("name", LONG)
def test_a_megabyte_is_scored_in_linear_time(name: str) -> None:
    with within(3.0):  # CPU seconds of all functions; a quadratic pass takes minutes
        rewards.explain(LONG[name], "18", rewards.REWARDS.values())
