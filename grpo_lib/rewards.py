"""Reward functions, in the calling convention that Tunix and TRL share.

Each is `fn(prompts, completions, answer, **kwargs) -> list[float]`, one reward per completion. `completions`
holds strings, or TRL's conversations (lists of {"role", "content"}); `answer` holds one gold per completion, and the
column `kind`, where there is one, how it is graded (`Problem.kind`). Tunix logs each part of the reward under the
function's `__name__`.

What counts of a completion follows its thoughts in <think> tags. A prompt that ends in an open <think> has begun them,
and so has `thinking=True`, for `prompts` that are not the texts that the model is sent. A function of your own gets
completions whole.

What is written below is how one completion is scored, points and the reason for them;
`reward_function` makes the batch function of it, and `fn.explain(completion, gold)` gives both, so that what is shown
is what was paid.

The first four are the reward of the reference recipe, as the field's tutorials use it. A perfect completion
earns 3.0 + 2.0 + 3.0 + 1.5 = 9.5. With gold 18 the sum also pays, which is what the course comes to find:

    <reasoning>r</reasoning><answer>?</answer>      5.0    no answer at all, in perfect tags
    <reasoning>r</reasoning><answer>17</answer>     5.5    wrong, but close
    <reasoning>r</reasoning><answer>99</answer>     4.0    wrong: an honest try earns less than "?"
    18                                             -2.0    right, but without tags: the same as saying nothing

`correct_answer` and `tidy_format` are the repair. tests/lib/test_attacks.py tries to farm both.
"""

import functools
import inspect
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_lib import answers, reward_files
from grpo_lib.common.errors import CourseError
from grpo_lib.prompts import (
    ANSWER_CLOSE,
    ANSWER_OPEN,
    REASONING_CLOSE,
    REASONING_OPEN,
    TAGS,
    THINK_OPEN,
    after_thoughts,
    opens_thoughts,
)

RewardFunction = Callable[..., list[float]]
Completion = str | Sequence[dict[str, Any]]
Score = tuple[float, str]  # points, and why in one sentence

_TEMPLATE_MISMATCH = "each of the four tags occurs exactly once, but order, spacing or content is not the template's"
_SHOWN = 40  # characters of a completion that an explanation quotes


@dataclass(frozen=True)
class Part:
    """What one reward function pays for a completion."""

    name: str  # of the function
    points: float
    why: str  # one plain sentence with what was seen; one short line, whatever the completion holds


def reward_function(score: Callable[..., Score]) -> RewardFunction:
    """Decorator: from the score of one completion to the batch function that a trainer calls.

    Args:
      score: takes the completion's text and the gold number as text, and returns points and the reason. A default
        for the gold number says that it is not needed: then `answer` may be left out. A third parameter `kind` says
        that it also scores golds that are no number in tags.

    Returns:
      The batch function, under the name and docstring of `score`, with `.explain(completion, gold, kind, thinking)
      -> Part` and `.kinds`, those that it knows. `score` sees what follows the thoughts. It raises ValueError if there
      are not as many golds as completions.
    """
    any_kind = "kind" in inspect.signature(score).parameters

    def score_by(text: str, gold: str, kind: str) -> Score:
        return score(text, gold, kind) if any_kind else score(text, gold)

    def batch(
        prompts: Any,
        completions: Iterable[Completion],
        answer: Any = None,
        kind: Any = None,
        thinking: bool = False,
        **kwargs: Any,
    ) -> list[float]:
        texts = _after_thoughts(prompts, [_text(completion) for completion in completions], thinking)
        if answer is None:
            return [score(text)[0] for text in texts]
        kinds = ["tagged"] * len(texts) if kind is None else kind
        return [score_by(text, str(gold), str(by))[0] for text, gold, by in zip(texts, answer, kinds, strict=True)]

    def explain(completion: Completion, gold: str, kind: str = "tagged", thinking: bool = False) -> Part:
        points, why = score_by(after_thoughts(_text(completion), thinking), str(gold), kind)
        return Part(score.__name__, points, why)

    function: Any = functools.wraps(score, assigned=("__module__", "__name__", "__qualname__", "__doc__"))(batch)
    function.explain = explain
    function.kinds = answers.KINDS if any_kind else ("tagged",)
    # Tunix asks for the signature. `wraps` shows the source of `score`, as it should, but would show its arguments too.
    function.__signature__ = inspect.signature(batch, follow_wrapped=False)
    return function


