r"""LaTeX answers, as of MATH-500: which one a completion states, and whether it equals the gold.

The place of the answer is found as for integers. What stands there is compared in two steps. First its shape is read
here, without algebra: a number, an expression, an equation, words, a set or list, a point or interval, a union. Shapes
and counts must agree, so one of two answers, a set for a point or [0, 1) for (0, 1) is no match, and plain numbers
are compared exactly. Only then math-verify (SymPy) compares what is left, element by element.

math-verify can take for ever: "10^{10^{10}}" is enough. Its own guard is SIGALRM, which works in the main thread only
and does not stop a long operation in C (Math-Verify#55, #65), so the guard is switched off and the work is done in a
worker process that can be killed: a fresh Python, neither a fork, which would inherit a running JAX, nor
multiprocessing's spawn, which would import the user's script again. Executors and pools have no way to end one task.
The worker ends when its pipe closes, and the kernel ends it when it has used its CPU time, so no worker outlives its
parent for long.
"""

import atexit
import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from grpo_lib.answers.competition.chinese_units import has_chinese, without_chinese_unit
from grpo_lib.answers.competition.integers import only_a_unit
from grpo_lib.answers.final_answer import last_statement
from grpo_lib.answers.numbers import find_numbers, strip_markup
from grpo_lib.common.errors import CourseError
from grpo_lib.prompts import after_thoughts

LONGEST_LATEX = 300  # characters; no gold of MATH-500 is nearly as long
CPU_SECONDS = 2.0  # of one comparison; most take a few milliseconds
WALL_SECONDS = 4.0  # of one comparison, on a machine that is busy with other work
START_SECONDS = 120.0  # for the worker to import SymPy
MEMORY = 2 * 2**30  # bytes; a power tower asks for more

# --- The answer in a completion ---

_WRAPPED = re.compile(r"(?:\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\])([^0-9$\\]*)", re.S)
_MORE = re.compile(r"[,;&]|\b(?:or|and|not|to|dozens?|pairs?|hundred|thousand|[mb]illion|trillion)\b", re.I)


def latex_answer(completion: str, thinking: bool = False) -> str | None:
    """The LaTeX that a completion states last as its answer, without `$`; None if there is none, or it is too long.

    Never raises, and takes well under a second for megabytes of any text.
    """
    stated = last_statement(after_thoughts(completion, thinking))
    text = (stated or "").strip(" \t\r\n*").strip()
    wrapped = _WRAPPED.fullmatch(text)
    if wrapped and not _says_more(wrapped[4].rstrip("。")):
        text = next(part for part in wrapped.groups() if part is not None)
    text = text.strip().rstrip(".*。").strip()
    return text if 0 < len(text) <= LONGEST_LATEX else None


def _says_more(after: str) -> bool:
    """Whether what stands after a formula changes it, or adds another: " or 3" and "以上", but not " cm" and "公分"."""
    if has_chinese(after):
        return without_chinese_unit(f"0{after}") != "0"
    return _MORE.search(after) is not None


# --- Equality ---


def same_latex(stated: str | None, gold: str) -> bool:
    """Whether the LaTeX that `latex_answer` gave is the same answer as `gold`.

    Never raises because of a text, and is back within five seconds whatever it holds; the first call also waits for the
    worker to start. A comparison that had to be killed is False, and `killed` counts it. CourseError where
    math-verify is not installed.
    """
    if not stated or len(stated) > LONGEST_LATEX or len(gold) > LONGEST_LATEX:
        return False
    one, other = normalize_latex(stated), normalize_latex(gold)
    if not one or not other:
        return False
    verdict = _compare(one, other, None)
    return _worker.ask(one, other) if verdict is None else verdict


def killed() -> int:
    """How many comparisons of this process were killed by the clock, and so counted as wrong."""
    return _worker.killed


def close() -> None:
    """End the worker; the next comparison starts another. Runs at exit by itself."""
    _worker.close()


# --- One spelling ---

