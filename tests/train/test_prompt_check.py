"""What the model is sent: the same tokens everywhere, and what a chat template may not do to them."""

import datetime
import json
import shutil

import pytest
from helpers import without_clocks

from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import read_jsonl
from grpo_lib.eval_cache import EvalCache
from grpo_lib.problems import load_problems
from grpo_lib.prompts import end_tokens
from grpo_train import checks, pipeline
from grpo_train.cli import evaluate as evaluate_command
from grpo_train.engines.prompt_check import QUESTION, check_prompts
from grpo_train.engines.tokens import Renderer, encode, load_tokenizer, prompt_lengths
from grpo_train.recipes import load_recipe
from grpo_train.runs import run_directory
from grpo_train.tpu import machine_checks

TINY = "recipes/tiny-cpu.yaml"
TURNS = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
OPENED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = TURNS + OPENED
SYSTEM = "You are a careful clerk."
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
ALTERNATE = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}{% endfor %}"
)
PARTS = CHATML.replace("m['content']", "m['content'][0].text")
NO_SYSTEM_TEXT = "{% for m in messages if m['role'] != 'system' %}" + CHATML.partition("%}")[2]
NO_QUESTION = "<|im_start|>system\n{{ messages[0]['content'] }}<|im_end|>\n" + OPENED
LLAMA = CHATML.replace("<|im_start|>", "<|start_header_id|>")
DATED = "{{ strftime_now('%d %B %Y') }}\n" + CHATML


@pytest.fixture
def tiny_base(root):
    return root / "assets" / "tiny-base"


@pytest.fixture
def copy(tiny_base, tmp_path):
    """A copy of the tiny base with another chat template (None: without; a dict: several), and other files."""

    def make(template=CHATML, *, tokenizer=None, **files):
        folder = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(tiny_base, folder)
        settings = json.loads((folder / "tokenizer_config.json").read_text()) | (tokenizer or {})
        if isinstance(template, str):
            (folder / "chat_template.jinja").write_text(template)
        else:
            (folder / "chat_template.jinja").unlink()
        for name, text in (template or {}).items() if isinstance(template, dict) else ():
            (folder / "additional_chat_templates").mkdir(exist_ok=True)
            (folder / "additional_chat_templates" / f"{name}.jinja").write_text(text)
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        for name, content in files.items():
            (folder / f"{name}.json").write_text(content)
        return folder

    return make


def checked(folder, *overrides) -> str:
    recipe = load_recipe(TINY, [f"model.path={folder}", *overrides])
    return check_prompts(recipe, Renderer(recipe.prompts, load_tokenizer(recipe.model)))


ASKED = f"prompts.system='{SYSTEM}'"
WITHOUT = r"prompts\.system: .*{}.*set prompts\.system=\"\""


@pytest.mark.parametrize(
    ("template", "more", "message"),
    [
        pytest.param(NO_SYSTEM + CHATML, {}, WITHOUT.format("System role not supported"), id="refuses a system"),
        pytest.param(ALTERNATE + CHATML, {}, WITHOUT.format("must alternate"), id="alternation"),
        pytest.param("{% for m in %}", {}, r"model\.path: .* fails .*; correct its chat_template\.jinja$", id="broken"),
        pytest.param("{{ messages[7].x.y }}", {}, r"model\.path: .* fails .*chat_template\.jinja$", id="fails"),
        pytest.param(None, {}, r"model\.path: .* has no chat template; .*prompts\.chat_template=false", id="none"),
        pytest.param(
            {"rag": CHATML, "tool_use": CHATML},
            {},
            r"model\.path: .*than default \(rag, tool_use\); make",
            id="several",
        ),
        pytest.param({"tool_use": CHATML}, {}, r"model\.path: .*than default \(tool_use\); make", id="tools only"),
        pytest.param(PARTS, {}, r"model\.path: .* list of parts.*message\['content'\]", id="parts"),
        pytest.param(NO_SYSTEM_TEXT, {}, WITHOUT.format("leaves it out"), id="drops the system message"),
        pytest.param(NO_QUESTION, {}, r"model\.path: .* leaves out the question; ", id="drops the question"),
        pytest.param(
            "{{ bos_token }}{{ bos_token }}" + CHATML,
            {"bos_token": "<reasoning>"},
            r"model\.path: the prompt begins with <reasoning> twice",
            id="two BOS",
        ),
        pytest.param(TURNS, {}, r"model\.path: .* opens no turn for the answer", id="no generation prompt"),
        pytest.param(LLAMA, {}, r"model\.path: .*<\|start_header_id\|>, which is \d+ tokens", id="foreign markers"),
    ],
)
def test_a_template_that_does_something_else_is_refused_in_one_line(copy, template, more, message) -> None:
    with pytest.raises(CourseError, match=message):
        checked(copy(template, tokenizer=more), ASKED)


