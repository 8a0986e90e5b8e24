"""A trace of some steps of a training by jax.profiler, which shows where their time goes."""

from pathlib import Path

import jax

from grpo_train.runs import multihost


class StepProfile:
    """The trace of `training.profile_steps` by jax.profiler, in TensorBoard's folder, where its tab PROFILE finds it.

    Not by Tunix's ProfilerOptions (0.1.7): they count micro-batches from the start of a session, end a trace before the
    last update is computed and its weights are synced, and go on recording after a run that is interrupted.
    """

    def __init__(self, steps: list[int] | None, folder: Path):
        """`steps`: the first and the last one to record, both included; None: none."""
        self.steps = steps
        self.folder = folder
        self.recording = False

    def begin_step(self, number: int) -> None:
        """Called before each step; a session that begins within the window records what is left of it."""
        if self.steps is None or not multihost.is_main_process():
            return
        first, last = self.steps
        if number > last:
            self.close()
        elif number >= first and not self.recording:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # with JAX's default, 1, half of the file is calls of Python functions
            jax.profiler.start_trace(self.folder, profiler_options=options)
            self.recording = True

    def close(self) -> None:
        """Write the trace, if one is being recorded: after its last step, or when training ends before."""
        if self.recording:
            self.recording = False
            jax.profiler.stop_trace()
