"""Problems: GSM8K and generated word problems, as one kind of record."""

from .batches import training_batches
from .loading import load_problems, what_became_of_the_rows
from .types import Problem

__all__ = ["Problem", "load_problems", "training_batches", "what_became_of_the_rows"]
