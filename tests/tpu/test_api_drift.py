"""Every name, argument and config key of an upstream package that we use is there, in the versions of the lock.

A walk over the syntax trees of the project's files finds the uses, so that no list has to be kept: imports, dotted
names on what was imported, attributes that are replaced, and the arguments of calls.  What is called on an object at
run time is beyond such a walk; the other tests of this folder run it.

The walk has a process of its own (this file run as a program), because other tests replace what it looks at.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "maxtext", "tunix", "vllm", "tpu_inference", "jax", "flax", "optax", "orbax", "qwix", "transformers", "grain",
    "tensorflow_datasets", "huggingface_hub", "safetensors", "tokenizers",
}  # fmt: skip
FILES = sorted(
    path
    for pattern in ("grpo_lib/**/*.py", "assets/**/*.py", "benchmarks/*.py", "tests/tpu/*.py", "notebooks/*.ipynb")
    for path in ROOT.glob(pattern)
    if path != Path(__file__)  # its own text holds made-up names
)
# Attributes that our code adds to a module, on purpose.
ADDED = {"vllm.on_cpu"}
# Arguments that a class takes although its signature does not say so, and why.
TAKEN = {
    "Qwen3Config takes no argument rope_theta",  # transformers 5 still folds it into rope_parameters
}
# Peers of the benchmarks, whose environment is another: .venv-trl.
ELSEWHERE = {"benchmarks/trl_grpo.py"}
LOCKED = (
    "maxtext", "google-tunix", "vllm-tpu", "tpu-inference", "jax", "jaxlib", "libtpu", "flax", "qwix", "optax",
    "orbax-checkpoint", "transformers", "grain", "tensorflow-datasets", "huggingface-hub", "torch", "numpy",
)  # fmt: skip


def source_of(path: Path) -> str:
    """Python text of a file; of a notebook its code cells, without the lines that only IPython reads."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    lines = "\n".join(cell if isinstance(cell, str) else "".join(cell) for cell in cells).splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!")))


