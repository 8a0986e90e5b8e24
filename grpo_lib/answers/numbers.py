"""Read numbers as people write them: "$1,080.00", "−5", "１８", "\\frac{1}{2}", "1.5 million", "3½".

Two steps. `strip_markup` takes LaTeX, markdown, HTML and odd characters off a short text. `find_numbers` then finds the
numbers in it, with their exact values. Values are rationals, never floats, and nothing is ever
executed: a calculation is read as the numbers in it.

Why not math-verify, the field's library for this: it parses LaTeX into SymPy, which costs about 0.3 ms a completion
and guards against endless expressions with a timer signal (main thread only); and it accepts what must not count
here, such as one of several different numbers. dev/benchmarks/grading.py measures both side by side.

Both functions are meant for short texts: callers cut long ones first (`LONGEST`).
"""

import html
import math
import re
import unicodedata
from dataclasses import dataclass
from decimal import Context, Inexact
from fractions import Fraction
from functools import lru_cache

LONGEST = 1000  # characters: no final answer is longer, and int() itself refuses numerals beyond 4,300 digits
LARGEST_EXPONENT = 300  # of "1e300"; beyond it a few characters could ask for gigabytes

NARROW = "\u00a0"  # stands for every space that can group digits

# One spelling for characters that look alike.
_SPELLINGS = {
    # Three kinds of horizontal line: the hyphen of the keyboard, which can be a minus; the true minus signs; and
    # dashes, which are punctuation unless they touch a number.
    **dict.fromkeys("\u2010\u2011", "-"),
    **dict.fromkeys("\u2212\u207b\u208b\ufe63\uff0d\u2796\u02d7", "−"),
    **dict.fromkeys("\u2012\u2013\u2014\u2015\ufe58", "–"),
    **dict.fromkeys("\u00a0\u2007\u2008\u2009\u200a\u202f", NARROW),
    **dict.fromkeys("\uff0c\u066c\ufe50\u201a", ","),
    **dict.fromkeys("\uff0e\u066b", "."),
    **dict.fromkeys("\u2044\u2215\uff0f", "/"),
    **dict.fromkeys("\uff1d\u2248\u2243\u2245\u2261", "="),
    **dict.fromkeys("\u00d7\u2715\u2716\u2217\u22c5\u00b7\u2022", "×"),
    **dict.fromkeys("\u2019\u2018\u02bc", "'"),
    **dict.fromkeys("\u2192\u21d2\u27f9\u27f6\u2234", "→"),
    **dict.fromkeys("\u2264\u2a7d\uff1c", "<"),
    **dict.fromkeys("\u2265\u2a7e\uff1e", ">"),
    **dict.fromkeys("\u20e3\ufe0f\ufe0e", ""),  # what makes a digit an emoji
    "\uff05": "%", "\u066a": "%", "\uff0b": "+", "\uff08": "(", "\uff09": ")", "\uff1a": ":", "\uff1b": ";",
    "\u3001": "、", "\u3002": ". ", "\uff5e": "~", "\u2028": "\n", "\u2029": "\n", "\u0085": "\n",
}  # fmt: skip
_CURRENCY_SIGNS = "$€£¥₹₽₩₺₫฿₦₱"
CURRENCY = rf"[{_CURRENCY_SIGNS}]"


@lru_cache(maxsize=5000)
def _spelling(character: str) -> str:
    """The one spelling of a character."""
    category, decomposed = unicodedata.category(character), unicodedata.decomposition(character)
    if character in _SPELLINGS:
        return _SPELLINGS[character]
    if category == "Nd":  # full-width, Arabic, mathematical bold, ...
        return str(unicodedata.decimal(character))
    if category == "Cf":  # zero-width spaces, marks of direction
        return ""
    if decomposed.startswith("<super>") and unicodedata.digit(character, None) is not None:
        return f"^{unicodedata.digit(character)}"
    if decomposed.startswith("<fraction>"):
        return " " + unicodedata.normalize("NFKC", character).replace("\u2044", "/")
    if category == "Sc" or decomposed.startswith(("<wide>", "<narrow>", "<font>")):
        return unicodedata.normalize("NFKC", character)
    return character


