"""Every file that a user can hand in, damaged: the command works, or ends with one line that names the file, exit 2."""

import contextlib
import copy
import io
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from grpo_lib.common.environment import repo_root
from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import write_jsonl_atomic
from grpo_lib.evaluation import EvalRun, evaluate, summarize
from grpo_lib.problems import describe_filtering, load_problems
from grpo_lib.prompts import template_completion
from grpo_train import cli
from grpo_train.recipes import load_recipe
from grpo_train.recipes.schema import ProblemsRecipe

ROOT = repo_root()
TINY = ROOT / "recipes" / "tiny-cpu.yaml"
RANDOM = st.randoms(use_true_random=False)

# ----- Damage -----

DEEP = 100_000
# JSON that `json.dumps` does not write, in place of a text with its name.
RAW = {
    "@deep list": "[" * DEEP + "]" * DEEP,
    "@deep object": '{"a":' * DEEP + "1" + "}" * DEEP,
    "@open": "[" * DEEP,
    "@many digits": "9" * 5000,
    "@too large": "1e400",
    "@NaN": "NaN",
    "@infinite": "-Infinity",
}
NUMBERS = [0, -1, 1, 2.5, 1e308, -1e308, 10**30]
TEXTS = ["", "x", "5", "é", "日本", "\ud800", "a\x00b", "\x1b[2J", "x" * 10_000]
NESTED = [[], {}, [[]], [1], ["x"], {"a": 1}, {"": None}, [None]]
WRONG = [None, True, False, *NUMBERS, *TEXTS, *NESTED, *RAW]
# What may stand at any place of a file, or be all of it.
PIECES = [b"\x00", b"\xff", b"\xe9", b"\\ud800", b"\n", b"\r\n", *(character.encode() for character in "[{\"\\,:'#-")]
OTHERS = [b"", b"\n", b"null", b"[" * DEEP, b'{"a":' * DEEP, b"x" * 300_000]


def damaged_bytes(content: bytes, chance: random.Random) -> bytes:
    """The content cut, flipped, in another encoding, or something else."""
    place = chance.randrange(len(content) + 1)
    head, tail = content[:place], content[place:]
    longer = [head + chance.choice(PIECES) + tail, content + content, content + "é".encode("latin-1")]
    encoded = [
        b"\xef\xbb\xbf" + content,
        content.replace(b"\n", b"\r\n"),
        content.decode("utf-8", errors="replace").encode("utf-16"),
    ]
    return chance.choice([head, tail, flipped(content, chance), *longer, *encoded, *OTHERS, chance.randbytes(200)])


