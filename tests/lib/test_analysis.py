"""Each category from completions whose mistake is known, calculations judged exactly, and no text that hurts."""

import json
from fractions import Fraction

import pytest
from helpers import within
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_lib import analysis
from grpo_lib.evaluation import EvalRun, grade
from grpo_lib.prompts import template_completion as log


def record(completion, gold, solution="", truncated=False):
    return {
        "completion": completion,
        "gold": gold,
        "solution": solution,
        "truncated": truncated,
        **grade(completion, gold),
    }


JANET = "Janet sells 16 - 3 - 4 = 9 duck eggs a day.\nShe makes 9 * 2 = $18 every day at the farmer’s market."


@pytest.mark.parametrize(
    ("category", "completion", "gold", "solution"),
    [
        ("right", log("2*7=14 14-11=3", 3), "3", "2*7=14 14-11=3"),
        ("right", log("2*7=15 so it must be", 3), "3", "2*7=14 14-11=3"),  # the verdict decides, not the way to it
        ("no answer", "2*7=14 14-11=3", "3", "2*7=14 14-11=3"),
        ("no answer", log("2*7=14 14-11=3", "three of them"), "3", "2*7=14 14-11=3"),
        ("no answer", "", "3", ""),
        ("stopped early", log("2*7=14", 14), "3", "2*7=14 14-11=3"),
        ("stopped early", log("", 14), "3", "2*7=14 14-11=3"),  # an intermediate result without the calculation
        ("stopped early", log("She sells 16 eggs - 3 eggs - 4 eggs = 9 eggs.", "9 eggs"), "18", JANET),
        ("stopped early", log("2+7=9", 9), "3", "2*7=14 14-11=3"),  # one operation where two are needed
        ("arithmetic slip", log("6*3=18 18-7=13", 13), "11", "6*3=18 18-7=11"),
        ("arithmetic slip", log("6*7=42 42+12=42", 42), "54", "6*7=42 42+12=54"),  # and not "stopped early"
        ("arithmetic slip", log("The total is $16 − $3 = $14.", "$14"), "18", JANET),
        ("wrong operation", log("11+7=18 18+11=29", 29), "15", "11-7=4 4+11=15"),
        ("wrong operation", log("(16 + 3 + 4) \\times 2 = 46", 46), "18", JANET),  # three operations, like the solution
        ("other", log("", 16), "12", "4*3=12"),
        ("other", log("16 - 3 - 4 = 9, 9 * 2 = 18", 81), "18", JANET),  # the right result, and then another number
        ("other", log("I think that it is about", 40), "18", JANET),
    ],
)
def test_categories(category, completion, gold, solution):
    assert analysis.classify(record(completion, gold, solution)) == category


@pytest.mark.parametrize(
    ("causes", "completion"),
    [
        ("", log("6*7=42 42-13=29", 29)),
        ("", log("6*7=48 42-13=29", 29)),  # the verdict decides, not the way to it
        ("format", "6*7=42 42-13=29\n#### 29"),
        ("habit", log("6*7=42", 42)),
        ("habit", log("", 28)),
        ("skill", log("6*7=48 48-13=35", 35)),
        ("format habit", "6*7=42\n#### 42"),
        ("habit skill", log("6*7=48", 48)),
        ("format skill", "6*7=42 42-13=39"),
        ("format habit skill", "6*7=48\n#### 48"),
        ("other", log("6+7=13 13+13=26", 26)),
        ("other", log("6*7=42 42-13=29 29+4=33", 33)),  # one calculation too many
    ],
)
def test_causes_are_all_found(causes, completion):
    assert analysis.causes(record(completion, "29", "6*7=42 42-13=29")) == set(causes.split())


@given(st.text(), st.text(), st.booleans())
def test_whatever_is_wrong_has_a_cause(completion, solution, truncated):
    found = record(completion, "29", solution, truncated)
    assert bool(analysis.causes(found)) == (not found["strict"])


