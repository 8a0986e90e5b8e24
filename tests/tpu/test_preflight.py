"""Preflight without a compiler: sums, hints, saved results.  The real compiler: tests/tpu/stack."""

import pytest

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_tpu import preflight, roofline
from grpo_tpu.compile_jobs import GIB, Compilation
from grpo_tpu.compiler import bytes_needed
from grpo_tpu.preflight import programs_of, saved_result, saved_results, table
from grpo_train.recipes import load_recipe, parse_recipe, profiles_of
from grpo_train.recipes.slices import CHIPS

SMOKE = environment.repo_root() / "recipes" / "qwen3-1.7b-gsm8k-smoke.yaml"


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


def stand_in(activations_gib=1.0, limit_gib=31.0, weights_gib=8.0, prefill_gib=2.0):
    """A compiler whose temporaries grow with the tokens of a chip, and shrink to a half with remat=full."""

    def sampler(program):
        """A KV cache of 2 KiB a token, an eighth more as it is laid out; decoding needs half of prefill."""
        shard = int(weights_gib * GIB) // program.tensor
        if program.kind == "sync":
            return Compilation(outputs=GIB // 16, temporaries=GIB // 16, arriving=GIB // 16)
        rows = program.sequences * program.tensor // program.devices
        cache = rows * (program.prompt_length + program.completion_length) * 2048
        temporaries = int(prefill_gib * GIB * rows * program.prompt_length / 8192)
        facts = {"sampler_shard": shard, "cache_shard": cache, "batch": 100}
        if shard + cache + temporaries > limit_gib * GIB:
            return Compilation(oom_message="RESOURCE_EXHAUSTED: too much", bytes_needed=temporaries, **facts)
        half = temporaries if program.kind == "prefill" else temporaries // 2
        arguments = shard + cache * 9 // 8 + 100
        return Compilation(
            arguments=arguments, outputs=arguments - shard, aliased=arguments - shard,
            temporaries=half, code=GIB // 128, **facts,
        )  # fmt: skip

    def compile(program):
        if program.kind in ("prefill", "decode", "sync"):
            return sampler(program)
        shard = int(weights_gib * GIB / program.devices)
        per_chip = program.sequences * (program.prompt_length + program.completion_length) / program.devices / 1024
        temporaries = int(activations_gib * GIB * per_chip * (0.5 if program.model.remat == "full" else 1))
        if program.kind == "logps":
            temporaries //= 2
        optimizer = 3 * shard if program.kind == "update" else 0
        layers = program.layers or 10
        facts = {
            "parameters": int(weights_gib * GIB) // 2, "parameter_bytes": int(weights_gib * GIB),
            "parameter_shard": shard, "optimizer_shard": optimizer,
            "num_layers": 10, "kv_heads": 4, "head_dim": 128, "vocabulary": 1000, "width": 1000,
        }  # fmt: skip
        if shard + optimizer + temporaries > limit_gib * GIB:
            return Compilation(oom_message="RESOURCE_EXHAUSTED: too much", bytes_needed=shard + temporaries, **facts)
        return Compilation(
            arguments=shard + optimizer,
            outputs=shard + optimizer if program.kind == "update" else 0,
            aliased=optimizer,
            temporaries=temporaries,
            flops=1e12 * (1 + layers),
            traffic=1e9 * (5 + 2 * layers),
            **facts,
        )

    return compile


def test_a_part_of_a_slice_is_compiled_as_a_slice_where_there_is_one():
    for whole, part, used in (("v6e-8", 4, "v6e-4"), ("v5p-8", 2, "v5p-8")):
        half = recipe(hardware={"accelerator": whole, "trainer_devices": part, "sampler_devices": part})
        program = programs_of(half)["update"]
        assert (program.accelerator, program.devices) == (used, part)


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


def test_memory_adds_up_by_hand():
    """8 GiB of weights on 8 chips, KL penalty, two micro-batches."""
    made = recipe(
        grpo={"beta": 0.1}, training={"micro_batch_size": 64}, rollout={"vllm": {"memory_fraction": 0.5}}
    )  # 64 sequences, 8 to a chip
    result = preflight.examine(made, stand_in())
    (chip,) = result.chips
    gib = {line.name: line.bytes / GIB for line in chip.lines}
    assert gib["actor weights"] == gib["reference weights"] == gib["update: new weights"] == 1
    assert gib["optimizer state, gradients"] == 3
    assert (gib["update: temporaries"], gib["log-probabilities: temporaries"]) == (8, 4)
    assert gib["sampler weights"] == gib["sync: arriving weights"] == 1  # one replica over eight chips
    assert gib["KV cache"] == pytest.approx(0.5 * 31.24 - 1)
    reserve, cache = 0.02 * 31.24, 0.5 * 31.24 - 1
    stays = 1 + 3 + 1 + 1 + reserve
    assert chip.total("update") / GIB == pytest.approx(stays + cache + 1 + 8)
    assert chip.total("log-probabilities") / GIB == pytest.approx(stays + cache + 4)
    assert chip.total("sync") / GIB == pytest.approx(stays + 1 + 1)  # the engine has freed its cache
    assert chip.phase == "update" and result.fits
    assert result.margin / GIB == pytest.approx(31.24 - chip.total("update") / GIB)


def tunix(**sections):
    """Two hosts of four chips; each samples 8 of the 16 prompts, 64 completions, on one replica of its four chips."""
    two_hosts = {"accelerator": "v4-16", "sampler_tensor": 4}
    data = {"hardware": two_hosts, "rollout": {"engine": "tunix"}, "evaluation": {"batch_size": 64}}
    for name, values in sections.items():
        data[name] = data.get(name, {}) | values
    return recipe(**data)


def test_each_process_samples_on_its_own_devices():
    programs = programs_of(tunix(grpo={"beta": 0.1}, loss={"implementation": "pallas"}))
    assert list(programs) == ["update", "logps", "prefill", "decode", "sync"]
    prefill, decode, sync = (programs[name] for name in ("prefill", "decode", "sync"))
    assert (prefill.accelerator, prefill.devices, prefill.tensor, prefill.sequences) == ("v4-8", 4, 4, 64)
    assert decode == prefill.model_copy(update={"kind": "decode"})
    assert (sync.accelerator, sync.devices, sync.tensor, sync.processes, sync.sampler_tensor) == ("v4-16", 8, 1, 2, 4)
    assert prefill.title == "sampler's prefill of 64 x 256 tokens, 4 devices of v4-8"
    assert decode.title == "sampler's decoding of 64 x 768 tokens, 4 devices of v4-8"
    assert sync.title == "weight sync, one weight at a time, 8 devices of v4-16"
    # Rows are filled up for the replicas: 3 prompts of 3 completions on four replicas.
    odd = tunix(hardware={"accelerator": "v6e-4", "sampler_tensor": 1}, grpo={"group_size": 3},
                training={"prompts_per_step": 4, "micro_batch_size": 12}, rollout={"micro_batch_size": 1})  # fmt: skip
    assert programs_of(odd)["prefill"].sequences == 4
    apart = tunix(hardware={"accelerator": "v6e-8", "trainer_devices": 4, "sampler_devices": 4})
    assert programs_of(apart)["sync"].sampler_tensor is None
    with pytest.raises(CourseError, match=r"sampler_tensor=8 does not divide the 4 devices of a process"):
        programs_of(tunix(hardware={"sampler_tensor": 8}))
    assert list(programs_of(recipe())) == ["update"]  # vLLM compiles its own


def test_tunix_s_sampler_adds_up_by_hand():
    """8 GiB of weights on 8 chips to train, on 4 to sample; 64 rows of 1024 tokens; prefill's temporaries 4 GiB."""
    result = preflight.preflight(tunix(training={"micro_batch_size": 64}), stand_in())
    (chip,) = result.chips
    lines = {line.name: line for line in chip.lines}
    gib = {name: line.bytes / GIB for name, line in lines.items()}
    assert gib["sampler weights"] == 2 and gib["sampler's programs"] == 2 / 128
    assert gib["KV cache"] == pytest.approx(64 * 1024 * 2048 * 9 / 8 / GIB)
    assert gib["sampling: temporaries"] == 4 and "prefill" in lines["sampling: temporaries"].how
    assert gib["sync: one weight"] == 0.125
    assert {lines[name].origin for name in ("sampler weights", "KV cache", "sync: one weight")} == {"compiler"}
    assert not set(lines) & {"sync: actor weights, unstacked", "sync: arriving weights", "sampling: activations"}
    stays = 1 + 3 + 2 + 2 / 128 + gib["programs"] + 0.02 * 30.75
    assert chip.total("sampling") / GIB == pytest.approx(stays + gib["KV cache"] + 4, rel=1e-3)
    assert chip.total("sync") / GIB == pytest.approx(stays + 0.125, rel=1e-3)
    assert chip.total("update") / GIB == pytest.approx(stays + 1 + 8, rel=1e-3)  # without KV cache
    assert result.kv_cache.requested == result.kv_cache.max_concurrency == 64
    assert result.kv_cache.tokens == 64 * 1024
    parts = {part.name: part for part in result.lower_bound.parts}
    assert set(parts) == {"decoding", "policy update"} and parts["decoding"].times == 768
    assert parts["decoding"].seconds == pytest.approx(768 * 2 * GIB / CHIPS["v4"].bandwidth)  # 8 GiB over 4 chips
    assert [program.kind for program in result.programs] == ["update", "prefill", "decode", "sync"]


def test_a_sampler_on_chips_of_its_own():
    made = tunix(
        hardware={"accelerator": "v6e-8", "trainer_devices": 4, "sampler_devices": 4},
        training={"micro_batch_size": 32},
    )
    trains, samples = preflight.examine(made, stand_in()).chips
    assert "sync: one weight" in {line.name for line in trains.lines}
    names = {line.name for line in samples.lines}
    assert {"sampler weights", "KV cache", "sync: arriving weight", "reserve"} <= names
    assert not names & {"actor weights", "sync: one weight"}


def test_an_evaluation_that_samples_more_at_once_is_pointed_out():
    made = tunix(rollout={"micro_batch_size": 2}, evaluation={"batch_size": 17})
    note = next(note for note in preflight.examine(made, stand_in()).notes if "evaluation" in note)
    assert "evaluation.batch_size=16" in note  # 8 rows of 256 tokens


def test_the_kv_cache_is_counted_in_tokens():
    result = preflight.examine(recipe(), stand_in())
    # 4 key-value heads over 8 chips: one to a chip; keys and values of 10 layers, 128 numbers of 2 bytes
    assert result.kv_cache.tokens == result.kv_cache.bytes // (2 * 10 * 1 * 128 * 2)
    assert result.kv_cache.max_concurrency == result.kv_cache.tokens // 1024
    assert result.kv_cache.requested == 128


def test_trainer_and_sampler_apart_have_a_table_each():
    made = recipe(hardware={"trainer_devices": 4, "sampler_devices": 4, "sampler_tensor": 2})
    result = preflight.examine(made, stand_in())
    trains, samples = result.chips
    assert (trains.role, samples.role) == ("trains", "samples")
    assert not {line.name for line in trains.lines} & {"sampler weights", "KV cache"}
    assert all(sum(line.name == "reserve" for line in chip.lines) == 1 for chip in (trains, samples))
    weights = next(line for line in samples.lines if line.name == "sampler weights")
    assert weights.bytes == 4 * GIB  # half of the model: two replicas of two chips
    assert result.notes[0].startswith("the trainer's 4 of 8 chips were compiled as a v6e-4")


@pytest.mark.parametrize(
    "fraction, beta, gib",
    [(0.9, 0, 0.9 * 31.24), (0.9, 0.1, 0.9 * 31.24), (0.97, 0, 0.98 * 31.24 - 1), (0.97, 0.1, 0.98 * 31.24 - 2)],
)
def test_the_memory_fraction_is_added_to_what_was_there(fraction, beta, gib):
    """Actor and reference, 1 GiB each, are on the chip when the engine starts; with it they take 98 % at most."""
    made = recipe(rollout={"vllm": {"memory_fraction": fraction}}, grpo={"beta": beta})
    assert preflight.examine(made, stand_in()).kv_cache.bytes / GIB == pytest.approx(gib - 1)  # without its weights


@pytest.mark.parametrize(
    "message, gib",
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 37.02G of 31.24G hbm. Exceeded", 37.02 - 15),
        ("the total memory required for HLO temporaries (180.00G) exceeds available HBM (31.24G)", 180),
        ("the total memory required for HLO temporaries (512.00M) exceeds available HBM (256.00M)", 0.5),
    ],
)
def test_the_out_of_memory_message_is_parsed(message, gib):
    assert bytes_needed(message, arguments=15 * GIB) == pytest.approx(gib * GIB)
    assert bytes_needed("something else", 0) is None


