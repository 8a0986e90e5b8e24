"""The benchmarks: the floor computes the model that Tunix computes, and the programs say how they are used."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4, 128, 384, 2, 1, 64, 256
PAD, EOS = 0, 1


@pytest.fixture(scope="module")
def benchmarks():
    """The folder's modules import each other by name, as they do when run."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A Qwen3 of the tiny model's sizes with random weights, in Hugging Face layout."""
    from safetensors.numpy import save_file

    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("model")

    def matrix(out: int, into: int) -> np.ndarray:
        return rng.normal(size=(out, into), scale=into**-0.5).astype(np.float32)

    def scale(size: int) -> np.ndarray:  # not all ones, or a forgotten scale would go unnoticed
        return rng.uniform(0.5, 1.5, size).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN), "model.norm.weight": scale(HIDDEN)}
    for index in range(LAYERS):
        layer = {
            "input_layernorm": scale(HIDDEN),
            "post_attention_layernorm": scale(HIDDEN),
            "self_attn.q_proj": matrix(HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": matrix(HIDDEN, HEADS * HEAD_DIM),
            "self_attn.q_norm": scale(HEAD_DIM),
            "self_attn.k_norm": scale(HEAD_DIM),
            "mlp.gate_proj": matrix(FFN, HIDDEN),
            "mlp.up_proj": matrix(FFN, HIDDEN),
            "mlp.down_proj": matrix(HIDDEN, FFN),
        }
        tensors |= {f"model.layers.{index}.{name}.weight": value for name, value in layer.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tunix_logits(directory):
    """Tunix's own Qwen3 with the same weights, read by Tunix's own loader: tokens [B, T] -> logits [B, T, V]."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3
    from tunix.models.qwen3 import params

    config = qwen3.ModelConfig(
        num_layers=LAYERS, vocab_size=VOCABULARY, embed_dim=HIDDEN, hidden_dim=FFN, num_heads=HEADS,
        head_dim=HEAD_DIM, num_kv_heads=KV_HEADS, rope_theta=1_000_000, norm_eps=1e-6, use_tied_embedding=True,
    )  # fmt: skip
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    model = params.create_model_from_safe_tensors(str(directory), config, mesh, dtype=jnp.float32)
    graph, state = nnx.split(model)

    @jax.jit
    def logits(tokens):
        valid = tokens != PAD
        length = tokens.shape[1]
        mask = jnp.tril(jnp.ones((length, length), bool))[None] & valid[:, None]
        return nnx.merge(graph, state)(tokens, jnp.maximum(jnp.cumsum(valid, 1) - 1, 0), None, mask)[0]

    with mesh:
        yield logits