@pytest.mark.parametrize(
    "template", [NO_SYSTEM + CHATML, ALTERNATE + CHATML, NO_SYSTEM_TEXT], ids=["refused", "alternation", "dropped"]
)
def test_the_remedy_of_a_refused_system_message_works(copy, template) -> None:
    folder = copy(template)
    assert checked(folder, 'prompts.system=""') == checked(copy(), 'prompts.system=""')
    assert "<|im_end|> ends a completion" in checked(
        folder, 'prompts.system=""', f"prompts.user='{SYSTEM} {{question}}'"
    )


@pytest.mark.parametrize(
    ("template", "more", "text"),
    [
        pytest.param("{{ bos_token }}" + CHATML, {"bos_token": "<reasoning>"}, "from '<reasoning><|im_star", id="BOS"),
        pytest.param(CHATML, {"bos_token": "<|im_start|>"}, "from '<|im_start|>system", id="BOS at each turn"),
        pytest.param(CHATML.replace("assistant\n", "assistant:  "), {}, "assistant:  '", id="trailing spaces"),
        pytest.param(
            CHATML.replace("assistant\n", "assistant\n<think>\n"),
            {},
            "the completion begins inside <think>",
            id="think",
        ),
        pytest.param(CHATML.replace("m['content']", "m['content'] | trim"), {}, "tokens for a question", id="trimmed"),
        pytest.param(
            "{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}", {}, "[/INST]'", id="plain markers"
        ),
        pytest.param({"default": CHATML, "tool_use": "{{ x.y.z }}"}, {}, "<|im_end|> ends", id="several and a default"),
    ],
)
def test_what_a_template_may_do_is_sent_as_it_is(copy, template, more, text) -> None:
    assert text in checked(copy(template, tokenizer=more), ASKED)


def test_a_prompt_without_a_chat_needs_no_template(copy) -> None:
    assert "tokens for a question" in checked(copy(None), ASKED, "prompts.chat_template=false")


def test_a_task_is_named(copy) -> None:
    tasks = "problems=[{source: words}, {source: code, prompts: {system: ''}, name: easy}]"
    with pytest.raises(CourseError, match=r"^task words: prompts\.system"):
        checked(copy(NO_SYSTEM_TEXT), ASKED, tasks, "rewards=[correct_answer]")


# --------------------------------------------------------------------------------------------------------- end tokens


def test_every_end_token_of_the_model_counts(copy) -> None:
    for ends, found in ((None, [1]), ("2", [1, 2]), ("[2, 1]", [1, 2]), ("null", [1])):
        files = {"generation_config": f'{{"eos_token_id": {ends}}}'} if ends else {}
        model = load_recipe(TINY, [f"model.path={copy(**files)}"]).model
        assert end_tokens(load_tokenizer(model)) == found


BROKEN = ("{broken", "[1]", '{"eos_token_id": "x"}', '{"eos_token_id": [1, null]}', "[" * 200_000)


