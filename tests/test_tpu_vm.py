"""tpu/tpu.sh against a stand-in gcloud that fails as the real one does, and whose workers run real processes."""

import atexit
import functools
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import standin_gcloud

from grpo_lib import recipes

SMOKE = "recipes/qwen3-1.7b-gsm8k-smoke.yaml"
RUN = "qwen3-1.7b-gsm8k-smoke"
SECRETS = {"HF_TOKEN": "hf_" + "Q7" * 17, "WANDB_API_KEY": "Wb" * 20}
COMMANDS = ("create", "bootstrap", "run", "status", "logs", "fetch", "stop", "delete")

GRPO = """#!/usr/bin/env bash
name=NAME
case $1 in
  config)
    case " $* " in *" bad=1 "*) echo "error: unknown key bad" >&2; exit 2 ;; esac
    online=off
    case " $* " in *" tracking.wandb=online "*) online=online ;; esac
    echo "{\\"name\\": \\"$name\\", \\"tracking\\": {\\"wandb\\": \\"$online\\"}}" ;;
  train)
    echo "token ${#HF_TOKEN}, key ${#WANDB_API_KEY}, platforms $JAX_PLATFORMS, $*"
    case " $* " in
      *" crash=3 "*) echo "ABORTED: The TPU is already in use by process with pid 7."; exit 3 ;;
      *" stubborn=1 "*) trap '' TERM; while :; do sleep 0.1; done ;;
      *" sleep=1 "*) exec sleep 600 ;;
    esac
    mkdir -p runs/$name/evals runs/$name/checkpoints runs/$name/export
    for file in recipe.yaml metrics.jsonl report.html evals/after.jsonl checkpoints/huge export/huge; do
      echo "$file of $(hostname)" > runs/$name/$file
    done
    echo "after 61.2% of 1319 problems" ;;
esac
"""


TOOLS = (
    "awk", "basename", "bash", "cat", "chmod", "cp", "cut", "date", "dirname", "env", "find", "flock", "git", "grep",
    "gzip", "head", "hostname", "id", "lsof", "mkdir", "mktemp", "mv", "nohup", "pgrep", "rm", "sed", "sh", "sleep",
    "tail", "tar", "touch", "tr",
)  # fmt: skip