def random_tokens(rows: int, prompt: int, completion: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts of different lengths, padded on the left, and completions padded on the right."""
    rng = np.random.default_rng(1)
    prompts, completions = rng.integers(2, VOCABULARY, (rows, prompt)), rng.integers(2, VOCABULARY, (rows, completion))
    for row in range(rows):
        prompts[row, : rng.integers(0, prompt // 2)] = PAD
        completions[row, rng.integers(completion // 2, completion + 1) :] = PAD
    return prompts.astype(np.int32), completions.astype(np.int32)


def test_log_probabilities_agree_with_tunix(benchmarks, directory, tunix_logits) -> None:
    import hand_jitted
    import jax

    weights, sizes = hand_jitted.load_model(directory)
    assert sizes == hand_jitted.Sizes(LAYERS, HEADS, KV_HEADS, HEAD_DIM, 1e6, 1e-6, PAD, EOS)
    prompts, completions = random_tokens(6, 12, 10)
    ours = np.asarray(hand_jitted.completion_logps(weights, sizes, prompts, completions))
    logps = jax.nn.log_softmax(tunix_logits(np.concatenate([prompts, completions], 1))[:, 11:-1])
    theirs = np.take_along_axis(np.asarray(logps), completions[..., None], -1)[..., 0]
    real = completions != PAD
    np.testing.assert_allclose(ours[real], theirs[real], atol=1e-4)


def test_greedy_sampling_agrees_with_tunix(benchmarks, directory, tunix_logits) -> None:
    import hand_jitted
    import jax

    weights, sizes = hand_jitted.load_model(directory)
    prompts, _ = random_tokens(6, 12, 1)
    ours = hand_jitted.sample(weights, sizes, prompts, jax.random.PRNGKey(0), length=10, temperature=0)
    # Tunix's model without a cache: all tokens again for each new one.
    tokens, done = np.pad(prompts, ((0, 0), (0, 10))), np.zeros(6, bool)
    for index in range(12, 22):
        chosen = np.asarray(tunix_logits(tokens))[:, index - 1].argmax(-1)
        tokens[:, index] = np.where(done, PAD, chosen)
        done |= chosen == EOS
    np.testing.assert_array_equal(np.asarray(ours), tokens[:, 12:])


def test_sampling_stops_at_the_end_token(benchmarks, directory) -> None:
    import hand_jitted
    import jax

    weights, sizes = hand_jitted.load_model(directory)
    prompts, _ = random_tokens(6, 12, 1)
    key = jax.random.PRNGKey(0)
    free = np.asarray(hand_jitted.sample(weights, sizes, prompts, key, length=10, temperature=0))
    # Make a token that the model does write the end token.
    sizes = dataclasses.replace(sizes, eos=int(free[0, 3]))
    stopped = np.asarray(hand_jitted.sample(weights, sizes, prompts, key, length=10, temperature=0))
    for with_end, without in zip(stopped, free, strict=True):
        ends = np.flatnonzero(without == sizes.eos)
        stop = ends[0] + 1 if len(ends) else 10
        np.testing.assert_array_equal(with_end[:stop], without[:stop])
        assert (with_end[stop:] == PAD).all()


def test_update_makes_a_rewarded_completion_more_likely(benchmarks, directory) -> None:
    import hand_jitted
    import optax

    weights, sizes = hand_jitted.load_model(directory)
    prompts, completions = random_tokens(4, 12, 10)
    optimizer = optax.adam(1e-3)
    update = hand_jitted.make_update(optimizer, sizes, epsilon=0.2, temperature=1.0)
    advantages = hand_jitted.group_advantages(np.array([1, 0, 0, 1], np.float32), group_size=2)
    np.testing.assert_allclose(advantages, [0.7071, -0.7071, -0.7071, 0.7071], atol=1e-4)

    def mean_logps(weights):
        logps = np.asarray(hand_jitted.completion_logps(weights, sizes, prompts, completions))
        return (logps * (completions != PAD)).sum(1) / (completions != PAD).sum(1)

    before = mean_logps(weights)
    weights, _, _ = update(weights, optimizer.init(weights), prompts, completions, advantages)
    change = mean_logps(weights) - before
    assert (np.sign(change) == np.sign(advantages)).all()


def test_summary_takes_ratios_within_rounds(benchmarks) -> None:
    import step_time

    def result(seconds: float) -> dict:
        return {
            "seconds": [9.0, 9.0, 9.0, seconds, seconds, 5.0, seconds],
            "seconds_rollout": [0.1] * 7,
            "seconds_update": [0.2] * 7,
            "reward": [0.1] * 7,
            "completion_length": [17.0] * 7,
            "process_seconds": 30.0,
            "peak_memory_gib": 1.0,
            "versions": {"python": "3.12.1"},
        }

    rounds = [{"course": result(a), "hand_jitted": result(b)} for a, b in ((1.0, 1.0), (2.2, 2.0), (1.2, 1.0))]
    summary = step_time.summarize(rounds)
    assert summary["ratios"] == {"course/hand_jitted": {"median": 1.1, "min": 1.0, "max": 1.2}}
    assert summary["seconds_per_step"]["course"] == [1.0, 2.2, 1.2]
    assert "1.100  1.000–1.200" in step_time.table(summary)


def test_job_survives_its_file(benchmarks, tmp_path) -> None:
    from job import Job

    job = Job("model", "checkpoint", {"seed": 0}, 44, [["question — 1"], ["question 2"]], [["1"], ["2"]])
    job.save(tmp_path / "job.json")
    assert Job.load(tmp_path / "job.json") == job
    assert job.steps == 2


def test_parity_counts_both_graders_and_texts(benchmarks) -> None:
    import export_parity

    records = [{"completion": f"<reasoning>r</reasoning><answer>{n}</answer>", "gold": "3"} for n in (3, 3, 4, 5)]
    completions = [records[0]["completion"], "nothing", records[2]["completion"], records[0]["completion"]]
    found = export_parity.compare(records, completions)
    assert found == {
        "n": 4, "identical_completions": 0.5, "actor_accuracy": 0.5, "export_accuracy": 0.5, "difference": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "program",
    [
        "step_time.py",
        "hand_jitted.py",
        "course_grpo.py",
        "trl_grpo.py",
        "trl_environment.py",
        "export_parity.py",
        "grading.py",
        "policy_loss.py",
        "run_overhead.py",
    ],
)
def test_help(program: str) -> None:
    done = subprocess.run([sys.executable, str(BENCHMARKS / program), "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:")


def test_step_time_refuses_too_few_steps() -> None:
    command = [sys.executable, str(BENCHMARKS / "step_time.py"), "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--steps more than 3" in done.stderr


def test_parity_names_what_is_missing(tmp_path) -> None:
    command = [sys.executable, str(BENCHMARKS / "export_parity.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and str(tmp_path / "export") in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_lock_of_the_peer_holds_no_cuda_and_no_addresses() -> None:
    text = (ROOT / "requirements" / "trl.lock").read_text(encoding="utf-8")
    assert not re.search(r"^(torch|triton|nvidia|cuda)", text, re.MULTILINE)
    assert "://" not in text
    names = re.findall(r"^([a-z0-9-]+)==", text, re.MULTILINE)
    assert len(names) == len(set(names)) == text.count("==")
    assert text.count("--hash=sha256:") >= len(names)