# --- Normalisation ---

_FRACTION_PART = r"\s*(\{[^{}]*\}|[0-9])"
_LATEX_FRACTION = re.compile(rf"\\[dtc]?frac{_FRACTION_PART}{_FRACTION_PART}")
_LATEX_ESCAPED = re.compile(r"\\([%$#&_{}])")
_LATEX_SYMBOL = {
    **dict.fromkeys(("times", "cdot", "ast"), "×"), "div": "÷", "pm": "±", "mp": "±", "pi": "π", "sqrt": "√",
    **dict.fromkeys(("approx", "simeq", "sim", "equiv"), "="), "infty": "∞",
    **dict.fromkeys(("le", "leq", "lt", "leqslant"), "<"), **dict.fromkeys(("ge", "geq", "gt", "geqslant"), ">"),
    **dict.fromkeys(("ne", "neq"), "≠"), **dict.fromkeys(("circ", "degree"), "°"),
    **dict.fromkeys(("to", "rightarrow", "Rightarrow", "implies", "therefore", "longrightarrow"), "→"),
    "pounds": "£", "euro": "€", "yen": "¥", "textdollar": "$", "percent": "%", "mid": "|",
    **dict.fromkeys(("overline", "dot", "overset"), "…"),  # digits that repeat for ever: not read
    **dict.fromkeys(("left", "right", "displaystyle", "bf", "rm", "mathopen", "mathclose", "big", "Big"), ""),
}  # fmt: skip
_LATEX_FACE = re.compile(
    r"\\(?:text|textbf|textit|textrm|texttt|textsf|mathrm|mathbf|mathit|mathsf|mathtt|emph|underline|operatorname"
    r"|boldsymbol|bm|mbox|hbox)(?![A-Za-z])\s*"
)
_LATEX_COMMAND = re.compile(r"\\([A-Za-z]+)")
_HTML_TAG = re.compile(r"</?[A-Za-z][^<>]{0,99}>")
_SUPERSCRIPT = re.compile(r"<sup>\s*([0-9]+)\s*</sup>", re.I)
_ANNOTATION = re.compile(r"<<[^<>]*?=([^<>=]*)>>(\s*\1)?")  # GSM8K's own calculations, "<<9*2=18>>18"
_STRUCK = re.compile(r"~~[^~]*~~|<(?:del|s|strike)>[^<]*<", re.I)
_MARKED = re.compile(r"==(?=\S)([^=\n]+)(?<=\S)==")
_RAISED = re.compile(r"(−?)((?:\^[0-9])+)")  # of "10⁻¹²", one character at a time
_LATEX_COLOUR = re.compile(r"\\(?:text)?color\s*\{[^{}]*\}")
_HAN_FRACTION = re.compile(r"([0-9]+)\s?分之\s?([0-9]+)")
_STARS = re.compile(r"(?<![\w)*])\*{1,3}(?=[^\s*])|(?<=[^\s*])\*{1,3}(?![\w(*])")
_UNDERSCORES = re.compile(r"(?<![A-Za-z0-9_])_{1,3}(?=[^\s_])|(?<=[^\s_])_{1,3}(?![A-Za-z0-9_])")
_UNIT_POWER = re.compile(r"(?<=[A-Za-z])\^[0-9]+")  # the 2 of "m^2" is not a number of its own
_CURRENCY_CODE = re.compile(
    r"\b(?:US|HK|NT|CA|AU|NZ|SG|[CAS])?\$|\b(?:USD|EUR|GBP|JPY|CNY|RMB|INR|CAD|AUD|TWD|HKD|CHF|Rs\.?)(?=\s?[-−–]?[0-9])"
)
_WORD_MINUS = re.compile(
    rf"(?<![A-Za-z])(?:minus|negative|menos|moins)\s+(?={CURRENCY}?\s?[0-9.])|(?:[负負]|零下|マイナス)(?=\s?{CURRENCY}?[0-9])",
    re.I,
)
_AND_A_PART = re.compile(r"(?<=[0-9])\s+and\s+(?:a\s+(half|quarter|third)\b|(?=[0-9]+/[0-9]))", re.I)
_AND_CENTS = re.compile(r"\b([0-9]+)(?:\s+dollars?)?\s+and\s+([0-9]{1,2})\s+cents?\b", re.I)
_PARTS = {"half": " 1/2", "quarter": " 1/4", "third": " 1/3", None: " "}


