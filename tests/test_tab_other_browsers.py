"""The page in which the model learns, in Firefox and in WebKit: fifty steps, from a file and from a server.

Playwright drives its own builds of these two, and nobody has those. So Firefox is driven by WebDriver BiDi, which it
speaks itself, and WebKit by WebKitWebDriver, on a display that nobody sees. In Debian and Ubuntu:

    apt-get install firefox-esr webkit2gtk-driver xvfb
"""

import functools
import http.server
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tab
import websocket

pytestmark = pytest.mark.nightly

MINI_BROWSER = "/usr/lib/*/webkit2gtk-4.*/MiniBrowser"
ENDED = "the run has ended"


def _wait_for(ask: Callable[[], Any], seconds: float) -> Any:
    """What `ask` says as soon as that is something; fails after this many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if said := ask():
            return said
        time.sleep(0.25)
    raise TimeoutError(f"nothing after {seconds} s")


def _program(*names: str) -> str:
    found = [path for name in names if (path := shutil.which(name))]
    if not found:
        pytest.skip(f"browser: no {names[0]}; see the first lines of this file")
    return found[0]


class Firefox:
    """Firefox without a window.  `requests` and `console` are what it has asked for and said."""

    def __init__(self, folder: Path) -> None:
        program = _program("firefox-esr", "firefox")
        log = folder / "firefox.log"
        command = [program, "--headless", "--no-remote", "--profile", str(folder), "--remote-debugging-port", "0"]
        with log.open("w") as said:
            self.process = subprocess.Popen([*command, "about:blank"], stdout=said, stderr=said)
        self.requests: list[str] = []
        self.console: list[str] = []
        self.sent = 0
        listening = "WebDriver BiDi listening on "
        _wait_for(lambda: listening in log.read_text(), 60)
        address = log.read_text().partition(listening)[2].split()[0]
        self.socket = websocket.create_connection(f"{address}/session", suppress_origin=True, timeout=120)
        self.version = self._ask("session.new", capabilities={})["capabilities"]["browserVersion"]
        self._ask("session.subscribe", events=["log.entryAdded", "network.beforeRequestSent"])
        self.context = self._ask("browsingContext.getTree")["contexts"][0]["context"]

    def _ask(self, method: str, **parameters: Any) -> Any:
        self.sent += 1
        self.socket.send(json.dumps({"id": self.sent, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == self.sent:
                assert message["type"] == "success", message
                return message["result"]
            self._note(message["method"], message["params"])

    def _note(self, event: str, of: dict[str, Any]) -> None:
        context = of.get("source", of).get("context")
        if event == "network.beforeRequestSent" and context == self.context:  # the browser itself asks for updates
            self.requests.append(of["request"]["url"].partition("#")[0])
        if event == "log.entryAdded" and context == self.context:
            self.console.append(of["text"])

    def open(self, address: str) -> None:
        self._ask("browsingContext.navigate", context=self.context, url=address, wait="complete")

    def value(self, expression: str) -> Any:
        of = {"target": {"context": self.context}, "awaitPromise": False}
        return self._ask("script.evaluate", expression=expression, **of)["result"].get("value")

    def close(self) -> None:
        self.socket.close()
        self.process.terminate()
        self.process.wait(30)


class WebKit:
    """WebKitGTK's small browser.  Its driver does not tell of requests, nor what the page says on the console."""

    requests: list[str] | None = None
    console: list[str] | None = None

    def __init__(self, folder: Path) -> None:
        driver, screen = _program("WebKitWebDriver"), _program("Xvfb")
        browser = next(iter(sorted(Path("/").glob(MINI_BROWSER.removeprefix("/")))), None)
        if browser is None:
            pytest.skip(f"browser: no {MINI_BROWSER}; see the first lines of this file")
        display = folder / "display"
        with display.open("w") as said:
            command = [screen, "-displayfd", "1", "-screen", "0", "1280x900x24"]
            self.screen = subprocess.Popen(command, stdout=said, stderr=subprocess.DEVNULL)
        number = _wait_for(lambda: display.read_text().strip(), 30)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {"DISPLAY": f":{number}", "HOME": str(folder), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
        self.driver = subprocess.Popen([driver, f"--port={port}"], env=environment)
        self.address = f"http://127.0.0.1:{port}/session"
        _wait_for(lambda: _answers(port), 30)
        options = {"binary": str(browser), "args": ["--automation"]}
        session = self._ask("", {"capabilities": {"alwaysMatch": {"webkitgtk:browserOptions": options}}})
        self.address += f"/{session['sessionId']}"
        self.version = session["capabilities"]["browserVersion"]

    def _ask(self, path: str, given: dict[str, Any] | None, method: str = "POST") -> Any:
        body = None if given is None else json.dumps(given).encode()
        request = urllib.request.Request(self.address + path, body, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def open(self, address: str) -> None:
        self._ask("/url", {"url": address})

    def value(self, expression: str) -> Any:
        return self._ask("/execute/sync", {"script": f"return {expression};", "args": []})

    def close(self) -> None:
        self._ask("", None, "DELETE")
        for process in (self.driver, self.screen):
            process.terminate()
            process.wait(30)


def _answers(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(params=[Firefox, WebKit])
def other_browser(request, tmp_path) -> Iterator[Firefox | WebKit]:
    browser = request.param(tmp_path)
    yield browser
    browser.close()


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *said: object) -> None:
        pass


@pytest.fixture(params=["file", "http"])
def address(request, tmp_path) -> Iterator[str]:
    """The page's address, from the disk and from a server."""
    file = tmp_path / "page" / "grpo-in-a-tab.html"
    file.parent.mkdir()
    file.write_text(tab.page())
    if request.param == "file":
        yield file.as_uri()
        return
    handler = functools.partial(Silent, directory=str(file.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/{file.name}"
        server.shutdown()


def _processor_seconds() -> float:
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return sum(time.user + time.system for time in times)


def test_fifty_steps_teach_the_model_in_other_browsers(other_browser, address):
    other_browser.open(f"{address}#lang=en")
    shown = "document.getElementById('{}').textContent".format
    _wait_for(lambda: not other_browser.value("document.getElementById('train').disabled"), 60)
    before = _processor_seconds()
    other_browser.value("document.getElementById('train').click()")
    _wait_for(lambda: ENDED in other_browser.value(shown("status")), 600)
    seconds = _processor_seconds() - before
    reading, figures = other_browser.value(shown("reading")), other_browser.value(shown("figures"))
    name = f"{type(other_browser).__name__} {other_browser.version}"
    print(f"{name}, {address.partition(':')[0]}: {reading} {figures} {seconds:.0f} s of processor time")
    assert int(reading.split(",")[1].split("%")[0]) >= 90
    assert int(figures.split(" MB")[0].split()[-1]) < 250
    if isinstance(other_browser, Firefox):
        assert other_browser.console == []
        # It tells of no request for a file.
        assert {url for url in other_browser.requests if not url.startswith(("blob:", "data:"))} <= {address}
