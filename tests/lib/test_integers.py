"""Integer answers: where a completion states one, how it is spelled, and what is none."""

import pytest
from helpers import within
from hypothesis import example, given
from hypothesis import strategies as st

from grpo_lib import answers
from grpo_lib.answers.competition import integers

WORKING = "Some working: 7 and 12, so \\boxed{99}, and the answer is 98.\nAnswer: 97\nBut then again:\n"

# Value: completions that state it.
STATED = {
    "33": [
        "Answer: 33", "answer: 33", "ANSWER: 33", "Answer:33", "Answer : 33", "Answer： 33", "Final Answer: 33",
        "**Answer:** 33", "**Answer: 33**", "**Answer**: 33", "### Answer: 33", " Answer: 33 ", "Answer: 33.",
        "Answer: 33\n\nI hope this answer is correct.", "Answer:\n33", "Answer:\n\n$$33$$", "Answer:\n\\[\n33\n\\]",
        "Answer: 5\nAnswer: 33", "\\boxed{5} Answer: 33", "Answer: 5 then \\boxed{4}\nso \\boxed{33}",
        "\\boxed{33}", "$\\boxed{33}$.", "\\fbox{33}", "\\boxed {33}", "\\boxed{ 33 }", "\\boxed{\\text{33}}",
        "\\boxed{\\mathbf{33}}", "\\boxed{\\boxed{33}}", "\\boxed{m+n=33}", "\\boxed{\\text{Answer: }33}",
        "\\textbf{\\boxed{33}}", "**\\boxed{33}**", "- \\boxed{33}", "x = \\boxed{33}", "$m+n=33$\n\n\\boxed{33}",
        "\\boxed{3} no, wait: \\boxed{33}", "\\boxed{33}\n\n2. done", "\\boxed{33} cm", "\\[\n\\boxed{33}\n\\]",
        "Answer: \\boxed{33}", "Answer: $\\boxed{33}$", "Answer: The sum is \\boxed{33}.", "Answer: 33 = \\boxed{33}",
        "<answer>33</answer>", "<answer> 33\n</answer>", "<answer>\\boxed{33}</answer>", "<answer>Answer: 33</answer>",
        "Answer: <answer>33</answer>", "<answer>5</answer> so \\boxed{33}", "<answer>5</answer><answer>33</answer>",
        "The answer is 33.", "the final answer is 33", "The answer is: 33", "The answer is therefore $\\boxed{033}$",
        "The final answer is $33$. I hope it is correct.", "The answer to the problem is 33.",
        "The answer is\n\\[\n\\boxed{33}\n\\]", "$\\text{Answer: } 33$",
        "Answer: $33$", "Answer: \\(33\\)", "Answer: *33*", "Answer: _33_", "Answer: `33`", "Answer: \\textbf{33}",
        "Answer: 033", "Answer: +33", "Answer: ３３", "Answer: 33.0", "Answer: 33.00",
        "Answer: $x = 33$", "Answer: n=33", "Answer: k+m+n = 33", "Answer: 12 + 21 = 33",
        "Answer: $3x = 99 \\implies x = 33$", "Answer: The sum is 33.",
        "Answer: 33, as required", "Answer: 66/2", "Answer: \\frac{66}{2}", "Answer: $\\dfrac{66}{2}$",
        "Answer: 33^\\circ", "Answer: $33^{\\circ}$", "Answer: 33°", "Answer: 33 degrees", "Answer: 33\\%",
        "Answer: 33%", "Answer: 33 cm", "Answer: 33\\text{ cm}", "Answer: 33 m^2", "Answer: 33 apples",
        "Answer: 33 \\text{ square units}", "Answer: \\$33",
    ],
    "-7": [
        "Answer: -7", "Answer: −7", "Answer: –7", "Answer: - 7", "Answer: $-7$", "Answer: x = -7", "Answer: minus 7",
        "\\boxed{-7}", "Answer: \\frac{-14}{2}", "Answer: -\\frac{14}{2}", "The answer is −7.",
    ],
    "1234567": [
        "Answer: 1,234,567", "Answer: 1{,}234{,}567", "Answer: 1\\,234\\,567", "\\boxed{1,234,567}",
        "Answer: $1{,}234{,}567$", "Answer: 1 234 567",
    ],
    "1000": ["Answer: 10^3", "Answer: $10^{3}$", "\\boxed{10^3}", "Answer: 10³", "Answer: x=10^3"],
    "1024": ["Answer: 2^{10}", "Answer: 2^10"],
    "0": ["Answer: 0", "Answer: -0", "Answer: 000"],
}  # fmt: skip

