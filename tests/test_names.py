"""What the first notebooks import: the page that lists it, and what they never load."""

import subprocess
import sys

import notebook_names

# What the notebooks that a newcomer reads must do without.
COMPETITION = ("grpo_lib.answers.competition", "grpo_lib.problems.competition")


def test_the_page_of_names_is_todays() -> None:
    made = notebook_names.PAGE.read_text(encoding="utf-8")
    assert made == notebook_names.page(), "python dev/tools/notebook_names.py writes it"


def test_every_name_says_what_it_is_for() -> None:
    rows = [line.split("|") for line in notebook_names.page().splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    assert [row[1].strip() for row in rows if len(row[3].strip()) < 5] == []


def test_the_course_loads_nothing_that_only_competition_mathematics_needs(root) -> None:
    names = {name for path in (root / "notebooks").glob("0[2-5]*.ipynb") for name in notebook_names.names_in(path)}
    modules = sorted({name.rpartition(".")[0] for name in names})
    code = "\n".join([
        "import importlib, sys",
        f"for name in {modules}: importlib.import_module(name)",
        "from grpo_lib import answers, problems",
        "from grpo_train.recipes import load_recipe",
        "assert answers.is_correct('<reasoning>9*2=18</reasoning><answer>18</answer>', '18')",
        "problems.load_problems(load_recipe('recipes/tiny-cpu.yaml').problems, 'test')",
        f"print([name for name in {COMPETITION} if name in sys.modules])",
    ])  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr[-2000:]