class Walk(ast.NodeVisitor):
    """Resolves what a file takes from the packages.  `problems` holds what is not there, `checked` counts."""

    def __init__(self, name: str):
        self.name = name
        self.scopes: list[dict[str, Any]] = [{}]  # name -> imported object, or None for a name of our own
        self.problems: list[str] = []
        self.checked = {"imports": 0, "names": 0, "calls": 0, "keywords": 0}

    def complain(self, node: ast.AST, text: str) -> None:
        self.problems.append(f"{self.name}:{node.lineno}: {text}")

    # Scopes: a name that a function makes itself hides an import of the same name.

    def visit_Module(self, node: ast.Module) -> None:
        self._enter(node.body)
        self.generic_visit(node)

    def visit_FunctionDef(self, node) -> None:
        for decorator in node.decorator_list:
            self.visit(decorator)
        arguments = node.args
        own = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        own += [a.arg for a in (arguments.vararg, arguments.kwarg) if a]
        for default in (*arguments.defaults, *filter(None, arguments.kw_defaults)):
            self.visit(default)
        self.scopes.append(dict.fromkeys(own))
        self._enter(node.body)
        for statement in node.body:
            self.visit(statement)
        self.scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.scopes.append({a.arg: None for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)})
        self.visit(node.body)
        self.scopes.pop()

    def _enter(self, body: list[ast.stmt]) -> None:
        """Bind the imports of a body and the names it assigns; what is defined inside looks after itself."""
        todo: list[ast.AST] = list(body)
        imports: list[ast.Import | ast.ImportFrom] = []
        while todo:
            node = todo.pop(0)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.scopes[-1][node.name] = None
                continue
            if isinstance(node, ast.Import | ast.ImportFrom):
                imports.append(node)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.scopes[-1][node.id] = None
            todo.extend(ast.iter_child_nodes(node))
        for node in imports:
            self._bind(node)

    def _bind(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.ImportFrom):
            if node.level or (node.module or "").split(".")[0] not in PACKAGES:
                return
            for alias in node.names:
                self.checked["imports"] += 1
                bound = alias.asname or alias.name
                try:
                    self.scopes[-1][bound] = taken_from(node.module, alias.name)
                except (ImportError, AttributeError) as error:
                    self.complain(node, f"from {node.module} import {alias.name}: {error}")
            return
        for alias in node.names:
            if alias.name.split(".")[0] not in PACKAGES:
                continue
            self.checked["imports"] += 1
            try:
                module = importlib.import_module(alias.name)
            except ImportError as error:
                self.complain(node, f"import {alias.name}: {error}")
                continue
            first = alias.name.split(".")[0]
            self.scopes[-1][alias.asname or first] = module if alias.asname else sys.modules[first]

    # Uses.

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not self._chain(node):
            self.generic_visit(node)
            return
        self._resolve(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        called, arguments = node.func, node.args
        if ast.unparse(called) in ("functools.partial", "partial") and arguments:
            called, arguments = arguments[0], arguments[1:]
        target = self._object(called)
        if target is None or not callable(target):
            return
        self.checked["calls"] += 1
        try:
            parameters = inspect.signature(target).parameters
        except (TypeError, ValueError):  # written in C: no signature to look at
            return
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        for keyword in node.keywords:
            if keyword.arg is None:
                continue
            self.checked["keywords"] += 1
            known = keyword.arg in parameters and parameters[keyword.arg].kind is not inspect.Parameter.POSITIONAL_ONLY
            text = f"{ast.unparse(called)} takes no argument {keyword.arg}"
            if not known and not takes_any and text not in TAKEN:
                self.complain(node, text)
        places = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        starred = any(isinstance(a, ast.Starred) for a in arguments)
        if (
            not starred
            and len(arguments) > len(places)
            and not any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
        ):
            self.complain(node, f"{ast.unparse(called)} takes {len(places)} positional arguments, not {len(arguments)}")

    def _chain(self, node: ast.expr) -> list[str] | None:
        """a.b.c as ["a", "b", "c"] if a is imported from the packages."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or self._lookup(node.id) is None:
            return None
        return [node.id, *reversed(parts)]

    def _lookup(self, name: str) -> Any:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return None

    def _object(self, node: ast.expr) -> Any:
        """What an expression names, where that is known without running anything; problems are told elsewhere."""
        chain = self._chain(node)
        if not chain:
            return None
        found = self._lookup(chain[0])
        for part in chain[1:]:
            found = getattr(found, part, None) if inspect.ismodule(found) or inspect.isclass(found) else None
        return found

    def _resolve(self, node: ast.Attribute) -> None:
        chain = self._chain(node)
        found, said = self._lookup(chain[0]), chain[0]
        for part in chain[1:]:
            if not (inspect.ismodule(found) or inspect.isclass(found)):
                return  # an object at run time
            said += f".{part}"
            self.checked["names"] += 1
            if not has(found, part):
                if said not in ADDED:
                    self.complain(node, f"{said} does not exist")
                return
            found = getattr(found, part, None)


def taken_from(module: str, name: str) -> Any:
    """What `from module import name` binds."""
    found = importlib.import_module(module)
    if name != "*" and not hasattr(found, name):
        return importlib.import_module(f"{module}.{name}")
    return getattr(found, name, None)


def has(found: Any, name: str) -> bool:
    """A field of a dataclass without a default is no attribute of its class."""
    return hasattr(found, name) or name in getattr(found, "__dataclass_fields__", {})


def walk(source: str, name: str = "made up") -> Walk:
    walker = Walk(name)
    walker.visit(ast.parse(source))
    return walker


def config_keys() -> dict[str, list[str]]:
    """MaxText keys that we emit, by the config class that reads them."""
    os.chdir(ROOT)  # model.path of a recipe is relative to the repository
    from grpo_lib import models, upstream
    from grpo_lib.recipes import load_recipe

    tiny = load_recipe(ROOT / "recipes" / "tiny-cpu.yaml", ["rollout.max_prompt_length=48"])
    more = {
        keyword.arg
        for path in FILES
        for node in ast.walk(ast.parse(source_of(path)))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "maxtext_arguments"
        for keyword in node.keywords
        if keyword.arg not in (None, "weights")
    }
    given = [argument.partition("=")[0] for argument in models.maxtext_arguments(tiny.model)[2:]]
    return {
        "MaxTextConfig": sorted({*given, *more}),
        "RLConfig": sorted(upstream.settings(tiny, Path("a"), Path("b"), Path("c"))),
    }


def unknown_keys(keys: dict[str, list[str]]) -> list[str]:
    from maxtext.configs import types

    def is_known(config: Any, key: str) -> bool:
        section, _, inner = key.rpartition(".")
        return inner in (config.model_fields[section].annotation if section else config).model_fields

    return [
        f"{name} has no key {key}" for name in keys for key in keys[name] if not is_known(getattr(types, name), key)
    ]


def report() -> dict[str, Any]:
    """The whole walk, as JSON for the tests."""
    checked: dict[str, int] = {}
    problems: list[str] = []
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        if name in ELSEWHERE:
            continue
        done = walk(source_of(path), name)
        problems += done.problems
        checked = {key: checked.get(key, 0) + count for key, count in done.checked.items()}
    keys = config_keys()
    made_up = {
        what: walk(source).problems
        for what, source in {
            "import": "from tunix.rl.rl_cluster import RLClusterOfTomorrow",
            "module": "import maxtext.no_such_module",
            "attribute": "import optax\noptax.schedules.no_such_schedule",
            "attribute of a class": "from tunix.rl import rl_cluster as rl\nrl.Role.NOBODY",
            "replaced": "from tpu_inference import utils\ndef f():\n    utils.no_such_function = 1",
            "argument": "from tunix.rl.grpo.grpo_learner import GRPOConfig\nGRPOConfig(number_of_generations=2)",
            "argument through partial": "import functools, optax\nfunctools.partial(optax.adamw, no_such=1)",
            "argument in a function": "def f():\n    import jax\n    return jax.device_put(1, no_such=2)",
            "positional arguments": "from tunix.rl.common import compute_per_token_logps as c\nc(*[], **{})\nc("
            + ", ".join("1" * 30) + ")",
        }.items()
    }  # fmt: skip
    fine = walk(
        "import jax\nfrom tunix.rl.rollout.base_rollout import RolloutConfig\n"
        "def f(jax):\n    return jax.anything, RolloutConfig(temperature=1.0)\n"
    ).problems
    return {
        "problems": problems,
        "checked": checked,
        "keys": keys,
        "unknown_keys": unknown_keys(keys),
        "unknown_made_up_keys": unknown_keys({"RLConfig": ["no_such", "rl.no_such"], "MaxTextConfig": ["no_such"]}),
        "made_up": made_up,
        "fine": fine,
    }


@pytest.fixture(scope="module")
def findings() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_name_and_argument_that_we_use_is_there(findings):
    assert findings["problems"] == []


def test_the_walk_saw_what_there_is_to_see(findings):
    """A walker that looks away finds nothing wrong."""
    checked = findings["checked"]
    assert checked["imports"] > 100 and checked["names"] > 150 and checked["calls"] > 100 and checked["keywords"] > 80


def test_every_config_key_that_we_emit_is_a_field_of_maxtexts_config(findings):
    assert "base_emb_dim" in findings["keys"]["MaxTextConfig"] and "rl.grpo_beta" in findings["keys"]["RLConfig"]
    assert findings["unknown_keys"] == []


def test_what_is_taken_in_spite_of_its_signature_still_is():
    from transformers import Qwen3Config

    assert Qwen3Config(rope_theta=5.0).rope_parameters["rope_theta"] == 5.0


def test_what_is_made_up_is_found(findings):
    assert [what for what, problems in findings["made_up"].items() if len(problems) != 1] == []
    assert len(findings["unknown_made_up_keys"]) == 3
    assert findings["fine"] == []


@pytest.mark.parametrize("package", LOCKED)
def test_the_installed_version_is_the_one_of_the_lock(package):
    lock = (ROOT / "requirements" / "tpu.lock").read_text(encoding="utf-8")
    locked = re.search(rf"^{re.escape(package)}==(\S+)", lock, re.MULTILINE)
    assert locked, f"{package} is not in tpu.lock"
    assert importlib.metadata.version(package).partition("+")[0] == locked.group(1)


if __name__ == "__main__":
    import logging

    logging.disable(logging.CRITICAL)
    sys.path.insert(0, str(ROOT / "tests" / "tpu"))
    print(json.dumps(report()))