def test_categories_stand_in_the_order_of_the_rules():
    """From a record to which every rule applies, take away what the first one reads: the next one decides."""
    everything = record(log("2*7=15", 14), "14", "2*7=14 14-11=3", truncated=True)
    right = everything | {"strict": True, "extracted": None}
    cut_off = right | {"strict": False}
    no_answer = cut_off | {"truncated": False}
    slip = no_answer | {"extracted": "14"}
    too_early = slip | {"completion": log("2*7=14", 14)}
    wrong = too_early | {"solution": "", "gold": "3"}
    too_late = wrong | {"gold": "2", "completion": log("1*2=2 2*7=14", 14)}
    nothing = too_late | {"completion": ""}
    records = [right, cut_off, no_answer, slip, too_early, wrong, too_late, nothing]
    assert tuple(analysis.classify(one) for one in records) == analysis.CATEGORIES
    assert tuple(analysis.MEANINGS) == analysis.CATEGORIES


@pytest.mark.parametrize(
    ("text", "results", "true"),
    [
        ("7*3=21 21-4=17", ["21", "17"], True),
        ("16 eggs - 3 eggs - 4 eggs = 9 eggs", ["9"], True),
        ("$80,000+$50,000=$130,000", ["130000"], True),
        ("Step 1: 3 x 4 = 12 and 3 × 4 = 12", ["12", "12"], True),
        ("- 3*4=12\n* 5+5=10", ["12", "10"], True),  # marks of a list, not operators
        ("(3+4)*2=14, and (3+4=7)", ["14", "7"], True),
        ("2+3*4=14", ["14"], True),
        ("-5+3=-2", ["-2"], True),
        ("\\( 16 - 3 \\times 4 = 4 \\) **3+4=7**", ["4", "7"], True),
        ("48/2 = <<48/2=24>>24", ["24"], True),
        ("3*4=12+5=17", ["12", "17"], True),  # a run-on line is two true calculations
        ("3*4=2*6", ["12"], True),
        ("9*2 = 18 = 18", ["18"], True),
        ("100/3 = 33.33", ["33.33"], True),  # rounded, or cut off
        ("200/3 = 66.67 and 200/3 = 66.66 and 7/2=3", ["66.67", "66.66", "3"], True),
        ("50*20%=10 and 1/5=20% and 10/50*100=20%", ["10", "20", "20"], True),
        ("0.1+0.2=0.3", ["0.3"], True),  # exactly, which no float can say
        ("0.1+0.2=0.30000000000001", ["0.30000000000001"], False),
        ("3+4=8", ["8"], False),
        ("(3+4=8)", ["8"], False),
        ("100/3 = 34.5", ["34.5"], False),
        ("10/2=4", ["4"], False),  # nothing to round
        ("999999999999+1=1000000000001", ["1000000000001"], False),
    ],
)
def test_calculations_are_judged_exactly(text, results, true):
    found = list(analysis.calculations(text))
    assert [one.result for one in found] == [Fraction(result) for result in results]
    assert all(one.true for one in found) is true


@pytest.mark.parametrize(
    "text",
    [
        *("2x + 3 = 7", "100 = 5A/5", "2^3+1=9", "3² + 1 = 9"),
        *("8 x 1 1/2 = 12", "60 / 3/4 = 80", "7:50 + 30 = 8:20", "5(3+4)=35", "3+4=12^2", "3+4!=8", "√16 + 1 = 5"),
        *("1/0=3", "3+4=", "=5", "3 = 3", "+", "3 + = 4", "((3+4)=7)+", "10/3 ≈ 3", ""),
    ],
)
def test_what_is_not_plain_is_not_judged(text):
    assert [one for one in analysis.calculations(text) if not one.true] == []


@settings(max_examples=150)
@given(
    st.integers(0, 999), st.sampled_from("+-*/"), st.integers(1, 999), st.integers(-3, 3).filter(bool), st.booleans()
)
def test_a_true_calculation_is_true_and_a_false_one_is_false(a, operation, b, error, spaces):
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[operation]
    if operation == "/":
        a = value * b
    sign = f" {operation} " if spaces else operation
    (good,) = analysis.calculations(f"So {a}{sign}{b}={value}.")
    assert good.true
    assert good.operations == 1
    (bad,) = analysis.calculations(f"So {a}{sign}{b}={value + error}.")
    assert not bad.true