@functools.cache
def tools() -> Path:
    """A folder of programs to be a whole PATH: a real gcloud, with whatever it may reach, is not within reach."""
    folder = Path(tempfile.mkdtemp(prefix="grpo-tools-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in TOOLS:
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    return folder


def program(root: Path, *words: str, **options) -> subprocess.CompletedProcess:
    """tpu.sh without any gcloud."""
    environment = {"PATH": str(tools()), "HOME": str(tools()), "LANG": "C.UTF-8"}
    command = ["bash", "tpu/tpu.sh", *words]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=60, **options)


class Laptop:
    """A clone, a stand-in gcloud on PATH, and the program."""

    def __init__(self, folder: Path, clone: Path, scenario: dict | None = None):
        self.folder, self.clone = folder, clone
        self.bin = standin_gcloud.install(folder, scenario)
        self.environment = {
            "PATH": f"{self.bin}:{tools()}", "HOME": str(folder), "LANG": "C.UTF-8",
            "CLOUDSDK_CONFIG": str(folder / "none"),
            "GRPO_TPU_POLL": "0.05", "GRPO_TPU_TIMEOUT": "20", "GRPO_TPU_ZONES": "a", "TMPDIR": str(folder),
            "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull,
        }  # fmt: skip

    def rent(self, zone: str = "a") -> None:
        """What `create` would leave, without its calls."""
        self.scenario()
        (self.folder / "requests.json").write_text(json.dumps({f"{zone}/grpo": {"states": ["ACTIVE"], "said": ""}}))
        (self.clone / ".cache" / "tpu").mkdir(parents=True)
        (self.clone / ".cache" / "tpu" / "grpo").write_text(f"{zone}\nv6e-8\nspot\n")

    def scenario(self, **changes) -> None:
        (self.folder / "scenario.json").write_text(json.dumps(changes))

    def __call__(self, *words: str, trace: bool = False, typed: str = "", **variables: str):
        command = ["bash", *(["-x"] if trace else []), str(self.clone / "tpu" / "tpu.sh"), *words]
        return subprocess.run(
            command, cwd=self.clone, env=self.environment | variables, input=typed, capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip

    def calls(self) -> list[dict]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def asked(self, *names: str) -> list[tuple[str, str, str]]:
        """(command, zone, pricing) of the calls of these subcommands of queued-resources."""
        rows = []
        for call in self.calls():
            command, _, flags = standin_gcloud.parse(call["words"])
            if command in [f"queued-resources {name}" for name in names]:
                pricing = "spot" if "spot" in flags else "on-demand"
                rows.append((command.split()[1], flags["zone"], pricing if command.endswith("create") else ""))
        return rows

    def home(self, worker: int = 0) -> Path:
        return self.folder / "workers" / str(worker)


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()  # fmt: skip


@pytest.fixture(scope="module")
def repository(root: Path, tmp_path_factory) -> Path:
    """A small repository with the real tpu/ and recipes/, and an environment that takes no time to install."""
    folder = tmp_path_factory.mktemp("repository") / "clone"
    for name in ("tpu", "recipes"):
        shutil.copytree(root / name, folder / name)
    (folder / ".gitignore").write_text(".venv*/\n.cache/\nruns/\n")
    (folder / "tools").mkdir()
    python = f'case "$*" in *"import jax"*) echo "4 of 8 chips" ;; *) exec {sys.executable} "$@" ;; esac'
    scripts = {
        "find-python.sh": "#!/bin/sh\necho python3\n",
        "setup.sh": f"""#!/bin/sh
mkdir -p $1/bin
cat > $1/bin/python << 'END'
#!/bin/sh
{python}
END
cat > $1/bin/grpo << 'END'
{GRPO.replace("NAME", RUN, 1)}END
chmod +x $1/bin/*
echo "setup: done"
""",
    }
    for name, text in scripts.items():
        (folder / "tools" / name).write_text(text)
        (folder / "tools" / name).chmod(0o755)
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message=all")
    return folder


@pytest.fixture
def laptop(repository: Path, tmp_path: Path) -> Laptop:
    clone = tmp_path / "clone"
    shutil.copytree(repository, clone, symlinks=True)
    return Laptop(tmp_path / "standin", clone)


@pytest.fixture(scope="module")
def rented(repository: Path, tmp_path_factory) -> Laptop:
    """A TPU of two workers, created and bootstrapped with both secrets; tests leave it without a run."""
    folder = tmp_path_factory.mktemp("rented")
    clone = folder / "clone"
    shutil.copytree(repository, clone, symlinks=True)
    laptop = Laptop(folder / "standin", clone, {"workers": 2})
    for words in (("create", SMOKE), ("bootstrap",)):
        done = laptop(*words, **SECRETS)
        assert done.returncode == 0, done.stderr
        laptop.said = getattr(laptop, "said", "") + done.stdout + done.stderr
    return laptop


@pytest.fixture
def vm(rented: Laptop):
    rented.scenario(workers=2)
    shutil.rmtree(rented.clone / "runs", ignore_errors=True)
    yield rented
    rented.scenario(workers=2)
    done = rented("stop")
    assert done.returncode == 0, done.stderr
    for worker in (0, 1):
        shutil.rmtree(rented.home(worker) / "grpo" / "runs", ignore_errors=True)
        for path in (rented.home(worker) / ".grpo").glob("run.*"):
            path.unlink()


def wait_for(laptop: Laptop, name: str, text: str = "", seconds: float = 20) -> None:
    """Until the file of both workers' state has the text."""
    end = time.monotonic() + seconds
    for worker in (0, 1):
        path = laptop.home(worker) / ".grpo" / name
        while not (path.exists() and text in path.read_text()):
            assert time.monotonic() < end, f"{path} has no {text}"
            time.sleep(0.02)


# --- the session, as commands -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clean_clone(root: Path, tmp_path_factory) -> Path:
    """A clean clone of this repository, with nothing set up, at the state of the working tree."""
    if not (root / ".git").exists():
        pytest.skip("tpu: this is no git clone, so none can be made of it")
    folder = tmp_path_factory.mktemp("clean") / "a clone"
    git(root, "clone", "--quiet", str(root), str(folder))
    for name in ("tpu", "recipes"):
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(root / name, folder / name)
    git(folder, "add", "--all")
    if git(folder, "status", "--porcelain"):
        git(folder, "commit", "--quiet", "--message=the working tree")
    return folder


def dry_run(clone: Path, *words: str) -> subprocess.CompletedProcess:
    return program(clone, "--dry-run", *words)


def commands_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_dry_run_of_the_smoke_recipe_is_a_whole_session(clean_clone: Path) -> None:
    done = dry_run(clean_clone, SMOKE)
    assert done.returncode == 0 and done.stderr == "" and "would be refused" not in done.stdout
    steps = []
    for line in commands_of(done.stdout):
        assert subprocess.run(["bash", "-n", "-c", line]).returncode == 0, line
        for command in re.findall(r"gcloud .*?(?=\) \||$)", line):
            what, _, flags = standin_gcloud.parse(shlex.split(command)[1:])  # gcloud has every flag
            steps.append(what.split()[1] + " " + re.sub(r"^.*on_vm\.sh ", "", flags.get("command", ""))[:24])
    assert [step.strip() for step in steps] == [
        "create", "describe",
        "ssh mkdir -p -m 700 .grpo", "scp", f"ssh {'set -e; test -d grpo/.git'[:24]}",
        "scp", "ssh secrets", "ssh install", "ssh check",
        "ssh idle", f"ssh {f'start {SMOKE}'[:24]}",
        "describe", "ssh status",
        "ssh tail -n 100 -F .grpo/run", f"ssh {f'pack {RUN}'[:24]}", "scp",
        "delete",
    ]  # fmt: skip
    assert "--accelerator-type=v6e-8 --runtime-version=v2-alpha-tpuv6e --spot" in done.stdout
    assert subprocess.run(["git", "status", "--porcelain"], cwd=clean_clone, capture_output=True).stdout == b""


def test_every_fallback_is_printed_in_order(clean_clone: Path) -> None:
    text = dry_run(clean_clone, SMOKE, "--zones", "a,b", "--on-demand").stdout
    made = [line for line in text.splitlines() if "queued-resources create" in line]
    found = [(re.search(r"--zone=(\w)", line).group(1), "--spot" in line) for line in made]
    assert found == [("a", False), ("b", False), ("a", True), ("b", True)]
    assert [line.startswith("#") for line in made] == [False, True, True, True]


def test_the_printed_session_runs_when_it_is_pasted(laptop: Laptop) -> None:
    text = laptop("--dry-run", SMOKE).stdout.replace("tail -n 100 -F", "tail -n 100").replace("sleep 20", "sleep 0.1")
    text = text.replace("tpu/on_vm.sh status", "sleep 0.5; tpu/on_vm.sh status")  # give the run its moment
    done = subprocess.run(
        ["bash", "-e"], input=text, cwd=laptop.clone, env=laptop.environment | SECRETS, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "worker 0: finished" in done.stdout and "token 37, key 40" in done.stdout
    assert (laptop.clone / "runs" / RUN / "report.html").exists()
    assert json.loads((laptop.folder / "requests.json").read_text()) == {}
    assert not (laptop.clone / ".cache" / "tpu" / "grpo.secrets").exists()


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_accelerator_and_run_are_read_as_the_library_reads_them(root: Path, path: Path) -> None:
    for profile in ["", *recipes.profiles_of(path), ",".join(recipes.profiles_of(path))]:
        name = f"recipes/{path.name}" + (f"@{profile}" if profile else "")
        recipe = recipes.load_recipe(root / name)
        done = dry_run(root, "session", name)
        if recipe.hardware.accelerator is None:
            assert done.returncode == 2 and "names no hardware.accelerator" in done.stderr
            continue
        kind = recipe.hardware.accelerator.replace("v5e", "v5litepod")
        assert f"--accelerator-type={kind} " in done.stdout and f"pack {recipe.name}'" in done.stdout


def test_overrides_reach_create_run_and_fetch(root: Path) -> None:
    words = [SMOKE, "hardware.accelerator=v5e-16", "rewards=[it's]"]
    text = dry_run(root, *words, "--run", "mine").stdout
    assert "--accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite" in text and "pack mine'" in text
    start = next(line for line in text.splitlines() if "on_vm.sh start" in line)
    remote = standin_gcloud.parse(shlex.split(start)[1:])[2]["command"]
    assert shlex.split(remote)[-5:] == [*words, "--run", "mine"]


# --- create -----------------------------------------------------------------------------------------------------


def test_no_capacity_goes_on_to_the_next_zone_then_to_the_other_pricing(laptop: Laptop) -> None:
    fate = {
        "a": {"spot": "no-capacity", "on-demand": "expired"},
        "b": {"spot": "capacity", "on-demand": "waiting"},
        "c": {"spot": "preempted", "on-demand": "at-once"},
    }
    laptop.scenario(fate=fate)
    done = laptop("create", SMOKE, "--zones", "a,b,c", "--wait", "0")
    assert done.returncode == 0, done.stderr
    assert laptop.asked("create") == [
        ("create", "a", "spot"), ("create", "b", "spot"), ("create", "c", "spot"),
        ("create", "a", "on-demand"), ("create", "b", "on-demand"), ("create", "c", "on-demand"),
    ]  # fmt: skip
    # A request that came to nothing is deleted before the next one is made, and one is left at the end.
    between = [name for name, _, _ in laptop.asked("create", "delete")]
    assert between == ["create", "delete"] * 5 + ["create"]
    assert list(json.loads((laptop.folder / "requests.json").read_text())) == ["c/grpo"]
    assert "ACTIVE in c (on-demand), and billed" in done.stdout


def test_on_demand_first_falls_back_to_spot_or_not_at_all(laptop: Laptop) -> None:
    laptop.scenario(fate={"a": {"on-demand": "no-capacity", "spot": "no-capacity"}})
    done = laptop("create", SMOKE, "--zones", "a", "--on-demand")
    assert done.returncode == 2 and "no capacity for v6e-8; tried a(on-demand) a(spot)" in done.stderr
    assert [row[2] for row in laptop.asked("create")] == ["on-demand", "spot"]
    laptop("create", SMOKE, "--zones", "a", "--no-fallback")
    assert [row[2] for row in laptop.asked("create")] == ["on-demand", "spot", "spot"]


@pytest.mark.parametrize(
    ("fate", "said"),
    [
        ("quota", "remedy: no quota: "),
        ("permission", "remedy: permission denied: "),
        ("type", "remedy: not offered to this project: "),
        ("broken", "remedy: an internal error at Google's: "),
    ],
)
def test_another_error_ends_it_with_its_remedy(laptop: Laptop, fate: str, said: str) -> None:
    laptop.scenario(fate={"a": fate})
    done = laptop("create", SMOKE, "--zones", "a,b")
    assert done.returncode == 1 and said in done.stderr
    assert laptop.asked("create") == [("create", "a", "spot")]
    assert json.loads((laptop.folder / "requests.json").read_text()) == {}


@pytest.mark.parametrize(
    ("always", "said"),
    [
        ("api", "gcloud services enable tpu.googleapis.com"),
        ("account", "gcloud auth login"),
        ("project", "name it with --project"),
    ],
)
def test_a_gcloud_that_is_not_ready_says_what_to_do(laptop: Laptop, always: str, said: str) -> None:
    laptop.scenario(always=always)
    done = laptop("create", SMOKE)
    assert done.returncode == 1 and re.search(rf"^remedy: .*{re.escape(said)}", done.stderr, re.MULTILINE)
    assert len(laptop.calls()) == 1


def test_create_again_says_that_it_is_there(laptop: Laptop) -> None:
    assert laptop("create", SMOKE, "--zones", "a,b").returncode == 0
    again = laptop("create", SMOKE, "--zones", "b,a")
    assert again.returncode == 0 and "grpo is ACTIVE in a already" in again.stdout
    assert len(laptop.asked("create")) == 1


def test_a_preempted_one_is_deleted_and_asked_for_again(laptop: Laptop) -> None:
    laptop.rent()
    laptop.scenario(preempted=True)
    assert "remedy: preempted: " in laptop("status").stdout
    done = laptop("create", SMOKE, "--zones", "a", "--no-fallback")  # it is preempted again at once
    assert done.returncode == 2
    assert [name for name, _, _ in laptop.asked("create", "delete")] == ["delete", "create", "delete"]


def test_an_interrupted_create_says_that_the_request_stands(laptop: Laptop) -> None:
    laptop.scenario(fate={"a": "waiting"})
    command = ["bash", str(laptop.clone / "tpu" / "tpu.sh"), "create", SMOKE, "--zones", "a"]
    process = subprocess.Popen(
        command, cwd=laptop.clone, env=laptop.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while "WAITING" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 143 and "the request grpo may still be granted in a" in errors
    withdrawn = laptop("delete", "--yes", "--zones", "a")
    assert withdrawn.returncode == 0 and json.loads((laptop.folder / "requests.json").read_text()) == {}


# --- bootstrap and secrets --------------------------------------------------------------------------------------


def test_bootstrap_brings_the_commit_to_all_workers(rented: Laptop) -> None:
    commit = git(rented.clone, "rev-parse", "HEAD")
    for worker in (0, 1):
        assert git(rented.home(worker) / "grpo", "rev-parse", "HEAD") == commit
        assert (rented.home(worker) / "grpo" / ".venv-tpu" / "bin" / "grpo").exists()


def test_secrets_arrive_with_mode_600_and_are_seen_nowhere(rented: Laptop) -> None:
    for worker in (0, 1):
        file = rented.home(worker) / ".grpo" / "secrets"
        assert dict(line.split("=", 1) for line in file.read_text().splitlines()) == SECRETS
        assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert "secret HF_TOKEN: 37 characters" in rented.said and "worker 1: HF_TOKEN: 37 characters" in rented.said
    kept = [path.read_bytes() for path in (rented.clone / ".cache").rglob("*") if path.is_file()]
    recorded = json.dumps(rented.calls())
    assert len(rented.calls()) > 10 and all(call["secrets_on_command_lines"] == [] for call in rented.calls())
    for value in SECRETS.values():
        assert value not in rented.said and value not in recorded
        assert not any(value.encode() in content for content in kept)


@pytest.mark.parametrize("words", [("bootstrap",), ("bootstrap", "--dry-run"), ("--dry-run", SMOKE)])
def test_a_trace_shows_no_secret(laptop: Laptop, words: tuple[str, ...]) -> None:
    laptop.rent()
    done = laptop(*words, trace=True, **SECRETS)
    assert done.returncode == 0 and "+ send_secrets" in done.stderr
    for value in SECRETS.values():
        assert value not in done.stdout + done.stderr + json.dumps(laptop.calls())
    assert "secret HF_TOKEN: 37 characters" in done.stdout


def test_the_secrets_file_goes_also_when_sending_fails(laptop: Laptop) -> None:
    laptop.rent()
    gcloud = (laptop.bin / "gcloud").read_text()
    (laptop.bin / "gcloud").write_text(gcloud.replace("\nexec", '\ncase "$*" in *secrets*) exit 1 ;; esac\nexec'))
    done = laptop("bootstrap", **SECRETS)
    assert done.returncode == 1 and "error: sending the secrets failed" in done.stderr
    assert not (laptop.clone / ".cache" / "tpu" / "grpo.secrets").exists()


def test_a_secret_with_white_space_is_refused(laptop: Laptop) -> None:
    laptop.rent()
    done = laptop("bootstrap", HF_TOKEN="hf_a b")
    assert done.returncode == 2 and "white space" in done.stderr and "hf_a" not in done.stdout + done.stderr


def test_bootstrap_refuses_what_the_vm_would_not_have(laptop: Laptop) -> None:
    laptop.rent()
    before = len(laptop.calls())
    (laptop.clone / SMOKE).write_text("changed\n")
    dirty = laptop("bootstrap")
    assert dirty.returncode == 2 and "tracked files differ" in dirty.stderr and "--allow-dirty" in dirty.stderr
    git(laptop.clone, "checkout", "--quiet", SMOKE)
    git(laptop.clone, "remote", "add", "origin", "https://example.org/grpo.git")
    unpushed = laptop("bootstrap")
    assert unpushed.returncode == 2 and "is not pushed to https://example.org/grpo.git" in unpushed.stderr
    assert laptop("bootstrap", "--commit", "abcdef0").returncode == 2
    assert len(laptop.calls()) == before
    assert laptop("bootstrap", "--bundle").returncode == 0
    git(laptop.clone, "update-ref", "refs/remotes/origin/main", "HEAD")
    assert (
        "git clone --quiet --no-checkout https://example.org/grpo.git grpo" in laptop("bootstrap", "--dry-run").stdout
    )


@pytest.mark.parametrize(
    ("connection", "said"),
    [("host-key", "ssh-keygen -f"), ("agent", "ssh-add"), ("terminal", "remedy: preempted")],
)
def test_a_connection_that_fails_gets_its_remedy(laptop: Laptop, connection: str, said: str) -> None:
    laptop.rent()
    laptop.scenario(connection=connection)
    done = laptop("bootstrap")
    assert done.returncode == 1 and said in done.stderr.partition("remedy: ")[1] + done.stderr.partition("remedy: ")[2]


# --- run, status, logs, stop ------------------------------------------------------------------------------------


def test_a_run_to_its_end_and_home(vm: Laptop) -> None:
    started = vm("run", SMOKE, "training.steps=1", "--overwrite")
    assert started.returncode == 0 and "worker 1: started" in started.stdout, started.stderr
    wait_for(vm, "run.code")
    text = vm("status").stdout
    assert f"worker 1: finished {RUN}, exit code 0" in text
    assert f"worker 0: finished {RUN}, exit code 0; last line: after 61.2% of 1319 problems" in text
    log = vm("logs", "--worker", "1").stdout
    assert f"token 37, key 40, platforms tpu,cpu, train {SMOKE} training.steps=1 --overwrite" in log
    fetched = vm("fetch")
    assert fetched.returncode == 0 and f"runs/{RUN}/report.html" in fetched.stdout, fetched.stderr
    here = {path.name for path in (vm.clone / "runs" / RUN).iterdir()}
    assert here == {"recipe.yaml", "metrics.jsonl", "report.html", "evals", "vm.log"}
    # What is here already is not touched, unless asked for.
    (vm.clone / "runs" / RUN / "report.html").write_text("mine")
    before = len(vm.calls())
    refused = vm("fetch", RUN, "--all")
    assert refused.returncode == 2 and "is here already and is not touched" in refused.stderr
    assert vm("fetch").returncode == 2 and (vm.clone / "runs" / RUN / "report.html").read_text() == "mine"
    assert len(vm.calls()) == before + 1  # the name of the last run, and no copy
    assert vm("fetch", SMOKE, "--all", "--overwrite").returncode == 0
    assert (vm.clone / "runs" / RUN / "report.html").read_text() == "report.html of t1v-n-0f3a-w-0\n"
    assert (vm.clone / "runs" / RUN / "checkpoints" / "huge").exists()
    assert [path.name for path in (vm.clone / "runs").iterdir()] == [RUN]


def test_a_second_run_is_refused_and_nothing_of_it_starts(vm: Laptop) -> None:
    assert vm("run", SMOKE, "sleep=1").returncode == 0
    wait_for(vm, "run.log", "sleep=1")
    text = vm("status").stdout
    assert re.search(rf"worker 0: running {RUN} for 0 min; last line: token 37", text) and "worker 1: running" in text
    refused = vm("run", SMOKE, "crash=3")
    assert refused.returncode == 1 and "a run is going on" in refused.stderr
    log = vm("logs").stdout
    assert "sleep=1" in log and "crash=3" not in log
    stopped = vm("stop")
    assert "worker 0: stopped, exit code 143" in stopped.stdout and "worker 1: stopped" in stopped.stdout
    assert "worker 0: failed, exit code 143" in vm("status").stdout
    assert "no run is going on" in vm("stop").stdout


def test_a_crash_leaves_its_code_and_says_its_remedy(vm: Laptop) -> None:
    vm("run", SMOKE, "crash=3")
    wait_for(vm, "run.code")
    text = vm("status").stdout
    assert "worker 0: failed, exit code 3; last line: ABORTED: The TPU is already in use" in text
    assert "worker 0: remedy: TPU in use: " in text
    assert (vm.home(0) / ".grpo" / "run.code").read_text() == "3\n"


def test_a_run_that_ignores_sigterm_is_killed(vm: Laptop) -> None:
    vm("run", SMOKE, "stubborn=1")
    wait_for(vm, "run.log", "stubborn=1")
    (vm.home(1) / "libtpu_lockfile").write_text("")
    stopped = vm("stop")
    assert "worker 0: killed after 1 s" in stopped.stdout
    assert "worker 0: failed, exit code 137" in vm("status").stdout
    if shutil.which("lsof"):
        assert "worker 1: removed" in stopped.stdout
    assert (vm.home(1) / "libtpu_lockfile").exists() == (shutil.which("lsof") is None)


def test_a_supervisor_that_is_killed_is_noticed(vm: Laptop) -> None:
    vm("run", SMOKE, "sleep=1")
    wait_for(vm, "run.log", "sleep=1")
    pid = int((vm.home(1) / ".grpo" / "run.pid").read_text())
    os.killpg(pid, signal.SIGKILL)
    text = vm("status").stdout
    assert "worker 1: gone" in text
    # The other worker waits for it for ever: that is said, with what to do.
    assert "1 of 2 workers run, and wait for the rest" in text and "remedy: a worker is missing: " in text


def test_a_recipe_that_is_wrong_is_refused_at_once(vm: Laptop) -> None:
    done = vm("run", SMOKE, "bad=1")
    assert done.returncode == 1 and "error: unknown key bad" in done.stderr
    assert "worker 0: not started" in vm("status").stdout


def test_online_tracking_needs_its_key(vm: Laptop) -> None:
    secrets = vm.home(0) / ".grpo" / "secrets"
    kept = secrets.read_text()
    secrets.write_text(kept.splitlines()[0] + "\n")
    try:
        done = vm("run", SMOKE, "tracking.wandb=online")
    finally:
        secrets.write_text(kept)
    assert done.returncode == 1 and "set WANDB_API_KEY" in done.stderr


def test_a_recipe_for_other_hardware_is_refused(vm: Laptop) -> None:
    before = len(vm.calls())
    done = vm("run", "recipes/qwen2.5-7b-gsm8k-2hosts.yaml")
    assert done.returncode == 2 and "is for v4-16, and grpo is a v6e-8" in done.stderr and len(vm.calls()) == before


def test_a_worker_that_hangs_is_named_and_hides_nobody(vm: Laptop) -> None:
    vm.scenario(workers=2, hung=[0])
    text = vm("status", GRPO_TPU_TIMEOUT="3").stdout
    assert "worker 0: no answer within 3 s" in text and "worker 1: not started" in text
    done = vm("run", SMOKE, GRPO_TPU_TIMEOUT="3")
    assert done.returncode == 1 and "no answer in time; tpu/tpu.sh status names the worker" in done.stderr


def test_logs_follow_until_they_are_left(vm: Laptop) -> None:
    vm("run", SMOKE, "sleep=1")
    command = ["bash", str(vm.clone / "tpu" / "tpu.sh"), "logs", "-f"]
    process = subprocess.Popen(
        command, cwd=vm.clone, env=vm.environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert "sleep=1" in process.stdout.readline()
    with open(vm.home(0) / ".grpo" / "run.log", "a") as log:
        log.write("step 2\n")
    assert process.stdout.readline() == "step 2\n"
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert "worker 0: running" in vm("status").stdout


# --- delete, and the rest ---------------------------------------------------------------------------------------


def test_delete_asks_first_and_says_what_is_no_longer_billed(laptop: Laptop) -> None:
    laptop("create", SMOKE, "--zones", "b")
    for typed in ("", "y\n"):
        refused = laptop("delete", typed=typed)
        assert refused.returncode == 2 and "nothing was deleted" in refused.stderr
    assert laptop.asked("delete") == []
    done = laptop("delete", typed="grpo\n")
    assert done.returncode == 0 and "no longer billed" in done.stdout
    assert laptop.asked("delete") == [("delete", "b", "")]
    assert "--force" in laptop.calls()[-2]["words"]
    assert "no TPU grpo in" in laptop("status", "--zones", "a,b").stderr


def test_two_tpus_by_name(laptop: Laptop) -> None:
    laptop.rent()
    laptop("create", SMOKE, "--zones", "b", "--name", "other")
    assert "other: ACTIVE in b" in laptop("status", GRPO_TPU_NAME="other").stdout
    assert "no TPU other in c" in laptop("status", "--name", "other", "--zones", "c").stderr
    assert laptop("create", SMOKE, "--name", "Not_a_name").returncode == 2


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_has_help(root: Path, command: str) -> None:
    done = program(root, *command.split(), "--help")
    assert done.returncode == 0 and done.stdout.startswith(f"usage: tpu/tpu.sh {command}".rstrip())


@pytest.mark.parametrize(
    "words", [("nonsense",), ("create", "--nonsense"), ("status", "extra"), ("create", "--wait", "soon"), ("run", "x")]
)
def test_mistakes_are_one_line(root: Path, words: tuple[str, ...]) -> None:
    done = program(root, *words)
    assert done.returncode == 2 and re.fullmatch(r"error: .*\n", done.stderr)


REAL = {  # messages as people have met them
    "no capacity": standin_gcloud.SAYS["capacity"],
    "no quota": "Quota 'TPUV4sPreemptiblePodPerProjectPerRegionForTPUAPI' exhausted. Limit 20800 in region us-central2",
    "TPU in use": "RuntimeError: Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by process "
    "with pid 3528798. Not attempting to load libtpu.so in this process.",
    "a worker is missing": "UserWarning: TPU backend initialization is taking more than 60.0 seconds. Did you run your "
    "code on all TPU hosts? See https://jax.readthedocs.io/en/latest/multi_process.html for more information.",
    "out of memory on a chip": "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space "
    "hbm.",
    "host key changed": standin_gcloud.SAYS["host-key"],
    "not logged in": standin_gcloud.SAYS["account"],
    "API not enabled": standin_gcloud.SAYS["api"],
    "the VM cannot clone": "fatal: could not read Username for 'https://github.com': terminal prompts disabled",
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_remedies_know_the_real_messages(root: Path, name: str) -> None:
    done = program(root, "remedy", input=REAL[name])
    assert done.stdout.startswith(f"remedy: {name}: ")


def test_remedies_say_nothing_of_what_they_do_not_know(root: Path) -> None:
    done = program(root, "remedy", input="all is well\n")
    assert done.stdout == "" and done.returncode == 0


def test_shellcheck(root: Path) -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck: not installed (apt install shellcheck)")
    done = subprocess.run(["shellcheck", *map(str, (root / "tpu").glob("*.sh"))], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