_SPACING = re.compile(
    r"(?<!\\)\\(?:[,;:!> ]|q?quad(?![A-Za-z])|(?:displaystyle|limits|big|Big|bigg|Bigg)[lr]?(?![A-Za-z]))|~"
)
_DELIMITERS = re.compile(r"\\\$|\$|(?<!\\)\\[()\[\]]|\\(?:left|right)(?![A-Za-z])\.?")
_GROUPING = re.compile(r"(?<=[0-9])(?:\{,\}|,\s*\\!\s*)(?=[0-9]{3})")
_FRACTION_COMMAND = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_SHORT_FRACTION = re.compile(r"\\frac\s*(?:([0-9A-Za-z])|\{([^{}]*)\})\s*(?:([0-9A-Za-z])|\{([^{}]*)\})")
_SHORT_ROOT = re.compile(r"\\sqrt\s*([0-9A-Za-z])")
_WORDS = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|hbox|operatorname|boldsymbol|bm)\s*\{([^{}]*)\}"
)
_SYMBOLS = {
    "−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "π": "\\pi ", "∞": "\\infty ", "√": "\\sqrt", "≤": "\\le ",
    "≥": "\\ge ", "∪": "\\cup ", "∈": "\\in ", "±": "\\pm ", "\\lbrace": "\\{", "\\rbrace": "\\}",
    "\\leqslant": "\\le ", "\\geqslant": "\\ge ", "\\leq": "\\le ", "\\geq": "\\ge ", "\\lt": "<", "\\gt": ">",
    "\\varnothing": "\\emptyset", "\\ne": "\\neq ",
}  # fmt: skip
_SYMBOL = re.compile(
    "|".join(re.escape(key) + ("(?![A-Za-z])" if key[-1].isalpha() and key[0] == "\\" else "") for key in _SYMBOLS)
)
_MARKS_OF_UNIT = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\(?:degree|%)|[°%])")
_UNIT_AFTER = re.compile(
    r"(?<=[0-9}a-z)])\s*\\(?:text|mbox|mathrm|textrm)\s*\{\s*([A-Za-z][A-Za-z ./]*)\}"
    r"(?:\s*\^\s*(?:[23]|\{[23]\}))?\s*\Z"
)
_NO_UNIT = re.compile(r"\b(?:or|and|not|to|more|less|than|at|least|most|if|mod|base)\b", re.I)
_AND = re.compile(r",?\s*(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])\s*")


