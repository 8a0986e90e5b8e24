"""How wrong answers are wrong, and what a gain consists of; notebook 05.

    classify(record)             # which kind of mistake a completion makes, by rules on its text
    causes(record)               # everything that stands between it and the strict verdict
    gain_parts(before, after)    # the gain in strict accuracy as a sum over these causes

`classify` gives one of these; the first rule that applies decides:

    right            the strict verdict
    truncated        the length limit ended it, so the missing part cannot be judged
    no answer        no number in the tags, whatever the rest of the text has ("strict ≠ lenient" finds those)
    arithmetic slip  a calculation that it writes is false
    stopped early    the answer is the result of a step before the last of the worked solution, or the completion
                     takes fewer operations than the solution and ends on the result of one
    wrong operation  all its calculations are true, and the right number is not among the results
    went on          all its calculations are true, the right number is among the results, and it ends on a later one
    other            nothing to judge by: no calculation, or the right result, and then another number as answer

These are rules of thumb for a teacher's overview; the grader's verdict never depends on them. Only plain calculations
count: numbers, + - * / × ÷ x and brackets up to "=" and a number. Anything else (powers, variables) is not judged,
because a wrong accusation is worse than "wrong operation" for a slip in words. In the worked solutions of GSM8K's
training problems 22,430 calculations are found and 44 of them called false: mistakes of the data, and some that are
completed by words ("half of 10 + 2 = 7") or change the unit ("2 hours + 30 minutes = 150 minutes").
"""

import ast
import itertools
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from grpo_lib import answers, records, statistics
from grpo_lib.records import EvalRun, Record

# Category -> what it means, in the order of the rules, which every table and figure keeps.
MEANINGS = {
    "right": "the number in the tags is the gold number",
    "truncated": "cut short by the length limit",
    "no answer": "no number in the answer tags",
    "arithmetic slip": "writes a calculation that is false",
    "stopped early": "ends on the result of a step before the last",
    "wrong operation": "calculates correctly, but not what was asked",
    "went on": "calculates correctly past the right number",
    "other": "nothing to judge by",
}
CATEGORIES = tuple(MEANINGS)  # of answers, by the first cause that applies

# What may stand between an answer and the strict verdict; `causes` finds all that do.
CAUSES = {
    "format": "no number in the answer tags",
    "habit": "fewer calculations than the worked solution",
    "skill": "a calculation that is false",
    "other": "none of these",
}

# What is read of a completion: characters of it, of a number in it, and of its answer; tokens of an expression.
LONGEST_TEXT, LONGEST_NUMERAL, LONGEST_ANSWER, LONGEST_EXPRESSION = 20_000, 20, 1_000, 64

_ANNOTATION = re.compile(r"<<[^<>]*>>")  # GSM8K's calculator annotations repeat the calculation next to them
_BULLET = re.compile(r"^[ \t]*[-*•][ \t]+", re.MULTILINE)
_SIGNS = str.maketrans("−–×·⋅÷", "--***/")
_SPELLINGS = {"\\times": "*", "\\cdot": "*", "\\div": "/", "\\$": "$", "\\(": "\n", "\\)": "\n", "**": " "}
_SPELLING = re.compile("|".join(map(re.escape, _SPELLINGS)))
_TOKEN = re.compile(
    r"(?P<clock>[0-9]+:[0-9]+)"
    r"|(?P<number>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
    r"|(?P<times>[xX](?=[ ]?[$€£(]?[0-9]))"
    r"|(?P<word>[^\W\d_]+(?:['’-][^\W\d_]+)*)"
    r"|(?P<operator>[-+*/()=%])"
    r"|(?P<skip>[ \t\"$€£])"
    r"|(?P<end>[\n.,;:!?<>\\])"
    r"|(?P<strange>.)",
    re.DOTALL,
)
_SIMPLE = re.compile(r"(?<!\d)(\d{1,9}) ?([-+*x×]) ?(\d{1,9}) ?= ?(\d{1,9})", re.ASCII)
_CLAUSE_END = re.compile(r"[\n;!?]|[.,:](?![0-9])")
_OPERATIONS = ("+", "-", "*", "/")
_PYTHON = {"%": ".percent"} | {sign: sign for sign in ("(", ")", *_OPERATIONS)}  # of a token; a numeral is a string
_EVALUATE = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


@dataclass(frozen=True)
class Calculation:
    """A calculation that a text writes out, as in "18-7=13"."""

    result: Fraction  # as written in the text
    operations: int
    true: bool  # also where the result is rounded or cut off at its last digit


