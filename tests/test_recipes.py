"""The recipe schema: defaults, overrides, and errors that name the field and the remedy."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from grpo_lib.errors import CourseError
from grpo_lib.recipes import differences, dump_recipe, load_recipe, parse_recipe

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))
TINY = Path(__file__).parents[1] / "recipes" / "tiny-cpu.yaml"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_loads_and_is_named_like_its_file(path):
    assert load_recipe(path).name == path.stem


def test_a_dumped_recipe_is_the_same_recipe():
    recipe = load_recipe(TINY, ["training.steps=7", "rollout.top_k=5"])
    assert parse_recipe(yaml.safe_load(dump_recipe(recipe))) == recipe


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("training.steps=2", "training", "steps", 2),
        ("problems.source=gsm8k", "problems", "source", "gsm8k"),
        ("training.learning_rate=1e-3", "training", "learning_rate", 1e-3),
        ("rollout.top_k=null", "rollout", "top_k", None),
        ("problems.path=../a b", "problems", "path", "../a b"),
    ],
)
def test_overrides_are_read_as_yaml(override, section, key, value):
    assert getattr(getattr(load_recipe(TINY, [override]), section), key) == value


def test_the_later_override_wins():
    assert load_recipe(TINY, ["training.steps=2", "training.steps=3"]).training.steps == 3


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.stepz=2", ["training.stepz", "did you mean steps?"]),
        ("nonsense=1", ["nonsense", "known here"]),
        ("training.steps=many", ["training.steps", "many"]),
        ("training.steps=0", ["training.steps", "greater than or equal to 1"]),
        ("training.steps=2.5", ["training.steps"]),
        ("problems.source=math", ["problems.source", "'words'"]),
        ("rollout.engine=vllm", ["rollout.engine"]),
        ("rollout.max_prompt_length=long", ["rollout.max_prompt_length"]),
        ("grpo.group_size=1", ["grpo.group_size"]),
        ("training.micro_batch=6", ["micro_batch=6 must divide prompts_per_step=16", "1, 2, 4, 8, 16"]),
        ("rewards=[]", ["rewards"]),
        ("name=a/b", ["name"]),
        ("training.steps", ["section.key=value"]),
        ("=3", ["section.key=value"]),
        ("name.x=3", ["name is a value"]),
        ("training.steps=[1", ["not YAML"]),
    ],
)
def test_a_bad_override_is_one_line_that_names_the_field(override, words):
    with pytest.raises(CourseError) as caught:
        load_recipe(TINY, [override])
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "word"), [("", "mapping"), ("- a", "mapping"), ("a: [", "YAML"), ("name: x", "model is missing")]
)
def test_a_bad_file_is_one_line_that_names_the_file(tmp_path, text, word):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(CourseError, match=word) as caught:
        load_recipe(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_lists_the_recipes_there_are():
    with pytest.raises(CourseError, match="does not exist"):
        load_recipe("recipes/none.yaml")


def test_differences_name_the_fields():
    one, other = load_recipe(TINY), load_recipe(TINY, ["training.steps=2", "seed=4"])
    assert differences(one, one) == []
    assert differences(one, other) == ["seed: 0 != 4", f"training.steps: {one.training.steps} != 2"]


@given(st.text(max_size=60))
def test_any_override_either_loads_or_is_refused_in_one_line(text):
    try:
        load_recipe(TINY, [text])
    except CourseError as error:
        assert len(str(error).splitlines()) == 1
