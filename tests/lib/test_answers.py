"""Answers: real spellings, attacks, properties, and every reference solution of GSM8K."""

import json
from fractions import Fraction

import pytest
from helpers import within
from hypothesis import example, given
from hypothesis import strategies as st

from grpo_lib import answers, prompts

GSM8K_ROWS = {"train": 7473, "test": 1319}


def tagged(answer: str) -> str:
    return prompts.template_completion("Some working with 7 and 12.", answer)


# Value: ways to write it.
NEGATIVE_FIVES = [f"{minus}5" for minus in "-−–—‐‑‒﹣－"]
SPELLINGS = {
    "18": ["18", "18.00", "18.", "+18", " 18\n", "018", "１８", "$18", "$18.00", "USD18", "Rs. 18", "€18",
           "18 dollars", "18 apples.", "18 m^2", "18 m²", "18-hour", "18%", "18\\%", "**18**", "The answer is 18.",
           "18 (that is, $18.00)", "9 * 2 = 18", "9 * 2 = $18.00 a day", "x = 18", "\\boxed{18}", "$\\boxed{18}$",
           "9 and 2 give \\boxed{18}", "$18$", "\\(18\\)", "\\$18", "18\\text{ cm}"],
    "1080": ["1,080", "1{,}080", "1\\,080", "1\u202f080"],
    "1080.5": ["$1,080.50"],
    "1234567": ["1,234,567"],
    "-5": ["- 5", "-$5", "$-5", "minus 5", "Negative 5 degrees", "= -5", "3 - 8 = -5", *NEGATIVE_FIVES],
    "0": ["0", "-0.0"],
    "0.5": [".5", "0.50", "1/2", "½", "\\frac{1}{2}"],
    "-0.5": ["-1/2"],
    "3.5": ["3 1/2 cups", "3½ cups"],
    "1/3": ["2/6"],
    "8": ["16/2"],
}  # fmt: skip

NO_ANSWER = (
    *("", " ", "?", "none", "eighteen", "$", "-", ".", "\\boxed{}", "9 * 2 =", "="),
    *("18 or 19", "18, 19", "18-19", "18–19", "18 to 19", "between 18 and 19", "18;19", "\\boxed{18} or 19"),
    *("1,0,8", "1,08", "10,80", "1,0800", "1,080,5", "1,00,000", "0,080", "1.080.000", "3.1.4"),
    *("9 * 2", "2 * 2", "2+2", "7-7", "5 x 5", "5 times 5", "10^{10}", "10²", "2^2", "±5", "18/0", "8/2/2"),
    *("18 apples and 0 pears", "3:30", "16 minus 3"),
    *("__import__('os').getpid()", "9**9**9**9", "print(18)", "{{9*2}}"),  # nothing is executed
)


@pytest.mark.parametrize(("written", "value"), [(text, value) for value, texts in SPELLINGS.items() for text in texts])
def test_spelling_is_read_by_value(written: str, value: str) -> None:
    assert answers.canonical_answer(written) == value
    assert answers.extract_answer(tagged(written)) == value
    assert answers.is_correct(tagged(written), value)
    assert not answers.is_correct(tagged(written), str(Fraction(value) + 1))
    if Fraction(value):
        assert not answers.is_correct(tagged(written), str(-Fraction(value)))


@pytest.mark.parametrize("written", NO_ANSWER)
def test_no_single_number_is_no_answer(written: str) -> None:
    assert answers.canonical_answer(written) is None
    assert answers.extract_answer(tagged(written)) is None
    assert not any(answers.is_correct(tagged(written), gold) for gold in ("18", "19", "2", "5", "10", written))
    assert not answers.is_close(tagged(written), "18", 1.0)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<answer>17</answer><answer>18</answer>", "18"),
        ("<answer>18</answer> and so <answer>19", "18"),
        ("<answer>18</answer></answer>", "18"),
        ("<answer> hm <answer>18</answer>", "18"),
        ("<answer>18</answer> <answer>?</answer>", None),
        ("<answer>18", None),
        ("18</answer>", None),
        ("</answer>18<answer>", None),
        ("<ANSWER>18</ANSWER>", None),
        ("18", None),
        ("", None),
    ],
)
def test_strict_answer_is_the_last_whole_block(completion: str, answer: str | None) -> None:
    assert answers.extract_answer(completion) == answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("16-3=13", "13"),
        ("16 - 3", "3"),
        ("16 -3", "3"),
        ("18–19", "19"),
        ("= -5", "-5"),
        ("= - $5", "-5"),
        ("so it is −5 degrees", "-5"),
        ("The result is －$1,080.500.", "-1080.5"),
        ("we buy:\n- 5 apples", "5"),
        ("that is - 18 - all", "18"),
        ("vitamin B-12", "12"),
        ("#### 1,080", "1080"),
        ("so 1,080.", "1080"),
        ("2,3,4", "4"),
        ("7 of them, <answer>$18.00</answer>", "18"),
        ("half: \\frac{1}{2}", "0.5"),
        ("an area of 18 m^2", "18"),
        ("5" + " and" * 10_000, "5"),
        ("none", None),
        ("", None),
    ],
)
def test_lenient_answer_is_the_last_number(completion: str, answer: str | None) -> None:
    assert answers.lenient_answer(completion) == answer
    assert answers.is_correct_leniently(completion, answer or "18") == (answer is not None)


