"""The teaching kit holds together: objectives, questions, notes and plans, in both languages."""

import json
import re
from itertools import pairwise, product

import reading_minutes
import translations
import yaml

from grpo_lib.common import environment
from grpo_teach import grading

KIT = environment.repo_root() / "teaching"
CELL = re.compile(r"`(\d\d)#([\w-]+)`")  # as in `03#estimator`
MINUTES = re.compile(r"^\| *(\d+)–(\d+) *\|", re.MULTILINE)  # the first column of a plan
CELLS = {  # ids, by a notebook's stem and by its number
    key: {cell["id"] for cell in json.loads(path.read_text("utf-8"))["cells"]}
    for path in (KIT.parent / "notebooks").rglob("*.ipynb")
    if "zh_TW" not in path.parts
    for key in (path.stem, path.stem[:2])
}


def test_objectives_and_questions() -> None:
    objectives, bank, chinese = (
        yaml.safe_load((KIT / name).read_text("utf-8"))
        for name in ("objectives.yaml", "questions.yaml", "zh_TW/questions.yaml")
    )
    known = {"exercises": grading.teachers_exercises(), "questions": {one["id"] for one in bank}}
    right = {  # what has to hold, by its place
        **{
            f"{one['id']}: {kind} {x}": x in known[kind]
            for one in objectives
            for kind in known
            for x in one[kind] or [""]
        },
        **{f"{x} has no objective": any(x in one[kind] for one in objectives) for kind in known for x in known[kind]},
    }
    assert [one["id"] for one in chinese] == [one["id"] for one in bank]
    for name, questions in {"English": bank, "Chinese": chinese}.items():
        right[f"{name}: the longest option is the right one in half of the questions"] = len(questions) > 2 * sum(
            max(one["options"], key=lambda x: len(x["text"])) is one["options"][one["answer"] % 4] for one in questions
        )
        right |= {
            f"{name} {one['id']}: {what}": holds
            for one, english in zip(questions, bank, strict=True)
            for what, holds in {
                "no such cell": one["cell"] in CELLS.get(one["notebook"], ()),
                "no such answer": one["answer"] in range(4),
                "not four different options": len({x["text"] for x in one["options"]}) == 4,
                "no reason for each option": [bool(x["why"]) for x in one["options"]] == [True] * 4,
                "not as in English": all(one[x] == english[x] for x in ("notebook", "cell", "answer")),
            }.items()
        }
    assert "\n".join(place for place, holds in right.items() if not holds) == ""


def test_texts_in_both_languages() -> None:
    right = {}
    for path in sorted(KIT.rglob("*.md")):
        place, text, twin = path.relative_to(KIT), path.read_text("utf-8"), KIT / "zh_TW" / path.relative_to(KIT)
        total = int(re.search(r"(\d+) (?:minutes|分鐘)|$", text.partition("\n")[0])[1] or 1000)  # type: ignore[index]
        right |= {
            **{f"{place}: no cell {book}#{cell}": cell in CELLS.get(book, ()) for book, cell in CELL.findall(text)},
            **{
                f"{place}, {total} minutes: {first} after {last}": int(first) == int(last) % total
                for (_, last), (first, _) in pairwise([("0", "0"), *MINUTES.findall(text), ("0", "0")])
            },
            f"zh_TW/{place}: no such file": twin.exists() or place.parts[0] == "zh_TW",
        }
        if twin.exists():
            texts = [re.sub("(?s)```.*?```", "", each) for each in (text, twin.read_text("utf-8"))]
            one, other = ({*CELL.findall(each), *MINUTES.findall(each)} for each in texts)
            right |= {f"{place}: {x} is in one language only": False for x in one ^ other}
            found, *_ = translations.differences(*texts)  # a 2 may be a word in Chinese, and paths of links differ
            missing = {
                (what, x) for what in found if what != "link" for x in found[what][0] if what != "number" or x[1:]
            }
            right |= {f"zh_TW/{place}: no {what} {x!r}": False for what, x in missing}
    assert "\n".join(place for place, holds in right.items() if not holds) == ""


def test_minutes_by_section() -> None:
    """The tables of the notes are today's, and what a row of a plan shows is read within its minutes."""
    names = sorted(name for name in CELLS if len(name) > 2)
    tables = {path: reading_minutes.page(path[1], path[0]) for path in product(reading_minutes.PAGES, names)}
    stale = [path for path, table in tables.items() if table not in (KIT / f"{'/'.join(path)}.md").read_text("utf-8")]
    assert stale == []  # `python dev/tools/reading_minutes.py --write` writes them again
    minutes = {(name[:2], cell): each[0] for name in names for cell, (_, each) in reading_minutes.cells(name).items()}
    plans = "\n".join(path.read_text("utf-8") for path in (KIT / "plans").glob("*.md"))
    rows = [(row[0], int(row[2]) - int(row[1])) for row in re.finditer(r"(?m)^\| *(\d+)–(\d+) *\|.*", plans)]
    assert [row for row, most in rows if sum(minutes[cell] for cell in CELL.findall(row)) > most] == []
