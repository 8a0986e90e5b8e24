"""Preflight without a compiler: sums, hints, saved results.  The real compiler: tests/tpu/stack."""

import pytest
from test_smoke_test import PROFILES, SMOKE

from grpo_lib.common.errors import CourseError
from grpo_train.recipes import load_recipe, parse_recipe
from grpo_train.recipes.slices import CHIPS
from grpo_train.tpu import preflight, roofline
from grpo_train.tpu.compile_jobs import GIB, Compilation
from grpo_train.tpu.compiler import bytes_needed
from grpo_train.tpu.preflight import programs_of, saved_result, saved_results, table


def recipe(**sections):
    """A colocated recipe on eight v6e chips, 16 prompts of 8 completions; sections are merged into it."""
    data = {
        "name": "made-up",
        "model": {"path": "nowhere", "maxtext_name": "qwen3-1.7b", "dtype": "bfloat16"},
        "hardware": {"accelerator": "v6e-8"},
        "rollout": {"engine": "vllm", "max_prompt_length": 256, "max_completion_length": 768},
        "training": {"steps": 100, "micro_batch_size": 128},
    }
    return parse_recipe(merged(data, sections))


def merged(data, sections):
    """Sections of a recipe with the keys of others on top."""
    return data | {name: data.get(name, {}) | values for name, values in sections.items()}


def stand_in(weights_gib=8.0, temporaries_gib=4.0, oom_message=None):
    """A compiler for eight chips, to which every program is of one size; an update has twice the temporaries, and
    work grows with the layers.  What the real one reports is in assets/preflight."""
    shard = int(weights_gib * GIB) // 8
    temporaries = int(temporaries_gib * GIB)
    sizes = {
        "parameters": 4 * shard, "parameter_bytes": 8 * shard, "parameter_shard": shard, "optimizer_shard": 3 * shard,
        "sampler_shard": shard, "num_layers": 10, "kv_heads": 4, "head_dim": 128, "vocabulary": 1000, "width": 1000,
        "largest_weight": shard,
    }  # fmt: skip

    def compile(program):
        layers = program.layers or 10
        work = {"flops": 1e12 * (1 + layers), "traffic": 1e9 * (5 + 2 * layers)}
        if program.kind != "update":
            return Compilation(arguments=2 * shard, temporaries=temporaries, oom_message=oom_message, **sizes, **work)
        update = {"arguments": 4 * shard, "outputs": 4 * shard, "aliased": 3 * shard, "temporaries": 2 * temporaries}
        return Compilation(oom_message=oom_message, **update, **sizes, **work)

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


@pytest.mark.parametrize("saved", saved_results(), ids=lambda saved: saved.name)
def test_a_saved_result_follows_from_what_the_compiler_reported(root, saved):
    """The real compiler's reports on every shipped recipe go through the sums again."""
    made = load_recipe(root / saved.command.removeprefix("grpo preflight "))
    reports = {program.kind: program.compilation for program in saved.programs}
    again = preflight.examine(made, lambda program: reports.get(program.kind, Compilation()))
    assert (again.chips, again.kv_cache, again.problem) == (saved.chips, saved.kv_cache, None)
    # The recipe, also with several profiles together, has not changed since.
    assert saved_result(made) == saved
    assert saved.fits
    assert saved.lower_bound


def test_memory_adds_up_by_hand():
    """8 GiB of weights on 8 chips, KL penalty, two micro-batches."""
    result = preflight.examine(
        recipe(grpo={"beta": 0.1}, training={"micro_batch_size": 64}, rollout={"vllm": {"memory_fraction": 0.5}}),
        stand_in(),
    )
    (chip,) = result.chips
    gib = {line.name: line.bytes / GIB for line in chip.lines}
    assert gib["actor weights"] == gib["reference weights"] == gib["update: new weights"] == 1
    assert gib["sampler weights"] == gib["sync: arriving weights"] == 1  # one replica over eight chips
    assert (gib["optimizer state, gradients"], gib["update: temporaries"]) == (3, 8)
    stays = 1 + 3 + 1 + 1 + 0.02 * 31.24
    cache = 0.5 * 31.24 - 1
    assert gib["KV cache"] == pytest.approx(cache)
    assert chip.total("update") / GIB == pytest.approx(stays + cache + 1 + 8)
    assert chip.total("log-probabilities") / GIB == pytest.approx(stays + cache + 4)
    assert chip.total("sync") / GIB == pytest.approx(stays + 1 + 1)  # the engine has freed its cache
    assert chip.phase == "update"
    assert result.margin / GIB == pytest.approx(31.24 - chip.total("update") / GIB)


