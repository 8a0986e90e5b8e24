"""Weights & Biases beside metrics.jsonl: the same rows, through Tunix's logging backend.

Off unless a recipe asks for it.  The key is read by wandb itself, from WANDB_API_KEY or a login on this machine; it
passes through nothing here.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
from pathlib import Path
from typing import Any

from grpo_lib.errors import CourseError
from grpo_lib.files import write_text_atomic
from grpo_lib.recipes import Recipe, TrackingRecipe


def require(tracking: TrackingRecipe) -> None:
    """Refuse a run that wants W&B where wandb is not installed, or online where nobody has logged in."""
    if tracking.wandb == "off":
        return
    if not importlib.util.find_spec("wandb"):
        raise CourseError(
            f"tracking.wandb={tracking.wandb} needs wandb, which is not installed; pip install wandb, or use off"
        )
    if tracking.wandb == "online" and not _logged_in():
        raise CourseError(
            "tracking.wandb=online finds no login that W&B accepts; set WANDB_API_KEY, or run `wandb login`, "
            "or use offline or off"
        )


def start(recipe: Recipe, directory: Path) -> Any | None:
    """Begin a W&B run named after the recipe, with the recipe as its config; None when it is off.

    A run that goes on, goes on in the same W&B run: its id is kept in the run directory, in wandb-id.  Offline runs lie
    there under wandb/; `wandb sync` sends one.
    """
    if recipe.tracking.wandb == "off":
        return None
    from tunix.sft import metrics_logger

    os.environ.setdefault("WANDB_SILENT", "true")
    kept = directory / "wandb-id"
    if not kept.exists():
        write_text_atomic(kept, secrets.token_hex(4))
    return metrics_logger.WandbBackend(
        project=recipe.tracking.project,
        name=recipe.name,
        mode=recipe.tracking.wandb,
        dir=str(directory),
        id=kept.read_text(encoding="utf-8").strip(),
        resume="allow",
        config=recipe.model_dump(mode="json"),
    )


def log(backend: Any, row: dict[str, float | None]) -> None:
    """One row of metrics.jsonl.  W&B drops what comes with a step before the last one: rows come in order, whole."""
    for name, value in row.items():
        if name != "step" and value is not None:
            backend.log_scalar(name, value, step=row["step"])


def _logged_in() -> bool:
    """Does W&B take the key of this machine?  Asked of its server, before a run begins that would lose its log."""
    import wandb

    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        return bool(wandb.login(prompt=False, verify=True))
    except wandb.errors.Error:
        return False