@pytest.mark.parametrize("gold", ["1,080", "1080", " 1,080.00 ", "$1,080", "#### 1,080"])
def test_gold_may_be_spelled_in_any_way(gold: str) -> None:
    assert answers.is_correct(tagged("1080"), gold)
    assert answers.is_correct_leniently("it is 1080", gold)
    assert answers.is_close(tagged("1000"), gold, 0.1)


@pytest.mark.parametrize("gold", ["", "?", "18 or 19"])
def test_unreadable_gold_matches_nothing(gold: str) -> None:
    assert not answers.is_correct(tagged(gold), gold)
    assert not answers.is_correct_leniently(gold, gold)
    assert not answers.is_close(tagged("18"), gold, 1.0)


@pytest.mark.parametrize(
    ("answer", "gold", "close"),
    [
        ("110", "100", True),
        ("90", "100", True),
        ("110.0000000000000000001", "100", False),
        ("0.11", "0.1", True),  # in floats it is not: 0.11 - 0.1 > 0.1 * 0.1
        ("-110", "-100", True),
        ("-100", "100", False),
        ("0", "0", True),
        ("0.001", "0", False),
    ],
)
def test_is_close_is_exact_at_its_ends(answer: str, gold: str, close: bool) -> None:
    assert answers.is_close(tagged(answer), gold, 0.1) == close


@pytest.mark.parametrize(
    ("answer", "gold", "equal"),
    [
        ("9007199254740993", "9007199254740992", False),
        ("0.1000000000000000000001", "0.1", False),
        ("0.3", "3/10", True),
        ("0.3333333333333333", "1/3", False),
    ],
)
def test_comparison_is_exact_where_floats_are_not(answer: str, gold: str, equal: bool) -> None:
    assert answers.is_correct(tagged(answer), gold) == equal


@pytest.mark.parametrize(
    ("completion", "exact", "loose"),
    [
        ("<reasoning>r</reasoning><answer>18</answer>", True, True),
        ("<reasoning>\nr\n</reasoning>\n<answer>\n18\n</answer>", True, True),
        ("<reasoning>r</reasoning>\n<answer>?</answer>", True, True),
        ("<reasoning>r</reasoning><answer> 18</answer>", False, True),
        ("<reasoning>r\n\n</reasoning><answer>18</answer>", False, True),
        ("<reasoning>r</reasoning>\n\n<answer>18</answer>", False, True),
        (" <reasoning>r</reasoning><answer>18</answer>", False, True),
        ("<reasoning>r</reasoning><answer>18</answer>\n", True, True),
        ("\n<reasoning>r</reasoning><answer>18</answer>", True, True),
        ("\n<reasoning>\nr\n</reasoning>\n<answer>18</answer>\n", True, True),
        ("<reasoning>r</reasoning><answer>18</answer>\n\n", False, True),
        ("\n\n<reasoning>r</reasoning><answer>18</answer>", False, True),
        ("<reasoning>r</reasoning><answer>18</answer> ", False, True),
        ("<reasoning>r</reasoning><answer>18</answer>\n.", False, False),
        ("<reasoning>r</reasoning>so<answer>18</answer>", False, False),
        ("well <reasoning>r</reasoning><answer>18</answer>", False, False),
        ("<reasoning>r</reasoning><answer>18</answer>.", False, False),
        ("<reasoning></reasoning><answer>18</answer>", False, False),
        ("<reasoning>r</reasoning><answer> </answer>", False, False),
        ("<answer>18</answer><reasoning>r</reasoning>", False, False),
        ("<reasoning>r<answer>18</reasoning></answer>", False, False),
        ("</reasoning>r<reasoning></answer>18<answer>", False, False),
        ("<reasoning>r</reasoning><answer>18</answer><answer>18</answer>", False, False),
        ("<reasoning><reasoning>r</reasoning><answer>18</answer>", False, False),
        ("<answer>18</answer>", False, False),
        ("18", False, False),
        ("", False, False),
    ],
)
def test_format(completion: str, exact: bool, loose: bool) -> None:
    assert answers.format_is_exact(completion) is exact
    assert answers.format_is_loose(completion) is loose


