"""The report in a real browser: as many problems as GSM8K's test set, hostile completions among them, no network."""

import random

import pytest
from playwright.sync_api import expect, sync_playwright

from grpo_lib.common.files import append_jsonl
from grpo_lib.evaluation import EvalRun, evaluate
from grpo_lib.problems import words
from grpo_lib.records import Generation
from grpo_train import report
from grpo_train.report import figures

pytestmark = pytest.mark.browser

N = 1319
HOSTILE = [
    '<script>document.title = "broken"</script>',
    '</script><script>document.title = "broken"</script>',
    "</textarea></pre></td></table><img src=x onerror=\"document.title='broken'\">",
    '<a href="https://example.org/">&lt;b&gt;</a><iframe src="https://example.org/"></iframe>',
    "<style>* { display: none }</style><answer>\u2028\x00\U0001f600</answer>",
]
PROBLEMS = words.generate("test", N)
QUESTIONS = {problem.question: number for number, problem in enumerate(PROBLEMS)}


def answers_of(phase):
    """Completions of about 800 characters; before 30 % are right, after 70 %."""
    rng = random.Random(phase)
    filler = "Let us think about the things that are bought, found, sold and given away, one after the other. "

    def generate(prompts):
        outputs = []
        for prompt in prompts:
            number = QUESTIONS[prompt.removeprefix("Q: ")]
            problem, kind = PROBLEMS[number], number % 100
            answer = problem.answer if rng.random() < (0.3 if phase == "before" else 0.7) else "1000"
            text = f"<reasoning>{filler * 7}{problem.solution}</reasoning><answer>{answer}</answer>"
            if kind == 7:  # right for the lenient grader alone
                text = f"{filler * 7}{problem.answer}"
            if number >= N - len(HOSTILE):
                text = HOSTILE[number - N]
            outputs.append(Generation(text, 180, truncated=kind == 11))
        return outputs

    return generate


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large") / "demo"
    for phase in ("before", "after"):
        path = folder / "evals" / f"{phase}.jsonl"
        evaluate(answers_of(phase), PROBLEMS, render="Q: {}".format, path=path, progress=False, model=f"model {phase}")
    (folder / "recipe.yaml").write_text("name: demo\nmodel: {path: a/model, maxtext_name: qwen3-0.6b}\n")
    for step in range(1, 31):
        append_jsonl(folder / "metrics.jsonl", {"step": step, "reward": step / 30, "accuracy": step / 40})
    report.write_report(folder)
    return folder


@pytest.fixture(scope="module")
def address(run_dir):
    return (run_dir / "report.html").as_uri()


@pytest.fixture(scope="module")
def browser(chromium):
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def new_page(browser):
    """Makes pages; at the end none may have asked the network, complained, or been renamed by a completion."""
    pages, troubles, requests = [], [], []

    def make(address, **options):
        page = browser.new_page(**({"viewport": {"width": 1200, "height": 900}} | options))
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda request: requests.append(request.url.partition("#")[0]))
        page.goto(address)
        pages.append((page, address.partition("#")[0]))
        return page

    yield make
    assert troubles == []
    assert requests == [address for _, address in pages]
    for page, _ in pages:
        assert "broken" not in page.title() and page.locator("img").count() == 0
        page.close()


@pytest.fixture
def page(new_page, address):
    """The report."""
    return new_page(address)


def expect_count(where, text):
    expect(where.locator("#count")).to_have_text(text)


def ids(where):
    return where.locator("#rows .open").all_inner_texts()


def test_filters_search_and_categories_combine(run_dir, page):
    assert (run_dir / "report.html").stat().st_size < 6_000_000
    assert int(page.locator("html").get_attribute("data-ready")) < 2000  # milliseconds
    page.get_by_role("button", name="Show more").click()
    assert len(ids(page)) == 600
    runs = [EvalRun.load(run_dir / "evals" / f"{phase}.jsonl").records for phase in ("before", "after")]
    both = list(zip(*runs, strict=True))
    gained = [old["id"] for old, new in both if new["strict"] and not old["strict"]]
    page.get_by_role("button", name="wrong → right").click()
    expect_count(page, f"Showing 100 of {len(gained)}.")
    assert ids(page) == gained[:100]
    assert page.get_by_role("button", name=f"wrong → right ({len(gained)})").get_attribute("aria-pressed") == "true"

    boxes = [old["id"] for old, new in both if old["id"] in set(gained) and "boxes of 7" in old["question"]]
    page.get_by_label("Search").fill("BOXES of 7")
    expect_count(page, f"{len(boxes)} shown.")
    assert ids(page) == boxes
    page.get_by_label("Kind of answer before").select_option("other")
    assert page.locator("#choice-before option:checked").inner_text() == f"other ({len(ids(page))})"
    page.get_by_role("button", name="Clear filters").click()
    expect_count(page, f"Showing 100 of {N:,}.")
    assert not page.get_by_role("button", name="Clear filters").is_visible()

    tests = {
        "form right, answer wrong": lambda r: r["format"] and not r["strict"],
        "truncated": lambda r: r["truncated"],
        "strict ≠ lenient": lambda r: r["strict"] != r["lenient"],
    }
    for name, test in tests.items():
        expected = [old["id"] for old, new in both if test(old) or test(new)]
        button = page.get_by_role("button", name=f"{name} ({len(expected)})")
        button.click()
        assert ids(page) == expected[:100] and expected

    page.get_by_role("button", name="Clear filters").click()
    page.get_by_label("Calculations").select_option("1")
    assert ids(page) == [problem.id for problem in PROBLEMS if problem.steps == 1][:100]
    page.get_by_label("Calculations").select_option("")
    page.locator("#moves summary").click()
    cell = page.get_by_role("button", name="from other to right")
    n = int(cell.inner_text())
    cell.click()
    assert page.get_by_label("Kind of answer before").input_value() == "other"
    assert page.get_by_label("Kind of answer after").input_value() == "right"
    assert page.get_by_role("button", name=f"all ({n})").count() == 1


