"""Problems: GSM8K, competition mathematics, generated word problems and code, as one kind of record."""

from .batches import batch_of_step, training_batches
from .loading import describe_filtering, load_problems, take_different
from .tfds_files import write_tfds
from .types import Problem

__all__ = [
    "Problem",
    "batch_of_step",
    "describe_filtering",
    "load_problems",
    "take_different",
    "training_batches",
    "write_tfds",
]
