"""Checks before a TPU is rented: preflight with the TPU compiler, memory and roofline estimates, the smoke test.

And on its first minutes: the self-check of the rented machine.
"""
