"""MaxText's own train_rl, unmodified, on the arguments that `grpo config --as maxtext` prints; vLLM on the CPU."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm_on_cpu

from grpo_lib import upstream

ROOT = Path(__file__).parents[2]
RECIPE = [
    "recipes/tiny-cpu.yaml", "training.steps=20", "training.learning_rate=3e-4", "problems.test=512",
    "evaluation.batch_size=256", "rollout.engine=vllm", "rollout.vllm.block_size=16",
]  # fmt: skip
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
PERCENT = re.compile(r"(Pre|Post) RL Training: corr=(\d+), total=(\d+),.*format_accuracy=([\d.]+)%")


def run(*command: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=ENVIRONMENT | variables, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[dict[str, tuple[int, int, float]], Path, str]:
    """({"Pre" and "Post": (right, all, percent in the format)}, upstream's run, its log)."""
    runs = tmp_path_factory.mktemp("runs")
    converted = run("-m", "grpo_lib.cli", "convert", *RECIPE, "--runs", str(runs))
    assert converted.returncode == 0, converted.stderr
    printed = run(
        "-m", "grpo_lib.cli", "config", *RECIPE, "--as", "maxtext", "--json",
        "--problems", str(runs / "problems"), "--runs", str(runs),
    )  # fmt: skip
    assert printed.returncode == 0, printed.stderr
    arguments = json.loads(printed.stdout.splitlines()[-1])["arguments"]
    done = run(str(ROOT / "tests" / "tpu" / "vllm_on_cpu.py"), "-m", "grpo_lib.upstream", *arguments)
    log = done.stdout + done.stderr
    (runs / "train_rl.log").write_text(log)
    assert done.returncode == 0, log[-4000:]
    found = {when: (int(right), int(n), float(form)) for when, right, n, form in PERCENT.findall(log)}
    return found, runs / "tiny-cpu" / "upstream" / "tiny-cpu", log


def test_twenty_steps_lift_the_accuracy(finished):
    """Measured by upstream's own evaluation and grader."""
    found, _, log = finished
    assert found.keys() == {"Pre", "Post"}, log[-4000:]
    (before, n, _), (after, _, form) = found["Pre"], found["Post"]
    assert n == 512
    assert before / n < 0.6  # our own evaluation of the base says 43.9 % of 1,000
    assert after / n > 0.86
    assert form > 95  # our rewards and our prompt were used: upstream's own would teach another template


def test_it_leaves_checkpoints_as_the_recipe_says(finished):
    _, folder, _ = finished
    assert sorted(int(path.name) for path in (folder / "checkpoints" / "actor").iterdir()) == [10, 20]


def test_tunix_does_without_wandb_where_it_is_hidden(monkeypatch, tmp_path):
    from tunix.sft.metrics_logger import MetricsLoggerOptions

    monkeypatch.setitem(sys.modules, "wandb", sys.modules.get("wandb"))
    upstream.hide_wandb()
    backends = MetricsLoggerOptions(log_dir=str(tmp_path)).create_backends()
    for backend in backends:
        backend.close()
    assert [type(backend).__name__ for backend in backends] == ["TensorboardBackend"]


def test_upstream_still_needs_the_missing_options():
    """Fails on the day Tunix has them: then add_missing_options goes."""
    from tunix.generate.vllm_sampler import VllmConfig
    from tunix.rl.rollout.base_rollout import RolloutConfig

    for name in upstream.MISSING_OPTIONS:
        assert name not in inspect.signature(VllmConfig).parameters
        assert f"rollout_vllm_{name}" not in RolloutConfig.__dataclass_fields__


def test_without_the_missing_options_upstream_stops():
    """MaxText reads exactly these two and hands exactly these two on."""
    text = (upstream._maxtext_folder() / "integration" / "vllm" / "maxtext_vllm_rollout.py").read_text()
    read = set(re.findall(r"rollout_config\.rollout_vllm_(\w+)", text))
    from tunix.rl.rollout.base_rollout import RolloutConfig

    missing = {name for name in read if f"rollout_vllm_{name}" not in RolloutConfig.__dataclass_fields__}
    # This one MaxText asks for with hasattr first.
    assert missing - {"free_kv_cache_during_weight_sync"} == set(upstream.MISSING_OPTIONS)


def test_upstream_gets_the_mended_head_of_untied_models(monkeypatch):
    if "vllm" not in sys.modules:  # another test may have imported it already
        vllm_on_cpu.install()
    from maxtext.checkpoint_conversion.utils.hf_model_configs import HF_MODEL_CONFIGS
    from maxtext.integration.tunix.tunix_adapter import TunixMaxTextAdapter, VllmWeightMapping

    monkeypatch.setattr(TunixMaxTextAdapter, "to_hf_mappings", TunixMaxTextAdapter.to_hf_mappings)
    name, head = "qwen2.5-7b", "base.decoder.logits_dense.kernel"
    adapter = SimpleNamespace(
        base=SimpleNamespace(config=SimpleNamespace(model_name=name)),
        use_no_op_mappings=False,
        _vllm_weight_mapping=VllmWeightMapping(name, HF_MODEL_CONFIGS[name].to_dict(), True),
    )
    assert TunixMaxTextAdapter.to_hf_mappings(adapter)[head][0] == "model.lm_head"
    upstream.send_untied_head()
    assert TunixMaxTextAdapter.to_hf_mappings(adapter)[head][0] == "lm_head.weight"
