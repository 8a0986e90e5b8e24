"""docs/published.md: each of its rows is tried here, and none can disappear.

`@tries(...)` registers the rows that a test tries.  Three lists have to agree: the rows of the page, those that are
tried (or told elsewhere, for what no test can try), and tests/published_rows.txt.  A row that is taken out of the page
and out of this file stays in that list, with a line in docs/CHANGELOG.md that says "Removed" and names it.
"""

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import re
import sys
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import yaml

from grpo_lib import evaluation, plain_grpo, prompts, rewards, statistics
from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import append_jsonl, read_jsonl
from grpo_lib.problems import load_problems
from grpo_train import checks, cli, pipeline, training
from grpo_train.cli.main import REMOVED as REMOVED_OPTIONS
from grpo_train.cli.train import step_line
from grpo_train.engines import tunix_models
from grpo_train.recipes import differences, load_recipe, profiles_of
from grpo_train.recipes.loading import REMOVED
from grpo_train.runs import health_checks, metric_glossary, run_directory, tracking
from grpo_train.runs.metrics_logger import REQUIRED_METRICS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "published.md"
ROWS_EVER = 96  # the 89 rows of the five texts and the brief, and the 7 controls that had been removed
RECIPES = ROOT / "recipes"
TINY = RECIPES / "tiny-cpu.yaml"
LLAMA = RECIPES / "llama3.1-8b-gsm8k.yaml"
SMOKE = RECIPES / "published" / "qwen3-1.7b-gsm8k-smoke.yaml"
TWO_HOSTS = RECIPES / "published" / "qwen2.5-7b-gsm8k-2hosts.yaml"
JAX = RECIPES / "published" / "qwen2.5-3b-gsm8k.yaml"
DAPO = RECIPES / "published" / "qwen2.5-32b-dapo-math.yaml"

# --- the page ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    name: str
    cells: tuple[str, ...]  # without the name: what it does, here, status; or what it does, told in, words there


def tables(text: str) -> Iterator[list[list[str]]]:
    """The Markdown tables of a text, each as rows of cells; the first row is the heading."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]
        yield [rows[0], *rows[2:]]


def rows_of(heading: str) -> list[Row]:
    """All rows of the page's tables whose third column has this heading."""
    found = []
    for head, *body in tables(PAGE.read_text(encoding="utf-8")):
        if head[2] == heading:
            found += [Row(name.strip("`"), tuple(rest)) for name, *rest in body]
    return found


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


HERE, TOLD = rows_of("here"), rows_of("told in")
TRIED: set[str] = set()


def tries(*rows: str) -> Callable:
    """Mark a test as the one that tries these rows of the page."""
    TRIED.update(rows)
    return lambda test: test


# Rows that other tests try already: where.
ELSEWHERE = {
    "process-lines": "tests/train/test_several_processes.py::"
    "test_two_processes_make_the_run_of_one_although_one_is_stopped_and_another_killed",
    "all-hosts-check": "tests/tpu/test_self_check.py::test_fewer_hosts_or_devices_than_the_recipe_has_are_named",
    "lost-host": "tests/train/test_multihost.py::test_a_lost_process_ends_the_other_within_a_minute",
    "machine-check": "tests/tpu/test_self_check.py::test_a_healthy_machine_passes",
    "schema-tests": "tests/train/test_recipes.py::test_a_bad_override_is_one_line_that_names_the_field",
    "exit-code": "tests/train/test_cli.py::test_a_finished_run_says_so_and_is_not_trained_again",
    "tfds-grain": "tests/lib/test_problems.py::test_the_real_builder_gives_what_the_files_give",
    "async-checkpoints": "tests/train/test_long_runs.py::"
    "test_killed_again_and_again_it_ends_as_if_nothing_had_happened",
    "two-languages": "tests/test_house.py::test_the_two_readmes_are_in_step",
    "fewer-devices": "tests/tpu/test_preflight.py::test_a_recipe_that_does_not_fit_gets_hints_in_order",
    "conda": "tests/test_house.py::test_lock_holds_what_is_asked_for",
}
# Rows whose cells and pictures are all there is to look for; test_everything_that_a_row_names_exists does it.
SHOWN = {
    *("course-place", "memory-argument", "trade-offs", "janet", "rl-terms", "classifier-table", "stack-diagram"),
    *("before-after-examples", "fixes"),
}


