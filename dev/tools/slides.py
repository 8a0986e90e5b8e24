"""Write the slide decks with the notebooks' figures into build/slides: `make slides`, for teachers.

A slide that says to show a cell, such as **show** `04#train-run`, is followed by a slide with its figure, as the
committed notebook has it.  The decks in teaching/slides hold no copy of a figure, so none is out of date.
"""

import base64
import json
import re
from pathlib import Path

from grpo_lib.common.environment import repo_root
from grpo_lib.common.errors import CourseError

SHOWN = re.compile(r"\*\*(?:show|展示)\*\*[^`\n]*((?:`\d\d[ab]?#[\w-]+`(?: · |、)?)+)", re.IGNORECASE)
CELL = re.compile(r"`(\d\d[ab]?)#([\w-]+)`")
KINDS = {"image/png": "png", "image/svg+xml": "svg"}
BREAK = "\n---\n"  # between slides


def figures(root: Path) -> dict[tuple[str, str], tuple[str, bytes]]:
    """The figures of the English notebooks: (number, id of the cell) → (png or svg, content)."""
    found = {}
    for path in sorted([*root.glob("notebooks/*.ipynb"), *root.glob("notebooks/further/*.ipynb")]):
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            data = [output.get("data", {}) for output in cell.get("outputs", [])]
            images = [(KINDS[kind], one[kind]) for one in data for kind in KINDS if kind in one]
            if images:
                kind, content = images[0]
                text = "".join(content)
                image = base64.b64decode(text) if kind == "png" else text.encode()
                found[path.name.partition("_")[0], cell["id"]] = kind, image
    return found


def with_figures(deck: str, known: dict[tuple[str, str], tuple[str, bytes]]) -> tuple[str, list[tuple[str, str]]]:
    """The deck with a slide after each slide that shows a figure, and the cells of these figures."""
    used = []
    slides = []
    for slide in deck.split(BREAK):
        slides.append(slide)
        heading = "".join(re.findall(r"(?m)^## (.*)", slide)[:1])
        for shown in SHOWN.findall(slide):
            for cell in CELL.findall(shown):
                if cell in known:
                    used.append(cell)
                    slides.append(f"\n## {heading}\n\n![h:520 {heading}](../figures/{_name(cell, known)})\n")
    return BREAK.join(slides), used


def _name(cell: tuple[str, str], known: dict[tuple[str, str], tuple[str, bytes]]) -> str:
    return f"{'-'.join(cell)}.{known[cell][0]}"


def main() -> None:
    root = repo_root()
    known = figures(root)
    output = root / "build" / "slides"
    (output / "figures").mkdir(parents=True, exist_ok=True)
    for language, folder in (("en", "teaching/slides"), ("zh_TW", "teaching/zh_TW/slides")):
        (output / language).mkdir(exist_ok=True)
        for path in sorted((root / folder).glob("*.md")):
            deck, used = with_figures(path.read_text("utf-8"), known)
            if not used:
                raise CourseError(f"{path} shows no figure; name a cell with one: **show** `04#train-run`")
            (output / language / path.name).write_text(deck, "utf-8")
            for cell in used:
                (output / "figures" / _name(cell, known)).write_bytes(known[cell][1])
            print(f"{output / language / path.name}: {len(used)} figures")


if __name__ == "__main__":
    main()
