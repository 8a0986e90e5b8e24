"""The recipe as arguments of MaxText's own train_rl: every field is there or named, and MaxText's config reads them."""

import importlib.util
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from maxtext.configs import pyconfig, types
from pydantic import BaseModel

from grpo_lib import prompts, rewards
from grpo_lib.common.errors import CourseError
from grpo_train import maxtext_rl
from grpo_train.maxtext_rl import problem_files
from grpo_train.recipes import ProblemsRecipe, Recipe, load_recipe

ROOT = Path(__file__).parents[2]
TINY = ROOT / "recipes" / "tiny-cpu.yaml"
# MaxText's loader takes seconds, so of the profiles only one that changes the hardware; its trainer takes one task.
RECIPES = [path for path in sorted((ROOT / "recipes").rglob("*.yaml")) if not load_recipe(path).tasks]
RECIPES.append(ROOT / "recipes" / "llama3.1-8b-gsm8k.yaml@v5p-8,g8")
V6E = "hardware.accelerator=v6e-8"
GSM8K = f"problems.path={ROOT / 'tests' / 'lib' / 'gsm8k_fixture'}"

# Fields that only the files of `write_problems` depend on.
IN_THE_FILES = {
    "problems.difficulty",
    "problems.path",
    "problems.kind",
    *(f"problems.columns.{column}" for column in ("question", "answer", "solution")),
    "problems.conflicts",
    "problems.test_source",
    "problems.test_path",
    "problems.train",
    "problems.seed",
    "prompts.system",
    "prompts.user",
    "prompts.chat_template",
    "rollout.overlong_prompts",
}
# Another value for fields that are not numbers, or of which twice the number is not possible.
OTHER = {
    "prompts.thinking": "true", "prompts.completion_prefix": "<reasoning>", "training.schedule_steps": 5000,
    "training.layout": "packed", "model.weight_dtype": "bfloat16", "training.rounding": "stochastic",
    "training.optimizer": "lion", "training.optimizer_dtype": "bfloat16", "training.stop_after": "8h30m",
    "name": "other", "model.path": "Qwen/Qwen3-0.6B", "model.maxtext_name": "qwen3-1.7b", "model.dtype": "bfloat16",
    "model.sizes": "{base_mlp_dim: 128}", "model.remat": "full", "hardware.accelerator": "v6e-8",
    "problems.difficulty": "hard", "problems.source": "gsm8k", "rollout.engine": "tunix", "rewards": "[correct_answer]",
    "loss.implementation": "pallas", "training.micro_batch_size": 8,
    "training.schedule": "cosine", "training.checkpoints": "gs://bucket/grpo", "tracking.wandb": "online",
    "grpo.kl": "k2", "grpo.advantage": "mean", "grpo.aggregation": "constant",
    "grpo.ratio": "sequence", "rollout.vllm.options": "{block_size: 32}",
    "grpo.target_kl": 0.02, "grpo.watch_kl": 5,
    "training.cold_start_spaces": "true", "training.profile_steps": "[3, 5]", "grpo.mask_truncated": "true",
    "grpo.overlong_buffer": 8, "grpo.correction": "tis", "evaluation.preset": "standard",
}  # fmt: skip
# What a field needs to be set, or to matter.
NEEDED = {
    "model.sizes": ["model.path=Qwen/Qwen3-0.6B"],
    "rollout.engine": ["rollout.engine=vllm"],
    "hardware.sampler_devices": ["hardware.trainer_devices=2"],
    "grpo.kl": ["grpo.beta=0.1"],
    "training.schedule_steps": ["training.schedule=cosine"],
    "grpo.target_kl": ["grpo.beta=0.1"],
    "training.optimizer_dtype": ["model.dtype=bfloat16"],
    "training.prompts_per_step_per_device": [
        "training.prompts_per_step=null",
        "training.prompts_per_step_per_device=4",
    ],
    "training.micro_batch_size_per_device": ["training.micro_batch_size_per_device=8"],
    "rollout.micro_batch_size_per_device": ["rollout.micro_batch_size_per_device=2"],
}


