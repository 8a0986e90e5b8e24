"""The recipe schema: defaults, overrides, and errors that name the field and the remedy."""

import runpy
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lib.common.errors import CourseError
from grpo_lib.rewards import get_rewards
from grpo_train.recipes import differences, dump_recipe, load_recipe, parse_recipe, profiles_of
from grpo_train.recipes.loading import plain_settings
from grpo_train.recipes.slices import parse_slice

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
TINY = ROOT / "recipes" / "tiny-cpu.yaml"
THREE = ROOT / "recipes" / "published" / "qwen2.5-3b-gsm8k.yaml"
V6E = "hardware.accelerator=v6e-8"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_loads_and_is_named_like_its_file(path):
    assert load_recipe(path).name == path.stem


PERFECT = "<reasoning>9 + 9 = 18</reasoning><answer>18</answer>"


@pytest.mark.parametrize(
    ("recipe", "most"),
    [
        ("recipes/llama3.1-8b-gsm8k.yaml", 1.1),
        ("recipes/qwen2.5-0.5b-gsm8k.yaml", 1.1),
        ("recipes/llama3.1-8b-gsm8k.yaml@reference", 9.5),
        ("recipes/published/qwen3-1.7b-gsm8k-smoke.yaml", 9.5),
        ("recipes/published/qwen2.5-3b-gsm8k.yaml@pallas", 9.5),
        ("recipes/published/qwen2.5-7b-gsm8k-2hosts.yaml", 9.5),
    ],
)
def test_a_recipe_has_the_repaired_reward_unless_it_remakes_a_published_run(recipe, most):
    functions = get_rewards(load_recipe(recipe).rewards)
    assert sum(function(None, [PERFECT], ["18"])[0] for function in functions) == pytest.approx(most)


