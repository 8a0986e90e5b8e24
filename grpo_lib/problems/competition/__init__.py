"""Competition mathematics: DAPO-Math-17k, MATH, AIME and MATH-500, from files or from the Hugging Face hub.

Notebook 08.  grpo_lib.problems loads this when a recipe asks for one of them, and not before.
"""

from .data_sets import KINDS, TRAINED, Counts, load, published_prompt

__all__ = ["KINDS", "TRAINED", "Counts", "load", "published_prompt"]