def test_no_row_disappears() -> None:
    listed = (ROOT / "tests" / "published_rows.txt").read_text(encoding="utf-8").split()
    on_page = [row.name for row in HERE + TOLD]
    assert sorted(set(on_page)) == sorted(on_page), "two rows have one name"
    assert {row.name for row in HERE} == TRIED | set(ELSEWHERE) | SHOWN
    assert set(on_page) <= set(listed), "add new rows to tests/published_rows.txt"
    assert len(listed) >= ROWS_EVER
    changes = (ROOT / "docs" / "CHANGELOG.md").read_text(encoding="utf-8").split("\n- ")
    removed = [entry for entry in changes if "Removed" in entry]
    missing = [name for name in listed if name not in on_page]
    assert [name for name in missing if not any(f"`{name}`" in entry for entry in removed)] == []


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_row_is_tried_elsewhere(name: str) -> None:
    file, _, test = ELSEWHERE[name].partition("::")
    assert re.search(rf"^def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)


# --- what the rows name -----------------------------------------------------------------------------------------


def key_paths(data: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Every key of a resolved recipe, and every section, as `section.key`."""
    for key, value in data.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from key_paths(value, f"{prefix}{key}.")


@functools.cache
def anchors(path: Path) -> set[str]:
    """What a link can point to behind `#`: headings of a Markdown file as GitHub names them, cells of a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return {f"cell-id={cell['id']}" for cell in json.loads(text)["cells"]}
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(cell: str) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)]+)\)", cell):
        file, _, anchor = link.partition("#")
        path = PAGE.parent / file if file else PAGE
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(link)
    return broken


COMMANDS = ("grpo ", "make ", "python ", "tensorboard ")  # tests/test_house.py looks their flags up, in all of docs/
KEYS = set(key_paths(load_recipe(TINY).model_dump(mode="json")))
# What is no key, file, metric or function, and the test that asks for it.
SENTENCES = {
    "training completed: 10 of 10 steps": "completed",
    "process 1 of 2: 4 of 8 devices are its own": "process-lines",
    "0/items": "convert",
    "runs/NAME": "run-folder",
    "hf-xet": "fast-download",
    "WANDB_PROJECT": "wandb-project",
    "--as maxtext": "ten-steps",
}


@functools.cache
def options_of_grpo() -> set[str]:
    commands = typer.main.get_command(cli.command_line()).commands.values()  # type: ignore[attr-defined]
    return {flag for command in commands for parameter in command.params for flag in parameter.opts}


def is_metric(name: str) -> bool:
    if name in tracking.ALIASES.values() or name.startswith(("eval/reward/func/", "time/train/")):
        return True  # W&B's; the row wandb-names logs them
    try:
        return bool(metric_glossary.metric(name))
    except KeyError:
        return False


def is_file(name: str) -> bool:
    path, _, profiles = name.partition("@")
    if profiles:
        return set(profiles.split(",")) <= set(profiles_of(ROOT / path))
    return (ROOT / path).exists() or name in str(run_directory.__doc__).split()


def is_function(name: str) -> bool:
    module, _, function = name.partition(".")
    found = importlib.util.find_spec(f"grpo_lib.{module}") if function else None
    return found is not None and hasattr(importlib.import_module(f"grpo_lib.{module}"), function)


def exists(name: str) -> bool:
    """Whether something of this name is here: a command, a sentence, an option, a key, a metric, a file, a function."""
    if name in SENTENCES or name.startswith(COMMANDS):
        return True
    if name.startswith("--"):
        return name in options_of_grpo()
    return name.partition("=")[0] in KEYS or is_metric(name) or is_file(name) or is_function(name)


@pytest.mark.parametrize("row", HERE, ids=lambda row: row.name)
def test_everything_that_a_row_names_exists(row: Row) -> None:
    _, here, status = row.cells
    assert [name for name in names_in(here) if not exists(name)] == []
    assert broken_links(here) == []
    assert status.partition(":")[0] in ("same", "more", "other", "partly")
    assert names_in(here) or "](" in here  # something that a reader can go to


@pytest.mark.parametrize("row", TOLD, ids=lambda row: row.name)
def test_what_no_test_can_try_is_told_where_the_page_says(row: Row) -> None:
    _, place, words = row.cells
    assert broken_links(place) == []
    [file] = re.findall(r"\]\(([^)#]+)", place)
    text = (PAGE.parent / file).read_text(encoding="utf-8")
    assert names_in(words)
    assert [word for word in names_in(words) if word not in text] == []


# --- published values -------------------------------------------------------------------------------------------

