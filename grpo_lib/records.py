"""Results of an evaluation: one record per problem and sample, its verdicts, and the statistics over them.

Records keep the completion as it is graded.  Where the prompt ends with its beginning (`prompts.completion_prefix`),
that is in front, and in a field `completion_prefix`; what the model wrote is the rest.  Verdicts are never taken from a
file: its completions are graded again when it is read, so before and after are compared by the same grader, however old
their files are.
"""

import os
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_lib import answers, statistics
from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import ends_torn, read_jsonl, write_jsonl_atomic
from grpo_lib.prompts import after_thoughts, opens_thoughts
from grpo_lib.rewards import RewardFunction

Record = dict[str, Any]

VERDICTS = ("strict", "lenient", "partial", "format")
CLOSE = 0.1  # partial credit: within 10 % of the gold number
_GRADER = "the grader raised "  # an error that starts like this is the grader's
_TEXT, _NUMBER, _TRUTH = (str,), (int,), (bool,)
_OR_NONE = (type(None),)
# The fields that statistics and report need, and what each may be.
REQUIRED: dict[str, tuple[type, ...]] = {
    "id": _TEXT,
    "sample": _NUMBER,
    "greedy": _TRUTH,
    "model": _TEXT + _OR_NONE,
    **dict.fromkeys(("question", "solution", "prompt", "completion"), _TEXT),
    "extracted": _TEXT + _OR_NONE,
    "gold": _TEXT,
    **dict.fromkeys((*VERDICTS, "truncated"), _TRUTH),
}
# Those that a record may have, too.
OPTIONAL: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("task", "completion_prefix", "settings", "error"), _TEXT + _OR_NONE),
    **dict.fromkeys(("tokens", "steps"), _NUMBER + _OR_NONE),
}


@dataclass(frozen=True)
class Generation:
    """One completion as text, without the token that ends the turn.

    `tokens` is the number of sampled tokens, including the end token (None: unknown); `truncated`: the limit was
    reached before the end token.  `error` is the reason why there is no completion: graded as wrong, whatever `text`.
    """

    text: str
    tokens: int | None
    truncated: bool
    error: str | None = None


def grade(completion: str, gold: str, kind: str = "tagged", *, thinking: bool = False) -> Record:
    """Verdicts on one completion, by the kind of its problem (`Problem.kind`).

    Of a gold that is an integer or LaTeX there is no partial credit, `format` says that an answer is stated at all,
    and for LaTeX the lenient verdict is the strict one: its last number is no answer.  What counts of a completion
    follows its thoughts; `thinking` says that its prompt has opened them (`prompts.opens_thoughts`).

    Returns:
      extracted (str or None), strict, lenient, partial, format (bool) and error: None, or what the grader raised.  With
      an error every verdict is False, so that the denominator is the same for all of them.
    """
    try:
        completion = after_thoughts(completion, thinking)
        extracted = answers.stated_answer(completion, kind)
        if kind != "tagged":
            strict = answers.agrees(extracted, gold, kind)
            lenient = strict or (kind == "integer" and answers.is_correct_leniently(completion, gold))
            verdicts = (strict, lenient, strict, extracted is not None)
            return {"extracted": extracted, **dict(zip(VERDICTS, verdicts, strict=True)), "error": None}
        return {
            "extracted": extracted,
            "strict": bool(answers.same_value(extracted, gold)),
            "lenient": bool(answers.is_correct_leniently(completion, gold)),
            "partial": bool(answers.near_value(extracted, gold, CLOSE)),
            "format": bool(answers.format_is_exact(completion)),
            "error": None,
        }
    except Exception as error:  # a grader's bug must not shrink the denominator
        return wrong(f"{_GRADER}{type(error).__name__}: {error}")


def wrong(error: str) -> Record:
    """The verdicts if there is nothing to grade."""
    return {"extracted": None, **dict.fromkeys(VERDICTS, False), "error": error}


def graded_again(record: Record) -> Record:
    """`record` with the verdicts of this version's `grade`; if `generate` had failed it stays wrong."""
    error = record.get("error")
    if error and not str(error).startswith(_GRADER):
        return record
    thinking = opens_thoughts(record["prompt"])
    return record | grade(record["completion"], record["gold"], kind_of(record), thinking=thinking)


def kind_of(record: Record) -> str:
    """The kind of a record's problem; a file that does not name it is of tagged ones."""
    return record.get("kind", "tagged")


