"""The course as a web site, English and Chinese: `make site` builds build/site with requirements/site.lock.

Nothing is executed: the pages are the committed notebooks with their outputs, the exercises as students get them, docs/
and the docstrings of grpo_lib.  Each language is a project of Sphinx (docs/site/conf.py) whose sources are written to
.cache/site first: there each link leads to another page, or to REPOSITORY, or is plain text.  Beside each page is a .md
of it for readers that are programs; llms.txt lists those.
"""

import contextlib
import io
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import site_markdown
import tab
import translations

from grpo_lib.common.environment import repo_root
from grpo_lib.common.errors import CourseError

# OWNER/NAME on GitHub: of this repository, and of the student build, which "open in" leads to.  Nobody owns one yet:
# until then links to files that are no page are plain text, and no page shows a badge.
REPOSITORY = os.environ.get("SITE_REPOSITORY", "")
STUDENT_REPOSITORY = os.environ.get("SITE_STUDENT_REPOSITORY", "")

FENCED = re.compile(r"(?ms)(^[ >]*```.*?^[ >]*```[ ]*$)")
TEXT_LINK = re.compile(r"(!?)\[((?:`[^`]*`|[^\[\]`]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
HEADING = re.compile(r"(?m)^(#+) (.*)")
COURSE_TABLE = re.compile(r"(?m)^\|.*\n\|[-:| ]+\n(?:\| \[\d\d.*\n)+")


@dataclass(frozen=True)
class Language:
    """One of the two projects."""

    code: str  # as Sphinx names it
    name: str
    prefix: str  # of its pages, in build/site
    readme: str
    index: str
    notebooks: str  # folders of the repository
    exercises: str
    files_of_students: str  # where a student's folder has these exercises
    note: str  # the title above exercises at the end of a section
    tab: str  # the title of the page in which the model learns
    title: str  # of the site
    elsewhere: str  # what a badge says of a notebook that is in another language


ENGLISH = Language(
    "en",
    "English",
    "",
    "README.md",
    "docs/site/index.md",
    "notebooks",
    "teaching/exercises",
    "exercises",
    "Exercises to this section",
    "GRPO in a tab",
    "GRPO, hands on",
    "",
)
CHINESE = Language(
    "zh_TW",
    "繁體中文",
    "zh_TW/",
    "README.zh.md",
    "docs/site/index.zh.md",
    "notebooks/zh_TW",
    "teaching/exercises/zh_TW",
    "exercises/zh_TW",
    "這一節的練習",
    "在分頁裡看 GRPO",
    "動手做 GRPO",
    "（英文版）",
)
LANGUAGES = (ENGLISH, CHINESE)

TAB = "tab.html"  # the page in which the model learns: one for both languages, none of Sphinx's


@dataclass(frozen=True)
class Exercise:
    """An exercise as its lesson names it."""

    title: str
    about: str  # stars, points, minutes
    section: str  # of the lesson, without its number


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and MyST make it; of an anchor of Jupyter's, the same."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def pages_of(language: Language, root: Path) -> dict[str, str]:
    """Path in the repository → name of the page, without its ending, of all that are files."""
    pages = {language.readme: "readme", language.index: "index"}
    for path in sorted((root / language.notebooks).glob("*.ipynb")):
        pages[f"{language.notebooks}/{path.name}"] = f"notebooks/{path.stem}"
    for path in sorted((root / language.notebooks / "further").glob("*.ipynb")):
        pages[f"{language.notebooks}/further/{path.name}"] = f"notebooks/further/{path.stem}"
    for path in sorted((root / language.exercises).glob("*.ipynb")):
        pages[f"{language.exercises}/{path.name}"] = f"exercises/{path.stem}"
    if language is ENGLISH:
        for path in sorted((root / "docs").glob("*.md")):
            pages[f"docs/{path.name}"] = f"docs/{path.stem}"
        pages["docs/tab/README.md"] = "docs/tab"
        pages["assets/tiny-base/README.md"] = "assets/tiny-base"
    return pages


class Links:
    """Rewrites the links of one page's Markdown, and copies the pictures that it shows."""

    def __init__(self, root: Path, all_pages: dict[str, tuple[Language, str]], place: str, folder: Path) -> None:
        self.root = root
        self.pages = all_pages
        self.place = place  # the page's file in the repository
        self.language, self.page = all_pages[place]
        self.folder = folder  # of this language's sources

    def rewrite(self, text: str) -> str:
        parts = FENCED.split(text)
        parts[::2] = [TEXT_LINK.sub(self._link, part) for part in parts[::2]]
        return "".join(parts)

    def _link(self, match: re.Match) -> str:
        mark, words, address = match.groups()
        if re.match(r"[a-z]+:", address):
            return match[0]
        path, _, anchor = address.partition("#")
        target = self._target(path)
        if target is None:
            return match[0]
        if mark:
            return f"![{words}]({self._picture(target)})"
        words = TEXT_LINK.sub(self._link, words)
        if target in self.pages:
            return f"[{words}]({self._page(target, anchor)})"
        if REPOSITORY:
            return f"[{words}](https://github.com/{REPOSITORY}/blob/main/{target})"
        return words

    def _target(self, path: str) -> str | None:
        """The file of the repository that a link names; None where there is none, as in code that looks like a link."""
        if not path:
            return self.place
        for folder in (posixpath.dirname(self.place), "exercises"):
            target = posixpath.normpath(posixpath.join(folder, path))
            if not target.startswith("..") and (self.root / target).exists():
                return target
        return None

    def _page(self, target: str, anchor: str) -> str:
        language, page = self.pages[target]
        here = posixpath.dirname(self.language.prefix + self.page) or "."
        relative = posixpath.relpath(language.prefix + page, here)
        if anchor.startswith("cell-id="):
            return f"site:{relative}.html#{anchor.replace('=', '-')}"
        if language is not self.language:
            return f"site:{relative}.html"
        ending = "" if target == self.place else source_name(relative, target)
        return ending + (f"#{slug(anchor)}" if anchor else "")

    def _picture(self, target: str) -> str:
        copy = self.folder / target
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.root / target, copy)
        return posixpath.relpath(target, posixpath.dirname(self.page) or ".")