@pytest.mark.parametrize("content", BROKEN, ids=["not JSON", "a list", "a text", "a null", "nested"])
def test_a_broken_generation_config_is_named(copy, content) -> None:
    model = load_recipe(TINY, [f"model.path={copy(generation_config=content)}"]).model
    with pytest.raises(CourseError, match=r"generation_config\.json: .*; copy or download the model again"):
        load_tokenizer(model)


# ---------------------------------------------------------------------------------------------------------- as sent


def test_the_tokens_of_the_course_are_what_they_were(tiny_base) -> None:
    """Written down before there was this file: the prompt of recipes/tiny-cpu.yaml."""
    recipe = load_recipe(TINY)
    render = Renderer(recipe.prompts, load_tokenizer(recipe.model))
    assert render(QUESTION) == f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    problems = load_problems(recipe.problems, "test")[:50]
    for problem in problems:
        text = problem.prompt(render)
        assert encode(render.tokenizer, [text]) == [render.tokenizer.encode(text)]
    assert end_tokens(render.tokenizer) == [1]
    assert max(prompt_lengths(render, load_problems(recipe.problems, "train"))) == 39


def test_a_named_bos_changes_no_token_that_is_sent(copy, tiny_base) -> None:
    """A5: the template does not write it, so the sampler does not; completions are those of the tiny base."""
    sent = []
    for folder in (tiny_base, copy(tokenizer={"bos_token": "<reasoning>"})):
        recipe = load_recipe(TINY, [f"model.path={folder}"])
        generate, render = pipeline.standalone_generate(recipe)
        prompts = [problem.prompt(render) for problem in load_problems(recipe.problems, "test")[:8]]
        lengths = checks.check(load_recipe(TINY, [f"model.path={folder}", "problems.train=200"])).max_prompt_length
        sent.append((prompts, encode(render.tokenizer, prompts), lengths, generate(prompts)))
    assert sent[0] == sent[1]


def test_the_sampler_encodes_the_text_alone(copy) -> None:
    from grpo_train.engines import tunix_models, tunix_sampler

    folder = copy(tokenizer={"bos_token": "<reasoning>"})
    loaded = tunix_sampler.load_hugging_face(folder)
    tokenizer = load_tokenizer(load_recipe(TINY, [f"model.path={folder}"]).model)
    sampler = tunix_sampler.make_sampler(tunix_models.abstract_model(loaded.config), tokenizer, 64)
    text = "<|im_start|>user\n12<|im_end|>\n"
    assert sampler.tokenize(text).tolist() == encode(tokenizer, [text])[0]
    assert sampler.tokenizer.bos_id() == tokenizer.bos_token_id not in sampler.tokenize(text)


def test_a_completion_ends_at_the_ends_of_generation_config(copy, tiny_base) -> None:
    """A6: the tokenizer's own end token is one that the model never writes."""
    found = []
    ends = {"generation_config": '{"eos_token_id": [2, 1]}'}
    for folder in (tiny_base, copy(tokenizer={"eos_token": "<|im_start|>"}, **ends)):
        recipe = load_recipe(TINY, [f"model.path={folder}"])
        generate, render = pipeline.standalone_generate(recipe)
        found.append(generate([problem.prompt(render) for problem in load_problems(recipe.problems, "test")[:8]]))
    assert found[0] == found[1]
    assert not any(generation.truncated for generation in found[1])


STEPS = [
    *("training.steps=2", "training.prompts_per_step=4", "grpo.group_size=4", "training.validate_every=0"),
    *("problems.train=200", "problems.test=8", "evaluation.batch_size=8"),
]


