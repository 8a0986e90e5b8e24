"""What MaxText's own `train_rl` takes from us, in its calling conventions: our prompt and our rewards.

It imports this file by its path (`dataset_processor_path`, `reward_functions_path`) and picks functions by name; the
arguments come from `grpo_train.maxtext_rl.arguments`.
"""

import functools
import json
from collections.abc import Iterable
from typing import Any

from grpo_lib.prompts import render, strip_end_of_turn
from grpo_lib.rewards import REWARDS, RewardFunction
from grpo_train.recipes import ModelRecipe


def process_data(dataset_name: str, model_tokenizer: Any, template_config: dict[str, str], tmvp_config: Any, x: dict):
    """One row of the problems file as `train_rl` wants it: the text that the model is sent, and the gold number.

    Args:
      template_config: the template file; its SYSTEM_PROMPT is the recipe's system message, or empty.
      x: {"question", "answer"}.

    Returns:
      {"prompts", "question", "answer"}; the answer is a JSON list of the one accepted spelling.
    """
    return {
        "prompts": render(model_tokenizer, x["question"], template_config["SYSTEM_PROMPT"]),
        "question": x["question"],
        "answer": json.dumps([x["answer"]]),
    }


@functools.cache
def _tokenizer(path: str, maxtext_name: str):
    from grpo_train.engines.tokens import load_tokenizer

    return load_tokenizer(ModelRecipe(path=path, maxtext_name=maxtext_name))


def _for_upstream(function: RewardFunction) -> RewardFunction:
    """Our reward under its own name, with `train_rl`'s arguments."""

    def reward(
        prompts: Any, completions: Iterable[str], tmvp_config: Any, answer: Iterable[str], **kwargs: Any
    ) -> list[float]:
        tokenizer = _tokenizer(str(tmvp_config.tokenizer_path), tmvp_config.model_name)
        # vLLM's text keeps the token that ends the turn; with it no format would ever be exact.
        texts = [strip_end_of_turn(text, tokenizer) for text in completions]
        return function(prompts=prompts, completions=texts, answer=[json.loads(str(text))[0] for text in answer])

    reward.__name__ = reward.__qualname__ = function.__name__
    return reward


# `train_rl` looks the functions up as attributes of this module, and its workers pickle them by that name.
globals().update({name: _for_upstream(function) for name, function in REWARDS.items()})