def flipped(content: bytes, chance: random.Random) -> bytes:
    """The content with another bit in up to four places."""
    changed = bytearray(content)
    for _ in range(chance.randint(1, 4) if content else 0):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """The path of every value inside of one."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def damaged_value(value: Any, chance: random.Random) -> Any:
    """The value with another one in one of its places, or without a key."""
    value = copy.deepcopy(value)
    *above, last = chance.choice([path for path in places(value) if path] or [()]) or (None,)
    if last is None:
        return chance.choice(WRONG)
    holder = value
    for key in above:
        holder = holder[key]
    if chance.random() < 0.15:
        del holder[last]
    elif isinstance(holder, dict) and chance.random() < 0.1:
        holder[chance.choice(["\ud800", "", "a.b", "日本", "x" * 1000])] = holder.pop(last)
    else:
        holder[last] = chance.choice(WRONG)
    return value


def as_json(value: Any) -> bytes:
    text = json.dumps(value)
    for name, raw in RAW.items():
        text = text.replace(json.dumps(name), raw)
    return text.encode()


def damaged_json(content: bytes, chance: random.Random) -> bytes:
    return as_json(damaged_value(json.loads(content), chance))


def damaged_jsonl(content: bytes, chance: random.Random) -> bytes:
    rows = [json.loads(line) for line in content.splitlines()]
    number = chance.choice([0, len(rows) - 1, chance.randrange(len(rows))])
    lines = [as_json(row) for row in rows]
    lines[number] = as_json(chance.choice([damaged_value(rows[number], chance), chance.choice(WRONG)]))
    if chance.random() < 0.1:
        lines.insert(number, lines[number])
    return b"\n".join(lines) + chance.choice([b"\n", b""])


def no_form(content: bytes, chance: random.Random) -> bytes:
    return damaged_bytes(content, chance)


# ----- Files and the commands that read them -----


@dataclass(frozen=True)
class Target:
    """A file in a workspace, how its values are damaged, and what is done with it."""

    file: str
    use: Callable[[Path], None]
    form: Callable[[bytes, random.Random], bytes] = no_form
    names: tuple[str, ...] = ()  # what an error may name in place of the file


class Refused(Exception):
    """A command ended with exit code 2."""


def grpo(*arguments: Any) -> str:
    """The output of a command in this process, as a terminal would get it.  Raises Refused with what it has said."""
    out, err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
    command = mock.patch.object(sys, "argv", ["grpo", *map(str, arguments)])
    with command, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        cli.main()
    said = err.getvalue()
    assert "Traceback" not in said, said[-3000:]
    assert end.value.code in (0, None, 2), said
    if end.value.code == 2:
        assert said.startswith("error: "), said
        raise Refused(said.removeprefix("error: ").removesuffix("\n"))
    out.flush()
    return out.buffer.getvalue().decode()


def config(*overrides: str) -> Callable[[Path], None]:
    """`grpo config`, with {} for the workspace."""

    def use(folder: Path) -> None:
        grpo("config", TINY, *(override.format(folder) for override in overrides))

    return use


def use_recipe(folder: Path) -> None:
    grpo("config", f"{folder}/recipe.yaml@small")


def use_problems(**fields: Any) -> Callable[[Path], None]:
    """The problems of every split.  What is accepted can be written to a file."""

    def use(folder: Path) -> None:
        problems = ProblemsRecipe(**(fields | {"path": str(folder / fields["path"])}))
        try:
            found = [problem for split in ("train", "validation", "test") for problem in load_problems(problems, split)]
            described = describe_filtering(problems)
        except CourseError as error:
            raise Refused(str(error)) from None
        json.dumps([vars(problem) for problem in found], ensure_ascii=False).encode()
        str(described).encode()

    return use


def use_completions(folder: Path) -> None:
    output = folder / "output.jsonl"
    grpo("evaluate", TINY, "problems.test=6", "--completions", folder / "completions.jsonl", "--output", output)
    EvalRun.load(output)


def use_run(folder: Path) -> None:
    tables = ["--tables"] if (folder / "run" / "evals").exists() else []
    grpo("report", folder / "run", *tables)
    (folder / "run" / "report.html").read_text(encoding="utf-8")


def use_two_runs(folder: Path) -> None:
    grpo("compare", folder / "run", folder / "other")


def use_unevaluated_run(folder: Path) -> None:
    shutil.rmtree(folder / "run" / "evals")
    use_run(folder)


MODEL = "model.path={}/model"
OWN = {"source": "file", "columns": {"question": "q", "answer": "a"}}
TARGETS = {
    "recipe": Target("recipe.yaml", use_recipe, damaged_json, ("rewards", "model.", "prompts.")),
    "system prompt": Target("system.txt", config("prompts.system={}/system.txt"), names=("prompts.system",)),
    "user prompt": Target("user.md", config("prompts.user={}/user.md"), names=("prompts.user",)),
    "reward": Target("reward.py", config("rewards=[{}/reward.py:points]")),
    "chat template": Target("model/chat_template.jinja", config(MODEL), names=("/model", "prompts.system")),
    "config.json": Target("model/config.json", config(MODEL), damaged_json, names=("/model", "model.sizes")),
    "tokenizer_config.json": Target("model/tokenizer_config.json", config(MODEL), damaged_json, names=("/model",)),
    "tokenizer.json": Target("model/tokenizer.json", config(MODEL), damaged_json, names=("/model",)),
    "generation_config.json": Target("model/generation_config.json", config(MODEL), damaged_json, ("/model",)),
    "gsm8k train": Target("gsm8k/train.jsonl", use_problems(source="gsm8k", path="gsm8k"), damaged_jsonl),
    "gsm8k test": Target("gsm8k/test.jsonl", use_problems(source="gsm8k", path="gsm8k"), damaged_jsonl),
    "own jsonl": Target("own.jsonl", use_problems(**OWN, path="own.jsonl"), damaged_jsonl),
    "own csv": Target("own.csv", use_problems(**OWN, path="own.csv")),
    "own parquet": Target("own.parquet", use_problems(**OWN, path="own.parquet")),
    "completions": Target("completions.jsonl", use_completions, damaged_jsonl),
    "before.jsonl": Target("run/evals/before.jsonl", use_run, damaged_jsonl),
    "after.jsonl": Target("run/evals/after.jsonl", use_two_runs, damaged_jsonl),
    "summary.json": Target("run/summary.json", use_unevaluated_run, damaged_json),
    "metrics.jsonl, reported": Target("run/metrics.jsonl", use_run, damaged_jsonl),
    "metrics.jsonl, compared": Target("run/metrics.jsonl", use_two_runs, damaged_jsonl),
    "changes.jsonl": Target("run/changes.jsonl", use_two_runs, damaged_jsonl),
    "environment.json": Target("run/environment.json", use_unevaluated_run, damaged_json),
    "a run's recipe": Target("run/recipe.yaml", use_two_runs, damaged_json),
}
# A page with figures takes most of a second, and other commands up to a fifth.
PAGES = ("before.jsonl", "summary.json", "metrics.jsonl, reported", "environment.json")
IN_NO_TIME = ("gsm8k train", "gsm8k test", "own jsonl", "own csv", "own parquet", "completions")
COMMANDS = tuple(name for name in TARGETS if name not in (*PAGES, *IN_NO_TIME))


def write_run(folder: Path) -> None:
    problems = load_problems(ProblemsRecipe(source="words"), "test", 6)
    texts = {problem.question: template_completion("r", problem.answer) for problem in problems[:4]}
    before, after = (
        evaluate(lambda prompts, part=part: [part.get(prompt, "no") for prompt in prompts], problems, progress=False)
        for part in ({}, texts)
    )
    before.save(folder / "evals" / "before.jsonl")
    after.save(folder / "evals" / "after.jsonl")
    recipe = load_recipe(TINY).model_dump(mode="json")
    (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    summary = summarize(before, after, wall_seconds=3.0, train_seconds=2.0, steps=4)
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    rows = [{"step": step, "reward": step / 4, "kl": 0.0, "seconds": 0.5} for step in range(1, 5)]
    write_jsonl_atomic(folder / "metrics.jsonl", rows)
    change = {"step": 2, "changes": {"training.learning_rate": {"before": 1e-4, "after": 1e-5}}, "time": "2026-01-01"}
    write_jsonl_atomic(folder / "changes.jsonl", [change])
    shutil.copy(ROOT / "assets" / "reference" / "course" / "environment.json", folder)


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A workspace with a good one of every file."""
    import pyarrow.csv
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("good")
    data = load_recipe(TINY).model_dump(mode="json") | {"profiles": {"small": {"training": {"steps": 3}}}}
    (folder / "recipe.yaml").write_text(json.dumps(data), encoding="utf-8")
    (folder / "system.txt").write_text("You solve word problems. 日本\nThink.\n", encoding="utf-8")
    (folder / "user.md").write_text("Solve: {question}\nAnswer in <answer> tags.\n", encoding="utf-8")
    reward = "def points(prompts, completions, answer, **kwargs):\n    return [1.0 for text in completions]\n"
    (folder / "reward.py").write_text(reward, encoding="utf-8")
    shutil.copytree(ROOT / "assets" / "tiny-base", folder / "model")
    ends = {"eos_token_id": [1], "temperature": 0.6}
    (folder / "model" / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
    rows = [{"q": f"What is {n} plus 2? é", "a": str(n + 2)} for n in range(40)]
    worked = [{"question": row["q"], "answer": f"It is <<{row['a']}=1>>.\n#### {row['a']}"} for row in rows]
    write_jsonl_atomic(folder / "gsm8k" / "train.jsonl", worked[:30])
    write_jsonl_atomic(folder / "gsm8k" / "test.jsonl", worked[30:])
    write_jsonl_atomic(folder / "own.jsonl", rows)
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.csv.write_csv(table, folder / "own.csv")
    pyarrow.parquet.write_table(table, folder / "own.parquet")
    problems = load_problems(ProblemsRecipe(source="words"), "test", 6)
    completions = [{"id": problem.id, "completion": template_completion("r", problem.answer)} for problem in problems]
    write_jsonl_atomic(folder / "completions.jsonl", completions)
    write_run(folder / "run")
    write_run(folder / "other")
    return folder


def refusal(target: Target, folder: Path) -> str | None:
    """What the command said when it refused; None where it has worked."""
    try:
        target.use(folder)
    except Refused as refused:
        return str(refused)
    return None


def require_one_line(target: Target, said: str | None) -> None:
    """A refusal is one line that names the file."""
    if said is None:
        return
    assert len(said.splitlines()) == 1, said
    assert len(said) < 3000, (len(said), said[:300])
    assert said.isprintable(), said
    assert any(name in said for name in (Path(target.file).name, *target.names)), said


def check(good: Path, folder: Path, target: Target, damage: Callable[[Path], None]) -> None:
    """What the command makes of a copy of the workspace with this damage."""
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(good, work, copy_function=link)
    file = work / target.file
    damage(file)
    require_one_line(target, refusal(target, work))


def link(source: str, target: str) -> None:
    """In place of a copy.  A file is removed before it is damaged."""
    Path(target).hardlink_to(source)


def with_content(content: bytes) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        file.unlink()
        file.write_bytes(content)

    return damage


# One order of examples for everybody: what fails on one machine fails on all.
FEW = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("scratch")


def with_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def broken(good: Path, folder: Path, name: str, chance: random.Random) -> None:
    target = TARGETS[name]
    content = (good / target.file).read_bytes()
    damage = target.form if chance.random() < 0.6 else damaged_bytes
    damaged = damage(content, chance)
    note(f"{name}: {damaged[:2000]!r}")
    check(good, folder, target, with_content(damaged))


@pytest.mark.parametrize("name", [*IN_NO_TIME, *COMMANDS])
def test_a_good_file_is_taken_and_a_folder_or_nothing_in_its_place_is_one_line(good, tmp_path, name):
    target = TARGETS[name]
    work = tmp_path / "good"
    shutil.copytree(good, work)
    assert refusal(target, work) is None
    check(good, tmp_path, target, with_a_folder)
    check(good, tmp_path, target, Path.unlink)


@settings(FEW, max_examples=40)
@given(name=st.sampled_from(IN_NO_TIME), chance=RANDOM)
def test_damaged_problems_and_completions_are_one_line(good, scratch, name, chance):
    broken(good, scratch, name, chance)


@settings(FEW, max_examples=10)
@given(name=st.sampled_from(COMMANDS), chance=RANDOM)
def test_damaged_files_of_a_recipe_and_a_run_are_one_line(good, scratch, name, chance):
    broken(good, scratch, name, chance)


@pytest.mark.slow
@settings(FEW, max_examples=10)
@given(name=st.sampled_from(PAGES), chance=RANDOM)
def test_damaged_files_of_a_report_are_one_line(good, scratch, name, chance):
    broken(good, scratch, name, chance)


@pytest.mark.nightly(minutes=3)
@settings(FEW, max_examples=600)
@given(name=st.sampled_from(tuple(TARGETS)), chance=RANDOM)
def test_damaged_files_at_length(good, scratch, name, chance):
    broken(good, scratch, name, chance)


MODEL_SECTION = {"path": "assets/tiny-base", "maxtext_name": "qwen3-0.6b"}
HALF_A_CHARACTER = {"name": "a", "model": MODEL_SECTION, "prompts": {"system": "\ud800"}, "profiles": {"small": {}}}
# What has ended in a traceback, or in more than a line, and how it is damaged: (target, content).
FOUND = {
    "half a character in a recipe": ("recipe", as_json(HALF_A_CHARACTER)),
    "too many digits": ("completions", b'{"id": "words-test-0-0", "completion": ' + b"9" * 5000 + b"}\n"),
    "too many digits at the end": ("after.jsonl", b'{"id": ' + b"9" * 5000 + b"}"),
    "a longest text that is none": ("tokenizer_config.json", b'{"eos_token": "<|im_end|>", "model_max_length": "x"}'),
    "no such end token": ("generation_config.json", b'{"eos_token_id": 1000000000000000000000000000000}'),
    "a metric of 400 digits": ("metrics.jsonl, compared", b'{"step": 1, "reward": ' + b"9" * 400 + b"}\n"),
    "a code that a terminal obeys": ("chat template", b'{{ raise_exception("\x1b[2J") }}'),
}


@pytest.mark.parametrize(("name", "content"), FOUND.values(), ids=FOUND)
def test_what_was_found(good, tmp_path, name, content):
    check(good, tmp_path, TARGETS[name], with_content(content))


def test_a_device_without_an_end_is_no_file_of_completions():
    with pytest.raises(Refused, match="/dev/zero is a device"):
        grpo("evaluate", TINY, "problems.test=6", "--completions", "/dev/zero")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"records": 3, "seconds": 1.0}, "line 2 is no batch"),
        ({"records": [{"id": 3}], "seconds": 1.0}, "line 2: record 1 lacks sample"),
        ({"records": [7], "seconds": 1.0}, "line 2: record 1 is no object"),
    ],
)
def test_an_interrupted_evaluation_that_is_damaged_is_one_line(good, tmp_path, line, said):
    output = tmp_path / "output.jsonl"
    use = ("evaluate", TINY, "problems.test=6", "--completions", good / "completions.jsonl", "--output", output)
    with mock.patch("grpo_lib.eval_cache.EvalCache.finish"):  # killed after the last batch
        grpo(*use)
    partial = Path(f"{output}.partial")
    first = partial.read_text().splitlines()[0]
    partial.write_text(f"{first}\n{json.dumps(line)}\n")
    with pytest.raises(Refused, match=rf"output\.jsonl\.partial: {said}"):
        grpo(*use)