# --- Properties ---

# Where a line break may stand: at the outer edges, at the inner edges of the tags, and between the blocks.
EDGES = st.tuples(*[st.text("\n", max_size=2) for _ in range(7)])


@given(EDGES)
@example(("\n", "\n", "\n", "\n", "\n", "\n", "\n"))
def test_one_line_break_at_each_edge_is_exact_and_two_are_not(edges: tuple[str, ...]) -> None:
    blocks = ("<reasoning>", "16 - 3", "</reasoning>", "<answer>", "18", "</answer>")
    completion = edges[0] + "".join(block + edge for block, edge in zip(blocks, edges[1:], strict=True))
    assert answers.format_is_exact(completion) is all(len(edge) <= 1 for edge in edges)
    assert answers.format_is_loose(completion)


@given(st.text(st.characters(), min_size=1), st.booleans())
def test_nothing_but_a_line_break_may_stand_outside_the_blocks(text: str, in_front: bool) -> None:
    block = "<reasoning>r</reasoning><answer>18</answer>"
    completion = text + block if in_front else block + text
    assert answers.format_is_exact(completion) is (text == "\n")


ANY_TEXT = st.text(st.characters())  # st.characters() alone includes lone surrogates and NUL
TAGS = ["<answer>", "</answer>", "<reasoning>", "</reasoning>", "\\boxed{", "\\frac{1}{2}", "}"]
PIECES = ["1", "18", "1,080", "0", "½", "²", "٣", "minus ", "x", "\ud800", "\x00", "\u00a0"]
SIGNS = list("$=-−/,.^% \n")
FRAGMENT = st.sampled_from(TAGS) | st.sampled_from(PIECES) | st.sampled_from(SIGNS)
FRAGMENTS = st.lists(FRAGMENT, max_size=40).map("".join)


def all_of(text: str, gold: str) -> None:
    for of_text in (answers.extract_answer, answers.lenient_answer, answers.canonical_answer):
        of_text(text)
    answers.is_correct(text, gold)
    answers.is_close(text, gold, 0.1)
    answers.is_correct_leniently(text, gold)
    assert answers.format_is_loose(text) or not answers.format_is_exact(text)


@given(ANY_TEXT | FRAGMENTS, ANY_TEXT | FRAGMENTS)
@example("<answer>\ud800</answer>", "\x00")
def test_never_raises(text: str, gold: str) -> None:
    all_of(text, gold)
    all_of(tagged(text), gold)


@given(ANY_TEXT | FRAGMENTS)
def test_canonical_is_idempotent(text: str) -> None:
    spelling = answers.canonical_answer(text)
    if spelling is not None:
        assert answers.canonical_answer(spelling) == spelling
        assert answers.canonical_answer(f"9 * 2 = {spelling}") == spelling


# --- Attacks ---

