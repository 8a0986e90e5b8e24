"""A recipe: one YAML file with everything about a run (schema, loading, batch plan, TPU slices)."""

from grpo_train.recipes.loading import (
    differences,
    dump_recipe,
    load_recipe,
    parse_recipe,
    plain_settings,
    plan_table,
    profiles_of,
)
from grpo_train.recipes.schema import (
    HardwareRecipe,
    ModelRecipe,
    ProblemsRecipe,
    PromptsRecipe,
    Recipe,
    TaskRecipe,
    TrackingRecipe,
)

__all__ = [
    "HardwareRecipe",
    "ModelRecipe",
    "ProblemsRecipe",
    "PromptsRecipe",
    "Recipe",
    "TaskRecipe",
    "TrackingRecipe",
    "differences",
    "dump_recipe",
    "load_recipe",
    "parse_recipe",
    "plain_settings",
    "plan_table",
    "profiles_of",
]
