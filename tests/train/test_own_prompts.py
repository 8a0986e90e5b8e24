"""Prompts of the user's own: from files, whose content the run keeps; the demos' words; tags that nobody asks for."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_lib import prompts
from grpo_lib.common.errors import CourseError
from grpo_lib.problems.types import Problem
from grpo_train import pipeline
from grpo_train.engines.tokens import Renderer
from grpo_train.recipes import dump_recipe, load_recipe
from grpo_train.runs.run_directory import load_run, open_run

TINY = "recipes/tiny-cpu.yaml"


def test_the_text_of_a_file_is_the_prompt_and_travels_with_the_run(root, tmp_path, tokenizer):
    user, system = tmp_path / "user.txt", tmp_path / "system.md"
    user.write_bytes("Question: {question}\r\nAnswer in <answer> tags.\r\n".encode("utf-8-sig"))
    system.write_text("Be brief.\n", encoding="utf-8")
    recipe = load_recipe(root / TINY, [f"prompts.user={user}", f"prompts.system={system}"])
    assert (recipe.prompts.user, recipe.prompts.system) == (
        "Question: {question}\nAnswer in <answer> tags.",
        "Be brief.",
    )
    sent = Renderer(recipe.prompts, tokenizer)("1 + 1?")
    assert "Be brief." in sent and "Question: 1 + 1?\nAnswer" in sent
    directory = open_run(tmp_path / "run", recipe)
    user.write_text("{question} Quickly!", encoding="utf-8")
    assert load_run(directory)[1] == recipe
    with pytest.raises(CourseError, match=r"another recipe \(prompts\.user: Question"):
        open_run(directory, load_recipe(root / TINY, [f"prompts.user={user}", f"prompts.system={system}"]))
    assert "user.txt" not in dump_recipe(recipe)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"What is the answer?", "or a text with {question} where the question stands"),
        (b"", "or a text with {question} where the question stands"),
        (b"{question} {question}", "it has {question} 2 times; give question, dapo, boxed"),
        (b"{question} \xff", "cannot be read"),
        (None, "there is no such file"),
    ],
)
def test_a_file_that_is_no_prompt_is_one_line(root, tmp_path, content, words):
    file = tmp_path / "user.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(CourseError) as caught:
        load_recipe(root / TINY, [f"prompts.user={file}"])
    assert words in str(caught.value) and "prompts.user" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_text_with_the_question_twice_is_refused(root):
    with pytest.raises(CourseError, match=r"prompts\.user=.*it has \{question\} 2 times"):
        load_recipe(root / TINY, ["prompts.user='{question} Again: {question}'"])


def test_the_words_of_the_demos_are_those_of_the_installed_packages(root):
    import maxtext

    file = Path(maxtext.__file__).parent / "examples" / "chat_templates" / "gsm8k_rl.json"
    words = json.loads(file.read_text(encoding="utf-8"))["SYSTEM_PROMPT"]
    names = (f"{part}_{end}_token" for part in ("reasoning", "solution") for end in ("start", "end"))
    assert words.format(**dict(zip(names, prompts.TAGS, strict=True))) == prompts.TUNIX_SYSTEM_PROMPT
    published = load_recipe(root / "recipes" / "llama3.1-8b-gsm8k.yaml")
    assert prompts.system_prompt(published.prompts.system) == prompts.TUNIX_SYSTEM_PROMPT


@pytest.mark.parametrize(
    ("overrides", "kind", "untold"),
    [
        (["prompts.system=default"], "tagged", False),
        (["prompts.system=tunix"], "tagged", False),
        (["prompts.system=Be brief."], "tagged", True),
        (["prompts.system=Be brief."], "integer", False),
        (["prompts.user='{question} Write <answer>N</answer>.'"], "tagged", False),
        (["prompts.completion_prefix=<answer>"], "tagged", False),
        (["training.cold_start=8"], "tagged", False),
        (["model.path=assets/tiny-base"], "tagged", False),
    ],
)
def test_tags_that_no_prompt_asks_for(root, monkeypatch, overrides, kind, untold):
    monkeypatch.chdir(root)
    recipe = load_recipe(TINY, ["model.path=Qwen/Qwen3-0.6B", *overrides])
    problem = Problem("p", "1 + 1?", "", "2", "file", kind=kind)
    assert pipeline._tags_are_untold(SimpleNamespace(recipe=recipe, problems=[problem])) == untold
