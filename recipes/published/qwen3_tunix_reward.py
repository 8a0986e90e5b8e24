"""The reward of qwen3-1.7b-gsm8k-tunix.yaml: four values, for a right answer and for the form.

    1    right, in the form        0.5  right, in another form
    0.1  wrong, in the form        0    wrong, in another form

The values are those of Tunix's examples/math_gsm8k/qwen3_grpo_demo.py; the code is ours.
"""

from grpo_lib.rewards import reward_function

VALUES = {
    # (right, in the form)
    (True, True): (1.0, "right, in the form"),
    (True, False): (0.5, "right, in another form"),
    (False, True): (0.1, "wrong, in the form"),
    (False, False): (0.0, "wrong, in another form"),
}
# The tags of the form, in their order.  The prompt has opened the reasoning.
TAGS = ("</reasoning>", "<answer>", "</answer>")
BOX = "\\boxed{"


def has_the_form(completion: str) -> bool:
    """Whether each of the tags is there once, in their order; what stands around them is not looked at."""
    places = [completion.find(tag) for tag in TAGS]
    once = all(completion.count(tag) == 1 for tag in TAGS)
    return once and places == sorted(places)


def boxed_answer(completion: str) -> str | None:
    r"""What the last \boxed{} of the last answer block holds, or of the whole text where there is no block."""
    _, opened, after = completion.rpartition("<answer>")
    block, closed, _ = after.partition("</answer>")
    searched = block if opened and closed else completion
    _, boxed, rest = searched.rpartition(BOX)
    return content_of_braces(rest) if boxed else None


def content_of_braces(text: str) -> str | None:
    """The beginning of a text, up to the brace that closes one opened before it; None if none does."""
    depth = 1
    for place, letter in enumerate(text):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return text[:place]
    return None


def is_right(completion: str, gold: str) -> bool:
    """Letter by letter, but for commas and outer spaces: \\boxed{18.0} is wrong where the gold is 18."""
    answer = boxed_answer(completion)
    return answer is not None and answer.replace(",", "").strip() == gold.replace(",", "").strip()


@reward_function
def answer_and_form(completion: str, gold: str) -> tuple[float, str]:
    """1, 0.5, 0.1 or 0; the completion has the opened tag of the prompt in front."""
    return VALUES[is_right(completion, gold), has_the_form(completion)]
