"""The batch plan: known answers, and refusals whose proposed values are accepted."""

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from grpo_lib.common.errors import CourseError
from grpo_train.recipes import dump_recipe, load_recipe, parse_recipe, plan_table
from grpo_train.recipes.batch_plan import BatchPlan, make_plan, micro_batch_sizes

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "recipes" / "tiny-cpu.yaml"
TWO_HOSTS = ROOT / "recipes" / "published" / "qwen2.5-7b-gsm8k-2hosts.yaml"
PROMPTS, ROLLOUT, MICRO = "training.prompts_per_step", "rollout.micro_batch_size", "training.micro_batch_size"
EACH = "_per_device"
REPLICAS = {PROMPTS: "trainer_replicas", ROLLOUT: "sampler_replicas", MICRO: "trainer_replicas"}  # of a size per device

EIGHT_DEVICES = make_plan(
    {PROMPTS: 16, ROLLOUT: 8, MICRO: 8},
    group_size=2, processes=2, devices=8, trainer_replicas=8, sampler_replicas=8, longest=(232, 768),
)  # fmt: skip
DEFAULTS = make_plan({}, group_size=8)
SHIPPED = load_recipe(TWO_HOSTS).plan
PUBLISHED_SIZES = [
    "grpo.group_size=2",
    "hardware.sampler_tensor=1",
    f"{ROLLOUT}=null",
    f"{ROLLOUT}{EACH}=1",
    f"{MICRO}=null",
    f"{MICRO}{EACH}=1",
]
PER_DEVICE = load_recipe(TWO_HOSTS, PUBLISHED_SIZES).plan
SEVERAL_CHIPS = load_recipe(TWO_HOSTS, ["hardware.trainer_tensor=2", "hardware.sampler_tensor=8", f"{MICRO}=8"]).plan
FOUR_WITH_TUNIX = load_recipe(TINY, ["hardware.trainer_devices=4"]).plan
FOUR_WITH_VLLM = load_recipe(TINY, ["hardware.trainer_devices=4", "rollout.engine=vllm"]).plan
KNOWN = {
    "two processes on eight devices": (
        EIGHT_DEVICES,
        {"num_rollout_micro_batches": 2, "accumulation_steps": 4, "completions_per_step": 32,
         "micro_batch_size_per_device": 1, "micro_batch_prompts": 4, "tokens_per_step": 32_000},
    ),
    "by default a step is one rollout and one gradient": (
        DEFAULTS,
        {"prompts_per_step": 16, "num_rollout_micro_batches": 1, "accumulation_steps": 1,
         "rollout_micro_batch_size": 16, "micro_batch_size": 128, "tokens_per_step": None},
    ),
    "hosts and replicas are those of the slice": (
        SHIPPED,
        {"processes": 2, "trainer_replicas": 8, "sampler_replicas": 2,  # sampler_tensor: 4
         "prompts_per_step": 16, "rollout_micro_batch_size": 8, "num_rollout_micro_batches": 2,
         "micro_batch_prompts": 4, "accumulation_steps": 4},  # as in the published run
    ),
    "the published sizes per device: passes_per_step=2, grad_accum_steps=4": (
        PER_DEVICE,
        {"processes": 2, "prompts_per_step": 16, "rollout_micro_batch_size": 8, "num_rollout_micro_batches": 2,
         "micro_batch_size": 8, "accumulation_steps": 4},
    ),
    "of several chips": (
        SEVERAL_CHIPS,
        {"trainer_replicas": 4, "sampler_replicas": 1, "micro_batch_size_per_device": 2},
    ),
    "Tunix's own sampler keeps a model on each device": (FOUR_WITH_TUNIX, {"sampler_replicas": 4}),
    "vLLM does not": (FOUR_WITH_VLLM, {"sampler_replicas": 1}),
}  # fmt: skip


@pytest.mark.parametrize(("plan", "wanted"), KNOWN.values(), ids=KNOWN)
def test_known_plans(plan, wanted):
    assert {name: getattr(plan, name) for name in wanted} == wanted


# A refused size, and what is proposed: other values of it, or another key's.
REMEDY = re.compile(
    r"^([a-z]+\.[a-z_]+)=\d+ [^;]*: use (?:([a-z]+\.[a-z_]+)=)?(\d+(?:, \d+)*(?: or \d+)?)(?: instead)?$"
)


@st.composite
def arguments(draw):
    """A machine and some of the three sizes, of all devices or per device."""
    sizes = {}
    for key in (PROMPTS, ROLLOUT, MICRO):
        value = draw(st.none() | st.integers(1, 80))
        if value:
            sizes[key + draw(st.sampled_from(("", EACH)))] = value
    machine = {name: draw(st.integers(1, 12)) for name in ("processes", "trainer_replicas", "sampler_replicas")}
    return sizes, machine | {"group_size": draw(st.integers(2, 12)), "devices": draw(st.none() | st.integers(1, 64))}


