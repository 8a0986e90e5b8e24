"""Problems: GSM8K and generated word problems, as one kind of record."""

from .batches import batch_of_step, training_batches
from .loading import load_problems, what_became_of_the_rows
from .types import Problem

__all__ = ["Problem", "batch_of_step", "load_problems", "training_batches", "what_became_of_the_rows"]
