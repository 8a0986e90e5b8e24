"""Grade the one submission in Gradescope's folder: ROOT/submission -> ROOT/results/results.json (run_autograder).

What is wrong with a submission is in its results, so this ends with exit code 0.
"""

import json
import re
import secrets
import sys
from pathlib import Path
from typing import Any

from grpo_lib.common import boundary, environment, files
from grpo_lib.common.errors import CourseError
from grpo_teach import grading, submissions


def results(root: Path) -> dict[str, Any]:
    """Gradescope's results of ROOT/submission.  Raises CourseError where no lesson is known, or it has no exercises."""
    teachers = environment.repo_root() / "teaching"
    print(boundary.require(teachers, root / "submission", root / "results"))
    submission = submissions.read_submission([root / "submission"], "submission")
    title = assignment_title(root / "submission_metadata.json")
    # The first number in the assignment's title is the lesson, such as "Exercises 03"; else what was handed in says it.
    found = re.search(r"\d+", title)
    lesson = str(int(found[0])) if found else submissions.lesson_of([submission])
    exercises = [one for one in grading.teachers_exercises().values() if one.number.split(".")[0] == lesson]
    if not exercises:
        raise CourseError(f"lesson {lesson}, by the title {title!r}, has no exercises")
    seed = secrets.randbits(32)
    print(f"lesson {lesson}, seed {seed}")  # Gradescope shows it to the teacher, and students see results.json only
    return submissions.gradescope(submissions.grade_all([submission], exercises, seed)[0])


def assignment_title(details: Path) -> str:
    """The assignment's title by Gradescope's metadata; empty where there is none."""
    try:
        return str(json.loads(details.read_text("utf-8"))["assignment"]["title"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def main() -> None:
    root = Path(sys.argv[1])
    try:
        found = results(root)
    except CourseError as error:
        print(f"error: {error}")
        found = {"score": 0, "output": f"not graded: {error}"}
    files.write_json_atomic(root / "results" / "results.json", found)


if __name__ == "__main__":
    main()
