"""JupyterLab as people open it: `make lab`, in the course and in a student's folder, with a real browser.

Each test leaves a picture of what it saw in .cache/screenshots/.
"""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from helpers import free_port, wait_for
from playwright.sync_api import Browser, Locator, Page, Request, Response, expect, sync_playwright

pytestmark = [pytest.mark.browser, pytest.mark.long(minutes=4)]

TOKEN = "of-the-test"
SECONDS = 60  # for the page, where the machine has other work
# The tests save nothing: the course's notebooks are tracked files.  A closed notebook ends its kernel.
SETTINGS = {
    "docmanager-extension/plugin": {"autosave": False},
    "notebook-extension/tracker": {"kernelShutdown": True},
}
OPEN = ".jp-NotebookPanel:not(.lm-mod-hidden)"
# Links as they are in the notebook; JupyterLab sets the address of the file in their place, soon after it shows them.
RELATIVE = 'a[href]:not([href^="http"], [href^="#"]), img:not([src^="http"], [src^="data:"])'
ERROR = '[data-mime-type="application/vnd.jupyter.stderr"], [data-mime-type="application/vnd.jupyter.error"]'
ADVANTAGES = """import numpy as np


def advantages(rewards, G, eps=1e-6):
    groups = np.reshape(np.asarray(rewards, float), (-1, G))
    deviations = groups.std(axis=1, ddof=1, keepdims=True)
    return np.ravel((groups - groups.mean(axis=1, keepdims=True)) / (deviations + eps))
"""


@dataclass
class Lab:
    """`make lab` in `folder`, at `address`; `troubles` collects what went wrong between it and the page."""

    folder: Path
    address: str
    workspaces: Path  # where JupyterLab keeps which notebooks are open
    troubles: list[str] = field(default_factory=list)

    def notebooks(self, *patterns: str) -> list[str]:
        paths = [path for pattern in patterns for path in self.folder.glob(pattern)]
        paths = [path for path in paths if ".ipynb_checkpoints" not in path.parts]  # JupyterLab's own copies
        return sorted(path.relative_to(self.folder).as_posix() for path in paths)


# --- The servers and the browser ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Path:
    """A folder with SETTINGS in the place of a user's own."""
    folder = tmp_path_factory.mktemp("settings")
    for name, values in SETTINGS.items():
        path = folder / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values), encoding="utf-8")
    return folder


def environment(root: Path, **values: str) -> dict[str, str]:
    """The environment for make in another folder: no options of a make around this test, and this course's packages."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return {"UV_CACHE_DIR": str(root / ".cache" / "uv"), **variables, **values}


def serve(root: Path, folder: Path, settings: Path) -> Iterator[Lab]:
    """Run `make lab` in `folder`; what JupyterLab keeps goes to `settings` and to the folder's .cache."""
    port = free_port()
    workspaces = settings / folder.name
    variables = environment(
        root,
        BROWSER="true",  # the program `true`, in the place of a browser
        GRPO_RUN="jupyterlab-test",
        JUPYTER_PORT=str(port),
        JUPYTER_PORT_RETRIES="0",
        JUPYTER_TOKEN=TOKEN,
        JUPYTERLAB_SETTINGS_DIR=str(settings),
        JUPYTERLAB_WORKSPACES_DIR=str(workspaces),
    )
    output = settings / f"{folder.name}.log"
    with output.open("wb") as log:
        # In a session of its own, so that all of it can be ended.
        server = subprocess.Popen(
            ["make", "lab"], cwd=folder, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            address = f"http://localhost:{port}/lab/tree/notebooks/00_setup.ipynb"
            ready = wait_for(lambda: address in output.read_text() or server.poll() is not None, seconds=200, pause=0.5)
            assert ready, output.read_text()[-3000:]
            assert server.poll() is None, output.read_text()[-3000:]
            yield Lab(folder, f"http://localhost:{port}", workspaces)
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(180)  # it ends its kernels first
            shutil.rmtree(folder / "runs" / "jupyterlab-test", ignore_errors=True)


@pytest.fixture(scope="module")
def course(root, settings) -> Iterator[Lab]:
    """The course's own folder."""
    yield from serve(root, root, settings)


@pytest.fixture(scope="module")
def student(root, settings, tmp_path_factory) -> Iterator[Lab]:
    """A student's folder, with an environment of its own."""
    folder = tmp_path_factory.mktemp("class") / "student"
    subprocess.run(["make", "student", f"OUT={folder}"], cwd=root, env=environment(root), check=True)
    subprocess.run(["make", "setup"], cwd=folder, env=environment(root), check=True)
    yield from serve(root, folder, settings)
    shutil.rmtree(folder)  # 2 GB


@pytest.fixture(scope="module")
def browser(chromium) -> Iterator[Browser]:
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=["course", "student"])
def lab(request) -> Lab:
    return request.getfixturevalue(request.param)