def source_name(page: str, place: str) -> str:
    """A page's file among the sources: a notebook or a text."""
    return page + Path(place).suffix


def exercises_of(notebook: dict[str, Any]) -> Iterator[Exercise]:
    """The exercises of a notebook of exercises, in order."""
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        title = re.search(r"(?m)^## (.*)", text)
        line = re.search(r"(?m)^★.*", text)
        section = line and re.search("[“〈](.*)[”〉]", line[0])
        if title and section:
            about = line[0].split(" · ")[:3]  # stars, points, minutes
            yield Exercise(title[1], " · ".join(about), section[1])


def plain_heading(heading: str) -> str:
    """A heading as exercises name it: without its number and its quotes."""
    return re.sub(r"^\d+\. |\"", "", heading)


def insert_exercises(cells: list[dict], found: Iterable[Exercise], page: str, title: str) -> list[dict]:
    """The lesson's cells with a list of exercises at the end of each section that has some.

    Raises:
      CourseError: an exercise names a section that the lesson does not have.
    """
    by_section = defaultdict(list)
    for exercise in found:
        by_section[exercise.section].append(exercise)
    result: list[dict] = []
    open_sections: list[tuple[int, str]] = []  # level and heading, the outermost first

    def close(level: int) -> None:
        while open_sections and open_sections[-1][0] >= level:
            _, heading = open_sections.pop()
            if exercises := by_section.pop(heading, []):
                result.append(markdown_cell(f"exercises-{len(result)}", exercise_list(exercises, page, title)))

    for cell in cells:
        headings = HEADING.findall("".join(cell["source"])) if cell["cell_type"] == "markdown" else []
        for marks, heading in headings:
            close(len(marks))
            open_sections.append((len(marks), plain_heading(heading)))
        result.append(cell)
    close(0)
    if by_section:
        raise CourseError(f"{page}: no section “{next(iter(by_section))}” in the lesson, which an exercise names")
    return result


def exercise_list(exercises: list[Exercise], page: str, title: str) -> str:
    lines = [f"- [{one.title}]({page}#{slug(one.title)}) {one.about}" for one in exercises]
    return "\n".join([f":::{{admonition}} {title}", ":class: exercises", "", *lines, ":::"])


def markdown_cell(cell_id: str, text: str) -> dict[str, Any]:
    return {"id": cell_id, "cell_type": "markdown", "metadata": {}, "source": text}


def mark_cells(cells: list[dict], linked: set[str]) -> Iterator[dict]:
    """The cells, with an anchor before each that a link names by its id."""
    for cell in cells:
        if cell.get("id") in linked:
            yield markdown_cell(f"before-{cell['id']}", f'<span id="cell-id-{cell["id"]}"></span>')
        yield cell


