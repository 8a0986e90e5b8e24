"""The graders of the course: the answer in tags, the last number anywhere, and the format.

Two graders, always both. The strict one reads the last whole `<answer>…</answer>` block and wants one number stated
there as the final answer; final_answer.py has the rules. The lenient one takes the last number anywhere,
so that learning the tags is not mistaken for learning mathematics. Numbers are compared as exact rationals: no float,
nothing executed.

A completion may begin with thoughts in <think> tags, which are no part of its answer: all functions look at what
follows them alone, and find nothing in a completion that ends inside them. `thinking` says that the prompt has opened
them (`prompts.opens_thoughts`).

The graders read text that a policy is rewarded for, so none of them may raise or hang on any string: tags are
found with `str.find`, and patterns only ever see the end of a long text.
"""

import re
from fractions import Fraction
from functools import lru_cache

from grpo_lib.answers.final_answer import canonical_answer
from grpo_lib.answers.numbers import LONGEST, canonical_form, find_numbers, parse_decimal, strip_markup
from grpo_lib.prompts import (
    ANSWER_CLOSE,
    ANSWER_OPEN,
    REASONING_CLOSE,
    REASONING_OPEN,
    TAGS,
    THINK_MARK,
    after_thoughts,
)

_BLOCKS = re.compile(rf"\s*{REASONING_OPEN}(.*){REASONING_CLOSE}\s*{ANSWER_OPEN}(.*){ANSWER_CLOSE}\s*", re.S)
_INSIDE = r"\n?(\S(?:.*\S)?)\n?"
_EXACT = re.compile(rf"\n?{REASONING_OPEN}{_INSIDE}{REASONING_CLOSE}\n?{ANSWER_OPEN}{_INSIDE}{ANSWER_CLOSE}\n?", re.S)

WINDOW = 100  # characters that the lenient grader looks at, before the last digit
_LAST_DIGIT = re.compile(r"(?s).*[\d¼½¾⅐-⅞]")
_COMMON_END = re.compile(
    r"(?:[=:>(]\s?|(?<!minus)(?<!egative)(?<=[a-z]) )\$?((?:[0-9]+|[1-9][0-9]{0,2}(?:,[0-9]{3})+)(?:\.[0-9]+)?)\Z"
)
_NOTHING_MORE = re.compile(r"\Z|[.,)>]*(?:\Z|\n|</)")


def answer_block(completion: str, thinking: bool = False) -> str | None:
    """The content of the last whole `<answer>…</answer>` block, untouched; None if there is none."""
    if thinking or THINK_MARK in completion:
        completion = after_thoughts(completion, thinking)
    closing = completion.rfind(ANSWER_CLOSE)
    opening = completion.rfind(ANSWER_OPEN, 0, closing) if closing >= 0 else -1
    if opening < 0:
        return None
    start = opening + len(ANSWER_OPEN)
    return completion[start : completion.find(ANSWER_CLOSE, start)]


def extract_answer(completion: str, thinking: bool = False) -> str | None:
    """The number in the last whole `<answer>…</answer>` block, canonically spelled; None if there is none."""
    block = answer_block(completion, thinking)
    if block is None:
        return None
    return _remembered(block) if len(block) <= _SHORT else canonical_answer(block)


def is_close(completion: str, gold: str, ratio: float, thinking: bool = False) -> bool:
    """Whether the tagged answer is within `ratio` of `gold` (0.1 = 10 % of its size, ends included)."""
    return near_value(extract_answer(completion, thinking), gold, ratio)


def same_value(answer: str | None, gold: str) -> bool:
    """Whether `answer`, as `extract_answer` gave it, equals `gold` in value."""
    return answer is not None and answer == _remembered(gold)


def near_value(answer: str | None, gold: str, ratio: float) -> bool:
    """Whether `answer`, as `extract_answer` gave it, is within `ratio` of `gold`.

    Of numerals too long for arithmetic (`LONGEST`) only equal ones are near each other.
    """
    target = _remembered(gold)
    if answer is None or target is None:
        return False
    if answer == target:
        return True
    if max(len(answer), len(target)) > 2 * LONGEST:
        return False
    return abs(Fraction(answer) - Fraction(target)) <= Fraction(str(ratio)) * abs(Fraction(target))


# The same gold is compared with many completions, and the completions of a group state the same few answers.
_remembered = lru_cache(maxsize=4096)(canonical_answer)
_SHORT = 100  # characters of a block that is remembered


def lenient_answer(completion: str, thinking: bool = False) -> str | None:
    """The last number anywhere in the completion, tags or not, in its canonical spelling."""
    if thinking or THINK_MARK in completion:
        completion = after_thoughts(completion, thinking)
    last_digit = _LAST_DIGIT.match(completion)
    if not last_digit:
        return None
    end = last_digit.end()
    common = _COMMON_END.search(completion, max(0, end - 40), end)
    if common and _NOTHING_MORE.match(completion, end):
        return parse_decimal(common[1])  # no need for a closer look at "… so it is 18."
    start = max(0, end - WINDOW)
    if start and completion[start - 1 : end].isdigit():  # an endless numeral: all of it, or nothing
        return parse_decimal(completion[len(completion[:end].rstrip("0123456789.,")) : end])
    if start and " " in completion[start:end]:
        start = completion.find(" ", start, end)
    # A little more, for "million" and the brace that closes \frac{1}{2}.
    text = strip_markup(completion[start : end + 30])
    numbers = find_numbers(text)
    if not numbers:
        return None
    last = numbers[-1]
    written = text[last.start : last.end]
    if last.value is None and "," in written:  # "2,3,4" is not a number, but has a last one
        return parse_decimal(written.rstrip(".,").rpartition(",")[2])
    return canonical_form(last.value)


def is_correct_leniently(completion: str, gold: str, thinking: bool = False) -> bool:
    """Lenient verdict: the last number anywhere in the completion equals `gold` in value."""
    return same_value(lenient_answer(completion, thinking), gold)


def format_is_loose(completion: str, thinking: bool = False) -> bool:
    """Both blocks, in order and not blank, each tag exactly once; white space around the blocks is fine."""
    if thinking or THINK_MARK in completion:
        completion = after_thoughts(completion, thinking)
    return _has_both_blocks(completion)


def format_is_exact(completion: str, thinking: bool = False) -> bool:
    """Exactly `<reasoning>…</reasoning><answer>…</answer>`, also with the blocks on lines of their own.

    Both blocks once, in order, nothing else outside them, and at most one line break between the blocks and at each
    edge of a tag, the outer edges included: a text may begin and end with a line break, as a triple-quoted one does.
    """
    if thinking or THINK_MARK in completion:
        completion = after_thoughts(completion, thinking)
    return _has_both_blocks(completion) and _EXACT.fullmatch(completion) is not None


def _has_both_blocks(text: str) -> bool:
    for tag in TAGS:
        if text.count(tag) != 1:
            return False
    blocks = _BLOCKS.fullmatch(text)
    return blocks is not None and all(content.strip() for content in blocks.groups())