def test_rollout_micro_batches_sample_fewer_at_once_and_decode_as_often():
    made = recipe(rollout={"micro_batch_size": 4})
    result = preflight.preflight(made, stand_in(activations_gib=0.1))
    assert result.kv_cache.requested == 32  # 4 prompts of 8
    assert {part.name: part.times for part in result.lower_bound.parts}["decoding"] == 4 * 768
    slots = recipe(rollout={"micro_batch_size": 4, "vllm": {"options": {"max_num_seqs": 16}}})
    bound = preflight.preflight(slots, stand_in(activations_gib=0.1)).lower_bound
    assert {part.name: part.times for part in bound.parts}["decoding"] == 4 * 2 * 768


def test_a_cache_that_holds_no_sequence_does_not_fit():
    made = recipe(rollout={"vllm": {"memory_fraction": 0.03}})
    result = preflight.preflight(made, stand_in(activations_gib=0.1))
    assert "KV cache would hold" in result.problem
    assert not result.fits and any(hint.startswith("rollout.vllm.memory_fraction=") for hint in result.hints)


def test_a_recipe_that_does_not_fit_gets_hints_in_order():
    result = preflight.preflight(recipe(), stand_in(activations_gib=3.0))  # 128 sequences, 16 to a chip: 48 GiB
    assert not result.fits and result.lower_bound is None
    assert result.problem.startswith("the compiler runs out of memory in the policy update")
    keys = [hint.partition("=")[0].partition(":")[0] for hint in result.hints]
    assert keys[0] == "training.micro_batch_size" and keys[-1] == "hardware.accelerator"
    assert keys.index("model.remat") < keys.index("rollout.max_completion_length")
    assert all(hint in table(result) for hint in result.hints)
    fits = recipe(training={"micro_batch_size": 32})  # the first hint, twice
    assert preflight.preflight(fits, stand_in(activations_gib=3.0)).hints == ()