@pytest.mark.nightly(minutes=1)
def test_a_training_is_the_same_with_a_named_bos_or_another_end_token(copy, grpo, tmp_path, converted_base) -> None:
    models = {
        "tiny": "assets/tiny-base",
        "bos": copy(tokenizer={"bos_token": "<reasoning>"}),
        "end": copy(tokenizer={"eos_token": "<|im_start|>"}, generation_config='{"eos_token_id": [2, 1]}'),
    }
    rows = {}
    for name, model in models.items():
        place = ["--runs", tmp_path / "runs", "--run", name, "--base", converted_base]
        done = grpo("train", TINY, *STEPS, f"model.path={model}", *place)
        assert done.returncode == 0, done.stderr
        rows[name] = without_clocks(read_jsonl(tmp_path / "runs" / name / "metrics.jsonl"))
    assert rows["bos"] == rows["tiny"] == rows["end"]
    exported = load_tokenizer(load_recipe(TINY, [f"model.path={tmp_path / 'runs' / 'end' / 'export'}"]).model)
    assert end_tokens(exported) == [2, 1]


# --------------------------------------------------------------------------------------------------------- the date


def test_a_run_keeps_its_date(copy, tmp_path, monkeypatch) -> None:
    recipe = load_recipe(TINY, [f"model.path={copy(DATED)}", "problems.train=20", "problems.test=4"])
    yesterday = datetime.date(2026, 2, 28)
    directory = run_directory.open_run(tmp_path / "run", recipe, date=yesterday)
    ready = checks.check(recipe, run=directory)
    assert ready.render("1?").startswith("28 February 2026\n<|im_start|>user")
    assert ready.render.writes_date
    assert checks.check(recipe).render("1?").startswith(datetime.date.today().strftime("%d %B %Y"))
    assert checks.check(recipe, run=directory, date=datetime.date(2026, 3, 1)).render("1?").startswith("01 March")


@pytest.mark.slow
def test_an_evaluation_of_yesterday_goes_on(copy, grpo, tmp_path, monkeypatch) -> None:
    output = tmp_path / "answers.jsonl"
    command = ["evaluate", TINY, f"model.path={copy(DATED)}", "problems.test=8", "evaluation.batch_size=4"]
    add = EvalCache.add

    def add_one(cache, batch):
        add(cache, batch)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(evaluate_command, "_date", lambda _: datetime.date(2026, 2, 28))
        patch.setattr(EvalCache, "add", add_one)
        assert grpo(*command, "--output", output).returncode
    assert len(read_jsonl(f"{output}.partial")) == 2
    done = grpo(*command, "--output", output)
    assert done.returncode == 0, done.stderr
    assert all(record["prompt"].startswith("28 February 2026") for record in read_jsonl(output))


def test_an_evaluation_that_goes_on_keeps_its_date(tmp_path) -> None:
    output = tmp_path / "answers.jsonl"
    assert evaluate_command._date(output) == evaluate_command._date(None) == datetime.date.today()
    job = {"job": {"settings": {"date": "2026-02-28"}}}
    (tmp_path / "answers.jsonl.partial").write_text(json.dumps(job) + "\n")
    assert evaluate_command._date(output) == datetime.date(2026, 2, 28)


# ------------------------------------------------------------------------------------------------------- who checks


def test_run_self_check_and_config_check_the_prompt(copy, grpo, tmp_path) -> None:
    model = f"model.path={copy(NO_SYSTEM_TEXT)}"
    recipe = load_recipe(TINY, [model, ASKED])
    with pytest.raises(CourseError, match=r"prompts\.system"):
        checks.check(recipe)
    with pytest.raises(CourseError, match=r"prompts\.system"):
        machine_checks.without_jax(recipe, tmp_path)["prompt"]()
    for command in ("config", "train", "evaluate"):
        runs = ["--runs", tmp_path / "runs"] if command == "train" else []
        done = grpo(command, TINY, model, ASKED, *runs)
        assert done.returncode == 2 and "error: prompts.system: the chat template of" in done.stderr
    assert not (tmp_path / "runs" / "tiny-cpu").exists()


def test_config_says_what_was_checked(grpo) -> None:
    assert "# prompt: 40 tokens for a question of 32" in grpo("config", TINY).stdout
    elsewhere = grpo("config", TINY, "model.path=somebody/model").stdout
    assert "# prompt: not checked, since the tokenizer is not here" in elsewhere
