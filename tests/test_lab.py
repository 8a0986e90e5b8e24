"""What `make lab` opens: JupyterLab serves the notebooks and starts the kernel that they name."""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path


def test_jupyterlab_serves_the_notebooks_and_starts_their_kernel(root: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_WORKSPACES_DIR")
    environment = {**os.environ, **{name: str(tmp_path / name.lower()) for name in names}}
    options = ["--no-browser", "--allow-root", "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}"]
    command = [sys.executable, "-m", "jupyterlab", *options, f"--ServerApp.port={port}"]

    def ask(path: str, **body: str) -> str:
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/{path}", data, headers={"Authorization": f"token {token}"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()

    with open(tmp_path / "server.log", "wb") as log:
        server = subprocess.Popen(
            [*command, f"--ServerApp.root_dir={root / 'notebooks'}"], env=environment, stdout=log, stderr=log
        )
    try:
        for _ in range(120):
            with contextlib.suppress(OSError):
                ask("api")
                break
            assert server.poll() is None, (tmp_path / "server.log").read_text()
            time.sleep(0.5)
        assert "JupyterLab" in ask("lab/tree/00_setup.ipynb")
        wanted = json.loads(ask("api/contents/00_setup.ipynb"))["content"]["metadata"]["kernelspec"]["name"]
        assert json.loads(ask("api/kernels", name=wanted))["name"] == wanted == "grpo-course"
    finally:
        server.terminate()  # the server takes its kernels with it
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(20)
        server.kill()