def strip_markup(text: str) -> str:
    """`text` without markup and currency: ASCII digits, one character for each sign. Short texts only.

    What is left for a minus is "-" (a hyphen), "−" (a true minus sign) or "–" (a dash of any length).
    """
    text = normalize_characters(text)
    if "\\" in text or "{" in text:
        text = _without_latex(text)
    if "^" in text:
        text = _RAISED.sub(lambda match: f"^{match[1]}{match[2].replace('^', '')}", text).replace("^°", "°")
    if "<" in text:
        text = _STRUCK.sub(" ", _SUPERSCRIPT.sub(r"^\1", text))
        text = _HTML_TAG.sub(" ", _ANNOTATION.sub(r"\1 ", text))
    if "*" in text or "_" in text or "`" in text or "~" in text:
        text = _UNDERSCORES.sub("", _STARS.sub("", _STRUCK.sub(" ", text.replace("`", " "))))
    if "==" in text:
        text = _MARKED.sub(r"\1", text)
    text = _CURRENCY_CODE.sub("$", text) if "$" in text or not text.islower() else text
    text = _WORD_MINUS.sub("−", _UNIT_POWER.sub("", text))
    text = _AND_CENTS.sub(lambda match: f"{match[1]}.{match[2]:0>2} ", text)
    text = _HAN_FRACTION.sub(r"\2/\1", text) if "分" in text else text
    return _AND_A_PART.sub(lambda match: _PARTS[match[1] and match[1].lower()], text)


def normalize_characters(text: str) -> str:
    """`text` with one character for each digit, sign and space; LaTeX and markdown stay."""
    if "&" in text:
        text = html.unescape(text)
    return text if text.isascii() else "".join(map(_spelling, text))


def _without_latex(text: str) -> str:
    text = text.replace("{,}", ",").replace("\\,", NARROW).replace("\\!", "").replace("\\-", "")
    for spacing in ("\\;", "\\:", "\\ ", "\\(", "\\)", "\\[", "\\]", "\\\\"):
        text = text.replace(spacing, " ")
    text = _LATEX_FACE.sub("", _LATEX_COLOUR.sub("", text))
    text = _LATEX_FRACTION.sub(_fraction, text)
    text = _LATEX_COMMAND.sub(lambda match: _LATEX_SYMBOL.get(match[1], " "), _LATEX_ESCAPED.sub(r"\1", text))
    return text.replace("{", "").replace("}", "")


def _fraction(match: re.Match[str]) -> str:
    """`\\frac{-1}{2}` as " −1/2"; a sign may stand at the top or at the bottom."""
    top, bottom = (part.strip("{} ") for part in match.groups())
    signs = sum(part[:1] in ("-", "−") for part in (top, bottom))
    return f" {'−' if signs == 1 else ''}{top.lstrip('-− ')}/{bottom.lstrip('-− ')} "


# --- Numbers ---

