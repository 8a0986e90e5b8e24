"""Training batches without end, in an order that only the seed decides."""

import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .types import Problem


def training_batches(
    problems: Sequence[Problem],
    render: Callable[..., str],
    batch_size: int,
    seed: int,
    weights: Mapping[str, float] | None = None,
) -> Iterator[dict[str, np.ndarray]]:
    """The batches of `batch_of_step`, one after the other."""
    return map(batch_of_step(problems, render, batch_size, seed, weights), itertools.count())


def batch_of_step(
    problems: Sequence[Problem],
    render: Callable[..., str],
    batch_size: int,
    seed: int,
    weights: Mapping[str, float] | None = None,
) -> Callable[[int], dict[str, np.ndarray]]:
    """A function that gives the batch of a step, counted from 0: {"prompts", "answer", "kind": [batch_size] each}.

    Every epoch is a new permutation and holds every problem once; a batch may begin in one epoch and end in
    the next, so none is left out.  `render` turns a question into the prompt (`Problem.prompt`).  The strings come as
    arrays because Tunix takes no lists.

    With `weights`, task -> share, each task has epochs of its own, and the tasks alternate in proportion to their
    weights: after n prompts each has had its share of n, give or take two.  The batches then have a column "task".

    Where prompts end with the beginning of the completion (`Problem.completion_prefix`), a column of that name has it.
    """
    import grain  # here, because it imports JAX, which takes seconds

    continued = any(problem.completion_prefix(render) for problem in problems)

    def collate(batch: Sequence[Problem]) -> dict[str, np.ndarray]:
        columns = {
            "prompts": np.array([problem.prompt(render) for problem in batch]),
            "answer": np.array([problem.answer for problem in batch]),
            "kind": np.array([problem.kind for problem in batch]),
        }
        if weights:
            columns["task"] = np.array([problem.task for problem in batch])
        if continued:
            columns["completion_prefix"] = np.array([problem.completion_prefix(render) for problem in batch])
        return columns

    def epochs(problems: Sequence[Problem]) -> grain.MapDataset:
        # grain shuffles epoch e with seed + e; through a checksum, runs with seeds 0 and 1 share no epoch.
        return grain.MapDataset.source(problems).shuffle(zlib.crc32(f"training batches {seed}".encode())).repeat()

    if weights:
        tasks = [epochs([problem for problem in problems if problem.task == task]) for task in weights]
        endless = grain.MapDataset.mix(tasks, list(weights.values()))
    else:
        endless = epochs(problems)
    dataset: Any = endless.batch(batch_size, batch_fn=collate)
    return dataset.__getitem__
