"""A model's tokenizer, and a recipe's prompts as the model is sent them: their text, their lengths, which ones fit."""

import datetime
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import read_json
from grpo_lib.problems import Problem
from grpo_lib.prompts import bare_text, render, system_prompt, user_prompt
from grpo_train.engines.model_files import model_directory, unreadable
from grpo_train.recipes import ModelRecipe
from grpo_train.recipes.schema import PromptsRecipe, RolloutRecipe

# Tokens that models reserve and never write, for tokenizers without a padding token of their own: Llama-3.1's, Qwen's.
PADDING_TOKENS = ("<|finetune_right_pad_id|>", "<|fim_pad|>", "<|endoftext|>")


def load_tokenizer(model: ModelRecipe):
    """The model's own tokenizer, padding on the left, as generation needs it.

    The padding token is one of its own that no text holds: Tunix hides padding from the trainer, so one that also ends
    a turn or a text would be hidden there while the sampler has seen it.  (Qwen's chat models pad with <|endoftext|>,
    which their generation_config.json names as a second end token.)  Raises CourseError when the tokenizer has none, or
    its files are damaged, or it has code of its own.
    """
    from transformers import AutoTokenizer

    directory = model_directory(model, weights=False)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left", trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises no type of its own
        raise unreadable(model, "tokenizer", error) from error
    if tokenizer.eos_token_id is None:
        raise CourseError(f"the tokenizer of model.path={model.path} names no end token; give it an eos_token")
    written = end_tokens(tokenizer)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in written:
        vocabulary = tokenizer.get_vocab()
        free = [token for token in PADDING_TOKENS if token in vocabulary and vocabulary[token] not in written]
        if not free:
            raise CourseError(
                f"the tokenizer of model.path={model.path} has no padding token of its own; "
                "give it a pad_token that is not its end token"
            )
        tokenizer.pad_token = free[0]
    return tokenizer


def end_tokens(tokenizer: Any) -> list[int]:
    """Ids at which a completion ends: the tokenizer's own, and those of generation_config.json in the model's folder.

    A chat model often has two: the end of a turn, and the end of a text.  Raises CourseError for a damaged file.
    """
    ends = [tokenizer.eos_token_id]
    folder = getattr(tokenizer, "name_or_path", "")
    file = Path(folder) / "generation_config.json"
    if not folder or not file.is_file():
        return ends
    remedy = "copy or download the model again"
    others = read_json(file, remedy).get("eos_token_id")
    if not isinstance(others, list):
        others = [] if others is None else [others]
    if not all(type(token) is int and token >= 0 for token in others):
        raise CourseError(f"{file}: eos_token_id is {reprlib.repr(others)}, not the ids of tokens; {remedy}")
    return list(dict.fromkeys([*ends, *others]))


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of rendered prompts: those of their text, and no other.

    What a chat template does not write, such as a token at the beginning (BOS), the model is not sent.
    """
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"]


def render_with(
    prompts: PromptsRecipe,
    tokenizer: Any,
    question: str,
    own: PromptsRecipe | None = None,
    date: datetime.date | None = None,
) -> str:
    """A question as the recipe's model is sent it.

    Args:
      own: the prompts of a task that has its own.
      date: for a chat template that writes the date; None: today.
    """
    template = own or prompts
    text, system = user_prompt(template.user, question), system_prompt(template.system)
    if template.chat_template:
        text = render(tokenizer, text, system, template.thinking, date)
    else:
        text = bare_text(text, system)
    return text + template.completion_prefix


@dataclass(frozen=True)
class Renderer:
    """The `render` of evaluations and training batches: questions as the recipe's model is sent them."""

    prompts: PromptsRecipe
    tokenizer: Any
    date: datetime.date | None = None  # for a chat template that writes it: a run's own; None: today's

    def __call__(self, question: str, own: PromptsRecipe | None = None) -> str:
        """`own`: the prompts of a task that has its own."""
        return render_with(self.prompts, self.tokenizer, question, own, self.date)

    @property
    def writes_date(self) -> bool:
        """Whether the chat template asks for the date, as those of Llama 3.2 and Granite do."""
        return self.prompts.chat_template and "strftime_now" in str(self.tokenizer.chat_template)

    def completion_prefix(self, own: PromptsRecipe | None = None) -> str:
        """The end of these prompts with which each completion begins (Problem.completion_prefix)."""
        return (own or self.prompts).completion_prefix


def prompt_lengths(render: Renderer, problems: Sequence[Problem]) -> list[int]:
    """Tokens of each rendered prompt, as the sampler counts them."""
    texts = [problem.prompt(render) for problem in problems]
    return [len(ids) for ids in encode(render.tokenizer, texts)]


def fit_prompts(rollout: RolloutRecipe, render: Renderer, problems: list[Problem]) -> tuple[int, int, list[Problem]]:
    """(tokens of the shortest prompt, the length to which training prompts are padded, the problems whose prompts fit).

    Raises CourseError when a prompt is longer than the recipe allows and the recipe does not say to leave it out:
    none is cut or left out silently.
    """
    lengths = prompt_lengths(render, problems)
    allowed = rollout.max_prompt_length
    shortest, longest = min(lengths), max(lengths)
    if allowed == "auto":
        return shortest, longest, problems
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
    return shortest, allowed, fitting