# The student's notebooks are the course's: what takes minutes is tried in their folder at night.
both_at_night = pytest.mark.parametrize(
    "lab", ["course", pytest.param("student", marks=pytest.mark.nightly)], indirect=True
)
# And exercises are solved in theirs.
course_at_night = pytest.mark.parametrize(
    "lab", [pytest.param("course", marks=pytest.mark.nightly), "student"], indirect=True
)


@pytest.fixture
def page(root, lab, browser, request) -> Iterator[Page]:
    """JupyterLab's first page; at the end no request may have failed, and no dialog may be open."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(1000 * SECONDS)
    expect.set_options(timeout=1000 * SECONDS)
    lab.troubles.clear()
    page.on("response", lambda response: lab.troubles.extend(refused(response)))
    page.on("requestfailed", lambda request: lab.troubles.extend(failed(request)))
    page.on("pageerror", lambda error: lab.troubles.append(str(error)))
    page.goto(f"{lab.address}/?token={TOKEN}")
    page.locator(f"{OPEN} h1").first.wait_for()
    yield page
    folder = root / ".cache" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f"{re.sub(r'[^a-z]+', '-', request.node.name)}.png")
    dialogs = page.locator(".jp-Dialog").all_inner_texts()
    troubles = list(lab.troubles)
    kernels = f"{lab.address}/api/kernels"
    for kernel in page.request.get(kernels).json():
        page.request.delete(f"{kernels}/{kernel['id']}", headers={"Authorization": f"token {TOKEN}"})
    page.close()
    shutil.rmtree(lab.workspaces, ignore_errors=True)  # the next test begins as this one
    assert troubles == []
    assert dialogs == []


def failed(request: Request) -> list[str]:
    """What to report of a request without a response.

    One kind is JupyterLab's own: a picture in Markdown begins to load from an address relative to the page, and the
    request is taken back (ABORTED) when JupyterLab has set the address relative to the notebook.
    """
    if request.resource_type == "image" and request.failure == "net::ERR_ABORTED":
        return []
    return [f"{request.method} {request.url}: {request.failure}"]


def refused(response: Response) -> list[str]:
    """What to report of a response: all from 400 on.  JupyterLab itself asks for nothing that is not there."""
    return [f"{response.status} {response.request.method} {response.url}"] if response.status >= 400 else []


# --- What a reader does ---------------------------------------------------------------------------------------


def menu(page: Page, name: str, entry: str) -> None:
    page.locator(".lm-MenuBar-item", has_text=re.compile(f"^{name}$")).click()
    page.locator(".lm-Menu-item", has_text=re.compile(f"^{entry}")).click()


def tab_of(path: str) -> str:
    """The selector of a notebook's tab.  Lessons and exercises have the same names."""
    return f'.lm-DockPanel .lm-TabBar-tab[title*="Path: {path}"]'


def open_notebook(page: Page, path: str) -> Locator:
    """Open a notebook by its path below the folder that JupyterLab shows, and return its panel."""
    menu(page, "File", "Open from Path")
    page.locator(".jp-Dialog input").fill(path)
    page.keyboard.press("Enter")
    expect(page.locator(f"{tab_of(path)}.lm-mod-current")).to_be_visible()
    panel = page.locator(OPEN)
    panel.locator("h1").first.wait_for()
    expect(panel.locator(".jp-Notebook-ExecutionIndicator")).to_have_attribute("data-status", "idle")
    return panel


def close_notebook(page: Page, path: str) -> None:
    """Close a notebook and save nothing: JupyterLab may ask, as it notes the kernel's version in the notebook."""
    tab = page.locator(tab_of(path))
    tab.locator(".lm-TabBar-tabCloseIcon").click()
    discard = page.get_by_role("button", name="Discard")
    asked_or_closed = "tab => document.querySelector('.jp-Dialog') || !document.querySelector(tab)"
    page.wait_for_function(asked_or_closed, arg=tab_of(path))
    if discard.count():
        discard.click()
    expect(tab).to_have_count(0)


