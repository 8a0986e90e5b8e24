"""Find the final answer in a completion, and compare numbers by value.

Two graders, always both. The strict one reads the last whole `<answer>…</answer>` block and wants exactly one
number there. The lenient one takes the last number anywhere, so that learning the tags is not mistaken for
learning mathematics. Numbers are compared as exact rationals: no float, nothing executed.

The graders read text that a policy is rewarded for, so none of them may raise or hang on any string: tags are
found with `str.find`, and regular expressions only ever see the last `LONGEST` characters.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from fractions import Fraction

# The tags of prompts, written again because modules of one floor do not import each other; a test compares.
_TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
_REASONING_OPEN, _REASONING_CLOSE, _ANSWER_OPEN, _ANSWER_CLOSE = _TAGS

LONGEST = 1000  # characters: no final answer is longer, and int() itself refuses numerals beyond 4,300 digits

# One spelling for each character: minus signs, full-width digits, spaces inside numbers, fractions, powers.
_NARROW = "\u00a0"
_CHARACTERS = {ord(minus): "-" for minus in "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\u207b\ufe58\ufe63\uff0d"}
_CHARACTERS |= {0xFF10 + digit: str(digit) for digit in range(10)}
_CHARACTERS |= {
    ord("\uff0c"): ",",
    ord("\uff0e"): ".",
    ord("\uff1d"): "=",
    ord("\u2044"): "/",
    ord("\u2248"): "=",
}
_CHARACTERS |= {ord(space): _NARROW for space in "\u2009\u202f"}
_CHARACTERS |= {ord(power): f"^{digit}" for digit, power in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
_CHARACTERS |= {
    ord(sign): " " + unicodedata.normalize("NFKC", sign).replace("\u2044", "/") for sign in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
}

_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")
_UNIT_POWER = re.compile(r"(?<=[A-Za-z])\^\{?[0-9]+\}?")  # the 2 of "m^2" is no number of its own
_WORD_MINUS = re.compile(r"\b(?:minus|negative)\s+(?=[$€£¥₹]?[0-9])", re.IGNORECASE)
_NUMERAL = rf"(?:(?<![\w.)])\.)?[0-9][0-9.,{_NARROW}]*"
_NUMBER = re.compile(
    rf"(?:(?P<whole>[0-9]+) +(?=[0-9]+ ?/ ?[0-9]))?(?P<top>{_NUMERAL})(?: ?/ ?(?P<bottom>[0-9][0-9.,]*))?"
)
_OPERATOR = re.compile(r"[-+*/×·÷^\\]|\A\s*[xX]\s*\Z|\b(?:plus|times|over|by)\b", re.IGNORECASE)
_PLAIN = re.compile(r"[0-9]*\.?[0-9]+")
_GROUPED = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?")


def _tidy(text: str) -> str:
    """Dressing off: LaTeX spacing and fractions, powers of units, minus in words. Short text only."""
    text = text.replace("{,}", ",").replace("\\,", _NARROW).replace("\\!", "").replace("\\$", "$")
    text = _LATEX_FRACTION.sub(r" \1/\2", text)
    return _WORD_MINUS.sub("-", _UNIT_POWER.sub("", text))


def _numeral(text: str) -> Fraction | None:
    """Value of an unsigned numeral; separators only where they group thousands ("1,080", never "1,0,8")."""
    text = text.rstrip(".," + _NARROW).replace(_NARROW, ",")
    if _PLAIN.fullmatch(text) or _GROUPED.fullmatch(text):
        return Fraction(text.replace(",", ""))
    return None


def _is_negative(left: str) -> bool:
    """Whether the number right of `left` carries a minus sign, and not a hyphen, a range or a subtraction."""
    unspaced = left.rstrip("$€£¥₹")
    head = unspaced.rstrip()
    if not head.endswith("-"):
        return False
    spaced = head != unspaced
    before = head[:-1].rstrip(" \t")
    if not before:
        return True
    if before[-1].isdigit() or before[-1] in ")]}%":
        return False  # 16 - 3, 18-19, 50%-60%
    if spaced:
        return before[-1] in "=(:$"  # "= - 5", but not "- 5 apples" in a list, nor a dash between words
    return not head[-2].isalpha()  # "is -5", but not "B-12"


def _value(match: re.Match[str], text: str, last_of_list: bool = False) -> Fraction | None:
    """Value of one match of `_NUMBER` in `text`; None if it is no well-formed number."""
    value = _numeral(match["top"])
    if value is None and last_of_list:  # "2,3,4" is no number, but it has a last one
        value = _numeral(match["top"].rstrip(".,").rpartition(",")[2])
    if match["bottom"] is not None and value is not None:
        bottom = _numeral(match["bottom"])
        value = value / bottom if bottom else None
    if value is None:
        return None
    if match["whole"]:
        value += int(match["whole"])
    return -value if _is_negative(text[: match.start()]) else value


def _spelling(value: Fraction | None) -> str | None:
    """The one spelling of a value: a decimal if it ends ("1080", "-0.5"), else a reduced fraction ("1/3")."""
    if value is None:
        return None
    rest, twos, fives = value.denominator, 0, 0
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    places = max(twos, fives)
    if rest != 1 or places == 0:
        spelling = str(value)
    else:
        digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
        spelling = f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
    return spelling if len(spelling) <= LONGEST else None


def canonical(number_text: str) -> str | None:
    """The one spelling of the number that `number_text` states: "$1,080.00" -> "1080", "9 * 2 = 18" -> "18".

    None unless it states exactly one: for "", "?", "18 or 19", "18-19", "1,0,8", "9 * 2". Words, currency and
    percent signs around the number are dressing ("50%" is 50, "2 million" is 2). What follows the last `=`
    counts, and what follows `\\boxed{`.
    """
    text = number_text.rpartition("\\boxed{")[2].strip()
    if len(text) > LONGEST:
        text = text.rpartition("=")[2].strip()
    if len(text) > LONGEST:
        return None
    text = _tidy(text.translate(_CHARACTERS).rpartition("=")[2].strip())
    matches = list(_NUMBER.finditer(text))
    values = {_value(match, text) for match in matches}
    if len(values) != 1 or "±" in text or "+/-" in text:
        return None
    gaps = [text[left.end() : right.start()] for left, right in itertools.pairwise(matches)]
    if any(_OPERATOR.search(gap) for gap in gaps):
        return None  # "2 * 2" is no way to state 2
    return _spelling(values.pop())


def extract_answer(completion: str) -> str | None:
    """The number in the last whole `<answer>…</answer>` block, canonically spelled; None if there is none."""
    opening = completion.rfind(_ANSWER_OPEN, 0, max(completion.rfind(_ANSWER_CLOSE), 0))
    if opening < 0:
        return None
    start = opening + len(_ANSWER_OPEN)
    return canonical(completion[start : completion.find(_ANSWER_CLOSE, start)])


def is_correct(completion: str, gold: str) -> bool:
    """Strict verdict: the tagged answer equals `gold` in value."""
    answer = extract_answer(completion)
    return answer is not None and answer == canonical(gold)


def is_close(completion: str, gold: str, ratio: float) -> bool:
    """Whether the tagged answer lies within `ratio` of `gold` (0.1 = 10 % of its size, ends included)."""
    answer, target = extract_answer(completion), canonical(gold)
    if answer is None or target is None:
        return False
    return abs(Fraction(answer) - Fraction(target)) <= Fraction(str(ratio)) * abs(Fraction(target))


def lenient_answer(completion: str) -> str | None:
    """The last number anywhere in the completion, tags or not, in its canonical spelling."""
    text = completion.translate(_CHARACTERS)
    end = 1 + max(text.rfind(digit) for digit in "0123456789")
    cut = max(0, end - LONGEST)
    window = _tidy(text[cut : end + 1])  # one more, for the brace that closes \frac{1}{2}
    last = next(reversed(list(_NUMBER.finditer(window))), None)
    if last is None or (cut and last.start() == 0):  # the window begins inside an endless numeral
        return None
    return _spelling(_value(last, window, last_of_list=True))


def is_correct_leniently(completion: str, gold: str) -> bool:
    """Lenient verdict: the last number anywhere in the completion equals `gold` in value."""
    answer = lenient_answer(completion)
    return answer is not None and answer == canonical(gold)


def format_is_loose(completion: str) -> bool:
    """Both blocks, in order and not blank, each tag exactly once; white space around the blocks is fine."""
    if any(completion.count(tag) != 1 for tag in _TAGS):
        return False
    before, _, rest = completion.partition(_REASONING_OPEN)
    reasoning, closed, rest = rest.partition(_REASONING_CLOSE)
    between, opened, rest = rest.partition(_ANSWER_OPEN)
    answer, ended, after = rest.partition(_ANSWER_CLOSE)
    if not (closed and opened and ended):
        return False
    outside, inside = (before, between, after), (reasoning, answer)
    return not any(text.strip() for text in outside) and all(text.strip() for text in inside)


def format_is_exact(completion: str) -> bool:
    """Exactly `<reasoning>…</reasoning><answer>…</answer>`: as `format_is_loose`, with no space outside."""
    return (
        format_is_loose(completion)
        and completion.startswith(_REASONING_OPEN)
        and completion.endswith(_ANSWER_CLOSE)
        and _REASONING_CLOSE + _ANSWER_OPEN in completion
    )
