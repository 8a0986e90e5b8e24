"""What test_sharded_sampler.py runs in a process of its own, with four virtual devices.

It samples with a model on one device, on 4 x 1 and on 2 x 2 (replicas x devices of a replica), and prints one line of
JSON: the texts, the first-sync check, and bytes on a device, counted over live arrays.
"""

import gc
import json

import jax
import numpy as np
from flax import nnx
from tunix.rl.rollout.base_rollout import RolloutConfig

from grpo_train.engines import maxtext_model, weight_sync
from grpo_train.engines.tokens import load_tokenizer
from grpo_train.engines.tunix_sampler import TunixSampler
from grpo_train.recipes import ModelRecipe
from grpo_train.runs import multihost

PROMPTS = [
    f"<|im_start|>user\nAna has {n} cards.<|im_end|>\n<|im_start|>assistant\n" for n in range(3, 9)
]  # 6: no 4 x k
CONFIG = RolloutConfig(
    max_tokens_to_generate=12, max_prompt_length=32, kv_cache_size=44, temperature=1.0, top_p=1.0, top_k=None
)


def bytes_on_a_device() -> int:
    """The largest, over the devices, of what is still used.

    Looking at a shard makes an array of it, so buffers are told apart by address.
    """
    gc.collect()  # samplers that were let go; they have cycles
    shards = [shard for array in jax.live_arrays() for shard in array.addressable_shards]
    buffers = {(shard.device, shard.data.unsafe_buffer_pointer()): shard.data.nbytes for shard in shards}
    return max(sum(size for (place, _), size in buffers.items() if place == device) for device in jax.devices())


def main(path: str, name: str, base: str) -> None:
    model = ModelRecipe(path=path, maxtext_name=name, dtype="float32")
    tokenizer = load_tokenizer(model)
    actor = maxtext_model.load_actor(model, base, max_length=44, devices=jax.devices())
    parameters = nnx.state(actor.module, nnx.Param)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(parameters))
    stacks = {name: array for name, array in weight_sync.by_name(parameters).items() if ".layers." in name}
    layer = max(array.nbytes // array.shape[weight_sync.SCAN_AXIS] for array in stacks.values())

    def logps(prompt_ids, ids):
        return np.asarray(maxtext_model.per_token_logps(actor, prompt_ids, ids, pad_id=0, eos_id=1))

    kv = sum(stacks[weight_sync.STACKED + weight_sync.LAYER_WEIGHTS[f"attn.{n}_proj.w"]].nbytes for n in "kv")
    found: dict = {"weights": whole, "layer": layer, "kv": kv, "kv_heads": actor.config.num_kv_heads}
    for name, devices, tensor in (("1", 1, 1), ("4x1", 4, 1), ("2x2", 4, 2), ("1x4", 4, 4)):
        before = bytes_on_a_device()
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("fsdp",))
        sampler = TunixSampler(actor.module, tokenizer, mesh, CONFIG, seed=7, tensor=tensor)
        held = bytes_on_a_device() - before
        reshard = multihost.reshard_locally
        during = []

        def watched(*arguments, reshard=reshard, during=during):
            arrived = reshard(*arguments)
            during.append(bytes_on_a_device())
            return arrived

        multihost.reshard_locally = watched
        sampler.update_params(parameters)
        multihost.reshard_locally = reshard
        output = sampler.generate(PROMPTS, CONFIG)
        texts = [
            output.text,
            [answer.text for answer in sampler.greedy_generate(max_completion_length=8, batch_size=6)(PROMPTS)],
        ]
        check = weight_sync.check_sync(sampler, actor.weights(), [*PROMPTS, *PROMPTS[:2]], CONFIG, logps)
        found[name] = {
            "texts": texts, "tokens": [ids.tolist() for ids in output.tokens], "gap": check.mean_gap,
            "held": held, "during": max(during) - before,
        }  # fmt: skip
        del sampler
    print(json.dumps(found))
