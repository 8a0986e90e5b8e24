"""The page in which the model learns, in Chromium: it learns, collapses where it should, and withstands its readers."""

import functools
import http.server
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import tab
from playwright.sync_api import expect

pytestmark = [pytest.mark.browser, pytest.mark.long]
SEEDS = pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))])

ENDED = "the run has ended"


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("tab") / "grpo-in-a-tab.html"
    file.write_text(tab.page())
    return file


@pytest.fixture
def address(request, file) -> Iterator[str]:
    """The page as a file; with "http", from Python's own server, which must be asked for nothing else."""
    if getattr(request, "param", "file") == "file":
        yield file.as_uri()
        return
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *said):
            asked.append(self.path)

    handler = functools.partial(Handler, directory=str(file.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/{file.name}"
        server.shutdown()
    assert set(asked) == {f"/{file.name}"}


@pytest.fixture
def open_page(browser, address):
    """Opens the page with a fragment; at the end it must not have complained, nor asked for anything but itself."""
    troubles, requests, pages = [], [], []

    def make(fragment: str = "", **options):
        page = browser.new_page(**({"viewport": {"width": 1280, "height": 900}, "locale": "en-US"} | options))
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda request: requests.append(request.url.partition("#")[0]))
        page.goto(f"{address}#{fragment}")
        page.locator("#train:not([disabled])").wait_for()
        pages.append(page)
        return page

    make.requests = requests
    yield make
    assert troubles == []
    assert {url for url in requests if not url.startswith("blob:")} == {address}
    for page in pages:
        assert page.title() != "broken"
        page.close()


def _train_to_the_end(page, seconds: int = 500) -> float:
    """Press Train and wait; returns the accuracy that the page shows at the end."""
    page.locator("#train").click()
    expect(page.locator("#status")).to_contain_text(ENDED, timeout=seconds * 1000)
    return _accuracy(page)


def _accuracy(page) -> float:
    shown = page.locator("#reading").inner_text()  # Solved: 31 % before training, 94 % after step 50.
    return int(shown.split(",")[1].split("%")[0]) / 100


def _processor_seconds() -> float:
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return sum(time.user + time.system for time in times)


@SEEDS
@pytest.mark.parametrize("address", ["file", pytest.param("http", marks=pytest.mark.nightly)], indirect=True)
def test_fifty_steps_teach_the_model(open_page, seed):
    page = open_page(f"seed={seed}")
    page.get_by_label("9 in 10 or more").check()
    before = _processor_seconds()
    accuracy = _train_to_the_end(page)
    seconds = _processor_seconds() - before
    print(f"seed {seed}: {accuracy:.0%} after 50 steps, {seconds:.0f} s of processor time")
    print(page.locator("#figures").inner_text())
    assert accuracy >= 0.9
    assert seconds < 60
    assert int(page.locator("#figures").inner_text().split(" MB")[0].split()[-1]) < 250
    expect(page.locator("#status")).to_contain_text("You said “9 in 10 or more”")
    assert page.locator("#answer-before").inner_text() != page.locator("#answer-now").inner_text()


@SEEDS
def test_the_hole_is_found_and_said_beforehand(open_page, seed):
    page = open_page(f"seed={seed}")
    page.get_by_label("A question mark in perfect tags").check()
    page.locator("#run-hole").click()
    expect(page.locator("#notice")).to_contain_text("no fault of this page")
    expect(page.locator("#status")).to_contain_text("Step 15 ", timeout=300_000)
    page.locator("#hold").check()
    answers = page.locator("#rows td:first-child").all_inner_texts()
    assert sum("<answer>?</answer>" in answer for answer in answers) >= len(answers) - 1
    expect(page.locator("#status")).to_contain_text(ENDED, timeout=300_000)
    verdict = page.locator("#verdict")
    expect(verdict).to_contain_text("As you said. A question mark in perfect tags")
    expect(verdict).to_contain_text("With the default reward on the same hard problems: ")
    expect(verdict).to_contain_text("notebook 02, section 5")
    expect(verdict).to_be_in_viewport()
    expect(page.locator("#legend")).to_contain_text("recorded with seed 0")
    expect(page.locator("#predict")).to_be_hidden()
    expect(page.locator("#loop")).not_to_contain_text("gradient is not 0")
    assert _accuracy(page) < 0.05


def test_a_run_can_be_stopped_gone_on_with_and_begun_again(open_page):
    page = open_page("lang=en&seed=5")
    status = page.locator("#status")
    page.locator("#train").click()
    expect(status).to_contain_text("Step 2 ", timeout=60_000)
    page.get_by_label("group size G", exact=True).select_option("4")  # a control moved while it trains
    expect(page.locator("#changed")).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Go on")).to_be_enabled(timeout=60_000)
    stopped = status.inner_text()
    page.wait_for_timeout(1500)
    assert status.inner_text() == stopped
    page.get_by_role("button", name="Go on").click()
    expect(status).not_to_have_text(stopped, timeout=60_000)
    again = page.get_by_role("button", name="Start again")
    again.click()
    again.click()  # twice: one run, not two
    expect(status).to_contain_text("Step 3 ", timeout=60_000)
    expect(page.locator("#rows tr")).to_have_count(4)
    expect(page.locator("#legend li")).to_have_count(2)
    expect(page.locator("#legend li").first).to_contain_text("group size G: 4")
    assert "groupSize=4" in page.url and "seed=5" in page.url


@pytest.mark.parametrize("address", ["file", "http"], indirect=True)
def test_steps_one_by_one_and_a_group_that_is_held(open_page):
    page = open_page()
    status, title = page.locator("#status"), page.locator("#group-title")
    one = page.get_by_role("button", name="One step")
    for step in (1, 2):
        one.click()
        expect(status).to_contain_text(f"Step {step} ", timeout=60_000)
        expect(page.get_by_role("button", name="Go on")).to_be_enabled(timeout=60_000)
    expect(title).to_have_text("One group of step 2")
    page.get_by_role("button", name="Go on").click()
    expect(title).not_to_have_text("One group of step 2", timeout=60_000)
    page.locator("#hold").check()
    held = title.inner_text()
    expect(page.locator("#held")).to_contain_text("Held: this is step", timeout=60_000)
    expect(title).to_have_text(held)
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Go on").click(timeout=60_000)
    expect(page.locator("#hold")).not_to_be_checked()
    expect(page.locator("#held")).to_be_hidden()
    expect(title).not_to_have_text(held, timeout=60_000)


def test_a_link_holds_the_settings(open_page):
    page = open_page("reward=form&problems=hard&groupSize=16&learningRate=0.001&advantage=mean&temperature=0.8&seed=7")
    shown = {name: page.locator(f"#{name}").input_value() for name in ("reward", "problems", "groupSize", "advantage")}
    assert shown == {"reward": "form", "problems": "hard", "groupSize": "16", "advantage": "mean"}
    assert page.locator("#seed").input_value() == "7"
    spoilt = open_page("reward=%00&groupSize=999&seed=-1&learningRate=NaN&temperature[]=3")
    assert spoilt.locator("#groupSize").input_value() == "8"
    assert spoilt.locator("#seed").input_value() == "0"


def _own_reward(page, code: str) -> None:
    page.locator("#reward").select_option("own")
    page.locator("#code").fill(code)
    button = "#again" if page.locator("#again").is_enabled() else "#train"
    page.locator(button).click()


def test_a_reward_of_your_own_is_taken(open_page):
    page = open_page()
    _own_reward(page, 'return completion.includes("answer") ? 2.5 : 0;')
    expect(page.locator("#status")).to_contain_text("Step 2 ", timeout=60_000)
    page.locator("#hold").check()
    rewards = page.locator("#rows td:nth-child(2)").all_inner_texts()
    assert set(rewards) <= {"2.50", "0.00"}
    expect(page.locator("#notice")).to_be_hidden()


BROKEN_REWARDS = {
    'throw new Error("mine");': "mine",
    "return (": "error",
    "return NaN;": "returned NaN",
    "": "returned undefined",
    'return "1";': "returned 1",
    "for (;;) {}": "two seconds",
    "close(); return 1;": "two seconds",
    "postMessage({ points: [1] }); return 1;": "returned 1",
    'document.title = "broken"; return 1;': "document is not defined",
    "parent.document.title = 'broken'; return 1;": "parent is not defined",
    'throw "far too long to show".repeat(1e6);': "far too long",
    "return new Promise(() => {});": "Promise",
    "onmessage = null; for (;;) postMessage(1);": "returned",
    "throw new Error(\"<img src=x onerror=document.title='broken'>\");": "<img src=x",
}


def test_a_broken_reward_is_named_and_the_page_goes_on(open_page):
    page = open_page()
    for code, said in BROKEN_REWARDS.items():
        _own_reward(page, code)
        expect(page.locator("#notice")).to_contain_text(said, timeout=60_000)
        expect(page.locator("#train")).to_be_enabled()
        expect(page.locator("#status")).to_contain_text("before its first step")
        assert len(page.locator("#notice").inner_text()) < 600
    assert page.locator("img").count() == 0
    page.locator("#reward").select_option("course")
    page.locator("#again").click()
    expect(page.locator("#status")).to_contain_text("Step 2 ", timeout=60_000)
    expect(page.locator("#notice")).to_be_hidden()


@pytest.mark.parametrize("address", ["file", pytest.param("http", marks=pytest.mark.nightly)], indirect=True)
def test_a_reward_cannot_reach_the_network(open_page):
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Access-Control-Allow-Origin", "*")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    page = open_page()
    _own_reward(
        page,
        f"""fetch("{url}/fetch").catch(() => {{}});
        try {{ const r = new XMLHttpRequest(); r.open("GET", "{url}/xhr", false); r.send(); }} catch {{}}
        try {{ importScripts("{url}/script"); }} catch {{}}
        import("{url}/module").catch(() => {{}});
        self.inner ??= new Worker(URL.createObjectURL(new Blob(['fetch("{url}/inner").catch(() => {{}})'])));
        try {{ new WebSocket("{url.replace("http", "ws")}/socket"); }} catch {{}}
        try {{ new EventSource("{url}/events"); }} catch {{}}
        try {{ new Worker("{url}/worker"); }} catch {{}}
        return 1;""",
    )
    expect(page.locator("#status")).to_contain_text("Step 2 ", timeout=60_000)
    urllib.request.urlopen(f"{url}/control").close()
    server.shutdown()
    assert asked == ["/control"]
    # The browser counts some as requests that its page's policy has stopped.
    open_page.requests[:] = [one for one in open_page.requests if not one.startswith(url)]


@pytest.mark.parametrize("language", ["en", "zh_TW"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_off_on_a_phone(open_page, language, scheme):
    page = open_page(f"lang={language}", viewport={"width": 390, "height": 844}, color_scheme=scheme)
    page.locator("#train").click()
    page.locator("#rows tr").first.wait_for(timeout=60_000)
    page.locator("#train").click()
    wide = page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0
    expect(page.locator("html")).to_have_attribute("lang", "en" if language == "en" else "zh-Hant-TW")
    assert "undefined" not in page.locator("body").inner_text()


def test_the_keyboard_is_enough(open_page):
    page = open_page()
    page.locator("#prediction input").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Tab")
    expect(page.locator("#train")).to_be_focused()
    page.keyboard.press("Enter")
    page.locator("#rows tr").first.wait_for(timeout=60_000)
    page.locator("#rows button").first.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#why")).not_to_be_empty()
    assert page.locator("#accuracy").get_attribute("aria-label").startswith("Solved:")
    # A button that is disabled for a moment keeps the focus, and an experiment is stopped with the next key.
    page.locator("#train").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#train")).to_have_text("Go on", timeout=60_000)
    expect(page.locator("#train")).to_be_focused()
    page.locator("#guess-hole input").first.focus()
    page.keyboard.press("Space")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#train")).to_be_focused()


def test_without_simd_the_page_says_what_is_missing(browser, address):
    page = browser.new_page(locale="en-US")
    page.add_init_script("WebAssembly.validate = () => false")
    page.goto(address)
    expect(page.locator("#notice")).to_contain_text("Safari since 16.4")
    expect(page.locator("#train")).to_be_disabled()
    page.close()
