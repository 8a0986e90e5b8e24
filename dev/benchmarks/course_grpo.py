"""Worker of step_time.py: the course's own trainer (MaxText actor, Tunix's learner and sampler).

    python dev/benchmarks/course_grpo.py /tmp/job.json

It trains as `grpo train` does, in a run directory that is thrown away, on the problems that the job was made from.
"""

from __future__ import annotations

import tempfile
from typing import Any

from job import Job, result, worker_main


def train(job: Job) -> dict[str, Any]:
    from grpo_train import checks, training
    from grpo_train.recipes import parse_recipe

    recipe = parse_recipe(job.recipe)
    with tempfile.TemporaryDirectory(prefix="step-time-") as directory:
        session = training.build_session(checks.check(recipe), directory, job.checkpoint)
        rows = training.train(session)
    columns = ("seconds", "seconds_rollout", "seconds_update", "reward", "completions/mean_length")
    return result(
        "course",
        *([row[column] for row in rows] for column in columns),
        packages=("google-tunix", "maxtext", "jax", "flax", "transformers"),
    )


if __name__ == "__main__":
    worker_main(train, __doc__)
