"""The part of a smoke test that the recipe's own architecture goes through: a small random model of it.

    Hugging Face -> MaxText -> Hugging Face, bit for bit     parity with another implementation
    a session: every weight is synced                        two steps, and every weight has changed
    the changed weights are synced, too                      export, and the export is the trained model

In a multi-process run all processes call `run` together.  A random model learns nothing: smoke_test trains the tiny
trained model after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from grpo_lib import rewards
from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import write_json_atomic
from grpo_tpu import random_model
from grpo_train.recipes import ModelRecipe, Recipe

RESULT = "architecture.json"  # in the run directory, written last


@rewards.reward_function
def distinct_characters(completion: str, gold: str = "", kind: str = "tagged") -> rewards.Score:
    """Random text is worth the same to every other reward, and equal rewards change no weight."""
    return float(len(set(completion))), "characters that differ"


rewards.REWARDS[distinct_characters.__name__] = distinct_characters


def run(
    recipe: Recipe, published: ModelRecipe, directory: Path, *, trains: bool, log: Callable[[str], None]
) -> dict[str, Any] | None:
    """Raises CourseError at the first thing that is wrong, which it names.

    Args:
      recipe: by smoke_test.random_recipe; its model.path is where the random model is written.
      published: the model of the original recipe, of which the architecture is.
      trains: whether the engine of `recipe` knows the architecture; else only the conversion is tried.

    Returns what is in RESULT; None in all processes but the first.
    """
    from grpo_lib.problems import load_problems
    from grpo_train import training
    from grpo_train.engines import conversion, maxtext_model
    from grpo_train.engines.cluster import assign_devices
    from grpo_train.engines.weight_sync import by_name
    from grpo_train.runs import multihost

    import jax  # isort: skip
    from flax import nnx  # isort: skip

    folder, checkpoints = Path(recipe.model.path), directory / "checkpoints"
    if multihost.is_main_process():
        random_model.write_random_model(published, folder, recipe.seed)
    multihost.barrier("the random model")
    found: dict[str, Any] = {"architecture": random_model.family(published)}

    # 1. The conversion, in float32.
    exact = recipe.model.model_copy(update={"dtype": "float32"})
    base = conversion.convert_to_maxtext(exact, checkpoints / "float32")
    length = random_model.PROMPT + random_model.COMPLETION
    with maxtext_model.quiet():
        devices, tensor = assign_devices(recipe, jax.devices())[0], recipe.hardware.trainer_tensor
        actor = maxtext_model.load_actor(exact, base, length, random_model.PADDING, devices=devices, tensor=tensor)
        exported = conversion.export_to_hugging_face(actor, exact, directory / "round-trip")
        found["weights"] = random_model.check_round_trip(folder, exported)
        log(f"a random {found['architecture']}: {found['weights']} weights go to MaxText and back, bit for bit")
        parity = random_model.check_parity(actor, folder)
    found["parity"] = parity and dataclasses.asdict(parity)
    if parity:
        log(f"MaxText computes what {parity.reference} computes: mean gap {parity.mean_gap:.1e} nats")
    else:
        log("MaxText's computation was not compared with another: PyTorch is not installed here")
    del actor

    # 2. Training: every weight that is trained changes, and all of them arrive in the sampler.
    if trains:
        if recipe.model.dtype != exact.dtype:
            base = conversion.convert_to_maxtext(recipe.model, checkpoints / "base")
        session = training.build_session(recipe, directory, load_problems(recipe.problems, "train"), base, log)
        first = training.check_first_sync(session)

        def weights() -> dict[str, np.ndarray]:
            trained = nnx.LoRAParam if recipe.lora.rank else nnx.Param
            named = by_name(nnx.state(session.actor.module, trained))
            return {name: multihost.to_numpy(value) for name, value in named.items()}

        before = weights()
        training.train(session)
        if still := [name for name, value in weights().items() if np.array_equal(value, before[name])]:
            raise CourseError(f"weight {still[0]} did not change in training ({len(still)} of {len(before)} did not)")
        last = training.check_first_sync(session)
        found["gaps"] = [first.mean_gap, last.mean_gap]
        log(f"it trains, and all {last.weights} weights arrive before and after: mean gaps {first.mean_gap:.1e} and "
            f"{last.mean_gap:.1e} nats")  # fmt: skip

        # 3. The export is the trained model.
        exported = conversion.export_to_hugging_face(session.actor, recipe.model, directory / "export")
        maxtext_model.load_tokenizer(recipe.model.model_copy(update={"path": str(exported)}))
        with maxtext_model.quiet():
            again = random_model.check_parity(session.actor, exported, recipe.model.dtype)
        if again:
            log(f"its export, read again by {again.reference}, is the trained model: mean gap {again.mean_gap:.1e}")
    if not multihost.is_main_process():
        return None
    write_json_atomic(directory / RESULT, found)
    return found
