"""The small model that the notebooks use for demonstrations: the recipe's own, or the course's tiny model instead.

    small = demo_model.demo_recipe("recipes/llama3.1-8b-gsm8k.yaml")     # recipes/tiny-cpu.yaml, on one device
    print(demo_model.reason("recipes/llama3.1-8b-gsm8k.yaml"))

A demonstration loads the model a second time, breaks it, or trains it at ten times the learning rate.  That needs a
second implementation next to MaxText's (Tunix's Qwen3), float32, so that rounding is much smaller than an error, and a
sampler that can exist several times in a process.  A vLLM engine reserves the memory of its devices.
"""

from __future__ import annotations

from pathlib import Path

from grpo_lib.common import environment
from grpo_train.recipes import Recipe, load_recipe

TINY = "recipes/tiny-cpu.yaml"
ONE_DEVICE = "hardware.trainer_devices=1"  # on any slice: the tiny model gains nothing from more


def demo_recipe(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """The recipe itself if its model fits demonstrations, else the course's tiny recipe; with `overrides`."""
    if _is_demo_model(load_recipe(path)):
        return load_recipe(path, overrides)
    return load_recipe(environment.repo_root() / TINY, [ONE_DEVICE, *overrides])


def reason(path: str | Path) -> str:
    """A sentence about the choice of `demo_recipe`."""
    recipe = load_recipe(path)
    if _is_demo_model(recipe):
        return f"model of the demonstrations: the recipe's own model, {recipe.model.path}"
    why = "it is sampled by vLLM" if recipe.rollout.engine == "vllm" else f"it is in {recipe.model.dtype}"
    return f"model of the demonstrations: the course's tiny model ({TINY}), not the recipe's own, because {why}"


def _is_demo_model(recipe: Recipe) -> bool:
    return recipe.rollout.engine == "tunix" and recipe.model.dtype == "float32"