def normalize_latex(text: str) -> str:
    """One spelling for what looks the same in print, without units: `$\\dfrac12\\text{ cm}$` -> `\\frac{1}{2}`."""
    text = _GROUPING.sub(",", text.strip())
    text = _SPACING.sub(" ", _DELIMITERS.sub("", text))
    text = _SYMBOL.sub(lambda match: _SYMBOLS[match[0]], text)
    text = _MARKS_OF_UNIT.sub("", _FRACTION_COMMAND.sub(r"\\frac", text))
    unit = _UNIT_AFTER.search(text)
    if unit and not _NO_UNIT.search(unit[1]) and not re.search(r"\\begin", text):
        text = text[: unit.start()]
    text = _WORDS.sub(lambda match: match[1] if len(match[1]) < 2 else f" {match[1].strip()} ", text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", _SHORT_FRACTION.sub(r"\\frac{\1\2}{\3\4}", without_chinese_unit(text)))
    return re.sub(r"\s+", " ", text).strip().removesuffix(".").strip()


_BRACED_CHARACTER = re.compile(r"([_^])\{(\w)\}")


def _compact(text: str) -> str:
    """`text` without the spaces that mean nothing."""
    text = _BRACED_CHARACTER.sub(r"\1\2", text)
    return re.sub(r"(?<![0-9]) | (?![0-9])", "", text)


# --- Shape ---

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.S)
_GROUPED_NUMBER = re.compile(r"-?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_MEMBER = re.compile(r"[a-zA-Z]\s*\\in(?![a-z])\s*")


class Shape(NamedTuple):
    """What kind of answer a text is, and its parts: ("(]", ("0", "1")), ("set", ("1", "2")), ("one", ("x",))."""

    kind: str
    parts: tuple[str, ...]


def read_shape(text: str) -> Shape:
    """The shape of a normalized text: "one", "set" (or a list), "union", or its brackets for a point or interval."""
    text = _MEMBER.sub("", text, count=1) if _MEMBER.match(text) else text
    union = _split(text, ("\\cup",))
    if len(union) > 1:
        return Shape("union", union)
    inside = _inside(text)
    if inside is not None:
        brackets, content = inside
        parts = _split(content, (",", ";"))
        if brackets == "{}":
            return Shape("set", parts if content.strip() else ())
        if len(parts) > 1:
            return Shape(brackets, parts)
    if _GROUPED_NUMBER.fullmatch(text) or "\\begin" in text:
        return Shape("one", (text,))
    listed = _split(_AND.sub(", ", text), (",", ";"))
    if len(listed) > 1:
        return Shape("set", listed)
    if text.count("\\pm") == 1 and "\\mp" not in text:
        return Shape("set", (text.replace("\\pm", "+"), text.replace("\\pm", "-")))
    return Shape("one", (text,))


def _split(text: str, separators: tuple[str, ...]) -> tuple[str, ...]:
    """The parts of `text` between separators outside brackets."""
    parts = []
    start = 0
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += (token[0] in ("(", "[", "{", "\\{")) - (token[0] in (")", "]", "}", "\\}"))
        if depth == 0 and token[0] in separators:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    return (*parts, text[start:].strip())


def _inside(text: str) -> tuple[str, str] | None:
    """The brackets around the whole of `text` ("()", "[)", "{}" for a set), and what is in them; None without."""
    opening = "\\{" if text.startswith("\\{") else text[:1]
    closing = "\\}" if text.endswith("\\}") else text[-1:]
    if opening not in ("(", "[", "\\{") or closing not in (")", "]", "\\}") or (opening == "\\{") != (closing == "\\}"):
        return None
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += (token[0] in ("(", "[", "{", "\\{")) - (token[0] in (")", "]", "}", "\\}"))
        if depth == 0 and token.end() < len(text):
            return None
    if depth or len(text) < len(opening) + len(closing):
        return None
    return (opening + closing).replace("\\", ""), text[len(opening) : len(text) - len(closing)]


# --- Comparison: in this process as far as that goes, then with math-verify in the worker ---

Equal = Callable[[str, str], bool]  # of two single texts
_MOST_PARTS = 40


def _compare(stated: str, gold: str, equal: Equal | None) -> bool | None:
    """Whether two normalized texts are the same answer; None where only algebra (`equal`) can say."""
    if _compact(stated) == _compact(gold):
        return True
    one, other = read_shape(stated), read_shape(gold)
    if one.kind != other.kind or len(one.parts) != len(other.parts) or len(one.parts) > _MOST_PARTS:
        return False
    if one.kind == "one":
        return _compare_single(one.parts[0], other.parts[0], equal)
    if one.kind in ("set", "union"):
        return _compare_unordered(one.parts, other.parts, equal)
    verdicts = [_compare(*pair, equal) for pair in zip(one.parts, other.parts, strict=True)]
    if False in verdicts:
        return False
    return None if None in verdicts else True


def _compare_unordered(stated: tuple[str, ...], gold: tuple[str, ...], equal: Equal | None) -> bool | None:
    """Each part of the one has its own equal in the other. Equality is transitive, so the first that fits will do."""
    left = list(gold)
    unknown = False
    for part in stated:
        verdicts = [_compare(part, other, equal) for other in left]
        if True in verdicts:
            left.pop(verdicts.index(True))
        elif None in verdicts:
            unknown = True
        else:
            return False
    return None if unknown else True


_LETTERS = re.compile(r"\\([A-Za-z]+)|([A-Za-z])")
_CONSTANTS = frozenset({"e", "i"})
_GREEK = frozenset(
    ("alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "lambda", "mu", "nu", "xi",
     "rho", "sigma", "tau", "phi", "varphi", "chi", "psi", "omega")
)  # fmt: skip
_ONLY_WORDS = re.compile(r"\(?(?=[^a-z]*[A-Za-z]{3}|[A-Z]\))[A-Za-z][A-Za-z '\-]*\)?|\(?[A-Z]\)?")
_FORMULA = re.compile(r"[\\^_+*/=<>]")
_EQUALS = re.compile(r"(?<![<>!:])=")
_RELATION = re.compile(r"[<>]|\\(?:le|ge|neq|in|subset|equiv)(?![A-Za-z])")
_NAME = re.compile(r"[A-Za-z\\+\-() ,{}_']+")  # x, f(x), k+m+n: what may stand before "= 33" and mean only 33
_IN_BASE = re.compile(r"[0-9]\s*_")


def _compare_single(stated: str, gold: str, equal: Equal | None) -> bool | None:
    """As `_compare`, for two texts that are not lists."""
    stated, gold = without_chinese_unit(stated), without_chinese_unit(gold)  # of each part: 1 公分, 2 公分
    if bool(_EQUALS.search(stated)) != bool(_EQUALS.search(gold)):  # x = 5 is 5, but 2x + 3 = 0 is not 0
        stated, gold = _right_side(stated), _right_side(gold)
        if steps := _calculation(stated):
            return _compare_steps(steps, gold, equal)
    if _compact(stated) == _compact(gold):
        return True
    kind, wanted = _kind(stated), _kind(gold)
    if kind != wanted:
        value = _read_measure(stated) if wanted == "number" else None
        return value is not None and value == _read_number(gold)  # 12 cm
    if kind == "words":
        return _plain_words(stated) == _plain_words(gold)
    if kind == "number":
        if _IN_BASE.search(stated) or _IN_BASE.search(gold):
            return False  # 2516_8 is not 2516
        one, other = _read_number(stated), _read_number(gold)
        if one is not None and other is not None:
            return one == other
    return None if equal is None else equal(stated, gold)


def _right_side(text: str) -> str:
    parts = _EQUALS.split(text)
    return parts[-1].strip() if len(parts) > 1 and _NAME.fullmatch(parts[0].strip()) else text


def _calculation(text: str) -> list[str]:
    """The sides of an equation without variables, such as 3 \\cdot 4 = 12; empty for any other text."""
    sides = [side.strip() for side in _EQUALS.split(text)]
    return sides if len(sides) > 1 and all(side and _kind(side) == "number" for side in sides) else []


def _compare_steps(steps: list[str], gold: str, equal: Equal | None) -> bool | None:
    """Whether every step of a calculation is the gold."""
    verdicts = [_compare_single(step, gold, equal) for step in steps]
    if False in verdicts:
        return False
    return None if None in verdicts else True


def _kind(text: str) -> str:
    """ "words", "relation", "equation", "expression" (with a variable) or "number"."""
    if _ONLY_WORDS.fullmatch(text) and not _FORMULA.search(text):
        return "words"
    if _RELATION.search(text):
        return "relation"
    if _EQUALS.search(text):
        return "equation"
    if "\\begin" in text:
        return "matrix"
    for command, letter in _LETTERS.findall(text):
        if command in _GREEK or (letter and letter not in _CONSTANTS):
            return "expression"
    return "number"


_COMMAND = re.compile(r"\\[A-Za-z]+")


def _plain_words(text: str) -> str:
    return " ".join(text.strip("() ").lower().split())


def _read_number(text: str) -> Fraction | None:
    """The exact value of a text that is one plain number, else None: 3, -1,080.5, \\frac{1}{2}, 7/2, 3\\frac{1}{2}."""
    if any(command != "\\frac" for command in _COMMAND.findall(text)):
        return None
    text = strip_markup(text).strip(" $").removeprefix("+")
    numbers = find_numbers(text)
    if len(numbers) != 1 or (numbers[0].start, numbers[0].end) != (0, len(text)) or numbers[0].scale != 1:
        return None
    return numbers[0].value


def _read_measure(text: str) -> Fraction | None:
    """The number of a text that is one with a unit in plain words: "12 cm", "12 apples"; else None."""
    if _COMMAND.search(text.replace("\\frac", "")):
        return None
    text = strip_markup(text).strip()
    numbers = find_numbers(text)
    if len(numbers) != 1 or numbers[0].start != 0 or numbers[0].scale != 1:
        return None
    return numbers[0].value if only_a_unit(text[numbers[0].end :]) else None


# --- The worker, seen from this process ---


@dataclass
class _Worker:
    """One process that compares with math-verify. It starts when first needed, and again after it was killed."""

    killed: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)
    process: subprocess.Popen | None = None
    pipe: Any = None  # our end
    ready: bool = False

    def ask(self, stated: str, gold: str) -> bool:
        """The worker's verdict on two normalized texts; False, and counted, if it was killed over them."""
        with self.lock:
            for _ in range(2):  # once more if somebody else ended the worker
                try:
                    process = self._start()
                    self.pipe.send((stated, gold))
                    if self.pipe.poll(WALL_SECONDS):
                        return self.pipe.recv() is True
                    out_of_time = True
                except (EOFError, OSError):  # it has ended
                    out_of_time = process.wait() == -signal.SIGPROF
                except BaseException:  # Ctrl-C: the answer that is still to come must not be taken for the next one's
                    self.close()
                    raise
                self.close()
                if out_of_time:
                    break
            self.killed += 1
            self._launch()  # imports SymPy while the caller goes on
            return False

    def close(self) -> None:
        """End the process, if there is one, and wait until it is gone."""
        with self.lock:
            process = self.process
            self.process = None
            self.ready = False
            if process is not None:
                process.kill()
                process.wait()
                self.pipe.close()

    def _launch(self) -> subprocess.Popen:
        self.pipe, theirs = multiprocessing.Pipe()
        code = f"from grpo_lib.answers.competition import latex; latex.work({theirs.fileno()})"
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # ANTLR prints to standard output
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a notebook is not for the worker
        )
        theirs.close()  # so that the end of the worker closes the pipe
        self.ready = False
        return self.process

    def _start(self) -> subprocess.Popen:
        """Launch the worker unless it runs, and wait until it is ready."""
        process = self.process
        if process is None or process.poll() is not None:
            self.close()
            process = self._launch()
        if not self.ready:
            greeting = "it did not start"
            with contextlib.suppress(EOFError, OSError):
                greeting = self.pipe.recv() if self.pipe.poll(START_SECONDS) else greeting
            if greeting != "ready":
                self.close()
                raise CourseError(f"LaTeX answers are compared by math-verify, and {greeting}: run make setup")
            self.ready = True
        return process