NO_INTEGER = (
    *("Answer:", "Answer: ", "Answer: unknown", "Answer: none", "Answer: thirty-three", "\\boxed{}"),
    *("Answer: 3.5", "Answer: \\frac{1}{2}", "Answer: 3\\frac{1}{2}", "Answer: 1/0", "Answer: 1/2/2", "Answer: 3:30"),
    *("Answer: 3 or 4", "Answer: 3, 4", "Answer: 3 4", "Answer: 33-34", "Answer: 33 to 34", "Answer: 33 and 33"),
    *("Answer: ±3", "Answer: \\pm 3", "Answer: (0,1)", "Answer: [3,4]", "Answer: \\{3\\}", "Answer: |33|"),
    *("Answer: 2\\sqrt{3}", "Answer: \\sqrt{9}", "Answer: 3+4i", "Answer: 5i", "Answer: 33x", "Answer: 33 x"),
    *("Answer: 33n", "Answer: 33\\pi", "Answer: \\log 33", "Answer: \\binom{3}{2}", "Answer: x_33", "Answer: a_{33}"),
    *("Answer: 33!", "Answer: 33_{8}", "Answer: 33_8", "Answer: 0x21", "Answer: 2k", "Answer: 1,0,8", "Answer: --33"),
    *("Answer: 12 + 5", "Answer: 32 = 33", "Answer: 10^2^3", "Answer: .33", "Answer: 3 dozen"),
    *("Answer: 30 + 3", "Answer: 3 \\cdot 11", "Answer: 11 * 3",
      "Answer: 33\\cdot"),
    *("Answer: 10^{10^10}", "Answer: 10^{10^{10}}", "Answer: 10^{-3}", "Answer: 10^{2000}", "Answer: 1e5000"),
    *("Answer: 2^n", "Answer: 2^{n}", "Answer: 9^{9999}", "Answer: 33 (mod 100)", "Answer: 33 \\pmod{100}"),
    *("Answer: x > 3", "Answer: 3 < x", "Answer: x \\ge 3", "Answer: x \\ne 33", "Answer: at least 33"),
    *("Answer: not 33", "The answer is not 33.", "Answer: about 33", "Answer: \\approx 33", "Answer: 33 or so"),
    *("Answer: x = 3, y = 4", "Answer: x = 3 or x = 4", "Answer: \\text{33 or 34}", "\\boxed{3 \\text{ or } 4}"),
    *("Answer: \\boxed{3}, \\boxed{4}", "Answer: \\boxed{3} or \\boxed{4}", "Answer: 3 or \\boxed{4}"),
    *("\\boxed{3} or \\boxed{4}", "\\boxed{3}, \\boxed{4}", "\\boxed{33} or 34", "\\boxed{3}+4", "-\\boxed{33}"),
    *("2\\boxed{33}", "\\boxed{33}!", "\\boxed{10}^3", "\\sqrt{\\boxed{9}}", "\\boxed{33}\\sqrt{2}", "\\boxed{33"),
    *("Answer: 33\n\\boxed{}", "\\boxed{33}\nAnswer: 3.5", "<answer>33</answer> Answer: x"),
    *("<answer>3 or 4</answer>", "<answer></answer>", "<answer>Answer: 3 or 4</answer>"),
)  # fmt: skip