def test_the_later_override_wins_and_a_dumped_recipe_is_the_same_recipe():
    recipe = load_recipe(TINY, ["training.steps=2", "training.steps=7", "rollout.vllm.options={block_size: 32}"])
    assert recipe.training.steps == 7
    assert parse_recipe(yaml.safe_load(dump_recipe(recipe))) == recipe


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("training.steps=2", "training", "steps", 2),
        ("problems.source=gsm8k", "problems", "source", "gsm8k"),
        ("training.learning_rate=1e-3", "training", "learning_rate", 1e-3),
        ("grpo.epsilon_high=null", "grpo", "epsilon_high", None),
        ("problems.path=../a b", "problems", "path", "../a b"),
        ("problems.path=1e5", "problems", "path", "1e5"),
        ("tracking.wandb=off", "tracking", "wandb", "off"),
    ],
)
def test_overrides_are_read_as_yaml(override, section, key, value):
    assert getattr(getattr(load_recipe(TINY, [override]), section), key) == value


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["training.stepz=2"], ["training.stepz", "did you mean steps?"]),
        (["nonsense=1"], ["nonsense", "known here"]),
        (["training.steps=many"], ["training.steps", "many"]),
        (["training.steps=0"], ["training.steps=0: Input should be greater than or equal to 1"]),
        (["problems.source=mathematics"], ["problems.source", "'words'"]),
        (["rollout.max_prompt_length=long"], ["rollout.max_prompt_length"]),
        (["training.prompts_per_process=8"], ["unknown key training.prompts_per_process", "prompts_per_step?"]),
        (["rewards=[]"], ["rewards"]),
        (["name=a/b"], ["name"]),
        (["training.steps"], ["section.key=value"]),
        (["=3"], ["section.key=value"]),
        (["name.x=3"], ["'tiny-cpu' is a value, not a section"]),
        (["training.steps=[1"], ["not YAML"]),
        (["training.learning_rate=.inf"], ["training.learning_rate", "finite"]),
        (["problems=[]"], ["problems", "at least 1"]),
        (["problems=[{weight: 0}]"], ["problems.0.weight=0", "greater than 0"]),
        (["problems=[{weight: .inf}]"], ["problems.0.weight=inf", "finite"]),
        (["problems=[{wieght: 1}]"], ["problems.0.wieght", "did you mean weight?"]),
        (["problems=[{prompts: {usr: dapo}}]"], ["problems.0.prompts.usr", "did you mean user?"]),
        (["problems=[{}, {}]"], ["two tasks are called words"]),
        (["problems.sorce=gsm8k"], ["unknown key problems.sorce", "did you mean source?"]),
        (["hardware.accelerator=v7-8"], ["v7-8 is not a TPU slice; write it like v6e-8"]),
        (["seed=99999999999999999999"], ["seed=", "less than 2147483648"]),
        (["hardware.accelerator=v6e-7"], ["v6e-7 is not a size that there is", "v6e-8"]),
        (["hardware.accelerator=v5p-7"], ["v5p-7 is not a TPU slice"]),
        ([V6E, "rollout.engine=vllm", "hardware.sampler_tensor=3"], ["sampler_tensor=3 must divide its 8 devices"]),
        ([V6E, "hardware.sampler_devices=4"], ["give both, 8 or fewer together"]),
        ([V6E, "hardware.trainer_devices=6", "hardware.sampler_devices=4"], ["do not fit the 8 devices of v6e-8"]),
        (["hardware.accelerator=v6e-256", "training.prompts_per_step=2"], ["must be a multiple of 64 (64 processes, "]),
        (["model.sizes={base_emb_dim_x: 3}"], ["model.sizes"]),
        (["hardware.accelerator=v4-8", "rollout.engine=vllm"], ["accelerator=v4-8", "set the engine to tunix"]),
        (["grpo.epsilon_high=0.1"], ["epsilon_high=0.1 is below epsilon=0.2"]),
        (["grpo.advantage=rloo"], ["grpo.advantage='rloo'", "leave-one-out"]),
        (["grpo.aggregation=token-mean"], ["grpo.aggregation='token-mean'", "step"]),
        (["grpo.kl=k4"], ["grpo.kl='k4'", "k3"]),
        (["grpo.target_kl=0.02"], ["target_kl=0.02 adapts beta", "set beta above 0"]),
        (["grpo.target_kl=0.02", "grpo.beta=0.1", "grpo.kl=k1"], ["target_kl=0.02", "set kl to k2 or k3"]),
        (["grpo.target_kl=0", "grpo.beta=0.1"], ["grpo.target_kl=0: "]),
        (["grpo.watch_kl=0"], ["grpo.watch_kl=0: ", "1"]),
        (
            ["grpo.overlong_buffer=24"],
            ["grpo.overlong_buffer=24 must be shorter than rollout.max_completion_length=24"],
        ),
        (["grpo.overlong_penalty=0"], ["grpo.overlong_penalty=0: "]),
        (["grpo.dynamic_sampling=0"], ["grpo.dynamic_sampling=0: ", "1"]),
        (
            ["grpo.dynamic_sampling=2", "rollout.micro_batch_size=4"],
            ["=4 must be a multiple of the 16 ", "dynamic_sampling"],
        ),
        (
            ["grpo.overlong_buffer=4", "rollout.micro_batch_size=4"],
            ["=4 must be a multiple of the 16 ", "overlong_buffer"],
        ),
        (
            ["grpo.correction=ratio", "rollout.engine=vllm", "rollout.temperature=0.9"],
            ["=ratio needs ", "rollout.temperature=0.9"],
        ),
        (["lora.rank=0"], ["lora.rank=0: "]),
        (["rewards=correct_answer"], ["it is a list", "such as rewards=[correct_answer]"]),
        (["training=5"], ["training=5: it is a section"]),
    ],
)
def test_a_bad_override_is_one_line_that_names_the_field(overrides, words):
    with pytest.raises(CourseError) as caught:
        load_recipe(TINY, overrides)
    assert "\n" not in str(caught.value)
    assert [word for word in words if word not in str(caught.value)] == [], caught.value


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "mapping"),
        ("- a", "mapping"),
        ("a: [", "YAML"),
        ("name: x", "model is missing"),
        ("name: x\nname: y", "name is there 2 times"),
        (TINY.read_text(encoding="utf-8") + "\nprofiles: [g8]\n", "profiles"),
    ],
)
def test_a_bad_file_is_one_line_that_names_the_file(tmp_path, text, word):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(CourseError, match=word) as caught:
        load_recipe(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_differences_name_the_fields():
    one, other = load_recipe(TINY), load_recipe(TINY, ["training.steps=2", "seed=4"])
    assert differences(one, one) == []
    assert differences(one, other) == ["seed: 0 != 4", f"training.steps: {one.training.steps} != 2"]
    sized = load_recipe(TINY, ["model.sizes={head_dim: 64}"])
    assert differences(sized, one) == ["model.sizes.head_dim: 64 != None"]
    assert differences(one, sized) == ["model.sizes.head_dim: None != 64"]
    jax, pallas = (load_recipe(f"{THREE}{profile}") for profile in ("", "@pallas"))
    assert differences(jax, pallas) == [f"name: {jax.name} != {pallas.name}", "loss.implementation: jax != pallas"]


@settings(max_examples=40)
@given(st.text(max_size=60))
def test_any_override_either_loads_or_is_refused_in_one_line(text):
    try:
        load_recipe(TINY, [text])
    except CourseError as error:
        assert len(str(error).splitlines()) == 1


def test_the_page_of_all_keys_is_the_schema():
    made = runpy.run_path(str(ROOT / "dev" / "tools" / "make_recipe_docs.py"))["page"]()
    assert (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8") == made, (
        "run python dev/tools/make_recipe_docs.py"
    )


# --- the recipes of the TPU tier ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        f"{path}{profile}"
        for path in RECIPES
        for profile in ("", *(f"@{name}" for name in profiles_of(path)))
        if load_recipe(f"{path}{profile}").hardware.accelerator
    ],
    ids=lambda path: Path(path).name,
)
def test_a_tpu_recipe_fits_its_slice(path):
    recipe = load_recipe(path)
    assert recipe.hardware.slice.devices >= recipe.hardware.trainer_count()
    assert recipe.plan.processes == 1 or (recipe.rollout.engine == "tunix" and recipe.hardware.colocated)
    # The draft of a value that nobody filled in would be the whole batch at once.
    assert recipe.plan.micro_batch_size <= max(4 * recipe.hardware.trainer_count(), recipe.grpo.group_size)


