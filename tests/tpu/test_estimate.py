"""Estimates of time: small programs whose time follows from arithmetic, and texts that are no programs."""

import json
import runpy

import pytest
import yaml
from test_preflight import recipe, stand_in

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_train.recipes import load_recipe
from grpo_train.recipes.slices import CHIPS
from grpo_train.tpu import change_table, preflight
from grpo_train.tpu.compile_jobs import GIB, ProgramTime
from grpo_train.tpu.estimate import short
from grpo_train.tpu.op_costs import RATES
from grpo_train.tpu.program_time import kernel_bundles, program_time, simulated_seconds

CHIP, RATE = CHIPS["v6e"], RATES["v6e"]
HAND = 0.15  # the hand counts leave out what a few bytes more or a last wave cost

# Parts of texts that libtpu 0.0.44 wrote for v6e, with what is not read left out.
HEAD = "HloModule jit_f, is_scheduled=true, entry_computation_layout={()->f32[]}\n\n"
PRODUCT = (
    HEAD
    + """%fused_computation (param_0: bf16[8192,8192], param_1: bf16[8192,8192]) -> bf16[8192,8192] {
  %param_0 = bf16[8192,8192]{1,0:T(8,128)(2,1)} parameter(0)
  %param_1 = bf16[8192,8192]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %convolution.1 = bf16[8192,8192]{1,0:T(8,128)(2,1)} convolution(%param_0, %param_1), dim_labels=bf_io->bf
}

ENTRY %main.3 (a.1: bf16[8192,8192], b.1: bf16[8192,8192]) -> bf16[8192,8192] {
  %a.1 = bf16[8192,8192]{1,0:T(8,128)(2,1)} parameter(0)
  %b.1 = bf16[8192,8192]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %fusion = bf16[8192,8192]{1,0:T(8,128)(2,1)} fusion(%a.1, %b.1), kind=kOutput, calls=%fused_computation, \
backend_config={"window_config":{"estimated_cycles":"CYCLES","cost_model_type":"COST_MODEL_TYPE_CLASSIC"}}
}
"""
)
COPY = (
    HEAD
    + """ENTRY %main.2 (a.1: f32[32768,8192]) -> f32[32768,8192] {
  %a.1 = f32[32768,8192]{1,0:T(8,128)} parameter(0)
  ROOT %copy.1 = f32[32768,8192]{0,1:T(8,128)} copy(%a.1), \
backend_config={"window_config":{"estimated_cycles":"99999999","cost_model_type":"COST_MODEL_TYPE_INVALID"}}
}
"""
)
LOOP = (
    HEAD
    + """%body (p: (s32[], f32[32768,8192])) -> (s32[], f32[32768,8192]) {
  %p = (s32[]{:T(128)}, f32[32768,8192]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = f32[32768,8192]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %copy.1 = f32[32768,8192]{0,1:T(8,128)} copy(%x)
  ROOT %tuple.1 = (s32[]{:T(128)}, f32[32768,8192]{1,0:T(8,128)}) tuple(%i, %copy.1)
}

%condition (p.2: (s32[], f32[32768,8192])) -> pred[] {
  %constant.1 = s32[]{:T(128)} constant(5)
  %p.2 = (s32[]{:T(128)}, f32[32768,8192]{1,0:T(8,128)}) parameter(0)
  %i.2 = s32[]{:T(128)} get-tuple-element(%p.2), index=0
  ROOT %lt.1 = pred[]{:T(512)} compare(%i.2, %constant.1), direction=LT
}

ENTRY %main.9 (a.1: f32[32768,8192]) -> (s32[], f32[32768,8192]) {
  %a.1 = f32[32768,8192]{1,0:T(8,128)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %tuple.9 = (s32[]{:T(128)}, f32[32768,8192]{1,0:T(8,128)}) tuple(%zero, %a.1)
  ROOT %while.1 = (s32[]{:T(128)}, f32[32768,8192]{1,0:T(8,128)}) while(%tuple.9), condition=%condition, body=%body
}
"""
)
# A gather of 256 MiB over eight chips, begun before a copy that takes longer (or, with LATER, after it).
GATHER = (
    HEAD
    + """ENTRY %main.5 (a.1: bf16[16384,1024], b.1: f32[131072,8192]) -> f32[131072,8192] {
  %a.1 = bf16[16384,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %b.1 = f32[131072,8192]{1,0:T(8,128)} parameter(1)
  EARLY
  %copy.1 = f32[131072,8192]{0,1:T(8,128)} copy(%b.1)
  LATER
  %ag.2 = bf16[131072,1024]{1,0:T(8,128)(2,1)} all-gather-done(%ag.1)
  ROOT %bitcast.1 = f32[131072,8192]{0,1:T(8,128)} bitcast(%copy.1)
}
"""
)
START = (
    "%ag.1 = (bf16[16384,1024]{1,0}, bf16[131072,1024]{1,0}) all-gather-start(%a.1), "
    "replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"
)
COPIED = 2 * 4 * 32768 * 8192 / CHIP.bandwidth


