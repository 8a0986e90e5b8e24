"""The batch plan: known answers, plans that multiply out, and refusals whose remedy holds."""

import itertools
import json
import math
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from grpo_lib import cli, preflight
from grpo_lib.batch_plan import BatchPlan, divisors, listed, make_plan, micro_batch_sizes
from grpo_lib.errors import CourseError
from grpo_lib.recipes import dump_recipe, load_recipe, parse_recipe, plan_table

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "recipes" / "tiny-cpu.yaml"
TWO_HOSTS = ROOT / "recipes" / "qwen2.5-7b-gsm8k-2hosts.yaml"

# Recipe key -> argument of make_plan.
ARGUMENTS = {
    "hardware.processes": "processes",
    "training.prompts_per_step": "prompts_per_step",
    "training.prompts_per_process": "prompts_per_process",
    "training.prompts_per_device": "prompts_per_device",
    "rollout.prompts_per_pass": "rollout_prompts_per_pass",
    "rollout.prompts_per_device": "rollout_prompts_per_device",
    "training.micro_batch_size": "micro_batch_size",
    "training.micro_batch_per_device": "micro_batch_per_device",
}
KEY = r"[a-z]+\.[a-z_]+"
# key=value …: use [another key=]values[ in its place][, and leave out keys]
REMEDY = re.compile(
    rf"^({KEY})=\d+ [^;]*: use (?:({KEY})=)?(\d+(?:, \d+)*(?: or \d+)?)"
    rf"(?: in its place|, and leave out ({KEY}(?: and {KEY})*))?$"
)


# --- known answers --------------------------------------------------------------------------------------------


def test_two_processes_on_eight_devices():
    plan = make_plan(
        group_size=2, processes=2, devices=8, trainer_shards=8, sampler_shards=8,
        prompts_per_step=16, rollout_prompts_per_device=1, micro_batch_per_device=1, tokens_per_sequence=1000,
    )  # fmt: skip
    assert (plan.rollout_batch, plan.passes) == (4, 2)
    assert (plan.micro_batch_per_device, plan.local_micro_batch, plan.accumulation_steps) == (1, 4, 4)
    assert (plan.prompts_per_process, plan.local_batch, plan.completions_per_step) == (8, 16, 32)
    assert (plan.micro_batch_size, plan.micro_batch_prompts, plan.prompts_per_pass) == (8, 4, 8)
    assert plan.tokens_per_step == 32_000


def test_every_way_of_saying_it_gives_the_same_plan():
    machine = {"group_size": 4, "processes": 2, "devices": 8, "trainer_shards": 4, "sampler_shards": 2}
    plans = {
        make_plan(**machine, **step, **rollout, **micro)
        for step in ({"prompts_per_step": 16}, {"prompts_per_process": 8}, {"prompts_per_device": 4}, {})
        for rollout in ({"rollout_prompts_per_pass": 4}, {"rollout_prompts_per_device": 2})
        for micro in ({"micro_batch_size": 8}, {"micro_batch_per_device": 2})
    }
    assert len(plans) == 1
    plan = plans.pop()
    assert (plan.passes, plan.accumulation_steps) == (4, 8)


def test_where_little_is_said_a_step_is_one_pass_and_one_gradient():
    plan = make_plan(group_size=8)
    assert (plan.prompts_per_step, plan.passes, plan.accumulation_steps) == (16, 1, 1)
    assert plan.rollout_batch == 16 and plan.micro_batch_size == plan.local_batch == 128
    assert plan.tokens_per_step is None


def test_a_recipe_for_two_hosts_takes_them_from_its_slice():
    plan = load_recipe(TWO_HOSTS).plan
    assert (plan.processes, plan.trainer_shards, plan.sampler_shards) == (2, 8, 2)  # sampler_tensor: 4
    assert (plan.prompts_per_step, plan.prompts_per_process, plan.rollout_batch, plan.passes) == (16, 8, 8, 1)
    assert (plan.micro_batch_size, plan.local_micro_batch, plan.accumulation_steps) == (8, 4, 16)
    assert plan.tokens_per_step == 16 * 8 * (256 + 768)