def test_a_profile_changes_what_it_says_and_the_name():
    path = TINY.parent / "llama3.1-8b-gsm8k.yaml"
    plain, both = load_recipe(path), load_recipe(f"{path}@v5p-8,g8", ["training.steps=7"])
    assert (plain.name, both.name) == ("llama3.1-8b-gsm8k", "llama3.1-8b-gsm8k-v5p-8-g8")
    assert (plain.grpo.group_size, both.grpo.group_size) == (2, 8)
    assert (both.hardware.accelerator, both.hardware.trainer_devices, both.training.steps) == ("v5p-8", 2, 7)
    assert both.grpo.epsilon == plain.grpo.epsilon  # what a profile does not name stays


@pytest.mark.parametrize(("name", "profile"), [("llama3.1-8b-gsm8k", "g9"), ("qwen3-1.7b-dapo-math", "g8")])
def test_a_bad_profile_is_named(name, profile):
    with pytest.raises(CourseError, match=f"has no profile {profile}"):
        load_recipe(f"{TINY.parent / name}.yaml@{profile}")


@pytest.mark.parametrize(
    ("name", "devices", "hosts"),
    [("v4-8", 4, 1), ("v4-16", 8, 2), ("v5p-8", 4, 1), ("v5p-64", 32, 8), ("v5e-8", 8, 1), ("v6e-8", 8, 1),
     ("v6e-16", 16, 4)],
)  # fmt: skip
def test_devices_and_hosts_of_a_slice(name, devices, hosts):
    """The names of v4 and v5p count cores."""
    assert (parse_slice(name).devices, parse_slice(name).hosts) == (devices, hosts)


def test_who_trains_and_who_samples():
    shared = load_recipe(TINY, [V6E]).hardware
    apart = load_recipe(TINY, [V6E, "hardware.trainer_devices=4", "hardware.sampler_devices=4"]).hardware
    assert (shared.colocated, shared.trainer_count(), shared.sampler_count()) == (True, 8, 8)
    assert (apart.colocated, apart.trainer_count(), apart.sampler_count()) == (False, 4, 4)
    assert load_recipe(TINY).hardware.trainer_count(found=3) == 3


