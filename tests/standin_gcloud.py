"""A stand-in for gcloud: queued resources and TPU VMs in a folder, which fail in the words of the real ones.

    PATH=FOLDER/bin:$PATH gcloud compute tpus …         (`install` makes FOLDER/bin/gcloud)

FOLDER/scenario.json says what happens, FOLDER/calls.jsonl records what was asked. A worker is a home folder, and
`tpu-vm ssh --command` runs its command there for real, so that a run on a "VM" is a process that can be watched and
killed. Only the flags that gcloud 528 has are accepted.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

FLAGS = {  # from `gcloud compute tpus … --help`; True takes a value
    "queued-resources create": {
        "node-id": True, "accelerator-type": True, "runtime-version": True, "spot": False, "zone": True,
        "valid-until-duration": True, "project": True, "quiet": False, "async": False,
    },
    "queued-resources describe": {"zone": True, "project": True, "format": True, "quiet": False},
    "queued-resources delete": {"zone": True, "project": True, "force": False, "quiet": False, "async": False},
    "tpu-vm describe": {"zone": True, "project": True, "format": True, "quiet": False},
    "tpu-vm ssh": {"zone": True, "project": True, "worker": True, "command": True, "quiet": False},
    "tpu-vm scp": {"zone": True, "project": True, "worker": True, "recurse": False, "quiet": False},
}  # fmt: skip

# What the real ones say, shortened.
SAYS = {
    "capacity": "There is no more capacity in the zone \"{zone}\"; you can try in another zone where "
    "Cloud TPU Nodes are offered (see https://cloud.google.com/tpu/docs/regions) [EID: 0x9f48947a7d57c8d]",
    "quota": "Quota limit 'TPUV6EPreemptiblePerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 in zone {zone}.",
    "permission": "PERMISSION_DENIED: Permission 'tpu.queuedresources.create' denied on 'projects/p/locations/{zone}'",
    "type": "User does not have permission to submit requests for accelerator type \"v6e-8\" in location {zone}",
    "api": "PERMISSION_DENIED: Cloud TPU API has not been used in project 1 before or it is disabled. SERVICE_DISABLED",
    "account": "You do not currently have an active account selected.\nPlease run:\n\n  $ gcloud auth login",
    "project": "The required property [project] is not currently set.",
    "host-key": "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\nOffending ED25519 key in "
    "~/.ssh/google_compute_known_hosts:63\n  remove with:\n  ssh-keygen -f ~/.ssh/google_compute_known_hosts -R tpu.1",
    "agent": "SSH Key is not present in the SSH agent. Please run \"ssh-add ~/.ssh/google_compute_engine\" to add it",
    "node": "NOT_FOUND: Resource 'projects/p/locations/{zone}/nodes/grpo' was not found",
    "terminal": "This TPU has terminal state \"PREEMPTED\", so it cannot be used anymore.",
    "internal": "{{\n  \"code\": 13,\n  \"message\": \"an internal error has occurred\"\n}}",
}  # fmt: skip


def install(folder: Path, scenario: dict | None = None) -> Path:
    """Make FOLDER/bin/gcloud; return FOLDER/bin."""
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin" / "gcloud"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{Path(__file__).resolve()}" "{folder}" "$@"\n')
    program.chmod(0o755)
    (folder / "scenario.json").write_text(json.dumps(scenario or {}))
    (folder / "requests.json").write_text("{}")
    return folder / "bin"


def parse(words: list[str]) -> tuple[str, list[str], dict[str, str]]:
    """Command, positional arguments and flags of a command line; ValueError where gcloud would refuse it."""
    if words[:2] != ["compute", "tpus"] or " ".join(words[2:4]) not in FLAGS:
        raise ValueError(f"Invalid choice: {' '.join(words[:4])}")
    command, places, flags = " ".join(words[2:4]), [], {}
    for word in words[4:]:
        if not word.startswith("--"):
            places.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        if name not in FLAGS[command] or FLAGS[command][name] != bool(equals):
            raise ValueError(f"unrecognized arguments: {word.partition('=')[0]}")
        flags[name] = value
    if "zone" not in flags:
        raise ValueError("Error parsing: zone must be specified")
    return command, places, flags


# fate of a request in a zone: its states, one per look; the last one stays
STATES = {
    "active": ["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"],
    "at-once": ["ACTIVE"],
    "no-capacity": ["PROVISIONING", "FAILED"],
    "expired": ["FAILED"],
    "broken": ["FAILED"],
    "waiting": ["WAITING_FOR_RESOURCES"],
    "preempted": ["PROVISIONING", "SUSPENDED"],
}


class Standin:
    def __init__(self, folder: Path, command: str, flags: dict[str, str]):
        self.folder, self.flags, self.zone = folder, flags, flags["zone"]
        self.command = command
        self.scenario = json.loads((folder / "scenario.json").read_text())
        self.requests = json.loads((folder / "requests.json").read_text())

    def save(self) -> None:
        (self.folder / "requests.json").write_text(json.dumps(self.requests))

    def fail(self, what: str) -> None:
        where = "gcloud.compute.tpus." + self.command.replace(" ", ".")
        sys.exit(print(f"ERROR: ({where}) " + SAYS[what].format(zone=self.zone), file=sys.stderr) or 1)

    def request(self, name: str) -> dict:
        if f"{self.zone}/{name}" not in self.requests:
            self.fail("node")
        return self.requests[f"{self.zone}/{name}"]

    def create(self, places: list[str]) -> None:
        key, pricing = f"{self.zone}/{places[0]}", "spot" if "spot" in self.flags else "on-demand"
        fate = self.scenario.get("fate", {}).get(self.zone, "active")
        fate = fate if isinstance(fate, str) else fate.get(pricing, "active")
        if fate in SAYS:
            self.fail(fate)
        if key in self.requests:
            sys.exit(print(f"ERROR: ALREADY_EXISTS: Resource '{key}' already exists", file=sys.stderr) or 1)
        states = STATES[fate]
        said = {"no-capacity": SAYS["capacity"].format(zone=self.zone), "broken": SAYS["internal"].format()}
        self.requests[key] = {"states": states, "said": said.get(fate, ""), "flags": self.flags}
        self.save()

    def describe(self, places: list[str]) -> None:
        request = self.request(places[0])
        if self.command.startswith("tpu-vm"):
            print(self.scenario.get("workers", 1))
            return
        if self.scenario.get("preempted"):
            request["states"] = ["SUSPENDED"]
        said = request["said"] if request["states"][0] == "FAILED" else ""
        print(request["states"][0] + ("\t" + said.replace("\n", " ") if "failedData" in self.flags["format"] else ""))
        if len(request["states"]) > 1:
            del request["states"][0]
        self.save()

    def delete(self, places: list[str]) -> None:
        self.request(places[0])
        del self.requests[f"{self.zone}/{places[0]}"]
        self.save()

    def workers(self, name: str) -> list[int]:
        self.request(name)
        if what := self.scenario.get("connection"):
            self.fail(what)
        count = self.scenario.get("workers", 1)
        worker = self.flags.get("worker", "0")
        if worker == "all":
            return list(range(count))
        if int(worker) >= count:
            sys.exit(print("ERROR: worker index is larger than the valid worker indexes", file=sys.stderr) or 1)
        return [int(worker)]

    def home(self, worker: int) -> Path:
        home = self.folder / "workers" / str(worker)
        if not home.exists():
            (home / "bin").mkdir(parents=True)
            (home / "bin" / "hostname").write_text(f"#!/bin/sh\necho t1v-n-0f3a-w-{worker}\n")
            (home / "bin" / "hostname").chmod(0o755)
        return home

    def ssh(self, places: list[str]) -> None:
        chosen, processes = self.workers(places[0]), []
        for worker in chosen:
            print(f"SSH: Attempting to connect to worker {worker}...", file=sys.stderr, flush=True)
            home = self.home(worker)
            hangs = worker in self.scenario.get("hung", [])
            environment = {
                "HOME": str(home), "PATH": f"{home}/bin:{os.environ['PATH']}", "LANG": "C.UTF-8",
                "GRPO_STOP_SECONDS": "1", "GRPO_LIBTPU_LOCKFILE": str(home / "libtpu_lockfile"),
            }  # fmt: skip
            command = ["sleep", "600"] if hangs else ["bash", "-c", self.flags["command"]]
            # A remote command has no terminal, and its end does not end what it left in the background.
            processes.append(subprocess.Popen(command, cwd=home, env=environment, stdin=subprocess.DEVNULL))
        codes = [process.wait() for process in processes]
        for worker, code in zip(chosen, codes, strict=True):
            if code and len(chosen) > 1:
                said = f"##### Command execution on worker {worker} failed with exit status {code}. Continuing."
                print(said, file=sys.stderr)
        sys.exit(next((code for code in codes if code), 0))

    def scp(self, places: list[str]) -> None:
        *sources, target = places
        for source in sources:
            remote = source if ":" in source else target
            name, _, path = remote.partition(":")
            for worker in self.workers(name):
                here, there = Path(source if remote is target else target), self.home(worker) / path
                shutil.copy(*((here, there) if remote is target else (there, here)))  # with its mode, as scp does


def main() -> None:
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    with open(folder / "calls.jsonl", "a") as calls:
        calls.write(json.dumps({"words": words, "secrets_on_command_lines": secrets_on_command_lines()}) + "\n")
    try:
        command, places, flags = parse(words)
    except ValueError as error:
        sys.exit(print(f"ERROR: (gcloud) {error}", file=sys.stderr) or 2)
    standin = Standin(folder, command, flags)
    if what := standin.scenario.get("always"):
        standin.fail(what)
    getattr(standin, command.split()[1])(places)


def secrets_on_command_lines() -> list[str]:
    """Names of this process's secrets whose value stands on the command line of any process just now."""
    secrets = {name: os.environ[name].encode() for name in ("HF_TOKEN", "WANDB_API_KEY") if os.environ.get(name)}
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline") if secrets else ():
        try:
            line = path.read_bytes()
        except OSError:  # it has ended, or is another user's
            continue
        found += [name for name, value in secrets.items() if value in line]
    return found


if __name__ == "__main__":
    main()
