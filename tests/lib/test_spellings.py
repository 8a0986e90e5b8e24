"""One value, many spellings: whatever keeps the meaning keeps the verdict, and what changes it changes the verdict."""

import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

from hypothesis import assume, given
from hypothesis import strategies as st
from test_answers import tagged

from grpo_lib import answers
from grpo_lib.answers import final_answer


def test_labelled_spellings() -> None:
    lines = (Path(__file__).parent / "spellings.jsonl").read_text("utf-8").splitlines()
    for row in map(json.loads, lines):
        assert answers.is_correct(tagged(row["text"]), row["gold"]) == row["label"], row


def test_decisions_are_what_is_done() -> None:
    for text, read, why in final_answer.EXTRACTION_RULES:
        assert answers.extract_answer(tagged(text)) == read, (text, why)


# --- Re-spelling: from a value to one of the ways to write it ---

DIGITS = {
    "plain": "0123456789",
    "full-width": "０１２３４５６７８９",
    "Arabic": "٠١٢٣٤٥٦٧٨٩",
    "bold": "𝟎𝟏𝟐𝟑𝟒𝟓𝟔𝟕𝟖𝟗",
}
MINUSES = ("-", "−", "－", "–", "‑", "﹣", "⁻", "➖", "minus ", "negative ")
GROUPS = ("", ",", "{,}", "\u202f", "\u00a0", "\\,", "'", " ")
AROUND = (
    "{}", " {} ", "\n{}\n", "{}.", "**{}**", "*{}*", "`{}`", "__{}__", "({})", "[{}]", "“{}”", "<b>{}</b>", "#### {}",
    "\\boxed{{{}}}", "$\\boxed{{{}}}$", "\\({}\\)", "\\[ {} \\]", "\\text{{{}}}", "\\mathbf{{{}}}",
    "{} apples", "{} km/h", "{} m²", "{} m^2", "{}%", "{} percent", "\u200b{}\ufeff", "about {}",
    "Answer: {}", "The answer is {}.", "So she has {} apples left.", "the total is: {}", "After 3 days he has {} left.",
    "9 * 2 = {}", "x = {}", "16 - 3 - 4 = 9; 9 * 2 = {}", "In total, 5 + 13 equals {}",
    "答案是{}", "答案：{}。", "一共有{}个苹果", "所以是{}元",
)  # fmt: skip
CURRENCY = ("", "$", "€", "US$", "＄", "\\$")


@st.composite
def respelled(draw) -> tuple[str, Fraction]:
    """A decimal number in one of many spellings, and its value."""
    value = draw(st.decimals(min_value=-(10**9), max_value=10**9, places=draw(st.integers(0, 3))))
    digits, _, places = f"{abs(value):f}".partition(".")
    group = draw(st.sampled_from(GROUPS))
    whole = f"{int(digits):,}".replace(",", group) if len(digits) > 4 or group in ("", ",") else digits
    number = whole + (f".{places}" if places else draw(st.sampled_from(["", ".0", ".00"])))
    number = number.translate(str.maketrans(DIGITS["plain"], DIGITS[draw(st.sampled_from(list(DIGITS)))]))
    number = draw(st.sampled_from(CURRENCY)) + number
    if value < 0:
        number = draw(st.sampled_from(MINUSES)) + number
    return draw(st.sampled_from(AROUND)).format(number), Fraction(value)


@given(respelled())
def test_a_value_survives_its_spelling(spelled: tuple[str, Fraction]) -> None:
    text, value = spelled
    gold = str(value)
    assert answers.is_correct(tagged(text), gold), text
    assert answers.is_correct(tagged(gold), text), text
    assert answers.is_close(tagged(text), gold, 0.1)
    assert not answers.is_correct(tagged(text), str(value + 1))
    if value:
        assert not answers.is_correct(tagged(text), str(-value))


@given(respelled(), respelled())
def test_two_different_numbers_are_no_answer(one: tuple[str, Fraction], other: tuple[str, Fraction]) -> None:
    assume(one[1] != other[1])
    for joined in (f"{one[1]} or {other[1]}", f"{one[1]}, {other[1]}", f"either {one[1]} or {other[1]}"):
        assert answers.extract_answer(tagged(joined)) is None


FRACTIONS = ("{s}{a}/{b}", "{s}\\frac{{{a}}}{{{b}}}", "{s}\\dfrac{{{a}}}{{{b}}}", "\\frac{{{s}{a}}}{{{b}}}",
             "\\boxed{{{s}\\frac{{{a}}}{{{b}}}}}", "the answer is {s}{a}/{b}")  # fmt: skip


@given(st.integers(1, 999), st.integers(1, 999), st.sampled_from([1, -1]), st.sampled_from(FRACTIONS))
def test_fractions_have_a_value(top: int, bottom: int, sign: int, spelled: str) -> None:
    text = spelled.format(s="-" if sign < 0 else "", a=top, b=bottom)
    assert Fraction(answers.canonical_answer(text)) == sign * Fraction(top, bottom), text
    assert answers.is_correct(tagged(text), str(sign * Fraction(top, bottom))), text


SCALES = {
    " hundred": 2, " thousand": 3, "k": 3, "K": 3, " million": 6, "M": 6, " billion": 9, "万": 4, "萬": 4, "亿": 8,
    "e3": 3, "E+2": 2, " × 10^3": 3, " \\times 10^{3}": 3, "·10³": 3, " × 10⁻²": -2,
}  # fmt: skip


@given(st.integers(1, 9999), st.integers(0, 2), st.sampled_from(sorted(SCALES)))
def test_scales_have_a_value(digits: int, places: int, scale: str) -> None:
    number = Decimal(digits).scaleb(-places)
    text = f"{number:f}{scale}"
    assert answers.is_correct(tagged(text), f"{number.scaleb(SCALES[scale]):f}"), text
