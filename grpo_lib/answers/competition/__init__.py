"""Graders that only competition mathematics needs: integers in any notation, and LaTeX compared by algebra.

Notebook 08.  grpo_lib.answers loads them when a problem of their kind is graded, and not before.
"""

from grpo_lib.answers.competition.integers import integer_answer
from grpo_lib.answers.competition.latex import latex_answer, same_latex

__all__ = ["integer_answer", "latex_answer", "same_latex"]
