"""The recipe's problems and prompt as files that MaxText's own train_rl reads."""

from pathlib import Path

from grpo_lib import prompts
from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import write_bytes_atomic, write_json_atomic
from grpo_lib.problems import load_problems
from grpo_train.engines.tokens import Renderer, fit_prompts, load_tokenizer, prompt_lengths
from grpo_train.recipes.schema import ModelRecipe, ProblemsRecipe, PromptsRecipe, RolloutRecipe, TaskRecipe

TRAIN, TEST, TEMPLATE = "train.parquet", "test.parquet", "template.json"


def write_problems(
    folder: str | Path,
    problems: ProblemsRecipe | list[TaskRecipe],
    template: PromptsRecipe,
    rollout: RolloutRecipe,
    model: ModelRecipe,
    rows: int,
) -> tuple[int, list[str]]:
    """Write the recipe's problems and its prompt as `train_rl` reads them; returns (problems in test.parquet, sentences
    about the problems that were left out).

    The files are train.parquet and test.parquet with the columns question and answer, and template.json with the
    system message, whether a chat template is around it, and the end of each prompt.  Upstream stops when the rows of
    train.parquet are used up, so they are repeated until there are `rows`.  It drops prompts that are too long, and
    with them whole batches, so they are left out here.

    Raises CourseError when a training prompt is too long and the recipe makes that an error, or nothing is left.
    """
    import pandas

    folder = Path(folder)
    counts = {}
    filtered = []
    for split, name in (("train", TRAIN), ("test", TEST)):
        found = load_problems(only_source(problems), split)
        _, _, fitting = fit_prompts(
            # A training prompt that is too long can be an error; a test prompt is left out.
            rollout.model_copy(update={"overlong_prompts": "filter"}) if split == "test" else rollout,
            Renderer(template, load_tokenizer(model)),
            found,
        )
        if num_filtered := len(found) - len(fitting):
            filtered.append(f"{num_filtered} of {len(found)} {split} problems left out: the prompt is too long")
        if split == "train":
            fitting = [fitting[n % len(fitting)] for n in range(max(rows, len(fitting)))]
        counts[split] = len(fitting)
        table = pandas.DataFrame(
            {
                "question": [prompts.user_prompt(template.user, problem.question) for problem in fitting],
                "answer": [problem.answer for problem in fitting],
            }
        )
        write_bytes_atomic(folder / name, table.to_parquet(index=False))
    write_json_atomic(
        folder / TEMPLATE,
        {
            "SYSTEM_PROMPT": prompts.system_prompt(template.system),
            "TEMPLATE": "{question}",  # upstream asks for this key; our process_data does not look at it
            "CHAT_TEMPLATE": template.chat_template,
            "COMPLETION_PREFIX": template.completion_prefix,
        },
    )
    return counts["test"], filtered


def only_source(problems: ProblemsRecipe | list[TaskRecipe]) -> ProblemsRecipe:
    """The recipe's `problems`.  Raises CourseError for a list of tasks."""
    if isinstance(problems, list):
        raise CourseError("problems has several tasks, and train_rl takes one: keep one of them, as a section")
    return problems


def eval_batches(batch_size: int, tests: int) -> tuple[int, int]:
    """(batches, problems in each); upstream takes whole batches only."""
    size = min(batch_size, tests)
    return tests // size, size


def prompt_length(source: ProblemsRecipe, template: PromptsRecipe, rollout: RolloutRecipe, model: ModelRecipe) -> int:
    """Tokens; for auto the longest prompt of training and test, so that upstream drops none."""
    if rollout.max_prompt_length != "auto":
        return rollout.max_prompt_length
    problems = [problem for split in ("train", "test") for problem in load_problems(source, split)]
    return max(prompt_lengths(Renderer(template, load_tokenizer(model)), problems))
