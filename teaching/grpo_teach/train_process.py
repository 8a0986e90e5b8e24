"""`grpo` with a student's reward function: python -m grpo_teach.train_process REWARD.py train RECIPE …

grpo_teach.leaderboard starts it; the recipe names the reward `student_reward`.  The student's reward(completion, gold)
is called in grpo_teach.worker, which gets completions and gold answers and nothing else: student code never runs in
the process that trains.  Each call is a new process, so a reward keeps nothing from one step to the next.
"""

import sys
from pathlib import Path
from typing import Any

from grpo_lib.common.errors import CourseError
from grpo_lib.rewards import REWARDS, Part
from grpo_teach import limited
from grpo_teach.leaderboard import REWARD
from grpo_train import cli

EACH = """def each(reward, pairs):
    values = [float(reward(completion, gold)) for completion, gold in pairs]
    if not all(map(np.isfinite, values)):
        raise ValueError("reward returned a number that is not finite")
    return values
"""


def reward_function(code: str) -> Any:
    """In the calling convention of grpo_lib.rewards.

    Raises CourseError where the student's function fails, is stopped, or returns no number.
    """

    def batch(prompts: Any, completions: list[str], answer: Any, **columns: Any) -> list[float]:
        pairs = [(completion, str(gold)) for completion, gold in zip(completions, answer, strict=True)]
        values = limited.run(code, [limited.Call("reward", EACH, (pairs,))])[0]
        if isinstance(values, limited.Failed):
            raise CourseError(f"reward.py: {values.reason}")
        return values

    batch.__name__ = REWARD
    # The report asks for each completion, and each call is a process: it gets no values.
    vars(batch).update(explain=lambda *_: Part(REWARD, 0.0, "not called for the report"), kinds=("tagged",))
    return batch


def main() -> None:
    path = sys.argv.pop(1)
    REWARDS[REWARD] = reward_function(Path(path).read_text("utf-8"))
    REWARDS[REWARD](None, ["<reasoning>9*2=18</reasoning><answer>18</answer>", "?"], ["18", "18"])  # fails before JAX
    cli.main()


if __name__ == "__main__":
    main()
