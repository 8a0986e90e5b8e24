"""Reward functions, in the calling convention that Tunix and TRL share.

Each is `fn(prompts, completions, answer, **kwargs) -> list[float]`, one reward per completion. `completions`
holds strings, or TRL's conversations (lists of {"role", "content"}); `answer` holds one gold number per
completion. Tunix logs each part of the reward under the function's `__name__`.

The first four are the reward of the reference recipe, as the field's tutorials use it. A perfect completion
earns 3.0 + 2.0 + 3.0 + 1.5 = 9.5. With gold 18 the sum also pays, which is what the course comes to find:

    <reasoning>r</reasoning><answer>?</answer>      5.0    no answer at all, in perfect tags
    <reasoning>r</reasoning><answer>17</answer>     5.5    wrong, but close
    <reasoning>r</reasoning><answer>99</answer>     4.0    wrong: an honest try earns less than "?"
    18                                             -2.0    right, but without tags: the same as saying nothing

`correct_answer` and `tidy_format` are the repair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from grpo_lib import answers
from grpo_lib import prompts as prompt_texts
from grpo_lib.errors import CourseError

RewardFunction = Callable[..., list[float]]
Completion = str | Sequence[dict[str, Any]]

_TAGS = (
    prompt_texts.REASONING_OPEN,
    prompt_texts.REASONING_CLOSE,
    prompt_texts.ANSWER_OPEN,
    prompt_texts.ANSWER_CLOSE,
)


def _texts(completions: Iterable[Completion]) -> list[str]:
    """Each completion as text; of a conversation, what its last message says."""

    def text(completion: Completion) -> str:
        if isinstance(completion, str):
            return completion
        return (completion[-1].get("content") or "") if completion else ""

    return [text(completion) for completion in completions]


def _pairs(completions: Iterable[Completion], answer: Iterable[Any]) -> list[tuple[str, str]]:
    """(completion, gold) as text. ValueError if there are not as many of one as of the other."""
    return [(text, str(gold)) for text, gold in zip(_texts(completions), answer, strict=True)]


def match_format_exactly(prompts: Any, completions: Any, answer: Any = None, **kwargs: Any) -> list[float]:
    """+3.0 for exactly the template, +1.5 for the same up to white space around the blocks, else 0.0."""
    return [
        3.0 if answers.format_is_exact(text) else 1.5 if answers.format_is_loose(text) else 0.0
        for text in _texts(completions)
    ]


def match_format_approximately(prompts: Any, completions: Any, answer: Any = None, **kwargs: Any) -> list[float]:
    """For each of the four tags +0.5 if it occurs exactly once, else -0.5: from -2.0 to +2.0."""
    return [sum(0.5 if text.count(tag) == 1 else -0.5 for tag in _TAGS) for text in _texts(completions)]


def check_answer(prompts: Any, completions: Any, answer: Any, **kwargs: Any) -> list[float]:
    """+3.0 for a tagged number equal in value, +0.5 within 10 %, +0.25 within 20 %, -1.0 for any other.

    0.0 where no number can be extracted: there is nothing to check, and this is what lets garbage in perfect
    tags earn 5.0 in total, more than the 4.0 of a wrong number.
    """

    def score(text: str, gold: str) -> float:
        if answers.is_correct(text, gold):
            return 3.0
        if answers.is_close(text, gold, 0.1):
            return 0.5
        if answers.is_close(text, gold, 0.2):
            return 0.25
        return 0.0 if answers.extract_answer(text) is None else -1.0

    return [score(text, gold) for text, gold in _pairs(completions, answer)]


def check_numbers(prompts: Any, completions: Any, answer: Any, **kwargs: Any) -> list[float]:
    """+1.5 if the extracted number equals the gold number in value, else 0.0."""
    return [1.5 if answers.is_correct(text, gold) else 0.0 for text, gold in _pairs(completions, answer)]


def correct_answer(prompts: Any, completions: Any, answer: Any, **kwargs: Any) -> list[float]:
    """1.0 if the tagged answer equals the gold number in value, else 0.0.

    With `tidy_format`, the repair of the reference reward. There the format alone paid more than half of the
    total, whatever stood in the tags, and a near miss was paid too. Here being right is what pays: a wrong
    completion earns at most 0.1 in all, a right one at least 1.0.
    """
    return [1.0 if answers.is_correct(text, gold) else 0.0 for text, gold in _pairs(completions, answer)]


def tidy_format(prompts: Any, completions: Any, answer: Any = None, **kwargs: Any) -> list[float]:
    """0.1 if the format is exact and a number can be extracted from it, else 0.0.

    Asking for the number closes the hole: `<answer>?</answer>` in perfect tags earns nothing. Its size
    keeps it a first step for a model that does not know the tags yet, and never a reason to prefer tags to
    being right.
    """
    return [
        0.1 if answers.format_is_exact(text) and answers.extract_answer(text) is not None else 0.0
        for text in _texts(completions)
    ]


REFERENCE_REWARDS: tuple[RewardFunction, ...] = (
    match_format_exactly,
    match_format_approximately,
    check_answer,
    check_numbers,
)
REWARDS: dict[str, RewardFunction] = {
    function.__name__: function for function in (*REFERENCE_REWARDS, correct_answer, tidy_format)
}


def get_rewards(names: Iterable[str]) -> list[RewardFunction]:
    """The reward functions of these names, in their order. CourseError for a name that is not in REWARDS."""
    names = list(names)
    unknown = [str(name) for name in names if name not in REWARDS]
    if unknown:
        raise CourseError(f"rewards: unknown {', '.join(unknown)}; known are {', '.join(REWARDS)}")
    return [REWARDS[name] for name in names]