def planned(sizes: dict, machine: dict) -> BatchPlan | str:
    try:
        return make_plan(sizes, **machine)
    except ValueError as error:
        return str(error)


def check(plan: BatchPlan, sizes: dict, machine: dict) -> None:
    """The sizes multiply out, and are those that were given."""
    assert plan.num_rollout_micro_batches * plan.rollout_micro_batch_size == plan.prompts_per_step
    assert plan.rollout_micro_batch_size % plan.processes == 0
    assert plan.micro_batch_size % plan.processes == 0
    assert plan.prompts_per_step * plan.group_size == plan.completions_per_step
    assert plan.accumulation_steps * plan.micro_batch_size == plan.completions_per_step
    assert plan.micro_batch_size_per_device * plan.trainer_replicas == plan.micro_batch_size
    assert plan.micro_batch_prompts * plan.group_size == plan.micro_batch_size in micro_batch_sizes(plan)
    have = {PROMPTS: plan.prompts_per_step, ROLLOUT: plan.rollout_micro_batch_size, MICRO: plan.micro_batch_size}
    for key, size in have.items():
        assert sizes.get(key, size) == size
        per_device = sizes.get(key + EACH)
        if per_device:
            assert per_device * machine[REPLICAS[key]] == size


@given(arguments())
def test_a_plan_multiplies_out_and_every_proposed_value_is_accepted(case):
    sizes, machine = case
    plan = planned(sizes, machine)
    if isinstance(plan, BatchPlan):
        return check(plan, sizes, machine)
    for problem in plan.split("; "):
        refused, other, values = REMEDY.match(problem).groups()
        key = other or refused
        for value in map(int, re.findall(r"\d+", values)):
            if key == "hardware.processes":
                changed = planned(sizes, machine | {"processes": value})
            else:
                changed = planned({k: v for k, v in sizes.items() if k != refused} | {key: value}, machine)
            # What is left to refuse is another size.
            assert isinstance(changed, BatchPlan) or not re.search(rf"\b{key}=\d+ ", changed)


@given(st.integers(1, 10**30), st.integers(1, 10**30), st.integers(2, 10**9))
def test_absurd_numbers_are_answered_at_once(prompts, micro, group):
    plan = planned({PROMPTS: prompts, MICRO: micro}, {"group_size": group})
    assert isinstance(plan, BatchPlan) or REMEDY.match(plan)


@given(arguments())
def test_micro_batch_sizes_lists_all_that_are_accepted(case):
    sizes, machine = case
    sizes = {key: value for key, value in sizes.items() if not key.startswith(MICRO)}
    plan = planned(sizes, machine)
    if isinstance(plan, BatchPlan):
        tried = range(1, min(plan.completions_per_step, 200) + 1)
        good = [size for size in tried if isinstance(planned(sizes | {MICRO: size}, machine), BatchPlan)]
        assert good == [size for size in micro_batch_sizes(plan) if size in tried]


EIGHT, TWO = "hardware.accelerator=v6e-8", "hardware.accelerator=v4-16"


