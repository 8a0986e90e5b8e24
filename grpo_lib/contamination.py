"""Has a model seen a test set?  Given the beginning of a question, does it write down how the question goes on?

M. Wu et al., "Reasoning or Memorization?", arXiv:2507.10532: a model that completes the questions of a public test set
word for word has read them, perhaps with their answers, and what it gains there by RL says little.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from grpo_lib import statistics
from grpo_lib.problems.types import Problem
from grpo_lib.records import EvalRun

SHARE = 0.6  # of a question's words, as in the paper


def partial_prompts(problems: Iterable[Problem], share: float = SHARE) -> list[Problem]:
    """Problems that ask with the first words of each question; the rest of it is their solution.

    They are for `evaluation.evaluate` without `render`: the bare text, with no chat around it.
    """
    partial = []
    for problem in problems:
        words = problem.question.split()
        place = int(share * len(words))
        begin, rest = " ".join(words[:place]), " ".join(words[place:])
        partial.append(dataclasses.replace(problem, question=begin, solution=rest))
    return partial


def repeated(record: dict[str, Any]) -> float:
    """The share of the rest's words that the completion has, in order, before its first other word; 1: all of them."""
    rest, written = record["solution"].split(), record["completion"].split()
    same = next((place for place, word in enumerate(rest) if written[place : place + 1] != [word]), len(rest))
    return same / len(rest)  # never empty, see partial_prompts


def summary(run: EvalRun) -> dict[str, Any]:
    """`n` questions; `exact`, the share of those completed word for word, with its Wilson interval; `words`, the mean
    of `repeated`."""
    shares = [repeated(record) for record in run.counted]
    exact = sum(share == 1 for share in shares)
    return {
        "n": len(shares),
        "exact": exact / len(shares),
        "interval": list(statistics.wilson_interval(exact, len(shares))),
        "words": sum(shares) / len(shares),
    }