def write_sources(language: Language, all_pages: dict[str, tuple[Language, str]], root: Path, folder: Path) -> None:
    """Write the sources of one language to `folder`, as pages, and next to it as Markdown for programs."""
    own = {place: page for place, (of, page) in all_pages.items() if of is language}
    linked = linked_cells(root, all_pages)
    for place, page in own.items():
        links = Links(root, all_pages, place, folder)
        if place.endswith(".md"):
            text = links.rewrite((root / place).read_text(encoding="utf-8"))
            if page == "index":
                text = fill_index(text, (root / language.readme).read_text(encoding="utf-8"), links, root)
            write(folder / source_name(page, place), text)
            write(beside(folder, page), site_markdown.of_text(text))
            continue
        notebook = read_notebook(root / place)
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = links.rewrite("".join(cell["source"]))
        write(beside(folder, page), site_markdown.of_notebook(notebook))
        exercises = f"{language.exercises}/{Path(place).name}"
        if page.startswith("notebooks/") and exercises in own:
            address = posixpath.relpath(f"{own[exercises]}.ipynb", posixpath.dirname(page))
            found = exercises_of(read_notebook(root / exercises))
            notebook["cells"] = insert_exercises(notebook["cells"], found, address, language.note)
        notebook["cells"] = list(mark_cells(notebook["cells"], linked.get(place, set())))
        write(folder / source_name(page, place), json.dumps(notebook, ensure_ascii=False))


def read_notebook(path: Path) -> dict[str, Any]:
    """A notebook as students get it: of exercises without solutions and hidden tests."""
    if path.parent.name != "exercises" and path.parent.parent.name != "exercises":
        return json.loads(path.read_text(encoding="utf-8"))
    from grpo_teach import student  # the teacher's, which a student's folder does not have

    with tempfile.TemporaryDirectory() as folder:
        return json.loads(student.cut(path, Path(folder)).read_text(encoding="utf-8"))


def linked_cells(root: Path, all_pages: dict[str, tuple[Language, str]]) -> dict[str, set[str]]:
    """Notebook → ids of its cells that docs/ link to."""
    found = defaultdict(set)
    for place in all_pages:
        if place.startswith("docs/"):
            text = (root / place).read_text(encoding="utf-8")
            for path, cell in re.findall(r"\]\(([^)\s#]+\.ipynb)#cell-id=([^)\s]+)\)", text):
                found[posixpath.normpath(posixpath.join("docs", path))].add(cell)
    return found


def fill_index(text: str, readme: str, links: Links, root: Path) -> str:
    """The first page with the README's table of the notebooks, and the rates of the shipped run."""
    summary = json.loads((root / "assets/reference/course/summary.json").read_text(encoding="utf-8"))
    (table,) = COURSE_TABLE.findall(readme)
    of_readme = Links(root, links.pages, links.language.readme, links.folder)
    values = {
        "before": f"{summary['before']['accuracy']:.0%}",
        "after": f"{summary['after']['accuracy']:.0%}",
        "seconds": f"{summary['train_seconds']:.0f}",
        "course": of_readme.rewrite(table),
    }
    for name, value in values.items():
        text = text.replace(f"{{{{{name}}}}}", value)
    return text


def write_api(folder: Path, root: Path) -> list[str]:
    """A page for each module that a user of grpo_lib imports, in the order of its docstring.  Returns their names."""
    package = root / "grpo_lib"
    listed = re.findall(r"(?m)^([a-z_]+) {2,}", (package / "__init__.py").read_text(encoding="utf-8"))
    for name in listed:
        place = package / name
        files = [place.with_suffix(".py")] if place.with_suffix(".py").exists() else sorted(place.rglob("*.py"))
        files = [file for file in files if not file.name.startswith(("__main__", "test_"))]
        modules = [file.relative_to(root).with_suffix("").as_posix().replace("/", ".") for file in files]
        modules = [module.removesuffix(".__init__") for module in modules]
        title = f"grpo_lib.{name}"
        body = "\n\n".join(f".. automodule:: {module}" for module in modules)
        if len(modules) > 1:
            parts = [f"{module}\n{'-' * len(module)}\n\n.. automodule:: {module}" for module in modules[1:]]
            body = "\n\n".join([f".. automodule:: {modules[0]}", *parts])
        write(folder / "api" / f"{name}.rst", f"{title}\n{'=' * len(title)}\n\n{body}\n")
        write(beside(folder, f"api/{name}"), site_markdown.of_modules(title, files))
    return listed


def write_settings(language: Language, all_pages: dict[str, tuple[Language, str]], folder: Path) -> None:
    """site.json, of which docs/site/conf.py makes the tools of each page."""
    other = next(one for one in LANGUAGES if one is not language)
    others = {page: other.prefix + page + ".html" for of, page in all_pages.values() if of is other}
    own = [(place, page) for place, (of, page) in all_pages.items() if of is language]
    counterparts = {page: others.get(page) for _, page in own} | dict.fromkeys(api_pages(folder))
    student_build = {page: path for place, page in own if (path := student_path(place, language))}
    settings = {
        "prefix": language.prefix,
        "other_name": other.name,
        "other_code": other.code.replace("_", "-"),
        "other_home": f"{other.prefix}index.html",
        "tab": {"title": language.tab, "address": TAB, "language": language.code},
        "pages": counterparts,  # page → the same one in the other language, where there is one
        "repository": STUDENT_REPOSITORY,
        "student_build": student_build,
        "elsewhere": language.elsewhere,
    }
    write(folder / "site.json", json.dumps(settings, ensure_ascii=False, indent=1))


