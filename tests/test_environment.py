"""environment: caches stay in the repo, and the description of a run gives nobody away."""

import getpass
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from grpo_lib import environment


def test_root_is_the_repo(root: Path) -> None:
    assert (root / "pyproject.toml").is_file()
    assert (root / "grpo_lib" / "environment.py").is_file()


def test_caches_are_in_the_ignored_folder(root: Path) -> None:
    variables = environment.default_variables()
    folders = [v for k, v in variables.items() if k.endswith(("_DIR", "_HOME", "DIR"))]
    assert len(folders) >= 5
    assert all(Path(folder).is_relative_to(root / ".cache") for folder in folders)
    assert "JAX_PLATFORMS" not in variables  # a TPU VM must find its TPU


def test_prepare_respects_what_is_set(monkeypatch) -> None:
    monkeypatch.setenv("HF_HOME", "elsewhere")
    monkeypatch.delenv("MPLCONFIGDIR", raising=False)
    environment.prepare()
    assert os.environ["HF_HOME"] == "elsewhere"
    assert os.environ["MPLCONFIGDIR"].endswith("matplotlib")


def test_description_names_versions_and_nobody() -> None:
    description = environment.describe()
    text = json.dumps(description)
    assert description["packages"]["maxtext"] == "0.2.5"
    assert description["devices"] and description["cores"] >= 1
    private = [platform.node(), str(Path.home()), os.getcwd(), sys.prefix]
    if len(getpass.getuser()) > 4:
        private.append(getpass.getuser())
    assert not [word for word in private if len(word) > 2 and word in text]


def test_import_is_light() -> None:
    code = "import sys, grpo_lib.environment; print(sorted({'jax', 'numpy', 'matplotlib'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