wild = st.text(alphabet=st.sampled_from("0123456789+-*/x×÷=()%.,:$ \n<>\\^aA½²٣-−'\ud800"), max_size=80) | st.text(
    max_size=80
)


@settings(max_examples=150)
@given(wild, wild, wild)
@example("<answer>1</answer>" * 3, "1e5", "1/0=0")
@example(log("2+2=4", "1" * 5000), "11", "6*3=18 18-7=11")  # too long for arithmetic
def test_no_text_raises(completion, gold, solution):
    assert analysis.classify(record(log(completion, 5), gold, solution)) in analysis.CATEGORIES
    assert analysis.classify(record(completion, gold, solution)) in analysis.CATEGORIES


@pytest.mark.parametrize(
    "unit", ["<", "1", "1,", "(", "3+", "=", "x 3", "- ", "<<", "1,000", "a-", "\\", " ", "1+1=", "9*", "٣", "\ud800"]
)
def test_a_megabyte_takes_no_time(unit):
    text = unit * (1_000_000 // len(unit))
    with within(3):  # a quadratic search would take minutes; the collector of garbage may take some tenths
        list(analysis.calculations(text))


def test_reference_solutions_are_hardly_ever_accused(gsm8k_dir):
    with open(gsm8k_dir / "train.jsonl", encoding="utf-8") as file:
        found = [one for line in file for one in analysis.calculations(json.loads(line)["answer"].partition("####")[0])]
    assert len(found) > 22_000  # the data mark 23,000
    assert sum(not one.true for one in found) < 50  # many of them are mistakes of the data


@given(st.data())
def test_the_parts_of_a_gain_add_up_to_it(data):
    """On any answers of the kinds that a policy gives."""
    texts = ["2*7=14 14-11=3", "2*7=14", "2*7=15 15-11=4", "?", "2+7=9 9+11=20", ""]
    written = [form(text, text.rpartition("=")[2]) for text in texts for form in (log, "{}\n#### {}".format)]
    n = data.draw(st.integers(1, 30))

    def evaluated(name):
        completions = data.draw(st.lists(st.sampled_from(written), min_size=n, max_size=n), label=name)
        rest = {"question": "?", "gold": "3", "solution": "2*7=14 14-11=3", "truncated": False, "greedy": True}
        return EvalRun([{"id": str(i), "completion": c} | rest | grade(c, "3") for i, c in enumerate(completions)])

    before, after = evaluated("before"), evaluated("after")
    rows = analysis.gain_parts(before, after)
    gain = (sum(r["strict"] for r in after.records) - sum(r["strict"] for r in before.records)) / n
    assert sum(row["gain"] for row in rows) == pytest.approx(gain)
    assert all(row["low"] <= row["gain"] + 1e-9 and row["gain"] <= row["high"] + 1e-9 for row in rows)
    assert all(row["gain"] == pytest.approx(row["before"] - row["after"]) for row in rows)
    assert sum(row["before"] for row in rows) == pytest.approx(1 - before.summary()["accuracy"])


@given(a=st.integers(0, 999), b=st.integers(0, 999), result=st.integers(0, 9999), sign=st.sampled_from("+-*x×"))
def test_a_simple_calculation_is_read_in_every_spelling(a, b, result, sign):
    wanted = (a, "*" if sign in "x×" else sign, b, result)
    for text in (f"{a}{sign}{b}={result}", f"so {a} {sign} {b} = {result}.", f"<reasoning>{a} {sign} {b} = {result}</"):
        assert list(analysis.simple_calculations(text)) == [wanted]
    assert list(analysis.simple_calculations(f"7{a:03}{sign}{b}={result}"))[:1] != [wanted]


@given(st.text(alphabet="0123456789+-*x×= \n٣", max_size=60))
def test_a_simple_calculation_of_any_text_is_four_short_numbers(text):
    for a, sign, b, result in analysis.simple_calculations(text):
        assert sign in "+-*"
        assert max(a, b, result) < 10**9
