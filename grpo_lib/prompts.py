"""What the model is sent: tags, system prompt, chat rendering. Nothing else in the course writes a prompt.

The tags are ordinary text, not special tokens: a decoder that skips special tokens would delete them.
"""

import datetime
import reprlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from grpo_lib.common.errors import CourseError, first_line
from grpo_lib.common.files import read_json

# The four tags of a completion.
REASONING_OPEN = "<reasoning>"
REASONING_CLOSE = "</reasoning>"
ANSWER_OPEN = "<answer>"
ANSWER_CLOSE = "</answer>"
# Around the thoughts of a model that thinks before it answers: they are no part of its answer.
THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
THINK_MARK = "think>"  # in both
TAGS = (REASONING_OPEN, REASONING_CLOSE, ANSWER_OPEN, ANSWER_CLOSE)

SYSTEM_PROMPT = (
    "You solve word problems in mathematics. "
    f"First write your working between {REASONING_OPEN} and {REASONING_CLOSE}. "
    f"Directly after it, write the final answer between {ANSWER_OPEN} and {ANSWER_CLOSE}, "
    "as one number without any words."
)

# The words of Tunix's and MaxText's GRPO demos on GSM8K: tunix/examples/data/math_dataset.py of google-tunix 0.1.7, and
# maxtext/examples/chat_templates/gsm8k_rl.json of maxtext 0.2.5, with its tokens filled in.  Both: Apache License 2.0.
TUNIX_SYSTEM_PROMPT = (
    "You are given a problem. Think about the problem and provide your reasoning. Place it between "
    f"{REASONING_OPEN} and {REASONING_CLOSE}. Then, provide the final answer (i.e., just one numerical value) between "
    f"{ANSWER_OPEN} and {ANSWER_CLOSE}."
)
SYSTEM_PROMPTS = {"default": SYSTEM_PROMPT, "tunix": TUNIX_SYSTEM_PROMPT}

# Text that opens or closes a turn, by model family. What running text may hold (<s>, "User:") is left out.
TURN_MARKERS: dict[str, tuple[str, ...]] = {
    "ChatML": ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    "Llama 3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"),
    "Gemma": ("<start_of_turn>", "<end_of_turn>"),
    "Llama 2 and Mistral": ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"),
    "Phi": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "DeepSeek": ("<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
}
# Those that are a token each in every model that has them.  Zephyr writes Phi's as plain text, Llama 2 its own.
TURN_TOKENS = tuple(marker for family in ("ChatML", "Llama 3", "Gemma", "DeepSeek") for marker in TURN_MARKERS[family])
END_MARKERS = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
# Tokens that models reserve and never write, for tokenizers without a padding token of their own: Llama-3.1's, Qwen's.
PADDING_TOKENS = ("<|finetune_right_pad_id|>", "<|fim_pad|>", "<|endoftext|>")


# What DAPO-Math-17k puts around each problem (BytedTsinghua-SIA/DAPO-Math-17k, column `prompt`).
DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'
QUESTION = "{question}"  # in a user prompt: where the question stands
USER_PROMPTS = {
    "question": QUESTION,
    "dapo": DAPO_PREFIX + QUESTION + DAPO_SUFFIX,
    "boxed": "{question}\n\nReason step by step, and put the final answer in \\boxed{}.",
}


class PromptSettings(Protocol):
    """What a recipe's section `prompts` says."""

    system: str  # a name in SYSTEM_PROMPTS, or a text of its own; empty: no system message
    user: str  # a name in USER_PROMPTS, or a text with {question} in it
    thinking: bool  # for templates such as Qwen3's: may the model think, in <think> tags, before it answers?
    chat_template: bool  # whether the tokenizer's chat template is around the messages; else they are sent as bare text
    completion_prefix: str  # the end of the prompt, which counts as the beginning of each completion


def user_prompt(setting: str, question: str) -> str:
    """The user message of a recipe's `prompts.user` for a question: a name in USER_PROMPTS, or a text of its own with
    {question} where the question stands."""
    return USER_PROMPTS.get(setting, setting).replace(QUESTION, question)


def system_prompt(setting: str) -> str:
    """The system message of a recipe's `prompts.system`: a name in SYSTEM_PROMPTS, or a text of its own."""
    return SYSTEM_PROMPTS.get(setting, setting)


def asks_for_tags(prompts: PromptSettings) -> bool:
    """Whether a model is told of the tags in which its answer is looked for."""
    told = system_prompt(prompts.system) + user_prompt(prompts.user, "") + prompts.completion_prefix
    return ANSWER_OPEN in told


def messages(question: str, system: str = "") -> list[dict[str, str]]:
    """The conversation as role/content pairs; without a system message when `system` is empty."""
    turns = [{"role": "system", "content": system}] if system else []
    return [*turns, {"role": "user", "content": question}]


def bare_text(question: str, system: str = "") -> str:
    """The messages without a chat around them: the system message, an empty line, the user message."""
    return f"{system}\n\n{question}" if system else question


def with_prefix(prefixes: Iterable[str] | None, texts: Sequence[str]) -> list[str]:
    """Completions as they are graded: what the model wrote, with the end of its prompt in front.

    Args:
      prefixes: the `completion_prefix` of each; None: nothing is in front.
    """
    if prefixes is None:
        return list(texts)
    return [f"{prefix}{text}" for prefix, text in zip(prefixes, texts, strict=True)]


