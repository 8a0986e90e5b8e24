"""Completions from a JSON-lines file: a `generate` for grpo_lib.evaluation.

Nothing is skipped: a missing completion comes back as a Generation with an error, and counts as wrong.

Rows of other programs are read as well, and made rows of ours first (`FORMS`):

    {"question": "…", "messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    {"doc_id": 0, "doc": {"question": "…"}, "resps": [["…", "…"]], "filter": "strict-match"}      lm-eval's samples
    {"custom_id": "gsm8k-test-00000", "response": {"body": {"choices": [{"message": {…}}]}}}      OpenAI's batch output
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import read_jsonl
from grpo_lib.problems.types import Problem
from grpo_lib.prompts import THINK_OPEN, opens_thoughts
from grpo_lib.records import Generation

# What a file may be, for errors and --help.
FORMS = (
    "JSON lines with a text or chat messages as completion, response or messages, samples of lm-eval (--log_samples), "
    "or output of OpenAI's batches"
)


TEXTS = ("prompt", "completion", "response")


@dataclass(frozen=True)
class SavedCompletions:
    """A `generate` that looks completions up; made by `saved_completions`."""

    path: Path
    found: dict[tuple[str, int], Generation]  # (problem id, sample number)
    most: int  # the largest number of completions of one problem
    greedy: bool  # whether the first of several is a greedy one, as in a file of `evaluate(…, sampled=…)`
    prompts: dict[tuple[str, int], str]  # what the model was sent, if the file has it
    prefixes: dict[tuple[str, int], str]  # ends of the prompts that count as the beginnings of completions, if any
    thinking: bool = False  # whether prompts that the file does not have ended in an open <think>

    def sent(self, prompt: str, task: tuple[str, int]) -> str:
        sent = self.prompts.get(task, prompt)
        # A bare question says nothing of the chat template around it.
        unknown = sent == prompt and not opens_thoughts(sent)
        return f"{sent}\n{THINK_OPEN}\n" if self.thinking and unknown else sent

    def completion_prefix(self, task: tuple[str, int]) -> str:
        return self.prefixes.get(task, "")

    def __call__(self, prompts: list[str], *, tasks: list[tuple[str, int]]) -> list[Generation]:
        missing = Generation("", None, False, error=f"{self.path.name} has no completion of this problem and sample")
        return [self.found.get(task, missing) for task in tasks]


def saved_completions(
    path: str | os.PathLike,
    problems: Sequence[Problem],
    prefix_of: Callable[[Problem], str] = lambda _: "",
    thinking: bool = False,
) -> SavedCompletions:
    """Completions from a JSON-lines file, in any order.

    A row has its text as `completion` or `response`, a text or chat messages, of which the last one counts, or is one
    of the other FORMS. It is matched to its problem by `id`, `question`, or `prompt` (if that is the bare question).
    Several rows of one problem are its samples, in their order or by their `sample` number, from 0. `prompt`, `tokens`
    (a count), and `truncated` or a `finish_reason` of "length" are kept if they are there, so files that `evaluate`
    wrote can be read as well. Rows of other problems are ignored.

    Args:
      prefix_of: the end of a problem's prompt that counts as the beginning of its completion. A row that `evaluate`
        wrote names its own as `completion_prefix`, and its text begins with it; of any other row the text is what the
        model wrote after it.
      thinking: whether the chat template ended the prompts with an open <think>, so that the completions begin in
        thoughts. It counts for rows without a prompt, or with the bare question as one; others say it themselves.

    Raises:
      CourseError: no such file, no row matches a problem, none of these has a text, a row without an id has the
        question of two problems, a row has the id of one problem and another question, or samples are repeated or not
        numbered from 0.
    """
    path = Path(path)
    if path.is_char_device():  # such as /dev/zero, which has no end
        raise CourseError(f"{path} is a device; give a file of completions")
    try:
        rows = read_jsonl(path)
    except FileNotFoundError:
        raise CourseError(f"{path}: no such file of completions") from None
    named = _by_name(problems)
    found: dict[tuple[str, int], Generation] = {}
    prompts: dict[tuple[str, int], str] = {}
    prefixes: dict[tuple[str, int], str] = {}
    counts: Counter[str] = Counter()
    greedy = set()
    for number, row in _of_our_form(rows):
        problem = _owner(row, named, f"{path}: row {number}")
        if problem is None:
            continue
        sample = row["sample"] if type(row.get("sample")) is int else counts[problem.id]
        if (problem.id, sample) in found:
            raise CourseError(f"{path}: row {number} is sample {sample} of problem {problem.id} again; remove one")
        found[problem.id, sample] = _saved(row, number)
        prefixes[problem.id, sample] = _own_prefix(row) or prefix_of(problem)
        if isinstance(row.get("prompt"), str):
            prompts[problem.id, sample] = row["prompt"]
        counts[problem.id] += 1
        greedy.add((sample == 0, str(row.get("greedy"))))
    if not found:
        raise CourseError(
            f"{path}: none of its {len(rows)} rows matches one of the {len(problems)} problems; "
            "rows are matched by id or custom_id, or by question or prompt if that is the bare question"
        )
    most = max(counts.values())
    if not all(0 <= sample < most for _, sample in found):
        raise CourseError(f"{path}: no problem has more than {most} rows, so sample must run from 0 to {most - 1}")
    if all(generation.error for generation in found.values()):
        first = next(generation.error for generation in found.values())
        raise CourseError(f"{path}: none of its {len(rows)} rows has a completion ({first}); give {FORMS}")
    return SavedCompletions(
        path, found, most, greedy == {(True, "True"), (False, "False")}, prompts, prefixes, thinking
    )


def _of_our_form(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number of a row, a row of ours): one for each sample, of a row in any of the FORMS."""
    for number, row in enumerate(rows, start=1):
        if "resps" in row and "doc" in row:
            # lm-eval writes each sample once for each of its filters.
            made = _of_lm_eval(row) if row.get("filter") == rows[0].get("filter") else []
        elif "custom_id" in row:
            made = _of_a_batch(row)
        else:
            made = [_with_text(row)]
        for one in made:
            yield number, one


