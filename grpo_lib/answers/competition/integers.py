r"""Which integer a completion states as its answer: the reader for AIME and DAPO-Math-17k.

Their golds are integers, so this reader is strict about the place and about the number. The place is the last
statement of an answer (`last_statement`): a line "Answer: 33", a sentence "the answer is 33", \boxed{33}, or
an answer block. What stands there must be one integer and nothing else: "3 or 4", "2\sqrt{3}", "(0, 1)" and "12 + 5"
are none, and nothing earlier in the text is read instead.
"""

import functools
import math
import re
from fractions import Fraction

from grpo_lib.answers.competition.chinese_units import without_chinese_unit
from grpo_lib.answers.final_answer import last_statement
from grpo_lib.answers.numbers import LONGEST, NARROW, canonical_form, find_numbers, parse_decimal, strip_markup
from grpo_lib.prompts import THINK_MARK, after_thoughts

# Most completions end in one of these, and for them no closer look is needed. "Answer: 33" is the last statement
# wherever it stands, because nothing follows it; so is "the answer is 33."
_COMMON_END = re.compile(
    r"(?:(?:\*\*)?:(?:\*\*)?| is:?)\s?(?:\$\\boxed\{(-?[0-9]+)\}\$|\\boxed\{(-?[0-9]+)\}|\$(-?[0-9]+)\$"
    r"|(-?[0-9]+))\.?\s*\Z"
)
_COMMON_WINDOW = 60

_FACE = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|emph)\s*\{([^{}]*)\}")
_LABEL = re.compile(r"\s*(?:the\s+)?(?:final\s+)?answer\s*(?::|is:?|=)\s*", re.I)
_COMMAND = re.compile(r"\\(?:([A-Za-z]+)|\{)")
# The others, such as \binom and \log, make another number of what they stand before.
_KNOWN_COMMANDS = frozenset(
    ("frac", "dfrac", "tfrac", "cfrac", "left", "right", "big", "Big", "displaystyle", "circ", "degree", "times",
     "cdot", "quad", "qquad", "Rightarrow", "implies", "text", "textbf", "textit", "textrm", "mathrm", "mathbf",
     "mathit", "mathsf", "emph", "bf", "rm", "mbox", "bm", "boldsymbol")
)  # fmt: skip
_MARKUP = f"$*_`\"' \t\r\n{NARROW}"
_POWER = re.compile(r"([-−–]?) ?([0-9]{1,20}) ?\^ ?([0-9]{1,4})")
_IN_DOLLARS = re.compile(r"\s*\$([^$]+)\$(?=\s+[A-Za-z]|\s*[\u4e00-\u9fff])")  # the $12$ of "$12$ cm"
_NARROW_SPACE = re.compile(r"\\,(?![0-9])|(?<=[0-9}$])~(?=[A-Za-z\\\u4e00-\u9fff])")  # groups no digits, hedges nothing
_CALCULATION = re.compile(r"[0-9]+(?: *[+×*] *[0-9]+)+")
_APPROXIMATE = re.compile(r"[≈≃≅~<>≠]|!=|\\(?:approx|simeq|sim|cong|equiv|neq?)(?![A-Za-z])|:=")
_SEVERAL = re.compile(r"[,;|&]|\b(?:or|and)\b", re.I)
_SAYS = re.compile(r"[^0-9=]{0,100}\b(?:is|are|equals?|be)\b:?\s*(?=[-−+$0-9])", re.I)
_NO_ANSWER = re.compile(
    r"\b(?:or|nor|not|and|to|more|less|fewer|greater|at|least|most|than|plus|minus|times|over|mod|modulo|pi|maybe|perhaps"
    r"|about|approximately|around|between|under|above|below|up|half|twice|squared|cubed|factorial|sqrt|sin|cos|tan|log|exp|if"
    r"|but|unless|of|except|doubt|dozens?|pairs?|tens?|hundredths?)\b",
    re.I,
)
_REASON = re.compile(r",\s+[A-Za-z][^0-9]*\Z")
# Words of one or two letters that are units; other ones are variables.
_SHORT_UNITS = frozenset(
    ("m", "s", "g", "h", "L", "cm", "mm", "km", "nm", "ft", "in", "yd", "mi", "kg", "mg", "lb", "oz", "ml", "mL", "hr",
     "Hz", "sq", "cu")
)  # fmt: skip
_UNIT = re.compile(r"° ?[CF]|[°%]?(?:(?P<space>[ \-])? *(?P<words>[A-Za-z][A-Za-z /'-]{0,60}))?[°%]?")