def test_an_opened_problem_shows_what_was_said_and_why_it_was_paid(page):
    page.locator("#rows .open").nth(2).click()
    panes = page.locator(".detail .pane")
    generate = {phase: answers_of(phase) for phase in ("before", "after")}
    assert panes.count() == 2
    for pane, phase in zip(panes.all(), generate, strict=True):
        text = pane.locator("pre").inner_text()
        assert PROBLEMS[2].solution in text
        assert pane.locator("mark").inner_text() in (PROBLEMS[2].answer, "1000")
        assert pane.locator("tbody tr").count() == 4 and pane.locator("tfoot td").first.inner_text() != ""
        assert f"model {phase}" in pane.locator("h3").inner_text()
    detail = page.locator(".detail").inner_text()
    assert PROBLEMS[2].question in detail and f"Worked solution: {PROBLEMS[2].solution}" in detail
    page.get_by_text("prompt, exactly as it was sent").click()
    assert page.locator(".detail > td > details pre").inner_text() == f"Q: {PROBLEMS[2].question}"
    page.get_by_role("button", name="next →").click()
    assert PROBLEMS[3].question in page.locator(".detail").inner_text()
    page.get_by_role("button", name="close").click()
    assert page.locator(".detail").count() == 0


def test_no_completion_becomes_markup(address, new_page):
    page = new_page(address + f"#open={PROBLEMS[N - len(HOSTILE)].id}")
    for text in HOSTILE:
        for pane in page.locator(".detail .pane").all():
            assert pane.locator("pre").first.evaluate("node => node.textContent") == text
        assert page.locator("iframe, .detail style, .detail a[href^=http]").count() == 0
        assert page.locator("body").is_visible()
        page.keyboard.press("j")


def test_the_keyboard_is_enough(page):

    def focused():
        return page.evaluate("document.activeElement.textContent")

    for key, where in (("j", 0), ("j", 1), ("ArrowDown", 2), ("k", 1), ("ArrowUp", 0), ("k", 0)):
        page.keyboard.press(key)
        assert focused() == PROBLEMS[where].id
    page.keyboard.press("Enter")
    assert PROBLEMS[0].question in page.locator(".detail").inner_text()
    page.keyboard.press("j")
    assert PROBLEMS[1].question in page.locator(".detail").inner_text() and focused() == PROBLEMS[1].id
    page.keyboard.press("Escape")
    assert page.locator(".detail").count() == 0 and focused() == PROBLEMS[1].id
    page.keyboard.press("/")
    page.keyboard.type("jk/ nothing like it")
    expect_count(page, "Nothing matches: “jk/ nothing like it”.")
    page.keyboard.press("Escape")
    expect_count(page, f"Showing 100 of {N:,}.")
    for key in ("/", "j", "Escape"):  # a letter in the search is a letter
        page.keyboard.press(key)
    assert page.locator("#rows .open:focus").count() == 0


def test_on_a_phone_in_the_dark(address, new_page):
    page = new_page(address, viewport={"width": 380, "height": 800}, color_scheme="dark")
    page.locator("#rows .open").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    assert page.locator(".detail .pane").first.is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"


def test_inside_a_notebook(run_dir, new_page, tmp_path):
    saved = tmp_path / "notebook.html"
    saved.write_text(f"<!DOCTYPE html><title>notebook</title>{report.inspector(run_dir)._repr_html_()}", "utf-8")
    page = new_page(saved.as_uri())
    frame = page.frame_locator("iframe")
    expect_count(frame, f"Showing 100 of {N:,}.")
    frame.get_by_role("button", name="truncated").click()
    expect_count(frame, "14 shown.")
    frame.get_by_role("button", name="all").click()
    frame.get_by_label("Search").fill("</textarea>")
    expect_count(frame, "1 shown.")
    frame.locator("#rows .open").click()
    assert frame.locator(".pane pre").first.inner_text() == HOSTILE[2]
    assert page.evaluate("(() => { try { return frames[0].document.title } catch { return null } })()") is None


def test_the_slider(new_page, tmp_path):
    frames = [(f"{n} problems", figures.training_curves([{"step": 1, "reward": n}])) for n in (50, 100, 200)]
    saved = tmp_path / "slider.html"
    saved.write_text(f"<!DOCTYPE html><title>slider</title>{figures.slider(frames)._repr_html_()}", "utf-8")
    frame = new_page(saved.as_uri()).frame_locator("iframe")
    frame.get_by_role("slider").focus()
    frame.get_by_role("slider").press("ArrowRight")
    assert frame.locator("output").inner_text() == "100 problems"
    assert [figure.is_visible() for figure in frame.locator("figure").all()] == [False, True, False]
    page = new_page(saved.as_uri(), viewport={"width": 340, "height": 900})
    inside = page.frames[1]
    shown = "document.querySelector('figure:not([hidden])').getBoundingClientRect()"
    assert inside.evaluate("document.documentElement.scrollHeight <= innerHeight")
    assert 230 / 300 * 0.95 < inside.evaluate(f"{shown}.height / {shown}.width") < 230 / 300 * 1.2  # hardly empty
    frame = new_page(saved.as_uri(), java_script_enabled=False).frame_locator("iframe")
    assert [figure.is_visible() for figure in frame.locator("figure").all()] == [True, False, False]