# The row's values, as overrides of the recipe that is made after the text.
AS_PUBLISHED = f"{JAX}@as-published"
WITH_ADAPTERS = f"{LLAMA}@lora"
PUBLISHED = [
    (SMOKE, {"ten-steps": ["training.steps=10"]}),
    (
        AS_PUBLISHED,
        {
            "batch-128": [
                *("training.steps=100", "training.prompts_per_step=16", "grpo.group_size=8"),
                *("training.optimizer=lion", "training.learning_rate=1e-6"),
            ],
        },
    ),
    (
        TWO_HOSTS,
        {
            "two-hosts": ["hardware.accelerator=v4-16", "hardware.processes=2"],
            "one-step": ["training.steps=1"],
            "separate-sizes": ["rollout.micro_batch_size=8", "training.micro_batch_size=32"],
            "environment-variables": [
                *("grpo.beta=0", "grpo.iterations=1", "rollout.max_prompt_length=512"),
                *("rollout.max_completion_length=64", "grpo.group_size=8", "training.prompts_per_step=16"),
            ],
        },
    ),
    (
        LLAMA,
        {
            "llama-values": [
                *("rollout.max_prompt_length=256", "rollout.max_completion_length=768", "rollout.temperature=0.9"),
                *("grpo.group_size=2", "grpo.iterations=1", "grpo.beta=0.08", "grpo.epsilon=0.2"),
                "training.steps=3738",
            ],
            "llama-top-k": ["rollout.top_k=50", "rollout.top_p=1.0"],
            "llama-batch-one": ["training.prompts_per_step=1", "hardware.trainer_tensor=4"],
            "llama-optimizer": [
                *("training.learning_rate=3e-6", "training.b1=0.9", "training.b2=0.99", "training.weight_decay=0.1"),
                *("training.warmup_steps=374", "training.schedule=cosine", "training.max_grad_norm=0.1"),
            ],
            "llama-checkpoints": ["training.checkpoint_every=500", "training.max_to_keep=4"],
            "llama-memory": [
                *("hardware.trainer_devices=4", "hardware.sampler_devices=4", "rollout.vllm.memory_fraction=0.2"),
            ],
            "kl-rule": ["grpo.target_kl=0.1"],
        },
    ),
    (LLAMA, {"temperature-rule": ["rollout.temperature={from: 0.9, to: 0.7, steps: 3738}"]}),
    (WITH_ADAPTERS, {"lora": ["lora.rank=16", "lora.alpha=32.0"]}),
    (
        DAPO,
        {
            "dapo-recipe": [
                *("problems.source=dapo-math", "problems.test_source=aime", "evaluation.samples=32"),
                *("training.steps=300", "grpo.group_size=16", "hardware.accelerator=v6e-64"),
            ],
            "tensor-parallel": ["hardware.trainer_tensor=8"],
            "structure": ["model.sizes.base_num_decoder_layers=64"],
            "megatron-names": ["model.path=Qwen/Qwen2.5-32B"],
        },
    ),
]


def found_at(data: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        data = data[part]
    return data


def assert_accepted(grpo: Callable, recipe: str | Path, overrides: list[str]) -> None:
    """`grpo config` takes the overrides, and the resolved recipe has their values."""
    done = grpo("config", recipe, *overrides, "--json")
    assert done.returncode == 0, done.stderr
    resolved = json.loads(done.stdout.splitlines()[-1])
    for override in overrides:
        key, _, text = override.partition("=")
        wanted = yaml.safe_load(text)
        value = found_at(resolved, key)
        if isinstance(value, float):
            assert value == pytest.approx(float(wanted)), override
        elif not isinstance(wanted, dict):
            assert value == wanted, override
        else:
            assert value is not None, override


@tries(*(row for _, values in PUBLISHED for row in values))
@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [pytest.param(recipe, values[row], id=row) for recipe, values in PUBLISHED for row in values],
)
def test_published_values_are_accepted(grpo, recipe, overrides) -> None:
    assert_accepted(grpo, recipe, overrides)


@pytest.mark.parametrize(("recipe", "values"), PUBLISHED)
def test_the_published_values_of_a_text_go_together(grpo, recipe, values) -> None:
    assert_accepted(grpo, recipe, [override for overrides in values.values() for override in overrides])


def test_ten_steps_are_upstreams_four_numbers(grpo, tmp_path) -> None:
    fixture = ROOT / "tests" / "lib" / "gsm8k_fixture"
    model = "model.path=assets/tiny-base"  # Qwen3-1.7B's files are on the hub
    done = grpo(
        *("config", "recipes/tiny-cpu.yaml", model, "training.steps=10", "training.prompts_per_step=8"),
        *("problems.source=gsm8k", f"problems.path={fixture}", "rollout.max_prompt_length=512"),
        *("--as", "maxtext", "--problems", tmp_path / "problems", "--runs", tmp_path / "runs"),
    )
    wanted = {"num_batches=10", "train_fraction=1.0", "num_epoch=1", "rl.num_iterations=1"}
    assert wanted <= set(done.stdout.splitlines()), done.stderr