@reward_function
def match_format_exactly(completion: str, gold: str = "") -> Score:
    """+3.0 for exactly the template, blocks on lines of their own, too; +1.5 with other white space, else 0.0."""
    if answers.format_is_exact(completion):
        return 3.0, "exactly the template"
    if answers.format_is_loose(completion):
        return 1.5, "the template, with white space at its tags"
    return 0.0, _miscounted(completion) or _TEMPLATE_MISMATCH


@reward_function
def match_format_approximately(completion: str, gold: str = "") -> Score:
    """For each of the four tags +0.5 if it occurs exactly once, else -0.5: from -2.0 to +2.0."""
    points = sum(0.5 if completion.count(tag) == 1 else -0.5 for tag in TAGS)
    return points, _miscounted(completion) or "each of the four tags occurs exactly once"


@reward_function
def check_answer(completion: str, gold: str) -> Score:
    """+3.0 for a tagged number equal in value, +0.5 within 10 %, +0.25 within 20 %, -1.0 for any other.

    0.0 where no number can be extracted: there is nothing to check, and this is what lets garbage in perfect
    tags earn 5.0 in total, more than the 4.0 of a wrong number.
    """
    answer = answers.extract_answer(completion)
    seen = _seen(completion, answer, gold)
    if answer is None:
        return 0.0, seen
    if answers.same_value(answer, gold):
        return 3.0, f"{seen}: equal"
    if answers.near_value(answer, gold, 0.1):
        return 0.5, f"{seen}: within 10 %"
    if answers.near_value(answer, gold, 0.2):
        return 0.25, f"{seen}: within 20 %"
    return -1.0, f"{seen}: not within 20 %"


@reward_function
def check_numbers(completion: str, gold: str) -> Score:
    """+1.5 if the extracted number equals the gold number in value, else 0.0."""
    answer = answers.extract_answer(completion)
    seen = _seen(completion, answer, gold)
    return (1.5, f"{seen}: equal") if answers.same_value(answer, gold) else (0.0, seen)


@reward_function
def correct_answer(completion: str, gold: str, kind: str = "tagged") -> Score:
    """1.0 if the one tagged answer equals the gold number in value, else 0.0.

    Without tags (`kind` integer or latex) it is the answer that the completion states last.

    With `tidy_format`, the repair of the reference reward. There the format alone paid more than half of the
    total, whatever stood in the tags, and a near miss was paid too. Here being right is what pays: a wrong
    completion earns at most 0.1 in all, a right one at least 1.0. One answer means one: several attempts, or
    an answer inside the reasoning, earn nothing. Text around the blocks, or a missing reasoning, is untidy and
    nothing more.
    """
    if kind != "tagged":
        return _score_statement(completion, gold, kind)
    if fault := _not_one_answer(completion):
        return 0.0, fault
    answer = answers.extract_answer(completion)
    seen = _seen(completion, answer, gold)
    return (1.0, f"{seen}: equal") if answers.same_value(answer, gold) else (0.0, seen)


@reward_function
def tidy_format(completion: str, gold: str = "") -> Score:
    """0.1 if the format is exact and a number can be extracted from it, else 0.0.

    Asking for the number closes the hole: `<answer>?</answer>` in perfect tags earns nothing. Being right is worth
    ten times as much, where a group has a right completion. Where it has none, this tenth is the only difference, and
    advantages are divided by the group's standard deviation: then tidy form is taught at full strength.
    """
    if not answers.format_is_exact(completion):
        return 0.0, _miscounted(completion) or _TEMPLATE_MISMATCH
    answer = answers.extract_answer(completion)
    if answer is None:
        return 0.0, f"exactly the template, but {_seen(completion, None)}"
    return 0.1, f"exactly the template, and the answer block says {_line(answer)}"