def fields(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Every field of the schema that holds a value, as section.key."""
    found = []
    for name, field in section.model_fields.items():
        inner = ProblemsRecipe if name == "problems" else field.annotation  # a list of tasks is refused as a whole
        is_section = isinstance(inner, type) and issubclass(inner, BaseModel)
        found += fields(inner, f"{prefix}{name}.") if is_section else [prefix + name]
    return found


def tiny(*overrides: str) -> Recipe:
    """The tiny recipe without measuring its prompts, and with few test problems."""
    few = ["rollout.max_prompt_length=48", "problems.test=20", "evaluation.batch_size=5"]
    return load_recipe(TINY, [*few, *overrides])


def listed(recipe: Recipe, folder: Path = Path("runs/x")) -> list[str]:
    tests = recipe.problems.test or 1319
    return maxtext_rl.arguments(recipe, folder / "problems", folder / "0" / "items", folder / "out", tests)


def not_expressible(recipe: Recipe) -> list[str]:
    return maxtext_rl.not_expressible(recipe, recipe.problems.test or 1319)


def mapping(arguments: Sequence[str]) -> dict[str, str]:
    return dict(argument.split("=", 1) for argument in arguments[1:])


@pytest.mark.parametrize("field", sorted({*fields(Recipe)} - IN_THE_FILES))
def test_every_field_changes_the_arguments_or_is_named(field):
    value = before = tiny(*NEEDED.get(field, []))
    for key in field.split("."):
        value = getattr(value, key)
    other = OTHER.get(field) or (value or 1) * (0.5 if isinstance(value, float) else 2)
    after = tiny(*NEEDED.get(field, []), f"{field}={other}")
    named = any(line.startswith(f"{field}:") for line in not_expressible(after))
    assert named or listed(after) != listed(before)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_maxtext_accepts_the_list_and_reads_the_recipe_in_it(path):
    """By MaxText's own loader and config class: types, bounds, cross-checks, and no unknown key."""
    # Without the tokenizer of a model that may not be here, the longest prompt is not known.
    recipe = load_recipe(path, ["rollout.max_prompt_length=64"] if "smollm2" in path.name else [])
    arguments = listed(recipe)
    assert len(mapping(arguments)) == len(arguments) - 1  # no key comes twice
    assert "\n" not in "".join(arguments)
    config = pyconfig.initialize_pydantic(["train_rl", *arguments], config_class=types.RLConfig)
    grpo = recipe.grpo
    training = recipe.training
    rollout = recipe.rollout
    hardware = recipe.hardware
    asked = {
        **recipe.model.sizes,
        "model_name": recipe.model.maxtext_name,
        "weight_dtype": recipe.model.trainer_dtype,
        "dtype": recipe.model.dtype,
        "remat_policy": recipe.model.remat,
        "train_steps": training.steps,
        "batch_size": recipe.plan.prompts_per_step,
        "train_micro_batch_size": recipe.plan.micro_batch_size // grpo.group_size,
        "rollout_micro_batch_size": recipe.plan.rollout_micro_batch_size,
        "learning_rate": training.learning_rate,
        "adam_b1": training.b1,
        "adam_b2": training.b2,
        "adam_weight_decay": training.weight_decay,
        "gradient_clipping_threshold": training.max_grad_norm,
        "decode_sampling_temperature": rollout.first_temperature,
        "decode_sampling_nucleus_p": 1.0,
        "decode_sampling_top_k": -1,
        "hbm_utilization_vllm": rollout.vllm.memory_fraction,
        "checkpoint_period": training.checkpoint_every,
        "max_num_checkpoints_to_keep": training.max_to_keep,
        "reward_functions": ",".join(recipe.rewards),
        "ici_tensor_parallelism": hardware.trainer_tensor,
    }
    assert {key: getattr(getattr(config, key), "value", getattr(config, key)) for key in asked} == asked
    assert config.rl.num_generations == grpo.group_size
    assert config.rl.num_iterations == grpo.iterations
    assert config.rl.grpo_beta == grpo.beta
    assert config.rl.grpo_epsilon == grpo.epsilon
    assert int(config.warmup_steps_fraction * config.learning_rate_schedule_steps) == training.warmup_steps
    assert config.max_target_length - config.max_prefill_predict_length == rollout.max_completion_length
    if rollout.max_prompt_length != "auto":
        assert config.max_prefill_predict_length == rollout.max_prompt_length
    # Upstream splits the devices by fractions where it sees Pathways and two machines, else all are for both.
    devices = hardware.slice.devices if hardware.slice else 1
    trainer = sampler = devices
    if devices // config.chips_per_vm >= 2 and config.use_pathways:
        trainer = int(devices * config.trainer_devices_fraction)
        sampler = int(devices * config.sampler_devices_fraction)
    assert trainer == hardware.trainer_count(devices)
    assert sampler == hardware.sampler_count(devices)
    tensor = hardware.sampler_tensor or sampler
    assert config.rollout_tensor_parallelism in (tensor, -1)
    assert config.rollout_data_parallelism == sampler // tensor


@given(st.integers(1, 5000), st.data())
def test_a_fraction_gives_back_its_whole_number(whole, data):
    part = data.draw(st.integers(0, whole - 1))
    fraction = maxtext_rl._fraction(part, whole)
    assert int(fraction * whole) == part
    assert 0 <= fraction <= 1
    assert maxtext_rl._fraction(whole, whole) == 1.0


def test_the_schedule_and_the_batches_follow_the_steps():
    given = mapping(listed(tiny("training.schedule=cosine", "training.steps=30", "grpo.iterations=3")))
    assert given["learning_rate_schedule_steps"] == "30"
    assert float(given["warmup_steps_fraction"]) * 30 >= 5
    assert (given["num_batches"], given["rl.num_iterations"]) == ("10", "3")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["grpo.iterations=4"], "grpo.iterations:"),
        (["hardware.trainer_devices=4", V6E], "hardware.trainer_devices:"),
        (["hardware.trainer_devices=4", "hardware.sampler_devices=2", V6E], "hardware.sampler_devices:"),
        (["hardware.accelerator=v4-16"], "several hosts:"),
        (["grpo.iterations=2"], "grpo.iterations above 1:"),
        (["problems.test=999"], "problems.test:"),
        (["training.profile_steps=[3,5]"], "training.profile_steps:"),
        (["rollout.temperature={from: 0.9, to: 0.7}"], "rollout.temperature:"),
    ],
)
def test_differences_are_named_where_they_arise(overrides, words):
    there = not_expressible(load_recipe(TINY, overrides))
    assert any(line.startswith(words) for line in there)
    not_there = not_expressible(tiny())
    assert not any(line.startswith(words) for line in not_there)


