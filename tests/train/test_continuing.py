"""A run that continues with other values: which may change, what is written down, what is kept."""

import json
import runpy
import warnings

import hypothesis.strategies as st
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_cli import assert_one_line_error
from test_compare_runs import answered
from test_compare_runs import make_run as make_run  # a fixture

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import append_jsonl
from grpo_train import pipeline, report, training
from grpo_train.cli.train import finished_summary
from grpo_train.recipes import continuing, load_recipe
from grpo_train.report import compare_runs
from grpo_train.runs import run_directory, tracking
from grpo_train.runs.run_directory import check_run, open_run, read_changes

ROOT = environment.repo_root()
TINY = ROOT / "recipes" / "tiny-cpu.yaml"


def tiny(*overrides):
    return load_recipe(TINY, overrides)


@pytest.fixture
def run(tmp_path):
    """A run of the tiny recipe of which 14 steps are done."""
    directory = open_run(tmp_path / "mine", tiny())
    for step in range(1, 15):
        append_jsonl(directory / "metrics.jsonl", {"step": step, "reward": 1.0})
    return directory


# --- which keys ---


def with_another_value(section, names):
    """A section of a recipe with another value at this place, whatever its type."""
    name, *inner = names
    value = getattr(section, name)
    if inner:
        other = with_another_value(value, inner)
    elif name == "problems":
        other = value.model_copy(update={"seed": 7})
    elif isinstance(value, dict):
        other = {"other": 1}
    elif isinstance(value, int | float) and not isinstance(value, bool):
        other = value + 1
    else:
        other = "other"
    return section.model_copy(update={name: other})


PLACES = {  # of a key's other value, where that is a section or a mapping
    "problems": "problems.seed",
    "model.sizes": "model.sizes.other",
    "rollout.vllm.options": "rollout.vllm.options.other",
}
DEPEND = {"training.steps", "grpo.beta"}  # on these:
CONDITIONS = {"training.schedule", "grpo.dynamic_sampling", "grpo.target_kl"}


@settings(max_examples=60)
@given(st.sets(st.sampled_from(continuing.known_keys()), min_size=1, max_size=5))
def test_every_key_is_in_the_table_or_refused(keys):
    if keys & CONDITIONS:
        keys = keys - DEPEND
    if "training.prompts_per_step_per_device" in keys:
        keys = {key for key in keys if not key.startswith("hardware.")}
    old = new = tiny("grpo.beta=0.02")
    for key in keys:
        new = with_another_value(new, key.split("."))
    with warnings.catch_warnings(action="ignore"):  # pydantic's, about values that no recipe could have
        refused = continuing.refused(old, new, done=14)
    may_change = set(continuing.RULES) - {"training.checkpoints"}  # which may not after 14 steps
    assert {line.split(": ")[0] for line in refused} == {PLACES.get(key, key) for key in keys - may_change}


def test_the_table_names_keys_of_the_schema_and_is_in_the_docs():
    options = {key for key in continuing.RULES if key.startswith("rollout.vllm.options.")}
    assert set(continuing.RULES) - options <= set(continuing.known_keys())
    pages = runpy.run_path(str(ROOT / "dev" / "tools" / "make_recipe_docs.py"))["pages"]()
    for page, text in pages.items():
        assert page.read_text(encoding="utf-8") == text, "run python dev/tools/make_recipe_docs.py"


