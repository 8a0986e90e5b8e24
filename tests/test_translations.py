"""Catalogues and notebooks fit each other, and an edit of one that does not fit is named."""

import os
import re
import shutil
from pathlib import Path

import pytest
import translations

from grpo_lib import analysis
from grpo_lib.answers import final_answer

NOTEBOOK = "notebooks/03_policy_update.ipynb"
CATALOGUE = "dev/translations/zh_TW/03_policy_update.po"
EXERCISES = "teaching/exercises/03_policy_update.ipynb"
EXERCISES_CATALOGUE = "dev/translations/zh_TW/exercises/03_policy_update.po"


@pytest.fixture(autouse=True)
def in_a_copy(root: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(translations, "repo_root", lambda: tmp_path)
    for name in ("notebooks", "dev/translations", "teaching"):
        if (root / name).exists():
            shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))


def test_only_text_differs_and_links_lead_somewhere(root: Path, tmp_path: Path) -> None:
    assert [translations.main([command]) for command in ("check", "build")] == [0, 0]
    for path in [path for path in tmp_path.rglob("*.ipynb") if "zh_TW" in path.parts]:
        source = Path(str(path).replace("/zh_TW/", "/"))
        if not source.exists():  # built in this clone before its notebook was renamed
            continue
        built = translations.read_notebook(path)
        english = translations.read_notebook(source)
        for cell, original in zip(built["cells"], english["cells"], strict=True):
            text = {"source": original["source"]} if cell["cell_type"] == "markdown" else {}
            assert str(cell | text) == str(original), path
        links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", "".join(translations.text_by_id(built).values()))
        # Where it leads, in this copy or, for what was not copied, in the course.
        for link in links:
            place = Path(os.path.normpath(path.parent / link))
            assert place.exists() or (root / place.relative_to(tmp_path)).exists(), (path, link)


@pytest.mark.parametrize(
    ("file", "old", "new", "named", "kept"),
    [
        (NOTEBOOK, "It draws a few", "It draws some", " baseline: ", "#| msgid "),
        (NOTEBOOK, '"id": "tenth"', '"id": "tenths"', " tenths: ", 'msgctxt "tenths"'),
        (NOTEBOOK, '"id": "tenth"', '"id": "tenths"', " tenth: ", '#~ msgctxt "tenth"'),
        (CATALOGUE, "從 19 降到", "從 18 降到", " baseline-after: number", "從 18 降到"),
        (CATALOGUE, "機率就是 $p^G + (1-p)^G$", "機率就是 $p^G$", " silent: formula", "機率就是 $p^G$"),
        (CATALOGUE, "04](04_grpo_training.ipynb) 就", "04](05.ipynb) 就", " next: link", "05.ipynb"),
        (CATALOGUE, "標準差（`ddof=1`）", "標準差（`ddof=0`）", " agree-after: code", "標準差（`ddof=0`）"),
        (CATALOGUE, '"## 小結', '"小結', " summary: heading", '"小結'),
        (CATALOGUE, "一組的優勢值加起來", "一組的好處加起來", " agree-after: 'advantages'", "一組的好處加起來"),
        (CATALOGUE, r'zh_TW\n"', r"zh_TW\n", ".po, line 4 ", ""),
        (CATALOGUE, 'msgctxt "silent"', 'msgctxt "two"', ".po: two messages for the cell two", ""),
        (NOTEBOOK, '"id": "silent"', '"id": "two"', ".ipynb: two cells have the id two", ""),
        (EXERCISES, "The same group, three", "One group, three", " ex-3-3-text: a new", "#| msgid "),
        (EXERCISES_CATALOGUE, "★★ · 3 分", "★★ · 4 分", " ex-3-7-text: number", "★★ · 4 分"),
        (EXERCISES_CATALOGUE, "GRPO 的（`std`）", "GRPO 的", " ex-3-3-text: code", "GRPO 的"),
        (EXERCISES_CATALOGUE, "〈裁剪〉", "〈目標函數〉", " ex-3-5-text: section", "〈目標函數〉"),
        (EXERCISES_CATALOGUE, '"ex-3-3-text"', '"title"', ".po: two messages for the cell title", ""),
    ],
)
def test_an_edit_that_does_not_fit_is_named(tmp_path, capsys, file, old, new, named, kept) -> None:
    for other in (tmp_path / "dev" / "translations" / "zh_TW").rglob("0[!3]*.po"):
        other.unlink()
    if "exercises" in file and not (tmp_path / "teaching").exists():
        pytest.skip("a student build has no teaching/")
    text = (tmp_path / file).read_text(encoding="utf-8")
    (tmp_path / file).write_text(text.replace(old, new), encoding="utf-8")
    assert translations.main(["check"])
    assert f"03_policy_update{named}" in capsys.readouterr().err
    translations.main(["update"])
    assert kept in "".join(path.read_text(encoding="utf-8") for path in tmp_path.rglob("03_*.po"))


@pytest.mark.parametrize(
    ("written", "built"),
    [
        ("先*訓練*，再 *sample*。", "先「訓練」，再 *sample*。"),
        ("*核心 · 約 25 分鐘*", "核心 · 約 25 分鐘"),
        ("**粗體**裡的*字*，`*碼*` 與 $a*b*c$", "**粗體**裡的「字」，`*碼*` 與 $a*b*c$"),
        ("**圖 1.** 升到 18 %，`10 %`", "**圖 1：**升到 18%，`10 %`"),
        ("*p* 是機率，*q* 也是", "*p* 是機率，*q* 也是"),
    ],
)
def test_chinese_is_set_as_in_taiwan(written, built) -> None:
    assert translations.typeset(written) == built


def test_tables_that_are_english_outputs_follow_in_chinese(root) -> None:
    """Their first column is that of the output: the rules of exercise 2.2, the metrics, the kinds of mistakes."""
    shown = {
        ("02_reward_design", "hole"): [text for text, *_ in final_answer.EXTRACTION_RULES],
        ("05_evaluation", "5a70173e"): list(analysis.MEANINGS),
    }
    for (name, cell), first_column in shown.items():
        path = root / "dev" / "translations" / "zh_TW" / f"{name}.po"
        chinese = translations.messages(translations.read_catalogue(path))[cell].string
        rows = re.findall(r"(?m)^\| (.*?) \|", re.findall(translations.ADDED, chinese)[0])[1:]
        assert [re.sub("`|（.*）", "", row) for row in rows] == first_column
