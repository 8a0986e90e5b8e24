"""What MaxText's own `train_rl` takes from us, in its calling conventions: our prompt and our rewards.

It imports this file by its path (`dataset_processor_path`, `reward_functions_path`) and picks functions by name; the
arguments come from `grpo_train.maxtext_rl.arguments`.
"""

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grpo_lib.prompts import bare_text, render, strip_end_of_turn
from grpo_lib.reward_files import is_file
from grpo_lib.rewards import REWARDS, RewardFunction, get_rewards
from grpo_train.recipes import ModelRecipe


def process_data(dataset_name: str, model_tokenizer: Any, template_config: dict[str, Any], tmvp_config: Any, x: dict):
    """One row of the problems file as `train_rl` wants it: the text that the model is sent, and the gold number.

    Args:
      template_config: the template file; its SYSTEM_PROMPT is the recipe's system message, or empty, CHAT_TEMPLATE and
        COMPLETION_PREFIX are those of its `prompts`.
      x: {"question", "answer"}.

    Returns:
      {"prompts", "question", "answer"}; the answer is a JSON list of the one accepted spelling.
    """
    message, system = x["question"], template_config["SYSTEM_PROMPT"]
    in_chat = template_config["CHAT_TEMPLATE"]
    text = render(model_tokenizer, message, system) if in_chat else bare_text(message, system)
    return {
        "prompts": text + template_config["COMPLETION_PREFIX"],
        "question": x["question"],
        "answer": json.dumps([x["answer"]]),
    }


@functools.cache
def _tokenizer(path: str, maxtext_name: str):
    from grpo_train.engines.tokens import load_tokenizer

    return load_tokenizer(ModelRecipe(path=path, maxtext_name=maxtext_name))


@functools.cache
def _completion_prefix(template_file: str) -> str:
    return json.loads(Path(template_file).read_text(encoding="utf-8"))["COMPLETION_PREFIX"]


def _for_upstream(function: RewardFunction) -> RewardFunction:
    """Our reward under its own name, with `train_rl`'s arguments."""

    def reward(
        prompts: Any, completions: Iterable[str], tmvp_config: Any, answer: Iterable[str], **kwargs: Any
    ) -> list[float]:
        tokenizer = _tokenizer(str(tmvp_config.tokenizer_path), tmvp_config.model_name)
        # vLLM's text keeps the token that ends the turn; with it no format would ever be exact.
        prefix = _completion_prefix(str(tmvp_config.data_template_path))
        texts = [prefix + strip_end_of_turn(text, tokenizer) for text in completions]
        return function(prompts=prompts, completions=texts, answer=[json.loads(str(text))[0] for text in answer])

    reward.__name__ = reward.__qualname__ = function.__name__
    return reward


# `train_rl` looks the functions up as attributes of this module, and its workers pickle them by that name.
globals().update({name: _for_upstream(function) for name, function in REWARDS.items()})


def __getattr__(name: str) -> RewardFunction:
    """A function from a file of the user's, FILE.py:FUNCTION: `train_rl` asks for it as for those above.

    It cannot be pickled by that name, so that Tunix calls it in its own process.
    """
    if not is_file(name):
        raise AttributeError(name)
    return _for_upstream(get_rewards([name])[0])
