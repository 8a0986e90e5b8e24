"""Completions with thoughts in <think> tags: what follows them is the answer, whoever has opened them."""

import pytest

from grpo_lib import answers, evaluation, prompts, rewards
from grpo_lib.problems.types import Problem

# Kind: (thoughts that state the gold in passing, an answer that states it, one that states another).
TAGGED = ("maybe <answer>12</answer> no", "<reasoning>r</reasoning><answer>12</answer>")
STATED = {
    "tagged": (*TAGGED, "<reasoning>r</reasoning><answer>13</answer>"),
    "integer": ("Perhaps \\boxed{12}. Wait, that ignores the second case, so", "\\boxed{12}", "Answer: 13"),
    "latex": ("Suppose the answer is 12. Then", "Answer: $12$", "\\boxed{13}"),
    "code": ("```python\ndef f(x): return x\n```", "```python\ndef f(x): return x\n```", "```python\ndef f(x): 1\n```"),
}
GOLDS = dict.fromkeys(STATED, "12") | {"code": '{"function": "f", "cases": [[[7], 7]]}'}
OPENED = "<|im_start|>assistant\n<think>\n"  # the end of a prompt whose template opens the thoughts
PROMPTS = {"the model": ("<|im_start|>assistant\n", "<think>"), "the template": (OPENED, "")}


def graded(completion: str, kind: str, thinking: bool) -> dict:
    verdicts = evaluation.grade(completion, GOLDS[kind], kind, thinking=thinking)
    assert answers.is_correct(completion, GOLDS[kind], kind, thinking=thinking) is verdicts["strict"]
    return verdicts


@pytest.mark.parametrize("who", PROMPTS)
@pytest.mark.parametrize("kind", STATED)
def test_only_what_follows_the_thoughts_is_graded(kind: str, who: str) -> None:
    sent, begun = PROMPTS[who]
    thinking = prompts.opens_thoughts(sent)
    assert thinking is (who == "the template")
    thoughts, right, wrong = STATED[kind]
    assert not any(graded(begun + thoughts, kind, thinking)[name] for name in evaluation.VERDICTS)  # cut off
    assert graded(begun + thoughts, kind, thinking)["extracted"] is None
    assert not graded(f"{begun}{thoughts}</think>", kind, thinking)["strict"]
    assert not graded(f"{begun}{thoughts}</think>\n\n{wrong}", kind, thinking)["strict"]
    assert graded(f"{begun}{thoughts}</think>\n\n{right}", kind, thinking)["strict"]
    assert graded(f"{begun}{thoughts}</think>{right}", kind, thinking)["strict"]
    assert graded(f"{begun}so</think>Wait<think>{thoughts}</think>{right}", kind, thinking)["strict"]
    assert not graded(f"{begun}so</think>{right}<think>{thoughts}", kind, thinking)["strict"]


@pytest.mark.parametrize("kind", STATED)
def test_a_completion_without_thoughts_is_graded_whole(kind: str) -> None:
    _, right, wrong = STATED[kind]
    assert graded(right, kind, thinking=False)["strict"]
    assert not graded(wrong, kind, thinking=False)["strict"]
    assert not graded(right, kind, thinking=True)["strict"]  # it is still thinking


def test_the_other_functions_of_the_tagged_grader_see_the_same() -> None:
    thoughts, right, _ = STATED["tagged"]
    for begun, thinking in (("<think>", False), ("", True)):
        cut, whole = begun + thoughts, f"{begun}{thoughts}</think>\n\n{right}"
        for function in (answers.answer_block, answers.extract_answer, answers.lenient_answer):
            assert function(cut, thinking) is None
            assert function(whole, thinking) == "12"
        for function in (answers.format_is_exact, answers.format_is_loose):
            assert not function(cut, thinking)
            assert function(whole, thinking)
        assert not answers.is_correct_leniently(cut, "12", thinking)
        assert not answers.is_close(cut, "12", 0.1, thinking)
        assert answers.is_close(whole, "12", 0.1, thinking)


