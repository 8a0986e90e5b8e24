"""The layering of grpo_lib: a module imports only from floors below its own, and the lower floors stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

FLOORS = (
    # What every module may use: no course knowledge in it.
    ("errors",),
    ("files", "environment", "generation", "interruption", "metrics", "numerals", "palette", "warning_signs"),
    # Pure Python: what an answer is, what the model is sent, what a run is.
    ("statements", "journal", "accelerators", "batch_plan", "roll_call"),
    ("answers", "prompts", "recipes"),
    ("rewards", "problems", "statistics", "runs", "sources", "taxonomy", "programs"),
    ("records", "memory", "roofline", "rehearsal", "subject", "tracking"),
    ("preflight",),
    # JAX.
    ("processes", "recording", "checkpoints", "loss_kernel"),
    ("hidden_states", "losses"),
    ("models",),
    ("rollout",),
    ("vllm_engine",),
    ("vllm_standalone",),
    ("training", "evaluation"),
    ("compilation",),
    # What a person looks at.
    ("pages", "wording", "comparison", "capacity", "run_comparison"),
    ("figures", "export"),
    ("inspector", "live", "upstream_fields", "upstream_problems", "upstream_functions"),
    ("report", "pipeline", "show", "upstream", "comparison_page"),
    ("cli", "course"),
)
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}


def modules(root: Path) -> dict[str, list[Path]]:
    """Module or subpackage name -> its files."""
    package = root / "grpo_lib"
    found = {path.stem: [path] for path in package.glob("*.py") if path.stem != "__init__"}
    return found | {
        path.name: sorted(path.glob("*.py")) for path in package.iterdir() if (path / "__init__.py").exists()
    }


def imports(path: Path) -> set[str]:
    """Names of grpo_lib modules that a file imports, wherever in the file; for type checking does not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "grpo_lib":
            rest = node.module.split(".")[1:]
            names |= {rest[0]} if rest else {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("grpo_lib.")}
    return names


def test_every_module_has_a_floor(root):
    assert set(modules(root)) == set(FLOOR)


def test_a_module_imports_only_from_floors_below(root):
    wrong = [
        f"{name} imports {other}"
        for name, files in modules(root).items()
        for file in files
        for other in imports(file) - {name}
        if FLOOR[other] >= FLOOR[name]
    ]
    assert wrong == []


@pytest.mark.parametrize("name", [name for names in FLOORS[:7] for name in names])
def test_lower_floors_import_no_heavy_library(name):
    code = f"import sys, grpo_lib.{name}; print(*sorted(sys.modules.keys() & {{'jax', 'scipy', 'transformers'}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
