"""Chinese notebooks out of the English ones: `make zh` builds them, `make translations` updates their catalogues.

One message per Markdown cell, its context the cell's id.  A notebook with a catalogue is built; an empty file is a new
catalogue.  A cell without Chinese, or whose English has changed since, stays English.  The catalogues in folders are
those of the teacher's notebooks; `make student` cuts these in both languages, and a student build has none to build.
"""

import argparse
import csv
import io
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path

from babel.messages import Catalog
from babel.messages.pofile import PoFileError, read_po, unescape, write_po

from grpo_lib.common.environment import repo_root
from grpo_lib.common.errors import CourseError, first_line
from grpo_lib.common.files import write_text_atomic

LOCALE = "zh_TW"
HEADER = rf"""# {{name}}.ipynb in the Traditional Chinese of Taiwan. Terms: glossary.csv; checks: `make translations`.
msgid ""
msgstr ""
"Language: {LOCALE}\n"
"Content-Type: text/plain; charset=UTF-8\n"
"""
STRING = r'"(?:[^"\\]|\\.)*"'
PO_LINE = re.compile(rf"\s*(#.*|((msgctxt|msgid|msgstr) )?{STRING}\s*)?")
CODE, LINK = r"(?s:```.*?```)|`[^`]+`", r"\]\(([^)\s]+)\)"
FORMULA = r"(?s:\$\$.+?\$\$)|\$[^$\n]+\$"
CHINESE = "[\u4e00-\u9fff]"
ITALICS = r"\*\*|\*(?![*\s])([^*\n]+)\*(?!\*)"  # or the two asterisks of bold type, which stay
# Taiwan's typography: a full-width colon after a figure's number, no space before a percent sign.
TYPOGRAPHY = {
    r"\*\*圖 (\d+)\.\*\*\s*": r"**圖 \1：**",
    r"(\d) %": r"\1%",
    rf"(?m)^\*(?!\*)([^*\n]*{CHINESE}[^*\n]*)\*$": r"\1",  # a whole line in italics
}
# What only the Chinese has, such as the table that a cell of code shows in English.
ADDED, MARK = r"(?s)<!-- 只有中文 -->.*?<!-- /只有中文 -->\n*", r"<!-- /?只有中文 -->\n?"
# What a cell and its translation have in common, in any order.  What is found is taken out before the next is sought.
COMMON = {
    "code": CODE,
    "formula": FORMULA,
    "alternative text": r"!\[([^\]]*)(?=\])",
    "link": LINK,
    "HTML": r"</?[a-z][^>]*>",
    "heading": r"(?m)^#+ ",
    "table": r"\|",
    "number": r"\d[\d,.]*\d|\d",
}


def is_lesson(name: str) -> bool:
    """Whether a catalogue is of the course, such as 03_policy_update, and not of exercises/03_policy_update."""
    return "/" not in name or name.startswith("further/")


def source(name: str, root: Path) -> Path:
    """Return the English notebook of a catalogue."""
    return root / ("notebooks" if is_lesson(name) else "teaching") / f"{name}.ipynb"


def target(name: str, root: Path) -> Path:
    """Return where the Chinese notebook is built: in a folder like notebooks/, or next to the English exercises."""
    if is_lesson(name):
        return root / "notebooks" / LOCALE / f"{name}.ipynb"
    path = source(name, root)
    return path.parent / LOCALE / path.name


