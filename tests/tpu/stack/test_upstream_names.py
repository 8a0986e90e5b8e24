"""Names and arguments of upstream packages that we use exist in the locked versions: pyright reads their source."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys

from grpo_train.runs import machine

# An import, a name of a module, an argument.
MISSING = re.compile(
    r'could not be resolved|is unknown import symbol|is not a known attribute of|No parameter named "(\w+)"'
)
# What pyright cannot see: classes generated at run time (protobuf, flax.struct), lazy modules.
KNOWN = re.compile(
    r'"(Event|Summary|SessionLog)" is not|wandb"$|tensorflow_datasets|'
    r'named "(split|\w+_ids|\w+_mask|advantages|\w+_per_token_logps)"'
)
MADE_UP = """
import maxtext.no_such_module
from tunix.rl.rl_cluster import RLClusterOfTomorrow
from tunix.rl.rollout.base_rollout import RolloutConfig
from tpu_inference import utils
utils.no_such_function
RolloutConfig(no_such_argument=1)
"""


def test_every_name_and_argument_that_we_use_exists(root, tmp_path):
    (tmp_path / "made_up.py").write_text(MADE_UP)
    rules = ("reportMissingImports", "reportAttributeAccessIssue", "reportCallIssue")
    packages = [os.path.relpath(root / name, tmp_path) for name in ("grpo_lib", "grpo_train")]
    config = {
        "include": [*packages, "made_up.py"],
        "extraPaths": [str(root)],
        "typeCheckingMode": "off",
        **dict.fromkeys(rules, "error"),
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "pyright", "-p", str(tmp_path), "--pythonpath", sys.executable, "--outputjson"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
    assert report["summary"]["filesAnalyzed"] > 40
    made_up, ours = [], []  # what is missing of each
    for diagnostic in report["generalDiagnostics"]:
        place = (diagnostic["file"], diagnostic["range"]["start"]["line"] + 1, diagnostic["message"])
        if not MISSING.search(diagnostic["message"]):
            continue
        if diagnostic["file"].endswith("made_up.py"):
            made_up.append(place)
        elif not KNOWN.search(diagnostic["message"]):
            ours.append(place)
    assert len(made_up) == 4
    assert ours == []


def test_the_installed_versions_are_those_of_the_lock(root):
    lock = (root / "requirements" / "tpu.lock").read_text(encoding="utf-8")
    locked = dict(re.findall(r"^(\S+)==([^\s+]+)", lock, re.MULTILINE))
    installed = {name: importlib.metadata.version(name).partition("+")[0] for name in machine.PACKAGES}
    assert installed == {name: locked[name] for name in installed}