def test_a_device_that_shares_a_model_has_no_batch_of_its_own():
    plan = load_recipe(
        TWO_HOSTS, ["hardware.trainer_tensor=2", "hardware.sampler_tensor=8", "training.micro_batch_per_device=2"]
    ).plan
    assert (plan.trainer_shards, plan.sampler_shards, plan.micro_batch_size) == (4, 1, 8)


def test_tunix_own_sampler_keeps_a_model_on_each_device():
    changes = ["hardware.trainer_devices=4", "rollout.prompts_per_device=2"]
    assert load_recipe(TINY, changes).plan.passes == 2
    assert load_recipe(TINY, [*changes, "rollout.engine=vllm"]).plan.passes == 8  # one replica over the four


# --- wild sizes -----------------------------------------------------------------------------------------------

SMALL = st.integers(1, 12)
SIZE = st.none() | st.integers(1, 80)


@st.composite
def one_of(draw, *names):
    """At most one of the alternatives; what is left out is not passed on."""
    value, name = draw(SIZE), draw(st.sampled_from(names))
    return {} if value is None else {name: value}


@st.composite
def arguments(draw):
    processes = draw(st.sampled_from([1, 1, 2, 3, 4, 8]))
    return (
        {
            "processes": processes,
            "devices": draw(st.none() | st.just(8 * processes) | SMALL),
            "trainer_shards": draw(SMALL),
            "sampler_shards": draw(SMALL),
            "group_size": draw(st.integers(2, 9)),
            "updates_per_step": draw(st.integers(1, 3)),
            "tokens_per_sequence": draw(st.none() | st.integers(2, 5000)),
        }
        | draw(one_of("prompts_per_step", "prompts_per_process", "prompts_per_device"))
        | draw(one_of("rollout_prompts_per_pass", "rollout_prompts_per_device"))
        | draw(one_of("micro_batch_size", "micro_batch_per_device"))
    )


def planned(said: dict) -> BatchPlan | str:
    try:
        return make_plan(**said)
    except ValueError as error:
        return str(error)


def multiplies_out(plan: BatchPlan, said: dict) -> None:
    assert plan.passes * plan.rollout_batch * plan.processes == plan.prompts_per_step
    assert plan.prompts_per_process * plan.processes == plan.prompts_per_step
    assert plan.prompts_per_step * plan.group_size == plan.completions_per_step == plan.local_batch * plan.processes
    assert plan.accumulation_steps * plan.micro_batch_size == plan.completions_per_step
    assert plan.accumulation_steps * plan.local_micro_batch == plan.local_batch
    assert plan.micro_batch_per_device * plan.trainer_shards == plan.micro_batch_size
    assert plan.local_micro_batch * plan.processes == plan.micro_batch_size
    assert plan.micro_batch_prompts * plan.group_size == plan.micro_batch_size  # whole groups
    assert plan.micro_batch_size in micro_batch_sizes(plan)
    length = said.get("tokens_per_sequence")
    assert plan.tokens_per_step == (length and length * plan.completions_per_step)
    # What was given is in it.
    shares = {"prompts_per_device": plan.prompts_per_step / plan.trainer_shards}
    shares |= {"rollout_prompts_per_device": plan.prompts_per_pass / plan.sampler_shards}
    shares |= {"rollout_prompts_per_pass": plan.prompts_per_pass}
    for name in said.keys() - {"devices", "tokens_per_sequence"}:
        assert said[name] == (shares[name] if name in shares else getattr(plan, name)), name


@given(arguments())
def test_a_plan_multiplies_out_or_is_refused_with_a_remedy_that_holds(said):
    plan = planned(said)
    if isinstance(plan, BatchPlan):
        multiplies_out(plan, said)
        return
    problems = [REMEDY.match(sentence) for sentence in plan.split("; ")]
    assert all(problems), plan
    if plan.startswith("hardware.processes="):  # first the machine: what else is wrong comes next
        for value in numbers(problems[0][3]):
            other = planned(said | {"processes": value})
            assert isinstance(other, BatchPlan) or not other.startswith("hardware.processes=")
        return
    for values in itertools.product(*(numbers(problem[3]) for problem in problems)):
        mended = dict(said)
        for problem, value in zip(problems, values, strict=True):
            blamed, instead, left_out = ARGUMENTS[problem[1]], problem[2], problem[4]
            if instead:
                mended.pop(blamed)
            mended[ARGUMENTS[instead] if instead else blamed] = value
            for key in left_out.split(" and ") if left_out else ():
                mended.pop(ARGUMENTS[key])
        assert isinstance(planned(mended), BatchPlan), (plan, mended)


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


