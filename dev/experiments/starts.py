"""The checkpoints that arms start from, and the problems that they train on."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiment import TINY, Experiment
from shared import ROOT

from grpo_lib.problems import Problem, batch_of_step, load_problems, take_different
from grpo_train import checks, cold_start
from grpo_train.engines import conversion
from grpo_train.engines.tokens import Renderer, load_tokenizer
from grpo_train.recipes import Recipe, load_recipe

Example = tuple[str, str]  # a prompt, and what is to be written after it


@functools.cache
def base_checkpoint(recipe: Path = ROOT / TINY) -> Path:
    """The model of a recipe in MaxText's format."""
    folder = tempfile.mkdtemp(prefix="experiments-base-")
    return conversion.convert_to_maxtext(load_recipe(recipe).model, Path(folder) / "base")


@functools.cache
def taught_checkpoint(path: Path, seed: int, count: int, spaces: bool) -> Path:
    """It after a cold start; `count` and `spaces`: training.cold_start, training.cold_start_spaces."""
    changes = [f"training.cold_start={count}", f"training.cold_start_spaces={str(spaces).lower()}"]
    recipe = load_recipe(path, [f"seed={seed}", *changes])
    taught, _ = take_different(load_problems(recipe.problems, "train"), recipe.training.cold_start)
    return fine_tuned(recipe, worked(recipe, taught), base_checkpoint(path))


def worked(recipe: Recipe, problems: Sequence[Problem]) -> list[Example]:
    """Problems with their worked solutions, in the spelling of the recipe's cold start."""
    render = Renderer(recipe.prompts, load_tokenizer(recipe.model))
    spaces = recipe.training.cold_start_spaces
    return [cold_start.example(problem, render, spaces) for problem in problems]


def fine_tuned(recipe: Recipe, examples: Sequence[Example], checkpoint: Path, **settings: Any) -> Path:
    """A checkpoint after two epochs on examples; `settings`: other ones of `cold_start.fine_tune`."""
    folder = Path(tempfile.mkdtemp(prefix="experiments-start-"))
    ready = checks.check(recipe)
    return cold_start.fine_tune(ready, examples, checkpoint, folder / "start", progress=False, **settings)


def seen(recipe: Recipe, problems: Sequence[Problem]) -> list[Problem]:
    """The problems of all steps of a training."""
    by_question = {problem.question: problem for problem in problems}
    batch = batch_of_step(problems, str, recipe.plan.prompts_per_step, recipe.seed)
    return [by_question[str(text)] for step in range(recipe.training.steps) for text in batch(step)["prompts"]]


def start_of(experiment: Experiment, arm: str, recipe: Recipe) -> tuple[Path, list[Problem]]:
    """The checkpoint that an arm starts from, and its problems."""
    _, problems = take_different(load_problems(recipe.problems, "train"), recipe.training.cold_start)
    path, training = experiment.recipe_path, recipe.training
    if not training.cold_start:
        return base_checkpoint(path), problems
    start = taught_checkpoint(path, recipe.seed, training.cold_start, training.cold_start_spaces)
    if arm == "solutions":
        start = fine_tuned(recipe, worked(recipe, seen(recipe, problems)), start)
    return start, problems
