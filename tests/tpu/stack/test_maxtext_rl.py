"""MaxText's own train_rl, unmodified, on the arguments that `grpo config --as maxtext` prints; vLLM on the CPU."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from helpers import result_of

from grpo_train.engines import compat
from grpo_train.tpu import vllm_on_cpu

ROOT = Path(__file__).parents[3]
RECIPE = [
    "recipes/tiny-cpu.yaml", "training.steps=20", "training.learning_rate=3e-4", "problems.test=256",
    "evaluation.batch_size=256", "rollout.engine=vllm", "rollout.vllm.options.block_size=16",
]  # fmt: skip
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
PERCENT = re.compile(r"(Pre|Post) RL Training: corr=(\d+), total=(\d+),.*format_accuracy=([\d.]+)%")


def run(*command: str) -> subprocess.CompletedProcess:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done


def test_twenty_steps_lift_the_accuracy(tmp_path):
    """Measured by upstream's own evaluation and grader."""
    runs = ["--runs", str(tmp_path)]
    run("-m", "grpo_train.cli", "convert", *RECIPE, *runs)
    more = ["--as", "maxtext", "--json", "--problems", str(tmp_path / "problems"), *runs]
    arguments = result_of(run("-m", "grpo_train.cli", "config", *RECIPE, *more))["arguments"]
    done = run("-m", "grpo_train.tpu.vllm_on_cpu", "-m", "grpo_train.maxtext_rl", *arguments)
    log = done.stdout + done.stderr
    found = {when: (int(right), int(n), float(form)) for when, right, n, form in PERCENT.findall(log)}
    assert found.keys() == {"Pre", "Post"}, log[-4000:]
    before, n, _ = found["Pre"]
    after, _, form = found["Post"]
    assert n == 256
    assert before / n < 0.6  # our own evaluation of the base says 43.9 % of 1,000
    assert after / n > 0.86
    assert form > 95  # our rewards and our prompt were used: upstream's own would teach another template
    checkpoints = tmp_path / "tiny-cpu" / "upstream" / "tiny-cpu" / "checkpoints" / "actor"
    assert sorted(int(path.name) for path in checkpoints.iterdir()) == [10, 20]  # as the recipe says


def test_tunix_does_without_wandb_where_it_is_hidden(monkeypatch, tmp_path):
    from tunix.sft.metrics_logger import MetricsLoggerOptions

    monkeypatch.setitem(sys.modules, "wandb", sys.modules.get("wandb"))
    compat.hide_wandb()
    backends = MetricsLoggerOptions(log_dir=str(tmp_path)).create_backends()
    for backend in backends:
        backend.close()
    assert [type(backend).__name__ for backend in backends] == ["TensorboardBackend"]


def test_maxtext_reads_the_missing_options_and_tunix_does_not_have_them():
    """Fails on the day Tunix has them: then compat.add_missing_options can go."""
    from maxtext.utils.globals import MAXTEXT_PKG_DIR
    from tunix.generate.vllm_sampler import VllmConfig
    from tunix.rl.rollout.base_rollout import RolloutConfig

    text = (Path(MAXTEXT_PKG_DIR) / "integration" / "vllm" / "maxtext_vllm_rollout.py").read_text()
    read = set(re.findall(r"rollout_config\.rollout_vllm_(\w+)", text))
    missing = {name for name in read if f"rollout_vllm_{name}" not in RolloutConfig.__dataclass_fields__}
    # This one MaxText asks for with hasattr first.
    assert missing - {"free_kv_cache_during_weight_sync"} == set(compat.MISSING_OPTIONS)
    assert not missing & inspect.signature(VllmConfig).parameters.keys()


def test_upstream_gets_the_mended_head_of_untied_models(monkeypatch):
    if "vllm" not in sys.modules:  # another test may have imported it already
        vllm_on_cpu.install()
    from maxtext.checkpoint_conversion.utils.hf_model_configs import HF_MODEL_CONFIGS
    from maxtext.integration.tunix.tunix_adapter import TunixMaxTextAdapter, VllmWeightMapping

    monkeypatch.setattr(TunixMaxTextAdapter, "to_hf_mappings", TunixMaxTextAdapter.to_hf_mappings)
    name = "qwen2.5-7b"
    head = "base.decoder.logits_dense.kernel"
    adapter = SimpleNamespace(
        base=SimpleNamespace(config=SimpleNamespace(model_name=name)),
        use_no_op_mappings=False,
        _vllm_weight_mapping=VllmWeightMapping(name, HF_MODEL_CONFIGS[name].to_dict(), True),
    )
    assert TunixMaxTextAdapter.to_hf_mappings(adapter)[head][0] == "model.lm_head"
    compat.send_untied_head()
    assert TunixMaxTextAdapter.to_hf_mappings(adapter)[head][0] == "lm_head.weight"
