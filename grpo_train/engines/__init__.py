"""Engines: the MaxText model and its conversion, the samplers (Tunix, vLLM), weight sync, workarounds (compat)."""

from grpo_lib.common import environment

environment.prepare()  # before a module of this folder imports JAX
