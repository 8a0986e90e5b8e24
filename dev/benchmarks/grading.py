"""Cost of grading: completions per CPU second, compared with math-verify and a bare pattern, and the worst case.

    python dev/benchmarks/grading.py                        # the completions of assets/reference, and GSM8K if at hand
    python dev/benchmarks/grading.py --rounds 5 --json

Three measurements, all in CPU seconds of this one process (time.process_time):

1. Throughput.  The same completions, in interleaved rounds, through the strict grader (answers.is_correct), all
   verdicts of an evaluation (evaluation.grade), the four parts of the reference reward, math-verify (parse and verify
   with their defaults), and a bare pattern for the last number.  math-verify knows no tags: it is given the
   text of the answer block, which is the same question, and for comparison the whole completion.  Its golds are
   parsed before the clock starts; ours keeps its golds in a cache.  The completions are those of the reference run,
   and GSM8K's own solutions in the course's template: real sentences, but all of them right and tidy.
   Then the readers of competition mathematics, integers and LaTeX, on GSM8K's solutions with the ends that models
   write in turn: "Answer: 33", a box, a box with a unit, an answer block.
2. Accuracy on tests/lib/spellings.jsonl, hard spellings judged by hand.  Ours finds the text in an answer block,
   the others are given it bare.  The table is this library's own test, so ours was written to pass it, and what
   counts as one answer is this course's rule: the table shows where the others differ, no more.
3. Worst case.  Each public function of answers and of rewards on texts of a megabyte that were built to hurt: bare,
   in the answer block, before or after a number there, and in the reasoning.  One run each; each function's worst is
   shown, and that text's time at half the length: half as much where the work is linear, as much where only the
   end of a text is looked at.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from job import ROOT, machine

from grpo_lib import answers, rewards
from grpo_lib.answers import competition
from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import read_jsonl
from grpo_lib.evaluation import grade
from grpo_lib.problems import gsm8k
from grpo_lib.prompts import template_completion

SPELLINGS = ROOT / "tests" / "lib" / "spellings.jsonl"
OURS = "is_correct"
LABELS = {
    "is_correct": "strict grader (is_correct)",
    "grade": "all verdicts (grade)",
    "reference_reward": "reference reward, four parts",
    "math_verify": "math-verify, on the answer block",
    "math_verify_whole": "math-verify, on the completion",
    "last_number": "bare pattern",
}
# How completions of competition mathematics end, in turn.
ENDINGS = (
    *("Answer: {}", "Answer: ${}$", "The answer is $\\boxed{{{}}}$.", "Therefore \\boxed{{{}}}."),
    *("\\[\n\\boxed{{{}}}\n\\]", "The final answer is {}.", "So \\boxed{{{}\\text{{ cm}}}}.", "So \\boxed{{x = {}}}."),
    *("<answer>{}</answer>", "#### {}"),
)  # fmt: skip
Pair = tuple[str, str]  # completion, gold
Verdict = Callable[[str, str], bool]

_LAST_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")


# --- What is graded ---


def reference_completions() -> list[Pair]:
    """What the models of the reference runs wrote."""
    files = sorted((ROOT / "assets" / "reference").glob("*/evals/*.jsonl"))
    return [(record["completion"], record["gold"]) for file in files for record in read_jsonl(file)]


def gsm8k_folder() -> Path | None:
    for folder in (os.environ.get("GSM8K_DIR"), ROOT.parent / "shared" / "gsm8k"):
        if folder and (Path(folder) / "test.jsonl").is_file():
            return Path(folder)
    return None


def gsm8k_completions(folder: Path) -> list[Pair]:
    """GSM8K's test solutions in the course's template."""
    problems = gsm8k.from_folder(folder, "test")
    return [(template_completion(problem.solution, problem.answer), problem.answer) for problem in problems]


def competition_completions(folder: Path) -> list[Pair]:
    """The same solutions as of competition mathematics, each with the next of the endings."""
    problems = gsm8k.from_folder(folder, "test")
    ends = [end.format(problem.answer) for end, problem in zip(itertools.cycle(ENDINGS), problems, strict=False)]
    return [(f"{problem.solution}\n{end}", problem.answer) for problem, end in zip(problems, ends, strict=True)]


# --- Who grades ---


def last_number(text: str, gold: str) -> bool:
    """A bare pattern: the last number of the text, compared as text."""
    numbers = _LAST_NUMBER.findall(text)
    return bool(numbers) and numbers[-1].replace(",", "") == gold.replace(",", "")


def reference_reward(completion: str, gold: str) -> bool:
    """Whether the reference reward pays all it can."""
    return sum(function(None, [completion], [gold])[0] for function in rewards.REFERENCE_REWARDS) == 9.5


def math_verify_grader(golds: Iterable[str]) -> Verdict | None:
    """math-verify with its defaults and these golds parsed already; None where it is not installed."""
    try:
        from math_verify import parse, verify
    except ImportError:
        return None
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    parsed = {gold: parse(gold) for gold in set(golds)}
    return lambda text, gold: verify(parsed[gold], parse(text))


def graders(pairs: list[Pair]) -> dict[str, Verdict]:
    ours = {
        "is_correct": answers.is_correct,
        "grade": lambda completion, gold: grade(completion, gold)["strict"],
        "reference_reward": reference_reward,
    }
    peers = {}
    if peer := math_verify_grader(gold for _, gold in pairs):
        peers["math_verify"] = lambda completion, gold: peer(answers.answer_block(completion) or "", gold)
        peers["math_verify_whole"] = peer
    return ours | peers | {"last_number": last_number}


# --- Measurements ---


def throughput(pairs: list[Pair], rounds: int) -> dict[str, Any]:
    """Completions per CPU second of each grader, one figure per round, and the ratios is_correct / other."""
    who = graders(pairs)
    seconds: dict[str, list[float]] = {name: [] for name in who}
    accepted = {}
    for _ in range(rounds):
        for name, verdict in who.items():
            started = time.process_time()
            verdicts = [verdict(completion, gold) for completion, gold in pairs]
            seconds[name].append(time.process_time() - started)
            accepted[name] = sum(verdicts)
    ratios = {}
    for name, values in seconds.items():
        if name != OURS:
            ratios[f"{OURS}/{name}"] = spread([other / ours for ours, other in zip(seconds[OURS], values, strict=True)])
    per_cpu_second = {}
    for name, values in seconds.items():
        per_cpu_second[name] = [round(len(pairs) / s) for s in values]
    mean_characters = statistics.mean(len(completion) for completion, _ in pairs)
    return {
        "completions": len(pairs),
        "mean_characters": round(mean_characters, 1),
        "per_cpu_second": per_cpu_second,
        "ratios": ratios,
        "accepted": accepted,
    }


def competition_throughput(pairs: list[Pair], rounds: int) -> dict[str, list[int]]:
    """Completions per CPU second of this process of each kind, one figure per round; LaTeX's worker does not count."""
    figures: dict[str, list[int]] = {"integer": [], "latex": []}
    for _ in range(rounds):
        for kind, values in figures.items():
            started = time.process_time()
            for completion, gold in pairs:
                answers.is_correct(completion, gold, kind)
            values.append(round(len(pairs) / (time.process_time() - started)))
    return figures


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def accuracy(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each grader on labelled spellings: accuracy, and how many wrong ones it accepts and right ones it refuses."""
    who: dict[str, Verdict] = {
        "is_correct": lambda text, gold: answers.is_correct(template_completion("so", text), gold)
    }
    if peer := math_verify_grader(row["gold"] for row in rows):
        who["math_verify"] = peer
    who["last_number"] = last_number
    results = {}
    for name, verdict in who.items():
        verdicts = [(bool(verdict(row["text"], row["gold"])), row["label"]) for row in rows]
        agreed = sum(said == label for said, label in verdicts)
        wrong_accepted = sum(said and not label for said, label in verdicts)
        right_refused = sum(label and not said for said, label in verdicts)
        results[name] = {
            "n": len(rows),
            "accuracy": round(agreed / len(rows), 4),
            "wrong_accepted": wrong_accepted,
            "right_refused": right_refused,
        }
    return results


# What is repeated up to the length of an attack.
UNITS = {
    "opening tags": "<answer>", "closing tags": "</answer>", "half tags": "<answer",
    "reasoning tags": "<reasoning></reasoning>", "blocks": "<answer>1</answer>", "digits": "7", "zeros": "0",
    "commas": ",", "points": ".", "groups": "1,000,", "digits and points": "1.", "separators": "1 ",
    "no-break spaces": "1\u00a0", "underscores": "_", "digits_": "1_000", "spaces": " ", "lines": "\n", "NUL": "\0",
    "lone surrogates": "\ud800", "right-to-left marks": "\u200f", "boxes": "\\boxed{", "whole boxes": "\\boxed{1}",
    "braces": "{", "brace pairs": "{}", "\\frac": "\\frac{1}", "\\frac{": "\\frac{", "\\text": "\\text{",
    "backslashes": "\\", "superscripts": "⁹", "10^9": "10^", "full-width": "１", "Arabic digits": "٣",
    "mathematical bold": "𝟕", "vulgar fractions": "½", "minus words": "minus ", "negative words": "negative 1 ",
    "minus signs": "-", "dashes": "–", "signed": "-1", "fractions": "1/", "dates": "1/2/", "stars": "*",
    "bold": "**1**", "emphasis": "*1 ", "struck": "~~", "struck once": "~~1", "entities": "&amp;",
    "nested entities": "&", "entity numbers": "&#49;", "HTML": "<b>", "HTML open": "<b ", "angle brackets": "<",
    "annotations": "<<1", "equals": "=", "equations": "1=", "x = ": "x = 1, ", "exponents": "1e9",
    "a large exponent": "9e299 ", "percent": "%", "currency": "$", "currency codes": "USD ", "million": " million",
    "1 million": "1 million ", "Han scales": "万", "Han fractions": "1分之", "or": "1 or ", "is": "is ", "so": "so ",
    "so 1": "so 1 ", "between": "between 1 and ", "not": "not ", "because": "because ", "brackets": "(",
    "bracket pairs": "()", "quotes": "'", "letters": "a", "words": "word ", "cents": "1 and 1 cents ",
    "and a half": " and a half", "hashes": "#", "joiners": "1\u200d", "combining marks": "1\u0301",
    "emoji digits": "1\ufe0f\u20e3", "control": "\x1b[",
}  # fmt: skip
PLACES = {
    "bare": lambda text: text,
    "in the block": lambda text: template_completion("so", text),
    "before 18": lambda text: template_completion("so", f"{text} 18"),
    "after 18": lambda text: template_completion("so", f"18 {text}"),
    "in the reasoning": lambda text: template_completion(text, "18"),
}


def stated_answers(text: str) -> list[Any]:
    return [answers.stated_answer(text, kind) for kind in answers.KINDS]


def agreements(text: str) -> list[Any]:
    return [answers.agrees(text, "18", kind) for kind in answers.KINDS]


FUNCTIONS: dict[str, Callable[[str], Any]] = {
    "answers.answer_block": answers.answer_block,
    "answers.canonical_answer": answers.canonical_answer,
    "answers.extract_answer": answers.extract_answer,
    "answers.lenient_answer": answers.lenient_answer,
    "answers.is_correct": lambda text: answers.is_correct(text, "18"),
    "answers.is_close": lambda text: answers.is_close(text, "18", 0.1),
    "answers.is_correct_leniently": lambda text: answers.is_correct_leniently(text, "18"),
    "answers.same_value, gold": lambda text: answers.same_value("18", text),
    "answers.near_value, gold": lambda text: answers.near_value("18", text + " ", 0.1),  # not the text in the cache
    "answers.near_value": lambda text: answers.near_value(answers.canonical_answer(text), "18", 0.1),
    "answers.format_is_loose": answers.format_is_loose,
    "answers.format_is_exact": answers.format_is_exact,
    "answers.integer_answer": competition.integer_answer,
    "answers.latex_answer": competition.latex_answer,
    "answers.same_latex": lambda text: competition.same_latex(text, "18"),
    "answers.stated_answer": stated_answers,
    "answers.agrees": agreements,
    "evaluation.grade": lambda text: grade(text, "18"),
}
for _name, _reward in rewards.REWARDS.items():
    FUNCTIONS[f"rewards.{_name}"] = lambda text, reward=_reward: reward(None, [text], ["18"])
FUNCTIONS["rewards.explain, all six"] = lambda text: rewards.explain(text, "18", rewards.REWARDS.values())


@dataclass(frozen=True)
class Attack:
    """One hostile text: what is repeated, and where."""

    unit: str
    place: str

    def text(self, size: int) -> str:
        unit = UNITS[self.unit]
        return PLACES[self.place](unit * max(1, size // len(unit)))


def cpu_seconds(function: Callable[[str], Any], text: str) -> float:
    started = time.process_time()
    function(text)
    return time.process_time() - started


def worst_cases(size: int) -> dict[str, Any]:
    """For each function the text that takes it longest, with CPU seconds for `size` characters and for half of them.

    Raises whatever a function raises: that a grader never raises is part of what is measured.
    """
    attacks = [Attack(unit, place) for unit in UNITS for place in PLACES]
    longest: dict[str, tuple[float, Attack]] = {}
    for attack in attacks:
        text = attack.text(size)
        for name, function in FUNCTIONS.items():
            seconds = cpu_seconds(function, text)
            if name not in longest or seconds > longest[name][0]:
                longest[name] = seconds, attack
    functions = {}
    for name, (seconds, attack) in longest.items():
        seconds_at_half = cpu_seconds(FUNCTIONS[name], attack.text(size // 2))
        functions[name] = {
            "seconds": round(seconds, 5),
            "seconds_at_half": round(seconds_at_half, 5),
            "unit": attack.unit,
            "place": attack.place,
        }
    worst = max(functions, key=lambda name: functions[name]["seconds"])
    return {"characters": size, "attacks": len(attacks), "worst": worst, "functions": functions}


# --- The program ---


def throughput_table(source: str, result: dict[str, Any]) -> list[str]:
    lines = [f"{source}: {result['completions']} completions of {result['mean_characters']:g} characters", ""]
    lines.append(f"{'':32} {'per CPU second':>14} {'min–max':>17} {'accepted':>8} {'is_correct ÷ it':>16}")
    for grader, values in result["per_cpu_second"].items():
        median = statistics.median(values)
        between = f"{min(values):,}–{max(values):,}"
        line = f"{LABELS[grader]:32} {median:14,.0f} {between:>17} {result['accepted'][grader]:8}"
        ratio = result["ratios"].get(f"{OURS}/{grader}")
        if ratio:
            line += f" {ratio['median']:16.3g}"
        lines.append(line)
    return lines


def accuracy_table(rows: dict[str, Any]) -> list[str]:
    title = f"{next(iter(rows.values()))['n']} labelled spellings"
    lines = [f"{title:32} {'accuracy':>9} {'wrong accepted':>15} {'right refused':>14}"]
    for grader, row in rows.items():
        counts = f"{row['accuracy']:9.1%} {row['wrong_accepted']:15} {row['right_refused']:14}"
        lines.append(f"{LABELS[grader]:32} {counts}")
    return lines


def worst_table(worst: dict[str, Any]) -> list[str]:
    title = f"worst of {worst['attacks']} texts of {worst['characters']:,} characters"
    lines = [f"{title:46} {'CPU s':>8} {'at half':>8}  text"]
    for name, row in worst["functions"].items():
        seconds = f"{row['seconds']:8.4f} {row['seconds_at_half']:8.4f}"
        lines.append(f"{name:46} {seconds}  {row['unit']}, {row['place']}")
    return lines


def table(measured: dict[str, Any]) -> str:
    """The result as text."""
    lines = []
    for source, result in measured["throughput"].items():
        lines += [*throughput_table(source, result), ""]
    for kind, values in measured["competition"].items():
        between = f"{min(values):,}–{max(values):,}"
        lines += [f"{kind} reader, per CPU second: {statistics.median(values):,.0f} ({between})", ""]
    if measured["accuracy"]:
        lines += [*accuracy_table(measured["accuracy"]), ""]
    lines += worst_table(measured["worst_case"])
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds of the throughput (%(default)s)")
    parser.add_argument(
        "--limit",
        type=int,
        default=2000,
        help="at most so many completions of each source, and spellings (%(default)s)",
    )
    parser.add_argument("--size", type=int, default=10**6, help="characters of a hostile text (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.limit, arguments.size) < 1:
        parser.error("--rounds, --limit and --size must be 1 or more")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    not_measured = []
    try:
        sources = {"reference run": reference_completions()}
        endings: list[Pair] = []
        if folder := gsm8k_folder():
            endings = competition_completions(folder)
            sources["GSM8K test solutions"] = gsm8k_completions(folder)
        else:
            not_measured.append("GSM8K: set GSM8K_DIR to the folder with its test.jsonl")
        rows = read_jsonl(SPELLINGS)[: arguments.limit] if SPELLINGS.exists() else []
    except CourseError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if not rows:
        not_measured.append(f"accuracy: {SPELLINGS.relative_to(ROOT)} is not there")
    if math_verify_grader([]) is None:
        not_measured.append("math-verify: not installed here (make setup)")

    throughputs = {}
    for source, pairs in sources.items():
        throughputs[source] = throughput(pairs[: arguments.limit], arguments.rounds)
    measured = {
        "throughput": throughputs,
        "competition": competition_throughput(endings[: arguments.limit], arguments.rounds) if endings else {},
        "accuracy": accuracy(rows) if rows else {},
        "worst_case": worst_cases(arguments.size),
        "not_measured": not_measured,
        "versions": {"python": sys.version.split()[0], **_version_of_the_peer()},
        "machine": machine(),
    }
    print(table(measured))
    for remark in not_measured:
        print(f"not measured: {remark}")
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    print(f"\n{measured['machine']['processor']}; {versions}")
    if arguments.json:
        print(json.dumps(measured, ensure_ascii=False))


def _version_of_the_peer() -> dict[str, str]:
    import importlib.metadata

    try:
        return {"math-verify": importlib.metadata.version("math-verify")}
    except importlib.metadata.PackageNotFoundError:
        return {}


if __name__ == "__main__":
    main()
