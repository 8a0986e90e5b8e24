"""What answer a completion states, and whether it is the gold: a grader for each kind of gold answer.

    is_correct(completion, gold)                  # tagged: one number in <answer> tags, as for GSM8K
    is_correct(completion, gold, kind="latex")    # competition mathematics

tagged.py has the graders that the course teaches with, the strict and the lenient one; competition/ those that only
competition mathematics needs.  The graders read text that a
policy is rewarded for, so none of them may raise or hang on any string.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

from grpo_lib.answers.final_answer import canonical_answer
from grpo_lib.answers.tagged import (
    answer_block,
    extract_answer,
    format_is_exact,
    format_is_loose,
    is_close,
    is_correct_leniently,
    lenient_answer,
    near_value,
    same_value,
)

__all__ = [
    "KINDS", "agrees", "answer_block", "canonical_answer", "extract_answer", "format_is_exact", "format_is_loose",
    "is_close", "is_correct", "is_correct_leniently", "lenient_answer", "near_value", "same_value", "stated_answer",
]  # fmt: skip

# Kinds of gold answers, each with a grader.
KINDS = ("tagged", "integer", "latex", "code")


class Grader(NamedTuple):
    state: Callable[[str, bool], str | None]  # what a completion states; whether its prompt has opened its thoughts
    agree: Callable[[str | None, str], bool]  # whether that is the gold


def is_correct(completion: str, gold: str, kind: str = "tagged", *, thinking: bool = False) -> bool:
    """Strict verdict: the answer that the completion states after its thoughts is `gold`.

    Args:
      kind: one of KINDS; ValueError for another.
      thinking: whether its prompt ends in an open <think> (`prompts.opens_thoughts`). A <think> of the completion's own
        is seen without it.
    """
    grader = _grader(kind)
    return grader.agree(grader.state(completion, thinking), gold)


def stated_answer(completion: str, kind: str, *, thinking: bool = False) -> str | None:
    """The answer that a completion states, as one of KINDS reads it; None for none.  ValueError for another kind."""
    return _grader(kind).state(completion, thinking)


def agrees(answer: str | None, gold: str, kind: str) -> bool:
    """Whether `answer`, as `stated_answer` gave it, is the same as `gold`.  ValueError for a kind not in KINDS."""
    return _grader(kind).agree(answer, gold)


@functools.cache
def _grader(kind: str) -> Grader:
    """The grader of a kind; one that the course does not begin with is loaded when it is first asked for."""
    if kind == "tagged":  # one number in <answer> tags
        return Grader(extract_answer, same_value)
    if kind == "integer":  # the integer that is stated last
        from grpo_lib.answers.competition import integer_answer

        return Grader(integer_answer, same_value)
    if kind == "latex":  # the LaTeX that is stated last, compared by algebra
        from grpo_lib.answers.competition import latex_answer, same_latex

        return Grader(latex_answer, same_latex)
    if kind == "code":  # a Python function, called with the inputs of the gold's cases
        from grpo_lib.answers.code import code_answer, same_results

        return Grader(code_answer, same_results)
    raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
