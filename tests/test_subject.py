"""subject: which model the notebooks take apart."""

import pytest

from grpo_lib import subject
from grpo_lib.recipes import dump_recipe, load_recipe


def test_the_tiny_recipes_model_is_its_own_subject(root):
    tiny = root / "recipes" / "tiny-cpu.yaml"
    assert subject.to_take_apart(tiny) == load_recipe(tiny)
    assert subject.to_take_apart(tiny, ["training.steps=7"]).training.steps == 7
    assert "the recipe's own model, assets/tiny-base" in subject.reason(tiny)


@pytest.mark.parametrize(
    "change, why",
    [("model.dtype=bfloat16", "it is in bfloat16"), ("rollout.engine=vllm", "it is sampled by vLLM")],
)
def test_another_model_is_stood_in_for_and_the_reason_is_said(root, tmp_path, change, why):
    path = tmp_path / "other.yaml"
    path.write_text(dump_recipe(load_recipe(root / "recipes" / "tiny-cpu.yaml", [change, "training.steps=7"])))
    small = subject.to_take_apart(path, ["training.learning_rate=1"])
    assert small.name == "tiny-cpu" and small.training.steps == 30 and small.training.learning_rate == 1
    assert small.hardware.trainer_count(found=8) == 1
    assert why in subject.reason(path)


def test_every_tpu_recipe_is_stood_in_for(root):
    for path in (root / "recipes").glob("*.yaml"):
        assert subject.to_take_apart(path).name == "tiny-cpu"
