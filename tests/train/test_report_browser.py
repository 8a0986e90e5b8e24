"""The report in a real browser: as many problems as GSM8K's test set, hostile completions among them, no network."""

import random

import pytest
import yaml
from playwright.sync_api import expect

from grpo_lib.common.files import append_jsonl
from grpo_lib.evaluation import EvalRun, evaluate
from grpo_lib.problems import words
from grpo_lib.records import Generation
from grpo_lib.rewards import REFERENCE_REWARDS
from grpo_train import report

pytestmark = [pytest.mark.browser, pytest.mark.long]

N = 1319
HOSTILE = [
    '<script>document.title = "broken"</script>',
    '</script><script>document.title = "broken"</script>',
    "</textarea></pre></td></table><img src=x onerror=\"document.title='broken'\">",
    '<a href="https://example.org/">&lt;b&gt;</a><iframe src="https://example.org/"></iframe>',
    "<style>* { display: none }</style>\U0001f600<answer>1</answer> <answer>\u2028\x00\U0001f600</answer>3</answer>",
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
    recipe = {
        "name": "demo",
        "model": {"path": "a/model", "maxtext_name": "qwen3-0.6b"},
        "rewards": [function.__name__ for function in REFERENCE_REWARDS],
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    for step in range(1, 31):
        append_jsonl(folder / "metrics.jsonl", {"step": step, "reward": step / 30, "accuracy": step / 40})
    report.write_report(folder)
    return folder


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
    assert set(requests) == {address for _, address in pages}
    for page, _ in pages:
        assert "broken" not in page.title()
        assert page.locator("img").count() == 0
        page.close()


@pytest.fixture
def page(new_page, run_dir):
    """The report."""
    return new_page((run_dir / "report.html").as_uri())


def expect_count(where, text):
    expect(where.locator("#count")).to_have_text(text)


def ids(where):
    return where.locator("#rows .open").all_inner_texts()


def test_filters_search_and_categories_combine(run_dir, page):
    assert (run_dir / "report.html").stat().st_size < 6_000_000
    runs = [EvalRun.load(run_dir / "evals" / f"{phase}.jsonl").records for phase in ("before", "after")]
    both = list(zip(*runs, strict=True))
    gained = [old["id"] for old, new in both if new["strict"] and not old["strict"]]
    page.get_by_role("button", name="wrong → right").click()
    expect_count(page, f"Showing 100 of {len(gained)}.")
    assert ids(page) == gained[:100]

    boxes = [old["id"] for old, new in both if old["id"] in set(gained) and "boxes of 7" in old["question"]]
    page.get_by_label("Search").fill("BOXES of 7")
    expect_count(page, f"{len(boxes)} shown.")
    assert ids(page) == boxes
    page.get_by_role("button", name="Clear filters").click()
    expect_count(page, f"Showing 100 of {N:,}.")

    tests = {
        "form right, answer wrong": lambda r: r["format"] and not r["strict"],
        "truncated": lambda r: r["truncated"],
        "strict ≠ lenient": lambda r: r["strict"] != r["lenient"],
    }
    for name, test in tests.items():
        expected = [old["id"] for old, new in both if test(old) or test(new)]
        page.get_by_role("button", name=f"{name} ({len(expected)})").click()
        assert ids(page) == expected[:100]
        assert expected

    page.get_by_role("button", name="Clear filters").click()
    page.locator("#moves summary").click()
    page.get_by_role("button", name="from other to right").click()
    assert page.get_by_label("Kind of answer before").input_value() == "other"
    assert page.get_by_label("Kind of answer after").input_value() == "right"


def test_an_opened_problem_shows_what_was_said_and_why_it_was_paid(page):
    page.locator("#rows .open").nth(2).click()
    for pane, phase in zip(page.locator(".detail .pane").all(), ("before", "after"), strict=True):
        assert PROBLEMS[2].solution in pane.locator("pre").inner_text()
        assert pane.locator("mark").inner_text() in (PROBLEMS[2].answer, "1000")
        assert pane.locator("tbody tr").count() == len(REFERENCE_REWARDS)
        assert pane.locator("tfoot td").first.inner_text() != ""
        assert f"model {phase}" in pane.locator("h3").inner_text()


def test_each_problem_has_a_link_of_its_own(run_dir, new_page):
    address = (run_dir / "report.html").as_uri()
    page = new_page(f"{address}#0-17")
    opened = page.locator(".detail .question")
    expect(opened).to_have_text(PROBLEMS[17].question)
    page.keyboard.press("j")
    expect(opened).to_have_text(PROBLEMS[18].question)
    assert page.url == f"{address}#0-18"
    assert page.get_by_role("link", name="link to this problem").get_attribute("href") == "#0-18"
    page.keyboard.press("Escape")
    assert page.url == address
    page.get_by_role("button", name="truncated").click()
    page.locator(".example a").click()  # one that the filter has taken away
    expect(opened).to_have_text(page.locator(".example .question").inner_text())
    for wrong in ("#%", "#nothing-like-it"):
        page.goto(address + wrong)
        page.reload()
        expect(page.locator("#rows .open").first).to_be_visible()
        expect(opened).to_have_count(0)


def test_no_completion_becomes_markup(run_dir, new_page):
    page = new_page((run_dir / "report.html").as_uri() + f"#{PROBLEMS[N - len(HOSTILE)].id}")
    for text in HOSTILE:
        assert page.locator(".detail .pane").count() == 2
        for pane in page.locator(".detail .pane").all():
            assert pane.locator("pre").first.evaluate("node => node.textContent") == text
        assert page.locator("iframe, .detail style, .detail a[href^=http]").count() == 0
        assert page.locator("body").is_visible()
        page.keyboard.press("j")


def test_the_keyboard_is_enough(page):
    for key, where in (("j", 0), ("ArrowDown", 1), ("ArrowUp", 0), ("k", 0)):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.textContent") == PROBLEMS[where].id
    page.keyboard.press("Enter")
    assert PROBLEMS[0].question in page.locator(".detail").inner_text()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("jk/ nothing like it")  # a letter in the search is a letter
    page.locator("#rows .open").first.wait_for(state="detached")
    assert page.locator(".detail").count() == 0


def test_inside_a_notebook(run_dir, new_page, tmp_path):
    saved = tmp_path / "notebook.html"
    saved.write_text(
        f"<!DOCTYPE html><meta charset='utf-8'><title>notebook</title>{report.inspector(run_dir)._repr_html_()}",
        "utf-8",
    )
    page = new_page(saved.as_uri())
    frame = page.frame_locator("iframe")
    frame.get_by_label("Search").fill("</textarea>")
    expect_count(frame, "1 shown.")
    frame.locator("#rows .open").click()
    assert frame.locator(".pane pre").first.inner_text() == HOSTILE[2]