@tries("train-rl")
def test_upstreams_entry_point_has_a_launcher() -> None:
    assert importlib.util.find_spec("grpo_train.maxtext_rl.__main__")
    assert importlib.util.find_spec("maxtext.trainers.post_train.rl.train_rl")


@tries("print-config")
def test_config_prints_the_plan_without_a_tpu(grpo) -> None:
    printed = grpo("config", TWO_HOSTS).stdout
    assert "accumulation steps" in printed
    assert "rollout micro batches" in printed


@tries("auto-accumulation")
def test_passes_and_accumulation_follow_from_the_sizes_per_device() -> None:
    sizes = [
        *("training.prompts_per_step=16", "grpo.group_size=2", "hardware.sampler_tensor=1"),
        *("rollout.micro_batch_size=null", "rollout.micro_batch_size_per_device=1"),
        *("training.micro_batch_size=null", "training.micro_batch_size_per_device=1"),
    ]
    plan = load_recipe(TWO_HOSTS, sizes).plan
    assert (plan.num_rollout_micro_batches, plan.accumulation_steps) == (2, 4)


@tries("sizes-per-device")
def test_a_recipe_moves_to_a_larger_slice_by_one_key() -> None:
    sizes = [
        *("training.prompts_per_step_per_device=2", "training.prompts_per_step=null", "grpo.group_size=2"),
        *("rollout.micro_batch_size_per_device=1", "training.micro_batch_size_per_device=2"),
        *("training.micro_batch_size=null", "rollout.engine=tunix", "hardware.sampler_tensor=1"),
    ]
    for chips in (8, 64):
        plan = load_recipe(SMOKE, [f"hardware.accelerator=v6e-{chips}", *sizes]).plan
        assert (plan.prompts_per_step, plan.micro_batch_size) == (2 * chips, 2 * chips)
        assert (plan.num_rollout_micro_batches, plan.accumulation_steps) == (2, 2)


def test_every_variable_of_the_published_scripts_has_a_key() -> None:
    text = (ROOT / "docs" / "tpu.md").read_text(encoding="utf-8")
    [table] = [table for table in tables(text) if table[0][0] == "variable"]
    here = {variable: names_in(cells[0]) for names, *cells in table[1:] for variable in names_in(names)}
    published = {
        *("STEPS", "BATCH_SIZE", "NUM_PRE_Q", "PPO_EPOCHS", "BETA", "GLOBAL_LENGTH", "MAX_LENGTH_SAMPLE"),
        *("ROLLOUT_PER_DEVICE_BATCH_SIZE", "TRAIN_PER_DEVICE_MICRO_BATCH_SIZE", "MODEL_PATH", "TEMPERATURE"),
        *("TOP_K", "TOP_P", "LEARNING_RATE", "WANDB_PROJECT", "EVAL_FULL_SWEEP", "CKPT_DIR", "LOG_DIR", "PROFILE_DIR"),
    }
    assert published - set(here) == set()
    assert {name for names in here.values() for name in names if not exists(name)} == set()


@tries("must-divide")
def test_a_size_that_does_not_divide_lists_those_that_do() -> None:
    with pytest.raises(CourseError, match=r"must divide the 128 completions .*: use 8, 16, 32"):
        load_recipe(TWO_HOSTS, ["training.micro_batch_size=24"])


@tries("loss-pair")
def test_the_two_recipes_differ_in_the_loss_alone() -> None:
    changed = [line.partition(":")[0] for line in differences(load_recipe(JAX), load_recipe(f"{JAX}@pallas"))]
    assert sorted(changed) == ["loss.implementation", "name"]


@tries("course-slices", "several-tasks")
def test_slices_and_tasks_have_recipes() -> None:
    assert load_recipe(LLAMA).hardware.accelerator == "v6e-8"
    assert load_recipe(f"{LLAMA}@v5p-8").hardware.accelerator == "v5p-8"
    several_hosts = load_recipe(f"{LLAMA}@v5p-64")
    assert (several_hosts.hardware.accelerator, several_hosts.hardware.process_count()) == ("v5p-64", 8)
    assert tunix_models.require_family(several_hosts.model.maxtext_name).model is tunix_models.Llama
    tasks = load_recipe(RECIPES / "lessons" / "qwen3-1.7b-tasks.yaml").tasks
    assert [task.source for task in tasks] == ["gsm8k", "math", "code"]


# --- controls, trained for two steps ----------------------------------------------------------------------------