def classify(record: Mapping[str, Any]) -> str:
    """The category of a record of the evaluation, one of CATEGORIES; see the rules above. Never raises on any text."""
    if record["strict"]:
        return "right"
    if record["truncated"]:
        return "truncated"
    answer = _number(record["extracted"])
    if answer is None:
        return "no answer"
    written = list(calculations(record["completion"]))
    if any(not calculation.true for calculation in written):
        return "arithmetic slip"
    if _stopped_early(answer, written, list(calculations(record["solution"]))):
        return "stopped early"
    if written and _number(record["gold"]) not in [calculation.result for calculation in written]:
        return "wrong operation"
    return "went on" if written and answer == written[-1].result else "other"


def causes(record: Mapping[str, Any]) -> frozenset[str]:
    """Everything that stands between a record and the strict verdict: a subset of CAUSES; empty where it is right.

    Unlike `classify`, which keeps the first rule that holds, all of them are looked for: an answer without tags may be
    incomplete and false as well. "other" stands alone.
    """
    if record["strict"]:
        return frozenset()
    written = list(calculations(record["completion"]))
    needed = sum(calculation.operations for calculation in calculations(record["solution"]))
    reasons = set()
    if _number(record["extracted"]) is None:
        reasons.add("format")
    if sum(calculation.operations for calculation in written) < needed:
        reasons.add("habit")
    if any(not calculation.true for calculation in written):
        reasons.add("skill")
    return frozenset(reasons or {"other"})


def _stopped_early(answer: Fraction, written: list[Calculation], worked: list[Calculation]) -> bool:
    """Whether the answer is the result of a step before the last; `worked` is the worked solution."""
    earlier = worked[:-1]
    if sum(step.operations for step in written) < sum(step.operations for step in worked):
        earlier += written[-1:]
    return answer in [step.result for step in earlier]


def works_out_gold(record: Mapping[str, Any]) -> bool:
    """Whether the last calculation that the completion writes has the gold number as its result, stated or not."""
    results = [str(calculation.result) for calculation in calculations(record["completion"])]
    return bool(results) and results[-1] == record["gold"]


def first_completions(run: EvalRun) -> list[Record]:
    """For each problem the completion that counts: the greedy one, or the first sample."""
    return [group[0] for group in records.by_problem(run.records).values()]


def completion_pairs(before: EvalRun, after: EvalRun) -> list[tuple[Record, Record]]:
    """For each problem the completions that count.  Raises CourseError for different problems."""
    records.check_same_problems(before, after)
    new = records.by_problem(after.records)
    return [(record, new[record["id"]][0]) for record in first_completions(before)]


def gain_parts(before: EvalRun, after: EvalRun) -> list[dict[str, Any]]:
    """The strict gain as a sum of parts: part, before, after (fractions of problems), gain, low, high, meaning.

    Every wrong answer belongs to one part: to a cause if that is its only one (`causes`), to "interaction" if
    it has several at once, so that no repair alone would have made it right. The gain of a part is how much rarer it
    became, in fractions of all problems; the gains add up to the gain in strict accuracy. Problems that were lost
    count against the part that they fell to. Intervals: 95 %, the paired bootstrap of `statistics`.
    """
    pairs = completion_pairs(before, after)
    parts_before = [_part(record) for record, _ in pairs]
    parts_after = [_part(record) for _, record in pairs]
    rows = []
    for part, meaning in {**CAUSES, "interaction": "two or three of these at once"}.items():
        had = [other == part for other in parts_before]
        has = [other == part for other in parts_after]
        change = statistics.paired_bootstrap(has, had)  # after minus before of "has it not"
        rows.append(
            {
                "part": part,
                "before": sum(had) / len(had),
                "after": sum(has) / len(has),
                "gain": change.difference,
                "low": change.low,
                "high": change.high,
                "meaning": meaning,
            }
        )
    return rows


def _part(record: Record) -> str:
    """The cause of a wrong answer that has only one, "interaction" of several, or "right"."""
    reasons = causes(record)
    if len(reasons) > 1:
        return "interaction"
    return next(iter(reasons), "right")


def calculations(text: str) -> Iterator[Calculation]:
    """The calculations that `text` writes out, in their order. Time is linear in its length; nothing is executed."""
    text = _ANNOTATION.sub("", text[:LONGEST_TEXT].translate(_SIGNS))
    text = _SPELLING.sub(lambda match: _SPELLINGS[match.group()], _BULLET.sub("", text))
    for stretch in itertools.chain.from_iterable(map(_stretches, _CLAUSE_END.split(text))):
        sides = [list(side) for equals, side in itertools.groupby(stretch, "=".__eq__) if not equals]
        yield from filter(None, itertools.starmap(_calculation, itertools.pairwise(sides)))


def simple_calculations(text: str) -> Iterator[tuple[int, str, int, int]]:
    """(a, sign, b, result) of the calculations with two whole numbers that a text writes, right or wrong, in its order.

    The spellings of the course's worked solutions and of many models: 9*5=45, 9 * 5 = 45, 9 x 5 = 45.
    """
    for a, sign, b, result in _SIMPLE.findall(text):
        yield int(a), "*" if sign in "x×" else sign, int(b), int(result)


