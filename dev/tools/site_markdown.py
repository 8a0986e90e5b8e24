"""The site's pages as Markdown, for readers that are programs; see build_site.py."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TITLE = re.compile(r"(?m)^# (.*)")
SUMMARY = (
    "Take a language model through GRPO (group relative policy optimization) on grade-school maths with MaxText, Tunix"
    " and JAX, and see honestly whether it got better: eleven notebooks and a small library, on a laptop or a TPU."
)
SECTIONS = {  # of llms.txt: its title, and where its pages are
    "Notebooks": ("notebooks/*.md", "notebooks/further/*.md"),
    "Exercises": ("exercises/*.md",),
    "Documentation": ("readme.md", "docs/*.md", "assets/*.md"),
    "Library grpo_lib": ("api/*.md",),
    "In Traditional Chinese": ("zh_TW/notebooks/*.md", "zh_TW/notebooks/further/*.md", "zh_TW/exercises/*.md"),
}


def of_text(text: str) -> str:
    """A page's Markdown with links to the .md of other pages, and without what only Sphinx reads."""
    text = re.sub(r"(?ms)^```\{.*?^```\n", "", text)
    text = re.sub(r"(?m)^:::.*\n|^:class:.*\n|^\{\..*\}\n", "", text)
    text = re.sub(r"\]\(site:([^)#\s]+)\.html[^)]*\)", r"](\1.md)", text)
    text = re.sub(r"(\]\([^)\s]+)\.ipynb([)#])", r"\1.md\2", text)
    return re.sub(r"(\]\([^)]*\))\{[^}]*\}", r"\1", text)


def of_notebook(notebook: dict[str, Any]) -> str:
    """A notebook's text, code and outputs; of a figure its alternative text."""
    blocks = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            blocks.append(of_text(source))
        else:
            blocks.append(f"```python\n{source}\n```")
        blocks += [shown for output in cell.get("outputs", []) if (shown := _output(output))]
    return "\n\n".join(blocks) + "\n"


def of_modules(title: str, files: Sequence[Path]) -> str:
    """The modules' source, whose docstrings are the page."""
    blocks = [f"`{file.name}`\n\n```python\n{file.read_text(encoding='utf-8').rstrip()}\n```" for file in files]
    return "\n\n".join([f"# {title}", *blocks]) + "\n"


def index(site: Path, root: Path) -> str:
    """llms.txt (llmstxt.org): the pages of a site, by their titles."""
    lines = ["# GRPO, hands on", "", f"> {SUMMARY}"]
    for title, patterns in SECTIONS.items():
        lines += ["", f"## {title}", ""]
        for pattern in patterns:
            lines += [_entry(path, site) for path in sorted(site.glob(pattern))]
    return "\n".join(lines) + "\n"


def _entry(path: Path, site: Path) -> str:
    title = TITLE.search(path.read_text(encoding="utf-8"))
    return f"- [{title[1] if title else path.stem}]({path.relative_to(site).as_posix()})"


def _output(output: dict[str, Any]) -> str:
    """What a cell showed."""
    if output["output_type"] == "stream":
        return f"```text\n{''.join(output['text']).rstrip()}\n```"
    data = output.get("data", {})
    for kind in ("image/png", "image/svg+xml"):
        if kind in data:
            alt = output.get("metadata", {}).get(kind, {}).get("alt", "")
            return f"*Figure: {alt}*" if alt else ""
    if "text/markdown" in data:
        return "".join(data["text/markdown"])
    text = "".join(data.get("text/plain", []))
    return "" if text.startswith("<") else f"```text\n{text}\n```"