SMALL = [
    *("training.steps=2", "training.prompts_per_step=4", "grpo.group_size=4", "training.validate_every=0"),
    *("problems.train=200", "problems.test=8", "evaluation.batch_size=16"),
]
TWO_TASKS = "problems=[{name: small, train: 100, test: 4}, {name: large, difficulty: hard, train: 100, test: 4}]"
SCHEDULE = "rollout.temperature={from: 0.9, to: 0.7, steps: 2}"
# Each trains for two steps: the row's control alone.
CONTROLS = {
    "adaptive-beta": ["grpo.beta=0.04", "grpo.target_kl=0.1"],
    "watched-kl": ["grpo.watch_kl=1"],
    "temperature-schedule": [SCHEDULE],
    "top-k-top-p": ["rollout.top_k=50", "rollout.top_p=0.9"],
    "profile-steps": ["training.profile_steps=[2, 2]"],
    "sizes-per-device": ["rollout.micro_batch_size_per_device=2", "training.micro_batch_size_per_device=8"],
    "lora": ["lora.rank=4", "training.learning_rate=3e-3"],
    "batch-128": ["training.optimizer=lion"],
    "several-tasks": [TWO_TASKS],
    "llama-values": ["grpo.beta=0.08", "grpo.iterations=2", "grpo.epsilon=0.2"],
    "llama-optimizer": ["training.schedule=cosine", "training.weight_decay=0.1", "training.warmup_steps=1"],
    "dapo-recipe": [
        *("grpo.epsilon_high=0.28", "grpo.aggregation=step", "grpo.dynamic_sampling=2"),
        *("grpo.overlong_buffer=8", "grpo.overlong_penalty=0.2"),
    ],
    "separate-sizes": ["rollout.micro_batch_size=2", "training.micro_batch_size=8"],
}
# Those that train together, in one run from conversion to export.
WITH_OTHERS = [
    *("adaptive-beta", "temperature-schedule", "top-k-top-p", "profile-steps", "batch-128", "dapo-recipe"),
    "several-tasks",
]
TOGETHER = [
    *SMALL,
    *("evaluation.samples=2", "evaluation.preset=standard"),
    *(override for name in WITH_OTHERS for override in CONTROLS[name]),
]


# Smoke tests and test_long_runs.py train with these, too.
TRAINED_OFTEN = ["llama-values", "separate-sizes", "lora"]


def alone(name: str) -> Any:
    """A control as a parameter: those that train with others, or elsewhere, train alone in make nightly."""
    often = name in [*WITH_OTHERS, *TRAINED_OFTEN]
    mark = pytest.mark.nightly if often else pytest.mark.long(minutes=2)
    return pytest.param(CONTROLS[name], id=name, marks=mark)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [alone(name) for name in CONTROLS])
def test_a_control_alone_trains(converted_base, tmp_path, overrides) -> None:
    recipe = load_recipe(TINY, [*SMALL, *overrides])
    session = training.build_session(checks.check(recipe), tmp_path, converted_base)
    rows = training.train(session)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["loss"] is not None and row["grad_norm"] is not None for row in rows)
    if recipe.grpo.beta or "grpo.watch_kl=1" in overrides:
        assert all(row["kl"] is not None for row in rows)


@pytest.fixture(scope="module")
def whole_run(converted_base, tmp_path_factory) -> SimpleNamespace:
    """Two steps with most controls at once, from the base to the export; what it logged, line by line."""
    directory = tmp_path_factory.mktemp("published") / "run"
    lines = []
    recipe = load_recipe(TINY, TOGETHER)
    run_directory.open_run(directory, recipe)
    run_directory.link_base(directory, converted_base)
    rows: list[dict[str, Any]] = []
    summary = pipeline.run(checks.check(recipe), directory, rows.append, lines.append, progress=False)
    log = "\n".join(lines)
    return SimpleNamespace(recipe=recipe, directory=directory, rows=rows, summary=summary, log=log)


