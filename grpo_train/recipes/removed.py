"""Recipe keys that are gone, and what to do instead: an unknown key that is one of them gets this as its error."""

A_SCHEDULE = "give rollout.temperature a schedule, such as rollout.temperature={from: 0.9, to: 0.7, steps: 100}"

REMOVED = {
    "evaluation.max_completion_length": "evaluations take rollout.max_completion_length; grpo evaluate RECIPE "
    "rollout.max_completion_length=N evaluates an export with another one",
    "grpo.correction_cap": "the cap of grpo.correction=tis is 2, TRL's default; leave the key out",
    "rollout.final_temperature": A_SCHEDULE,
    "rollout.temperature_stages": A_SCHEDULE,
    "rollout.vllm.block_size": "set rollout.vllm.options={block_size: N}",
    "rollout.vllm.kv_blocks": "set rollout.vllm.options={num_gpu_blocks_override: N}",
    "rollout.vllm.max_sequences": "set rollout.vllm.options={max_num_seqs: N}",
    "tracking.project": "set WANDB_PROJECT in the environment",
    # Other names of keys that are there.
    "rollout.prompts_per_device": "it is rollout.micro_batch_size_per_device",
    "rollout.prompts_per_pass": "it is rollout.micro_batch_size",
    "training.clip": "it is training.max_grad_norm",
    "training.keep": "it is training.max_to_keep",
    "training.micro_batch_per_device": "it is training.micro_batch_size_per_device",
    "training.prompts_per_device": "it is training.prompts_per_step_per_device",
}
