"""The recipe's problems and prompt as files that MaxText's own train_rl reads."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

from grpo_lib import environment, prompts
from grpo_lib.errors import CourseError
from grpo_lib.files import write_bytes_atomic, write_json_atomic
from grpo_lib.problems import Problem, load_problems
from grpo_lib.problems.loading import WORD_PROBLEMS
from grpo_lib.recipes import ModelRecipe, ProblemsRecipe, Recipe

TRAIN, TEST, TEMPLATE = "train.parquet", "test.parquet", "template.json"
GSM8K_TEST = 1319  # problems of its test split


@dataclass(frozen=True)
class Written:
    """What `write_problems` wrote."""

    test: int  # problems in test.parquet
    left_out: list[str]  # in sentences


def write_problems(recipe: Recipe, folder: str | Path) -> Written:
    """Write the recipe's problems and its prompt as `train_rl` reads them.

    The files are train.parquet and test.parquet with the columns question and answer, and template.json with the
    system message.  Upstream stops when the rows of train.parquet are used up, so they are repeated until they last.
    It drops prompts that are too long, and with them whole batches, so they are left out here.

    Raises CourseError when a training prompt is longer than the recipe allows and it says refuse, or nothing is left.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder, counts, said = Path(folder), {}, []
    for split, name in (("train", TRAIN), ("test", TEST)):
        problems = load_problems(recipe.problems, split)
        fitting = _fitting(recipe, problems)
        left_out = len(problems) - len(fitting)
        if left_out and split == "train" and recipe.rollout.overlong_prompts == "refuse":
            raise CourseError(
                f"rollout.max_prompt_length={recipe.rollout.max_prompt_length} is shorter than {left_out} prompts; "
                "raise it, take auto, or set rollout.overlong_prompts=skip"
            )
        if not fitting:
            raise CourseError(f"rollout.max_prompt_length={recipe.rollout.max_prompt_length} leaves no {split} problem")
        if left_out:
            said.append(f"{left_out} of {len(problems)} {split} problems left out: the prompt is too long")
        if split == "train":
            rows = batches(recipe) * recipe.prompts_per_step
            fitting = [fitting[n % len(fitting)] for n in range(max(rows, len(fitting)))]
        counts[split] = len(fitting)
        table = pa.table({"question": [p.question for p in fitting], "answer": [p.answer for p in fitting]})
        data = io.BytesIO()
        pq.write_table(table, data)
        write_bytes_atomic(folder / name, data.getvalue())
    # TEMPLATE is upstream's second key; our process_data needs the first alone.
    write_json_atomic(folder / TEMPLATE, {"SYSTEM_PROMPT": _system(recipe), "TEMPLATE": "{question}"})
    return Written(counts["test"], said)


def batches(recipe: Recipe) -> int:
    """Batches of completions for `training.steps` updates; each serves grpo.iterations of them."""
    return -(-recipe.training.steps // recipe.grpo.iterations)


def number_of_tests(problems: ProblemsRecipe) -> int:
    if problems.source == "gsm8k" and problems.path is None:  # may not be on this machine yet
        return min(problems.test or GSM8K_TEST, GSM8K_TEST)
    if problems.source == "words":
        return problems.test or WORD_PROBLEMS["test"]
    return len(load_problems(problems, "test"))


def eval_batches(recipe: Recipe, tests: int | None) -> tuple[int, int]:
    """(batches, problems in each); upstream takes whole batches only."""
    tests = tests or number_of_tests(recipe.problems)
    size = min(recipe.evaluation.batch_size, tests)
    return tests // size, size


def prompt_length(recipe: Recipe) -> int:
    """Tokens; for auto the longest prompt of training and test, so that upstream drops none."""
    if recipe.rollout.max_prompt_length != "auto":
        return recipe.rollout.max_prompt_length
    problems = [problem for split in ("train", "test") for problem in load_problems(recipe.problems, split)]
    return max(_lengths(recipe, problems))


def _fitting(recipe: Recipe, problems: list[Problem]) -> list[Problem]:
    limit = recipe.rollout.max_prompt_length
    if limit == "auto":
        return problems
    return [problem for problem, n in zip(problems, _lengths(recipe, problems), strict=True) if n <= limit]


def _lengths(recipe: Recipe, problems: list[Problem]) -> list[int]:
    """Tokens of each rendered prompt."""
    tokenizer = _tokenizer(recipe.model)
    texts = [prompts.render(tokenizer, problem.question, _system(recipe)) for problem in problems]
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def _system(recipe: Recipe) -> str:
    return prompts.SYSTEM_PROMPT if recipe.prompts.system == "default" else recipe.prompts.system


def _tokenizer(model: ModelRecipe):
    """The tokenizer alone: a hub model's weights stay where they are."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(local_folder(model) or model.path)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0][:160]
        raise CourseError(
            f"model.path={model.path}: its tokenizer, which measures prompts, cannot be read ({reason}); "
            "use a folder, or run with network"
        ) from None


def local_folder(model: ModelRecipe) -> Path | None:
    """The model's folder, relative to here or to the repository; None for a hub name."""
    path = Path(model.path).expanduser()
    return next((place.resolve() for place in (path, environment.repo_root() / path) if place.is_dir()), None)
