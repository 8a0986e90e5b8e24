"""Tokens that a policy update computes in each layout, and what the TPU compiler counts for them.

    python dev/benchmarks/update_tokens.py                                       # tokens: the 1.7B, 3B and 8B recipes
    .venv-tpu/bin/python dev/benchmarks/update_tokens.py --compile               # and work and memory of the update
    python dev/benchmarks/update_tokens.py recipes/llama3.1-8b-gsm8k.yaml@g8 training.micro_batch_size=16 --mean 300

Prompts and completions are lengths only, since the models are not here.  ASSUMED: 3.2 characters a token, 60 tokens of
template and system prompt, and completions that are GSM8K's own solutions, stretched to a mean of --mean tokens with a
lognormal spread of 0.3 from one to the next of a group.  Prompts longer than the recipe's limit are left out, longer
completions are cut.

A step's micro-batches are packed as training packs them.  With --compile the layout's most frequent shape is compiled
for the recipe's slice: memory of the whole update, and its work from a few unrolled layers (see roofline.py).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from typing import Any

import numpy as np
from job import only_result_on_stdout

from grpo_lib.common.errors import CourseError
from grpo_lib.problems import load_problems
from grpo_train.recipes import Recipe, load_recipe
from grpo_train.recipes.layouts import choose_layout, row_shapes

RECIPES = (
    "recipes/published/qwen3-1.7b-gsm8k-smoke.yaml",
    "recipes/published/qwen2.5-3b-gsm8k.yaml",
    "recipes/llama3.1-8b-gsm8k.yaml@g8",
)
LAYOUTS = ("padded", "packed", "groups")
CHARACTERS, TEMPLATE, SPREAD = 3.2, 60, 0.3
STEPS = 50


def lengths(recipe: Recipe, mean: float) -> tuple[np.ndarray, np.ndarray]:
    """(prompt lengths [steps x prompts], completion lengths [steps x prompts, G]) of STEPS steps, in tokens."""
    rng = np.random.default_rng(0)
    plan = recipe.plan
    rollout = recipe.rollout
    problems = load_problems(recipe.problems, "train")
    asked = np.array([len(problem.question) for problem in problems]) / CHARACTERS + TEMPLATE
    solved = np.array([len(problem.solution) for problem in problems]) / CHARACTERS
    solved *= mean / solved.mean()
    fitting = np.nonzero(asked <= rollout.max_prompt_length)[0]
    chosen = rng.choice(fitting, STEPS * plan.prompts_per_step)
    spread = rng.lognormal(-(SPREAD**2) / 2, SPREAD, (len(chosen), plan.group_size))
    completions = np.clip(solved[chosen, None] * spread, 1, rollout.max_completion_length)
    return asked[chosen].astype(int), completions.astype(int)


def shapes_used(recipe: Recipe, layout: str, prompts: np.ndarray, completions: np.ndarray) -> Counter:
    """How many micro-batches have which shape [rows, tokens]."""
    from grpo_train.losses.packing import first_fit

    plan, rollout = recipe.plan, recipe.rollout
    shapes = row_shapes(
        layout, sequences=plan.micro_batch_size, group_size=plan.group_size, replicas=plan.trainer_replicas,
        prompt_length=rollout.max_prompt_length, completion_length=rollout.max_completion_length,
    )  # fmt: skip
    used: Counter = Counter()
    for first in range(0, len(prompts), plan.micro_batch_prompts):
        some = slice(first, first + plan.micro_batch_prompts)
        if layout == "groups":
            sizes = prompts[some] - 1 + (1 + completions[some]).sum(1)
        else:
            sizes = (prompts[some, None] + completions[some]).ravel()
        if layout == "padded":
            used[shapes[0]] += 1
        else:
            used[next(shape for shape in shapes if first_fit(sizes.tolist(), *shape))] += 1
    return used


def counted(recipe: Recipe, mean: float) -> dict[str, Any]:
    """Tokens of a step on average: real ones, those of rows of groups without padding, and those of each layout."""
    prompts, completions = lengths(recipe, mean)
    rows = {}
    for layout in LAYOUTS:
        try:
            plan = recipe.plan
            choose_layout(layout, accelerator=True, groups=plan.micro_batch_prompts, replicas=plan.trainer_replicas)
        except ValueError as error:
            rows[layout] = {"refused": str(error)}
            continue
        used = shapes_used(recipe, layout, prompts, completions)
        total = sum(height * width * count for (height, width), count in used.items())
        rows[layout] = {"tokens": total / STEPS, "shapes": [[*shape, count] for shape, count in used.most_common()]}
    each_with_its_prompt = (prompts[:, None] + completions).sum()
    prompts_once = (prompts + completions.sum(1)).sum()
    return {
        "recipe": recipe.name,
        "micro_batch": recipe.plan.micro_batch_size,
        "accumulation_steps": recipe.plan.accumulation_steps,
        "mean_prompt": float(prompts.mean()),
        "mean_completion": float(completions.mean()),
        "real": float(each_with_its_prompt / STEPS),
        "real_groups": float(prompts_once / STEPS),
        "layouts": rows,
    }


def compile_layouts(recipe: Recipe, result: dict[str, Any]) -> None:
    """Add the TPU compiler's counts to each layout: of one micro-batch, on one chip."""
    from grpo_train.tpu import preflight, roofline
    from grpo_train.tpu.compile_jobs import few_layers
    from grpo_train.tpu.compiler import Compiler

    def log(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    compiler = Compiler(recipe.training, recipe.grpo.iterations, log)
    for layout, row in result["layouts"].items():
        if "refused" in row:
            continue
        padded = preflight.programs_of(recipe)["update"].model_copy(update={"layout": "padded", "rows": None})
        program = padded
        if layout != "padded":
            program = padded.model_copy(update={"layout": layout, "rows": tuple(row["shapes"][0][:2])})
        whole = compiler(program)
        work = roofline.whole_model([compiler(part) for part in few_layers(program)], whole.num_layers)
        chip = recipe.hardware.slice.chip
        row |= {
            "flops": work.flops,
            "traffic": work.traffic,
            "temporaries": whole.temporaries,
            "out_of_memory": whole.oom_message,
            "seconds": work.seconds(chip),
        }


def table(result: dict[str, Any]) -> list[str]:
    """One recipe's result as lines; a ratio is to padded rows."""
    batches = f"micro-batches of {result['micro_batch']} completions, {result['accumulation_steps']} a step"
    means = f"a prompt has {result['mean_prompt']:.0f} tokens, a completion {result['mean_completion']:.0f}"
    real = f"real tokens of a step {result['real']:,.0f}, with each prompt once {result['real_groups']:,.0f}"
    lines = [f"{result['recipe']}: {batches}; on average {means}; {real}"]
    padded = result["layouts"]["padded"]
    for layout, row in result["layouts"].items():
        if "refused" in row:
            lines.append(f"  {layout:<8} {row['refused']}")
            continue
        shape = "{} x {}".format(*row["shapes"][0][:2])
        of_padded = row["tokens"] / padded["tokens"]
        of_real = row["tokens"] / result["real"]
        tokens = f"{row['tokens']:>10,.0f} tokens a step"
        lines.append(f"  {layout:<8} {tokens}, {of_padded:.2f} of padded, {of_real:.2f} of real; mostly {shape}")
        if "flops" in row:
            counts = ", ".join(compiler_counts(row, padded))
            lines.append(f"           TPU compiler, a micro-batch on a chip: {counts}")
    return lines


def compiler_counts(row: dict[str, Any], padded: dict[str, Any]) -> list[str]:
    """What the TPU compiler counts for one layout; in brackets the ratios to padded rows."""
    flops = row["flops"] / padded["flops"]
    traffic = row["traffic"] / padded["traffic"]
    temporaries = row["temporaries"] / max(padded["temporaries"], 1)
    tera = row["flops"] / 1e12
    traffic_gib = row["traffic"] / 2**30
    temporaries_gib = row["temporaries"] / 2**30
    return [
        f"{tera:.2f} TFLOP ({flops:.2f} of padded)",
        f"{traffic_gib:.1f} GiB of traffic ({traffic:.2f})",
        f"temporaries {temporaries_gib:.2f} GiB ({temporaries:.2f})",
        f"at least {row['seconds']:.3f} s",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", help="recipe file; the default is the 1.7B, the 3B and the 8B recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the recipe")
    parser.add_argument("--mean", type=float, default=200, help="tokens of a completion, on average (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="also ask the TPU compiler; needs .venv-tpu, minutes")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    arguments = parser.parse_args()
    # Where the data set is a folder here, as for the tests; else tensorflow-datasets loads it.
    problems = [f"problems.path={os.environ['GSM8K_DIR']}"] if "GSM8K_DIR" in os.environ else []
    asked = [arguments.recipe] if arguments.recipe else RECIPES
    with only_result_on_stdout() as stdout:
        results = []
        try:
            for path in asked:
                recipe = load_recipe(path, [*problems, *arguments.overrides])
                if recipe.rollout.max_prompt_length == "auto":
                    raise CourseError("rollout.max_prompt_length=auto: give a number, such as 256")
                results.append(counted(recipe, arguments.mean))
                if arguments.compile:
                    compile_layouts(recipe, results[-1])
                print("\n".join(table(results[-1])), file=stdout, flush=True)
        except CourseError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        if arguments.json:
            print(json.dumps({"mean": arguments.mean, "results": results}), file=stdout)


if __name__ == "__main__":
    main()