PER_DEVICE = ["training.prompts_per_step=null", "training.prompts_per_step_per_device=8"]


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ([], ["grpo.group_size=16"], "grpo.group_size: 8 != 16"),
        ([], ["training.checkpoints=/elsewhere"], "in the old place"),
        ([], ["training.steps=13"], "14 steps are done"),
        (["training.schedule=cosine"], ["training.schedule=cosine", "training.steps=60"], "the rate of each step"),
        (["grpo.dynamic_sampling=2"], ["grpo.dynamic_sampling=2", "training.steps=60"], "spare prompts"),
        (
            ["rollout.temperature={from: 1, to: 0.7}"],
            ["rollout.temperature={from: 1, to: 0.7}", "training.steps=60"],
            "ends at",
        ),
        (
            ["rollout.temperature={from: 1, to: 0.7, steps: 9}"],
            ["rollout.temperature={from: 1, to: 0.7, steps: 9}", "training.steps=60"],
            None,
        ),
        ([], ["grpo.beta=0.1"], "no reference model"),
        (["grpo.beta=0.1"], ["grpo.beta=0.05"], "not lowered"),
        (["grpo.beta=0.1"], [], "not lowered"),
        (
            ["grpo.beta=0.1", "grpo.target_kl=0.05"],
            ["grpo.beta=0.2", "grpo.target_kl=0.05"],
            "the checkpoint has its value",
        ),
        ([], ["rollout.vllm.options={kv_cache_dtype: fp8}"], "kv_cache_dtype"),
        (["grpo.beta=0.1"], ["grpo.beta=0.2"], None),
        ([], ["training.steps=14"], None),
        (["grpo.dynamic_sampling=1"], ["grpo.dynamic_sampling=1", "training.steps=60"], None),
        ([], ["rollout.vllm.options={block_size: 32}", "hardware.accelerator=v6e-8"], None),
        ([*PER_DEVICE, "hardware.accelerator=v6e-4"], [*PER_DEVICE, "hardware.accelerator=v6e-8"], "64 prompts, and"),
        (
            [*PER_DEVICE, "hardware.accelerator=v6e-8"],
            [*PER_DEVICE, "hardware.accelerator=v5p-16", "training.micro_batch_size_per_device=8"],
            None,  # as many devices, of another kind
        ),
    ],
)
def test_a_change_is_refused_with_its_reason(before, after, reason):
    found = continuing.refused(tiny(*before), tiny(*after), done=14)
    assert [reason in line for line in found] == ([True] if reason else [])


def test_the_refusal_names_what_differs_and_the_command_of_a_new_run(run):
    changed = tiny("seed=1", "training.micro_batch_size=64")
    with pytest.raises(CourseError) as caught:
        check_run(run, changed)
    assert "seed: 0 != 1" in str(caught.value)
    assert "micro_batch_size" not in str(caught.value)
    assert "grpo train RECIPE … --run mine-2" in str(caught.value)
    (run.parent / "mine-2").mkdir()
    with pytest.raises(CourseError, match="--run mine-3"):
        check_run(run, changed)


# --- what is written down ---


def test_a_change_is_said_kept_and_made_once(run, monkeypatch):
    said = []
    changed = tiny("training.micro_batch_size=64", "tracking.wandb=offline")
    with monkeypatch.context() as patch:
        patch.setattr(run_directory, "_write_recipe", lambda *_: 1 / 0)  # killed before the recipe is replaced
        with pytest.raises(ZeroDivisionError):
            open_run(run, changed, log=said.append)
    assert run_directory.load_run(run)[1] == tiny()
    assert said == []
    open_run(run, changed, log=said.append)
    assert said == ['changed after step 0: training.micro_batch_size: null -> 64; tracking.wandb: "off" -> "offline"']
    assert run_directory.load_run(run)[1] == changed
    [row] = read_changes(run)
    assert row["step"] == 0  # there is no checkpoint yet
    assert row["changes"]["training.micro_batch_size"] == {"before": None, "after": 64}
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    open_run(run, changed, log=said.append)
    assert len(said) == 1
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files
    open_run(run, tiny(), log=said.append)  # and back
    assert "training.micro_batch_size: 64 -> null" in said[1]
    assert len(read_changes(run)) == 2


def test_the_step_is_that_of_the_checkpoint_from_which_it_goes_on(run):
    for update in (10, 15):  # 15 has no row yet: that step is taken again
        (run / "checkpoints" / "actor" / str(update)).mkdir(parents=True)
    open_run(run, tiny("evaluation.batch_size=20"))
    assert read_changes(run)[0]["step"] == 10