def test_the_lower_bound_by_hand():
    """Per chip: layers add 1e12 flops and 2e9 bytes to 1e12 and 5e9; ten layers."""
    result = preflight.preflight(
        recipe(training={"micro_batch_size": 32, "steps": 100}, grpo={"beta": 0.1}), stand_in()
    )
    chip = CHIPS["v6e"]
    parts = {part.name: part for part in result.lower_bound.parts}
    assert parts["policy update"].work == roofline.Work(flops=11e12, traffic=25e9)
    assert parts["policy update"].times == 4 and parts["log-probabilities"].times == 4
    assert parts["policy update"].seconds == pytest.approx(4 * 25e9 / chip.bandwidth)
    assert parts["policy update"].bound == "memory"
    assert parts["decoding"].seconds == pytest.approx(768 * GIB / chip.bandwidth)  # 8 GiB over 8 chips
    assert result.lower_bound.seconds == pytest.approx(sum(part.seconds for part in parts.values()))
    assert result.lower_bound.chip_hours == pytest.approx(8 * 100 * result.lower_bound.seconds / 3600)


def test_every_shipped_recipe_has_a_result_that_still_holds(root):
    paths = sorted((root / "recipes").rglob("*.yaml"))
    names = [f"{path}{profile}" for path in paths for profile in ("", *(f"@{name}" for name in profiles_of(path)))]
    shipped = [one for one in map(load_recipe, names) if one.hardware.accelerator]
    assert len(shipped) >= 8
    for one in shipped:
        result = saved_result(one)
        assert result.fits and result.lower_bound and result.versions["libtpu"], one.name
    for result in saved_results():  # also of several profiles together
        assert saved_result(load_recipe(root / result.command.removeprefix("grpo preflight "))) == result