_worker = _Worker()


def _forget() -> None:
    """In a forked process: leave the parent's worker, and its lock, to the parent."""
    global _worker
    _worker = _Worker()


os.register_at_fork(after_in_child=_forget)
atexit.register(close)


# --- The worker itself ---


def work(descriptor: int) -> None:
    """Answer pairs (stated, gold) with True or False, until the pipe closes."""
    pipe = Connection(descriptor)
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        from math_verify import verify
    except ImportError as error:
        pipe.send(f"it cannot be imported ({error})")
        return
    verify("1", "1", timeout_seconds=None)
    _algebra("\\sqrt{4}", "x + 1")  # compiles its patterns, builds its parser
    pipe.send("ready")
    while True:
        try:
            stated, gold = pipe.recv()
        except EOFError:  # the parent has ended, or closed it
            return
        # SIGPROF's default action ends the process, in the middle of a long operation in C too.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            same = _compare(stated, gold, _algebra) is True
        except Exception:  # SymPy raises many kinds
            same = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send(same)


_DECIMAL = re.compile(r"(?<![0-9.^_{])([0-9]*)\.([0-9]*)(?:\\overline\s*\{([0-9]+)\}|(?<=[0-9]))(?![0-9.])")


_IMAGINARY = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")


def _algebra(stated: str, gold: str) -> bool:
    """math-verify's verdict on two single texts; runs in the worker only."""
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Set, Tuple
    from sympy.core.relational import Relational

    def read(text: str) -> Any:
        if "$" in text:
            return None
        config = [LatexExtractionConfig(boxed_match_priority=-1)]
        found = parse(f"${_DECIMAL.sub(_exact, text)}$", config, fallback_mode="no_fallback", parsing_timeout=None)  # pyright: ignore
        return found[0] if len(found) == 1 else None

    one, other = read(gold), read(stated)
    if one is None or other is None:
        return False
    if _IMAGINARY.search(stated + " " + gold):  # math-verify makes a variable of it
        one, other = _complex(one), _complex(other)
    if any(isinstance(one, kind) != isinstance(other, kind) for kind in (Set, Tuple, Relational)):
        return False
    return verify(one, other, timeout_seconds=None) and _confirmed(one, other)


