"""`make site`: its links, what it may not hold, and its pages in a real browser.

The browser leaves a picture of each page it opened in .cache/screenshots/.
"""

import functools
import html.parser
import json
import posixpath
import re
import subprocess
import threading
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

import build_site
import pytest
import site_markdown
from helpers import without_make
from playwright.sync_api import expect

BUILT = pytest.mark.long(minutes=3)
SIZES = {"wide": (1280, 900), "narrow": (390, 844)}
PAGES = (
    "index",
    "zh_TW/index",
    "notebooks/00_setup",
    "notebooks/01_checkpoint_conversion",
    "notebooks/02_reward_design",
    "notebooks/03_policy_update",
    "notebooks/04_grpo_training",
    "notebooks/05_evaluation",
    "notebooks/further/06_on_a_tpu",
    "notebooks/further/07_policy_loss_kernel",
    "notebooks/further/08_competition_math",
    "notebooks/further/09a_which_algorithm",
    "notebooks/further/09b_how_to_compare",
    "zh_TW/notebooks/03_policy_update",
    "exercises/03_policy_update",
    "api/rewards",
    "docs/published",
    "readme",
)
SECRET = re.compile(r"(?s)### BEGIN (SOLUTION|HIDDEN TESTS)(.*?)### END \1")


# --- Without a build ------------------------------------------------------------------------------------------


def lesson(*texts: str) -> list[dict]:
    return [{"id": f"cell-{number}", "cell_type": "markdown", "source": text} for number, text in enumerate(texts)]


def test_exercises_stand_at_the_end_of_their_section() -> None:
    cells = lesson("# T", "## 1. First", "### Inner", "text", "## 2. Second", "the end")
    exercises = [
        build_site.Exercise("1.1 A", "★", "First"),
        build_site.Exercise("1.2 B", "★", "Inner"),
        build_site.Exercise("2.1 C", "★", "Second"),
    ]
    made = build_site.insert_exercises(cells, exercises, "../exercises/x.ipynb", "Exercises")
    shown = [re.search(r"\d\.\d", cell["source"])[0] if ":::" in cell["source"] else cell["source"] for cell in made]
    assert shown == ["# T", "## 1. First", "### Inner", "text", "1.2", "1.1", "## 2. Second", "the end", "2.1"]
    assert "(../exercises/x.ipynb#11-a)" in made[5]["source"]


def test_an_exercise_without_its_section_is_an_error() -> None:
    with pytest.raises(build_site.CourseError, match="no section “Gone”"):
        build_site.insert_exercises(lesson("# T"), [build_site.Exercise("1.1 A", "★", "Gone")], "x", "Exercises")


@pytest.mark.parametrize(("repository", "shown"), [("", "a recipe"), ("o/n", "(https://github.com/o/n/blob/main/reci")])
def test_a_link_leads_to_a_page_or_to_the_repository_or_is_text(root, tmp_path, monkeypatch, repository, shown) -> None:
    monkeypatch.setattr(build_site, "REPOSITORY", repository)
    pages = {place: (build_site.ENGLISH, page) for place, page in build_site.pages_of(build_site.ENGLISH, root).items()}
    links = build_site.Links(root, pages, "docs/tpu.md", tmp_path)
    text = links.rewrite(
        "[a recipe](../recipes/tiny-cpu.yaml) [07](../notebooks/further/07_policy_loss_kernel.ipynb#The-kernel) "
        "[here](#a-b) [up](../README.md) [web](https://example.org) `f[0](x)`\n```\n[code](../README.md)\n```\n"
    )
    assert shown in text
    assert ("[a recipe]" in text) == bool(repository)
    for kept in (
        "[07](../notebooks/further/07_policy_loss_kernel.ipynb#the-kernel)",
        "[here](#a-b) [up](../readme.md) [web](https://example.org) `f[0](x)`\n```\n[code](../README.md)\n```\n",
    ):
        assert kept in text