def integer_answer(completion: str, thinking: bool = False) -> str | None:
    """The integer that a completion states last, canonically spelled ("33", "-7"); None if that is not one integer.

    Never raises, and takes well under a second for megabytes of any text.
    """
    if thinking or THINK_MARK in completion:
        completion = after_thoughts(completion, thinking)
    cue = completion.rfind("nswer", -_COMMON_WINDOW)
    common = _COMMON_END.match(completion, cue + len("nswer")) if cue > 0 and completion[cue - 1] in "aA" else None
    if common:
        return parse_decimal(common[1] or common[2] or common[3] or common[4])
    stated = last_statement(completion)
    return None if not stated else read_integer(stated)


@functools.lru_cache(maxsize=4096)  # the completions of a group state the same few answers
def read_integer(text: str) -> str | None:
    """The integer that a short text is, with or without markup, a unit, or "x =" before it; else None."""
    if len(text) > LONGEST:
        return None
    if "\\," in text or "~" in text or "$" in text:
        text = _IN_DOLLARS.sub(r" \1", _NARROW_SPACE.sub(" ", text), count=1)
    text = _trim(text)
    simple = parse_decimal(text)
    if simple is not None:
        return None if "." in simple else simple
    if "{" in text:
        text = _FACE.sub(r" \1", text).replace("{}", "")
    text = _LABEL.sub("", text, count=1) if _LABEL.match(text) else text
    text = text if text.count("}") <= text.count("{") else _trim(text.strip(f"}}{_MARKUP}"))  # $\text{Answer: } 33$
    if _APPROXIMATE.search(text) or any(name not in _KNOWN_COMMANDS for name in _COMMAND.findall(text)):
        return None
    if text.rpartition("=")[2].count("^") > 1:
        return None  # 10^{2^3}
    *before, text = _sides(strip_markup(text))
    if any(_SEVERAL.search(part) for part in before):
        return None  # x = 3, y = 4
    if not before and (says := _SAYS.match(text)) and not _NO_ANSWER.search(says[0]):
        text = text[says.end() :]
    text = _trim(_trim(text).removeprefix("+"))
    steps = _steps(before)
    value = _step(text) if steps and _CALCULATION.fullmatch(text) else _value(text)  # 12 = 3 * 4, but not 3 * 4 alone
    return value if steps <= {value} else None  # 32 = 33


def _value(text: str) -> str | None:
    """The integer that a text without markup and equations is."""
    if power := _POWER.fullmatch(text):
        value = Fraction(int(power[2])) ** int(power[3])
        return canonical_form(-value if power[1] else value)
    numbers = find_numbers(text)
    if len(numbers) != 1 or numbers[0].start != 0 or not only_a_unit(text[numbers[0].end :]):
        return None
    value = numbers[0].value
    if value is None or (numbers[0].scale > 1 and text[numbers[0].end - 1] in "kKMBmb"):
        return None  # 2k is twice a k
    return canonical_form(value) if value.denominator == 1 else None


def _sides(text: str) -> list[str]:
    """The sides of an equation, without units in Chinese; of another text the whole of it."""
    sides = text.split("=")
    return sides if text.isascii() else [without_chinese_unit(_trim(side)) for side in sides]


def _steps(sides: list[str]) -> set[str]:
    """The values of those sides of an equation that have one; what stands before an arrow is another equation."""
    last = "=".join(sides).rpartition("→")[2]
    return {value for side in last.split("=") if (value := _step(_trim(side)))}


def _step(text: str) -> str | None:
    """The value of a text that is a number, or a sum of products of whole ones; None for others."""
    if not _CALCULATION.fullmatch(text):
        return parse_decimal(text)
    products = (product.replace("*", "×").split("×") for product in text.split("+"))
    return str(sum(math.prod(map(int, factors)) for factors in products))


def _trim(text: str) -> str:
    """`text` without markup around it and without a full stop; a point before it stays, as in ".33"."""
    return text.strip(_MARKUP).rstrip(f".,;{_MARKUP}")


def only_a_unit(text: str) -> bool:
    """Whether what follows a number leaves its value alone: "", "°", " degrees", " cm", ", because …"."""
    text = _REASON.sub("", text) if not _NO_ANSWER.search(text) else text
    match = _UNIT.fullmatch(text)
    if not match or _NO_ANSWER.search(text):
        return False
    words = (match["words"] or "").split()
    if len(words) > 4:
        return False
    if words and not match["space"] and (len(words[0]) < 2 or words[0] not in _SHORT_UNITS):
        return False  # 33xy
    return all(len(word) > 2 or word in _SHORT_UNITS for word in words)