def api_pages(folder: Path) -> list[str]:
    return [f"api/{path.stem}" for path in sorted((folder / "api").glob("*.rst"))]


def student_path(place: str, language: Language) -> str | None:
    """Where the student build has a page's notebook; it has the lessons in English."""
    if place.startswith(language.exercises):
        return place.replace(language.exercises, language.files_of_students)
    if place.startswith(language.notebooks + "/"):
        return place.replace(language.notebooks, ENGLISH.notebooks)
    return None


def markdown_folder(folder: Path) -> Path:
    """Where the Markdown of these sources is: Sphinx would make pages of it within them."""
    return folder.with_name(f"{folder.name}-markdown")


def beside(folder: Path, page: str) -> Path:
    return markdown_folder(folder) / f"{page}.md"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def run_sphinx(language: Language, sources: Path, output: Path, root: Path) -> subprocess.Popen:
    """Start Sphinx for one language; a warning is an error."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-c", root / "docs" / "site"]
    command += [
        "-D",
        f"language={language.code}",
        "-D",
        f"html_title={language.title}",
        "-d",
        sources.with_name(f"{sources.name}-doctrees"),
    ]
    environment = os.environ | {"PYTHONPATH": str(root), "JUPYTER_PLATFORM_DIRS": "1"}
    return subprocess.Popen([*map(str, command), str(sources), str(output)], env=environment, cwd=root)


def remove_unused(made: Path) -> None:
    """Remove what no page loads: copies of the sources, and what the theme has for those who change it."""
    for name in ("jupyter_execute", "_sources", "zh_TW/_sources"):
        shutil.rmtree(made / name, ignore_errors=True)
    for pattern in ("*.map", "*webpack-macros.html", ".buildinfo"):
        for path in [*made.rglob(pattern)]:
            path.unlink()


def build(root: Path, output: Path) -> None:
    """Build the site into `output`, in place of an earlier one.

    Raises:
      CourseError: Sphinx warned, which is on stderr then, or this is a student's folder.  `output` is left as it was.
    """
    if not (root / "teaching").is_dir():
        raise CourseError(
            "make site needs teaching/, which a student's folder does not have; build it in the whole course"
        )
    work = root / ".cache" / "site"
    shutil.rmtree(work, ignore_errors=True)
    with contextlib.redirect_stdout(io.StringIO()):
        translations.run("build", root)
    all_pages = {place: (language, page) for language in LANGUAGES for place, page in pages_of(language, root).items()}
    made = work / "html"
    running = []
    for language in LANGUAGES:
        sources = work / language.code
        if language is ENGLISH:
            write_api(sources, root)
        write_sources(language, all_pages, root, sources)
        write_settings(language, all_pages, sources)
        shutil.copytree(root / "docs" / "site" / "locales", sources / "locales")  # Sphinx compiles them there
        running.append(run_sphinx(language, sources, made / language.prefix, root))
    codes = [process.wait() for process in running]
    if any(codes):
        raise CourseError("Sphinx found what is written above; build/site is as it was")
    remove_unused(made)
    for language in LANGUAGES:
        shutil.copytree(markdown_folder(work / language.code), made / language.prefix, dirs_exist_ok=True)
    write(made / TAB, tab.page({language.code: f"{language.prefix}index.html" for language in LANGUAGES}))
    write(made / "llms.txt", site_markdown.index(made, root))
    (made / ".nojekyll").touch()  # GitHub Pages would leave out folders that begin with _
    shutil.rmtree(output, ignore_errors=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    made.rename(output)


def main() -> None:
    root = repo_root()
    output = root / "build" / "site"
    start = time.monotonic()
    try:
        build(root, output)
    except CourseError as error:
        sys.exit(f"error: {error}")
    pages = len(list(output.rglob("*.html")))
    files = [path for path in output.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 1e6
    seconds = time.monotonic() - start
    print(
        f"build/site: {pages} pages, {len(files)} files, {size:.1f} MB, in {seconds:.0f} s; open build/site/index.html"
    )
    if not STUDENT_REPOSITORY:
        print("no address yet: SITE_STUDENT_REPOSITORY=OWNER/NAME make site adds the badges (docs/CONTRIBUTING.md)")


if __name__ == "__main__":
    main()
