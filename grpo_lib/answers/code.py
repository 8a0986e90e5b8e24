"""Grader of Python functions: the code that a completion gives is called with a problem's inputs, in its own process.

The process is given inputs and not the expected values.  Time, memory and the size of a file are limited, of each
process by itself, and at the end its process group is killed.  This keeps accidents away: an endless loop, a gigabyte,
`exit()`.

It is no sandbox against malice.  The code does what its user may: it reads and writes files, uses the network, starts a
process that leaves the group and lives on, and, as root or where the system lets a process read its parent's memory,
finds the expected values there.  Train in a container, and not as root, where that matters.  (HumanEval's own runner
has the same warning, and its child process checks itself; `evaluate`'s code_eval is that runner.)
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from functools import lru_cache

from grpo_lib.answers.tagged import answer_block
from grpo_lib.prompts import after_thoughts

SECONDS = 2
MEMORY = 2**29  # bytes of address space
OUTPUT = 2**16  # bytes of what is printed, and of each file
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.S)

# Limits first, then the code.  What it prints is not the result: that is the last line.
_PROGRAM = f"""
import json, resource, sys
for limit, value in (("CPU", {SECONDS}), ("AS", {MEMORY}), ("FSIZE", {OUTPUT})):
    resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (value, value))
task = json.load(sys.stdin)
space = {{}}
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
    with tempfile.TemporaryFile() as output, tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=output,
            stderr=subprocess.DEVNULL, cwd=folder, env={}, start_new_session=True,
        )  # fmt: skip
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(given.encode(), timeout=2 * SECONDS)
        with contextlib.suppress(ProcessLookupError):  # whatever is left of it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        return output.read(OUTPUT).decode(errors="replace").rstrip("\n").rpartition("\n")[2]
