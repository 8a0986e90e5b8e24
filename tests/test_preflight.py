"""Preflight without a compiler: the sums, the search for a remedy, the saved results.  The compiler is in tests/tpu."""

import ast
import json
import subprocess
import sys

import pytest

from grpo_lib import memory, preflight, roofline
from grpo_lib.accelerators import CHIPS, slice_of
from grpo_lib.batch_plan import micro_batch_sizes
from grpo_lib.compilation import wanted_bytes
from grpo_lib.errors import CourseError
from grpo_lib.preflight import find_remedy, hardware_table, saved_result, saved_results, shipped_recipes, table
from grpo_lib.programs import GIB, Compilation, few_layers, programs_of
from grpo_lib.recipes import parse_recipe


def recipe(**sections):
    """A colocated recipe on eight v6e chips, 16 prompts of 8 completions; sections are merged into it."""
    data = {
        "name": "made-up",
        "model": {"path": "nowhere", "maxtext_name": "qwen3-1.7b", "dtype": "bfloat16"},
        "hardware": {"accelerator": "v6e-8"},
        "rollout": {"engine": "vllm", "max_prompt_length": 256, "max_completion_length": 768},
        "training": {"steps": 100, "micro_batch_size": 128},
    }
    for name, values in sections.items():
        data[name] = data.get(name, {}) | values
    return parse_recipe(data)


def stand_in(activations_gib=1.0, limit_gib=31.0, weights_gib=8.0):
    """A compiler whose temporaries grow with the tokens of a chip, and shrink to a half with remat=full."""
    asked = []

    def compile(program):
        asked.append(program)
        shard = int(weights_gib * GIB / program.devices)
        per_chip = program.sequences * (program.prompt_length + program.completion_length) / program.devices / 1024
        temporaries = int(activations_gib * GIB * per_chip * (0.5 if program.model.remat == "full" else 1))
        if program.kind == "logps":
            temporaries //= 2
        optimizer = 3 * shard if program.kind == "update" else 0
        layers = program.layers or 10
        facts = {
            "parameters": int(weights_gib * GIB) // 2,
            "parameter_bytes": int(weights_gib * GIB),
            "parameter_shard": shard,
            "optimizer_shard": optimizer,
            "num_layers": 10,
            "kv_heads": 4,
            "head_dim": 128,
            "vocabulary": 1000,
            "width": 1000,
        }
        if shard + optimizer + temporaries > limit_gib * GIB:
            return Compilation(refused="RESOURCE_EXHAUSTED: too much", wanted=shard + temporaries, **facts)
        return Compilation(
            arguments=shard + optimizer,
            outputs=shard + optimizer if program.kind == "update" else 0,
            aliased=optimizer,
            temporaries=temporaries,
            flops=1e12 * (1 + layers),
            traffic=1e9 * (5 + 2 * layers),
            **facts,
        )

    compile.asked = asked
    return compile


def test_a_program_says_what_decides_it():
    base = programs_of(recipe())
    assert set(base) == {"update"}
    same = programs_of(
        recipe(training={"micro_batch_size": 128, "learning_rate": 1e-6, "steps": 7}, grpo={"epsilon": 0.1})
    )
    assert same == base
    pallas = programs_of(recipe(loss={"implementation": "pallas"}))["update"]
    assert pallas == base["update"].model_copy(update={"loss": "pallas"}) and few_layers(pallas) == few_layers(
        base["update"]
    )
    for other in (
        {"model": {"remat": "full"}},
        {"training": {"micro_batch_size": 64}},
        {"rollout": {"max_completion_length": 512}},
        {"rollout": {"temperature": 0.9}},
        {"grpo": {"beta": 0.1}},
        {"grpo": {"iterations": 2}},
        {"hardware": {"trainer_tensor": 2}},
    ):
        assert programs_of(recipe(**other))["update"] != base["update"], other


def test_equal_products_of_prompts_and_completions_are_one_program():
    a = recipe(training={"micro_batch_size": 32}, grpo={"group_size": 8})
    b = recipe(training={"micro_batch_size": 32}, grpo={"group_size": 16})
    assert programs_of(a) == programs_of(b)


def test_the_cached_name_changes_with_the_versions():
    program = programs_of(recipe())["update"]
    assert program.key({"jax": "1"}) != program.key({"jax": "2"})
    assert len({p.key({}) for p in (program, *few_layers(program))}) == 3


