"""Is what the model is sent what the recipe says?  Looked at on one question, before a run.

A chat template is a program of the model's own.  One that leaves out a message, or writes another model's markers,
fails nowhere: the model only solves less.
"""

from typing import Any

from grpo_lib.common.errors import CourseError
from grpo_lib.prompts import (
    END_MARKERS,
    TURN_TOKENS,
    end_tokens,
    is_own_token,
    messages,
    system_prompt,
    user_prompt,
)
from grpo_train.engines.tokens import Renderer, encode
from grpo_train.recipes import Recipe
from grpo_train.recipes.schema import PromptsRecipe

QUESTION = "Janet has 16 eggs and eats 3 of them. How many are left?"
CORRECT = "correct its chat_template.jinja"


def check_prompts(recipe: Recipe, render: Renderer) -> str:
    """What was found, for the recipe's prompts, or for those of each task that has its own.

    Raises CourseError where the prompt lacks the question or the system message, begins with two BOS tokens, has a
    turn marker that is no token of the model, or ends where nothing asks for an answer.
    """
    if not recipe.tasks:
        return check_prompt(render)
    found = []
    for task in recipe.tasks:
        try:
            found.append(f"task {task.name}: {check_prompt(render, task.prompts)}")
        except CourseError as error:
            raise CourseError(f"task {task.name}: {error}") from None
    return "; ".join(found)


def check_prompt(render: Renderer, own: PromptsRecipe | None = None) -> str:
    """The same for one prompt; `own`: the prompts of a task that has its own."""
    settings, tokenizer = own or render.prompts, render.tokenizer
    name = f"the chat template of {tokenizer.name_or_path or 'the model'}"
    text = render(QUESTION, own)
    (ids,) = encode(tokenizer, [text])
    _require_messages(text, settings, tokenizer, name)
    _require_markers(text, tokenizer)
    if ids[:2] == [tokenizer.bos_token_id] * 2:
        raise CourseError(
            f"model.path: the prompt begins with {tokenizer.bos_token} twice, and {name} is to write one; {CORRECT}"
        )
    before = text.removesuffix(settings.completion_prefix).rstrip()
    if settings.chat_template and before.endswith((tokenizer.eos_token, *END_MARKERS)):
        raise CourseError(
            f"model.path: {name} ends with {before[-20:]!r}, and opens no turn for the answer; {CORRECT}: "
            "it has to look at add_generation_prompt"
        )
    ends = " or ".join(tokenizer.convert_ids_to_tokens(end_tokens(tokenizer)))
    thoughts = "; the completion begins inside <think>" if text.rstrip().endswith("<think>") else ""
    return (
        f"{len(ids)} tokens for a question of {len(encode(tokenizer, [QUESTION])[0])}, from {text[:20]!r} to "
        f"{text[-20:]!r}{thoughts}; {ends} ends a completion"
    )


def _require_messages(text: str, settings: PromptsRecipe, tokenizer: Any, name: str) -> None:
    """The question and the system message are there.  A template may strip them."""
    question, system = user_prompt(settings.user, QUESTION), system_prompt(settings.system)
    if question.strip() not in text:
        if _reads_parts(tokenizer, question, system):
            raise CourseError(
                f"model.path: {name} reads the content of a message as a list of parts, and leaves out a question, "
                "which is text; correct its chat_template.jinja: {{ message['content'] }} in the place of its parts"
            )
        raise CourseError(f"model.path: {name} leaves out the question; {CORRECT}, or set prompts.chat_template=false")
    if system.strip() not in text:
        raise CourseError(
            f'prompts.system: {name} leaves it out; set prompts.system="", or write its text into prompts.user, before '
            "{question}"
        )


def _reads_parts(tokenizer: Any, question: str, system: str) -> bool:
    """Whether the chat template writes a question that is given as multimodal models take it."""
    in_parts = [
        {"role": message["role"], "content": [{"type": "text", "text": message["content"]}]}
        for message in messages(question, system)
    ]
    try:
        text = tokenizer.apply_chat_template(in_parts, tokenize=False, add_generation_prompt=True)
    except Exception:  # whatever a template raises
        return False
    return question in text and str(in_parts[-1]["content"]) not in text


def _require_markers(text: str, tokenizer: Any) -> None:
    for marker in TURN_TOKENS:
        if marker in text and not is_own_token(marker, tokenizer):
            count = len(encode(tokenizer, [marker])[0])
            raise CourseError(
                f"model.path: the prompt has {marker}, which is {count} tokens of this tokenizer, and not one of its "
                "own: it is another model's; give the tokenizer and the chat_template.jinja of one model"
            )
