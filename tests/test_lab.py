"""`make lab` in a real browser: notebook 00 is opened and run to the end from the menu, as a learner would."""

import contextlib
import json
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

SECONDS = 240


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
        cells = wait_until_executed(page, notebook)
        page.screenshot(path=str(tmp_path / "lab.png"))
        browser.close()
    counts = [cell["execution_count"] for cell in cells]
    assert counts == list(range(1, len(cells) + 1))


def run_all_from_the_menu(page) -> None:
    """Run → Run All Cells.  A slow JupyterLab can swallow the click: then a person clicks again, and so does this."""
    from playwright.sync_api import TimeoutError as NothingHappened

    for _ in range(4):
        page.locator(".jp-Notebook .jp-Cell").first.click()  # the menu acts on the tab that has the focus
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        with contextlib.suppress(NothingHappened):
            page.locator(".jp-Notebook-ExecutionIndicator[data-status='busy']").wait_for(timeout=15_000)
            return
    raise AssertionError("Run All Cells in the menu did not start the notebook")


def wait_until_executed(page, notebook: Path) -> list[dict]:
    """Save every second, as one does with Ctrl+S, until the saved file shows the last code cell executed.

    The file is looked at, and not the page, because JupyterLab draws only the cells that are in view.
    """
    deadline = time.monotonic() + SECONDS
    again = deadline - SECONDS / 2
    while time.monotonic() < deadline:
        page.wait_for_timeout(1000)
        page.keyboard.press("Control+s")
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code" and "".join(cell["source"]).strip()]
        errors = [output for cell in code for output in cell["outputs"] if output["output_type"] == "error"]
        assert not errors, f"{errors[0]['ename']}: {errors[0]['evalue']}"
        if code[-1]["execution_count"] is not None:
            return code
        if time.monotonic() > again and all(cell["execution_count"] is None for cell in code):
            run_all_from_the_menu(page)  # the kernel was busy with its own start, and not with the notebook
            again = deadline
    raise AssertionError(f"notebook 00 was not executed to the end within {SECONDS} s")