@tries(*(row for row in CONTROLS if row not in {name for _, values in PUBLISHED for name in values}))
@pytest.mark.long
def test_the_controls_together_train(whole_run) -> None:
    rows = read_jsonl(whole_run.directory / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["kl"] is not None
        assert row["dynamic_sampling/passes"] >= 1
        assert {"tasks/small/accuracy", "tasks/large/accuracy"} <= set(row)


@tries("run-folder", "run-files", "completed")
@pytest.mark.long
def test_a_run_leaves_its_files_and_a_last_sentence(whole_run) -> None:
    files = {str(path.relative_to(whole_run.directory)) for path in whole_run.directory.rglob("*")}
    assert {"recipe.yaml", "metrics.jsonl", "tensorboard", "checkpoints", "summary.json", "export"} <= files
    assert (whole_run.directory / "checkpoints" / "actor").is_dir()
    assert "training completed: 2 of 2 steps" in whole_run.log


@tries("tensorboard-port")
@pytest.mark.long
def test_tensorboard_can_read_the_run(whole_run) -> None:
    assert list((whole_run.directory / "tensorboard").glob("events.out.tfevents*"))


@tries("step-seconds", "training-log")
@pytest.mark.long
def test_a_step_has_its_seconds_and_the_log_says_it(whole_run) -> None:
    [first, *_] = whole_run.rows
    assert {"seconds_rollout", "seconds_update", "seconds_sync", "seconds", "loss", "kl", "reward"} <= set(first)
    shown = step_line(first, whole_run.recipe)
    assert [name for name in ("reward", "loss", "kl", "rollout", "update", "seconds") if f"{name} " not in shown] == []
    assert " x cpu: " in whole_run.log  # the devices, and what each does
    assert "train" in whole_run.log


@tries("plan-in-log")
@pytest.mark.long
def test_the_plan_is_in_the_log_and_in_the_run(whole_run) -> None:
    for text in (whole_run.log, (whole_run.directory / "recipe.yaml").read_text(encoding="utf-8")):
        assert "accumulation steps" in text
        assert "micro batch size" in text


@tries("three-rates")
@pytest.mark.long
def test_three_rates_before_and_after(whole_run) -> None:
    for phase in ("before", "after"):
        assert {"accuracy", "partial_accuracy", "format_accuracy"} <= set(whole_run.summary[phase])
        [line] = [line for line in whole_run.log.splitlines() if line.startswith(f"{phase}: ")]
        assert "within 10 %" in line
        assert "format" in line


@tries("evaluate-presets")
@pytest.mark.long
def test_presets_and_their_keys(whole_run) -> None:
    assert {"sampled_accuracy", "pass_at_k"} <= set(whole_run.summary["after"])
    presets = {
        name: load_recipe(TINY, [f"evaluation.preset={name}"]).evaluation_sampling
        for name in ("greedy", "standard", "liberal")
    }
    assert presets["standard"] == {"temperature": 0.7, "top_k": 50, "top_p": 0.95}
    own = ["evaluation.temperature=0.6", "evaluation.top_k=20", "evaluation.top_p=0.8"]
    assert load_recipe(TINY, own).evaluation_sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.8}


@pytest.mark.long
def test_a_profile_is_recorded(whole_run) -> None:
    assert list(whole_run.directory.rglob("*.xplane.pb"))


def test_watching_the_kl_is_for_a_run_without_a_penalty() -> None:
    assert load_recipe(TINY, ["grpo.watch_kl=5"]).grpo.beta == 0


# --- rewards and prompts ----------------------------------------------------------------------------------------

RIGHT = "<reasoning>\n(16 - 3 - 4) * 2 = 18\n</reasoning>\n<answer>18</answer>"


def parts(completion: str, gold: str = "18") -> dict[str, float]:
    """Points by function of the reward that the published course uses."""
    return {
        function.__name__: function(None, [completion], [gold])[0]
        for function in (
            rewards.match_format_exactly,
            rewards.match_format_approximately,
            rewards.check_answer,
            rewards.check_numbers,
        )
    }


@tries("worked-example")
@pytest.mark.parametrize("completion", [RIGHT, f"\n{RIGHT}\n", f"{RIGHT}\n"])
def test_the_published_example_earns_nine_and_a_half(completion: str) -> None:
    assert sum(parts(completion).values()) == 9.5


@tries("reward-values")
def test_the_parts_pay_what_is_published() -> None:
    assert list(parts(RIGHT).values()) == [3.0, 2.0, 3.0, 1.5]
    assert parts(RIGHT.replace("</reasoning>\n<", "</reasoning> \n\n <"))["match_format_exactly"] == 1.5
    assert parts("18")["match_format_approximately"] == -2.0
    tagged = prompts.template_completion
    close = {answer: parts(tagged("so", answer), "100")["check_answer"] for answer in ("109", "119", "150")}
    assert close == {"109": 0.5, "119": 0.25, "150": -1.0}


@tries("prompt-tags")
def test_the_prompt_asks_for_both_tags() -> None:
    assert all(tag in prompts.SYSTEM_PROMPT for tag in ("<reasoning>", "</reasoning>", "<answer>", "</answer>"))


