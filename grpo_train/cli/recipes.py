"""`grpo config` and `grpo convert`: what comes before a run."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from grpo_lib.common.errors import CourseError
from grpo_train.cli.options import AsJson, Overrides, RecipePath, RunsFolder, commands, finish
from grpo_train.recipes import Recipe, dump_recipe, load_recipe, plan_table

app = commands()


@app.command()
def config(
    recipe: RecipePath,
    overrides: Overrides = None,
    form: Annotated[
        Literal["yaml", "maxtext"],
        typer.Option("--as", help="yaml, with the batch plan; maxtext: arguments for MaxText's train_rl."),
    ] = "yaml",
    problems: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="With --as maxtext: where what train_rl reads is written.")
    ] = None,
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Show the resolved recipe, every field with defaults included, and its batch plan: given and derived sizes.

    The plan comes in comments, so that what is printed is a recipe.

    With --as maxtext, the arguments of maxtext.trainers.post_train.rl.train_rl, one to a line; what they cannot say
    goes to stderr.  To run it:
    grpo config RECIPE --as maxtext --problems FOLDER | xargs python -m grpo_train.maxtext_rl
    """
    if (form == "maxtext") != bool(problems):
        raise CourseError("--as maxtext and --problems FOLDER, for the files that train_rl reads, go together")
    from grpo_lib.rewards import get_rewards
    from grpo_train.engines import model_files

    resolved = load_recipe(recipe, overrides or ())
    get_rewards(resolved.rewards)
    model_files.check_model(resolved.model)
    prompt = _prompt(resolved)
    if problems:
        result = _for_maxtext(resolved, problems, runs)
        finish(result, as_json, "\n".join(map(shlex.quote, result["arguments"])))
    elif as_json:
        print(json.dumps(resolved.model_dump(mode="json")))
    else:
        print(dump_recipe(resolved, sys.stdout.encoding))
        print("\n".join(f"# {line}".rstrip() for line in plan_table(resolved).splitlines()))
        if line := model_files.vm_disk(resolved):
            print(f"# disk: {line}")
        if line := _memory(resolved):
            print(f"# memory: {line}")
        for line in _estimate(resolved):
            print(f"# {line}")
        print(f"# prompt: {prompt}")
        if resolved.model.sizes and not model_files.local_folder(resolved.model):
            print("# model.sizes: not compared with config.json, which is not here; grpo train refuses what differs")


def _memory(recipe: Recipe) -> str | None:
    """What a run takes of a CPU's memory; None for a TPU, for a model that is not here, and where it is not known how
    long prompts may be."""
    from grpo_train.engines import cpu_memory, model_files

    folder, longest = model_files.local_folder(recipe.model), recipe.rollout.max_prompt_length
    if recipe.hardware.accelerator or not folder or not isinstance(longest, int):
        return None
    sizes = cpu_memory.sizes_of(model_files.read_config(folder))
    return f"on one CPU {cpu_memory.estimate(sizes, recipe, recipe.plan_on(1, 1), longest)}"


def _estimate(recipe: Recipe) -> list[str]:
    """What preflight estimates of a recipe for a TPU, where a stored result fits it."""
    if not recipe.hardware.accelerator:
        return []
    from grpo_train.tpu import preflight

    if not (result := preflight.stored_result(recipe)):
        return [
            "Not estimated: no preflight is stored of these values; grpo preflight makes one, with the estimate, by "
            f"compiling at full effort ({preflight.compiling_took(preflight.saved_results())})"
        ]
    return preflight.estimate_lines(result)


def _prompt(recipe: Recipe) -> str:
    """What the check of the prompt found."""
    from grpo_train.engines import model_files

    if not model_files.local_folder(recipe.model):
        return "not checked, since the tokenizer is not here; grpo self-check and grpo train check it"

    from grpo_train.engines import prompt_check, tokens

    return prompt_check.check_prompts(recipe, tokens.Renderer(recipe.prompts, tokens.load_tokenizer(recipe.model)))


@app.command()
def convert(
    recipe: RecipePath,
    overrides: Overrides = None,
    output: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="A folder, or gs://BUCKET/FOLDER; default: runs/NAME/checkpoints/base."),
    ] = None,
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Convert the recipe's Hugging Face model to a MaxText checkpoint."""
    from grpo_train.engines import conversion, model_files

    resolved = load_recipe(recipe, overrides or ())
    base = output or runs / resolved.name / "checkpoints" / "base"
    model_files.require_disk(resolved, base)
    checkpoint = conversion.convert_to_maxtext(resolved.model, base)
    finish({"checkpoint": str(checkpoint)}, as_json, f"MaxText checkpoint: {checkpoint}")


def _for_maxtext(recipe: Recipe, problems: Path, runs: Path) -> dict[str, Any]:
    """The arguments of train_rl, and its files.  What cannot be expressed, or is still to be done, goes to stderr."""
    from grpo_train import maxtext_rl

    run = runs / recipe.name
    checkpoint = run / "checkpoints" / "base" / "0" / "items"
    tests, filtered = maxtext_rl.write_problems(recipe, problems)
    arguments = maxtext_rl.arguments(recipe, problems, checkpoint, run / "upstream", tests)
    lost = maxtext_rl.not_expressible(recipe, tests)
    print(
        *(f"problems: {sentence}" for sentence in filtered),
        *(f"not expressible: {sentence}" for sentence in lost),
        *[f"to be made before it runs: {checkpoint} (grpo convert)"] * (not checkpoint.is_dir()),
        sep="\n",
        file=sys.stderr,
    )
    return {"arguments": arguments, "not_expressible": lost}
