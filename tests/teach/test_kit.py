"""The teaching kit holds together: objectives, questions, notes and plans, in both languages."""

import json
import re
from itertools import pairwise, product
from pathlib import Path

import pytest
import reading_minutes
import translations
import yaml
from scipy.stats import binom

import slides
from grpo_lib.common import environment
from grpo_lib.statistics import mcnemar
from grpo_teach import grading

KIT = environment.repo_root() / "teaching"
CELL = re.compile(r"`(\d\d[ab]?)#([\w-]+)`")  # as in `03#estimator`
MINUTES = re.compile(r"^\| *(\d+)–(\d+) *\|", re.MULTILINE)  # the first column of a plan


def number_of(stem: str) -> str:
    """03 of 03_policy_update."""
    return stem.partition("_")[0]


def cells_of_notebooks() -> dict[str, set[str]]:
    """The ids of the cells, by a notebook's stem and by its number."""
    cells = {}
    for path in (KIT.parent / "notebooks").rglob("*.ipynb"):
        if not {"zh_TW", ".ipynb_checkpoints"}.intersection(path.parts):
            ids = {cell["id"] for cell in json.loads(path.read_text("utf-8"))["cells"]}
            cells[path.stem] = ids
            cells[number_of(path.stem)] = ids
    return cells


def read(name: str) -> list[dict]:
    return yaml.safe_load((KIT / name).read_text("utf-8"))


CELLS = cells_of_notebooks()
OBJECTIVES = read("objectives.yaml")
QUESTIONS = read("questions.yaml")
BANKS = {"English": QUESTIONS, "Chinese": read("zh_TW/questions.yaml")}
ASSESSED_BY = {"exercises": set(grading.teachers_exercises()), "questions": {question["id"] for question in QUESTIONS}}
TEXTS = sorted(KIT.rglob("*.md"))


# --- objectives and questions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ASSESSED_BY)
def test_every_objective_is_assessed_and_all_that_assesses_has_an_objective(kind) -> None:
    named = set()
    for objective in OBJECTIVES:
        assert objective[kind], objective["id"]
        assert set(objective[kind]) <= ASSESSED_BY[kind], objective["id"]
        named |= set(objective[kind])
    assert ASSESSED_BY[kind] - named == set()


def test_both_banks_have_the_same_questions() -> None:
    assert [question["id"] for question in BANKS["Chinese"]] == [question["id"] for question in QUESTIONS]


def problems_of(question: dict, english: dict) -> list[str]:
    """What is wrong with a question, of which `english` is the original."""
    problems = []
    if question["cell"] not in CELLS.get(question["notebook"], ()):
        problems.append("no such cell")
    if question["answer"] not in range(4):
        problems.append("no such answer")
    if len({option["text"] for option in question["options"]}) != 4:
        problems.append("not four different options")
    if [bool(option["why"]) for option in question["options"]] != [True] * 4:
        problems.append("no reason for each option")
    for key in ("notebook", "cell", "answer"):
        if question[key] != english[key]:
            problems.append(f"another {key} than in English")
    return problems


@pytest.mark.parametrize("language", BANKS)
@pytest.mark.parametrize("number", range(len(QUESTIONS)), ids=[question["id"] for question in QUESTIONS])
def test_a_question_can_be_asked(language, number) -> None:
    assert problems_of(BANKS[language][number], QUESTIONS[number]) == []


@pytest.mark.parametrize(
    ("number", "gained", "lost", "digits"),
    [("q8-4", 6, 0, 3), ("q8-4", 5, 1, 2), ("q5-1", 15, 1, 4)],
    ids=["six flips one way", "five and one", "held out"],
)
def test_a_question_has_the_p_that_mcnemars_test_gives(number, gained, lost, digits) -> None:
    p = p_of(gained, lost)
    for bank in BANKS.values():
        [question] = [one for one in bank if one["id"] == number]
        numbers = re.findall(r"0\.\d+", " ".join(option["why"] for option in question["options"]))
        assert f"{p:.{digits}f}" in numbers


def p_of(gained: int, lost: int) -> float:
    before = [False] * gained + [True] * lost
    return mcnemar(before, [not verdict for verdict in before]).p_value


def test_six_flips_on_average_are_often_fewer() -> None:
    """What q8-4 says: one verdict of thirty in five is six on average, and fewer cannot be significant."""
    flips = binom(30, 1 / 5)
    assert flips.mean() == pytest.approx(6)
    assert p_of(5, 0) > 0.05 > p_of(6, 0)
    assert 0.2 < flips.cdf(5) < 0.5  # often, and so it is seen less often than four times out of five


def longest_is_right(question: dict) -> bool:
    longest = max(question["options"], key=lambda option: len(option["text"]))
    return longest is question["options"][question["answer"]]


@pytest.mark.parametrize("language", BANKS)
def test_the_longest_option_is_right_in_less_than_half_of_the_questions(language) -> None:
    questions = BANKS[language]
    assert sum(longest_is_right(question) for question in questions) < len(questions) / 2


# --- notes, plans and the other texts -------------------------------------------------------------------------


