"""Files with problems of our own in the columns of the published ones, where those cannot be had: tests, smoke tests.

The problems are generated word problems, so a model of the tiny tier can answer them.
"""

from pathlib import Path
from typing import Any

from grpo_lib.common.files import write_jsonl_atomic
from grpo_lib.problems import words
from grpo_lib.problems.competition import published_prompt
from grpo_lib.problems.types import Problem

COPIES = 3  # of each row of dapo-math, which is published a hundred times over


def write_placeholders(folder: str | Path, train: int = 300, test: int = 60) -> dict[str, Path]:
    """Write files of dapo-math, math, aime and math500 with so many problems; returns their paths by source."""
    training = words.generate("train", train)
    tests = [problem for problem in words.generate("test", 2 * test) if int(problem.answer) < 1000][:test]
    rows = {
        "dapo-math": [_dapo(problem) for problem in training] * COPIES,
        "aime": [_aime(problem) for problem in tests],
        "math500": [_math(problem) for problem in tests],
        "math": [_math(problem) for problem in training],
    }
    files = {source: Path(folder) / f"{source}.jsonl" for source in rows}
    for source, file in files.items():
        write_jsonl_atomic(file, rows[source])
    return files


def _dapo(problem: Problem) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": published_prompt(problem.question)}],
        "reward_model": {"ground_truth": problem.answer},
        "extra_info": {"index": problem.id},
    }


def _aime(problem: Problem) -> dict[str, Any]:
    return _plain(problem) | {"id": problem.id, "answer": f"{int(problem.answer):03}"}


def _math(problem: Problem) -> dict[str, Any]:
    return _plain(problem) | {"unique_id": problem.id, "answer": problem.answer}


def _plain(problem: Problem) -> dict[str, Any]:
    return {"problem": problem.question, "solution": problem.solution}