@tries("four-phases", "small-library", "before-after")
def test_the_library_has_its_parts() -> None:
    for function in (plain_grpo.sample, plain_grpo.group_advantages, plain_grpo.policy_loss, plain_grpo.update):
        assert callable(function)
    assert callable(evaluation.evaluate)
    assert callable(prompts.render)
    assert callable(rewards.get_rewards)
    assert statistics.pass_at_k(32, 1, 32) == 1
    summary = json.loads((ROOT / "assets" / "reference" / "course" / "summary.json").read_text(encoding="utf-8"))
    assert summary["before"]["accuracy"] < summary["after"]["accuracy"]


@tries("full-test-set")
@pytest.mark.gsm8k
def test_the_whole_test_split_is_evaluated(gsm8k_dir) -> None:
    recipe = load_recipe(JAX, [f"problems.path={gsm8k_dir}"])
    assert recipe.problems.test is None
    assert len(load_problems(recipe.problems, "test")) == 1319


# --- the model --------------------------------------------------------------------------------------------------


def misfits(package: str) -> list[str]:
    """Python files of an installed package that are not as they were published, by the hashes in its RECORD."""
    changed = []
    for file in importlib.metadata.files(package) or ():
        if file.suffix == ".py" and file.hash:
            digest = hashlib.sha256(Path(str(file.locate())).read_bytes()).digest()
            if urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
                changed.append(str(file))
    return changed


@tries("maxtext-untouched")
@pytest.mark.parametrize("package", ["maxtext", "google-tunix"])
def test_upstream_is_as_it_was_published(package: str) -> None:
    assert misfits(package) == []


@tries("model-config")
def test_sizes_come_from_config_json_and_a_contradiction_is_refused(grpo) -> None:
    done = grpo("config", TINY, "model.sizes.base_num_decoder_layers=63")
    assert done.returncode == 2
    assert "config.json" in done.stderr
    assert "base_num_decoder_layers=63" in done.stderr


@tries("llama-sizes")
def test_llama_has_the_published_sizes() -> None:
    maxtext = importlib.util.find_spec("maxtext")
    file = Path(str(maxtext.origin)).parent / "configs" / "models" / f"{load_recipe(LLAMA).model.maxtext_name}.yml"
    sizes = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert (sizes["base_num_decoder_layers"], sizes["base_emb_dim"], sizes["base_num_query_heads"]) == (32, 4096, 32)


@tries("convert", "output-folders")
def test_a_base_has_the_published_layout_and_folders_have_options(converted_base) -> None:
    assert converted_base.parts[-2:] == ("0", "items")
    assert converted_base.is_dir()
    assert {"--output", "--base", "--runs"} <= options_of_grpo()
    assert load_recipe(TINY, ["training.checkpoints=gs://bucket/run"]).training.checkpoints == "gs://bucket/run"


# --- around a run -----------------------------------------------------------------------------------------------


@tries("compare-runs")
def test_two_runs_are_compared(grpo) -> None:
    shipped = ROOT / "assets" / "reference"
    done = grpo("compare", shipped / "hacked", shipped / "repaired")
    assert done.returncode == 0
    assert "rewards" in done.stdout
    assert "McNemar" in done.stdout


@tries("wandb-names", "wandb-project")
def test_wandb_gets_the_published_names(monkeypatch, tmp_path) -> None:
    """wandb is not in this environment."""
    summary = {}
    begun = []

    def init(**arguments: Any) -> SimpleNamespace:
        begun.append(arguments)
        return SimpleNamespace(summary=summary, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    recipe = load_recipe(TINY, ["tracking.wandb=offline"])
    after = {"accuracy": 0.5, "n": 12, "reward": 0.5, "seconds": 3.0, "rewards": {"correct_answer": 0.5}}
    append_jsonl(tmp_path / "metrics.jsonl", {"step": 4, "seconds": 2.0})
    rows = {"before": tracking.evaluation_row(0, after), "after": tracking.evaluation_row(4, after)}
    tracking.log_evaluation(recipe.tracking, tmp_path, rows, {})
    published = {
        *("eval_full/accuracy", "eval/reward/total/mean", "eval/reward/func/correct_answer/mean"),
        *("time/train/step_avg_last10_s", "time/eval_full/step_s"),
    }
    assert published <= set(summary)
    assert (begun[0]["project"], begun[0]["name"]) == ("mine", tmp_path.name)


@tries("wandb-refused")
def test_wandb_that_cannot_start_is_one_line(monkeypatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else found(name))
    with pytest.raises(CourseError, match=r"tracking\.wandb=online needs wandb"):
        tracking.require(load_recipe(TINY, ["tracking.wandb=online"]).tracking)


def test_a_kl_above_a_tenth_is_an_alert() -> None:
    rows = [{"step": step, "kl": 0.17} for step in range(1, 6)]
    [alert] = health_checks.find_alerts(rows)
    assert "0.1" in alert.message
    assert "grpo.beta" in alert.message


@tries("spot-first")
def test_the_task_asks_for_spot_first_and_then_on_demand() -> None:
    task = yaml.safe_load((ROOT / "dev" / "tools" / "grpo.sky.yaml").read_text(encoding="utf-8"))
    assert [choice["use_spot"] for choice in task["resources"]["any_of"]] == [True, False]


def test_the_task_makes_its_bucket_where_the_chips_are_and_keeps_it() -> None:
    task = yaml.safe_load((ROOT / "dev" / "tools" / "grpo.sky.yaml").read_text(encoding="utf-8"))
    bucket = task["file_mounts"]["~/bucket"]
    # `source` asks for a bucket that exists; `store: gcs` makes it in us-central1 (SkyPilot 0.14.1, GcsStore).
    assert bucket == {"name": "${BUCKET}", "persistent": True, "mode": "MOUNT"}
    assert "BUCKET" in task["envs"]


@tries("tpu-environment", "eight-packages", "fast-download")
def test_the_packages_are_in_the_lock() -> None:
    lock = (ROOT / "requirements" / "tpu.lock").read_text(encoding="utf-8")
    packages = {
        *("jupyterlab", "maxtext", "google-tunix", "vllm-tpu", "tensorflow-datasets", "grain"),
        *("transformers", "tensorboard", "hf-xet"),
    }
    assert packages - set(re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE)) == set()