def test_a_task_of_several_is_overridden_by_its_number_and_saved_whole():
    tasks = "problems=[{}, {name: hard, difficulty: hard, weight: 3, prompts: {user: boxed}}]"
    recipe = load_recipe(TINY, [tasks, "problems.1.train=7"])
    assert [(task.name, task.weight, task.train) for task in recipe.tasks] == [("words", 1, None), ("hard", 3, 7)]
    assert parse_recipe(yaml.safe_load(dump_recipe(recipe))) == recipe
    assert differences(recipe, load_recipe(TINY, [tasks])) == ["problems.1.train: 7 != None"]
    for key in ("problems.2.train=7", "problems.train=7"):
        with pytest.raises(CourseError, match="number them from 0 to 1"):
            load_recipe(TINY, [tasks, key])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], {"temperature": 1.0, "top_p": 1.0}),
        (["evaluation.preset=standard"], {"temperature": 0.7, "top_k": 50, "top_p": 0.95}),
        (["evaluation.preset=liberal", "evaluation.temperature=2"], {"temperature": 2, "top_k": 2000, "top_p": 1.0}),
        (["evaluation.top_k=5", "evaluation.top_p=0.5"], {"temperature": 1.0, "top_k": 5, "top_p": 0.5}),
    ],
)
def test_a_preset_sets_what_is_not_set_beside_it(changes, expected):
    assert load_recipe(TINY, changes).evaluation_sampling == expected


def test_a_schedule_changes_the_temperature_from_step_to_step_and_is_read_back():
    made = load_recipe(TINY, ["rollout.temperature={from: 0.9, to: 0.7, steps: 5}", "training.steps=9"])
    temperatures = [made.rollout.temperature_of(step, made.training.steps) for step in range(9)]
    assert temperatures == pytest.approx([0.9, 0.85, 0.8, 0.75, 0.7, 0.7, 0.7, 0.7, 0.7])
    assert temperatures[4:] == [0.7] * 5 and temperatures[0] == made.rollout.first_temperature == 0.9
    assert parse_recipe(yaml.safe_load(dump_recipe(made))) == made
    assert "from: 0.9" in dump_recipe(made)
    assert made.evaluation_sampling["temperature"] == 0.9
    # Without steps it lasts as long as the run; a run of one step has no change.
    whole = load_recipe(TINY, ["rollout.temperature={from: 1.0, to: 0.5}"]).rollout
    assert [whole.temperature_of(step, 3) for step in range(3)] == [1.0, 0.75, 0.5]
    assert whole.temperature_of(0, 1) == 1.0
    assert load_recipe(TINY, ["rollout.temperature=0.5"]).rollout.temperature_of(7, 9) == 0.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("rollout.temperature=warm", "rollout.temperature='warm': Input should be a valid number"),
        ("rollout.temperature=0", "rollout.temperature=0: Input should be greater than 0"),
        ("rollout.temperature={from: 0.9}", "rollout.temperature.to is missing"),
        ("rollout.temperature={from: 0.9, to: 0}", "rollout.temperature.to=0: Input should be greater than 0"),
        ("rollout.temperature={from: 1, to: 2, step: 3}", "unknown key rollout.temperature.step; did you mean steps?"),
        ("rollout.temperature={from: 1, to: 2, steps: 1}", "rollout.temperature.steps=1: "),
        ("rollout.top_p=0", "rollout.top_p=0: "),
        ("training.profile_steps=[5,3]", "profile_steps=[5, 3] must be a first and a last step"),
        ("training.profile_steps=[99,100]", "profile_steps=[99, 100] must be a first and a last step of the 50 "),
    ],
)
def test_what_cannot_be_sampled_or_recorded_is_refused(change, words):
    with pytest.raises(CourseError) as caught:
        load_recipe(TINY, [change])
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_correction_needs_what_was_sampled_from():
    for change in ("rollout.top_k=5", "rollout.top_p=0.9"):
        with pytest.raises(CourseError, match=r"grpo\.correction=tis needs .* rollout\.top_k and rollout\.top_p"):
            load_recipe(TINY, ["grpo.correction=tis", change])
    with pytest.raises(CourseError, match=r"rollout\.temperature=a schedule rollout\.engine=vllm"):
        load_recipe(TINY, ["grpo.correction=tis", "rollout.engine=vllm", "rollout.temperature={from: 1, to: 0.9}"])


@pytest.mark.parametrize(
    ("change", "words"),
    [("rollout.top_k=5", "rollout.top_k"), ("rollout.temperature={from: 1, to: 0.5}", "a schedule")],
)
def test_plain_grpo_refuses_what_it_does_not_sample(change, words):
    with pytest.raises(CourseError, match=f"plain_grpo does not have {words}"):
        plain_settings(load_recipe(TINY, [change]))
