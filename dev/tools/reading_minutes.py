"""Minutes to work through each section of the notebooks, in both languages: computed, no class has been timed.

    python dev/tools/reading_minutes.py            print the tables of teaching/notes/
    python dev/tools/reading_minutes.py --write    put them there, and into teaching/zh_TW/notes/

The seconds of a notebook, and those of its slow cells, are in its metadata (`make notebooks` keeps them there).
"""

import argparse
import re
from pathlib import Path

import run_notebooks
import translations

from grpo_lib.common.files import write_text_atomic

ROOT = Path(__file__).resolve().parents[2]
# The pace is chosen, not measured.  Plain prose is read at 230 words a minute and more; here many terms are new.
WORDS, CHARACTERS = 200, 300  # a minute; a word of these notebooks takes 1.5 characters in Chinese
LINES = 12  # a minute, of code and displayed formulas: five seconds a line (plans/90-minutes.md, explained aloud: four)
QUESTION, OUTPUT = 1, 1 / 3  # minutes: to answer what is asked in bold, and to look at what a cell shows
FORMULA, UNREAD = r"(?s)\$\$.+?\$\$", r"!\[[^\]]*\]\([^)]*\)|\]\([^)]*\)|</?[a-z][^>]*>|(?s:\$\$.+?\$\$)"
# What few readers need at once; an answer is of a question.
FOLDED = r"(?s)<details><summary>(?!Answer|Solution|答案|解答).*?</details>"
ASKED = r"\*\*(Predict|Guess|Think|Decide|Find|Write|Before|Ask|Answer|Try|Read|Work|Say|Recall|Quest|Stop|Your|Wh|How)"
PAGES = {  # where, and what stands there around the rows of the sections
    "notes": "## Minutes by section\n\nThey are computed ([how](../README.md#minutes)). No class has been timed.\n\n"
    "| section | English | Chinese | questions | cells, s |\n|---|--:|--:|--:|--:|\n{}| all",
    "zh_TW/notes": "## 各節分鐘數\n\n這些是計算出來的（[算法](../README.md#分鐘數)），沒有在課堂上實際計時過。\n\n"
    "| 節 | 英文 | 中文 | 問題 | 儲存格，秒 |\n|---|--:|--:|--:|--:|\n{}| 全部",
}


def reading(text: str) -> float:
    """Return the minutes to read a Markdown text, without what is folded; a code span, or a formula, is one word."""
    text = re.sub(FOLDED, "", text)
    lines = "".join(f"{formula}\\\\" for formula in re.findall(FORMULA, text)).count("\\\\")
    text = re.sub(r"\$[^$\n]+\$|`[^`\n]+`", " x ", re.sub(UNREAD, " ", text))
    words = len(re.findall(r"(?a)\w[\w.,'-]*", text))
    characters = len(re.findall("[一-鿿]", text))
    return words / WORDS + characters / CHARACTERS + lines / LINES


def path_of(name: str) -> str:
    """Return where a notebook is below notebooks/, without its suffix: further/06_on_a_tpu for 06_on_a_tpu."""
    return next(path for path in run_notebooks.NOTEBOOKS if Path(path).name == name)


def cells(name: str) -> dict[str, tuple[list[str], list[float]]]:
    """Return id -> (texts, [minutes to read it in English, in Chinese, questions, seconds it took]) of each cell."""
    path = path_of(name)
    notebook = translations.read_notebook(ROOT / "notebooks" / f"{path}.ipynb")
    english = translations.text_by_id(notebook)
    took = notebook["metadata"]["grpo"].get("cells", {})
    catalogue = translations.read_catalogue(ROOT / f"dev/translations/zh_TW/{path}.po")
    chinese = translations.translated(english, catalogue)
    by_id = {}
    for cell in notebook["cells"]:
        cell_id = cell["id"]
        in_english = english.get(cell_id, "")
        texts = [in_english, chinese.get(cell_id, in_english)]
        outputs = cell.get("outputs", [])
        shown = "".join("".join(output.get("data", {}).get("text/markdown", "")) for output in outputs)
        code = re.findall(r"(?s)```\w*(.+?)```", shown)
        if cell["cell_type"] == "code":
            code.append("".join(cell["source"]))
        asked = len(re.findall(ASKED, in_english))
        lines = len(re.findall(r"(?m)^.*\S", "\n".join(code)))
        rest = lines / LINES + asked * QUESTION + bool(outputs) * OUTPUT
        minutes = [reading(text) + rest for text in texts]
        by_id[cell_id] = texts, [*minutes, asked, took.get(cell_id, 0)]
    quick = notebook["metadata"]["grpo"]["seconds"] - sum(took.values())
    by_id[""] = ["", ""], [0, 0, 0, quick]  # in no section
    return by_id


def total(name: str) -> tuple[float, float]:
    """Return the minutes of a notebook, in English and in Chinese."""
    numbers = [each for _, each in cells(name).values()]
    seconds = sum(each[3] for each in numbers)
    return sum(each[0] for each in numbers) + seconds / 60, sum(each[1] for each in numbers) + seconds / 60


def page(name: str, folder: str) -> str:
    """Return the part of a page of notes that this program writes; a section of less than half a minute has no row."""
    rows = [["", 0, 0, 0, 0]]  # the sum, then a row for each section: heading, minutes, questions, seconds
    language = 0 if folder == "notes" else 1
    for cell, (texts, (english, chinese, asked, seconds)) in cells(name).items():
        heading = re.search(r"(?m)^##? (.+)", texts[language])
        if heading:
            rows.append([heading[1], 0, 0, 0, 0])
        numbers = english + seconds / 60, chinese + seconds / 60, asked, seconds
        for row in (rows[0], rows[-1]) if cell else rows[:1]:
            row[1:] = [old + new for old, new in zip(row[1:], numbers, strict=True)]
    lines = []
    for title, *numbers in rows:
        if numbers[0] > 0.5:
            lines.append(" | ".join([title, *(f"{number:.0f}" if number else "–" for number in numbers)]))
    return PAGES[folder].format("".join(f"| {line} |\n" for line in lines[1:])) + f"{lines[0]} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the tables into the notes, in both languages")
    write = parser.parse_args().write
    for name in [Path(path).name for path in run_notebooks.NOTEBOOKS]:
        for folder, form in PAGES.items() if write else ():
            path = ROOT / "teaching" / folder / f"{name}.md"
            before, _, after = path.read_text("utf-8").partition(f"\n{form.splitlines()[0]}\n")
            rest = "".join(re.findall(r"(?s)\n## .*", after))
            write_text_atomic(path, f"{before.rstrip()}\n\n{page(name, folder)}{rest}")
        print(f"# {name}\n\n{page(name, 'notes')}")


if __name__ == "__main__":
    main()