def test_log_probabilities_are_compiled_when_the_recipe_takes_them():
    assert set(programs_of(recipe(grpo={"beta": 0.1}))) == {"update", "logps"}
    assert set(programs_of(recipe(grpo={"iterations": 2}))) == {"update", "logps"}


def test_a_part_of_a_slice_is_compiled_as_a_slice_where_there_is_one():
    half = recipe(hardware={"trainer_devices": 4, "sampler_devices": 4})
    assert (programs_of(half)["update"].accelerator, programs_of(half)["update"].devices) == ("v6e-4", 4)
    two = recipe(hardware={"accelerator": "v5p-8", "trainer_devices": 2, "sampler_devices": 2})
    assert (programs_of(two)["update"].accelerator, programs_of(two)["update"].devices) == ("v5p-8", 2)


@pytest.mark.parametrize(
    "sections, field",
    [
        ({"hardware": {"accelerator": None}}, "hardware.accelerator"),
        ({"rollout": {"max_prompt_length": "auto"}}, "rollout.max_prompt_length"),
    ],
)
def test_what_the_recipe_leaves_open_is_asked_for(sections, field):
    with pytest.raises(CourseError, match=f"{field}.*add {field}="):
        programs_of(recipe(**sections))


def test_slice_names_go_both_ways():
    assert [slice_of("v6e", 8), slice_of("v4", 8), slice_of("v5p", 4)] == ["v6e-8", "v4-16", "v5p-8"]


def test_memory_adds_up_by_hand():
    """8 GiB of weights on 8 chips, KL penalty, two micro-batches."""
    made = recipe(
        grpo={"beta": 0.1}, training={"micro_batch_size": 64}, rollout={"vllm": {"memory_fraction": 0.5}}
    )  # 64 sequences, 8 to a chip
    result = preflight.examine(made, stand_in())
    (chip,) = result.chips
    gib = {line.name: line.bytes / GIB for line in chip.lines}
    assert gib["actor weights"] == gib["reference weights"] == 1
    assert gib["optimizer state, gradients"] == 3
    assert gib["update: new weights"] == 1
    assert gib["update: temporaries"] == 8
    assert gib["log-probabilities: temporaries"] == 4
    assert gib["sampler weights"] == gib["sync: arriving weights"] == 1  # one replica over eight chips
    assert gib["KV cache"] == pytest.approx(0.5 * 31.24 - 1)
    reserve, cache = 0.02 * 31.24, 0.5 * 31.24 - 1
    stays = 1 + 3 + 1 + 1 + reserve
    assert chip.total("update") / GIB == pytest.approx(stays + cache + 1 + 8)
    assert chip.total("log-probabilities") / GIB == pytest.approx(stays + cache + 4)
    assert chip.total("sync") / GIB == pytest.approx(stays + 1 + 1)  # the engine has freed its cache
    assert chip.phase == "update"
    assert result.margin / GIB == pytest.approx(31.24 - chip.total("update") / GIB)
    assert result.fits == (result.margin >= 0)


def test_the_kv_cache_is_counted_in_tokens():
    result = preflight.examine(recipe(), stand_in())
    # 4 key-value heads over 8 chips: one to a chip; keys and values of 10 layers, 128 numbers of 2 bytes
    assert result.pool.tokens == result.pool.bytes // (2 * 10 * 1 * 128 * 2)
    assert result.pool.sequences == result.pool.tokens // 1024
    assert result.pool.wanted == 128


def test_a_fixed_number_of_pages_sets_the_cache():
    made = recipe(rollout={"vllm": {"kv_blocks": 100, "block_size": 64}})
    assert preflight.examine(made, stand_in()).pool.tokens == 6400


def test_trainer_and_sampler_apart_have_a_table_each():
    made = recipe(hardware={"trainer_devices": 4, "sampler_devices": 4, "sampler_tensor": 2})
    result = preflight.examine(made, stand_in())
    trains, samples = result.chips
    assert (trains.role, samples.role) == ("trains", "samples")
    assert not {line.name for line in trains.lines} & {"sampler weights", "KV cache"}
    weights = next(line for line in samples.lines if line.name == "sampler weights")
    assert weights.bytes == 4 * GIB  # half of the model: two replicas of two chips
    assert result.notes[0].startswith("the trainer's 4 of 8 chips were compiled as a v6e-4")


