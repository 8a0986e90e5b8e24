"""`make lab` in a real browser: notebook 00 is opened and run to the end from the menu, as a learner would."""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from grpo_lib import course

SECONDS = 480  # it takes about 40; a test that waits must not fail because the machine has other work to do

# The notebook as JupyterLab holds it.  Not the file, which would have to be saved again and again, and a save that
# overtakes another makes JupyterLab ask which of the two to keep; not the page, which draws only the cells in view.
CELLS = """() => window.jupyterapp.shell.currentWidget.content.model.toJSON().cells
    .filter(cell => cell.cell_type === "code")
    .map(cell => ({source: [].concat(cell.source).join(""), count: cell.execution_count, outputs: cell.outputs}))"""


@pytest.fixture
def notebook(root: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of notebook 00, without outputs, that writes into a run directory of its own."""
    run = f"lab-{secrets.token_hex(4)}"
    copy = course.read_notebook(root / "notebooks" / "00_setup.ipynb")
    course.set_parameters(copy, {"RUN": run})
    path = tmp_path / "lab" / "00_setup.ipynb"
    path.parent.mkdir()
    nbformat.write(copy, path)
    yield path
    shutil.rmtree(root / "runs" / run, ignore_errors=True)


@contextlib.contextmanager
def jupyterlab(folder: Path, state: Path) -> Iterator[str]:
    """Serve `folder` with JupyterLab on a free port of this machine; yields the address with its token."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_WORKSPACES_DIR")
    environment = {**os.environ, **{name: str(state / name.lower()) for name in names}}
    options = [
        "--no-browser",
        "--allow-root",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        "--LabApp.expose_app_in_browser=True",  # for CELLS
        f"--IdentityProvider.token={token}",
        f"--ServerApp.root_dir={folder}",
    ]
    with open(state / "server.log", "wb") as log:
        command = [sys.executable, "-m", "jupyterlab", *options]
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        for _ in range(120):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api?token={token}", timeout=2).close()
                break
            assert server.poll() is None, (state / "server.log").read_text()
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/lab/tree/{{}}?token={token}&reset"
    finally:
        server.terminate()  # the server takes its kernels with it
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(20)
        server.kill()


@pytest.mark.browser
@pytest.mark.slow
def test_notebook_00_runs_to_the_end_from_the_menu(chromium: str, notebook: Path, tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    with jupyterlab(notebook.parent, tmp_path) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(address.format(notebook.name))
        # The kernel is the one that the notebook names: no dialog asks for another.
        page.locator(".jp-Toolbar-kernelName", has_text="GRPO course").wait_for(timeout=60_000)
        page.locator(".jp-Notebook-ExecutionIndicator[data-status='idle']").wait_for(timeout=60_000)
        assert page.locator(".jp-Dialog").count() == 0

        run_all_from_the_menu(page)
        counts = wait_until_executed(page)
        page.get_by_role("menuitem", name="File", exact=True).click()
        page.locator(".lm-Menu-item[data-command='docmanager:save']").click()
        page.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty", timeout=60_000)
        assert page.locator(".jp-Dialog").count() == 0
        browser.close()
    assert counts == list(range(1, len(counts) + 1))
    saved = nbformat.read(notebook, as_version=4).cells
    assert [cell.execution_count for cell in saved if cell.cell_type == "code" and cell.source.strip()] == counts


def run_all_from_the_menu(page) -> None:
    """Run → Run All Cells.  A slow JupyterLab can swallow the click: then a person clicks again, and so does this."""
    for _ in range(4):
        page.locator(".jp-Notebook .jp-Cell").first.click()  # the menu acts on the tab that has the focus
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        for _ in range(15):
            page.wait_for_timeout(1000)
            waiting = page.locator(".jp-InputPrompt", has_text="[*]").count()
            if waiting or executed(page)[0] is not None:
                return
    raise AssertionError(f"Run All Cells in the menu did not start the notebook; {what_the_page_shows(page)}")


def executed(page) -> list[int | None]:
    """The execution count of each code cell, None where it has not run.  A cell that raised fails the test at once."""
    cells = [cell for cell in page.evaluate(CELLS) if cell["source"].strip()]
    for output in (output for cell in cells for output in cell["outputs"]):
        assert output["output_type"] != "error", f"{output['ename']}: {output['evalue']}"
    return [cell["count"] for cell in cells]


def wait_until_executed(page) -> list[int]:
    """Wait until the last code cell has run; returns the execution counts."""
    deadline = time.monotonic() + SECONDS
    while None in (counts := executed(page)):
        assert time.monotonic() < deadline, f"after {SECONDS} s: {counts}; {what_the_page_shows(page)}"
        page.wait_for_timeout(1000)
    return counts


def what_the_page_shows(page) -> str:
    """For the message of a failure: the state of the kernel, and any dialog that waits for an answer."""
    state = page.locator(".jp-Notebook-ExecutionIndicator").first.get_attribute("data-status")
    return f"kernel {state}, dialogs {page.locator('.jp-Dialog').all_inner_texts()}"