# Common spellings of 12, which the integer and the LaTeX reader take alike.
TWELVE = (
    *(r"\boxed{12\,\text{cm}}", r"\boxed{12\,\text{cm}^2}", r"\boxed{12\,\mathrm{m}}", r"\boxed{12~\text{cm}}"),
    *("Answer: $12$ cm", "The answer is $12$ apples.", "Answer: 12 cm", r"\boxed{12 apples}", "Answer: 12 dollars"),
    *(r"\boxed{3\cdot4=12}", r"\boxed{12 = 3\cdot 4}", r"\boxed{3\times4=12}", r"\boxed{6+6=12}"),
    *(r"\boxed{2\cdot3+6=12}", r"\boxed{12^{\circ}\text{C}}", r"\boxed{12\,}"),
    *("</think>\\boxed{12}", "</reasoning>\\boxed{12}", "> \\boxed{12}", "=> \\boxed{12}", "<b>\\boxed{12}</b>"),
    *("| answer | \\boxed{12} |", "<p>\\boxed{12}</p>", "\\boxed{12}<br>", "so 3x = 36 => x = \\boxed{12}"),
    *("Thus 3 + 9 = 12</think>\\boxed{12}", "答案：12", "答案是12", "最終答案是 12。", "**答案：** $12$", "答案為：12"),
    *("</think>Answer: 12", "> Answer: 12", "=> Answer: 12", "<b>Answer: 12</b>", "| Answer: 12 |"),
    *("</think>答案：12", "> 答案是 12。", "=> 答案：12", "<b>答案：12</b>", "| 答案：12 |"),
    "所以答案是 \\boxed{12}。",
    *("答案：12 公分", "答案：12公分。", "答案是12元。", "Answer: 12 公分", "答案：12 個蘋果", "答案：12 个苹果"),
    *(r"\boxed{12 公分}", r"\boxed{12公分}", r"\boxed{12\text{ 公分}}"),
    *(r"\boxed{12\,\text{公分}}", r"\boxed{12\mathrm{元}}"),
    *("答案是 $12$ 公分。", "答案：$12$公分", r"\boxed{12~\text{公分}}"),
    *(r"\boxed{12\text{ 公分}^2}", "答案：12 平方公尺"),
    *("答案：12 公里/小時", "答案：12 千克", "答案：12 種不同的方法", "答案：12 條對角線", "答案：12 個正方形"),
    *("答案：12 個三角形", "答案：12℃"),
    *("答案：3×4=12 公分", "答案：x = 12 公分", "答案：12 公分 = 3×4 公分", "答案：12.0 公分", "\\boxed{12} 公分"),
)  # fmt: skip
NOT_TWELVE = (
    *(r"\boxed{12 = 3\cdot 5}", r"\boxed{3\cdot 5=12}", r"\boxed{13 = 12}", r"\boxed{12 = 12 = 13}"),
    *(r"\boxed{12\,000}", r"\boxed{12\,\pi}", r"\boxed{12~13}", r"\boxed{12\cdot}", "Answer: 12 dozen"),
    *("Answer: 12 thousand", "Answer: 12 x", "Answer: $12$ or $13$", "Answer: $12$ and 13", "Answer: $12 and $13"),
    *("not <b>\\boxed{12}</b>", "2</b>\\boxed{12}", "<b>3</b> or <b>\\boxed{12}</b>", "|\\boxed{12}|"),
    *("x > \\boxed{12}", "x >= \\boxed{12}", "x => -\\boxed{12}", "-<b>\\boxed{12}</b>", "3 | \\boxed{12}"),
    *("\\boxed{12}</b>!", "\\boxed{12}<sup>2</sup>", "\\boxed{12} < 13"),
    *("答案不是12", "答案是不是12", "答案是 3 或 12", "答案：3，12", "答案是3、12", "答案是12以上", "答案是12万"),
    *("答案：12.5 公分", "答案：12 公分 13 公分", "答案：1,2 公分", "答案：12 或 13 公分"),
    *("答案：12 至 13 公分", "答案：13 公分 = 12 公分"),
    *("答案：12 公分以上", "答案：12 個以上", "答案：12 左右", "答案：12 個左右", "答案：約 12 公分"),
    *("答案：不是 12 公分", "答案：12 天內"),
    *("答案：12 打", "答案：12 打蛋", "答案：12 雙", "答案：12萬元", "答案：12 億元", "答案：12 個百"),
    *("答案：12 個十", "答案：12 千公尺"),
    *("答案：12 倍", "答案：12 成", "答案：12 折", "答案：12 平方", "答案：12 次方", "答案：12 平方根"),
    *("答案：12 個平方", "答案：12 根號", "答案：12 根號3"),
    *("答案：12 個半", "答案：12 元半", "答案：12 塊五", "答案：12 點五", "答案：12 元五角"),
    *("答案：12 小時 30 分", "答案：12 的一半"),
    *("答案：$12$以上", "答案：$12$萬", "答案：$12$ 打", "答案：12 元^2", "答案：12 公分^4"),
    *("答案：12 個或13個", "Answer: 3 $12$ cm"),
    *("Answer: $12$ dozen", "Answer: $12$ thousand"),
)  # fmt: skip


