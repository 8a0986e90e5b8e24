"""LaTeX answers: which one a completion states, what equals the gold and what does not, and the worker."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from helpers import wait_for, within
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lib import answers
from grpo_lib.answers.competition import latex


@pytest.fixture(scope="module", autouse=True)
def _end_the_worker() -> Iterator[None]:
    yield
    latex.close()


STATED = {
    "\\frac{1}{2}": [
        "Answer: $\\frac{1}{2}$", "Answer: \\frac{1}{2}", "\\boxed{\\frac{1}{2}}", "so $x = \\boxed{\\frac{1}{2}}$.",
        "Answer: \\boxed{\\frac{1}{2}}", "**Answer:** \\(\\frac{1}{2}\\)", "The answer is $\\frac{1}{2}$.",
        "<answer>\\frac{1}{2}</answer>", "\\boxed{7}\nAnswer: $\\frac{1}{2}$", "Answer: 7\n\\[\\boxed{\\frac{1}{2}}\\]",
        "The final answer is $\\frac{1}{2}$. I hope it is correct.", "Answer:\n\\[\n\\frac{1}{2}\n\\]",
        "The answer is $\\frac{1}{2}$ of it.",
    ],
    "\\{1,2\\}": ["\\boxed{\\{1,2\\}}", "Answer: $\\{1,2\\}$"],
    "x = 5": ["Answer: $x = 5$"],
    "\\text{Evelyn}": ["\\boxed{\\text{Evelyn}}", "Answer: \\text{Evelyn}"],
    "Evelyn": ["Answer: Evelyn"],
    "(0, 1]": ["Answer: $(0, 1]$", "\\boxed{(0, 1]}"],
}  # fmt: skip


@pytest.mark.parametrize(("completion", "text"), [(one, text) for text, some in STATED.items() for one in some])
def test_the_last_statement_is_read(completion: str, text: str) -> None:
    assert latex.latex_answer(completion) == text
    assert answers.stated_answer("Answer: 99\n" + completion, "latex") == text


@pytest.mark.parametrize(
    "completion",
    ["", "so it is 5", "\\frac{1}{2}", "\\boxed{}", "Answer:", "\\boxed{5", "\\boxed{" + "x+" * 150 + "x}"],
)
def test_no_statement_is_no_answer(completion: str) -> None:
    assert latex.latex_answer(completion) is None


# Gold: ways to state it.
EQUAL = {
    "3": ["3", "3.0", "x=3", "x = 3", "03", "\\frac{6}{2}", "\\sqrt{9}", "3\\text{ cm}", "k+m = 3", "$3$", "3."],
    "\\frac{1}{2}": ["\\dfrac{1}{2}", "\\frac12", "\\tfrac{1}{2}", "0.5", ".5", "1/2", "\\frac{2}{4}", "2^{-1}", "½"],
    "\\frac{1}{3}": ["0.\\overline{3}", "\\frac{2}{6}"],
    "3\\frac{1}{2}": ["3.5", "\\frac{7}{2}", "7/2"],
    "2\\sqrt{3}": ["\\sqrt{12}", "2 \\sqrt 3", "2\\cdot\\sqrt{3}", "\\frac{6}{\\sqrt{3}}", "2√3"],
    "90^\\circ": ["90", "90^{\\circ}", "90°", "90 \\text{ degrees}"],
    "10\\%": ["10", "10%"],
    "\\$32,348": ["32348", "32,348", "\\$32348", "32{,}348"],
    "11,\\! 111,\\! 111,\\! 100": ["11111111100", "11,111,111,100"],
    "5.4 \\text{ cents}": ["5.4", "\\frac{27}{5}"],
    "\\text{Evelyn}": ["Evelyn", "\\textbf{Evelyn}", "evelyn", "\\text{ Evelyn }"],
    "\\text{(C)}": ["C", "(C)", "\\text{C}", "\\textbf{(C)}"],
    "\\left( 3, \\frac{\\pi}{2} \\right)": ["(3, \\frac{\\pi}{2})", "(3,\\pi/2)", "\\left(3,\\dfrac{\\pi}{2}\\right)"],
    "(0,1]": ["\\left(0, 1\\right]", "(0, 1.0]", "x \\in (0,1]"],
    "x \\in [-2,7]": ["[-2,7]", "x\\in[-2, 7]"],
    "(-\\infty, 2) \\cup (3, \\infty)": ["(3,\\infty)\\cup(-\\infty,2)", "(-∞,2)∪(3,∞)"],
    "\\{1,2\\}": ["\\{2, 1\\}", "1, 2", "\\left\\{1,2\\right\\}", "2 \\text{ and } 1"],
    "1,-2": ["-2, 1", "1 and -2", "x = 1, x = -2", "\\{-2,1\\}"],
    "1 \\pm \\sqrt{19}": ["1-\\sqrt{19}, 1+\\sqrt{19}", "1\\pm\\sqrt{19}"],
    "8n^2 + 4n + 1": ["1+4n+8n^2", "8n^{2}+4n+1"],
    "x^2-1": ["(x-1)(x+1)", "y = x^2 - 1", "f(x) = x^2-1"],
    "y = 2x + 3": ["y=2x+3", "y = 3 + 2x", "2x + 3"],
    "6 - 5i": ["6-5i", "-5i+6", "6 - 5 i"],
    "-1": ["e^{i\\pi}", "i^2", "\\frac{i}{-i}"],
    "i": ["\\sqrt{-1}", "0+1i"],
    "p - q": ["-q + p"],
    "3R^2": ["3 R^{2}"],
    "2516_8": ["2516_{8}", "2516_8"],
    "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}": [
        "\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\ \\frac{4}{2}\\end{pmatrix}",
    ],
    "x > 2": ["2 < x"],
    "\\pi": ["π", "\\frac{2\\pi}{2}"],
    "\\emptyset": ["\\varnothing"],
}  # fmt: skip

DIFFERENT = {
    "3": ["4", "-3", "3x", "3, 4", "3 \\text{ or } 4", "3 or 4", "\\{3\\}", "(3,3)", "2\\sqrt{3}", "3^2", "3!",
          "\\log 3", "x = 3, y = 4", "x_3", "\\{3, 4\\}", "\\text{three}", "3.0000001", "x > 3", "3_8",
          "\\pm 3", "[3, 3]"],
    "2": ["2 \\text{ or more}", "1 < 2", "y^2 = 2", "2x = 2"],
    "10": ["2^{10}", "10^{10}", "\\frac{1}{10}"],
    "\\frac{1}{3}": ["0.333333", "0.33", "3", "\\frac{3}{1}"],
    "\\sqrt{2}": ["1.414214", "1.41", "2"],
    "2\\sqrt{3}": ["3", "2", "3.4641016", "\\sqrt{3}"],
    "1,2": ["1", "2", "1,2,3", "(1,2)", "[1,2]", "1,1", "12", "\\{1\\}"],
    "\\{1,2\\}": ["(1,2)", "[1,2]", "\\{1,2,3\\}", "1"],
    "(0,1)": ["[0,1]", "(0,1]", "[0,1)", "1", "\\{0,1\\}", "(1,0)", "0,1", "0 < x < 1", "(0,1,2)"],
    "(-\\infty, 2) \\cup (3, \\infty)": ["(-\\infty,2)", "(-\\infty,2] \\cup (3,\\infty)", "x < 2"],
    "1 \\pm \\sqrt{19}": ["1+\\sqrt{19}", "1", "19", "1-\\sqrt{19}"],
    "3+4i": ["4", "3", "3-4i", "5"],
    "x+1": ["y+1", "x", "1", "x+1=0", "x+2"],
    "x=5": ["y=5", "x=6", "x > 5"],
    "x > 2": ["x \\ge 2", "2", "x < 2", "x > 3"],
    "y = 2x+3": ["y = 2x", "3", "y > 2x+3"],
    "\\text{Evelyn}": ["Evelin", "\\text{Evelyn or Bob}", "nylevE", "\\text{Bob}", "E"],
    "\\text{east}": ["\\text{seat}", "west", "\\text{not east}"],
    "\\text{(C)}": ["B", "(C), (D)", "\\text{C or D}"],
    "2516_8": ["2516", "2516_9", "2516_{16}"],
    "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}": [
        "\\begin{pmatrix}2\\\\1\\end{pmatrix}", "\\begin{pmatrix}1\\\\3\\end{pmatrix}", "2",
    ],
    "1000": ["1, 000", "1"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("stated", "gold", "equal"),
    [
        *((one, gold, True) for gold, some in EQUAL.items() for one in (gold, *some)),
        *((one, gold, False) for gold, some in DIFFERENT.items() for one in some),
    ],
)
def test_equal_and_different_answers(stated: str, gold: str, equal: bool) -> None:
    assert latex.same_latex(stated, gold) is equal
    assert answers.agrees(latex.latex_answer(f"So:\n\\boxed{{{stated}}}"), gold, "latex") is equal


# Pairs whose difference is below 1e-15, as math-verify 0.9.0 rounds it: gold, and a neighbour of it.
TINY_DIFFERENCES = [
    (r"\frac{2^{100}-1}{2^{101}}", r"\frac{2^{100}-1}{2^{102}}"),
    (r"\frac{2^{500}+1}{3 \cdot 2^{501}}", r"\frac{1}{3 \cdot 2^{501}}"),
    (r"\frac{2^{64}+1}{3 \cdot 2^{65}}", r"\frac{1}{3 \cdot 2^{65}}"),
    (r"\frac{2^{100}-1}{2^{100}}", r"\frac{2^{100}+1}{2^{100}}"),
    (r"\frac{1}{20!}", r"\frac{1}{19!}"),
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
    (r"\frac{1}{2^{55}}", r"\frac{1}{2^{54}}"),
    (r"\left\{\frac{1}{2^{99}}, 1\right\}", r"\left\{\frac{1}{2^{98}}, 1\right\}"),
    (r"\left(0, \frac{1}{2^{99}}\right]", r"\left(0, \frac{1}{2^{98}}\right]"),
    (r"\begin{pmatrix}2^{-99}\\2\end{pmatrix}", r"\begin{pmatrix}2^{-98}\\2\end{pmatrix}"),
    (r"x > \frac{1}{2^{99}}", r"x > \frac{1}{2^{98}}"),
    (r"\frac{x}{2^{99}}", r"\frac{x}{2^{98}}"),
    (r"\frac{i}{2^{99}}", r"\frac{i}{2^{98}}"),
    (r"10^{-17}", r"10^{-18}"),
    (r"e^{-100}", r"e^{-99}"),
    (r"\sin(10^{-20})", r"10^{-20}"),
    (r"\sqrt{2} + 2^{-500}", r"\sqrt{2}"),
]  # fmt: skip
SAME_TINY_VALUES = [
    (r"\frac{1}{2^{99}}", r"2^{-99}"), (r"\frac{1}{2^{99}}", r"\frac{2}{2^{100}}"),
    (r"\frac{1}{2^{99}}", r"(\frac{1}{2})^{99}"), (r"\frac{1}{20!}", r"\frac{1}{20 \cdot 19!}"),
    (r"\frac{\sqrt{12}}{2^{99}}", r"\frac{\sqrt{3}}{2^{98}}"), (r"\frac{7}{10^{20}}", r"7 \times 10^{-20}"),
    (r"1 - \frac{1}{2^{100}}", r"\frac{2^{100}-1}{2^{100}}"), (r"x > \frac{1}{2^{99}}", r"2^{-99} < x"),
    (r"\left\{\frac{1}{2^{99}}, 1\right\}", r"\left\{1, 2^{-99}\right\}"), (r"\sqrt{12} - 2\sqrt{3}", "0"),
    (r"\sqrt{3 + 2\sqrt{2}}", r"1 + \sqrt{2}"), (r"\cos(\frac{\pi}{5})", r"\frac{1+\sqrt{5}}{4}"),
    (r"\frac{x}{2^{99}}", r"x \cdot 2^{-99}"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "neighbour"), TINY_DIFFERENCES)
def test_a_tiny_difference_is_a_difference(gold: str, neighbour: str) -> None:
    assert latex.same_latex(gold, gold)
    assert not latex.same_latex(neighbour, gold)
    assert not latex.same_latex(gold, neighbour)


@pytest.mark.parametrize(("gold", "spelling"), SAME_TINY_VALUES)
def test_a_tiny_value_may_be_spelled_in_any_way(gold: str, spelling: str) -> None:
    assert latex.same_latex(spelling, gold)
    assert latex.same_latex(gold, spelling)


def neighbours() -> Iterator[tuple[str, str]]:
    """A thousand pairs of different values that are close, or small."""
    for k in range(50, 250):
        a = 2 * k + 1
        yield rf"\frac{{{a}}}{{2^{{{k}}}}}", rf"\frac{{{a}}}{{2^{{{k + 1}}}}}"
        yield rf"1 + \frac{{1}}{{2^{{{k}}}}}", rf"1 + \frac{{1}}{{2^{{{k - 1}}}}}"
        yield rf"\frac{{{a}}}{{10^{{{k}}}}}", rf"\frac{{{a + 1}}}{{10^{{{k}}}}}"
        yield rf"\sqrt{{2}} \cdot 10^{{-{k}}}", rf"\sqrt{{3}} \cdot 10^{{-{k}}}"
    for k in range(18, 118):
        yield rf"\frac{{1}}{{{k}!}}", rf"\frac{{1}}{{{k + 1}!}}"
        yield rf"\{{\frac{{1}}{{2^{{{k + 40}}}}}, 1\}}", rf"\{{\frac{{1}}{{2^{{{k + 41}}}}}, 1\}}"


def test_a_thousand_neighbours_are_told_apart() -> None:
    pairs = list(neighbours())
    assert len(pairs) == 1000
    assert [pair for pair in pairs if latex.same_latex(*pair)] == []


@pytest.mark.parametrize(
    "stated", [None, "", " ", "$", "$$", ".", "\\frac{1}{", "}{", "\\", "5+", "x^", "\\text{", "3" * 301]
)
def test_what_cannot_be_read_equals_nothing(stated: str | None) -> None:
    assert not latex.same_latex(stated, "5")
    assert not latex.same_latex("5", stated or "")


@pytest.mark.parametrize("function", [answers.stated_answer, lambda text, kind: answers.agrees(text, "5", kind)])
def test_an_unknown_kind_is_an_error(function) -> None:
    with pytest.raises(ValueError, match="tagged, integer, latex"):
        function("Answer: 5", "exact")


# --- Wild text ---

COMMANDS = ["\\frac", "\\sqrt", "\\text", "\\left", "\\right", "\\cup", "\\pm", "\\begin{pmatrix}", "\\overline"]
SIGNS = [*"{}()[],;=<>^_+-*/.$%& xyie0123", "\\{", "\\}", "\\\\", " or ", "\\boxed{", "\ud800"]
FRAGMENTS = st.lists(st.sampled_from(COMMANDS) | st.sampled_from(SIGNS), max_size=30)
WILD = st.text(st.characters()) | FRAGMENTS.map("".join)


@given(WILD)
def test_any_completion_is_read(text: str) -> None:
    for completion in (text, f"Answer: {text}", f"\\boxed{{{text}}}"):
        answer = latex.latex_answer(completion)
        assert answer is None or 0 < len(answer) <= latex.LONGEST_LATEX
        latex.read_shape(latex.normalize_latex(answer or ""))


@pytest.mark.slow
@settings(max_examples=60)
@given(WILD, WILD | st.sampled_from(["5", "x+1", "(0,1)"]))
def test_any_two_texts_are_compared_in_time(stated: str, gold: str) -> None:
    with within(latex.WALL_SECONDS + latex.START_SECONDS, time.monotonic):
        assert latex.same_latex(stated, gold) in (True, False)


@pytest.mark.parametrize(
    "unit", ["\\frac{", "(", "\\{", "1,", "\\boxed{", "$", "\\cup ", "\\text{ or }", "x=", "Answer: 1 "]
)
def test_hostile_megabytes_are_read_in_time(unit: str) -> None:
    for text in (unit * (1_000_000 // len(unit)), "Answer: " + unit * (1_000_000 // len(unit))):
        with within(1.0):
            latex.latex_answer(text)
            assert not latex.same_latex(text, "5")
            assert not latex.same_latex("5", text)
            latex.read_shape(latex.normalize_latex((unit * 300)[:300]))


# --- The worker ---


@pytest.fixture
def worker_pid() -> Iterator[int]:
    """The process id of a worker that has answered; after the test the next call works, whatever has ended it."""
    assert latex.same_latex("\\sqrt{4}", "2")
    yield latex._worker.process.pid
    assert latex.same_latex("\\sqrt{4}", "2")


def is_running(pid: int) -> bool:
    return any(one.pid == pid and one.info["status"] != psutil.STATUS_ZOMBIE for one in psutil.process_iter(["status"]))


@pytest.mark.slow
@pytest.mark.parametrize("stated", ["10^{10^{10}}", "99999999!", "\\int_0^1 x^{x^{x^{x}}} dx"])
def test_what_takes_for_ever_is_killed_and_counted(worker_pid: int, stated: str) -> None:
    before = latex.killed()
    with within(5, time.monotonic):
        assert not latex.same_latex(stated, "x + 7" if "x" in stated else "\\sqrt{7}")
    assert latex.killed() == before + 1
    assert not is_running(worker_pid)


@pytest.mark.slow
def test_the_clock_kills_and_the_next_call_works(worker_pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever makes the worker silent: here it is stopped, so not even its own timer can end it."""
    before = latex.killed()
    monkeypatch.setattr(latex, "WALL_SECONDS", 0.5)
    os.kill(worker_pid, signal.SIGSTOP)
    assert not latex.same_latex("\\sqrt{4}", "2")
    assert latex.killed() == before + 1
    assert not is_running(worker_pid)


