"""GRPO, hands on: the library under the course.  To read the core, start at the top:

prompts          what the model is sent
answers          grade a completion: strictly (the number in the tags) or leniently (the last number anywhere)
rewards          reward functions; notebook 02
problems         GSM8K and generated word problems
plain_grpo       GRPO in one file of plain JAX: sample, reward, advantages, loss, update
training         the same step with MaxText and Tunix; notebook 04
records, evaluation, statistics     grade every problem, summarize, compare before and after; notebook 05
recipes, pipeline, cli              one run end to end, from a YAML file

The other packages support the core, and you can skip them at first: docs/architecture.md.
"""
