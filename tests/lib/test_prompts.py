"""Prompts: what is sent is exactly the tokenizer's template, and nothing of another family's."""

from types import SimpleNamespace

import pytest
from helpers import within

from grpo_lib import prompts
from grpo_lib.common.errors import CourseError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_question_is_asked_in_the_words_of_the_data_set(chatml):
    question = r"Solve {question} for $x \ne 1$."
    assert prompts.user_prompt("question", question) == question
    asked = prompts.user_prompt("dapo", question)
    assert asked.removeprefix(prompts.DAPO_PREFIX).removesuffix(prompts.DAPO_SUFFIX) == question
    assert "\\boxed{}" in prompts.user_prompt("boxed", question)
    assert "system" not in prompts.render(chatml, asked)


@pytest.fixture(scope="module")
def chatml():
    """A real ChatML tokenizer, built here: no download."""
    import tokenizers
    import transformers

    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def test_a_model_that_can_think_is_asked_not_to(chatml, monkeypatch):
    """As Qwen3's template has it: without the switch it thinks."""
    switch = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    monkeypatch.setattr(chatml, "chat_template", CHATML + switch)
    assert prompts.render(chatml, "Q?").endswith("assistant\n<think>\n\n</think>\n\n")
    assert prompts.render(chatml, "Q?", thinking=True).endswith("assistant\n")
    assert prompts.cut_while_thinking("<think>so")
    for text in ("<think>so</think>18", "18", "so</think>"):
        assert not prompts.cut_while_thinking(text)


def stub(eos: str | None = None, pad: str | None = None, added: tuple[str, ...] = (), template: str | None = None):
    special = [token for token in (eos, pad) if token]
    return SimpleNamespace(
        eos_token=eos,
        pad_token=pad,
        all_special_tokens=special,
        chat_template=template,
        get_added_vocab=lambda: {token: index for index, token in enumerate(added)},
    )


def test_system_prompt_and_template_have_the_four_tags() -> None:
    for tag in (prompts.REASONING_OPEN, prompts.REASONING_CLOSE, prompts.ANSWER_OPEN, prompts.ANSWER_CLOSE):
        assert prompts.SYSTEM_PROMPT.count(tag) == 1
    assert prompts.template_completion("r", "18") == "<reasoning>r</reasoning><answer>18</answer>"


def test_render_is_exactly_the_chat_template(chatml) -> None:
    assert prompts.render(chatml, "Q?") == "<|im_start|>user\nQ?<|im_end|>\n<|im_start|>assistant\n"
    assert prompts.render(chatml, "Q?", "Be brief.") == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nQ?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_render_without_chat_template_names_the_key_and_the_file() -> None:
    with pytest.raises(CourseError, match=r"model\.path.*chat_template\.jinja"):
        prompts.render(stub(), "Q?")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<start_of_turn>user\nQ?<end_of_turn>", ["<start_of_turn>", "<end_of_turn>"]),
        ("[INST] <<SYS>>S<</SYS>> Q? [/INST]", ["[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"]),
        ("<|user|>Q?<|end|><|assistant|>", ["<|user|>", "<|assistant|>", "<|end|>"]),
        (prompts.SYSTEM_PROMPT, []),
        ("How many <b>apples</b> [in total]?", []),
    ],
)
def test_markers_of_other_families_are_found(chatml, text: str, found: list[str]) -> None:
    assert prompts.foreign_markers(prompts.render(chatml, text), chatml) == found


def test_marker_known_to_the_tokenizer_is_its_own() -> None:
    text = "<|user|>Q?<end_of_turn>[INST]"
    assert prompts.foreign_markers(text, stub()) == ["<end_of_turn>", "[INST]", "<|user|>"]
    assert prompts.foreign_markers(text, stub(eos="<end_of_turn>", added=("<|user|>",), template="[INST]")) == []


@pytest.mark.parametrize(
    ("text", "stripped"),
    [
        ("18", "18"),
        ("18<|im_end|>", "18"),
        ("18<|im_end|><|endoftext|><|endoftext|>", "18"),
        ("18<|endoftext|>", "18"),
        ("18<|im_end|><|im_end|>", "18<|im_end|>"),
        ("18<|im_end|>\n", "18<|im_end|>\n"),
        ("18 \n<|im_end|>", "18 \n"),
        ("a<|im_end|>b", "a<|im_end|>b"),
        ("18<|eot_id|>", "18<|eot_id|>"),
        ("", ""),
    ],
)
def test_strip_end_of_turn(chatml, text: str, stripped: str) -> None:
    assert prompts.strip_end_of_turn(text, chatml) == stripped


LLAMA = {"eos": "<|end_of_text|>", "added": ("<|eot_id|>",)}


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("18<eos><eos><eos>", {"eos": "<eos>", "pad": "<eos>"}),
        ("18<|eot_id|>", LLAMA),
        ("18<|end_of_text|>", LLAMA),
        ("18", {}),
        ("18" + "<pad>" * 200_000, {"pad": "<pad>"}),
    ],
)
def test_strip_end_of_turn_of_other_tokenizers_in_linear_time(text: str, tokens: dict) -> None:
    with within(1.0):
        assert prompts.strip_end_of_turn(text, stub(**tokens)) == "18"