@pytest.mark.parametrize(
    ("text", "opened"),
    [
        ("assistant\n<think>", True), (OPENED, True), (OPENED + "Okay, ", True), ("<think>\n\n</think>\n\n", False),
        ("assistant\n", False), ("Put your thoughts in <think> tags.\nassistant\n", False), ("", False),
        ("<think>a</think>\nassistant\n<think>\n", True),
    ],
)  # fmt: skip
def test_a_prompt_opens_thoughts_where_its_last_tag_is_open(text: str, opened: bool) -> None:
    assert prompts.opens_thoughts(text) is opened


def test_a_completion_that_ends_in_its_thoughts_is_cut() -> None:
    for text, thinking in (("<think>so", False), ("so", True), ("", True), ("so</think>18<think>", True)):
        assert prompts.cut_while_thinking(text, thinking)
    for text, thinking in (("<think>so</think>18", False), ("so</think>", True), ("18", False), ("so</think>", False)):
        assert not prompts.cut_while_thinking(text, thinking)


# --- Rewards ---


@pytest.mark.parametrize("who", PROMPTS)
@pytest.mark.parametrize("name", [name for name in rewards.REWARDS if name != "random_reward"])
def test_a_reward_is_paid_for_what_follows_the_thoughts(name: str, who: str) -> None:
    function = rewards.REWARDS[name]
    sent, begun = PROMPTS[who]
    thoughts, right, _ = STATED["tagged"]
    texts = [f"{begun}{right} or so", f"{begun}{thoughts}", f"{begun}{thoughts}</think>\n\n{right}"]
    silent, paid = function(None, ["", right], ["12"] * 2)
    assert paid > silent
    assert function([sent] * 3, texts, ["12"] * 3) == [silent, silent, paid]
    thinking = prompts.opens_thoughts(sent)
    assert [function.explain(text, "12", thinking=thinking).points for text in texts] == [silent, silent, paid]
    as_messages = [[{"role": "assistant", "content": text}] for text in texts]
    chats = [[{"role": "user", "content": "Q?"}]] * 3
    assert function(chats, as_messages, ["12"] * 3, thinking=thinking) == [silent, silent, paid]


@pytest.mark.parametrize("kind", STATED)
def test_each_kind_is_paid_by_the_same_text_as_it_is_graded(kind: str) -> None:
    thoughts, right, _ = STATED[kind]
    texts = [thoughts, f"{thoughts}</think>{right}"]
    assert rewards.correct_answer([OPENED] * 2, texts, [GOLDS[kind]] * 2, kind=[kind] * 2) == [0.0, 1.0]


def test_prompts_may_open_some_thoughts_and_not_others() -> None:
    _, right, _ = STATED["tagged"]
    assert rewards.correct_answer(["Q?", OPENED], [right] * 2, ["12"] * 2) == [1.0, 0.0]


def test_a_function_of_a_file_gets_whole_completions_and_needs_no_new_argument(tmp_path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "def length(prompts, completions, answer, kind=None, task=None):\n    return list(map(len, completions))\n"
    )
    (function,) = rewards.get_rewards([f"{file}:length"])
    text = "so</think>12"
    assert function(prompts=[OPENED], completions=[text], answer=["12"]) == [len(text)]
    (part,) = rewards.explain(text, "12", [function], thinking=True)
    assert part.points == len(text)


# --- End to end ---

TEMPLATE = (
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n<think>\n"
)


def test_an_evaluation_knows_from_its_prompts_who_thinks(tokenizer, monkeypatch, tmp_path) -> None:
    """With a template that opens the thoughts itself; its records are graded again in the same way."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    problems = [Problem(f"p{n}", f"Question {n}?", "", "12", "own", kind="integer") for n in range(3)]
    thoughts, right, _ = STATED["integer"]
    written = dict(
        zip((p.question for p in problems), (thoughts, f"{thoughts}</think>\n\n{right}", right), strict=True)
    )

    def generate(texts: list[str]) -> list[str]:
        return [next(text for question, text in written.items() if question in sent) for sent in texts]

    path = tmp_path / "records.jsonl"
    run = evaluation.evaluate(
        generate, problems, render=lambda question: prompts.render(tokenizer, question), path=path, progress=False
    )
    for records in (run.records, evaluation.EvalRun.load(path).records):
        assert [record["strict"] for record in records] == [False, True, False]
        assert [record["extracted"] for record in records] == [None, "12", None]
        cut = [prompts.cut_while_thinking(r["completion"], prompts.opens_thoughts(r["prompt"])) for r in records]
        assert cut == [True, False, True]
