"""The shipped tiny base model: what the course relies on in its tokenizer, its prompts and its accuracy."""

import json
from pathlib import Path

import pytest

from grpo_lib import prompts
from grpo_lib.problems import words

BASE = Path(__file__).resolve().parents[2] / "assets" / "tiny-base"
TAGS = (prompts.REASONING_OPEN, prompts.REASONING_CLOSE, prompts.ANSWER_OPEN, prompts.ANSWER_CLOSE)


@pytest.fixture(scope="module")
def record():
    return json.loads((BASE / "training.json").read_text(encoding="utf-8"))


def test_tags_are_single_ordinary_tokens_and_the_end_is_a_special_one(tokenizer):
    for tag in TAGS:
        ids = tokenizer.encode(tag, add_special_tokens=False)
        assert len(ids) == 1
        assert ids[0] not in tokenizer.all_special_ids
    text = prompts.template_completion("12+5=17 17-3=14", "14")
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.decode(tokenizer.encode("<|im_start|>"), skip_special_tokens=True) == ""


def test_every_digit_is_one_token(tokenizer):
    assert [tokenizer.decode([token]) for token in tokenizer.encode("1080")] == ["1", "0", "8", "0"]


def test_printable_ascii_survives(tokenizer):
    text = "".join(map(chr, range(32, 127))) + "\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(tokenizer.get_vocab().values()) < 256


def test_prompts_and_completions_fit_the_course(tokenizer, record):
    for problem in words.generate("train", 300, seed=5):
        prompt = tokenizer.encode(prompts.render(tokenizer, problem.question))
        completion = tokenizer.encode(prompts.template_completion(problem.solution, problem.answer))
        assert len(prompt) <= 44
        assert len(completion) + 1 <= 28
    assert record["lengths"]["prompt_max"] <= 44
    assert record["lengths"]["completion_max"] <= 28


def test_base_leaves_room_for_the_course(record):
    # The course is about this gap: able when it works in full, and often not doing so, in the tags or at all.
    assert 0.30 <= record["greedy"]["strict"] <= 0.40
    assert 0.50 <= record["greedy"]["lenient"] <= 0.65
    # And about this one: on hard problems its most likely answer is right far more often than its samples are.
    assert record["hard"]["greedy"]["strict"] > 0.15 > 3 * record["hard"]["sampled"]["strict"]
