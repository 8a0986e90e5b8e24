"""What a problem is, whatever its source."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from grpo_lib.prompts import PromptSettings

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Problem:
    """One question with one answer."""

    id: str  # unique within its source and split
    question: str
    solution: str  # a worked solution, as text
    answer: str  # the gold; a number in canonical form: "1080", not "1,080" or "1080.00"; LaTeX as it is
    source: str  # "words", "gsm8k", ...
    steps: int | None = None  # calculations in the worked solution, where that is known
    kind: str = "tagged"  # "tagged": one number in <answer> tags; "integer": an integer stated last; "latex"; "code"
    task: str | None = None  # its name, where a recipe has several tasks
    prompts: PromptSettings | None = None  # of its task, where they are not those of the recipe

    def prompt(self, render: Callable[..., str]) -> str:
        """What the model is sent, by a `render` that takes a question, and prompts that are not the recipe's."""
        return render(self.question) if self.prompts is None else render(self.question, self.prompts)

    def completion_prefix(self, render: Callable[..., str] | None) -> str:
        """The end of that prompt that counts as the beginning of the completion; empty where there is none.

        A `render` whose prompts end so has a method `completion_prefix(prompts)`.
        """
        of = getattr(render, "completion_prefix", None)
        return of(self.prompts) if of else ""


class ProblemSettings(Protocol):
    """A recipe's section `problems`; docs/recipes.md says what each key means."""

    source: str
    difficulty: str
    path: str | None
    columns: Any  # own_files.Columns
    kind: str  # of the answers in these columns
    conflicts: str
    test_source: str | None
    test_path: str | None
    train: int | None
    validation: int | None
    test: int | None
    seed: int


class TaskSettings(ProblemSettings, Protocol):
    """One of several tasks: an entry of `problems`, where that is a list."""

    name: str
    prompts: PromptSettings | None