def test_a_result_is_stale_when_a_value_that_matters_changes():
    shipped = load_recipe(SMOKE)
    changed = load_recipe(SMOKE, [f"training.steps={shipped.training.steps + 1}"])
    with pytest.raises(CourseError, match=r"has changed since.*grpo preflight"):
        saved_result(changed)
    with pytest.raises(CourseError, match=r"does not exist"):
        saved_result(shipped.model_copy(update={"name": "mine"}))
    assert saved_result(load_recipe(SMOKE, ["training.learning_rate=1e-9", "seed=5"]))


def test_recipes_made_too_large_are_saved_with_hints(root):
    refused = [preflight.read_result(path) for path in (root / preflight.SAVED).glob("refused-*.json")]
    assert len(refused) >= 2
    for result in refused:
        assert not result.fits and result.hints


def test_a_margin_smaller_than_the_weights_is_pointed_out():
    """16 GiB of weights on 8 chips: 2 to a chip.  Two updates a step, and then one."""
    several = recipe(training={"prompts_per_step": 16, "micro_batch_size": 64})
    result = preflight.examine(several, stand_in(weights_gib=16.0, activations_gib=1.6))
    assert 0 < result.margin < 2 * GIB
    short = 2 - result.margin / GIB
    assert any(f"would be {short:.2f} GiB short" in note for note in result.notes)
    one = recipe(training={"prompts_per_step": 8, "micro_batch_size": 64})
    assert not preflight.examine(one, stand_in(weights_gib=16.0, activations_gib=1.6)).notes
