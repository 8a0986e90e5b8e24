"""`grpo` with a student's reward function: python -m grpo_teach.train_process < ARGUMENTS

ARGUMENTS are JSON, ["REWARD.py", "train", RECIPE, …], since every user may read command lines, and secret seeds are
among them.  grpo_teach.leaderboard starts it; the recipe names the reward `student_reward`.  The student's
reward(completion, gold) is called in grpo_teach.worker, which gets completions and gold answers and nothing
else: student code never runs in the process that trains.  Each call is a new process, so a reward keeps nothing from
one step to the next.
"""

import json
import sys
from typing import Any

from grpo_lib import reward_files
from grpo_lib.common.errors import CourseError
from grpo_lib.rewards import REWARDS, Part
from grpo_teach import limited
from grpo_teach.leaderboard import REWARD
from grpo_train import cli

EACH = """def each(reward, pairs):
    return [reward(completion, gold) for completion, gold in pairs]
"""
# Two completions to try a function on.
TRIED = ["<reasoning>9*2=18</reasoning><answer>18</answer>", "?"]


def reward_function(code: str) -> Any:
    """In the calling convention of grpo_lib.rewards.

    Raises CourseError where the student's function fails, is stopped, or returns no number.
    """

    def batch(prompts: Any, completions: list[str], answer: Any, **columns: Any) -> list[float]:
        pairs = [(completion, str(gold)) for completion, gold in zip(completions, answer, strict=True)]
        values = limited.run(code, [limited.Call("reward", EACH, (pairs,))])[0]
        if isinstance(values, limited.Failed):
            raise CourseError(f"reward.py: {values.reason}")
        return reward_files.as_rewards(values, len(pairs), "reward.py: reward", "return one number")

    batch.__name__ = REWARD
    # The report asks for each completion, and each call is a process: it gets no values.
    vars(batch).update(explain=lambda *_: Part(REWARD, 0.0, "not called for the report"), kinds=("tagged",))
    return batch


def main() -> None:
    path, *arguments = json.load(sys.stdin)
    sys.argv[1:] = arguments
    try:
        REWARDS[REWARD] = reward_function(reward_files.read_source(path))
        REWARDS[REWARD](None, TRIED, ["18", "18"])  # fails before JAX
    except CourseError as error:
        sys.exit(f"error: {error}")
    cli.main()


if __name__ == "__main__":
    main()