@pytest.mark.parametrize(
    "fraction, beta, gib",
    [(0.9, 0, 0.9 * 31.24), (0.9, 0.1, 0.9 * 31.24), (0.97, 0, 0.98 * 31.24 - 1), (0.97, 0.1, 0.98 * 31.24 - 2)],
)
def test_the_engine_s_share_comes_on_top_of_what_was_there(fraction, beta, gib):
    """Actor and reference, 1 GiB each, lie on the chip when the engine starts; with it they take 98 % at most."""
    made = recipe(rollout={"vllm": {"memory_fraction": fraction}}, grpo={"beta": beta})
    assert preflight.examine(made, stand_in()).pool.bytes / GIB == pytest.approx(gib - 1)  # beside the engine's weights


def test_a_remedy_is_tried_before_it_is_named():
    compile = stand_in(activations_gib=3.0)
    made = recipe()  # 128 sequences, 16 to a chip: 48 GiB
    result = preflight.preflight(made, compile)
    assert not result.fits and result.floor is None
    assert result.problem.startswith("the compiler refuses the policy update")
    assert [trial.changes for trial in result.trials] == [
        {"training.micro_batch_size": 64},
        {"training.micro_batch_size": 32},
    ]
    assert [trial.fits for trial in result.trials] == [False, True]
    assert result.remedy == {"training.micro_batch_size": 32}
    after = preflight.examine(preflight.with_changes(made, result.remedy), stand_in(activations_gib=3.0))
    assert after.fits and after.margin == result.trials[-1].margin
    assert f"change training.micro_batch_size=32: fits, {after.margin / GIB:.2f} GiB left" in table(result)


def test_remedies_come_in_order_and_add_up():
    made = recipe(training={"micro_batch_size": 8}, rollout={"vllm": {"memory_fraction": 0.6}})
    result = preflight.examine(made, stand_in(activations_gib=30.0))
    trials, remedy = find_remedy(made, result, stand_in(activations_gib=30.0))
    assert [set(trial.changes) for trial in trials] == [
        {"model.remat"},
        {"model.remat", "rollout.vllm.memory_fraction"},
    ]
    assert remedy == trials[-1].changes and trials[-1].fits
    assert remedy["rollout.vllm.memory_fraction"] < 0.6


@pytest.mark.parametrize(
    "message, gib",
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 37.02G of 31.24G hbm. Exceeded", 37.02 - 15),
        ("the total memory required for HLO temporaries (180.00G) exceeds available HBM (31.24G)", 180),
        ("the total memory required for HLO temporaries (512.00M) exceeds available HBM (256.00M)", 0.5),
    ],
)
def test_the_compiler_s_refusal_is_read(message, gib):
    assert wanted_bytes(message, arguments=15 * GIB) == pytest.approx(gib * GIB)
    assert wanted_bytes("something else", 0) is None


def test_a_larger_slice_comes_last_with_a_micro_batch_that_fills_it():
    """Weights alone are too much for eight chips."""
    made = recipe(training={"micro_batch_size": 8}, model={"remat": "full"}, rollout={"vllm": {"memory_fraction": 0.3}})
    compile = stand_in(weights_gib=60.0)
    result = preflight.examine(made, compile)
    trials, remedy = find_remedy(made, result, compile)
    assert remedy["hardware.accelerator"] == "v6e-16"
    assert remedy["training.micro_batch_size"] == 16
    assert trials[-1].fits


def test_the_parts_of_a_slice_grow_with_it():
    made = recipe(
        training={"micro_batch_size": 16},
        hardware={"trainer_devices": 4, "sampler_devices": 4},
        rollout={"vllm": {"memory_fraction": 0.8}},
        model={"remat": "full"},
    )
    compile = stand_in(weights_gib=40.0)
    remedy = find_remedy(made, preflight.examine(made, compile), compile)[1]
    assert (remedy["hardware.trainer_devices"], remedy["hardware.sampler_devices"]) == (8, 8)


def test_a_remedy_is_said_as_the_recipe_says_it_and_keeps_the_step():
    """Sizes by process and device, on two hosts: twice the chips are twice the hosts, and the step stays."""
    made = recipe(
        hardware={"accelerator": "v4-16"},
        model={"remat": "full"},
        training={"prompts_per_process": 8, "micro_batch_size": None, "micro_batch_per_device": 2},
        rollout={"prompts_per_device": 4, "vllm": {"memory_fraction": 0.3}},
    )
    assert (made.plan.processes, made.plan.micro_batch_size, made.plan.passes) == (2, 16, 4)
    compile = stand_in(weights_gib=60.0)
    remedy = find_remedy(made, preflight.examine(made, compile), compile)[1]
    larger = preflight.with_changes(made, remedy)
    assert remedy["hardware.accelerator"] == "v4-32" and larger.plan.processes == 4
    assert (larger.plan.prompts_per_step, larger.plan.passes, larger.plan.micro_batch_size) == (16, 4, 16)
    assert "training.prompts_per_process=null training.prompts_per_step=16" in preflight.spelled(remedy)

    tight = recipe(training={"micro_batch_size": None, "micro_batch_per_device": 16})
    result = preflight.preflight(tight, stand_in(activations_gib=3.0))
    assert result.remedy == {"training.micro_batch_per_device": 4}