def render(
    tokenizer: Any, question: str, system: str = "", thinking: bool = False, date: datetime.date | None = None
) -> str:
    """The messages in the tokenizer's own chat template, up to where the answer begins.

    `thinking` is for templates that know `enable_thinking`, as Qwen3's does; there it is on unless it is switched off.
    `date` is for those that write the date (`strftime_now`), so that it stays the same; None: today.

    Raises CourseError if the tokenizer has no chat template, or the template fails.  A template that loops without end
    is not stopped: it is the model's own, and Ctrl-C ends it.
    """
    name = getattr(tokenizer, "name_or_path", "") or "the model"
    if not getattr(tokenizer, "chat_template", None):
        raise CourseError(
            f"model.path: the tokenizer of {name} has no chat template; use an instruction-tuned checkpoint, "
            "add chat_template.jinja next to its tokenizer.json, or set prompts.chat_template=false"
        )
    if isinstance(tokenizer.chat_template, dict) and "default" not in tokenizer.chat_template:
        names = ", ".join(sorted(tokenizer.chat_template))
        raise CourseError(
            f"model.path: the tokenizer of {name} has chat templates with other names than default ({names}); make the "
            "one for a conversation its chat_template.jinja"
        )
    settings = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": thinking}
    if date:
        settings["strftime_now"] = date.strftime
    try:
        return tokenizer.apply_chat_template(messages(question, system), **settings)
    except Exception as error:  # whatever a template raises: its own refusals, errors of Jinja, a range that is too big
        failure = f"the chat template of {name} fails ({first_line(error)})"
        if not system:
            raise CourseError(f"model.path: {failure}; correct its chat_template.jinja") from error
    render(tokenizer, question, "", thinking, date)  # raises where the system message is not the cause
    raise CourseError(
        f'prompts.system: {failure}, and not without a system message; set prompts.system="", or write its text into '
        "prompts.user, before {question}"
    )


def opens_thoughts(prompt: str) -> bool:
    """Whether a prompt as it is sent ends in an open <think>, as some templates write it.

    Its completions begin in thoughts then.  The tag is the last word of its line; a system message that only speaks of
    it does not count.
    """
    _, opened, rest = prompt.rpartition(THINK_OPEN)
    return bool(opened) and THINK_CLOSE not in rest and rest[:1] in ("", "\n")


def after_thoughts(completion: str, thinking: bool = False) -> str:
    """What a completion says after its thoughts, which is what counts as its answer; "" where it ends inside them.

    Args:
      thinking: whether its prompt has opened the thoughts (`opens_thoughts`), so that the completion begins in them.
    """
    if not thinking and THINK_MARK not in completion:
        return completion
    if cut_while_thinking(completion, thinking):
        return ""
    _, closed, answer = completion.rpartition(THINK_CLOSE)
    return answer.lstrip() if closed else completion


def cut_while_thinking(completion: str, thinking: bool = False) -> bool:
    """Whether a completion ends inside its thoughts: it was too short for them, and has no answer.

    Args:
      thinking: that of `after_thoughts`.
    """
    _, closed, rest = completion.rpartition(THINK_CLOSE)
    return THINK_OPEN in rest or (thinking and not closed)


def template_completion(reasoning: str, answer: str) -> str:
    """The completion we train towards: both blocks, and nothing before, between or after them."""
    return f"{REASONING_OPEN}{reasoning}{REASONING_CLOSE}{ANSWER_OPEN}{answer}{ANSWER_CLOSE}"


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
    if others and max(others) >= len(tokenizer):
        raise CourseError(
            f"{file}: eos_token_id {reprlib.repr(max(others))} is none of the tokenizer's {len(tokenizer):,} tokens; "
            f"{remedy}"
        )
    return list(dict.fromkeys([*ends, *others]))


def padding_token(tokenizer: Any) -> str | None:
    """The token to pad with: one that neither a text nor its end holds; None if the tokenizer has none.

    Padding is hidden from the loss, so one that also ends a turn or a text would be hidden there while the sampler has
    seen it. (Qwen's chat models pad with `<|endoftext|>`, which their generation_config.json names as a second end.)
    """
    written = end_tokens(tokenizer)
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in written:
        return tokenizer.pad_token
    vocabulary = tokenizer.get_vocab()
    return next((token for token in PADDING_TOKENS if vocabulary.get(token, written[0]) not in written), None)


def _own_tokens(tokenizer: Any) -> set[str]:
    """Special and added tokens of a tokenizer, as text."""
    return {*map(str, tokenizer.all_special_tokens), *tokenizer.get_added_vocab()}


def is_own_token(marker: str, tokenizer: Any) -> bool:
    """Whether a marker is one token, and the tokenizer's own: not the one for unknown text."""
    if marker in _own_tokens(tokenizer):
        return True
    ids = tokenizer(marker, add_special_tokens=False)["input_ids"]
    return len(ids) == 1 and tokenizer.decode(ids) == marker


def foreign_markers(text: str, tokenizer: Any) -> list[str]:
    """Turn markers of other model families in `text`: those that `tokenizer` neither owns nor writes itself.

    A hit means that a chat template was applied on top of another one's markers. The model then reads them as
    ordinary characters, and nothing fails except the accuracy.
    """
    own = _own_tokens(tokenizer)
    template = str(getattr(tokenizer, "chat_template", None) or "")
    return [
        marker
        for family in TURN_MARKERS.values()
        for marker in family
        if marker in text and marker not in own and marker not in template
    ]


def strip_end_of_turn(text: str, tokenizer: Any) -> str:
    """`text` without its padding and without the one end-of-turn or end-of-sequence token that closes it."""
    pad = tokenizer.pad_token
    end = len(text)
    while pad and text.endswith(pad, 0, end):
        end -= len(pad)
    for marker in (tokenizer.eos_token, *_own_tokens(tokenizer).intersection(END_MARKERS)):
        if marker and text.endswith(marker, 0, end):
            return text[: end - len(marker)]
    return text[:end]