def test_a_notebook_as_markdown_has_its_code_outputs_and_figures_in_words() -> None:
    outputs = [
        {"output_type": "stream", "text": ["18\n"]},
        {"output_type": "display_data", "data": {"text/html": "<p>", "text/markdown": "| a |", "text/plain": "T"}},
        {"output_type": "display_data", "data": {"image/png": "x"}, "metadata": {"image/png": {"alt": "Bars."}}},
        {"output_type": "execute_result", "data": {"text/plain": "<object at 0x>"}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# T [b](b.ipynb#c)"]},
        {"cell_type": "code", "source": "1", "outputs": outputs},
    ]
    found = site_markdown.of_notebook({"cells": cells})
    assert found == "# T [b](b.md#c)\n\n```python\n1\n```\n\n```text\n18\n```\n\n| a |\n\n*Figure: Bars.*\n"


# --- The build ------------------------------------------------------------------------------------------------


class Reader(html.parser.HTMLParser):
    """What a page refers to, the names of its elements, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()  # what a browser gets without being asked
        self.ids: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids |= {value for name in ("id", "name") if (value := given.get(name))}
        if address := given.get("src"):
            self.loaded.add(address)
        if address := given.get("href"):
            (self.links if tag == "a" else self.loaded).add(address)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


@dataclass
class Site:
    folder: Path
    said: str
    pages: dict[str, Reader] = field(default_factory=dict)


@pytest.fixture(scope="module")
def site(root: Path) -> Site:
    done = subprocess.run(["make", "site"], cwd=root, capture_output=True, text=True, env=without_make())
    assert done.returncode == 0, done.stderr[-3000:]
    made = Site(root / "build" / "site", done.stdout + done.stderr)
    for path in sorted(made.folder.rglob("*.html")):
        reader = Reader()
        reader.feed(path.read_text(encoding="utf-8"))
        made.pages[path.relative_to(made.folder).as_posix()] = reader
    return made


@BUILT
def test_no_warning_and_every_link_of_the_site_leads_somewhere(site) -> None:
    assert "WARNING" not in site.said
    assert len(site.pages) > 70
    broken = []
    for name, page in site.pages.items():
        for address in page.links | page.loaded:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (
                posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(parts.path))) if parts.path else name
            )
            if not (site.folder / target).is_file():
                broken.append(f"{name}: {address}")
            elif target == build_site.TAB:
                settings = dict(parse_qsl(parts.fragment))  # its fragment is no place in it
                if settings.keys() - {"lang"}:
                    broken.append(f"{name}: {address} (no such setting)")
            elif parts.fragment and target in site.pages and unquote(parts.fragment) not in site.pages[target].ids:
                broken.append(f"{name}: {address} (no such place)")
    assert broken == []


@BUILT
def test_a_table_of_an_output_is_a_table_and_no_line_of_bars(site) -> None:
    rule = re.compile(r"\|(:?-{3,}:?\|){2,}")  # below the head of a Markdown table
    told = [path.name for path in site.folder.rglob("*.html") if rule.search(path.read_text(encoding="utf-8"))]
    assert told == []


@BUILT
def test_nothing_is_loaded_from_elsewhere(site) -> None:
    foreign = {one for page in site.pages.values() for one in page.loaded if urlsplit(one).netloc}
    assert foreign == set()
    for path in site.folder.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", path.read_text(encoding="utf-8")), path.name


@BUILT
def test_every_page_is_there_as_markdown_and_llms_txt_lists_them(site) -> None:
    listed = re.findall(r"\]\((.+?\.md)\)", (site.folder / "llms.txt").read_text(encoding="utf-8"))
    assert len(listed) > 60 and all((site.folder / name).is_file() for name in listed)
    technical = {"search", "genindex", "py-modindex", Path(build_site.TAB).stem}
    pages = {name.removesuffix(".html") for name in site.pages if Path(name).stem not in technical}
    assert [name for name in pages if not (site.folder / f"{name}.md").is_file()] == []


@BUILT
def test_no_solution_and_no_hidden_test_is_on_the_site(root, site) -> None:
    secret, public = [], []
    for path in [*(root / "teaching" / "exercises").glob("*.ipynb"), *(root / "teaching/assignment-a").glob("*.ipynb")]:
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            source = "".join(cell["source"])
            secret += [line for _, part in SECRET.findall(source) for line in part.splitlines()]
            public.append(SECRET.sub("", source))
    for path in [*root.glob("notebooks/**/*.ipynb"), *root.glob("grpo_lib/**/*.py")]:
        text = path.read_text(encoding="utf-8")
        cells = json.loads(text)["cells"] if path.suffix == ".ipynb" else [{"source": text}]
        public += ["".join(cell["source"]) for cell in cells]
    known = squeezed("\n".join(public))
    lines = {squeezed(line) for line in secret}
    lines = {line for line in lines if len(line) >= 25 and line not in known}
    assert len(lines) > 300
    shown = [squeezed("".join(page.text)) for page in site.pages.values()]
    shown += [squeezed(path.read_text(encoding="utf-8")) for path in site.folder.rglob("*.md")]
    assert any(squeezed("def score_gradient(logits, actions, rewards, baseline):") in text for text in shown)
    assert {line for line in lines if any(line in text for text in shown)} == set()


@BUILT
def test_each_exercise_is_linked_from_its_lesson(root, site) -> None:
    for prefix in ("", "zh_TW/"):
        linked = {
            link.rpartition("/exercises/")[2]
            for name, page in site.pages.items()
            if name.startswith(f"{prefix}notebooks/")
            for link in page.links
            if "/exercises/" in link and "#" in link
        }
        assert len(linked) == sum(len(list(build_site.exercises_of(read(path)))) for path in exercises(root))


def exercises(root: Path) -> list[Path]:
    return sorted((root / "teaching" / "exercises").glob("*.ipynb"))


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


# --- In a browser ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(site):
    """The site's address, on this machine."""
    handler = functools.partial(Silent, directory=str(site.folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def new_page(browser, address):
    """Makes pages; at the end none may have complained, or asked another machine."""
    troubles, requests, contexts = [], [], []

    def make(**options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda said: troubles.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("response", lambda got: troubles.append(f"{got.status} {got.url}") if got.status >= 400 else None)
        page.on("request", lambda request: requests.append(request.url))
        return page

    yield make
    for context in contexts:
        context.close()
    assert troubles == []
    assert [url for url in requests if not url.startswith((address, "data:", "about:", "blob:"))] == []


@BUILT
@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_pages_fit_and_their_formulas_are_drawn(root, address, new_page, size, scheme) -> None:
    width, height = SIZES[size]
    page = new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    pictures = root / ".cache" / "screenshots"
    formulas = 0
    for name in PAGES:
        page.goto(f"{address}/{name}.html")
        expect(page.locator("html")).to_have_attribute("data-theme", scheme)
        page.screenshot(path=pictures / f"site-{name.replace('/', '-')}-{size}-{scheme}.png")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        drawn = page.locator("main .math")
        formulas += drawn.count()
        assert page.locator("main .math .katex-html").count() == drawn.count(), name
        assert page.locator(".katex-error").count() == 0
        # 01 has its numbers in its first sentence; the others begin with a picture, or with what a cell computes.
        if "/notebooks/" in f"/{name}" and "/01_" not in name:
            assert page.locator("article .cell_output").first.bounding_box()["y"] < height - 100, name
    assert formulas > 100
    fonts = "document.fonts.ready.then(all => [...all].filter(f => f.status == 'loaded').map(f => f.family))"
    page.goto(f"{address}/notebooks/03_policy_update.html")
    assert "KaTeX_Math" in page.evaluate(fonts)


@BUILT
@pytest.mark.browser
@pytest.mark.parametrize(
    ("folder", "words", "title"), [("", "clipping", "03 · From rewards"), ("zh_TW/", "優勢值", "從獎勵到更新")]
)
def test_search_finds_a_lesson_in_its_language(address, new_page, folder, words, title) -> None:
    page = new_page()
    page.goto(f"{address}/{folder}search.html?q={words}")
    expect(page.locator("#search-results li").filter(has_text=title).first).to_be_visible()


@BUILT
def test_around_a_chinese_page_are_the_words_of_taiwan(site) -> None:
    text = (site.folder / "zh_TW/notebooks/03_policy_update.html").read_text(encoding="utf-8")
    assert 'title="上一頁"' in text and 'title="亮色或暗色"' in text
    assert not re.findall("上一页|下一页|Color mode|System Settings", text)


@BUILT
@pytest.mark.browser
def test_a_page_leads_to_the_same_page_in_the_other_language(address, new_page) -> None:
    page = new_page()
    page.goto(f"{address}/notebooks/03_policy_update.html")
    page.get_by_role("link", name="繁體中文").first.click()
    expect(page.locator("html")).to_have_attribute("lang", "zh-TW")
    expect(page.locator("h1").first).to_contain_text("從獎勵到更新")
    page.get_by_role("link", name="English").first.click()
    expect(page.locator("h1").first).to_contain_text("From rewards to the update")


@BUILT
@pytest.mark.browser
@pytest.mark.parametrize(
    ("start", "name", "title"),
    [
        ("index", "GRPO in a tab", "GRPO in this tab"),
        ("zh_TW/notebooks/00_setup", "在分頁裡看 GRPO", "在這個分頁裡看 GRPO"),
    ],
)
def test_the_model_learns_in_a_page_of_the_site(address, new_page, start, name, title) -> None:
    page = new_page()
    page.goto(f"{address}/{start}.html")
    page.get_by_role("link", name=name, exact=True).first.click()
    expect(page.locator("h1")).to_have_text(title)
    page.locator("#one:not([disabled])").click()
    expect(page.locator("#rows tr")).to_have_count(8, timeout=60_000)
    page.locator("#course").click()
    expect(page).to_have_url(f"{address}/{'zh_TW/' if start.startswith('zh') else ''}index.html")