def test_passes_sample_fewer_at_once_and_decode_as_often():
    made = recipe(rollout={"prompts_per_pass": 4})
    result = preflight.preflight(made, stand_in(activations_gib=0.1))
    assert result.pool.wanted == 32  # 4 prompts of 8
    assert {part.name: part.times for part in result.floor.parts}["decoding"] == 4 * 768
    slots = preflight.with_changes(made, {"rollout.vllm.max_sequences": 16})
    floor = preflight.preflight(slots, stand_in(activations_gib=0.1)).floor
    assert {part.name: part.times for part in floor.parts}["decoding"] == 4 * 2 * 768


def test_a_cache_that_holds_no_sequence_does_not_fit():
    made = recipe(rollout={"vllm": {"memory_fraction": 0.03}})
    result = preflight.preflight(made, stand_in(activations_gib=0.1))
    assert "KV cache would hold" in result.problem
    assert set(result.remedy) == {"rollout.vllm.memory_fraction"}


def test_no_remedy_is_said_plainly():
    result = preflight.preflight(recipe(), stand_in(weights_gib=100_000.0))
    assert result.remedy is None
    assert "no change that was tried fits" in table(result)


def test_the_floor_by_hand():
    """Per chip: layers add 1e12 flops and 2e9 bytes to 1e12 and 5e9; ten layers."""
    result = preflight.preflight(
        recipe(training={"micro_batch_size": 32, "steps": 100}, grpo={"beta": 0.1}), stand_in()
    )
    chip = CHIPS["v6e"]
    parts = {part.name: part for part in result.floor.parts}
    assert parts["policy update"].work == roofline.Work(flops=11e12, traffic=25e9)
    assert parts["policy update"].times == 4 and parts["log-probabilities"].times == 4
    assert parts["policy update"].seconds == pytest.approx(4 * 25e9 / chip.bandwidth)
    assert parts["policy update"].bound == "memory"
    assert parts["decoding"].seconds == pytest.approx(768 * GIB / chip.bandwidth)  # 8 GiB over 8 chips
    assert result.floor.seconds == pytest.approx(sum(part.seconds for part in parts.values()))
    assert result.floor.chip_hours == pytest.approx(8 * 100 * result.floor.seconds / 3600)
    assert f"x 2.5 = {result.floor.chip_hours * 2.5:.2f}" in table(result, price=2.5)


def test_compute_bound_work_takes_the_time_of_its_flops():
    work = roofline.Work(flops=918e12, traffic=1.0)
    assert work.seconds(CHIPS["v6e"]) == 1.0


def test_more_sequences_than_slots_decode_in_rounds():
    few = recipe(rollout={"vllm": {"max_sequences": 32}})
    made = preflight.preflight(few, stand_in(activations_gib=0.1))
    assert {part.name: part.times for part in made.floor.parts}["decoding"] == 4 * 768


def test_every_shipped_recipe_has_a_result_that_still_holds():
    for spec, shipped in shipped_recipes().items():
        result = saved_result(shipped)
        assert result.fits, spec
        assert result.floor and result.versions["libtpu"]
        assert result.command.startswith("grpo preflight recipes/"), spec


def test_a_result_is_stale_when_a_value_that_matters_changes(tmp_path):
    shipped = next(iter(shipped_recipes().values()))
    changed = preflight.with_changes(shipped, {"training.steps": shipped.training.steps + 1})
    with pytest.raises(CourseError, match=r"has changed since.*grpo preflight"):
        saved_result(changed)
    with pytest.raises(CourseError, match=r"does not exist"):
        saved_result(shipped, tmp_path)
    assert saved_result(preflight.with_changes(shipped, {"training.learning_rate": 1e-9, "seed": 5}))


