"""What does the spelling of a calculation cost a base model?  It is given the calculation, and writes the result.

    python dev/benchmarks/spelling.py                              # SmolLM2 (make real-model), before any training
    python dev/benchmarks/spelling.py model.path=runs/real/export  # a trained one: any changes of the recipe
    python dev/benchmarks/spelling.py --json                       # and write assets/reference/spelling.json

Of each test problem: the prompt, then the first calculation of its worked solution up to "=", with and without spaces
and tag.  The number that is written next, greedily, is compared with the right one.  Nothing is trained.
"""

from __future__ import annotations

import argparse
import operator
import re
import time
from typing import Any

import numpy as np
from job import ROOT, machine

from grpo_lib import statistics
from grpo_lib.common.files import write_json_atomic
from grpo_lib.problems import Problem, load_problems
from grpo_lib.prompts import REASONING_OPEN
from grpo_train import pipeline
from grpo_train.recipes import load_recipe

RECIPE = ROOT / "recipes/smollm2-135m-cpu.yaml"
PROBLEMS = 250
LONGEST = 6  # tokens: a space, and a number of at most three digits
SPELLINGS = {
    "9 * 5 =": "{a} {sign} {b} =",
    "9*5=": "{a}{sign}{b}=",
    "<reasoning>9 * 5 =": REASONING_OPEN + "{a} {sign} {b} =",
    "<reasoning>9*5=": REASONING_OPEN + "{a}{sign}{b}=",
}
BASES_OWN, COURSES = "9 * 5 =", "<reasoning>9*5="
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="*", metavar="section.key=value", help="of the recipe")
    parser.add_argument("--json", action="store_true", help="write assets/reference/spelling.json")
    arguments = parser.parse_args()
    result = probed(arguments.changes)
    for spelling in SPELLINGS:
        shares = " ".join(f"{sign} {share_right(result['problems'], spelling, sign):.1%}" for sign in SIGNS)
        print(f"{spelling:20} {share_right(result['problems'], spelling):6.1%}   {shares}")
    print(paired(result["problems"]))
    print(f"{result['seconds']:.0f} seconds")
    if arguments.json:
        write_json_atomic(ROOT / "assets/reference/spelling.json", result)


def probed(changes: list[str]) -> dict[str, Any]:
    """The number that the recipe's model writes after each problem's first calculation, in each spelling."""
    started = time.perf_counter()
    settings = ["training.cold_start=0", f"problems.test={PROBLEMS}", f"rollout.max_completion_length={LONGEST}"]
    recipe = load_recipe(RECIPE, [*settings, *changes])
    problems = load_problems(recipe.problems, "test")
    generate, render = pipeline.standalone_generate(recipe)
    rows = [first_calculation(problem) for problem in problems]
    for spelling, template in SPELLINGS.items():
        forced = [problem.prompt(render) + template.format(**row) for problem, row in zip(problems, rows, strict=True)]
        for row, answer in zip(rows, generate(forced), strict=True):
            row[spelling] = number_at_start(answer.text)
    return {
        "command": " ".join(["python dev/benchmarks/spelling.py", *changes, "--json"]),
        "model": recipe.model.path,
        "problems": rows,
        "seconds": round(time.perf_counter() - started, 1),
        "machine": machine(),
    }


def first_calculation(problem: Problem) -> dict[str, Any]:
    a, sign, b = re.match(r"(\d+)([-+*])(\d+)", problem.solution).groups()
    return {"id": problem.id, "a": int(a), "sign": sign, "b": int(b), "right": SIGNS[sign](int(a), int(b))}


def number_at_start(text: str) -> int | None:
    found = re.match(r"\s*(\d+)", text)
    return int(found[1]) if found else None


def share_right(rows: list[dict[str, Any]], spelling: str, signs: str = "+-*") -> float:
    return float(np.mean([row[spelling] == row["right"] for row in rows if row["sign"] in signs]))


def paired(rows: list[dict[str, Any]]) -> str:
    """The base's own spelling against the one of the course, on the same problems."""
    own, other = ([row[spelling] == row["right"] for row in rows] for spelling in (BASES_OWN, COURSES))
    test = statistics.mcnemar(own, other)
    return (
        f"right only as {BASES_OWN}: {test.only_before}, only as {COURSES}: {test.only_after}, p = {test.p_value:.1g}"
    )


if __name__ == "__main__":
    main()
