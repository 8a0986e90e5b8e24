"""What kind of mistake a wrong completion makes, told from its text.

    >>> classify({"strict": False, "truncated": False, "completion": "<reasoning>6*3=18 18-7=13</reasoning>…",
    ...           "extracted": "13", "gold": "11", "solution": "6*3=18 18-7=11"})
    'arithmetic slip'

The first rule that holds decides:

    right            the strict verdict
    truncated        the length limit ended it, so what is missing cannot be judged
    no answer        no number could be taken from the tags, whatever stands elsewhere ("strict ≠ lenient" finds those)
    arithmetic slip  a calculation that it writes is false
    stopped early    the answer is the result of a step before the last of the worked solution, or the completion
                     takes fewer operations than the solution and ends on the result of one
    wrong operation  all that it calculates is true, and the right number is not among the results
    other            nothing to judge by: no calculation, or the right result, and then another number as answer

These are rules of thumb for a teacher's overview, and the grader's verdict never depends on them. A calculation counts
only where it is plain: numbers, + - * / × ÷ x and brackets up to "=" and a number. What is between (powers, variables,
"half of 10") is not judged, because a wrong accusation is worse than "wrong operation" for a slip in words.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from grpo_lib import answers

# In the order of the rules, which every table and figure keeps.
MEANINGS = {
    "right": "the number in the tags is the gold number",
    "truncated": "cut short by the length limit",
    "no answer": "no number in the answer tags",
    "arithmetic slip": "writes a calculation that is false",
    "stopped early": "ends on the result of a step before the last",
    "wrong operation": "calculates rightly, but not what was asked",
    "other": "nothing to judge by",
}
CATEGORIES = tuple(MEANINGS)

LONGEST_TEXT = 20_000  # characters of a completion that are read
LONGEST_NUMERAL = 20  # characters, in a calculation
LONGEST_ANSWER = 1_000
LONGEST_EXPRESSION = 64  # tokens

_ANNOTATION = re.compile(r"<<[^<>]*>>")  # GSM8K's calculator marks repeat the calculation beside them
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
# Words that are part of a calculation: what stands beside them is not the whole of it. A single letter is a variable.
_WORDS_OF_CALCULATION = {
    "half", "third", "thirds", "quarter", "quarters", "twice", "double", "triple", "dozen", "percent", "per", "of",
    "times", "multiplied", "over", "by", "divided", "frac", "mod", "remainder", "product", "plus", "added", "sum",
    "minus", "subtracted", "difference", "square", "squared", "cubed", "root", "sqrt",
}  # fmt: skip
_CLAUSE_END = re.compile(r"[\n;!?]|[.,:](?![0-9])")
_UNIT = re.compile(r"[$¢]|[^\W\d_]+")
_UNITS = (
    {"second", "minute", "hour", "day", "week", "month", "year"},
    {"$", "dollar", "¢", "cent"},
    {
        "mm",
        "cm",
        "m",
        "km",
        "meter",
        "metre",
        "kilometer",
        "kilometre",
        "inch",
        "inche",
        "foot",
        "feet",
        "yard",
        "mile",
    },
    {"g", "gram", "kg", "kilogram", "ounce", "pound", "ton"},
    {"ml", "l", "liter", "litre", "cup", "pint", "quart", "gallon"},
)
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_RANK = {"(": 0, "+": 1, "-": 1, "*": 2, "/": 2, "negative": 3}


@dataclass(frozen=True)
class Calculation:
    """A calculation that a text writes out, as in "18-7=13"."""

    result: Fraction  # what the text says
    value: Fraction  # what it is
    operations: int
    true: bool  # also where the result is rounded or cut off at its last digit


def classify(record: Mapping[str, Any]) -> str:
    """The category of a record of the evaluation, one of CATEGORIES; see the rules above. Never raises on any text.

    Reads strict, truncated, completion, extracted and gold; solution and steps where there are any.
    """
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
    if _stopped_early(answer, written, record):
        return "stopped early"
    if written and _number(record["gold"]) not in [calculation.result for calculation in written]:
        return "wrong operation"
    return "other"


def _stopped_early(answer: Fraction, written: list[Calculation], record: Mapping[str, Any]) -> bool:
    worked = list(calculations(record.get("solution") or ""))
    if answer in [calculation.result for calculation in worked[:-1]]:
        return True
    if not written or written[-1].result != answer:
        return False
    if worked:
        return sum(one.operations for one in written) < sum(one.operations for one in worked)
    return len(written) < (record.get("steps") or 0)


def calculations(text: str) -> Iterator[Calculation]:
    """The calculations that `text` writes out, in their order. Time is linear in its length; nothing is executed."""
    text = _ANNOTATION.sub("", text[:LONGEST_TEXT].translate(_SIGNS))
    text = _SPELLING.sub(lambda match: _SPELLINGS[match.group()], _BULLET.sub("", text))
    clauses = (clause for clause in _CLAUSE_END.split(text) if not _mixes_units(clause))
    for stretch in itertools.chain.from_iterable(map(_stretches, clauses)):
        sides = [list(side) for equals, side in itertools.groupby(stretch, "=".__eq__) if not equals]
        for left, right in itertools.pairwise(sides):
            if calculation := _calculation(left, right):
                yield calculation


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
            stretch, blocked = [], False
        elif blocked or kind == "skip":
            continue
        elif kind == "operator" or (kind == "number" and not after_number and len(token) <= LONGEST_NUMERAL):
            stretch.append(token)
        elif kind == "number" and len(token) <= LONGEST_NUMERAL and ("=" in stretch or unit):
            yield stretch  # two in a row: "…=21 21-4=17", "5 eggs and 3-2=1"; but not "1 1/2" or "18 000"
            stretch = [token]
        elif kind == "word" and _is_plain(token) and not (token == "A" and after_number):
            blocked = bool(stretch) and not after_number  # "3 * apples"; behind a number it is a unit
        else:
            blocked = True
        if blocked and stretch:  # the side that holds what is not understood does not count
            yield stretch[: len(stretch) - [*reversed(stretch), "="].index("=") - 1]
            stretch = []
        unit = kind == "word"
    yield stretch


def _mixes_units(clause: str) -> bool:
    """Whether a clause has two units of one kind: "2 hours + 30 minutes = 150 minutes" is true, and not a sum."""
    words = {word.lower().removesuffix("s") for word in _UNIT.findall(clause)}
    return any(len(words & kind) > 1 for kind in _UNITS)


def _is_plain(word: str) -> bool:
    return word.lower() not in _WORDS_OF_CALCULATION and (len(word) > 1 or word in "aAI")


def _calculation(left: list[str], right: list[str]) -> Calculation | None:
    """What stands before and after an equal sign, if it is a calculation with its result."""
    operations = sum(token in _OPERATIONS for token in left[1:])
    value, other = _value(left), _value(right)
    first = right[:2] if right[0] == "-" else right[:1]
    result = _value(first)
    if not operations or value is None or result is None:
        return None
    # "3*4=12+5=17" are two calculations on one line: the first number behind "=" is the result of the first.
    # "2*6=3*4" is one, and none of its numbers is its result.
    if other == value and any(token in _OPERATIONS for token in right[1:]):
        return Calculation(value, value, operations, True)
    decimals = len(first[-1].partition(".")[2])
    scales = (1, Fraction(100), Fraction(1, 100)) if "%" in [*left, *right] else (1,)
    return Calculation(result, value, operations, any(_rounds_to(value, result * scale, decimals) for scale in scales))


def _rounds_to(value: Fraction, result: Fraction, decimals: int) -> bool:
    """Whether `result` is `value`, or what is left of it when it is rounded or cut off after so many decimals."""
    unit = Fraction(1, 10**decimals)
    return value == result or ((value / unit).denominator > 1 and abs(value - result) < unit)


def _value(tokens: list[str]) -> Fraction | None:
    """The value of an expression, by Dijkstra's two stacks; None if it is not a whole one."""
    tokens = tokens[: LONGEST_EXPRESSION + 1]
    while tokens and tokens[0] == "(" and tokens.count("(") > tokens.count(")"):
        tokens = tokens[1:]  # "(3+4=7)": the brackets stand around the equation
    while tokens and tokens[-1] == ")" and tokens.count(")") > tokens.count("("):
        tokens = tokens[:-1]
    twice = any(one == other == "/" for one, other in zip(tokens[1::2], tokens[3::2], strict=False))
    if len(tokens) > LONGEST_EXPRESSION or twice:  # "60 / 3/4" may mean either thing
        return None
    values: list[Fraction] = []
    pending: list[str] = []

    def apply() -> None:
        symbol = pending.pop()
        if symbol == "negative":
            values.append(-values.pop())
            return
        right, left = values.pop(), values.pop()
        values.append(_OPERATIONS[symbol](left, right))

    wanted = True  # a number or a bracket may come, not an operator
    try:
        for token in tokens:
            if token[-1].isdigit() and wanted:
                values.append(Fraction(token.replace(",", "")))
                wanted = False
            elif token == "(" and wanted:
                pending.append(token)
            elif token == "-" and wanted:
                pending.append("negative")
            elif token == ")" and not wanted:
                while pending[-1] != "(":
                    apply()
                pending.pop()
            elif token == "%" and not wanted:
                values.append(values.pop() / 100)
            elif token in _OPERATIONS and not wanted:
                while pending and _RANK[pending[-1]] >= _RANK[token]:
                    apply()
                pending.append(token)
                wanted = True
            else:
                return None
        while pending:
            apply()
    except (IndexError, KeyError, ZeroDivisionError):  # brackets that do not match, nothing there, x / 0
        return None
    return values[0] if len(values) == 1 and not wanted else None


def _number(text: Any) -> Fraction | None:
    canonical = answers.canonical(text) if isinstance(text, str) else None
    if canonical is None or len(canonical) > LONGEST_ANSWER:  # Python refuses numerals of more than 4,300 digits
        return None
    return Fraction(canonical)