def test_a_product_takes_its_flops_at_peak_or_the_cycles_that_the_compiler_says() -> None:
    at_peak = 2 * 8192**3 / CHIP.flops
    fast = program_time(PRODUCT.replace("CYCLES", "1"), "v6e")
    assert fast.seconds == pytest.approx(at_peak, rel=HAND)
    slower = program_time(PRODUCT.replace("CYCLES", str(round(1.4 * at_peak * RATE.clock))), "v6e")
    assert slower.seconds == pytest.approx(1.4 * at_peak, rel=HAND)
    assert set(slower.by_kind) == {"product", "waiting"}


def test_a_copy_takes_its_bytes_at_bandwidth_whatever_its_cycles() -> None:
    time = program_time(COPY, "v6e", libtpu="0.0.44")
    assert time.seconds == pytest.approx(COPIED, rel=HAND)
    assert time.libtpu == "0.0.44"


def test_a_loop_counts_with_its_trips_and_one_that_data_end_is_kept_apart() -> None:
    assert program_time(LOOP, "v6e").seconds == pytest.approx(5 * COPIED, rel=HAND)
    # The same constant, beside another condition, is a limit only: so decoding ends.
    ended = LOOP.replace("ROOT %lt.1", "%lt.1").replace(
        "direction=LT\n", "direction=LT\n  ROOT %and.1 = pred[]{:T(512)} and(%lt.1, %lt.1)\n"
    )
    open_loop = program_time(ended, "v6e")
    assert open_loop.seconds == 0
    assert open_loop.open_loops == (pytest.approx(COPIED, rel=HAND),)


def test_a_gather_is_hidden_behind_what_runs_beside_it() -> None:
    copied = 4 * COPIED
    gathered = 7 / 8 * 2 * 131072 * 1024 / (2 * RATE.link)
    assert gathered < copied
    hidden = program_time(GATHER.replace("EARLY", START).replace("  LATER\n", ""), "v6e")
    assert hidden.seconds == pytest.approx(copied, rel=HAND)
    assert hidden.by_kind["waiting"] == 0
    waited = program_time(GATHER.replace("LATER", START).replace("  EARLY\n", ""), "v6e")
    assert waited.seconds == pytest.approx(copied + gathered, rel=HAND)
    assert waited.by_kind["waiting"] == pytest.approx(gathered, rel=HAND)


