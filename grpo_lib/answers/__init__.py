"""What answer a completion states, and whether it is the gold: a grader for each kind of gold answer.

    is_correct(completion, gold)                  # tagged: one number in <answer> tags, as for GSM8K
    is_correct(completion, gold, kind="latex")    # competition mathematics

tagged.py has the graders that the course teaches with, the strict and the lenient one.  The graders read text that a
policy is rewarded for, so none of them may raise or hang on any string.
"""

from collections.abc import Callable

from grpo_lib.answers.code import code_answer, same_results
from grpo_lib.answers.final_answer import canonical_answer
from grpo_lib.answers.integers import integer_answer
from grpo_lib.answers.latex import latex_answer, same_latex
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
    "KINDS", "agrees", "answer_block", "canonical_answer", "extract_answer", "format_is_exact",
    "format_is_loose", "integer_answer", "is_close", "is_correct", "is_correct_leniently", "latex_answer",
    "lenient_answer", "near_value", "same_latex", "same_value", "stated_answer",
]  # fmt: skip

# Kind of the gold answer -> (what a completion states, whether that is the gold).
GRADERS: dict[str, tuple[Callable[[str], str | None], Callable[[str | None, str], bool]]] = {
    "tagged": (extract_answer, same_value),  # one number in <answer> tags
    "integer": (integer_answer, same_value),  # the integer that is stated last
    "latex": (latex_answer, same_latex),  # the LaTeX that is stated last, compared by algebra
    "code": (code_answer, same_results),  # a Python function, called with the inputs of the gold's cases
}
KINDS = tuple(GRADERS)


def is_correct(completion: str, gold: str, kind: str = "tagged") -> bool:
    """Strict verdict: the answer that the completion states is `gold`.  ValueError for a kind not in KINDS."""
    return agrees(stated_answer(completion, kind), gold, kind)


def stated_answer(completion: str, kind: str) -> str | None:
    """The answer that a completion states, as one of KINDS reads it; None for none.  ValueError for another kind."""
    return _grader(kind)[0](completion)


def agrees(answer: str | None, gold: str, kind: str) -> bool:
    """Whether `answer`, as `stated_answer` gave it, is the same as `gold`.  ValueError for a kind not in KINDS."""
    return _grader(kind)[1](answer, gold)


def _grader(kind: str) -> tuple[Callable[[str], str | None], Callable[[str | None, str], bool]]:
    if kind not in GRADERS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    return GRADERS[kind]