DIGITS = 3000  # to which a difference is worked out; LONGEST_LATEX characters can hold a smaller one only with effort


def _confirmed(one: Any, other: Any) -> bool:
    """Whether two SymPy objects that math-verify takes for equal are equal in their smallest factors, too.

    Its last look at two numbers rounds their difference: what is below 1e-15 counts as 0 there, however small the
    numbers are (math-verify 0.9.0, `sympy_numeric_eq`), so that 1/2^99 is 1/2^98.  Here the difference itself is worked
    out, of matrices, tuples, sets and relations part by part, and of two expressions at a point.
    """
    from sympy import Basic, Expr, FiniteSet, MatrixBase, Tuple
    from sympy.core.relational import Relational

    if one == other:
        return True
    if isinstance(one, MatrixBase) and isinstance(other, MatrixBase):
        one, other = Tuple(*one), Tuple(*other)
    if not isinstance(one, Basic) or not isinstance(other, Basic):
        return True  # texts
    if isinstance(one, Expr) and isinstance(other, Expr):
        return _is_zero(_at_a_point(one) - _at_a_point(other))
    if isinstance(one, FiniteSet):
        return all(any(_confirmed(part, another) for another in other.args) for part in one.args)
    if isinstance(one, Relational):
        one, other = _solved_for_its_left(one), _solved_for_its_left(other)
        return one.args[0] != other.args[0] or _confirmed(one.args[1], other.args[1])
    return len(one.args) != len(other.args) or all(map(_confirmed, one.args, other.args))


