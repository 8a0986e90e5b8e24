"""Rewards from a file: what they pay, and one line for whatever they do wrong."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lib import reward_files, rewards
from grpo_lib.common.errors import CourseError

PUBLISHED = "recipes/published/qwen3_tunix_reward.py:answer_and_form"
WHOLE = "<reasoning>\n9 * 2\n</reasoning>\n<answer>\\boxed{18}</answer>"
ASKED = {"prompts": ["Q?"] * 3, "completions": ["a", "bb", ""], "answer": ["1"] * 3, "kind": ["tagged"] * 3}


@pytest.fixture
def write(tmp_path):
    """Writes a file with this code, and returns its entry in a recipe's `rewards`."""

    def write_file(code, name="points"):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.py"
        path.write_text(code, encoding="utf-8")
        return f"{path}:{name}"

    return write_file


@pytest.mark.parametrize(
    ("completion", "paid"),
    [
        (WHOLE, 1.0),
        (WHOLE.replace("18", " 1,8 "), 1.0),
        (WHOLE.replace("18", "17"), 0.1),
        (WHOLE.replace("18", "18.0"), 0.1),
        (WHOLE.replace("\\boxed{18}", "18"), 0.1),
        (WHOLE.replace("18", "\\frac{1}{2}"), 0.1),
        (WHOLE.replace("</reasoning>", ""), 0.5),
        (WHOLE + WHOLE, 0.5),
        ("<answer></answer>" + WHOLE, 0.5),
        ("so it is \\boxed{17} or \\boxed{18}", 0.5),
        ("so it is \\boxed{18} or \\boxed{17}", 0.0),
        ("so it is \\boxed{18", 0.0),
        ("so it is 18", 0.0),
        ("", 0.0),
    ],
)
def test_the_published_reward_has_four_values(completion, paid):
    (function,) = rewards.get_rewards([PUBLISHED])
    assert function(prompts=[""], completions=[completion], answer=["18"], kind=["tagged"], task=["a"]) == [paid]
    part = rewards.explain(completion, "18", [function])[0]
    assert (part.name, part.points) == ("answer_and_form", paid)
    assert ("in the form" in part.why) == (paid in (1.0, 0.1))


def test_a_function_gets_what_those_of_the_library_get(write):
    entry = write(
        "import numpy as np\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Length:\n    text: str\n"
        "def points(prompts, completions, answer, **kwargs):\n"
        "    assert prompts == ['Q?'] * 3 and kwargs['kind'] == ['tagged'] * 3\n"
        "    return np.array([len(Length(text).text) for text in completions], np.float32)\n"
    )
    functions = rewards.get_rewards(["correct_answer", entry], ["latex"])
    assert functions[1](**ASKED) == [1.0, 2.0, 0.0]
    assert functions[1].__name__ == "points"
    with pytest.raises(CourseError, match=r"points \(line 7\) raises AssertionError"):
        functions[1](**ASKED | {"prompts": ["other"] * 3})


def test_a_decorated_function_scores_one_completion_and_says_why(write):
    entry = write(
        "from grpo_lib.rewards import reward_function\n"
        "@reward_function\n"
        "def points(completion, gold):\n    return float(gold in completion), 'looked for it'\n"
    )
    (function,) = rewards.get_rewards([entry])
    assert function.explain("it is 18", "18") == rewards.Part("points", 1.0, "looked for it")
    with pytest.raises(CourseError, match=r"points scores a number in <answer> tags"):
        rewards.get_rewards([entry], ["latex"])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("nothing.py:points", r"nothing\.py cannot be read .*give a file"),
        ("nothing.py", r"nothing\.py names no function; write FILE\.py:FUNCTION"),
        ("a/b:points", "a/b:points names no function"),
        ("nothing.py:1", "nothing.py:1 names no function"),
        ("recipes/tiny-cpu.py:points", "cannot be read"),
        ("points", r"unknown points; known are .*FILE\.py:FUNCTION"),
    ],
)
def test_an_entry_that_names_no_function(entry, message):
    with pytest.raises(CourseError, match=message):
        rewards.get_rewards([entry])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("points = 3", r"has no function points; write def points\(prompts, completions, answer, \*\*kwargs\)"),
        ("def point(**kwargs): pass", "has no function points"),
        ("\ndef points(prompts, completions): pass", r"\(line 2\) does not take the arguments .*write def points"),
        ("def points(completion, gold): pass", "does not take the arguments"),
        ("\ndef points(:", r"\(line 2\) cannot be run: SyntaxError: invalid syntax; correct"),
        ("import nonesuch_module", r"\(line 1\) cannot be run: ModuleNotFoundError: No module named 'nonesuch_"),
        ("import sys\nsys.exit('bye')", r"\(line 2\) cannot be run: SystemExit: bye"),
        ("raise RuntimeError('one\\ntwo')", "cannot be run: RuntimeError: one; correct"),
    ],
)
def test_a_file_that_has_no_such_function(write, code, message):
    with pytest.raises(CourseError, match=message):
        rewards.get_rewards([write(code)])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", r"\(line 2\) raises ZeroDivisionError: division by zero"),
        ("import json\n    return json.loads('{')", r"\(line 3\) raises JSONDecodeError"),
        ("raise SystemExit(3)", "raises SystemExit: 3"),
        ("return [1.0, 2.0]", r"\(line 1\) returned 2 for 3 completions; return a list of 3 numbers"),
        ("import itertools; return itertools.count()", "returned more for 3 completions"),
        ("return None", "returned None, which is no list"),
        ("return 1.0", r"returned 1\.0, which is no list"),
        ("return 'abc'", "returned a str"),
        ("return {1: 1, 2: 2, 3: 3}", "returned a dict"),
        ("return [1.0, '2', 3.0]", "returned '2' for completion 2 of 3, which is no finite number"),
        ("return [1.0, None, 3.0]", "returned None for completion 2 of 3"),
        ("return [1.0, float('nan'), 3.0]", "returned nan for completion 2 of 3, which is no finite number"),
        ("return [1.0, 2.0, [3.0]]", "returned a value of type list for completion 3"),
        ("import numpy; return numpy.ones((3, 1))", r"a value of type ndarray and shape \(1,\) for completion 1"),
        ("return (1 / i for i in (1, 0, 2))", "which is no list .ZeroDivisionError"),
    ],
)
def test_values_that_are_no_rewards(write, body, message):
    entry = write(f"def points(prompts, completions, answer, **kwargs):\n    {body}\n")
    (function,) = rewards.get_rewards([entry])
    with pytest.raises(CourseError, match=message) as caught:
        function(**ASKED)
    assert entry in str(caught.value)


