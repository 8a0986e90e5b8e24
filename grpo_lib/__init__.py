"""GRPO, hands on: the library under the course.  It imports nothing by itself; read it in this order:

prompts             what the model is sent
answers             grade a completion: strictly (the number in the tags) or leniently (the last number anywhere)
reward_files        a reward function from a file of the user's
rewards             reward functions; notebook 02
problems            GSM8K, generated word problems, competition mathematics: loading, splits, batches
bandit              a policy over a few answers: what a step does to logits and probabilities; notebooks 02, 03
plain_grpo          GRPO in one file of plain JAX: sample, reward, advantages, loss, update; notebook 04
conformance         does a loss compute what its name says?  exact cases for each variant; notebook 03
records             one graded completion, and the summary of many; notebook 05
evaluation          the evaluation loop: problems and a `generate` function in, records out
eval_cache          its finished batches on disk, so that an interrupted evaluation continues
completions_file    completions that another program wrote, as a `generate`
contamination       has a model seen a test set?
statistics          intervals, paired tests, pass@k; notebook 05
analysis            how wrong answers are wrong, and what a gain consists of; notebook 05
common              errors, files that survive an interruption, spreadsheets, the environment

The same step with MaxText, Tunix and vLLM, recipes and the command line are in the package grpo_train: notebook 04, and
docs/architecture.md.
"""
