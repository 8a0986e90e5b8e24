"""A recipe's prompts as the model is sent them: their text, their lengths in tokens, and which problems fit."""

import functools
from typing import Any

from grpo_lib.common.errors import CourseError
from grpo_lib.problems import Problem
from grpo_lib.prompts import render, system_prompt, user_prompt
from grpo_train.recipes.schema import PromptsRecipe, RolloutRecipe


def render_with(prompts: PromptsRecipe, tokenizer: Any, question: str, own: PromptsRecipe | None = None) -> str:
    """A question as the recipe's model is sent it; `own`: the prompts of a task that has its own."""
    template = own or prompts
    return render(tokenizer, user_prompt(template.user, question), system_prompt(template.system), template.thinking)


def prompt_lengths(prompts: PromptsRecipe, tokenizer: Any, problems: list[Problem]) -> list[int]:
    """Tokens of each rendered prompt."""
    texts = [problem.prompt(functools.partial(render_with, prompts, tokenizer)) for problem in problems]
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def fit_prompts(
    rollout: RolloutRecipe, prompts: PromptsRecipe, tokenizer: Any, problems: list[Problem]
) -> tuple[int, list[Problem]]:
    """(the length to which training prompts are padded, the problems whose prompts fit it).

    Raises CourseError when a prompt is longer than the recipe allows and the recipe does not say to leave it out:
    none is cut or left out silently.
    """
    lengths = prompt_lengths(prompts, tokenizer, problems)
    allowed = rollout.max_prompt_length
    longest = max(lengths)
    if allowed == "auto":
        return longest, problems
    if longest > allowed and rollout.overlong_prompts == "error":
        raise CourseError(
            f"rollout.max_prompt_length={allowed} is shorter than the longest prompt, {longest} tokens; "
            f"use {longest} or more, or auto, or leave such problems out with rollout.overlong_prompts=filter"
        )
    fitting = [problem for problem, length in zip(problems, lengths, strict=True) if length <= allowed]
    if lost := {problem.task for problem in problems} - {problem.task for problem in fitting}:
        of = f" of task {task}" if (task := next(iter(lost))) else ""
        raise CourseError(
            f"rollout.max_prompt_length={allowed} is shorter than every prompt{of}; the longest has {longest} tokens"
        )
    return allowed, fitting