@given(st.integers(1, 10**30), st.integers(1, 10**30), st.integers(2, 10**9))
def test_absurd_numbers_are_answered_at_once(prompts, micro, group):
    plan = planned({"group_size": group, "prompts_per_step": prompts, "micro_batch_size": micro})
    assert isinstance(plan, BatchPlan) or REMEDY.match(plan)


@given(st.integers(1, 100_000))
def test_divisors(number):
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


def test_values_are_listed_as_one_says_them():
    assert [listed([3]), listed([1, 2]), listed([1, 2, 4])] == ["3", "1 or 2", "1, 2 or 4"]


@given(arguments())
def test_the_sizes_that_a_micro_batch_may_have_are_all_of_them(said):
    for name in ("micro_batch_size", "micro_batch_per_device"):
        said.pop(name, None)
    plan = planned(said)
    if isinstance(plan, BatchPlan):
        unit = math.lcm(plan.group_size, plan.trainer_shards, plan.processes)
        tried = range(unit, min(plan.completions_per_step, 500) + 1)
        good = [size for size in tried if isinstance(planned(said | {"micro_batch_size": size}), BatchPlan)]
        assert good == [size for size in micro_batch_sizes(plan) if size in tried]


# --- impossible plans, as a person meets them -----------------------------------------------------------------