def test_a_longer_run_keeps_what_was_made_of_its_last_step(run):
    (run / "evals").mkdir()
    (run / "export").mkdir()
    (run / "export" / "config.json").write_text("{}")
    made = ("evals/after.jsonl", "evals/after.json", "summary.json", "report.html")
    of_50 = json.dumps({phase: {"accuracy": 0.5} for phase in ("before", "after")})
    for name in made:
        (run / name).write_text(of_50)
    assert finished_summary(run, tiny())
    assert not finished_summary(run, tiny("training.steps=60"))
    open_run(run, tiny("training.steps=60"))
    kept = ("evals/after-50.jsonl", "evals/after-50.json", "summary-50.json", "report-50.html")
    assert all((run / name).read_text() == of_50 for name in kept)
    assert (run / "export-50" / "config.json").is_file()
    assert not any((run / name).exists() for name in (*made, "export"))
    assert not finished_summary(run, tiny("training.steps=60"))

    open_run(run, tiny())  # nothing was trained meanwhile: it is the finished run again
    assert finished_summary(run, tiny())
    assert not any((run / name).exists() for name in kept)


def test_a_run_with_another_number_of_steps_is_not_the_finished_one(run):
    (run / "evals").mkdir()
    (run / "evals" / "after.jsonl").write_text("")
    assert run_directory.finished_run(run, tiny("evaluation.batch_size=20")) == run
    with pytest.raises(CourseError, match=r"another training\.steps"):
        run_directory.finished_run(run, tiny("training.steps=60"))


def test_a_run_without_a_step_may_get_a_bucket_for_its_checkpoints(tmp_path):
    """As whoever opened it in notebook 00 and reads in 01 that the disk is too small for them."""
    run = open_run(tmp_path / "new", tiny())
    in_a_bucket = tiny("training.checkpoints=gs://bucket/checkpoints")
    open_run(run, in_a_bucket)
    assert run_directory.load_run(run)[1] == in_a_bucket
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(CourseError, match="in the old place"):
        open_run(run, tiny())


def test_a_finished_run_is_read_wherever_it_kept_its_checkpoints(tmp_path):
    """A run of a VM, with its checkpoints in a bucket, is read at home by the recipe alone."""
    run = open_run(tmp_path / "fetched", tiny("training.checkpoints=gs://bucket/checkpoints"))
    (run / "metrics.jsonl").write_text('{"step": 50}\n')
    (run / "evals").mkdir()
    (run / "evals" / "after.jsonl").write_text("")
    for reads_it in (tiny(), tiny("training.checkpoints=/elsewhere")):
        assert run_directory.finished_run(run, reads_it) == run
    with pytest.raises(CourseError, match="seed: 0 != 1"):
        run_directory.finished_run(run, tiny("seed=1"))


def test_prompts_per_device_keep_their_number_of_devices(run):
    pipeline.require_same_step(tiny(*PER_DEVICE), run)  # it began here
    (run / "environment.json").write_text(json.dumps({"devices": ["tpu: TPU v6 lite"] * 8}))
    pipeline.require_same_step(tiny(), run)
    with pytest.raises(CourseError, match="began on 8 devices, and JAX finds 1 here"):
        pipeline.require_same_step(tiny(*PER_DEVICE), run)


def test_report_comparison_and_tensorboard_show_the_changes(make_run, tmp_path):
    a = make_run("a", [1.0] * 3, "grpo.beta=0.02", after=answered(range(20)))
    b = make_run("b", [1.0] * 3, "grpo.beta=0.02", after=answered(range(20)))
    (b / "checkpoints" / "actor" / "2").mkdir(parents=True)
    open_run(b, tiny("grpo.beta=0.05"))
    line = "after step 2: grpo.beta: 0.02 -> 0.05"
    assert line in report.write_report(b).read_text().replace("&gt;", ">")
    assert "Changed while it ran" not in report.write_report(a).read_text()
    compared = compare_runs.compare(a, b)
    assert compared.changes == ([], [line])
    assert f"B was changed while it ran:\n  {line}" in compare_runs.text(compared)

    for finished in (2, 3):  # logged by the start that goes on after step 2, and by no later one
        for tracker in tracking.start(tiny().tracking, b, finished, config={}):
            tracker.close()
    read = EventAccumulator(str(b / "tensorboard"))
    read.Reload()
    [event] = read.Tensors("changes/text_summary" if "changes/text_summary" in read.Tags()["tensors"] else "changes")
    assert event.step == 2
    assert event.tensor_proto.string_val[0].decode() == line
    append_jsonl(b / "changes.jsonl", {"step": 3})
    with pytest.raises(CourseError, match=r"changes\.jsonl: line 2"):
        compare_runs.compare(a, b)


