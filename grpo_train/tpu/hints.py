"""What to change in a recipe that does not fit: fixed hints, in the order of notebook 06."""

from collections.abc import Iterator, Mapping

from grpo_train.recipes.batch_plan import BatchPlan, micro_batch_sizes
from grpo_train.recipes.schema import ModelRecipe, RolloutRecipe


def hints(
    plan: BatchPlan, given: Mapping[str, int], model: ModelRecipe, rollout: RolloutRecipe, trainer_tensor: int
) -> Iterator[str]:
    """`key=value: what it costs`, what changes the result of training least first.  None of them is compiled.

    `given`: the sizes that the recipe gives, so that a hint changes the key that is there.
    """
    if smaller := [size for size in micro_batch_sizes(plan) if size < plan.micro_batch_size]:
        change = f"training.micro_batch_size={smaller[-1]}"
        if "training.micro_batch_size_per_device" in given:
            change = f"training.micro_batch_size_per_device={smaller[-1] // plan.trainer_replicas}"
        yield f"{change}: the same update from more micro-batches; slower"
    if plan.rollout_micro_batch_size % (2 * plan.processes) == 0:
        per_device = given.get("rollout.micro_batch_size_per_device")
        if per_device is None:
            yield (
                f"rollout.micro_batch_size={plan.rollout_micro_batch_size // 2}: fewer prompts sampled at once; slower"
            )
        elif per_device % 2 == 0:
            yield f"rollout.micro_batch_size_per_device={per_device // 2}: fewer prompts sampled at once; slower"
    if model.remat != "full":
        yield "model.remat=full: activations are computed a second time; slower"
    if rollout.engine == "vllm":
        yield (
            f"rollout.vllm.memory_fraction={rollout.vllm.memory_fraction - 0.1:.2f}: a smaller KV cache; fewer "
            "sequences at once"
        )
    if plan.layout == "padded":
        yield "training.layout=packed: rows of real tokens instead of padding"
    yield f"hardware.trainer_tensor={trainer_tensor * 2}: chips exchange activations in every layer"
    yield f"rollout.max_completion_length={rollout.max_completion_length // 2}: changes what is learnt"
    yield "hardware.accelerator: a larger slice costs more an hour"
