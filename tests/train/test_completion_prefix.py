"""Prompts as bare text, and prompts that end with the beginning of the completion: sent, graded, rewarded, recorded."""

import json

import pytest
from helpers import result_of

from grpo_lib import prompts
from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import read_jsonl
from grpo_lib.problems import batch_of_step, load_problems
from grpo_train import checks, cold_start, pipeline
from grpo_train.engines.tokens import Renderer, fit_prompts
from grpo_train.recipes import load_recipe
from grpo_train.recipes.loading import plain_settings
from grpo_train.runs.run_directory import open_run

TUNIX = "recipes/published/qwen3-1.7b-gsm8k-tunix.yaml"
OPENED = "prompts.completion_prefix=<reasoning>"
SMALL = [
    "training.steps=2",
    "training.prompts_per_step=4",
    "training.validate_every=2",
    "grpo.group_size=4",
    "problems.train=200",
    "problems.validation=16",
    "problems.test=16",
    "evaluation.batch_size=16",
]
# Pays for what is in front of each completion, and nothing twice.
REWARD = """
def begins_once(prompts, completions, answer, **kwargs):
    return [float(text.startswith('<reasoning>') and text.count('<reasoning>') == 1) for text in completions]
"""


@pytest.fixture
def tiny(root):
    return lambda *overrides: load_recipe(root / "recipes" / "tiny-cpu.yaml", overrides)


def test_the_published_prompt_is_bare_text_that_ends_in_the_opened_tag(root, tokenizer):
    recipe = load_recipe(root / TUNIX)
    question = "What is {question} plus 2?"
    sent = Renderer(recipe.prompts, tokenizer)(question)
    assert sent == recipe.prompts.user.replace("{question}", question, 1) + "<reasoning>\n"
    assert sent.endswith(f"Problem: {question}\n<reasoning>\n")
    assert prompts.SYSTEM_PROMPT not in sent
    assert not any(marker in sent for family in prompts.TURN_MARKERS.values() for marker in family)
    ids = tokenizer([sent], add_special_tokens=False)["input_ids"][0]
    assert not set(ids) & set(tokenizer.all_special_ids)


def test_the_recipe_has_the_published_values(root):
    recipe = load_recipe(root / TUNIX)
    grpo, training = recipe.grpo, recipe.training
    assert (grpo.group_size, grpo.beta, grpo.kl, grpo.epsilon) == (8, 0.04, "k2", 0.2)
    assert (training.learning_rate, training.warmup_steps, training.schedule_steps) == (2e-7, 50, 500)
    assert (training.steps, training.schedule) == (100, "cosine")
    assert (recipe.rollout.temperature, recipe.rollout.max_completion_length) == (1.0, 1024)
    assert recipe.hardware.process_count() == 1
    assert load_recipe(f"{root / TUNIX}@v6e-64").hardware.process_count() == 16


def test_the_system_prompt_stands_in_front_and_a_task_may_have_prompts_of_its_own(tiny, tokenizer):
    own = "{chat_template: false, system: '', user: 'Q: {question} A: ', completion_prefix: <think>}"
    recipe = tiny(f"problems=[{{}}, {{name: bare, prompts: {own}}}]", "prompts.system=Be brief.", OPENED)
    render = Renderer(recipe.prompts, tokenizer)
    bare = recipe.prompts.model_copy(update={"chat_template": False})
    assert Renderer(bare, tokenizer)("2?") == "Be brief.\n\n2?<reasoning>"
    problems = load_problems(recipe.problems, "train")
    batch = batch_of_step(problems, render, 4, 0, {"words": 1.0, "bare": 1.0})(0)
    expected = {"words": "<reasoning>", "bare": "<think>"}
    assert list(batch["completion_prefix"]) == [expected[task] for task in batch["task"]]
    for prompt, prefix, task in zip(batch["prompts"], batch["completion_prefix"], batch["task"], strict=True):
        assert prompt.endswith(f" A: {prefix}" if task == "bare" else f"assistant\n{prefix}")
    assert "completion_prefix" not in batch_of_step(problems[:8], Renderer(tiny().prompts, tokenizer), 4, 0)(0)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["prompts.user=ask"], ["prompts.user='ask': give question, dapo, boxed, or a text with {question}"]),
        (["prompts.chat_template=false", "prompts.thinking=true"], ["thinking=true", "chat_template=false"]),
        (["training.cold_start=8", "prompts.completion_prefix=Well"], ["cold_start=8", "completion_prefix='Well'"]),
        (["training.schedule_steps=500"], ["schedule_steps=500 is for a cosine"]),
        (["training.schedule=cosine", "training.schedule_steps=2"], ["schedule_steps=2 is below steps="]),
    ],
)
def test_what_does_not_fit_is_one_line(tiny, overrides, words):
    with pytest.raises(CourseError) as caught:
        tiny(*overrides)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("override", [OPENED, "prompts.chat_template=false", "prompts.user='{question}?'"])
def test_plain_grpo_refuses_prompts_that_it_does_not_send(tiny, override):
    with pytest.raises(CourseError, match=f"plain_grpo does not have {override.split('=', maxsplit=1)[0]}"):
        plain_settings(tiny(override, "grpo.watch_kl=null"))


