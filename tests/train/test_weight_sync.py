"""Weights arrive in the sampler, both sides agree, and a run refuses to go on when they do not."""

import numpy as np
import pytest
from flax import nnx

from grpo_lib.common.errors import CourseError
from grpo_train.engines import maxtext_model
from grpo_train.engines.weight_sync import check_sync

pytestmark = pytest.mark.slow

PROMPTS = [f"<|im_start|>user\nAna has {n} cards.<|im_end|>\n<|im_start|>assistant\n" for n in range(3, 11)]


@pytest.fixture
def logps(tiny_actor):
    return lambda prompt_ids, ids: maxtext_model.per_token_logps(tiny_actor, prompt_ids, ids, pad_id=0, eos_id=1)


def replace_weight(sampler, name, change):
    """Change one weight inside the sampler, as a faulty sync would."""
    flat = dict(sampler._sampler.transformer_state.flat_state())
    for path, variable in flat.items():
        if ".".join(map(str, path)) == name:
            flat[path] = variable.replace(change(variable.get_value()))
    sampler._sampler.transformer_state = nnx.State.from_flat_path(flat)


@pytest.mark.parametrize("name", ["layers.2.attn.q_proj.w", "final_norm.w", "embedder.input_embedding"])
def test_a_weight_that_did_not_arrive_is_named(sampler, tiny_actor, rollout_config, logps, name):
    replace_weight(sampler, name, lambda value: value * 1.5)
    with pytest.raises(CourseError, match=name.replace(".", r"\.")):
        check_sync(sampler, tiny_actor.weights(), PROMPTS, rollout_config, logps)


def test_a_weight_that_is_read_wrongly_shows_as_a_gap(sampler, tiny_actor, rollout_config, logps):
    """Every weight is equal, and yet the two do not compute the same: arrival alone is not enough."""
    with pytest.raises(CourseError, match=r"sampler and trainer disagree.*limit"):
        check_sync(sampler, tiny_actor.weights(), PROMPTS, rollout_config, lambda p, c: np.asarray(logps(p, c)) - 0.5)
    with pytest.raises(CourseError, match="disagree"):
        check_sync(sampler, tiny_actor.weights(), PROMPTS, rollout_config, lambda p, c: np.full(c.shape, np.nan))


def test_all_prompts_are_compared_though_few_are_sampled_at_once(sampler, tiny_actor, rollout_config, logps):
    rows = []

    def counted(prompt_ids, ids):
        rows.append(len(ids))
        return logps(prompt_ids, ids)

    check = check_sync(sampler, tiny_actor.weights(), PROMPTS, rollout_config, counted, at_once=3)
    assert rows == [3, 3, 2]
    assert check.tokens >= len(PROMPTS)
    assert check.mean_gap < 5e-3
