"""Worker of step_time.py: the course's own trainer (MaxText actor, Tunix's learner and sampler).

    python benchmarks/course_grpo.py /tmp/job.json

It trains as `grpo train` does, in a run directory that is thrown away, on the problems that the job was made from.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any

from job import Job, only_result_on_stdout, result


def train(job: Job) -> dict[str, Any]:
    from grpo_lib import training
    from grpo_lib.problems import load_problems
    from grpo_lib.recipes import parse_recipe

    recipe = parse_recipe(job.recipe)
    with tempfile.TemporaryDirectory(prefix="step-time-") as directory:
        session = training.build_session(recipe, directory, load_problems(recipe.problems, "train"), job.checkpoint)
        rows = training.train(session)
    columns = ("seconds", "seconds_rollout", "seconds_update", "reward", "completion_length")
    return result(
        "course",
        *([row[column] for row in rows] for column in columns),
        packages=("google-tunix", "maxtext", "jax", "flax", "transformers"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", help="file made by step_time.py --write-job")
    arguments = parser.parse_args()
    with only_result_on_stdout() as stdout:
        print(json.dumps(train(Job.load(arguments.job))), file=stdout)


if __name__ == "__main__":
    main()