def reward_means(records: Sequence[Record], functions: Iterable[RewardFunction]) -> list[float]:
    """What each reward function pays for the completions of these records, on average."""
    prompts, texts, golds = ([record[key] for record in records] for key in ("prompt", "completion", "gold"))
    kinds = [kind_of(record) for record in records]
    points = [function(prompts=prompts, completions=texts, answer=golds, kind=kinds) for function in functions]
    return [sum(values) / len(values) for values in points]


@dataclass(frozen=True)
class EvalRun:
    """The records of one evaluation, in the order of its problems.

    `seconds`: how long generating and grading took, see `evaluation.evaluate`; None when the records come from a file.
    """

    records: list[Record]
    seconds: float | None = field(default=None, compare=False)

    @property
    def counted(self) -> list[Record]:
        """The records that accuracy is about: the greedy ones, or all where every completion was sampled."""
        return [record for record in self.records if record["greedy"]] or self.records

    def summary(self) -> dict[str, Any]:
        """Rates from 0 to 1 over all problems.

        `n` counts problems, and the Wilson interval is for that n: several samples of one problem are not independent
        draws.  With sampled completions there are also `sampled_accuracy`, the mean over them; `samples`, their number
        per problem; `pass_at_k`, {"1": …, "2": …, "4": …, up to `samples`}, unbiased (see statistics), and
        `pass_at_k_interval` for the same k; and `maj_at_k`, the fraction of problems whose most frequent answer, of all
        samples, is right.  "avg@32" elsewhere is pass@1 of 32 samples.
        """
        accuracy, interval = self.accuracy()
        return {
            "accuracy": accuracy,
            "n": len(self.verdicts("strict")),
            "interval": list(interval),
            "lenient_accuracy": self._mean("lenient"),
            "partial_accuracy": self._mean("partial"),
            "format_accuracy": self._mean("format"),
            "truncated": self._mean("truncated"),
            **_sampled_summary([record for record in self.records if not record["greedy"]]),
        }

    def accuracy(self) -> tuple[float, tuple[float, float]]:
        """Strict accuracy, and its Wilson interval for n problems."""
        accuracy = self._mean("strict")
        n = len({record["id"] for record in self.counted})
        return accuracy, statistics.wilson_interval(accuracy * n, n)

    def rates(self, verdict: str) -> dict[str, float]:
        """For each problem id the fraction of its counted completions with that verdict."""
        return {key: sum(values) / len(values) for key, values in self.verdicts(verdict).items()}

    def verdicts(self, verdict: str) -> dict[str, list[bool]]:
        """For each problem id that verdict on each of its counted completions."""
        return {key: [bool(record[verdict]) for record in group] for key, group in by_problem(self.counted).items()}

    def by_task(self) -> dict[str, "EvalRun"]:
        """The records of each task, where they come from several; else empty."""
        tasks: dict[str, list[Record]] = {}
        for record in self.records:
            if task := record.get("task"):
                tasks.setdefault(task, []).append(record)
        return {task: EvalRun(records) for task, records in tasks.items()}

    def save(self, path: str | os.PathLike) -> Path:
        """Write one JSON line per record, atomically."""
        return write_jsonl_atomic(path, self.records)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "EvalRun":
        """Read what `save` wrote, and grade its completions again (80,000 a second); the file stays as it is.

        Raises CourseError when there is no such file, it is empty, or a record lacks a field.
        """
        try:
            records = read_jsonl(path)
        except FileNotFoundError:
            raise CourseError(f"{path}: no such file; run the evaluation that writes it first") from None
        if not records:
            raise CourseError(f"{path}: has no records; remove it and evaluate again")
        if ends_torn(path):  # it was written whole: a copy was cut short, or the disk is damaged
            raise CourseError(
                f"{path}: the last line is not whole; put the file back from a copy, or remove it and evaluate again "
                "(before.jsonl only while the run has taken no step)"
            )
        for number, record in enumerate(records, start=1):
            if wrong_field := what_is_wrong(record):
                raise CourseError(f"{path}: record {number} {wrong_field}; remove the file and evaluate again")
        return cls([graded_again(record) for record in records])

    def _mean(self, verdict: str) -> float:
        return sum(bool(record[verdict]) for record in self.counted) / len(self.counted)


def what_is_wrong(record: Record) -> str | None:
    """What a record from a file lacks, or has of another type; None where it is as `evaluate` writes it."""
    if missing := [name for name in REQUIRED if name not in record]:
        return f"lacks {', '.join(missing)}"
    for name, types in (REQUIRED | OPTIONAL).items():
        value = record.get(name)
        if name in record and type(value) not in types:
            return f"has {name} {reprlib.repr(value)}"
    if kind_of(record) not in answers.KINDS:
        return f"has kind {reprlib.repr(kind_of(record))}"
    return None


