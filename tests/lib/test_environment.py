"""environment: caches stay in the repo, and the description of a run names no user, host or folder."""

import getpass
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_lib.common import environment
from grpo_train.runs import machine

# A stand-in for the package: it says when it is called, and whether JAX has looked for devices before.
PATHWAYSUTILS = """
def initialize():
    from jax._src import xla_bridge
    print("initialize:", "too late" if xla_bridge.backends_are_initialized() else "first")
"""

# Programs in which devices wait for one another, with operations large enough to be divided.
COLLECTIVES = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from grpo_lib.common import environment
environment.prepare()
jax.config.update("jax_cpu_enable_async_dispatch", False)
mesh = jax.make_mesh((4,), ("x",))
rows, columns, whole = (NamedSharding(mesh, P(*spec)) for spec in (("x",), (None, "x"), ()))
move = jax.jit(lambda array: array, out_shardings=columns)
gather = jax.jit(lambda array: jnp.tanh(array.astype(jnp.bfloat16)).T, out_shardings=whole)
array = jax.device_put(jnp.ones((2048, 2048)), rows)
print([gather(array) is move(array) for _ in range(100)][-1])
"""


def test_caches_are_in_the_ignored_folder_of_the_repo(root: Path) -> None:
    variables = environment.default_variables()
    folders = [v for k, v in variables.items() if k.endswith(("_DIR", "_HOME", "DIR"))]
    assert len(folders) >= 5 and all(Path(folder).is_relative_to(root / ".cache") for folder in folders)
    assert "JAX_PLATFORMS" not in variables  # a TPU VM must find its TPU


def test_prepare_respects_what_is_set(monkeypatch) -> None:
    monkeypatch.setenv("HF_HOME", "elsewhere")
    monkeypatch.delenv("MPLCONFIGDIR", raising=False)
    environment.prepare()
    assert os.environ["HF_HOME"] == "elsewhere"
    assert os.environ["MPLCONFIGDIR"].endswith("matplotlib")


def test_description_names_versions_and_no_user_or_host() -> None:
    description = machine.describe()
    assert description["packages"]["maxtext"] == "0.2.5"
    assert description["devices"] and description["cores"] >= 1
    private = [platform.node(), str(Path.home()), os.getcwd(), sys.prefix]
    if len(getpass.getuser()) > 4:
        private.append(getpass.getuser())
    assert not [word for word in private if len(word) > 2 and word in json.dumps(description)]


def test_import_is_light() -> None:
    code = (
        "import sys, grpo_lib.answers, grpo_lib.prompts, grpo_lib.statistics, grpo_lib.common.environment; "
        "print({'jax', 'numpy', 'scipy', 'transformers'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


@pytest.mark.parametrize(
    ("platforms", "named"), [("proxy", True), ("cpu,proxy", True), ("", False), ("tpu,cpu", False), ("a-proxy", False)]
)  # fmt: skip
def test_pathways_is_the_platform_proxy(monkeypatch, platforms: str, named: bool) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    assert environment.uses_pathways() is named


@pytest.mark.slow
def test_pathways_is_started_first_and_once(tmp_path: Path) -> None:
    """Where JAX_PLATFORMS names it; in all other tests it does not, and pathwaysutils would be missing."""
    (tmp_path / "pathwaysutils.py").write_text(PATHWAYSUTILS)
    # Modules that import JAX, then a look for devices.  JAX knows no proxy here, so it looks for the CPU.
    code = (
        "import grpo_train.runs.multihost, grpo_train.losses, jax; from grpo_lib.common import environment; "
        "jax.config.update('jax_platforms', 'cpu'); print(len(jax.devices())); environment.prepare()"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    variables = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "proxy,cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["initialize: first", "1"], done.stderr


@pytest.mark.parametrize(
    ("package", "options", "named"),
    [
        (None, [], "pathwaysutils"),  # it cannot be imported
        (SimpleNamespace(initialize=lambda: None), ["hardware.processes=2"], "hardware.processes"),
        (SimpleNamespace(initialize=lambda: None), ["--process=0", "--coordinator=a:1"], "--coordinator"),
    ],
)
def test_what_does_not_go_with_pathways_is_one_line(grpo, monkeypatch, tmp_path, package, options, named) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "proxy")
    monkeypatch.setitem(sys.modules, "pathwaysutils", package)
    monkeypatch.setattr(environment, "_start_pathways", environment._start_pathways.__wrapped__)  # once in a process
    done = grpo("train", "recipes/tiny-cpu.yaml", "--runs", tmp_path / "runs", *options)
    assert done.returncode == 2 and not (tmp_path / "runs").exists()
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ") and named in line


@pytest.mark.slow
def test_virtual_devices_do_not_wait_for_ever() -> None:
    """With as many threads as devices this ends within the first few rounds, on a machine with two cores."""
    seconds = (
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=5 --xla_cpu_collective_call_terminate_timeout_seconds=9"
    )
    variables = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count=4 {seconds}"}
    assert subprocess.check_output([sys.executable, "-c", COLLECTIVES], env=variables, text=True) == "False\n"