def random_reward(prompts: Any, completions: Iterable[Completion], answer: Any = None, **kwargs: Any) -> list[float]:
    """1.0 or 0.0 by the toss of a coin, whatever the completion is: a control.

    What a training gains with it comes from no answer being right (R. Shao et al., "Spurious Rewards",
    arXiv:2506.10947).  The tosses follow from the texts of the batch, so that a resumed run has the same ones.
    """
    texts = [_text(completion) for completion in completions]
    tosses = random.Random("".join(texts).encode(errors="replace"))
    return [float(tosses.random() < 0.5) for _ in texts]


def _explain_random(completion: Completion, gold: str, kind: str = "tagged", thinking: bool = False) -> Part:
    return Part("random_reward", 0.5, "a coin decides: 0.5 on average")


vars(random_reward).update(explain=_explain_random, kinds=answers.KINDS)

# Those of the field's tutorials; notebook 02 finds out what they pay for no solution.
REFERENCE_REWARDS = (match_format_exactly, match_format_approximately, check_answer, check_numbers)
# For right answers, and a tenth of that for their format.
REPAIRED_REWARDS = (correct_answer, tidy_format)
REWARDS = {function.__name__: function for function in (*REFERENCE_REWARDS, *REPAIRED_REWARDS, random_reward)}


def overlong_penalty(lengths: Iterable[int], limit: int, buffer: int, penalty: float = 1.0) -> list[float]:
    """What is taken off for length: 0 up to limit - buffer tokens, then ever more, up to -penalty at the limit.

    DAPO's soft overlong punishment (arXiv:2503.14476, equation 13).  Not a recipe's reward function by name: it sees
    tokens, which only the sampler has counted (`grpo.overlong_buffer`).

    Args:
      lengths: of completions, in tokens, end token included.
    """
    return [-penalty * min(1.0, max(0.0, (length - limit + buffer) / buffer)) for length in lengths]


def get_rewards(names: Iterable[str], kinds: Iterable[str] = ("tagged",)) -> list[RewardFunction]:
    """The reward functions of these names, in their order; a name is one of REWARDS, or FILE.py:FUNCTION.

    Raises CourseError for a name that is not in REWARDS, a file that `reward_files.load` refuses, two functions that
    metrics could not tell apart, or a function that cannot score problems of these `kinds`.
    """
    names = [str(name) for name in names]
    if unknown := [name for name in names if name not in REWARDS and not reward_files.is_file(name)]:
        raise CourseError(
            f"rewards: unknown {', '.join(unknown)}; known are {', '.join(REWARDS)}, and a file of yours as "
            "FILE.py:FUNCTION"
        )
    functions: list[Any] = [REWARDS.get(name) or _from_file(name) for name in names]
    called = [function.__name__ for function in functions]
    for name, own in zip(names, called, strict=True):
        if name not in REWARDS and called.count(own) > 1:
            raise CourseError(f"rewards: {name}: another function is called {own}, too; give it a name of its own")
    for function, kind in itertools.product(functions, kinds):
        if kind not in function.kinds:
            able = [name for name, other in REWARDS.items() if kind in other.kinds]  # pyright: ignore[reportFunctionMemberAccess]
            raise CourseError(
                f"rewards: {function.__name__} scores a number in <answer> tags, and these problems are graded as "
                f"{kind}; use {', '.join(able)}"
            )
    return functions


