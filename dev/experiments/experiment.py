"""What an experiment is, and all of them by name: they are in the YAML files of this folder, one for each group.

An arm is a list of changes of a recipe, as `grpo train` takes them.  What no recipe key says is a function: `before` is
a name in `arms.BEFORE`, `after` one in `measures.AFTER`, and `across` one in `measures.ACROSS`.

A prediction and its bar were committed before the experiment ran for the first time, and stay as they are.  Where
something was known by then, `known` of the claim says what; `real` had a first design, too (gain.yaml).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import yaml
from pydantic import ConfigDict, TypeAdapter
from shared import ROOT

FOLDER = Path(__file__).parent
TINY = "recipes/tiny-cpu.yaml"

Kind = Literal["above", "zero", "within", "at most", "half"]


@dataclass(frozen=True)
class Claim:
    """A prediction about the difference of two arms, `one - other`, of a measure, with its bar.

    kind: `above`, the mean is at least `bar` and the interval above 0; `zero`, the interval covers 0; `within`, the
    mean is at most `bar` away from 0; `at most`, the mean is at most `bar`; `half`, of the ratio one / other: the mean
    is at most `bar`.

    known: what had been seen of it before the bar was written; empty: nothing, the prediction was blind.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    text: str
    one: str
    other: str
    measure: str
    kind: Kind
    bar: float = 0.0
    known: str = ""


@dataclass(frozen=True)
class Experiment:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    question: str
    arms: dict[str, list[str]]  # changes of the recipe
    claims: list[Claim]
    changes: list[str] = field(default_factory=list)  # of all arms
    before: str = ""  # what is done to a session before it trains
    after: str = ""  # what is measured of a trained session, in addition to its accuracy
    across: str = ""  # what is measured of the runs of all arms together
    validate_every: int = 0  # steps
    recipe: str = TINY
    tested: str = "recipe"  # the test problems, a name in measures.TESTS
    seeds: dict[str, int] = field(default_factory=dict)  # of an arm that has fewer than the others
    samples: dict[str, int] = field(default_factory=dict)  # of each test problem, at temperature 1, of these arms

    @property
    def recipe_path(self) -> Path:
        return ROOT / self.recipe


def read_experiments(file: Path) -> dict[str, Experiment]:
    """The experiments of a group by name.

    Raises pydantic's ValidationError, a ValueError, with the experiment and the field that is wrong.  An arm whose name
    YAML takes for a number or a truth value, such as 8 or off, is written in quotes.
    """
    written = yaml.safe_load(file.read_text(encoding="utf-8"))
    return TypeAdapter(dict[str, Experiment]).validate_python(written)


def read_all(folder: Path = FOLDER) -> dict[str, Experiment]:
    experiments: dict[str, Experiment] = {}
    for file in sorted(folder.glob("*.yaml")):
        experiments |= read_experiments(file)
    return experiments


EXPERIMENTS = read_all()