_NUMERAL = (
    r"(?:(?:(?<![A-Za-z_0-9])(?<![0-9][.,])"  # not "x18", "CO2", nor the middle of a numeral
    rf"(?:[1-9][0-9]{{0,2}}(?:[{NARROW}'_ ][0-9]{{3}})+(?![0-9])(?:\.[0-9]+)?|[0-9][0-9.,]*))"
    r"|(?<![\w.)])\.[0-9]+)"
)
_NUMBER = re.compile(
    rf"(?:(?P<whole>[0-9]+) +(?=[0-9]+ ?/ ?[0-9]))?(?P<top>{_NUMERAL}|(?<=[0-9] )[0-9]+(?= ?/))"
    r"(?:(?P<exponent>[eE][-+−]?[0-9]{1,9}(?![\w.]))|(?: ?[x×*] ?10 ?\^ ?(?P<power>[-+−]?[0-9]{1,9}))"
    r"|(?: ?/ ?(?P<bottom>[0-9][0-9.,]*)))?"
    r"(?:[ -]?(?P<scale>hundred|thousand|million|billion|trillion|lakh|crore)s?\b"
    r"|(?P<letter>[kKMB]|[mb](?=\b)|mil|mn|bn)(?![A-Za-z0-9])"
    r"|(?P<han>[百千万萬亿億]{1,3})(?![分克米瓦卡帕焦赫伏]))?",
    re.I,
)
_SCALES = {
    "hundred": 10**2, "thousand": 10**3, "lakh": 10**5, "million": 10**6, "crore": 10**7, "billion": 10**9,
    "trillion": 10**12, "k": 10**3, "K": 10**3, "M": 10**6, "mil": 10**6, "mn": 10**6, "B": 10**9, "bn": 10**9,
    "百": 10**2, "千": 10**3, "万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8,
}  # fmt: skip
_MONEY_SCALES = {"m": 10**6, "b": 10**9}  # "$1.5m", but "5m" is a length
_PLAIN = re.compile(r"[0-9]*\.?[0-9]+")
_GROUPED = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_SPACED = re.compile(rf"[{NARROW}'_ ]")
_SIGN = re.compile(rf"(?P<mark>[-−–])(?P<space>\s*)[(\[\"']*(?:{CURRENCY}\s*)?[(\[\"']*\Z")
_LINKING = re.compile(r"\b(?:is|are|was|were|be|equals|equal|to|of|or|and|answer)\Z", re.I)


@dataclass(frozen=True)
class Number:
    """A number in a text: its place, sign included, and its value; None if it is malformed ("1,0,8", "18/0")."""

    start: int
    end: int
    value: Fraction | None
    scale: int = 1  # 1,000,000 for "1.5 million"


def find_numbers(text: str) -> list[Number]:
    """The numbers in a text that `strip_markup` returned, in their order."""
    numbers: list[Number] = []
    for match in _NUMBER.finditer(text):
        number = _number(match, text)
        last = numbers[-1] if numbers else None
        if last and _continues(last, number, text[last.end : number.start]):  # 2万5千, 2 million 500 thousand
            both = last.value + number.value  # pyright: ignore[reportOperatorIssue]
            numbers[-1] = Number(last.start, number.end, both, number.scale)
        else:
            numbers.append(number)
    return numbers


def _continues(last: Number, number: Number, gap: str) -> bool:
    """Whether two numbers are parts of one: 2万 and 5千."""
    if last.value is None or number.value is None:
        return False
    if gap.strip() not in ("", "and"):
        return False
    if number.scale <= 1 and gap:
        return False
    return last.scale > 1 and last.value > 0 and 0 < number.value < last.scale


def _number(match: re.Match[str], text: str) -> Number:
    value = _numeral(match["top"])
    left = text[: match.start()]
    if value is not None and match["bottom"]:
        bottom = _numeral(match["bottom"])
        value = value / bottom if bottom else None
    exponent = match["exponent"][1:] if match["exponent"] else match["power"]
    if value is not None and exponent:
        exponent = int(exponent.replace("−", "-"))
        value = value * Fraction(10) ** exponent if abs(exponent) <= LARGEST_EXPONENT else None
    if value is not None and match["whole"]:
        value += int(match["whole"])
    scale = _scale(match, left)
    sign = _SIGN.search(left, max(0, len(left) - 30))
    factor = _sign(left, sign) if sign else 1
    if factor == 0:
        value = None
    elif value is not None and scale * factor != 1:
        value *= scale * factor
    start = sign.start() if sign and factor < 0 else match.start()
    end = match.end()
    while text[end - 1] in ".,":  # the full stop after it
        end -= 1
    if text[end : end + 1] == "/" and text[end + 1 : end + 2].isdigit():  # 8/2/2, a date
        value = None
    return Number(start, end, value, scale)