@pytest.mark.slow
def test_a_worker_that_somebody_else_ended_is_replaced(worker_pid: int) -> None:
    before = latex.killed()
    os.kill(worker_pid, signal.SIGKILL)
    assert latex.same_latex("\\sqrt{4}", "2")
    assert latex._worker.process.pid != worker_pid
    assert latex.killed() == before


@pytest.mark.slow
def test_close_leaves_no_process(worker_pid: int) -> None:
    for _ in ("once", "again"):
        latex.close()
        assert not is_running(worker_pid)


@pytest.mark.slow
def test_threads_share_one_worker() -> None:
    with ThreadPoolExecutor(10) as pool:
        verdicts = pool.map(lambda n: latex.same_latex(f"\\sqrt{{{n * n}}}", str(n)), range(2, 12))
    assert list(verdicts) == [True] * 10


PARENT = """
import sys, time
from grpo_lib import answers
from grpo_lib.answers.competition import latex
assert "math_verify" not in sys.modules and "sympy" not in sys.modules
assert latex.same_latex("\\\\sqrt{4}", "2")
assert "math_verify" not in sys.modules and "sympy" not in sys.modules
print(latex._worker.process.pid, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["returns", "is killed"])
def test_the_worker_ends_with_its_parent(end: str, root: Path, tmp_path: Path) -> None:
    """The parent, a script that does not ask for its `__name__`, never imports SymPy and runs once."""
    script = tmp_path / "script.py"
    script.write_text(PARENT + ("time.sleep(60)" if end == "is killed" else ""))
    command = [sys.executable, str(script)]
    path = {"PYTHONPATH": str(root)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | path) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        if end == "is killed":
            parent.kill()
    assert wait_for(lambda: not is_running(pid), seconds=10, pause=0.05)


@pytest.mark.slow
def test_a_worker_without_math_verify_says_so(worker_pid: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    latex.close()
    (tmp_path / "math_verify.py").write_text("raise ImportError('not there')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Exception, match=r"not there.*make setup"):
        latex.same_latex("\\sqrt{4}", "2")