def with_a_broken_text(path: Path, row: int, rows: list[dict[str, str]], column: str) -> None:
    """Parquet whose text in one row is not UTF-8; Arrow takes any bytes."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(rows)
    texts = [each[column].encode() for each in rows]
    texts[row] += b"\xed\xa0\x80"  # U+D800
    stored = pyarrow.array(texts, pyarrow.binary())
    column_of_texts = pyarrow.StringArray.from_buffers(len(stored), *stored.buffers()[1:])
    place = table.column_names.index(column)
    pyarrow.parquet.write_table(table.set_column(place, column, column_of_texts), path)


@pytest.mark.parametrize("source", ["file", "aime"])
@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_half_a_character_names_the_row(tmp_path, capfd, source, form):
    rows = [{"problem": f"What is {n} plus 2?", "answer": str(n + 2), "id": str(n)} for n in range(20)]
    file = tmp_path / f"own.{form}"
    if form == "parquet":
        with_a_broken_text(file, 7, rows, "problem")
    else:
        rows[7]["problem"] += "\ud800"
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    columns = {"columns": {"question": "problem", "answer": "answer"}} if source == "file" else {}
    with pytest.raises(CourseError, match=rf"own\.{form}, (row 7|line 8)\b"):
        load_problems(ProblemsRecipe(source=source, path=str(file), **columns), "test")
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_what_a_terminal_cannot_show_is_escaped_and_reads_as_the_same_recipe(tmp_path, encoding):
    command = [sys.executable, "-m", "grpo_train.cli", "config", str(TINY), "prompts.system=日本"]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    (tmp_path / "shown.yaml").write_bytes(done.stdout)
    assert load_recipe(tmp_path / "shown.yaml").prompts.system == "日本"
    assert ("日本".encode() in done.stdout) == (encoding == "utf-8")