@pytest.mark.parametrize("kind", ["integer", "latex"])
@pytest.mark.parametrize("completion", TWELVE)
def test_common_spellings_are_read_by_both_readers(completion: str, kind: str) -> None:
    assert answers.is_correct(completion, "12", kind)
    assert answers.is_correct(WORKING + completion, "12", kind)
    assert not answers.is_correct(completion, "13", kind)


@pytest.mark.parametrize("kind", ["integer", "latex"])
@pytest.mark.parametrize("completion", NOT_TWELVE)
def test_what_is_near_them_is_not_read(completion: str, kind: str) -> None:
    assert not answers.is_correct(completion, "12", kind)


@pytest.mark.parametrize("kind", ["integer", "latex"])
@pytest.mark.parametrize("sign", ["\\cdot", "\\times"])
def test_a_power_of_ten_is_multiplied(sign: str, kind: str) -> None:
    assert answers.is_correct(rf"\boxed{{1.2{sign}10^{{4}}}}", "12000", kind)


def test_units_in_chinese_leave_other_values_alone() -> None:
    """Signs, thousands, scale words; and in LaTeX each part of a list, and values that are no integers."""
    for kind in ("integer", "latex"):
        assert answers.is_correct("答案：−12 元。", "-12", kind)
        assert answers.is_correct("答案：1,234 公分", "1234", kind)
        assert answers.is_correct("答案：1234 公分", "1234", kind)
        assert not answers.is_correct("答案：1,234 公分", "1", kind)
    assert answers.is_correct("答案：12萬元", "120000", "integer")
    for stated, gold in (("12.5 公分", "12.5"), ("$\\frac{1}{2}$ 公分", "0.5"), ("1 公分, 2 公分", "1,2")):
        assert answers.is_correct(f"答案：{stated}", gold, "latex")
        assert integers.integer_answer(f"答案：{stated}") is None
    assert answers.is_correct("\\boxed{2\\pi\\text{ 公分}}", "2\\pi", "latex")
    assert answers.is_correct("\\boxed{12}", "12\\text{ 公分}", "latex")


STATES_NOTHING = (
    "",
    "33",
    "so it is 33",
    "= 33",
    "#### 33",
    "<answer>33",
    "33</answer>",
    "I hope this answer is correct",
)


@pytest.mark.parametrize(("completion", "value"), [(text, value) for value, texts in STATED.items() for text in texts])
def test_a_stated_integer_is_read(completion: str, value: str) -> None:
    assert integers.integer_answer(completion) == value
    assert integers.integer_answer(WORKING + completion) == value
    with_zeros = value if value.startswith("-") else value.rjust(3, "0")
    assert answers.agrees(integers.integer_answer(completion), with_zeros, "integer")
    assert not answers.agrees(integers.integer_answer(completion), str(int(value) + 1), "integer")


@pytest.mark.parametrize("completion", NO_INTEGER)
def test_what_is_not_one_integer_is_no_answer(completion: str) -> None:
    """And it replaces the statement before it."""
    assert integers.integer_answer(completion) is None
    assert integers.integer_answer(WORKING + completion) is None


@pytest.mark.parametrize("completion", STATES_NOTHING)
def test_an_integer_outside_a_statement_does_not_count(completion: str) -> None:
    assert integers.integer_answer(completion) is None
    assert integers.integer_answer(WORKING + completion) == "97"


@pytest.mark.parametrize("gold", ["033", "33", " 33 ", "33.0", "$33$"])
def test_gold_may_have_leading_zeros(gold: str) -> None:
    assert answers.agrees("33", gold, "integer")
    assert not answers.agrees("330", gold, "integer")
    assert not answers.agrees(None, gold, "integer")


def test_long_integers_are_exact() -> None:
    number = "1" + "0" * 500 + "7"
    assert integers.integer_answer(f"Answer: {number}") == number
    assert integers.integer_answer("Answer: 10^{999}") == "1" + "0" * 999
    assert integers.integer_answer("Answer: " + "9" * 5000) is None