def test_a_watched_base_is_on_the_chips_for_its_log_probabilities_only():
    """Adapters have it on the chips anyway.  With a penalty, which measures the KL, the key changes nothing."""
    watched = {"watch_kl": 10}
    result = preflight.preflight(recipe(grpo=watched), stand_in())
    (chip,) = result.chips
    gib = {line.name: line.bytes / GIB for line in chip.lines if line.phases == ("log-probabilities",)}
    assert gib == {"log-probabilities: base weights": 1, "log-probabilities: temporaries": 4}
    assert "grpo.watch_kl keeps the base in the hosts' memory: 8.0 GiB on each" in result.notes
    assert [part.name for part in result.lower_bound.parts] == ["decoding", "policy update"]

    adapters = preflight.examine(recipe(grpo=watched, lora={"rank": 4}), stand_in())
    assert not any("base weights" in line.name for line in adapters.chips[0].lines)
    assert preflight.digest(recipe(grpo=watched)) != preflight.digest(recipe(grpo={}))
    penalty = {"beta": 0.1}
    assert preflight.digest(recipe(grpo=watched | penalty)) == preflight.digest(recipe(grpo=penalty))


def tunix(**sections):
    """Two hosts of four chips; each samples 8 of the 16 prompts, 64 completions, on one replica of its four chips."""
    data = {
        "hardware": {"accelerator": "v4-16", "sampler_tensor": 4},
        "rollout": {"engine": "tunix"},
        "evaluation": {"batch_size": 64},
    }
    return recipe(**merged(data, sections))


def test_each_process_samples_on_its_own_devices():
    programs = programs_of(tunix(grpo={"beta": 0.1}, loss={"implementation": "pallas"}))
    assert list(programs) == ["update", "logps", "prefill", "decode"]
    prefill = programs["prefill"]
    decode = programs["decode"]
    assert (prefill.accelerator, prefill.devices, prefill.tensor, prefill.sequences) == ("v4-8", 4, 4, 64)
    assert decode == prefill.model_copy(update={"kind": "decode"})
    # Rows are filled up for the replicas: 3 prompts of 3 completions on four replicas.
    odd = tunix(hardware={"accelerator": "v6e-4", "sampler_tensor": 1}, grpo={"group_size": 3},
                training={"prompts_per_step": 4, "micro_batch_size": 12}, rollout={"micro_batch_size": 1})  # fmt: skip
    assert programs_of(odd)["prefill"].sequences == 4
    with pytest.raises(CourseError, match="sampler_tensor=8"):
        programs_of(tunix(hardware={"sampler_tensor": 8}))


def test_of_vllm_the_attention_kernel_of_a_replica_is_compiled():
    made = recipe(rollout={"vllm": {"options": {"max_num_seqs": 64}}}, hardware={"sampler_tensor": 4})
    assert list(programs_of(made)) == ["update", "attention"]
    kernel = programs_of(made)["attention"]
    assert (kernel.accelerator, kernel.devices, kernel.tensor, kernel.sequences) == ("v6e-4", 4, 4, 64)
    assert (kernel.tokens, kernel.page_size) == (2048, None)
    line = "compiled, too: vLLM attention kernel of 64 x 1024 tokens, 4 devices of v6e-4"
    assert line in table(preflight.preflight(made, stand_in())).splitlines()


def test_a_sampler_on_chips_of_its_own():
    made = tunix(
        hardware={"accelerator": "v6e-8", "trainer_devices": 4, "sampler_devices": 4},
        training={"micro_batch_size": 32},
    )
    trains, samples = (
        {line.name: line.bytes / GIB for line in chip.lines} for chip in preflight.examine(made, stand_in()).chips
    )
    assert trains.keys() >= {"actor weights", "reserve"}
    assert not trains.keys() & {"sampler weights", "KV cache"}
    assert samples.keys() >= {"sampler weights", "KV cache", "reserve"}
    assert "actor weights" not in samples
    assert trains["sync: one weight"] == samples["sync: one weight"] == 1 + 1 / 4  # whole, and its part on four chips


def test_an_evaluation_that_samples_more_at_once_is_pointed_out():
    made = tunix(rollout={"micro_batch_size": 2}, evaluation={"batch_size": 17})
    notes = preflight.examine(made, stand_in()).notes
    assert any("evaluation.batch_size=16" in note for note in notes)  # 8 rows of 256 tokens


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


@pytest.mark.parametrize(("slots", "rounds"), [(256, 4), (16, 4 * 2)])
def test_rollout_micro_batches_sample_fewer_at_once_and_decode_as_often(slots, rounds):
    rollout = {"micro_batch_size": 4, "vllm": {"options": {"max_num_seqs": slots}}}
    result = preflight.preflight(recipe(rollout=rollout), stand_in(temporaries_gib=0.1))
    assert result.kv_cache.requested == min(slots, 32)  # 4 prompts of 8
    assert {part.name: part.times for part in result.lower_bound.parts}["decoding"] == rounds * 768


def test_a_cache_that_holds_no_sequence_does_not_fit():
    made = recipe(rollout={"vllm": {"memory_fraction": 0.03}})
    result = preflight.preflight(made, stand_in(temporaries_gib=0.1))
    assert not result.fits
    assert "KV cache" in result.problem
    assert any(hint.startswith("rollout.vllm.memory_fraction=") for hint in result.hints)