def _numeral(text: str) -> Fraction | None:
    """Value of an unsigned numeral; separators only where they group thousands ("1,080", never "1,0,8")."""
    if text.isdecimal():
        return Fraction(int(text))
    text = _SPACED.sub(",", text.rstrip(".,"))
    if _PLAIN.fullmatch(text) or _GROUPED.fullmatch(text):
        return Fraction(text.replace(",", ""))
    return None


def _scale(match: re.Match[str], left: str) -> int:
    if match["scale"]:
        return _SCALES[match["scale"].lower()]
    if letter := match["letter"]:
        money = left.rstrip()[-1:] in _CURRENCY_SIGNS and left.strip() != ""
        letter = letter if len(letter) == 1 else letter.lower()  # "5m" is not "5M", but "5Bn" is "5bn"
        return _SCALES.get(letter) or (_MONEY_SCALES.get(letter) if money else None) or 1
    return math.prod(_SCALES[sign] for sign in match["han"] or "")


def _sign(left: str, match: re.Match[str]) -> int:
    """-1 if the line that `match` found before a number is its minus sign, 1 if it is none; 0 for two signs."""
    mark = match["mark"]
    spaced = bool(match["space"])
    outside = left[: match.start()]
    before = outside.rstrip()
    if not before:
        return 1 if "\n" in match["space"] else -1
    if before[-1] in "-−–":
        return 0
    if before[-1].isdigit() or before[-1] in ")]}%":
        return 1  # 16 - 3, 18-19, 50%-60%
    if spaced:
        if mark == "–":
            return -1 if before[-1] in "=(" else 1
        if "\n" in outside[len(before) :]:
            return 1  # an item of a list
        if before[-1] in "=(:$<>":
            return -1
        return -1 if mark == "−" and (_LINKING.search(before) or not before[-1].isascii()) else 1
    # "B-12", but "is -5"
    return 1 if before == outside and before[-1].isascii() and before[-1].isalpha() else -1


# --- Spelling ---

_EXACT = Context(prec=2 * LONGEST, traps=[Inexact])
_SIMPLE = re.compile(r"([-−]?)\$?([0-9]++|[1-9][0-9]{0,2}(?:,[0-9]{3})+)(?:\.([0-9]*+))?%?\.?")


def parse_decimal(text: str) -> str | None:
    """The canonical spelling of a plain decimal ("18", "-1,080.50", "$5", "50%"), of any length; else None.

    Most answers are that simple, and for them no arithmetic is needed.
    """
    match = _SIMPLE.fullmatch(text)
    if not match:
        return None
    whole = match[2].replace(",", "").lstrip("0") or "0"
    digits = (match[3] or "").rstrip("0")
    number = f"{whole}.{digits}" if digits else whole
    return f"-{number}" if match[1] and number != "0" else number


def canonical_form(value: Fraction | None) -> str | None:
    """The one spelling of a value: a decimal if it ends ("1080", "-0.5"), else a reduced fraction ("1/3")."""
    if value is None or max(value.numerator.bit_length(), value.denominator.bit_length()) > 6 * LONGEST:
        return None  # Python refuses to spell integers of more than 4,300 digits
    try:
        text = f"{_EXACT.divide(value.numerator, value.denominator):f}"
    except Inexact:  # the decimal does not end
        text = str(value)
    return text if len(text) <= 2 * LONGEST else None
