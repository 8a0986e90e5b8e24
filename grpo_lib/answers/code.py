"""Grader of Python functions: the code that a completion gives is called with a problem's inputs, in its own process.

The process is given inputs and not the expected values, and it runs behind grpo_lib.common.boundary, which keeps it
from this process, from files and from the network.  (HumanEval's own runner checks in its child process, with a warning
that this is no sandbox; `evaluate`'s code_eval is that runner.)
"""

import json
import re
from functools import lru_cache

from grpo_lib.answers.tagged import answer_block
from grpo_lib.common import boundary
from grpo_lib.prompts import after_thoughts

SECONDS = 2  # of computing
WAIT = 2  # times as long by the clock
MEMORY = 2**29  # bytes of address space
OUTPUT = 2**16  # bytes of what is printed, and of each file
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.S)

# What the code prints is not the result: that is the last line.
_PROGRAM = """
import json, sys
task = json.load(sys.stdin)
space = {}
exec(task["code"], space)
results = [space[task["function"]](*arguments) for arguments in task["inputs"]]
print("\\n" + json.dumps(results))
"""


def code_answer(completion: str, thinking: bool = False) -> str | None:
    """The last fenced block of a completion, else its <answer> block; None where there is neither."""
    completion = after_thoughts(completion, thinking)
    blocks = _FENCED.findall(completion)
    code = blocks[-1] if blocks else answer_block(completion)
    return code if code and code.strip() else None


@lru_cache(maxsize=4096)  # a group has many equal completions
def same_results(code: str | None, gold: str) -> bool:
    """Whether the function gives each of the problem's cases its value.

    `gold`: JSON, {"function": its name, "cases": [[arguments, value], …]}; a gold that is not such a text is never met.

    Raises CourseError where foreign code has no boundary.
    """
    try:
        task = json.loads(gold)
        inputs, values = zip(*task["cases"], strict=True)
        given = json.dumps({"code": code, "function": task["function"], "inputs": inputs})
    except (ValueError, TypeError, KeyError):
        return False
    return code is not None and _run(given) == json.dumps(values)


def _run(given: str) -> str:
    """The last line that the process writes."""
    limits = boundary.Limits(SECONDS, MEMORY, OUTPUT, WAIT)
    ended = boundary.run(_PROGRAM, given.encode(), limits, boundary.in_use())
    return ended.output.decode(errors="replace").rstrip("\n").rpartition("\n")[2]
