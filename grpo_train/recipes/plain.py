"""A recipe as settings of grpo_lib.plain_grpo."""

from __future__ import annotations

from dataclasses import fields

from grpo_lib.common.errors import CourseError
from grpo_lib.plain_grpo import Settings
from grpo_train.recipes.schema import Recipe


def plain_settings(recipe: Recipe) -> Settings:
    """Raises CourseError where the recipe has a switch that the plain loop has not."""
    names = [field.name for field in fields(Settings)]
    changed = {
        "grpo": recipe.grpo.model_dump(exclude_defaults=True),
        "lora": recipe.lora.model_dump(exclude_defaults=True),
        "rollout": recipe.rollout.model_dump(include={"final_temperature"}, exclude_none=True),
        "training": recipe.training.model_dump(include={"schedule"}, exclude_defaults=True),
        "prompts": recipe.prompts.model_dump(include={"user"}, exclude_defaults=True),
    }
    missing = [f"{section}.{key}" for section, keys in changed.items() for key in keys if key not in names]
    missing += ["a list of problems"] if recipe.tasks else []
    if missing:
        raise CourseError(f"plain_grpo does not have {missing[0]}; leave it at its default, or use grpo train")
    values = recipe.training.model_dump() | recipe.grpo.model_dump() | recipe.rollout.model_dump()
    values |= {"rewards": tuple(recipe.rewards), "system": recipe.prompts.system, "seed": recipe.seed}
    return Settings(**{name: values[name] for name in names})