def test_a_split_of_an_unknown_number_of_devices_is_refused():
    with pytest.raises(CourseError, match=r"needs hardware\.trainer_devices"):
        listed(tiny("hardware.sampler_devices=2"))
    split = ["hardware.sampler_devices=2", "hardware.trainer_devices=6", "training.prompts_per_step=12"]
    given = mapping(listed(tiny(*split)))
    assert (given["trainer_devices_fraction"], given["sampler_devices_fraction"]) == ("0.75", "0.25")


def test_problems_last_for_all_steps(tmp_path):
    recipe = load_recipe(TINY, ["problems.train=50", "problems.test=20", "training.steps=7"])
    tests, _ = maxtext_rl.write_problems(recipe, tmp_path)
    train = pq.read_table(tmp_path / problem_files.TRAIN)
    test = pq.read_table(tmp_path / problem_files.TEST)
    assert (train.num_rows, test.num_rows, tests) == (7 * 16, 20, 20)
    assert train.column_names == ["question", "answer"]
    assert train.slice(0, 50).to_pylist() == train.slice(50, 50).to_pylist()


def test_gsm8k_goes_over_with_its_system_prompt(tmp_path):
    recipe = load_recipe(TINY, ["problems.source=gsm8k", GSM8K, "prompts.system=default", "training.steps=1"])
    maxtext_rl.write_problems(recipe, tmp_path)
    golds = pq.read_table(tmp_path / problem_files.TEST)["answer"].to_pylist()
    assert all(gold.lstrip("-").replace(".", "").isdigit() for gold in golds)  # the number, not the solution
    assert prompts.SYSTEM_PROMPT.splitlines()[0] in (tmp_path / problem_files.TEMPLATE).read_text()


def test_prompts_that_are_too_long_are_refused_or_left_out(tmp_path):
    change = ["problems.train=200", "problems.test=100", "training.steps=1"]
    tiny = load_recipe(TINY, change)
    longest = problem_files.prompt_length(tiny.problems, tiny.prompts, tiny.rollout, tiny.model)
    short = [*change, f"rollout.max_prompt_length={longest - 2}"]
    none = [*change, "rollout.max_prompt_length=2", "rollout.overlong_prompts=filter"]
    for refused, words in ((short, "overlong_prompts=filter"), (none, "max_prompt_length")):
        with pytest.raises(CourseError, match=words):
            maxtext_rl.write_problems(load_recipe(TINY, refused), tmp_path)
    recipe = load_recipe(TINY, [*short, "rollout.overlong_prompts=filter"])
    tests, filtered = maxtext_rl.write_problems(recipe, tmp_path)
    assert filtered
    assert tests < 100
    assert pq.read_table(tmp_path / problem_files.TEST).num_rows == tests