# --- Properties ---

OPENINGS = ["<answer>", "</answer>", "Answer:", "the answer is ", "\\boxed{", "\\fbox{", "\\text{", "}"]
BETWEEN = ["\\frac{1}{2}", "**", "$", "$$", "\\[", "\\]", "\n", " or ", ", ", "x = ", "^", "_", "!", "."]
NUMBERS = ["1", "33", "1,080", "½", "²", "٣", "İ", "\ud800", "\x00", "-", "/", "%", " ", "cm"]
FRAGMENT = st.sampled_from(OPENINGS) | st.sampled_from(BETWEEN) | st.sampled_from(NUMBERS)
FRAGMENTS = st.lists(FRAGMENT, max_size=40).map("".join)


@given(st.text(st.characters()) | FRAGMENTS)
@example("İ Answer: \ud800")
@example("\\boxed")
def test_any_text_gives_an_integer_or_nothing(text: str) -> None:
    for completion in (
        text,
        f"Answer: {text}",
        f"\\boxed{{{text}}}",
        f"<answer>{text}</answer>",
        f"the answer is {text}",
    ):
        answer = integers.integer_answer(completion)
        if answer is not None:
            assert str(int(answer)) == answer


@given(
    st.integers(-(10**30), 10**30), st.sampled_from(["{}", "${}$", "{}.", "**{}**", "\\boxed{{{}}}", "x = {}", "{} cm"])
)
def test_every_integer_is_read(value: int, dressing: str) -> None:
    for number in (f"{value}", f"{value:,}", f"{value:,}".replace(",", "{,}"), f"{value}.0"):
        assert integers.integer_answer("Answer: " + dressing.format(number)) == str(value)


@given(
    FRAGMENTS,
    st.sampled_from(
        [
            "Answer: {}",
            "Answer:{}.",
            "**Answer:** ${}$",
            "ANSWER: \\boxed{{{}}}\n",
            "Answer: $\\boxed{{{}}}$.",
            "The answer is {}.",
            "the answer is: ${}$",
            "so the answer is $\\boxed{{{}}}$.",
        ]
    ),
    st.sampled_from(["33", "033", "-7", "-0", "3.5", "3 or 4", "", "2\\sqrt{3}"]),
)
def test_the_quick_way_reads_what_the_long_one_reads(before: str, ending: str, number: str) -> None:
    completion = f"{before}\n{ending.format(number)}"
    quick = integers.integer_answer(completion)
    stated = integers.last_statement(completion)
    assert quick == (integers.read_integer(stated) if stated else None)


# --- Attacks ---

MEGABYTE = 1_000_000
UNITS = (
    *("answer ", "answer:", "Answer: ", "the answer is ", "answer is 1 ", "\\boxed{", "\\boxed{}", "\\boxed{1}"),
    *("<answer>", "</answer>", "<answer>1</answer>", "<answer", "\\text{", "\\frac{", "{", "}", "\\", "$", "$$", "\\["),
    *("1", "1 ", "1,", "1/", "9^", "^", "-", " ", "\n", ".", "*", "_", "=", "x=", "1=", "²", "１", "\ud800", "İ"),
    *("1 or ", "and ", "is ", "a", "a ", "cm ", "!", "(", "<a ", "~~", "1 million ", "亿", "，"),
    *("\x00", "&#49;", "\\fbox", "答案", "答案：", "答案是 1 ", "</b>", "answer is </b>", "| ", "=> ", "> ", "3×4="),
    *("$1$ cm ", "</think>", "\\,", "~", "1 公分 ", "個", "$1$ 個 ", "元 "),
)  # fmt: skip


@pytest.mark.parametrize(
    "place",
    [
        *("{}", "Answer: {}", "{}\nAnswer: 33", "\\boxed{{{}}}", "<answer>{}</answer>", "The answer is {}"),
        "Answer: 33 {}",
    ],
)
def test_hostile_megabytes_are_read_in_time(place: str) -> None:
    for unit in UNITS:
        text = place.format(unit * (MEGABYTE // len(unit)))
        with within(1.0):
            answer = integers.integer_answer(text)
        assert answer in ({"33"} if place.endswith("33") else {None, "33", "1"}), (unit, place)
