"""A recipe: one YAML file with everything about a run (schema, loading, batch plan, TPU slices)."""

from grpo_train.recipes.loading import (
    TINY,
    changed_values,
    demo_reason,
    demo_recipe,
    differences,
    dump_recipe,
    load_recipe,
    parse_recipe,
    plain_settings,
    plan_table,
    profiles_of,
    shipped_recipes,
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
    "TINY",
    "HardwareRecipe",
    "ModelRecipe",
    "ProblemsRecipe",
    "PromptsRecipe",
    "Recipe",
    "TaskRecipe",
    "TrackingRecipe",
    "changed_values",
    "demo_reason",
    "demo_recipe",
    "differences",
    "dump_recipe",
    "load_recipe",
    "parse_recipe",
    "plain_settings",
    "plan_table",
    "profiles_of",
    "shipped_recipes",
]