def problems_of_cells(text: str) -> list[str]:
    return [f"no cell {book}#{cell}" for book, cell in CELL.findall(text) if cell not in CELLS.get(book, ())]


def problems_of_minutes(text: str) -> list[str]:
    """The rows of a plan follow each other, from 0 to the minutes of its heading, or of a section with its own."""
    problems, total = [], 1000
    for section in re.split(r"\n#+ ", text):
        minutes = re.search(r"(\d+) *(?:minutes|分鐘)", section.partition("\n")[0])
        total = int(minutes[1]) if minutes else total
        rows = [("0", "0"), *MINUTES.findall(section), ("0", "0")]
        for (_, last), (first, _) in pairwise(rows):
            if int(first) != int(last) % total:
                problems.append(f"{first} after {last}, of {total} minutes")
    return problems


def problems_of_twins(english: str, chinese: str) -> list[str]:
    """Cells and minutes that only one of the two names, and numbers, code and formulas that are English only."""
    english, chinese = (re.sub("(?s)```.*?```", "", text) for text in (english, chinese))
    named, named_in_chinese = ({*CELL.findall(text), *MINUTES.findall(text)} for text in (english, chinese))
    problems = [f"{pair} is in one language only" for pair in named ^ named_in_chinese]
    compared, *_ = translations.differences(english, chinese)
    for what, (only_english, _) in compared.items():
        if what == "link":  # their paths differ
            continue
        if what == "number":  # a 2 may be a word in Chinese
            only_english = [number for number in only_english if len(number) > 1]
        problems += [f"no {what} {one!r} in Chinese" for one in only_english]
    return problems


@pytest.mark.parametrize("path", TEXTS, ids=[str(path.relative_to(KIT)) for path in TEXTS])
def test_a_text_names_cells_that_exist_and_has_a_twin(path: Path) -> None:
    text = path.read_text("utf-8")
    assert problems_of_cells(text) == []
    assert problems_of_minutes(text) == []
    place = path.relative_to(KIT)
    if place.parts[0] != "zh_TW":
        assert problems_of_twins(text, (KIT / "zh_TW" / place).read_text("utf-8")) == []


def test_minutes_by_section() -> None:
    """The tables of the notes are today's, and what a row of a plan shows is read within its minutes."""
    names = sorted(name for name in CELLS if "_" in name)
    tables = {path: reading_minutes.page(path[1], path[0]) for path in product(reading_minutes.PAGES, names)}
    stale = [path for path, table in tables.items() if table not in (KIT / f"{'/'.join(path)}.md").read_text("utf-8")]
    assert stale == []  # `python dev/tools/reading_minutes.py --write` writes them again
    minutes = {
        (number_of(name), cell): each[0] for name in names for cell, (_, each) in reading_minutes.cells(name).items()
    }
    plans = "\n".join(path.read_text("utf-8") for path in (KIT / "plans").glob("*.md"))
    rows = [(row[0], int(row[2]) - int(row[1])) for row in re.finditer(r"(?m)^\| *(\d+)–(\d+) *\|.*", plans)]
    assert [row for row, most in rows if sum(minutes[cell] for cell in CELL.findall(row)) > most] == []


def test_titles_and_plans_say_the_minutes_that_are_computed() -> None:
    """To five minutes, and one for the seconds of the machine that made the outputs."""
    root, spelt = KIT.parent, (r"about (\d+) min", r"約 (\d+) 分")
    said = {}
    for path in reading_minutes.run_notebooks.NOTEBOOKS:
        name = path.rpartition("/")[2]
        (title, _), *_ = reading_minutes.cells(name).values()
        minutes = [re.search(pattern, text)[1] for pattern, text in zip(spelt, title, strict=True)]
        rows = [
            re.search(rf"(?m)^\| \[.*{name}\.ipynb.*\| (\d+) \| [^|]+\|$", (root / readme).read_text("utf-8"))[1]
            for readme in ("README.md", "README.zh.md")
        ]
        assert len({*minutes, *rows}) == 1, name
        said[number_of(name)] = int(minutes[0])
        assert abs(reading_minutes.total(name)[0] - said[number_of(name)]) <= 3.5, name
    for folder in ("plans", "zh_TW/plans"):
        plan = (KIT / folder / "6-weeks.md").read_text("utf-8")
        read = re.findall(r"(?m)^\| \d \| (\d+) ?[(（]([\da-c, 、]+)[)）]", plan)
        assert read
        assert [row for row in read if sum(said[one] for one in re.findall(r"\w+", row[1])) != int(row[0])] == []


@pytest.mark.parametrize("folder", ["slides", "zh_TW/slides"])
def test_each_deck_gets_the_figures_that_it_says_to_show(folder: str) -> None:
    known = slides.figures(KIT.parent)
    for path in (KIT / folder).glob("*.md"):
        text = path.read_text("utf-8")
        deck, used = slides.with_figures(text, known)
        assert used and deck.count("![h:520") == len(used), path
        assert deck.count(slides.BREAK) == text.count(slides.BREAK) + len(used)