@pytest.mark.parametrize("reported", [{"oom_message": "RESOURCE_EXHAUSTED"}, {"temporaries_gib": 16.0}])
def test_a_recipe_that_does_not_fit_gets_hints_in_order(reported):
    result = preflight.preflight(recipe(), stand_in(**reported))
    assert not result.fits
    assert result.lower_bound is None
    keys = [hint.partition("=")[0].partition(":")[0] for hint in result.hints]
    assert keys[0] == "training.micro_batch_size"
    assert keys[-1] == "hardware.accelerator"
    assert keys.index("model.remat") < keys.index("rollout.max_completion_length")
    for line in (result.problem, *result.hints):
        assert line in table(result)


def test_the_lower_bound_by_hand():
    """Per chip: layers add 1e12 flops and 2e9 bytes to 1e12 and 5e9; ten layers."""
    made = recipe(training={"micro_batch_size": 32, "steps": 100}, grpo={"beta": 0.1})
    bound = preflight.preflight(made, stand_in(temporaries_gib=0.1)).lower_bound
    chip = CHIPS["v6e"]
    parts = {part.name: part for part in bound.parts}
    update = parts["policy update"]
    assert (update.work, update.bound) == (roofline.Work(flops=11e12, traffic=25e9), "memory")
    # Only its FLOPs are a bound; of decoding the weights that it reads.
    chip = made.hardware.slice.chip
    assert roofline.at_least(update, chip) == pytest.approx(update.times * 11e12 / chip.flops)
    assert roofline.at_least(parts["decoding"], chip) == parts["decoding"].seconds
    assert update.times == parts["log-probabilities"].times == 4
    assert update.seconds == pytest.approx(4 * 25e9 / chip.bandwidth)
    assert parts["decoding"].seconds == pytest.approx(768 * GIB / chip.bandwidth)  # 8 GiB over 8 chips
    assert bound.seconds == pytest.approx(sum(part.seconds for part in parts.values()))
    assert bound.chip_hours == pytest.approx(8 * 100 * bound.seconds / 3600)


def test_every_shipped_recipe_has_a_result():
    made = [recipe for recipe in map(load_recipe, PROFILES) if recipe.hardware.accelerator]
    assert len({saved_result(recipe).name for recipe in made}) >= 20


def test_a_result_is_stale_when_a_value_that_matters_changes():
    shipped = saved_result(load_recipe(SMOKE))
    assert saved_result(load_recipe(SMOKE, ["training.learning_rate=1e-9", "seed=5"])) == shipped
    assert saved_result(load_recipe(SMOKE, ["name=mine", "rewards=[random_reward]"])) == shipped
    fewer = saved_result(load_recipe(SMOKE, ["training.steps=7"]))
    assert fewer.steps == 7 and fewer.lower_bound and shipped.lower_bound
    assert fewer.lower_bound.chip_hours == pytest.approx(shipped.lower_bound.chip_hours * 7 / shipped.steps)
    for change in ("rollout.max_completion_length=640", "training.optimizer=lion"):
        with pytest.raises(CourseError, match=r"grpo preflight.*json"):
            saved_result(load_recipe(SMOKE, [change]))


def test_a_margin_smaller_than_the_weights_is_pointed_out():
    """16 GiB of weights on 8 chips: 2 to a chip.  Two updates a step, and then one."""
    compiler = stand_in(weights_gib=16.0, temporaries_gib=6.4)
    two_updates = recipe(training={"prompts_per_step": 16, "micro_batch_size": 64})
    result = preflight.examine(two_updates, compiler)
    assert 0 < result.margin < 2 * GIB
    assert any(f"would be {2 - result.margin / GIB:.2f} GiB short" in note for note in result.notes)
    one_update = recipe(training={"prompts_per_step": 8, "micro_batch_size": 64})
    assert not any(" short" in note for note in preflight.examine(one_update, compiler).notes)


def test_a_checkpoint_is_counted_without_the_sum_of_gradients():
    """8 GiB of weights, 16 of moments and 8 of the sum, which is zero when it is saved, and compressed."""
    several = recipe(training={"prompts_per_step": 16, "micro_batch_size": 64})
    notes = preflight.examine(several, stand_in()).notes
    assert any(note.startswith("a checkpoint takes about 26 GB;") for note in notes)


def test_what_fits_by_less_than_a_twentieth_is_tight_and_says_what_to_change(root):
    tight = preflight.saved_result(load_recipe(root / "recipes" / "qwen2.5-0.5b-gsm8k.yaml@vllm"))
    roomy = preflight.saved_result(load_recipe(root / "recipes" / "llama3.1-8b-gsm8k.yaml"))
    assert tight.fits and tight.is_tight and tight.hints
    text = preflight.table(tight)
    assert "TIGHT: 0.45 GiB left" in text and tight.hints[0] in text
    assert roomy.fits and roomy.margin >= 0.05 * roomy.tightest.usable
    assert "FITS:" in preflight.table(roomy)