CUT = PRODUCT[: PRODUCT.index("ENTRY") + 200]


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "not HLO"),
        ("module @jit_f attributes {mhlo.num_partitions = 1 : i32}\n", "not HLO"),
        ("HloModule jit_f, entry_computation_layout={()->f32[]}\n\nENTRY %main () -> f32[] {\n}\n", "not optimised"),
        (CUT, "cut off"),
        (PRODUCT[: PRODUCT.index("ENTRY")], "no entry"),
        (HEAD + PRODUCT[PRODUCT.index("ENTRY") :], "fused_computation"),
        (PRODUCT.replace("bf_io", "bf_iz"), "not as libtpu"),
    ],
    ids=[
        "empty",
        "StableHLO",
        "before optimisation",
        "cut in a computation",
        "cut before the entry",
        "a part only",
        "other labels",
    ],
)
def test_a_text_that_is_no_whole_program_ends_in_one_line(text: str, said: str) -> None:
    with pytest.raises(CourseError, match=said) as caught:
        program_time(text, "v6e")
    assert "\n" not in str(caught.value)


def test_a_program_cut_anywhere_ends_in_one_line_or_is_read() -> None:
    for text in (LOOP, PRODUCT.replace("CYCLES", "1"), GATHER.replace("EARLY", START)):
        for end in range(0, len(text), 7):
            try:
                program_time(text[:end], "v6e")
            except CourseError as error:
                assert "\n" not in str(error)


def test_libtpu_s_simulation_is_read_and_disbelieved_beyond_twice() -> None:
    def log(seconds: float) -> str:
        return (
            "I1128 12:00:00 1 x.cc:1] Statistics before scheduling\n"
            "I1128 12:00:00 1 x.cc:1] For computation: main.2, module jit_f(0)\n"
            "I1128 12:00:00 1 x.cc:1] Total cycles: 7e12\n"
            "I1128 12:00:00 1 x.cc:1] Statistics after scheduling\n"
            "I1128 12:00:00 1 x.cc:1] For computation: body.1, module jit_f(0)\n"
            "I1128 12:00:00 1 x.cc:1] Total cycles: 5e12\n"
            "I1128 12:00:00 1 x.cc:1] For computation: main.2, module jit_other(0)\n"
            "I1128 12:00:00 1 x.cc:1] Total cycles: 6e12\n"
            "I1128 12:00:00 1 x.cc:1] For computation: main.2, module jit_f(0)\n"
            f"I1128 12:00:00 1 x.cc:1] Total cycles: {seconds * RATE.clock:.6e}\n"
        )

    assert simulated_seconds("", "main.2", RATE.clock) is None
    assert program_time(COPY, "v6e", log=log(1.3 * COPIED)).simulated == pytest.approx(1.3 * COPIED, rel=0.01)
    assert program_time(COPY, "v6e", log=log(2.2 * COPIED)).simulated is None


def test_a_kernel_is_timed_by_the_bundles_of_its_loops() -> None:
    listing = (
        "  0x0   :  { %s1 = smov 0 }\n  0x10 LH: { %s2 = smov 1 }\n"
        "  0x260 LB: { %p = scmp.ge.s32 %s1, 2306 /* loop exit test */ }\n  0x2a0  : { halt }\n"
    )
    assert kernel_bundles(listing) == [(0x260, 2306), (0x2A0, 1)]
    assert kernel_bundles("nothing of a kernel") == [(0, 1)]


# The attributes of a kernel may take several lines; op_name is then in the last.
KERNEL = (
    HEAD
    + """ENTRY %main.2 (a.1: bf16[8,128]) -> bf16[8,128] {
  %a.1 = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %splash_mha_fwd.1 = bf16[8,128]{1,0:T(8,128)(2,1)} custom-call(%a.1), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, metadata={op_name="jit(f)/splash_mha_fwd/pallas_call"}
}
"""
)


def test_a_kernel_takes_the_seconds_that_it_is_given() -> None:
    assert program_time(KERNEL, "v6e").untimed_kernels == 1
    time = program_time(KERNEL, "v6e", kernel_seconds={"splash_mha_dkv": 1.0, "splash_mha_fwd": 0.25})
    assert (time.seconds, time.by_kind["kernel"], time.untimed_kernels) == (0.25, 0.25, 0)