def read_notebook(path: Path) -> dict:
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        ids = [cell["id"] for cell in notebook["cells"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CourseError(f"{path.parent.name}/{path.name} cannot be read: {first_line(error)}") from error
    if double := [cell_id for cell_id, count in Counter(ids).items() if count > 1]:
        raise CourseError(f"{path.parent.name}/{path.name}: two cells have the id {double[0]}; rename one")
    return notebook


def text_by_id(notebook: dict) -> dict[str, str]:
    return {cell["id"]: "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"}


def read_catalogue(path: Path) -> Catalog:
    """Read a PO file, each message with its previous English.  CourseError: it is broken, or has a cell twice."""
    where = f"dev/translations/{path.as_posix().rpartition('/translations/')[2]}"
    try:
        text = path.read_text(encoding="utf-8")
        for number, line in enumerate(text.split("\n"), 1):  # Babel reads a string without its end as well
            if not PO_LINE.fullmatch(line):
                raise CourseError(f"{where}, line {number} is not a line of a PO file: {line[:60]}")
        catalogue = read_po(io.StringIO(text), locale=LOCALE, abort_invalid=True)
    except (OSError, PoFileError, ValueError, LookupError) as error:
        raise CourseError(f"{where} is not a PO file: {first_line(error)}") from error
    contexts = Counter(re.findall(r'^msgctxt "(.*)"', text, re.MULTILINE))
    if double := [context for context, count in contexts.items() if count > 1]:
        raise CourseError(f"{where}: two messages for the cell {double[0]}; delete one")
    for message in catalogue:  # Babel reads the previous msgid as a comment
        marked = [comment for comment in message.user_comments if comment.startswith("| ")]
        message.previous_id = ["".join(map(unescape, re.findall(STRING, "".join(marked))))] if marked else []
        message.user_comments = [comment for comment in message.user_comments if comment not in marked]
    return catalogue


def messages(catalogue: Catalog) -> dict:
    return {message.context: message for message in catalogue if message.id}


def update(cells: dict[str, str], old: Catalog) -> Catalog:
    """Return the catalogue for these cells: Chinese of another English is fuzzy, that of no cell is obsolete."""
    new = Catalog(locale=LOCALE, fuzzy=False)
    known = {message.context: message for message in old.obsolete.values()} | messages(old)
    for message in known.values():
        if message.fuzzy and message.previous_id:
            message.id = message.previous_id[0]  # the English of this Chinese
            message.flags.discard("fuzzy")
    for cell_id, english in cells.items():
        message = new.add(english, context=cell_id)
        before = known.pop(cell_id, None)
        if before and before.string:
            message.string = before.string
            message.user_comments = before.user_comments
            message.previous_id = [before.id] if before.id != english else []
            message.flags = {"fuzzy"} if before.fuzzy or message.previous_id else set()
        message.flags -= {"python-format", "python-brace-format"}  # Babel takes "10 % of" for one
    new.obsolete = {cell_id: message for cell_id, message in known.items() if message.string}
    return new


def translated(cells: dict[str, str], catalogue: Catalog) -> dict[str, str]:
    """Return id → Chinese of the cells that have one, of exactly their English."""
    chinese = {}
    for cell_id, message in messages(catalogue).items():
        if message.string and not message.fuzzy and cells.get(cell_id) == message.id:
            chinese[cell_id] = message.string
    return chinese


def differences(english: str, chinese: str) -> tuple[dict[str, tuple[list[str], list[str]]], str, str]:
    """Return what → what is only in English and only in Chinese, and both texts without what was compared."""
    found = {}
    for what, pattern in COMMON.items():
        here, there = (Counter(re.findall(pattern, text)) for text in (english, chinese))
        found[what] = [*(here - there).elements()], [*(there - here).elements()]
        english, chinese = (re.sub(pattern, " ", text) for text in (english, chinese))
    return found, english, chinese


def problems(name: str, cells: dict[str, str], catalogue: Catalog, glossary: list[dict]) -> list[str]:
    """Return what is wrong with a catalogue, a line each, with the names of notebook and cell."""
    known = {cell_id: message.id for cell_id, message in messages(catalogue).items()}
    changed = sorted(dict(cells.items() ^ known.items()))
    found = [f"{name} {cell_id}: a new, changed or removed cell; run `make translations`" for cell_id in changed]
    for cell_id, chinese in translated(cells, catalogue).items():
        chinese = re.sub(ADDED, "", chinese)
        compared, english, chinese = differences(cells[cell_id], chinese)
        for what, (one, other) in compared.items():
            if one or other:
                sides = f"only in English: [{', '.join(one)}]; only in Chinese: [{', '.join(other)}]"
                found.append(f"{name} {cell_id}: {what}: {sides}")
        for row in glossary:
            used = re.search(rf"(?<![\w-]){re.escape(row['english'])}(s|es)?(?![\w-])", english, re.IGNORECASE)
            if used and not any(form.lower() in chinese.lower() for form in row["chinese"].split("|")):
                found.append(f"{name} {cell_id}: {used[0]!r} is {row['chinese']} in glossary.csv")
    return found


def headings(cells: dict[str, str], chinese: dict[str, str]) -> dict[str, str]:
    """Return English heading → Chinese one."""
    texts = ("\n".join(cells[cell_id] for cell_id in chinese), "\n".join(map(typeset, chinese.values())))
    return dict(zip(*(re.findall(r"(?m)^#+ (.*)", text) for text in texts), strict=False))


def wrong_sections(name: str, cells: dict[str, str], chinese: dict[str, str], lesson: dict[str, str]) -> list[str]:
    """Return a line for each exercise that names a section (after “…”) which the lesson does not have."""
    pairs = {tuple(re.sub(r"^\d+\. |\"", "", text) for text in pair) for pair in lesson.items()}
    found = []
    for cell_id, text in chinese.items():
        named = *re.findall("(?m)^★.*“(.*)”", cells[cell_id]), *re.findall("(?m)^★.*〈(.*)〉", text)
        if named and named not in pairs:
            found.append(f"{name} {cell_id}: section: the lesson has no {' | '.join(named)}")
    return found


def _quoted(italics: re.Match) -> str:
    """Return quotation marks in place of italics, which slant Chinese characters; other italics stay."""
    return f"「{italics[1]}」" if italics[1] and re.search(CHINESE, italics[1]) else italics[0]


def typeset(chinese: str) -> str:
    """Return Chinese Markdown in Taiwan's typography; code, formulas and links stay."""
    parts = re.split(f"({CODE}|{FORMULA}|{LINK})", re.sub(MARK, "", chinese))
    kept = parts[1::3]  # LINK has a group of its own
    text = "\0".join(parts[::3])
    for pattern, replacement in TYPOGRAPHY.items():
        text = re.sub(pattern, replacement, text)
    text = re.sub(ITALICS, _quoted, text)
    text = re.sub(f"(?<=」) (?={CHINESE})|(?<={CHINESE}) (?=「)", "", text)
    pieces = text.split("\0")
    return "".join(piece + code for piece, code in zip(pieces, [*kept, ""], strict=True))


def build(
    name: str, notebook: dict, chinese: dict[str, str], anchors_of: dict[str, dict[str, str]], root: Path
) -> dict:
    """Return the notebook in Chinese.  `anchors_of`: name of each that is built → English anchor → Chinese one."""
    here = source(name, root).parent
    there = target(name, root).parent

    def link(match: re.Match) -> str:
        path, number_sign, anchor = match[1].partition("#")
        if path and not re.match(r"[a-z]+:", path):
            file = os.path.normpath(here / path)
            other = next((one for one in anchors_of if str(source(one, root)) == file), None)
            if other:
                file = target(other, root)
                anchor = anchors_of[other].get(anchor, anchor)
            path = os.path.relpath(file, there)
        elif not path:
            anchor = anchors_of[name].get(anchor, anchor)
        return f"]({path}{number_sign}{anchor})"

    cells = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            text = typeset(chinese[cell["id"]]) if cell["id"] in chinese else "".join(cell["source"])
            parts = re.split(f"({CODE})", text)  # the odd ones are code
            parts[::2] = [re.sub(LINK, link, part) for part in parts[::2]]
            cell = cell | {"source": "".join(parts).splitlines(keepends=True)}
        cells.append(cell)
    return notebook | {"cells": cells}


def run(command: str, root: Path) -> list[str]:
    """Build the notebooks, or update the catalogues.  Returns the problems with these."""
    folder = root / "dev" / "translations" / LOCALE
    names = [path.relative_to(folder).with_suffix("").as_posix() for path in sorted(folder.rglob("*.po"))]
    names = [name for name in names if source(name, root).parent.exists()]
    catalogues = {name: read_catalogue(folder / f"{name}.po") for name in names}
    english = {name: read_notebook(source(name, root)) for name in names}
    cells = {name: text_by_id(notebook) for name, notebook in english.items()}
    if command == "update":
        for name in catalogues:
            catalogues[name] = update(cells[name], catalogues[name])
            # A paragraph is one line, as in a notebook; where Babel breaks lines, a previous msgid loses spaces.
            write_po(buffer := io.BytesIO(), catalogues[name], 10**6, omit_header=True, include_previous=True)
            text = HEADER.format(name=name) + "\n" + buffer.getvalue().decode().rstrip()
            write_text_atomic(folder / f"{name}.po", text + "\n")
    glossary = list(csv.DictReader((folder / "glossary.csv").read_text(encoding="utf-8").splitlines()))
    done = {name: translated(cells[name], catalogues[name]) for name in catalogues}
    titles = {name: headings(cells[name], done[name]) for name in done}
    if command == "build":
        anchors_of = {
            name: {one.replace(" ", "-"): other.replace(" ", "-") for one, other in titles[name].items()}
            for name in done
        }
        for name, notebook in english.items():
            built = build(name, notebook, done[name], anchors_of, root)
            text = json.dumps(built, indent=1, ensure_ascii=False)
            path = source(name, root)
            # `grpo check 3.2` reads the English notebook in exercises/; a command that names it reads the Chinese one.
            text = re.sub(r"(grpo check [\d.]+)`", rf"\1 exercises/{path.name}`", text)
            text = text.replace(f" exercises/{path.name}`", f" exercises/{LOCALE}/{path.name}`")
            write_text_atomic(target(name, root), text + "\n")
        for path in (root / "notebooks" / "further").glob("*.py"):  # what cells import
            copy = root / "notebooks" / LOCALE / "further" / path.name
            write_text_atomic(copy, path.read_text(encoding="utf-8"))
    for name in done:
        words = [f"{name:<34} {len(done[name])} of {len(cells[name])} cells"]
        missing = [cell_id for cell_id in cells[name] if cell_id not in done[name]]
        if missing:
            words += ["; English:", *missing]
        print(*words)
    if command == "build":
        return []
    found = [line for name in names for line in problems(name, cells[name], catalogues[name], glossary)]
    lessons = {f"exercises/{Path(name).name}": name for name in names if is_lesson(name)}
    for name in lessons.keys() & set(names):
        found += wrong_sections(name, cells[name], done[name], titles[lessons[name]])
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["build", "update", "check"])
    try:
        found = run(parser.parse_args(arguments).command, repo_root())
    except CourseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    sys.stderr.writelines(f"problem: {problem}\n" for problem in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