@tries("papers")
def test_the_published_papers_are_in_the_list() -> None:
    listed = (ROOT / "docs" / "bibliography.md").read_text(encoding="utf-8")
    # DeepSeekMath, DeepSeek-R1, PPO, InstructGPT, GSM8K, Constitutional AI, Learning to summarize, LoRA.
    papers = (
        *("2402.03300", "2501.12948", "1707.06347", "2203.02155", "2110.14168"),
        *("2212.08073", "2009.01325", "2106.09685"),
    )
    assert [paper for paper in papers if f"arXiv:{paper}" not in listed] == []


@tries("step-notebooks")
def test_the_notebooks_have_the_outputs_of_a_run() -> None:
    for path in [path for folder in ("", "further") for path in (ROOT / "notebooks" / folder).glob("0*.ipynb")]:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert any(cell.get("outputs") for cell in cells), path.name


# --- what was removed -------------------------------------------------------------------------------------------

# Recipe keys and command lines that the version before the last large change had, and this one had not.
GONE_KEYS = {
    *("grpo.target_kl", "grpo.watch_kl", "grpo.correction_cap", "evaluation.max_completion_length"),
    *("rollout.final_temperature", "rollout.temperature_stages", "rollout.top_k", "rollout.top_p"),
    *("rollout.micro_batch_size_per_device", "training.micro_batch_size_per_device"),
    *("training.prompts_per_step_per_device", "training.profile_steps", "tracking.project"),
    *("rollout.vllm.block_size", "rollout.vllm.kv_blocks", "rollout.vllm.max_sequences"),
}


@pytest.mark.parametrize("key", sorted(GONE_KEYS | set(REMOVED)))
def test_a_removed_key_is_back_or_its_error_says_what_to_do(grpo, key: str) -> None:
    if key not in REMOVED:
        assert key in KEYS
        return
    done = grpo("config", TINY, f"{key}=1")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert REMOVED[key] in done.stderr
    named = re.findall(r"\b[a-z]+\.[a-z_.]+\b", REMOVED[key])
    assert [name for name in named if name not in KEYS] == []  # what it sends the user to is there


@pytest.mark.parametrize("command_line", REMOVED_OPTIONS)
def test_a_removed_option_says_what_to_do(grpo, command_line: str) -> None:
    command, *options = command_line.split()
    done = grpo(command, "recipes/tiny-cpu.yaml", *options)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert REMOVED_OPTIONS[command_line] in done.stderr


def test_the_page_lists_what_was_removed() -> None:
    [table] = [table for table in tables(PAGE.read_text(encoding="utf-8")) if table[0][0] == "removed"]
    text = "\n".join(removed for removed, *_ in table[1:])
    assert {name for name in names_in(text) if not name.startswith("grpo ")} == GONE_KEYS
    assert [command_line for command_line in REMOVED_OPTIONS if f'"{command_line}"' not in text] == []
    for _, back, instead in table[1:]:
        assert back or instead
        assert [name for name in names_in(back) if name not in KEYS] == []


def test_required_metrics_are_in_the_glossary() -> None:
    assert [name for name in REQUIRED_METRICS if not is_metric(name)] == []
