"""Which model the notebooks take apart: the recipe's own, or the course's tiny one in its place.

    small = subject.to_take_apart("recipes/llama3.1-8b-gsm8k.yaml")     # recipes/tiny-cpu.yaml, on one device
    print(subject.reason("recipes/llama3.1-8b-gsm8k.yaml"))

Taking a model apart means to load it a second time, break it, or train it at ten times the learning rate.  That needs
a second implementation beside MaxText's (Tunix's Qwen3), float32, whose rounding is small enough to tell an error from,
and a sampler of which a process can hold several.  A vLLM engine takes its devices' memory for itself.
"""

from __future__ import annotations

from pathlib import Path

from grpo_lib import environment
from grpo_lib.recipes import Recipe, load_recipe

TINY = "recipes/tiny-cpu.yaml"
ONE_DEVICE = "hardware.trainer_devices=1"  # whatever the slice: the tiny model gains nothing from more


def to_take_apart(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """The recipe itself if its model can be taken apart, else the course's tiny recipe; with `overrides`.

    Raises CourseError as `load_recipe` does.
    """
    if _can_be(load_recipe(path)):
        return load_recipe(path, overrides)
    return load_recipe(environment.repo_root() / TINY, [ONE_DEVICE, *overrides])


def reason(path: str | Path) -> str:
    """A sentence on what `to_take_apart` chose."""
    recipe = load_recipe(path)
    if _can_be(recipe):
        return f"taken apart here: the recipe's own model, {recipe.model.path}"
    why = "it is sampled by vLLM" if recipe.rollout.engine == "vllm" else f"it is in {recipe.model.dtype}"
    return f"taken apart here: the course's tiny model ({TINY}); the recipe's own is left whole, because {why}"


def _can_be(recipe: Recipe) -> bool:
    return recipe.rollout.engine == "tunix" and recipe.model.dtype == "float32"