EIGHT = "hardware.accelerator=v6e-8"
TWO = "hardware.accelerator=v4-16"
NO_STEP = "training.prompts_per_step=null"
IMPOSSIBLE = [
    # One process.
    (["training.micro_batch_size=6", "training.prompts_per_step=8", "grpo.group_size=2"],
     "training.micro_batch_size=6 must divide local_batch=16: use 2, 4, 8 or 16"),
    (["training.micro_batch_size=4"],
     "training.micro_batch_size=4 must hold whole groups of grpo.group_size=8: use 8, 16, 32, 64 or 128"),
    (["training.micro_batch_size=256"], "must divide local_batch=128: use 8, 16, 32, 64 or 128"),
    (["rollout.prompts_per_pass=5"],
     "rollout.prompts_per_pass=5 must divide prompts_per_step=16: use 1, 2, 4, 8 or 16"),
    (["rollout.prompts_per_pass=32"], "must divide prompts_per_step=16: use 1, 2, 4, 8 or 16"),
    (["rollout.prompts_per_pass=5", "training.micro_batch_size=6"],
     "use 1, 2, 4, 8 or 16; training.micro_batch_size=6 must divide local_batch=128: use 8, 16"),
    # Eight devices.
    ([EIGHT, "grpo.group_size=3", "training.micro_batch_size=16"],
     "training.micro_batch_size=16 must hold whole groups of grpo.group_size=3: use 24 or 48"),
    ([EIGHT, "training.prompts_per_step=14", "grpo.group_size=2"],
     "training.prompts_per_step=14 makes 28 completions a step"),
    ([EIGHT, "training.prompts_per_step=3", "grpo.group_size=2"],
     "makes 6 completions a step, which do not spread evenly over 8 trainer shares (devices / trainer_tensor): use 4"),
    ([EIGHT, "grpo.group_size=2", "training.micro_batch_size=4"],
     "training.micro_batch_size=4 must spread evenly over 8 trainer shares (devices / trainer_tensor): use 8, 16 or"),
    ([EIGHT, "training.micro_batch_per_device=3"],
     "training.micro_batch_per_device=3 on 8 trainer shares (devices / trainer_tensor) is 24 completions, which must "
     "divide local_batch=128: use 1, 2, 4, 8 or 16"),
    (["hardware.trainer_devices=2", "training.micro_batch_per_device=2"],
     "is 4 completions, which must hold whole groups of grpo.group_size=8: use 4, 8, 16, 32 or 64"),
    ([EIGHT, "rollout.prompts_per_device=3"],
     "on 8 sampler shares (devices / sampler_tensor) is 24 prompts a pass, which must divide prompts_per_step=16: "
     "use 1 or 2"),
    ([EIGHT, "training.prompts_per_step=9", "rollout.prompts_per_device=1"],
     "use rollout.prompts_per_pass=1, 3 or 9 in its place"),
    ([EIGHT, "hardware.processes=3"], "hardware.processes=3 must divide the 8 devices: use 1, 2, 4 or 8"),
    (["hardware.trainer_devices=6", "hardware.trainer_tensor=4"], "trainer_tensor=4 must divide its 6 devices"),
    # Several processes.
    ([TWO, "training.prompts_per_step=7"],
     "training.prompts_per_step=7 must be a multiple of the 2 processes: use 6 or 8"),
    ([TWO, "training.prompts_per_step=1"], "must be a multiple of the 2 processes: use 2"),
    ([TWO, "rollout.prompts_per_pass=3"],
     "rollout.prompts_per_pass=3 must be a multiple of the 2 processes: use 2, 4, 8 or 16"),
    ([TWO, "rollout.prompts_per_pass=6"],
     "rollout.prompts_per_pass=6 must divide the step's 2 processes x prompts_per_process=8: use 2, 4, 8 or 16"),
    ([TWO, "training.micro_batch_size=48"],
     "training.micro_batch_size=48 must divide the step's 2 processes x local_batch=64: use 8, 16, 32, 64 or 128"),
    (["hardware.processes=3", "training.prompts_per_step=4"],
     "training.prompts_per_step=4 must be a multiple of the 3 processes: use 3 or 6"),
    ([TWO, NO_STEP, "training.prompts_per_process=2", "grpo.group_size=2", "training.micro_batch_size=3"],
     "training.micro_batch_size=3 must divide the step's 2 processes x local_batch=4: use 8"),
    ([TWO, "training.prompts_per_step=7", "training.micro_batch_size=12"],
     "use 6 or 8, and leave out training.micro_batch_size"),
    # Said twice, or not a size.
    (["training.prompts_per_process=4"],
     "training.prompts_per_step=16 and training.prompts_per_process=4 are spellings of one size: give one, and null"),
    ([EIGHT, "training.micro_batch_size=8", "training.micro_batch_per_device=1"], "give one, and null for the other"),
    (["rollout.prompts_per_pass=8", "rollout.prompts_per_device=1"],
     "rollout.prompts_per_pass=8 and rollout.prompts_per_device=1 are spellings of one size: give one"),
    (["training.prompts_per_step=0"], "training.prompts_per_step=0: Input should be greater than or equal to 1"),
    (["training.micro_batch_size=-8"], "training.micro_batch_size=-8: Input should be greater than or equal to 1"),
    (["rollout.prompts_per_pass=half"], "rollout.prompts_per_pass='half': Input should be a valid integer"),
    (["hardware.processes=0"], "hardware.processes=0: Input should be greater than or equal to 1"),
    # The key of before.
    (["training.micro_batch=4"], "use training.micro_batch_size=32 (4 prompts x grpo.group_size=8)"),
    (["training.micro_batch=4", "grpo.group_size=2"],
     "use training.micro_batch_size=8 (4 prompts x grpo.group_size=2)"),
    (["training.micro_batch=few"], "use training.micro_batch_size, prompts x grpo.group_size"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"), IMPOSSIBLE, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_an_impossible_plan_is_refused_in_one_line_with_the_remedy(changes, words):
    with pytest.raises(CourseError) as caught:
        load_recipe(TINY, changes)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{TINY}: ")


def test_the_key_of_before_is_read_where_it_said_nothing():
    """A run's recipe.yaml spells every field, so the null stands in those of earlier runs."""
    assert load_recipe(TINY, ["training.micro_batch=null"]) == load_recipe(TINY)


# --- the recipe -----------------------------------------------------------------------------------------------


def test_however_a_recipe_says_its_step_it_is_the_same_and_comes_back_from_yaml():
    ways = [[], [NO_STEP, "training.prompts_per_process=8"], [NO_STEP, "training.prompts_per_device=2"]]
    recipes = [load_recipe(TINY, [TWO, *way]) for way in ways]
    assert {recipe.prompts_per_step for recipe in recipes} == {16}
    assert {recipe.completions_per_step for recipe in recipes} == {128}
    for recipe in recipes:
        assert parse_recipe(yaml.safe_load(dump_recipe(recipe))) == recipe


def test_the_saved_preflight_holds_however_a_recipe_says_its_step():
    shipped = load_recipe(TWO_HOSTS)
    together = ["training.prompts_per_process=null", "training.prompts_per_step=16", "training.micro_batch_size=8"]
    same = load_recipe(TWO_HOSTS, [*together, "training.micro_batch_per_device=null", "hardware.processes=2"])
    assert preflight.saved_result(same) == preflight.saved_result(shipped)
    for other in (
        ["rollout.prompts_per_pass=4"],
        ["training.micro_batch_per_device=2"],
        ["training.prompts_per_process=4"],
    ):
        with pytest.raises(CourseError, match="has changed since"):
            preflight.saved_result(load_recipe(TWO_HOSTS, other))


def test_sizes_by_the_device_wait_for_the_devices():
    open_recipe = load_recipe(TINY, [NO_STEP, "training.prompts_per_device=4"])
    with pytest.raises(CourseError, match=r"training\.prompts_per_device=4 needs the devices: add hardware\."):
        _ = open_recipe.prompts_per_step
    assert open_recipe.plan_on(devices=2).prompts_per_step == 8
    assert plan_table(open_recipe) == [
        "batch plan: training.prompts_per_device=4 needs the devices: add hardware.trainer_devices or an accelerator"
    ]


def test_the_plan_on_what_is_found():
    recipe = load_recipe(TINY)
    assert recipe.plan.processes == recipe.plan.trainer_shards == 1
    found = recipe.plan_on(devices=8, processes=2)
    assert (found.processes, found.trainer_shards, found.prompts_per_process) == (2, 8, 8)
    with pytest.raises(CourseError, match=r"training\.prompts_per_step=16 must be a multiple of the 3 processes"):
        recipe.plan_on(devices=3, processes=3)
    with pytest.raises(CourseError, match=r"hardware\.processes=2 and there are 1 here"):
        load_recipe(TINY, ["hardware.processes=2"]).plan_on(devices=8)
    with pytest.raises(CourseError, match=r"hardware\.trainer_tensor=3 must divide its 8 devices: use 1, 2, 4 or 8"):
        load_recipe(TINY, ["hardware.trainer_tensor=3"]).plan_on(devices=8)


# --- the command ----------------------------------------------------------------------------------------------


def config(*arguments: str) -> str:
    done = CliRunner().invoke(cli.app, ["config", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_config_shows_given_and_derived_side_by_side():
    printed = config(str(TWO_HOSTS))
    lines = {line[2:25].strip(): line[25:] for line in printed.splitlines() if line.startswith("# ")}
    given, derived = lines["batch plan"].index("given"), lines["batch plan"].index("derived")
    columns = {name: (line[: given + 5].strip(), line[given + 5 : derived + 7].strip()) for name, line in lines.items()}
    for name, expected in {
        "processes": ("", "2"), "trainer shards": ("", "8"), "sampler shards": ("", "2"), "group size": ("8", ""),
        "prompts per step": ("", "16"), "prompts per process": ("8", ""), "rollout batch": ("", "8"),
        "passes": ("", "1"), "completions per step": ("", "128"), "local batch": ("", "64"),
        "micro batch size": ("", "8"), "local micro batch": ("", "4"), "micro batch per device": ("1", ""),
        "accumulation steps": ("", "16"), "updates per step": ("1", ""), "tokens per step": ("", "131,072"),
    }.items():  # fmt: skip
        assert columns[name] == expected, name
    # The plan is in comments: what is printed is still the recipe.
    assert parse_recipe(yaml.safe_load(printed)) == load_recipe(TWO_HOSTS)


def test_the_json_of_config_is_the_recipe_and_the_plan_comes_when_asked_for():
    assert parse_recipe(json.loads(config(str(TWO_HOSTS), "--json"))) == load_recipe(TWO_HOSTS)
    plan = json.loads(config(str(TWO_HOSTS), "--as", "plan", "--json"))
    assert plan["given"]["training.prompts_per_process"] == 8 and plan["derived"]["accumulation_steps"] == 16
    assert config(str(TWO_HOSTS), "--as", "plan").splitlines() == plan_table(load_recipe(TWO_HOSTS))


def test_config_says_on_how_many_devices_it_counted():
    assert "counted on one device" in config(str(TINY)) and "counted on one" not in config(str(TWO_HOSTS))
    assert "needs the devices" in config(str(TINY), "rollout.prompts_per_device=4")