def _with_text(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose completion, and prompt, may be chat messages, with what the last one says in their place."""
    texts = {key: _message_text(row[key]) for key in TEXTS if isinstance(row.get(key), list | dict)}
    if isinstance(row.get("messages"), list) and not {"completion", "response"} & set(row):
        asked = [message for message in row["messages"] if _mapping(message).get("role") == "user"]
        texts = {"prompt": _message_text(asked), "completion": _message_text(row["messages"])} | texts
    if prompt := texts.get("prompt"):
        texts["prompt"] = prompt.strip()  # as questions are read
    return row | texts


def _message_text(message: Any) -> str | None:
    """What a chat message, or the last of several, says; None if it is no such message."""
    if isinstance(message, list):
        return _message_text(message[-1]) if message else None
    content = _mapping(message).get("content")
    if isinstance(content, list):  # parts of several types
        content = "".join(str(_mapping(part).get("text") or "") for part in content)
    return content if isinstance(content, str) else None


def _of_lm_eval(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each response that lm-eval has sampled, by the question in its document."""
    document = _mapping(row["doc"])
    question = next((document[key] for key in ("question", "problem", "prompt") if key in document), "")
    texts = row["resps"]
    while isinstance(texts, list) and len(texts) == 1 and isinstance(texts[0], list):
        texts = texts[0]  # of a task that generates: [[text, …]]
    found = texts if isinstance(texts, list) else []
    return [{"question": str(question).strip(), "completion": text} for text in found]


def _of_a_batch(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each choice of a batch's request, by its custom_id, which is the problem's id."""
    body = _mapping(_mapping(row.get("response")).get("body"))
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        said = json.dumps(row.get("error") or body.get("error") or "there is no choice")[:200]
        return [{"id": row["custom_id"], "completion": "", "error": f"request {row['custom_id']}: {said}"}]
    # Of several choices there is one count for all.
    tokens = _mapping(body.get("usage")).get("completion_tokens") if len(choices) == 1 else None
    made = []
    for choice in map(_mapping, choices):
        text = choice.get("text") if "message" not in choice else _message_text(choice["message"])
        ended = choice.get("finish_reason")
        made.append({"id": row["custom_id"], "completion": text, "finish_reason": ended, "tokens": tokens})
    return made


def _mapping(value: Any) -> dict[str, Any]:
    """The value if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def _by_name(problems: Sequence[Problem]) -> dict[tuple[str, str], list[Problem]]:
    """(field of a row, its value) -> the problems that it may mean."""
    named: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        for name in (("id", problem.id), ("question", problem.question), ("prompt", problem.question)):
            named.setdefault(name, []).append(problem)
    return named


def _owner(row: dict[str, Any], named: dict[tuple[str, str], list[Problem]], place: str) -> Problem | None:
    """The problem that a row belongs to; None for a row of other problems.

    Raises CourseError, which begins with `place`, where it may be one of two, or names one and has another question.
    """
    names = [(name, str(row[name])) for name in ("id", "question", "prompt") if name in row]
    owners = next((named[name] for name in names if name in named), [])
    if len(owners) > 1:
        raise CourseError(
            f"{place} may belong to problem {owners[0].id} or {owners[1].id}, which have the same "
            "question; give every row its id"
        )
    if not owners:
        return None
    (problem,) = owners
    if names[0] == ("id", problem.id) and row.get("question", problem.question) != problem.question:
        raise CourseError(f"{place} has another question for problem {problem.id}: made for other problems")
    return problem


def _own_prefix(row: dict[str, Any]) -> str:
    """The prefix that a row names, if its text begins with it."""
    prefix, text = row.get("completion_prefix"), row.get("completion", row.get("response"))
    return prefix if isinstance(prefix, str) and isinstance(text, str) and text.startswith(prefix) else ""


def _saved(row: dict[str, Any], number: int) -> Generation:
    text = row.get("completion", row.get("response"))
    if not isinstance(text, str):
        return Generation("", None, False, error=f"row {number} has no text as completion or response")
    text = text.removeprefix(_own_prefix(row))
    tokens = row.get("tokens")
    truncated = row.get("truncated") is True or row.get("finish_reason") == "length"
    failure = row.get("error") if not text and isinstance(row.get("error"), str) else None
    return Generation(text, tokens if type(tokens) is int else None, truncated, failure)
