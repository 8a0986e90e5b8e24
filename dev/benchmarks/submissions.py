"""Cost of grading a class, and of the boundary around its code: seconds for copies of a lesson's solutions.

    python dev/benchmarks/submissions.py                    # 30 submissions of lesson 3, with each boundary there is
    python dev/benchmarks/submissions.py --submissions 10 --lesson 5

First one empty function, alone: what the start of a process costs.  Then the class, as many processes at a time as
there are cores.  By the clock: the CPU of what ends with bubblewrap's namespace is nobody's.
"""

import argparse
import statistics
import time
from dataclasses import replace

from job import machine

from grpo_lib.common import boundary
from grpo_lib.common.boundary import ANOTHER_USER, BUBBLEWRAP, NONE, Found
from grpo_teach import grading, limited, submissions


def kinds() -> list[str]:
    """The boundaries of this machine, and none."""
    return [NONE, *(kind for kind in (BUBBLEWRAP, ANOTHER_USER) if not boundary._missing(kind))]


def start(rounds: int) -> float:
    """Seconds of a process with an empty function, the median."""
    seconds = []
    for _ in range(rounds):
        started = time.monotonic()
        limited.run("def nothing(): pass", [limited.Call("nothing", "", ())])
        seconds.append(time.monotonic() - started)
    return statistics.median(seconds)


def a_class(count: int, lesson: str) -> float:
    """Seconds for a class that has everything right."""
    exercises = [one for one in grading.teachers_exercises().values() if one.number.split(".")[0] == lesson]
    code = {one.number: one.code for one in exercises}
    ada = submissions.Submission("ada", code, [])
    handed_in = [replace(ada, name=f"student {number}") for number in range(count)]
    began = time.monotonic()
    results = submissions.grade_all(handed_in, exercises, seed=7)
    points = {result.points for result in results}
    if points != {sum(one.points for one in exercises)}:
        raise SystemExit(f"not all points: {points}")
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--submissions", type=int, default=30)
    parser.add_argument("--lesson", default="3")
    parser.add_argument("--rounds", type=int, default=20, help="of the empty function")
    options = parser.parse_args()
    print(f"{options.submissions} submissions of lesson {options.lesson}, {machine()['processor']}")
    for kind in kinds():
        boundary.in_use = lambda kind=kind: Found(kind)
        one = start(options.rounds)
        clock = a_class(options.submissions, options.lesson)
        print(f"{kind:14} one process {1000 * one:5.0f} ms   the class {clock:6.1f} s", flush=True)


if __name__ == "__main__":
    main()
