"""A model's tokenizer, and a recipe's prompts as the model is sent them: their text, their lengths, which ones fit."""

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
    written = {tokenizer.eos_token_id, *_end_tokens(directory)}
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


def _end_tokens(directory: Path) -> list[int]:
    """Ids at which the model's own generation_config.json ends a text; none without such a file."""
    file = directory / "generation_config.json"
    if not file.is_file():
        return []
    ends = read_json(file, "copy or download the model again").get("eos_token_id")
    if ends is None:
        return []
    return ends if isinstance(ends, list) else [ends]


def render_with(prompts: PromptsRecipe, tokenizer: Any, question: str, own: PromptsRecipe | None = None) -> str:
    """A question as the recipe's model is sent it; `own`: the prompts of a task that has its own."""
    template = own or prompts
    user, system = user_prompt(template.user, question), system_prompt(template.system)
    text = render(tokenizer, user, system, template.thinking) if template.chat_template else bare_text(user, system)
    return text + template.completion_prefix


@dataclass(frozen=True)
class Renderer:
    """The `render` of evaluations and training batches: questions as the recipe's model is sent them."""

    prompts: PromptsRecipe
    tokenizer: Any

    def __call__(self, question: str, own: PromptsRecipe | None = None) -> str:
        """`own`: the prompts of a task that has its own."""
        return render_with(self.prompts, self.tokenizer, question, own)

    def completion_prefix(self, own: PromptsRecipe | None = None) -> str:
        """The end of these prompts with which each completion begins (Problem.completion_prefix)."""
        return (own or self.prompts).completion_prefix


def prompt_lengths(prompts: PromptsRecipe, tokenizer: Any, problems: list[Problem]) -> list[int]:
    """Tokens of each rendered prompt."""
    texts = [problem.prompt(Renderer(prompts, tokenizer)) for problem in problems]
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