def test_published_steps_count_the_loop_over_all_blocks_of_a_kernel(root, tmp_path) -> None:
    tool = runpy.run_path(str(root / "dev" / "tools" / "compile_published.py"))
    listing = "  0x26   LB: { %p = 66 /* loop exit test */ }\n  0x3b33 LB: { %p = 34 /* loop exit test */ }\n"
    (tmp_path / "1-splash_mha_fwd.1-72-final_bundles.txt").write_text(listing)
    assert tool["bundles_in"](tmp_path, "splash_mha_fwd", turns=34) == 0x3B33
    with pytest.raises(CourseError, match="no listing of splash_mha_fwd has a loop of 12 turns"):
        tool["bundles_in"](tmp_path, "splash_mha_fwd", turns=12)
    step = {"slice": "v6e-8", "rows": 3, "heads": 32}
    time = tool["timed"](KERNEL, step, {"splash_mha_fwd": 1000})
    assert time.seconds == pytest.approx(3 * 32 * 10 * 1000 / RATE.clock)  # 10 of 16 blocks are computed


TIME = ProgramTime(seconds=0.5, by_kind={"product": 0.4, "collective": 0.1}, libtpu="0.0.44")
TIMES = {
    "update": TIME,
    "prefill": TIME,
    "decode": TIME.model_copy(update={"seconds": 0.0, "open_loops": (0.002,)}),
}


def compiler(**times: ProgramTime | None):
    """The stand-in of test_preflight, whose programs of the whole model take these times; work grows with the rows."""
    report = stand_in()

    def compile(program):
        made = report(program)
        rows, tokens = program.rows or (128, 1024)
        work = made.flops * rows * tokens / (128 * 1024)
        time = None if program.layers else times.get(program.kind)
        return made.model_copy(update={"time": time, "flops": work, "traffic": 0})

    return compile


def result_of(made=None, **times: ProgramTime | None) -> preflight.Result:
    return preflight.preflight(made or recipe(rollout={"engine": "tunix"}), compiler(**TIMES | times))


def test_a_step_adds_up_by_hand() -> None:
    """128 sequences of up to 768 tokens in one micro-batch, 100 steps, eight chips."""
    estimate = result_of().estimate
    assert estimate
    decoding, update, sync = (estimate.part(name) for name in ("decoding", "policy update", "weight sync"))
    assert decoding and update and sync
    assert (decoding.seconds.low, decoding.seconds.high) == pytest.approx((0.002 * 256, 0.002 * 768))
    assert decoding.seconds.likely == decoding.seconds.high  # one of the batch goes on to the limit
    assert update.seconds.high == 0.5
    assert 0.1 < update.seconds.low < 0.5  # of fewer tokens
    assert update.seconds.likely == update.seconds.low  # on average
    assert sync.seconds.high == pytest.approx(8 * GIB / 8 / (2 * RATES["v6e"].link), rel=0.01)
    assert estimate.step and estimate.chip_hours
    assert estimate.step.high == pytest.approx(0.002 * 768 + 0.5 + sync.seconds.high)
    assert estimate.step.likely == pytest.approx(0.002 * 768 + update.seconds.low + sync.seconds.high)
    # The word problems' test split has 1,000: four batches of 250, each twice as large as one of training.  Validation
    # has 500, two batches, after steps 20, 40 and so on to 100.
    assert estimate.evaluation and estimate.validation
    assert estimate.evaluation.seconds.high == pytest.approx(4 * 0.002 * 768 * 250 / 128)
    assert estimate.validation.seconds.high == pytest.approx(5 * 2 * 0.002 * 768 * 250 / 128)
    answering = 2 * estimate.evaluation.seconds.high + estimate.validation.seconds.high
    assert estimate.chip_hours.high == pytest.approx(8 * (100 * estimate.step.high + answering) / 3600)
    assert estimate.limits == {"product": 0.8, "collective": 0.2}


def test_libtpu_s_simulation_makes_the_update_a_range() -> None:
    estimate = result_of(update=TIME.model_copy(update={"simulated": 0.7})).estimate
    assert estimate and estimate.update.high == 0.7