# --- out of memory ---


def test_a_full_device_names_what_makes_it_fit(tmp_path):
    remedies = continuing.memory_remedies(tiny(), tiny().plan)
    assert remedies == [
        "training.micro_batch_size=64", "rollout.micro_batch_size=8", "loss.implementation=chunked", "model.remat=full"
    ]  # fmt: skip
    with (
        pytest.raises(CourseError, match=r"a step does not fit .*run the same command with training\.micro_batch"),
        training.explain_full_memory("a step", remedies),
    ):
        jnp.zeros(2**44).block_until_ready()
    with pytest.raises(ZeroDivisionError), training.explain_full_memory("a step", remedies):
        print(1 / 0)


PER_REPLICA = "training.micro_batch_size=null training.micro_batch_size_per_device={}"


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("tiny-cpu", ""),
        ("tiny-cpu", PER_REPLICA.format(64)),
        ("qwen3-1.7b-gsm8k-smoke", ""),
        ("qwen3-1.7b-gsm8k-smoke", PER_REPLICA.format(8)),
    ],
)
def test_the_same_run_goes_on_with_what_is_advised(name, given):
    path = TINY.with_name(f"{name}.yaml")
    given = given.split()
    recipe = load_recipe(path, given)
    remedies = continuing.memory_remedies(recipe, recipe.plan)
    assert any(remedy.startswith("training.micro_batch_size") for remedy in remedies)
    for remedy in remedies:
        smaller = load_recipe(path, [*given, remedy])
        assert continuing.refused(recipe, smaller, done=1) == []
        assert smaller != recipe


# --- grpo export: what it refuses ---


def test_export_says_what_is_missing(grpo, run, tmp_path):
    command = ["export", "mine", "--runs", tmp_path]
    assert_one_line_error(grpo("export", "nothing", "--runs", tmp_path), "nothing", "not a run")
    assert_one_line_error(grpo(*command), "no checkpoint yet", "training.checkpoint_every")
    for update in (10, 14):
        (run / "checkpoints" / "actor" / str(update)).mkdir(parents=True)
    assert_one_line_error(grpo(*command, "--step", "12"), "no checkpoint of step 12", "step 10, 14")
    assert_one_line_error(grpo(*command, "--step", "0"), "--step")
    done = grpo(*command)  # the folders are empty
    assert done.returncode == 2
    assert "step 14 cannot be read" in done.stderr
    assert "step 10 cannot" in done.stderr
    assert_one_line_error(grpo(*command, "--output", "gs://bucket/export"), "gs:", "bucket")


def test_export_replaces_nothing_but_an_export(grpo, run, tmp_path):
    (run / "checkpoints" / "actor" / "10").mkdir(parents=True)
    command = ["export", "mine", "--runs", tmp_path, "--output", tmp_path / "home"]
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "notes.txt").write_text("mine")
    assert_one_line_error(grpo(*command), "exists", "--overwrite")
    assert_one_line_error(grpo(*command, "--overwrite"), "not an export")
    model = ROOT / "assets" / "tiny-base"
    assert_one_line_error(grpo("export", "mine", "--runs", tmp_path, "--output", model, "--overwrite"), "not an export")
    assert (tmp_path / "home" / "notes.txt").read_text() == "mine"
    assert (model / "model.safetensors").is_file()
