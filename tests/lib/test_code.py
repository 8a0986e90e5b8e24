"""Python functions: what is read from a completion, what is run, and what cannot hurt; and the generated problems."""

import json
import re
import time

import psutil
import pytest
from helpers import within
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lib import answers, rewards
from grpo_lib.problems import code

GOLD = json.dumps({"function": "solve", "cases": [[[[3, 1, 2]], [1, 2, 3]], [[[]], []]]})
RIGHT = "def solve(values):\n    return sorted(values)\n"


def fenced(text: str) -> str:
    return f"Here it is.\n```python\n{text}\n```\nDone."


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        (fenced(RIGHT), True),
        (f"```\n{RIGHT}```", True),
        (f"<reasoning>sort</reasoning><answer>{RIGHT}</answer>", True),
        (fenced("def solve(values): return 0") + fenced(RIGHT), True),  # the last one counts
        (fenced(RIGHT) + fenced("def solve(values): return 0"), False),
        (fenced(RIGHT.replace("solve", "other")), False),
        (fenced("def solve(values):\n    values.sort()\n    print('noise')\n    return values"), True),
        (RIGHT, False),  # not marked as code
        (fenced(""), False),
        ("", False),
    ],
)
def test_the_function_is_run_on_the_cases(completion, right):
    assert answers.is_correct(completion, GOLD, "code") is right
    assert rewards.correct_answer([""], [completion], [GOLD], kind=["code"]) == [float(right)]


@pytest.mark.parametrize(
    "text",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "x = 'a' * 10**10",
        "print('x' * 10**8)",
        "open('file', 'w').write('x' * 10**8)",
        "import os; os._exit(0)",
        "import sys; sys.setrecursionlimit(10**9)\ndef solve(v): return solve(v)",
        "import subprocess; subprocess.Popen(['sleep', '31.4'])\nwhile True: pass",
        "import json; json.dumps = lambda _: '[[1, 2, 3], []]'",
        "\ud800",
        "def solve(values): return values",
    ],
)
def test_code_that_does_harm_is_wrong_and_ends(text):
    with within(15, time.monotonic):
        assert not answers.is_correct(fenced(text), GOLD, "code")
    left = [each for each in psutil.process_iter(["cmdline"]) if "31.4" in (each.info["cmdline"] or [])]
    assert not psutil.wait_procs(left, timeout=10)[1]  # killed is not gone yet; it would sleep for longer


@settings(max_examples=20)
@given(st.text(), st.text() | st.just(GOLD))
def test_no_text_and_no_gold_raises(text, gold):
    answers.is_correct(fenced(text), gold, "code")
    answers.is_correct(text, gold, "code")


def test_problems_repeat_and_are_split_by_question():
    splits = {split: code.generate(split, 20) for split in ("train", "validation", "test")}
    assert splits["test"] == code.generate("test", 20)
    assert len({problem.question for problem in splits["test"]}) == 20
    questions = [{problem.question for problem in problems} for problems in splits.values()]
    assert not questions[0] & questions[1]
    assert not questions[0] & questions[2]
    assert not questions[1] & questions[2]
    assert 20 < len(code.generate("test", 100)) < 100  # all there are


def test_no_constant_passes_and_a_solution_does():
    for problem in code.generate("train", 100):
        values = [value for _, value in json.loads(problem.answer)["cases"]]
        assert len({str(value) for value in values}) > 2
        bound = re.search(r"how many numbers in `values` are larger than (\d+)", problem.question)
        if bound:
            solution = f"def solve(values): return len([x for x in values if x > {bound[1]}])"
            assert answers.is_correct(fenced(solution), problem.answer, "code")
