"""Engines: what computes, around MaxText, Tunix and vLLM.

The model and its conversion; the samplers (Tunix, vLLM) and weight sync; optimizer, cluster and learner; compat, faults
of upstream; cpu_speed, what only makes a CPU faster.
"""

from grpo_lib.common import environment

environment.prepare()  # before a module of this folder imports JAX