def _from_file(setting: str) -> RewardFunction:
    """A function of the user's, with the attributes of those above where it lacks them."""
    function: Any = reward_files.load(setting)

    def explain_value(completion: Completion, gold: str, kind: str = "tagged", thinking: bool = False) -> Part:
        prompt = THINK_OPEN if thinking else ""
        value = function(prompts=[prompt], completions=[_text(completion)], answer=[gold], kind=[kind])[0]
        return Part(function.__name__, value, f"the value of {setting}")

    vars(function).update({"explain": explain_value, "kinds": answers.KINDS} | vars(function))
    return function


def explain(
    completion: Completion,
    gold: str,
    functions: Iterable[RewardFunction] = REFERENCE_REWARDS,
    kind: str = "tagged",
    thinking: bool = False,
) -> list[Part]:
    """What each function pays for a completion, and why; the reward is the sum of the points.

    `thinking`: whether its prompt ends in an open <think>.
    """
    opened = {"thinking": True} if thinking else {}  # an `explain` of your own needs that argument only then
    return [function.explain(completion, gold, kind, **opened) for function in functions]


def _text(completion: Completion) -> str:
    """A completion as text; of a conversation, what its last message says."""
    if isinstance(completion, str):
        return completion
    return (completion[-1].get("content") or "") if completion else ""


def _after_thoughts(prompts: Any, texts: list[str], thinking: bool) -> list[str]:
    """Completions without their thoughts; `prompts` say which begin in them, where they are texts, one for each."""
    if prompts is None or len(prompts) != len(texts):
        return [after_thoughts(text, thinking) for text in texts]
    opened = (thinking or (isinstance(prompt, str) and opens_thoughts(prompt)) for prompt in prompts)
    return [after_thoughts(text, begun) for text, begun in zip(texts, opened, strict=True)]


def _score_statement(completion: str, gold: str, kind: str) -> Score:
    """1.0 if the answer that the completion states last is `gold`, else 0.0."""
    stated = answers.stated_answer(completion, kind)
    if stated is None:
        return 0.0, "no answer is stated"
    seen = f"the answer stated last is {_line(stated)}, gold is {_line(gold)}"
    return (1.0, f"{seen}: equal") if answers.agrees(stated, gold, kind) else (0.0, seen)


def _not_one_answer(completion: str) -> str | None:
    """Why the tagged answer is not one answer after the reasoning, or None."""
    opened, closed = completion.count(ANSWER_OPEN), completion.count(ANSWER_CLOSE)
    if opened > 1 or closed > 1:
        return f"of several answers none is paid: {_count(ANSWER_OPEN, opened)}, {_count(ANSWER_CLOSE, closed)}"
    before, _, after = completion.partition(ANSWER_OPEN)
    if REASONING_OPEN in before and REASONING_CLOSE in after:
        return "the answer block is in the middle of the reasoning"
    return None


def _miscounted(completion: str) -> str | None:
    """The tags that do not occur exactly once, or None."""
    counts = {tag: completion.count(tag) for tag in TAGS}
    return ", ".join(_count(tag, count) for tag, count in counts.items() if count != 1) or None


def _count(tag: str, count: int) -> str:
    if count == 0:
        return f"{tag} is missing"
    return f"{tag} occurs once" if count == 1 else f"{tag} occurs {count} times"


def _seen(completion: str, answer: str | None, gold: str = "") -> str:
    """What the answer block holds, with the gold number if a number can be read there."""
    if answer is not None:
        return f"the answer block says {_line(answer)}, gold is {_line(gold)}"
    block = answers.answer_block(completion)
    if block is None:
        return "there is no answer block"
    if not block.strip():
        return "the answer block is empty"
    return f"the answer block says “{_line(block)}”, which does not state one number"


def _line(text: str) -> str:
    """The beginning of any text on one printable line."""
    line = " ".join(text.lstrip()[: 2 * _SHOWN].split())
    if len(line) > _SHOWN:
        line = line[: _SHOWN - 1] + "…"
    return line if line.isprintable() else "".join(c if c.isprintable() else "�" for c in line)
