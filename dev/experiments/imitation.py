"""Supervised fine-tuning as an arm: on the start's own right completions, or on worked solutions of the same problems.

Both are one program with other texts.  The learning rate is the one of RATES that is best on the validation problems of
the seed; a tie goes to the smaller one.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from measures import Run, validated
from starts import Example, fine_tuned, seen, worked

from grpo_lib.problems import Problem
from grpo_lib.records import grade
from grpo_train import checks, training
from grpo_train.cold_start import BATCH_SIZE
from grpo_train.recipes import Recipe

RATES = (3e-5, 1e-4, 3e-4)


def own_right(recipe: Recipe, problems: Sequence[Problem], start: Path) -> list[Example]:
    """The right ones of as many completions as GRPO samples, all by the start: one round."""
    drawn = [problem for problem in seen(recipe, problems) for _ in range(recipe.grpo.group_size)]
    with session_on(recipe, problems, start) as session:
        prompts = [problem.prompt(session.render) for problem in drawn]
        completions = session.sample(prompts, seed=recipe.seed)
    examples = []
    for problem, prompt, completion in zip(drawn, prompts, completions, strict=True):
        if grade(completion.text, problem.answer)["strict"]:
            examples.append((prompt, completion.text))
    return examples


def solutions(recipe: Recipe, problems: Sequence[Problem], start: Path) -> list[Example]:
    """The worked solutions of the problems that the other arms sample for."""
    return worked(recipe, seen(recipe, problems))


# The examples of an arm, and how often each is shown: about as many updates in both.
ARMS: dict[str, tuple[Callable[[Recipe, Sequence[Problem], Path], list[Example]], int]] = {
    "imitation": (own_right, 1),
    "fine-tuning": (solutions, 4),
}


def imitated(arm: str, recipe: Recipe, problems: Sequence[Problem], start: Path) -> tuple[Path, Run]:
    """The fine-tuned checkpoint of an arm, and its measures: the dose, and the validation accuracy of each rate."""
    examples_of, epochs = ARMS[arm]
    examples = examples_of(recipe, problems, start)
    gc.collect()  # the session that drew them
    if not examples:  # a start that is never right has nothing to imitate
        return start, {"examples": 0, "updates": 0, "dose": 0.0}
    found: dict[float, float] = {}
    checkpoints: dict[float, Path] = {}
    for rate in RATES:
        checkpoints[rate] = fine_tuned(recipe, examples, start, epochs=epochs, learning_rate=rate)
        gc.collect()  # the trainer's weights and moments: they are in a cycle of references
        found[rate] = validation_accuracy(recipe, problems, checkpoints[rate])
        gc.collect()  # and the session's
    best = max(RATES, key=lambda rate: (found[rate], -rate))
    for rate in RATES:
        if rate != best:
            shutil.rmtree(checkpoints[rate])
    updates = -(-epochs * len(examples) // BATCH_SIZE)
    measures = {
        "examples": len(examples),
        "epochs": epochs,
        "updates": updates,
        "rate": best,
        "dose": updates * best,
        "validation_of_rates": {f"{rate:g}": found[rate] for rate in RATES},
    }
    return checkpoints[best], measures


def validation_accuracy(recipe: Recipe, problems: Sequence[Problem], checkpoint: Path) -> float:
    with session_on(recipe, problems, checkpoint) as session:
        return validated(session)["validation_accuracy"]


@contextlib.contextmanager
def session_on(recipe: Recipe, problems: Sequence[Problem], checkpoint: Path) -> Iterator[training.Session]:
    """A session on a checkpoint, which takes no step."""
    ready = checks.check(recipe, list(problems))
    with tempfile.TemporaryDirectory(prefix="experiments-") as folder:
        yield training.build_session(ready, folder, checkpoint, log=lambda text: None)