@pytest.mark.parametrize(("changes", "words"), [
    ([f"{MICRO}=6", f"{PROMPTS}=8", "grpo.group_size=2"], "training.micro_batch_size=6 must divide the 16 completions "
     "of a step and be a multiple of 2 (grpo.group_size=2): use 2, 4, 8 or 16"),
    ([f"{ROLLOUT}=5"], "rollout.micro_batch_size=5 must divide the 16 prompts of a step: use 1, 2, 4, 8 or 16"),
    ([f"{ROLLOUT}=5", f"{MICRO}=6"], "use 1, 2, 4, 8 or 16; training.micro_batch_size=6 must divide the 128"),
    ([EIGHT, "grpo.group_size=3", f"{MICRO}=16"], "of 24 (8 trainer replicas, grpo.group_size=3): use 24 or 48"),
    ([EIGHT, f"{PROMPTS}=3", "grpo.group_size=2"],
     "training.prompts_per_step=3 must be a multiple of 4 (8 trainer replicas, grpo.group_size=2): use 4"),
    ([EIGHT, "hardware.processes=3"], "hardware.processes=3 must divide the 8 devices: use 1, 2, 4 or 8"),
    (["hardware.trainer_devices=6", "hardware.trainer_tensor=4"], "trainer_tensor=4 must divide its 6 devices"),
    ([TWO, f"{PROMPTS}=7"], "training.prompts_per_step=7 must be a multiple of 2 (2 processes, "),
    ([TWO, f"{ROLLOUT}=6"], "must divide the 16 prompts of a step and be a multiple of 2 (2 processes): use 2, 4, 8"),
    ([EIGHT, f"{MICRO}{EACH}=3"], "micro_batch_size_per_device=3 x 8 replicas = 24 must divide the 128 completions of "
     "a step and be a multiple of 8 (8 trainer replicas, grpo.group_size=8): use 1, 2, 4, 8 or 16"),
    ([f"{MICRO}{EACH}=1"], "use 8, 16, 32, 64 or 128 (counted on one device: name more by hardware.acc"),
])  # fmt: skip
def test_an_impossible_plan_is_refused_in_one_line_with_possible_values(changes, words):
    with pytest.raises(CourseError) as caught:
        load_recipe(TINY, changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{TINY}: ")


def test_a_size_is_given_once():
    given_twice = {PROMPTS: 16, ROLLOUT: 4, MICRO: 8}
    for key, size in given_twice.items():
        name = key.partition(".")[2]
        with pytest.raises(CourseError, match=rf"{name}={size} and {name}{EACH}=1 set the same size: give one, and"):
            load_recipe(TINY, [f"{key}={size}", f"{key}{EACH}=1"])
    with pytest.raises(CourseError, match="prompts_per_step=null needs prompts_per_step_per_device"):
        load_recipe(TINY, [f"{PROMPTS}=null"])
    # The default of prompts_per_step is not a second size, and the resolved recipe is read back as it is.
    small = load_recipe(ROOT / "recipes" / "lessons" / "tiny-hard.yaml", [f"{PROMPTS}=null", f"{PROMPTS}{EACH}=2"])
    assert small.plan.prompts_per_step == 2
    assert parse_recipe(yaml.safe_load(dump_recipe(small))) == small


def test_a_recipe_with_sizes_per_device_moves_to_other_slices_by_one_key():
    sizes = [f"{MICRO}=null", f"{MICRO}{EACH}=1", f"{ROLLOUT}=null", f"{ROLLOUT}{EACH}=1", f"{PROMPTS}=64"]
    moved = {"v6e-8": (8, 64, 8), "v6e-64": (64, 8, 1)}  # completions and accumulation of a gradient, rollouts a step
    for slice_, (micro, accumulation, rollouts) in moved.items():
        plan = load_recipe(TINY, [*sizes, f"hardware.accelerator={slice_}", "hardware.processes=1"]).plan
        assert (plan.prompts_per_step, plan.completions_per_step) == (64, 512)
        assert (plan.micro_batch_size, plan.accumulation_steps, plan.num_rollout_micro_batches) == (
            micro, accumulation, rollouts,
        )  # fmt: skip


def test_the_table_has_the_size_that_is_given_and_what_it_makes():
    recipe = load_recipe(TINY, [EIGHT, f"{MICRO}=null", f"{MICRO}{EACH}=2", f"{ROLLOUT}{EACH}=1"])
    rows = [line.split() for line in plan_table(recipe).splitlines()]
    assert ["micro", "batch", "size", "per", "device", "2"] in [row[:6] for row in rows]
    assert any(row[:4] == ["micro", "batch", "size", "16"] for row in rows)
    assert any(row[:7] == ["rollout", "micro", "batch", "size", "per", "device", "1"] for row in rows)


def test_the_plan_on_the_devices_that_are_found():
    found = load_recipe(TINY).plan_on(devices=8, processes=2)
    assert (found.processes, found.trainer_replicas, found.micro_batch_size_per_device) == (2, 8, 16)
    for changes, place, words in (
        ([], (3, 3), r"training\.prompts_per_step=16 must be a multiple of 3 \(3 processes"),
        (["hardware.processes=2"], (8, 1), r"hardware\.processes=2, but the run has 1"),
        (["hardware.trainer_tensor=3"], (8, 1), r"hardware\.trainer_tensor=3 must divide its 8 devices: use 1, 2, 4"),
    ):
        with pytest.raises(CourseError, match=words):
            load_recipe(TINY, changes).plan_on(*place)


def test_config_shows_given_and_derived_sizes(grpo):
    printed = grpo("config", TWO_HOSTS).stdout
    assert "prompts per step" in printed
    assert "accumulation steps" in printed
    # The plan is in comments: what is printed is still the recipe.
    assert parse_recipe(yaml.safe_load(printed)) == load_recipe(TWO_HOSTS)


def test_preflight_compiles_the_layout_that_runs_full_and_at_a_third_of_the_length():
    from grpo_train.tpu.preflight import at_mean_length, programs_of

    path = (
        ROOT / "recipes" / "published" / "qwen3-1.7b-gsm8k-smoke.yaml"
    )  # prompts of 256 tokens, completions of 768, eight chips
    recipe = load_recipe(path, ["training.layout=padded"])
    padded = programs_of(recipe)["update"]
    assert padded.rows is None
    assert at_mean_length(padded, recipe) == padded
    recipe = load_recipe(path)  # micro-batches of 32
    packed = programs_of(recipe)["update"]
    assert (packed.layout, packed.rows) == ("packed", (32, 1024))
    assert at_mean_length(packed, recipe).rows == (8, 1536)  # four sequences of 341 tokens in each row