def test_a_prompt_is_measured_with_its_end(tiny, tokenizer):
    problems = load_problems(tiny().problems, "train")[:4]
    renders = [Renderer(recipe.prompts, tokenizer) for recipe in (tiny(), tiny(OPENED))]
    lengths = [fit_prompts(tiny().rollout, render, problems)[1] for render in renders]
    assert lengths[1] - lengths[0] == len(tokenizer.encode("<reasoning>"))


def test_a_worked_solution_is_taught_without_what_the_prompt_ends_with(tiny, tokenizer):
    (problem,) = load_problems(tiny().problems, "train")[:1]
    whole = prompts.template_completion(problem.solution, problem.answer)
    for prefix in ("<reasoning>", "<reasoning>\n", ""):
        render = Renderer(tiny().prompts.model_copy(update={"completion_prefix": prefix}), tokenizer)
        sent, written = cold_start.example(problem, render)
        assert sent.endswith(prefix)
        assert prefix.rstrip() + written == whole


@pytest.fixture(scope="module")
def run(root, tmp_path_factory):
    """Two steps with the opened tag and a reward of a file, between two evaluations."""
    folder = tmp_path_factory.mktemp("opened")
    reward = folder / "reward.py"
    reward.write_text(REWARD, encoding="utf-8")
    rewards = f"rewards=['{reward}:begins_once', correct_answer]"
    recipe = load_recipe(root / "recipes" / "tiny-cpu.yaml", [*SMALL, OPENED, rewards])
    directory = open_run(folder / "run", recipe)
    summary = pipeline.run(checks.check(recipe), directory, progress=False)
    return recipe, directory, summary, reward


@pytest.mark.long
def test_a_continued_form_counts_in_training_and_evaluation(run):
    _, directory, summary, _ = run
    assert summary["before"]["format_accuracy"] > 0.3  # the tiny base writes the template in one of two completions
    assert summary["before"]["accuracy"] > 0
    for row in read_jsonl(directory / "metrics.jsonl"):
        assert row["format"] > 0
        assert row["rewards/begins_once/mean"] > 0.5
    means = summary["after"]["rewards"]
    assert list(means) == ["begins_once", "correct_answer"]
    assert means["begins_once"] > 0.5
    assert means["correct_answer"] == pytest.approx(summary["after"]["accuracy"], abs=0.2)


@pytest.mark.long
def test_records_keep_what_the_model_wrote_and_can_be_graded_again(run, grpo):
    recipe, directory, summary, _ = run
    path = directory / "evals" / "before.jsonl"
    records = read_jsonl(path)
    for record in records:
        assert record["prompt"].endswith("<reasoning>")
        assert record["completion_prefix"] == "<reasoning>"
        assert record["completion"].startswith("<reasoning>")
    # What another program would have kept: the model's own text.
    written = directory / "written.jsonl"
    own = [{"id": r["id"], "completion": r["completion"].removeprefix("<reasoning>")} for r in records]
    written.write_text("".join(json.dumps(row) + "\n" for row in own), encoding="utf-8")
    again = directory / "again.jsonl"
    command = ["evaluate", "recipes/tiny-cpu.yaml", OPENED, *SMALL, "--json"]
    for file, output in ((path, again), (written, directory / "more.jsonl"), (again, directory / "third.jsonl")):
        graded = result_of(grpo(*command, "--completions", file, "--output", output))
        assert graded["format_accuracy"] == summary["before"]["format_accuracy"]
        assert [r["completion"] for r in read_jsonl(output)] == [r["completion"] for r in records]
    assert recipe.prompts.completion_prefix == "<reasoning>"


@pytest.mark.long
def test_a_run_goes_on_with_the_same_reward_file_alone(run):
    recipe, directory, _, reward = run
    open_run(directory, recipe)
    reward.write_text(f"{REWARD}# another\n", encoding="utf-8")
    with pytest.raises(CourseError, match=r"began with another content of .*reward\.py:begins_once; put the file back"):
        open_run(directory, recipe)
    reward.write_text(REWARD, encoding="utf-8")
    open_run(directory, recipe)


def test_a_reward_file_that_fails_is_refused_before_a_model_is_loaded(tiny, tmp_path):
    file = tmp_path / "short.py"
    file.write_text("def one(prompts, completions, answer, **kwargs):\n    return [1.0]\n", encoding="utf-8")
    with pytest.raises(CourseError, match=r"short\.py:one \(line 1\) returned 1 for 2 completions"):
        checks.check(tiny(f"rewards=['{file}:one']", "model.path=nowhere"))


def test_the_cosine_of_a_longer_schedule_has_hardly_begun_to_fall(tiny):
    from grpo_train.engines.optimizer import learning_rates

    cosine = ["training.schedule=cosine", "training.learning_rate=2e-7", "training.warmup_steps=50"]
    rates = learning_rates(tiny("training.steps=100", *cosine, "training.schedule_steps=500").training)
    whole = learning_rates(tiny("training.steps=500", *cosine).training)
    assert rates == pytest.approx(whole[:100])
    assert 0.95 * 2e-7 < rates[-1] < rates[50] == pytest.approx(2e-7)
