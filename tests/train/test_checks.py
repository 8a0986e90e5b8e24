"""What a run needs is checked once, and what was found is handed on."""

from collections import Counter
from collections.abc import Callable

import pytest

from grpo_lib.common.errors import CourseError
from grpo_train import checks, pipeline
from grpo_train.engines import cluster, model_files, tokens
from grpo_train.recipes import Recipe, load_recipe
from grpo_train.runs import run_directory, tracking

# Each may be called once in a run.  model_directory and maxtext_sizes only look up what is on the disk.
ONCE = (
    (model_files, "require_engine"),
    (model_files, "check_model"),
    (model_files, "require_architecture"),
    (model_files, "require_disk"),
    (model_files, "require_heads"),
    (tracking, "require"),
    (cluster, "assign_devices"),
    (tokens, "load_tokenizer"),
    (tokens, "fit_prompts"),
    (Recipe, "plan_on"),
)
SMALL = [
    *("training.steps=2", "training.prompts_per_step=4", "grpo.group_size=4", "training.validate_every=0"),
    *("problems.train=200", "problems.test=8", "evaluation.batch_size=8"),
]


def counted(calls: Counter, name: str, function: Callable) -> Callable:
    def call(*arguments, **keywords):
        calls[name] += 1
        return function(*arguments, **keywords)

    return call


@pytest.fixture
def calls(monkeypatch) -> Counter:
    """How often each of ONCE was called."""
    calls: Counter = Counter()
    for place, name in ONCE:
        monkeypatch.setattr(place, name, counted(calls, name, getattr(place, name)))
    return calls


@pytest.mark.long(minutes=1)
def test_a_run_checks_and_tokenizes_once(grpo, calls, tmp_path, converted_base) -> None:
    done = grpo("train", "recipes/tiny-cpu.yaml", *SMALL, "--runs", tmp_path, "--run", "run", "--base", converted_base)
    assert done.returncode == 0, done.stderr
    assert calls == {name: 1 for _, name in ONCE}


@pytest.mark.slow
def test_a_session_of_a_notebook_is_checked_in_the_same_way(tiny_recipe, calls, tmp_path, converted_base) -> None:
    recipe = load_recipe("recipes/tiny-cpu.yaml", SMALL)
    directory = run_directory.open_run(tmp_path / "run", recipe)
    run_directory.link_base(directory, converted_base)
    pipeline.start_session(checks.check(recipe, run=directory), directory)
    assert calls == {name: 1 for _, name in ONCE}


def test_what_was_found_is_handed_on(tiny_recipe) -> None:
    recipe = load_recipe("recipes/tiny-cpu.yaml", SMALL)
    ready = checks.check(recipe)
    assert ready.recipe is recipe and len(ready.problems) == 200
    assert (ready.too_long, ready.taught) == (0, [])
    assert ready.plan.completions_per_step == 16
    assert [function.__name__ for function in ready.rewards] == recipe.rewards


def test_a_cold_start_has_problems_of_its_own() -> None:
    ready = checks.check(load_recipe("recipes/tiny-cpu.yaml", [*SMALL, "training.cold_start=20"]))
    taught, trained = ({problem.question for problem in part} for part in (ready.taught, ready.problems))
    assert len(taught) == 20 and not taught & trained


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("rewards=[nonesuch]", "nonesuch"),
        ("model.maxtext_name=qwen9-1b", "qwen9-1b"),
        ("hardware.trainer_devices=64", "64"),
        ("rollout.max_prompt_length=3", "rollout.max_prompt_length=3"),
        ("training.micro_batch_size=5", "training.micro_batch_size"),
    ],
)
def test_what_cannot_run_is_refused(change, words) -> None:
    with pytest.raises(CourseError, match=words):
        checks.check(load_recipe("recipes/tiny-cpu.yaml", [*SMALL, change]))