def test_recipes_made_too_large_are_saved_with_a_remedy_that_fits(root):
    refused = [preflight.read_result(path) for path in sorted((root / preflight.SAVED).glob("refused-*.json"))]
    assert len(refused) >= 2
    for result in refused:
        assert not result.fits and result.remedy
        assert result.trials[-1].fits and result.trials[-1].changes == result.remedy
        assert result.trials[-1].margin > 0


def test_the_saved_results_make_a_table():
    results = saved_results()
    rows = hardware_table(results).splitlines()
    assert len(rows) == 2 + len(results) == 2 + len(shipped_recipes())
    assert all(row.count("|") == rows[0].count("|") for row in rows)


def test_the_recipes_that_differ_in_the_loss_differ_in_the_memory_of_the_update():
    by_name = {result.name: result for result in saved_results()}
    jax, pallas = by_name["qwen2.5-3b-gsm8k-jax"], by_name["qwen2.5-3b-gsm8k-pallas"]
    jax_lines, pallas_lines = ({line.name: line.bytes for line in one.chips[0].lines} for one in (jax, pallas))
    differing = {name for name in jax_lines if abs(jax_lines[name] - pallas_lines[name]) > 2**20}
    assert differing == {"update: temporaries", "programs"}
    assert pallas_lines["update: temporaries"] < jax_lines["update: temporaries"] / 2
    assert jax.floor == pallas.floor
    assert any("does not count inside a kernel" in note for note in pallas.notes)


def test_without_libtpu_the_command_says_what_to_install(root):
    code = (
        "import importlib.metadata as m, sys\n"
        "real = m.version\n"
        "def version(name):\n"
        "    if name == 'libtpu': raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version\n"
        "from grpo_lib import cli\n"
        "sys.argv = ['grpo', 'preflight', 'recipes/qwen3-1.7b-gsm8k-smoke.yaml']\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "make setup-tpu" in done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""


def test_a_margin_smaller_than_the_weights_is_pointed_out():
    """16 GiB of weights on 8 chips: 2 to a chip.  Two updates a step, and then one."""
    several = recipe(training={"prompts_per_step": 16, "micro_batch_size": 64})
    result = preflight.examine(several, stand_in(weights_gib=16.0, activations_gib=1.6))
    assert 0 < result.margin < 2 * GIB
    short = 2 - result.margin / GIB
    assert any(f"would be {short:.2f} GiB short" in note for note in result.notes)
    one = preflight.with_changes(several, {"training.prompts_per_step": 8})
    assert not preflight.examine(one, stand_in(weights_gib=16.0, activations_gib=1.6)).notes


@pytest.mark.parametrize("limit", [0, 8, 40, 128, 500])
def test_the_largest_micro_batch_is_found_by_halving(limit):
    asked = []

    def compile(program):
        asked.append(program.sequences)
        fits = program.sequences <= limit
        return stand_in(activations_gib=0.1)(program).model_copy(update={"refused": None if fits else "no room"})

    whole = recipe(training={"prompts_per_step": 16, "micro_batch_size": 128})
    fitting = [size for size in micro_batch_sizes(whole.plan) if size <= limit]
    assert preflight.largest_micro_batch(whole, compile) == (fitting[-1] if fitting else None)
    assert len(asked) <= 4


def test_a_quick_compilation_is_another_program_and_says_so():
    assert programs_of(recipe(), quick=True) != programs_of(recipe())
    assert few_layers(programs_of(recipe(), quick=True)["update"]) == few_layers(programs_of(recipe())["update"])
    result = preflight.preflight(recipe(), stand_in(activations_gib=0.1), quick=True)
    assert "--quick" in result.notes[0]


def test_a_result_survives_json():
    result = preflight.preflight(recipe(), stand_in(activations_gib=0.1))
    assert preflight.Result.model_validate(json.loads(result.model_dump_json())) == result


def test_the_engine_s_limit_is_the_one_that_is_counted_with(root):
    """Read from the source: the module itself needs vLLM."""
    tree = ast.parse((root / "grpo_lib" / "vllm_engine.py").read_text(encoding="utf-8"))
    constants = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    assert constants["FULL"] == memory.ENGINE_LIMIT


def test_the_reserve_is_part_of_every_chip():
    made = recipe(hardware={"trainer_devices": 4, "sampler_devices": 4})
    for chip in preflight.examine(made, stand_in()).chips:
        assert sum(line.name == "reserve" for line in chip.lines) == 1
        assert chip.total(chip.phase) == chip.largest == max(chip.total(phase) for phase in memory.PHASES)