def _stretches(text: str) -> Iterator[list[str]]:
    """Runs of numbers, operators and equal signs, without the words between them."""
    stretch: list[str] = []
    unit = False  # whether the last token was a word
    blocked = False  # after something that is not understood nothing counts, up to the end of the clause
    for match in _TOKEN.finditer(text):
        kind, token = match.lastgroup, match.group()
        if kind == "times":
            kind, token = "operator", "*"
        after_number = bool(stretch) and (stretch[-1] in (")", "%") or stretch[-1][-1].isdigit())
        if kind == "end":
            yield stretch
            stretch = []
            blocked = False
        elif blocked or kind == "skip":
            continue
        elif kind == "operator" or (kind == "number" and not after_number and len(token) <= LONGEST_NUMERAL):
            stretch.append(token)
        elif kind == "number" and len(token) <= LONGEST_NUMERAL and ("=" in stretch or unit):
            yield stretch  # two in a row: "…=21 21-4=17", "5 eggs and 3-2=1"; but not "1 1/2" or "18 000"
            stretch = [token]
        elif kind == "word" and (len(token) > 1 or token in "aI" or (token == "A" and not after_number)):
            # Any other single letter is a variable.
            blocked = bool(stretch) and not after_number  # "3 * apples"; behind a number it is a unit
        else:
            blocked = True
        if blocked and stretch:  # the side that holds what is not understood does not count
            yield stretch[: len(stretch) - [*reversed(stretch), "="].index("=") - 1]
            stretch = []
        unit = kind == "word"
    yield stretch


def _calculation(left: list[str], right: list[str]) -> Calculation | None:
    """The tokens before and after an equal sign as a Calculation, if they are one with its result."""
    operations = sum(token in _OPERATIONS for token in left[1:])
    value, other = _value(left), _value(right)
    first = right[:2] if right[0] == "-" else right[:1]
    result = _value(first)
    if not operations or value is None or result is None:
        return None
    # "3*4=12+5=17" are two calculations on one line: the first number behind "=" is the result of the first.
    # "2*6=3*4" is one, and none of its numbers is its result.
    if other == value and any(token in _OPERATIONS for token in right[1:]):
        return Calculation(value, operations, True)
    decimals = len(first[-1].partition(".")[2])
    scales = (1, Fraction(100), Fraction(1, 100)) if "%" in [*left, *right] else (1,)
    return Calculation(result, operations, any(_rounds_to(value, result * scale, decimals) for scale in scales))


def _rounds_to(value: Fraction, result: Fraction, decimals: int) -> bool:
    """Whether `result` is `value`, exactly, or rounded or truncated to this number of decimals."""
    unit = Fraction(1, 10**decimals)
    return value == result or ((value / unit).denominator > 1 and abs(value - result) < unit)


def _value(tokens: list[str]) -> Fraction | None:
    """The value of an expression; None if it is not a complete expression."""
    tokens = tokens[: LONGEST_EXPRESSION + 1]
    while tokens and tokens[0] == "(" and tokens.count("(") > tokens.count(")"):
        tokens = tokens[1:]  # "(3+4=7)": the brackets are around the equation
    while tokens and tokens[-1] == ")" and tokens.count(")") > tokens.count("("):
        tokens = tokens[:-1]
    twice = any(one == other == "/" for one, other in zip(tokens[1::2], tokens[3::2], strict=False))
    if len(tokens) > LONGEST_EXPRESSION or twice:  # "60 / 3/4" may mean either thing
        return None
    python = " ".join(_PYTHON.get(token, repr(token)) for token in tokens)
    try:
        return _evaluated(ast.parse(python, mode="eval").body)  # so few tokens are never too deep for it
    except (SyntaxError, ValueError, ZeroDivisionError):  # incomplete, not an expression, x / 0
        return None


def _evaluated(node: ast.expr) -> Fraction:
    """The value of a tree that `ast` made of an expression: 1,080 is '1,080' in it, and 5% is '5'.percent."""
    match node:
        case ast.Constant(value=str(numeral)):
            return Fraction(numeral.replace(",", ""))
        case ast.Attribute(value=part):
            return _evaluated(part) / 100
        case ast.UnaryOp(op=ast.USub(), operand=part):
            return -_evaluated(part)
        case ast.BinOp(left=left, op=sign, right=right):
            return _EVALUATE[type(sign)](_evaluated(left), _evaluated(right))
    raise ValueError("not an expression")


def _number(text: Any) -> Fraction | None:
    canonical = answers.canonical_answer(text) if isinstance(text, str) else None
    if canonical is None or len(canonical) > LONGEST_ANSWER:  # Python refuses numerals of more than 4,300 digits
        return None
    return Fraction(canonical)
