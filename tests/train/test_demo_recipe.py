"""Which model the notebooks use for demonstrations."""

import pytest

from grpo_train.recipes import TINY, demo_reason, demo_recipe, dump_recipe, load_recipe


def test_the_tiny_recipe_uses_its_own_model(root):
    tiny = root / "recipes" / "tiny-cpu.yaml"
    assert demo_recipe(tiny) == load_recipe(tiny) and demo_recipe(tiny, ["training.steps=7"]).training.steps == 7
    assert "the recipe's own model, assets/tiny-base" in demo_reason(tiny)


@pytest.mark.parametrize(
    "change, why",
    [
        ("model.dtype=bfloat16", "it is in bfloat16"),
        ("rollout.engine=vllm", "it is sampled by vLLM"),
        ("training.cold_start=64", "it needs a cold start"),
    ],
)
def test_another_model_is_replaced_and_the_reason_is_given(root, tmp_path, change, why):
    path = tmp_path / "other.yaml"
    path.write_text(dump_recipe(load_recipe(root / "recipes" / "tiny-cpu.yaml", [change, "training.steps=7"])))
    small, tiny = demo_recipe(path, changes=["training.learning_rate=1"]), load_recipe(root / TINY)
    assert (small.name, small.training.steps, small.training.learning_rate) == ("tiny-cpu", tiny.training.steps, 1)
    assert small.hardware.trainer_count(found=8) == 1
    assert why in demo_reason(path)