def test_of_a_bound_no_step_no_hours_and_no_money_are_made() -> None:
    """An estimated update and a bound of decoding add up to neither: "≥ 2 to 4" was read as a range, or as a bound."""
    vllm = result_of(recipe(grpo={"beta": 0.0}))
    assert vllm.estimate and vllm.lower_bound
    assert vllm.estimate.step is vllm.estimate.run_hours is vllm.estimate.chip_hours is None
    text = "\n".join(preflight.estimate_lines(vllm, 2.5))
    assert f"≥ {short(vllm.lower_bound.parts[0].seconds)}" in text
    assert "No hours and no money" in text and "chip-hour" not in text
    assert "vLLM's prefill and scheduling" in text
    assert text in preflight.table(vllm, 2.5)


def test_what_a_user_reads_names_the_likely_case_and_what_is_left_out_and_no_money_without_a_price() -> None:
    tunix = result_of()
    assert tunix.estimate and tunix.estimate.step
    text = "\n".join(preflight.estimate_lines(tunix))
    assert f"likely {short(tunix.estimate.step.likely)}" in text
    assert "not counted: the machine's start" in text
    assert " a chip-hour" not in text
    assert "at 2.5 a chip-hour" in "\n".join(preflight.estimate_lines(tunix, 2.5))
    assert "80% products, 20% traffic between chips" in text
    assert text in preflight.table(tunix)


@pytest.mark.parametrize(
    "text, prices",
    [(None, {}), ("2.5", {"": 2.5}), ("v6e=2.7,v5p=4.2", {"v6e": 2.7, "v5p": 4.2}), ("1,v5e=0", {"": 1.0, "v5e": 0.0})],
)
def test_a_price_is_of_every_chip_or_of_a_generation(text, prices) -> None:
    assert change_table.prices_of(text) == prices


@pytest.mark.parametrize("text", ["dear", "v6e", "v7=2", "-1", "nan", "inf", "v6e=2.7,", "v6e=2;v5p=3", "=2=3"])
def test_a_price_that_is_none_is_one_line(text) -> None:
    with pytest.raises(CourseError, match="--price") as raised:
        change_table.prices_of(text)
    assert len(str(raised.value).splitlines()) == 1


def test_a_price_is_that_of_the_slice() -> None:
    prices = {"v6e": 2.0, "": 1.0}
    assert change_table.price_of("v6e-8", prices) == 2.0
    assert change_table.price_of("v5p-8", prices) == 1.0
    assert change_table.price_of("v5p-8", {"v6e": 2.0}) is None
    estimate = result_of().estimate
    assert estimate and estimate.chip_hours
    *_, money = change_table.row("as it is", result_of(), prices)
    assert money == estimate.chip_hours.times(2.0).planned
    *_, money = change_table.row("as it is", result_of())
    assert money == "-"


def test_a_stored_result_without_an_estimate_names_the_command_and_what_compiling_took() -> None:
    def stored(name: str, cpu_seconds: float | None) -> preflight.Result:
        made = result_of()
        first, *others = made.programs
        compiled = first.compilation.model_copy(update={"cpu_seconds": cpu_seconds})
        programs = (first.model_copy(update={"compilation": compiled}), *others)
        return made.model_copy(update={"name": name, "programs": programs})

    took = preflight.compiling_took([stored("fast", 120.0), stored("slow", 900.0), stored("unknown", None)])
    assert "2.0 CPU minutes" in took and "of fast, 15.0 for those of slow" in took
    assert "not measured" in preflight.compiling_took([stored("unknown", None)])
    old = stored("old", None).model_copy(update={"estimate": None, "command": "grpo preflight recipes/old.yaml"})
    line, roofline = preflight.estimate_lines(old)
    assert line.startswith("Not estimated: ") and "`grpo preflight recipes/old.yaml`" in line
    assert old.lower_bound and short(old.lower_bound.seconds) in roofline and "No budget" in roofline