@pytest.fixture(scope="module")
def functions():
    """reward_functions.py as train_rl imports it: by its path, under its own name."""
    path = Path(maxtext_rl.__file__).with_name("reward_functions.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[path.stem]


def test_the_prompt_is_ours(functions, tokenizer):
    given = {"question": "2?", "answer": "2"}
    template = {"SYSTEM_PROMPT": "Be kind.", "CHAT_TEMPLATE": True, "COMPLETION_PREFIX": ""}
    row = functions.process_data("words", tokenizer, template, None, given)
    assert row == {"prompts": prompts.render(tokenizer, "2?", "Be kind."), "question": "2?", "answer": '["2"]'}
    template |= {"CHAT_TEMPLATE": False, "COMPLETION_PREFIX": "<reasoning>"}
    assert functions.process_data("words", tokenizer, template, None, given)["prompts"] == "Be kind.\n\n2?<reasoning>"


def test_rewards_of_a_file_and_an_opened_tag_reach_upstream(functions, tmp_path):
    recipe = load_recipe(
        ROOT / "recipes" / "published" / "qwen3-1.7b-gsm8k-tunix.yaml",
        [GSM8K, "rollout.max_prompt_length=64", "model.path=assets/tiny-base"],
    )
    assert any("prompts.completion_prefix: " in line for line in not_expressible(recipe))
    name = mapping(listed(recipe))["reward_functions"]
    small = tiny("problems.train=20", "problems.test=20", "prompts.completion_prefix=<reasoning>")
    maxtext_rl.write_problems(small, tmp_path)
    config = SimpleNamespace(
        tokenizer_path=str(ROOT / "assets" / "tiny-base"),
        model_name="qwen3-0.6b",
        data_template_path=tmp_path / problem_files.TEMPLATE,
    )
    asked = {"prompts": [""], "completions": ["1+1</reasoning><answer>\\boxed{2}</answer>"], "answer": ['["2"]']}
    assert getattr(functions, name)(**asked, tmvp_config=config) == [1.0]
    assert functions.match_format_exactly(**asked, tmvp_config=config) == [3.0]
    assert not hasattr(functions, "nonesuch")


@pytest.mark.parametrize("name", rewards.REWARDS)
def test_rewards_pay_upstream_what_they_pay_here(functions, tokenizer, name, tmp_path):
    texts = [prompts.template_completion("1+1=2", "2"), prompts.template_completion("", "3"), "2", ""]
    ended = [text + tokenizer.eos_token for text in texts]
    function = getattr(functions, name)
    template = tmp_path / "template.json"
    template.write_text('{"COMPLETION_PREFIX": ""}', encoding="utf-8")
    config = SimpleNamespace(
        tokenizer_path=str(ROOT / "assets" / "tiny-base"), model_name="qwen3-0.6b", data_template_path=template
    )
    paid = function(prompts=[""] * 4, completions=ended, tmvp_config=config, answer=['["2"]'] * 4, question="?")
    assert paid == rewards.REWARDS[name](prompts=[""] * 4, completions=texts, answer=["2"] * 4)
    assert any(paid)
    assert pickle.loads(pickle.dumps(function)) is function  # or Tunix's reward workers could not take it


def test_the_command_prints_one_argument_to_a_line(grpo, tmp_path):
    done = grpo(
        "config", "recipes/tiny-cpu.yaml", "problems.test=40", "problems.train=60", "training.steps=2",
        "--as", "maxtext", "--problems", tmp_path / "p", "--runs", tmp_path / "runs",
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert Path(lines[0]).is_file()
    assert "rollout.engine" in done.stderr
    train = tmp_path / "p" / "train.parquet"
    assert train.is_file()
    assert f"hf_train_files={train}" in lines
    assert "num_test_batches=1" in lines
    assert "eval_batch_size=40" in lines


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "grpo config RECIPE --as maxtext"),
        (["rl.yml", "run_name=x"], "grpo convert"),
        (["rl.yml", "load_parameters_path=.", "hf_train_files=nowhere"], "hf_train_files=nowhere"),
        (["rl.yml", *(f"{key}=." for key in maxtext_rl.MADE_BY)], "vllm"),
    ],
)
def test_the_launcher_says_what_is_missing_before_it_loads_a_model(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(sys, "argv", ["maxtext_rl", *arguments])
    with pytest.raises(SystemExit):
        maxtext_rl.main()
    errors = capsys.readouterr().err
    assert words in errors
    assert len(errors.splitlines()) == 1


def test_several_tasks_are_refused(tmp_path):
    with pytest.raises(CourseError, match="problems"):
        maxtext_rl.write_problems(load_recipe(TINY, ["problems=[{}, {name: hard, difficulty: hard}]"]), tmp_path)