def run_cell(panel: Locator, cell: Locator) -> None:
    """Run a cell by the keyboard, and wait until it has ended."""
    cell.locator(".cm-content").click()
    panel.page.keyboard.press("Control+Enter")
    expect(cell.locator(".jp-InputPrompt")).to_have_text(re.compile(r"\[\d+\]:"))


# --- Tests ----------------------------------------------------------------------------------------------------


def test_first_page_and_folders(lab, page) -> None:
    assert urlsplit(page.url).path == "/lab/tree/notebooks/00_setup.ipynb"
    page.locator(".jp-BreadCrumbs-home").click()
    exercises = "exercises" if (lab.folder / "exercises").exists() else "teaching"
    for name in ("notebooks", "docs", "recipes", exercises):
        expect(page.locator(".jp-DirListing").get_by_text(name, exact=True)).to_be_visible()


@both_at_night
def test_all_notebooks_open_and_their_links_lead_somewhere(lab, page) -> None:
    names = lab.notebooks("notebooks/**/*.ipynb", "exercises/*.ipynb")
    assert len(names) >= 10
    headings: dict[str, set[str]] = {}  # of each notebook, as a link names them
    links: set[tuple[str, str]] = set()  # (notebook, address)
    broken = []
    for name in names:
        panel = open_notebook(page, name)
        rendered = panel.locator(".jp-MarkdownCell .jp-RenderedMarkdown")
        cells = json.loads((lab.folder / name).read_text(encoding="utf-8"))["cells"]
        expect(rendered).to_have_count(sum(cell["cell_type"] == "markdown" for cell in cells))
        expect(rendered.locator(RELATIVE)).to_have_count(0)
        headings[name] = set(
            rendered.locator("[data-jupyter-id]").evaluate_all("all => all.map(e => e.dataset.jupyterId)")
        )
        links |= {(name, link) for link in rendered.locator("a[href]").evaluate_all("all => all.map(e => e.href)")}
        pictures = panel.locator(".jp-RenderedMarkdown img, .jp-OutputArea-output img")
        widths = pictures.evaluate_all(
            "all => Promise.all(all.map(e => e.decode().then(() => e.naturalWidth, () => 0)))"
        )
        broken += [f"{name}: picture {number}" for number, width in enumerate(widths) if not width]
        outputs = panel.locator(".jp-OutputArea-output:visible:not(:has(img, svg, iframe))")
        expect(outputs.filter(has_not_text=re.compile(r"\S")), name).to_have_count(0)  # waits for what is drawn late
        close_notebook(page, name)
    files = {urldefrag(link).url for _, link in links if link.startswith(f"{lab.address}/files/")}
    statuses = {file: page.request.get(file).status for file in files}
    for name, link in sorted(links):
        file, heading = urldefrag(link)
        target = unquote(urlsplit(file).path).removeprefix("/files/").removeprefix("/lab/tree/")
        if link.startswith(lab.address) and statuses.get(file, 200) != 200:
            broken.append(f"{name}: {link} is {statuses[file]}")
        elif heading and target in headings and unquote(heading) not in headings[target]:
            broken.append(f"{name}: {target} has no heading {unquote(heading)}")
    assert len(statuses) >= 15
    assert broken == []


@both_at_night
def test_a_notebook_runs_to_its_end_from_the_menu(lab, page) -> None:
    panel = open_notebook(page, "notebooks/02_reward_design.ipynb")
    prompts = panel.locator(".jp-CodeCell .jp-InputPrompt")
    menu(page, "Run", "Run All Cells")
    waiting = prompts.filter(has_text="[*]")
    expect(waiting.first).to_be_visible()
    expect(waiting).to_have_count(0, timeout=300_000)
    assert panel.locator(ERROR).all_inner_texts() == []
    assert {re.sub(r"\d+", "n", text) for text in prompts.all_text_contents()} == {"[n]:"}


@course_at_night
def test_an_exercise_is_solved_in_the_page(lab, page) -> None:
    folder = "exercises" if (lab.folder / "exercises").exists() else "teaching/exercises"
    panel = open_notebook(page, f"{folder}/03_policy_update.ipynb")
    function = panel.locator(".jp-CodeCell").filter(has_text="def advantages(rewards, G, eps")
    check = panel.locator(".jp-CodeCell").filter(has_text="case(advantages, ([1.1, 0.1")
    run_cell(panel, check)
    assert "advantages" in check.locator(ERROR).inner_text()  # not defined yet
    function.locator(".cm-content").click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(ADVANTAGES)
    run_cell(panel, function)
    run_cell(panel, check)
    assert check.locator(ERROR).all_inner_texts() == function.locator(ERROR).all_inner_texts() == []