def _solved_for_its_left(relation: Any) -> Any:
    """`relation` with a lone variable on the left: 2 < x as x > 2."""
    return relation.reversed if relation.rhs.is_Symbol and not relation.lhs.is_Symbol else relation


def _at_a_point(expression: Any) -> Any:
    """The value of an expression where its variables are numbers that no formula singles out."""
    from sympy import Rational, prime

    names = {variable.name for variable in expression.free_symbols}
    values = {name: Rational(prime(50 + n), 101) for n, name in enumerate(sorted(names))}
    return expression.subs({variable: values[variable.name] for variable in expression.free_symbols})


def _is_zero(number: Any) -> bool:
    """Whether a SymPy number is 0: exactly of a rational one, else to `DIGITS` digits of its largest term."""
    from sympy import PrecisionExhausted, simplify

    number = number.doit()
    if number.is_Rational:
        return number == 0
    try:
        return number.evalf(2, maxn=DIGITS, strict=True) == 0
    except PrecisionExhausted:  # no digit of it is other than 0
        return True
    except Exception:  # what SymPy cannot evaluate, it may yet simplify
        return simplify(number) == 0


def _complex(expression: Any) -> Any:
    """A SymPy expression with i for its variable "i", and the others not assumed to be real."""
    from sympy import I, Symbol

    variables = expression.free_symbols
    return expression.subs({variable: I if variable.name == "i" else Symbol(variable.name) for variable in variables})


def _exact(match: re.Match[str]) -> str:
    """A decimal as a fraction: math-verify takes 1.414214 for the square root of 2, but not 1414214/1000000."""
    whole, digits, period = match[1], match[2], match[3] or ""
    numerator = int(whole + digits + period or "0") - (int(whole + digits or "0") if period else 0)
    denominator = 10 ** len(digits) * ((10 ** len(period) - 1) if period else 1)
    return f"\\frac{{{numerator}}}{{{denominator}}}"
