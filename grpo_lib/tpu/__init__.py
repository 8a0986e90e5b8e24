"""TPU, without one: preflight with the TPU compiler, memory and roofline estimates, the smoke test."""
