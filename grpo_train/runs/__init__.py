"""Runs: run directory, metrics and their glossary, health checks, tracking, checkpoints, preemption, multihost."""
