"""The recipe schema: defaults, overrides, and errors that name the field and the remedy."""

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from grpo_lib.accelerators import parse_slice
from grpo_lib.errors import CourseError
from grpo_lib.recipes import differences, dump_recipe, load_recipe, parse_recipe, profiles_of

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
        ("rollout.engine=torch", ["rollout.engine", "'vllm'"]),
        ("rollout.max_prompt_length=long", ["rollout.max_prompt_length"]),
        ("grpo.group_size=1", ["grpo.group_size"]),
        (
            "training.micro_batch_size=6",
            ["training.micro_batch_size=6 must divide local_batch=128: use 8, 16, 32, 64 or"],
        ),
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


# --- the recipes of the TPU tier ------------------------------------------------------------------------------

TPU = [path for path in RECIPES if path != TINY]
EVERY = [f"{path}{suffix}" for path in TPU for suffix in ("", *(f"@{name}" for name in profiles_of(path)))]


def test_the_shipped_recipes_are_those_of_the_course():
    names = [path.stem for path in TPU]
    assert names == [
        "llama3.1-8b-gsm8k", "qwen2.5-32b-dapo-math", "qwen2.5-3b-gsm8k-jax", "qwen2.5-3b-gsm8k-pallas",
        "qwen2.5-7b-gsm8k-2hosts", "qwen3-1.7b-gsm8k-smoke",
    ]  # fmt: skip


@pytest.mark.parametrize("path", EVERY, ids=lambda path: Path(path).name)
def test_a_tpu_recipe_names_its_slice_and_its_engine(path):
    recipe = load_recipe(path)
    assert recipe.hardware.slice.devices >= recipe.hardware.trainer_count()
    assert recipe.rollout.engine == "vllm"
    # The draft of a value that nobody filled in would be the whole batch at once.
    assert recipe.micro_batch_completions <= 4 * recipe.hardware.trainer_count()


@pytest.mark.parametrize("path", TPU, ids=lambda path: path.stem)
def test_a_comment_stands_beside_every_value_that_differs_from_the_default(path):
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    smallest = parse_recipe({"name": "x", "model": {"path": "p", "maxtext_name": "n"}}).model_dump(mode="json")
    lines = path.read_text(encoding="utf-8").splitlines()
    # Spelt by the recipe itself, or by its name and the heading above: they need no reason.
    plain = {"name", "maxtext_name", "path"}
    for line in lines:
        found = re.match(r"^( +)(\w+): +(\S.*)$", line)
        if not found or found[2] in plain:
            continue
        value = yaml.safe_load(found[3])
        same = any(
            isinstance(section, dict) and found[2] in section and section[found[2]] == value
            for section in (smallest, *smallest.values(), smallest["rollout"]["vllm"])
        )
        assert same or "  # " in line, f"{path.name}: {line.strip()}"
    assert "[ours]" in "\n".join(lines) and data["name"] == path.stem


def test_the_two_3b_recipes_differ_in_the_loss_alone():
    jax, pallas = (load_recipe(TINY.parent / f"qwen2.5-3b-gsm8k-{name}.yaml") for name in ("jax", "pallas"))
    assert [line.partition(":")[0] for line in differences(jax, pallas)] == ["name", "loss.implementation"]


def test_differences_name_what_only_one_recipe_has():
    sized = load_recipe(TINY, ["model.sizes={head_dim: 64}"])
    assert differences(sized, load_recipe(TINY)) == ["model.sizes.head_dim: 64 != None"]
    assert differences(load_recipe(TINY), sized) == ["model.sizes.head_dim: None != 64"]


def test_a_profile_changes_what_it_says_and_the_name():
    path = TINY.parent / "llama3.1-8b-gsm8k.yaml"
    plain, both = load_recipe(path), load_recipe(f"{path}@v5p-8,g8", ["training.steps=7"])
    assert (plain.name, both.name) == ("llama3.1-8b-gsm8k", "llama3.1-8b-gsm8k-v5p-8-g8")
    assert (plain.grpo.group_size, both.grpo.group_size) == (2, 8)
    assert (both.hardware.accelerator, both.hardware.trainer_devices, both.training.steps) == ("v5p-8", 2, 7)
    assert both.grpo.beta == plain.grpo.beta  # what a profile does not name stays


def test_an_unknown_profile_names_those_that_are_there():
    with pytest.raises(CourseError, match="has no profile g9; profiles there: g8, v5p-8"):
        load_recipe(f"{TINY.parent / 'llama3.1-8b-gsm8k.yaml'}@g9")
    with pytest.raises(CourseError, match="has no profile g8; profiles there: none"):
        load_recipe(f"{TINY}@g8")


def test_profiles_that_are_no_mapping_are_refused(tmp_path):
    file = tmp_path / "odd.yaml"
    file.write_text(TINY.read_text(encoding="utf-8") + "\nprofiles: [g8]\n", encoding="utf-8")
    with pytest.raises(CourseError, match="profiles must be a mapping"):
        load_recipe(file)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["hardware.accelerator=v7-8"], "v7-8 is no TPU slice; write it like v6e-8"),
        (["hardware.accelerator=v5p-7"], "v5p-7 is no TPU slice"),
        (["hardware.accelerator=v6e-8", "hardware.trainer_tensor=3"], "trainer_tensor=3 must divide its 8 devices"),
        (["hardware.accelerator=v6e-8", "hardware.sampler_tensor=3"], "sampler_tensor=3 must divide its 8 devices"),
        (["hardware.accelerator=v6e-8", "hardware.sampler_devices=4"], "give both, 8 or fewer together"),
        (
            ["hardware.accelerator=v6e-8", "hardware.trainer_devices=6", "hardware.sampler_devices=4"],
            "do not fit the 8 devices of v6e-8",
        ),
        (
            ["hardware.accelerator=v6e-64", "training.micro_batch_size=32"],
            "shares (devices / trainer_tensor): use 64 or",
        ),
        (["hardware.accelerator=v6e-256", "training.prompts_per_step=2"], "multiple of the 64 processes: use 64"),
        (["model.sizes={base_emb_dim_x: 3}"], "model.sizes"),
    ],
)
def test_hardware_that_does_not_fit_is_refused_with_the_remedy(changes, words):
    with pytest.raises(CourseError) as caught:
        load_recipe(TINY, changes)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "devices"), [("v6e-8", 8), ("v5e-4", 4), ("v5p-8", 4), ("v4-16", 8), ("v5p-64", 32)])
def test_names_of_v4_and_v5p_count_cores(name, devices):
    assert parse_slice(name).devices == devices


@pytest.mark.parametrize(
    ("name", "hosts"),
    [("v4-8", 1), ("v4-16", 2), ("v5p-8", 1), ("v5p-64", 8), ("v6e-8", 1), ("v5e-8", 1), ("v6e-16", 4), ("v6e-64", 16)],
)
def test_hosts_of_a_slice(name, hosts):
    assert parse_slice(name).hosts == hosts


def test_who_trains_and_who_samples():
    shared = load_recipe(TINY, ["hardware.accelerator=v6e-8"]).hardware
    apart = load_recipe(
        TINY, ["hardware.accelerator=v6e-8", "hardware.trainer_devices=4", "hardware.sampler_devices=4"]
    ).hardware
    assert (shared.colocated, shared.trainer_count(), shared.sampler_count()) == (True, 8, 8)
    assert (apart.colocated, apart.trainer_count(), apart.sampler_count()) == (False, 4, 4)
    assert load_recipe(TINY).hardware.trainer_count(found=3) == 3