@pytest.mark.parametrize(
    "times, reason",
    [
        ({"update": None}, "no time of the policy update"),
        ({"decode": TIME}, "0 loops of unknown ends"),
    ],
)
def test_a_result_without_a_time_says_why_in_one_line(times: dict, reason: str) -> None:
    result = result_of(**times)
    assert result.fits and result.estimate is None
    line, _ = preflight.estimate_lines(result)
    assert line.startswith("Not estimated: ") and reason in line


def test_a_stored_result_is_found_by_its_recipe(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(environment, "cache_dir", lambda: tmp_path)
    made = recipe(rollout={"engine": "tunix"})
    assert preflight.stored_result(made) is None
    assert preflight.stored_result(recipe(rollout={"max_prompt_length": "auto"})) is None
    preflight.keep_result(made, result_of(made))
    assert preflight.stored_result(made) == result_of(made)
    (kept,) = (tmp_path / "preflight" / "results").glob("*.json")
    kept.write_text('{"name": "of another version"}', encoding="utf-8")
    assert preflight.stored_result(made) is None
    assert preflight.stored_result(recipe(rollout={"engine": "tunix", "max_completion_length": 512})) is None


def test_a_stored_result_is_of_any_number_of_steps(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(environment, "cache_dir", lambda: tmp_path)
    made, more = (recipe(rollout={"engine": "tunix"}, training={"steps": steps}) for steps in (100, 1000))
    preflight.keep_result(made, result_of(made))
    assert preflight.stored_result(more) == result_of(more)


def test_changes_are_a_table_with_reasons_where_numbers_are_missing() -> None:
    variants = change_table.variants_of(["grpo.group_size=4,16", "hardware.accelerator=v5p-8+training.steps=7"])
    assert [overrides for _, overrides in variants] == [
        [], ["grpo.group_size=4"], ["grpo.group_size=16"], ["hardware.accelerator=v5p-8", "training.steps=7"],
    ]  # fmt: skip
    assert change_table.variants_of(["rewards=[a,b]"])[1][1] == ["rewards=[a,b]"]
    rows = [
        change_table.row("as it is", result_of()),
        change_table.row("a", result_of(update=None)),
        change_table.row("b", CourseError("training.micro_batch_size=3 does not divide")),
        change_table.row("c", preflight.preflight(recipe(), stand_in(weights_gib=900.0))),
    ]
    table = change_table.table(rows).splitlines()
    assert table[0].split("  ")[0] == "change"
    assert "v6e-8" in table[1] and " to " in table[1]
    assert "not estimated: no time of the policy update" in table[2]
    assert "not possible: training.micro_batch_size=3" in table[3]
    assert "does not fit" in table[4]
    with pytest.raises(CourseError, match="KEY=VALUE"):
        change_table.variants_of(["grpo.group_size"])


ESTIMATED = [saved for saved in preflight.saved_results() if saved.estimate]


@pytest.mark.parametrize("saved", ESTIMATED, ids=lambda saved: saved.name)
def test_a_saved_estimate_follows_from_the_saved_times(root, saved) -> None:
    made = load_recipe(root / saved.command.removeprefix("grpo preflight "))
    bare = saved.model_copy(update={"estimate": None})
    assert preflight.with_estimate(made, bare).estimate == saved.estimate


def test_the_page_of_estimates_is_what_its_command_writes(root) -> None:
    tool = runpy.run_path(str(root / "dev" / "tools" / "make_estimates.py"))
    folder = root / "assets" / "estimates"
    cases, measured = (yaml.safe_load((folder / f"{name}.yaml").read_text()) for name in ("cases", "measured"))
    programs, predictions = (json.loads((folder / f"{name}.json").read_text()) for name in ("programs", "predictions"))
    again = tool["predict"](cases, programs)
    assert {name: list(seconds) for name, seconds in again.items()} == predictions, "make_estimates.py predict"
    page = tool["page"](cases, predictions, measured, programs)
    assert (root / "docs" / "estimates.md").read_text(encoding="utf-8") == page, "make_estimates.py compare"