def summarize(
    before: EvalRun,
    after: EvalRun,
    *,
    wall_seconds: float | None = None,
    train_seconds: float | None = None,
    steps: int | None = None,
    base: EvalRun | None = None,
) -> dict[str, Any]:
    """The content of summary.json: both summaries, and the paired difference of strict accuracy.

    `difference` is after - before, a fraction; its interval is a 95 % paired bootstrap over problems, whose samples
    stay together.  `mcnemar_p` is exact and `mcnemar_mid_p` its mid-p variant; both are None when a problem has several
    samples, for which the test is not defined.  maj_at_k may be compared only for equal numbers of samples.
    Of several tasks `tasks` has the same for each: its name -> both summaries and the difference.  Of a run with a
    cold start, which is between `base` and `before`, `cold_start` has the same for these two.

    Raises CourseError when the two were not run on the same problems, or one is greedy and the other sampled.
    """
    check_same_problems(before, after)
    parts = after.by_task()
    tasks = {"tasks": {task: _compare(part, parts[task]) for task, part in before.by_task().items()}} if parts else {}
    times = {"wall_seconds": wall_seconds, "train_seconds": train_seconds, "steps": steps}
    cold_start = {"cold_start": _compare(base, before)} if base else {}
    return _compare(before, after) | times | tasks | cold_start


def _compare(before: EvalRun, after: EvalRun) -> dict[str, Any]:
    """Both summaries and the paired difference of strict accuracy, of runs on the same problems."""
    first, second = before.verdicts("strict"), after.verdicts("strict")
    old, new = [*first.values()], [second[key] for key in first]
    bootstrap = statistics.paired_bootstrap(old, new)
    one_each = all(len(verdicts) == 1 for verdicts in (*old, *new))
    mcnemar = statistics.mcnemar([a[0] for a in old], [b[0] for b in new]) if one_each else None
    return {
        "before": before.summary(),
        "after": after.summary(),
        "difference": bootstrap.difference,
        "difference_interval": [bootstrap.low, bootstrap.high],
        "mcnemar_p": mcnemar.p_value if mcnemar else None,
        "mcnemar_mid_p": mcnemar.mid_p if mcnemar else None,
    }


def by_problem(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The records by problem id; of each problem the greedy one comes first, then the samples in their order."""
    groups: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: not record["greedy"]):
        groups.setdefault(record["id"], []).append(record)
    return groups


def _sampled_summary(records: list[Record]) -> dict[str, Any]:
    if not records:
        return {}
    groups = list(by_problem(records).values())
    samples = min(len(group) for group in groups)
    tallies = [(len(group), sum(bool(record["strict"]) for record in group)) for group in groups]
    powers = {2**power for power in range(samples.bit_length())}
    means: dict[str, float] = {}
    intervals: dict[str, list[float]] = {}
    for k in sorted(powers | {samples}):
        of_problems = [statistics.pass_at_k(n, c, k) for n, c in tallies]
        means[str(k)] = sum(of_problems) / len(groups)
        intervals[str(k)] = list(statistics.clustered_interval(of_problems))
    return {
        "sampled_accuracy": sum(bool(record["strict"]) for record in records) / len(records),
        "samples": samples,
        "pass_at_k": means,
        "pass_at_k_interval": intervals,
        "maj_at_k": sum(map(_majority_is_right, groups)) / len(groups),
    }


def _majority_is_right(group: list[Record]) -> bool:
    """Whether the most frequent answer to a problem agrees with its gold."""
    kind = kind_of(group[0])
    # LaTeX and code have no canonical spelling: a vote is for the text as it stands.
    vote = statistics.majority_vote((record["extracted"] for record in group), kind in ("tagged", "integer"))
    return answers.agrees(vote, group[0]["gold"], kind)


def check_same_problems(before: EvalRun, after: EvalRun) -> None:
    """Raise CourseError for evaluations of different problems, or where one is greedy and the other sampled."""
    kinds = ["greedy" if any(record["greedy"] for record in run.records) else "sampled" for run in (before, after)]
    if kinds[0] != kinds[1]:
        raise CourseError(
            f"one evaluation is {kinds[0]} and the other {kinds[1]}: their difference would include that of "
            "temperature; evaluate both in the same way"
        )
    old, new = (
        {record["id"]: (record["question"], record["gold"]) for record in run.counted} for run in (before, after)
    )
    if old != new:
        raise CourseError(
            f"the evaluations have different problems ({len(old):,} and {len(new):,}, "
            f"{len(old.items() & new.items()):,} in common); evaluate both on the same ones"
        )