MEGABYTE = 1_000_000
MANY_NUMBERS = "\n".join(map(str, range(19, 140_000)))
LONG_HALVES = "7" * 480 + "/" + str(2**1690)
ATTACKS = {
    "opening tags": "<answer>" * (MEGABYTE // 8),
    "closing tags": "</answer>" * (MEGABYTE // 9),
    "whole blocks": "<answer>1</answer>" * (MEGABYTE // 18),
    "open reasoning": "<reasoning>" * (MEGABYTE // 11),
    "half tags": "<answer" * (MEGABYTE // 7),
    "boxes": "<answer>" + "\\boxed{" * (MEGABYTE // 7) + "</answer>",
    "digits": "<answer>" + "9" * MEGABYTE + "</answer>",
    "digits, untagged": "9" * MEGABYTE,
    "separators": "<answer>" + "1," * (MEGABYTE // 2) + "</answer>",
    "slashes": "<answer>" + "1/" * (MEGABYTE // 2) + "</answer>",
    "spaced digits": "<answer>" + "1 " * (MEGABYTE // 2) + "</answer>",
    "spaces": "<answer>" + " " * MEGABYTE + "</answer>",
    "dots": "." * MEGABYTE + "1",
    "minus signs": "-" * MEGABYTE + "5",
    "equals signs": "<answer>" + "=" * MEGABYTE + "</answer>",
    "words": "minus " * (MEGABYTE // 6),
    "surrogates": "\ud800" * MEGABYTE,
    "NUL": "<answer>" + "\x00" * MEGABYTE + "</answer>",
    "superscripts": "²" * MEGABYTE,
    "short block, many digits": "<answer>" + "1 " * 480 + "/" + "</answer>",
    "10,000 digits": "<answer>" + "9" * 10_000 + "</answer>",
    "tiny decimal": "<answer>0." + "0" * 990 + "1</answer>",
    "calculations in brackets": "<answer>" + "(1+1)" * (MEGABYTE // 5) + "</answer>",
    "conclusions": "<answer>" + "so 1→" * (MEGABYTE // 5) + "</answer>",
    "reasons": "<answer>" + "1 because " * (MEGABYTE // 10) + "</answer>",
    "equations": "<answer>" + "1=x," * (MEGABYTE // 4) + "</answer>",
    "fractions": "<answer>" + "\\frac{" * (MEGABYTE // 6) + "</answer>",
    "stars": "<answer>" + "*1" * (MEGABYTE // 2) + "</answer>",
    "HTML entities": "<answer>" + "&#49;" * (MEGABYTE // 5) + "</answer>",
    "open HTML": "<answer>" + "<a " * (MEGABYTE // 3) + "</answer>",
    "scales": "1 million " * (MEGABYTE // 10),
    "full-width digits": "<answer>" + "１" * MEGABYTE + "</answer>",
    "endless exponent": "<answer>1e" + "9" * MEGABYTE + "</answer>",
    "endless scale": "<answer>1" + "亿" * MEGABYTE + "</answer>",
    "long scale": "<answer>1" + "亿" * 538 + "</answer>",
    "many halves": "<answer>" + LONG_HALVES + "</answer>",
    "huge exponent": "<answer>1e999999999</answer>",
    "list": "<answer>" + MANY_NUMBERS + "</answer>",
    "large quotient": "<answer>" + "7" * 490 + "/" + "3" * 490 + "</answer>",
}


@pytest.mark.parametrize("text", ATTACKS.values(), ids=ATTACKS)
def test_hostile_text_is_graded_in_time(text: str) -> None:
    with within(1.0):
        all_of(text, "18")
    assert not answers.is_correct(text, "18")


def test_long_numerals_are_compared_digit_by_digit() -> None:
    number = "1" + "0" * 9_998 + "7"
    assert answers.is_correct(tagged(number), number)
    assert answers.is_correct_leniently(number, number)
    assert answers.is_correct(tagged(f"-{number}.50"), f"-{number}.5")
    assert not answers.is_correct(tagged(number), number[:-1] + "8")
    assert answers.is_close(tagged(number), number, 0.1)
    assert not answers.is_close(tagged(number), "7", 0.1)


def test_the_end_of_a_long_text_is_read() -> None:
    hostile = "<answer>" * 100_000 + "</reasoning>" * 50_000 + "<answer>18</answer>"
    assert answers.is_correct(hostile, "18")
    assert answers.is_correct_leniently(hostile, "18")
    assert answers.is_correct(tagged("He thinks about it. " * 500 + "The answer is 18."), "18")
    assert answers.is_correct(tagged("他想了很久，" * 500 + "所以答案是18元"), "18")
    assert not answers.is_correct(tagged("9" * 1500 + " eggs"), "9" * 1000)


# --- GSM8K ---


@pytest.mark.gsm8k
@pytest.mark.parametrize("split", GSM8K_ROWS)
def test_every_gsm8k_reference_solution_is_correct(gsm8k_dir, split: str) -> None:
    rows = [json.loads(line) for line in (gsm8k_dir / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == GSM8K_ROWS[split]
    for index, row in enumerate(rows):
        solution, _, gold = row["answer"].rpartition("####")
        completion = prompts.template_completion(solution.strip(), gold.strip())
        assert answers.is_correct(completion, gold), index
        assert answers.format_is_exact(completion), index
        assert answers.is_correct_leniently(completion, gold), index
        assert answers.is_correct_leniently(row["answer"], gold), index
