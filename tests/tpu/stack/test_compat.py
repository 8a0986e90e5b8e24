"""A fault of upstream that grpo_train/engines/compat.py works around; the others are next to what they disturb."""

import importlib.util
import re
from pathlib import Path


def test_upstream_still_takes_no_seed_with_a_request():
    """tpu-inference 0.31.0: its runner reads the engine's seed alone.  When this fails, compat.set_noise may go."""
    package = Path(importlib.util.find_spec("tpu_inference").submodule_search_locations[0])
    files = [*package.glob("runner/**/*.py"), *package.glob("layers/jax/sample/*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    assert "rng_params_for_sampling" in text
    assert set(re.findall(r"(\w+)\.seed\b", text)) == {"model_config", "random"}  # the latter is the function