@pytest.mark.parametrize(
    "returned", ["[True, 1, 1.0]", "(1, 1, 1)", "(1 for _ in 'abc')", "np.ones(3, bool)", "list(np.ones(3, np.int8))"]
)
def test_whole_numbers_and_truth_values_are_rewards(write, returned):
    entry = write(f"import numpy as np\ndef points(prompts, completions, answer, **kwargs):\n    return {returned}\n")
    (function,) = rewards.get_rewards([entry])
    assert function(**ASKED) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("start", [b"\xef\xbb\xbf", b"# -*- coding: latin-1 -*-\n# \xe9\r\n"])
def test_the_file_may_have_a_byte_order_mark_or_name_its_encoding(tmp_path, start):
    path = tmp_path / "mine.py"
    path.write_bytes(start + b"def points(prompts, completions, answer, **kwargs):\r\n    return [1, 2, 3]\r\n")
    (function,) = rewards.get_rewards([f"{path}:points"])
    assert function(**ASKED) == [1.0, 2.0, 3.0]
    assert "def points" in reward_files.read_source(path)


def test_two_functions_that_metrics_could_not_tell_apart(write):
    code = "def correct_answer(prompts, completions, answer, **kwargs):\n    return [0] * len(completions)\n"
    with pytest.raises(CourseError, match=r"another function is called correct_answer, too; give it a name of its own"):
        rewards.get_rewards(["correct_answer", write(code, "correct_answer")])


WILD = """
class Wild(Exception):
    def __str__(self): raise ValueError("no text")
class Number:
    def __float__(self): raise Wild
class Function:
    def __call__(self, **columns): raise Wild("a\\nb")
    def __getattr__(self, name): raise Wild
def points(prompts, completions, answer, **kwargs):
    return {value}
{more}
"""
VALUES = st.recursive(
    st.sampled_from(["1", "None", "'a'", "b''", "1e999", "10**400", "1j", "...", "Number()", "Wild()", "[]", "1 / 0"]),
    lambda inner: st.lists(inner, max_size=4).map(lambda items: f"[{', '.join(items)}]"),
)
MORE = [
    "",
    "raise Wild",
    "points = Function()",
    "points = Number",
    "points = print",
    "points.explain = 3",
    "\0",
    "del points",
]


@settings(max_examples=80, deadline=None)
@given(st.one_of(st.text(max_size=30), st.builds(lambda value, more: (value, more), VALUES, st.sampled_from(MORE))))
def test_whatever_a_file_does_is_values_or_one_line(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("wild") / "wild.py"
    if isinstance(content, tuple):
        content = WILD.replace("{value}", content[0]).replace("{more}", content[1])
    path.write_text(content, encoding="utf-8", errors="replace")
    try:
        (function,) = rewards.get_rewards([f"{path}:points"])
        values = function(**ASKED)
    except CourseError as error:
        assert len(str(error).splitlines()) == 1
        assert str(error).startswith("rewards: ")
        assert len(str(error)) < 800
    else:
        assert len(values) == 3
        assert np.isfinite(values).all()


def test_the_digest_is_that_of_the_content(write, tmp_path):
    entry = write("a = 1")
    before = reward_files.digests(["correct_answer", entry])
    assert list(before) == [entry]
    (tmp_path / "0.py").write_text("a = 2", encoding="utf-8")
    assert reward_files.digests([entry]) != before
    assert reward_files.digests(["correct_answer"]) == {}
