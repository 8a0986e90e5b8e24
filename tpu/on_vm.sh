#!/usr/bin/env bash
# The VM's half of tpu.sh: it lies in the clone on every worker and is called over ssh. It keeps in ~/.grpo:
#   secrets                       NAME=VALUE lines, mode 600, put there by `tpu.sh bootstrap`
#   run.pid  run.code             the supervisor of the run, and its exit code once it has ended
#   run.name run.started run.log  the run directory's name, seconds since 1970, all output
set -euo pipefail
cd "$(dirname "$0")/.."
STATE=$HOME/.grpo
LOCKFILE=${GRPO_LIBTPU_LOCKFILE:-/tmp/libtpu_lockfile}
GRACE=${GRPO_STOP_SECONDS:-30} # from SIGTERM to SIGKILL
umask 077
mkdir -p "$STATE"

fail() { echo "error: $(worker): $*" >&2; exit 2; }

worker() { # Cloud TPU names its VMs …-w-0, …-w-1 and so on
  local host
  host=$(hostname)
  case $host in *-w-[0-9]*) echo "worker ${host##*-w-}" ;; *) echo "worker 0" ;; esac
}

alive() { # does anything of the run's process group still live? After a restart the number alone may be another's
  local pid
  pid=$(cat "$STATE/run.pid" 2>/dev/null) && pgrep -g "$pid" -f 'on_vm\.sh supervise|grpo train' > /dev/null
}

idle() {
  ! alive || fail "a run is going on ($(cat "$STATE/run.name"), process $(cat "$STATE/run.pid")); end it first with tpu.sh stop"
}

secrets() { # secrets NAME=LENGTH…: what came, by length only
  local wanted found
  touch "$STATE/secrets"
  chmod 600 "$STATE/secrets"
  for wanted in "$@"; do
    found=$(awk -v name="${wanted%%=*}" 'index($0, name "=") == 1 { print length($0) - length(name) - 1 }' "$STATE/secrets")
    [ "$found" = "${wanted#*=}" ] || fail "${wanted%%=*} has ${found:-0} characters here and ${wanted#*=} at home; run bootstrap again"
    echo "$(worker): ${wanted%%=*}: $found characters"
  done
}

install() {
  if ! PYTHON='' tools/find-python.sh > /dev/null 2>&1; then
    # The images with Ubuntu 22.04 have Python 3.10. uv brings a newer one, where find-python.sh looks for it.
    echo "$(worker): no Python 3.12 here; uv brings one"
    PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user --require-hashes -r requirements/bootstrap.lock
    "$HOME/.local/bin/uv" python install --quiet 3.12
  fi
  tools/setup.sh .venv-tpu 2>&1
  echo "$(worker): .venv-tpu has $(.venv-tpu/bin/python --version) and the lock"
}

check() { # on all workers at once: they find each other, and each sees its chips
  JAX_PLATFORMS=tpu .venv-tpu/bin/python -c "import jax
print('$(worker):', jax.local_device_count(), 'of', jax.device_count(), jax.devices()[0].device_kind, 'chips')"
}

start() { # start RECIPE [KEY=VALUE…] [--overwrite] [--run NAME]
  local word name='' overrides=() previous='' settings resolved
  idle
  for word in "${@:2}"; do
    [ "$previous" != --run ] || name=$word
    case $word in --*) ;; *=*) overrides+=("$word") ;; esac
    previous=$word
  done
  # The recipe is read here first, so that a mistake in it is said now and not in a log.
  settings=$(.venv-tpu/bin/grpo config "$1" ${overrides[@]+"${overrides[@]}"} --json | tail -n 1) || exit 2
  resolved=$(.venv-tpu/bin/python -c 'import json, sys
recipe = json.loads(sys.argv[1])
print(recipe["name"], recipe.get("tracking", {}).get("wandb", "off"))' "$settings")
  name=${name:-${resolved% *}}
  if [ "${resolved#* }" = online ] && ! grep -q '^WANDB_API_KEY=' "$STATE/secrets" 2>/dev/null; then
    fail "the recipe says tracking.wandb: online and there is no key; set WANDB_API_KEY and run bootstrap again, or add tracking.wandb=offline"
  fi
  exec 9> "$STATE/lock"
  flock -n 9 || fail "another start is going on"
  idle # a start that was faster may have ended meanwhile
  rm -f "$STATE/run.pid" "$STATE/run.code"
  [ ! -f "$STATE/run.log" ] || mv "$STATE/run.log" "$STATE/run.log.before"
  echo "$name" > "$STATE/run.name"
  date +%s > "$STATE/run.started"
  set -m # a process group of its own: it outlives the ssh session, and can be ended as a whole
  nohup "$PWD/tpu/on_vm.sh" supervise "$@" > "$STATE/run.log" 2>&1 < /dev/null 9>&- &
  echo $! > "$STATE/run.pid.new"
  mv "$STATE/run.pid.new" "$STATE/run.pid"
  echo "$(worker): started $name"
}

supervise() { # runs grpo train, and leaves its exit code in one piece
  local code child line
  { set +x; } 2>/dev/null # secrets are not for a trace
  while IFS= read -r line; do
    [ -z "$line" ] || export "${line?}"
  done < <(cat "$STATE/secrets" 2>/dev/null)
  # With tpu in the list JAX fails when it cannot have the chips; by default it would go on with the CPU.
  export JAX_PLATFORMS=${JAX_PLATFORMS:-tpu,cpu} PYTHONUNBUFFERED=1
  trap 'kill -TERM "$child" 2>/dev/null || true' TERM INT
  .venv-tpu/bin/grpo train "$@" &
  child=$!
  while :; do
    code=0
    wait "$child" || code=$?
    kill -0 "$child" 2>/dev/null || break
  done
  leave "$code"
  exit "$code"
}

leave() { echo "$1" > "$STATE/run.code.new" && mv "$STATE/run.code.new" "$STATE/run.code"; }

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

last_line() { tail -c 4000 "$STATE/run.log" 2>/dev/null | tr '\r' '\n' | grep -v '^[[:space:]]*$' | tail -n 1 | cut -c 1-160; }

status() {
  local what code seconds
  if [ ! -f "$STATE/run.pid" ]; then
    echo "$(worker): not started"
    return
  fi
  seconds=$(($(date +%s) - $(cat "$STATE/run.started")))
  if alive; then
    what="running $(cat "$STATE/run.name") for $((seconds / 60)) min"
  elif code=$(cat "$STATE/run.code" 2>/dev/null); then
    what=$([ "$code" = 0 ] && echo "finished $(cat "$STATE/run.name"), exit code 0" || echo "failed, exit code $code")
  else
    what="gone: the run ended without an exit code (killed, or the VM restarted)"
  fi
  echo "$(worker): $what; last line: $(last_line)"
  case $what in finished*) ;; *) tail -n 200 "$STATE/run.log" | tr '\r' '\n' | tpu/tpu.sh remedy --vm | sed "s/^/$(worker): /" ;; esac
}

stop() {
  local pid waited=0
  if alive; then
    pid=$(cat "$STATE/run.pid")
    kill -TERM -- "-$pid"
    while alive && [ "$waited" -lt "$GRACE" ]; do
      sleep 1
      waited=$((waited + 1))
    done
    if alive; then
      kill -KILL -- "-$pid"
      leave 137
      echo "$(worker): killed after $GRACE s"
    else
      kill -KILL -- "-$pid" 2>/dev/null || true # what the run started and left behind
      echo "$(worker): stopped, exit code $(cat "$STATE/run.code")"
    fi
  else
    echo "$(worker): no run is going on"
  fi
  # libtpu leaves its lock file behind when it is killed. Who cannot look for a holder must not remove it.
  if [ -f "$LOCKFILE" ] && command -v lsof > /dev/null; then
    if [ -n "$(as_root lsof -t -w "$LOCKFILE" /dev/accel* /dev/vfio/* 2>/dev/null)" ]; then
      echo "$(worker): another process holds the chips: sudo lsof -w /dev/accel* /dev/vfio/* names it"
    else
      as_root rm -f "$LOCKFILE"
      echo "$(worker): removed $LOCKFILE, which nobody held"
    fi
  fi
}

here() { find runs -mindepth 1 -maxdepth 1 -type d -exec basename {} \; 2>/dev/null | tr '\n' ' '; }

pack() { # pack [RUN] [--all]: one archive to fetch; prints the run's name on the last line
  local run='' all='' word code=0 without=()
  for word in "$@"; do case $word in --all) all=1 ;; *) run=$word ;; esac; done
  run=${run:-$(cat "$STATE/run.name" 2>/dev/null || true)}
  [ -n "$run" ] || fail "no run was started here; name one of: $(here)"
  [ -d "runs/$run" ] || fail "there is no runs/$run here; there are: $(here)"
  [ "$all" ] || without=("--exclude=$run/checkpoints" "--exclude=$run/export")
  [ ! -f "$STATE/run.log" ] || cp "$STATE/run.log" "runs/$run/vm.log"
  # A run that goes on writes while it is read: tar says so with 1.
  tar -C runs -czf "$STATE/fetch.tar.gz" ${without[@]+"${without[@]}"} "$run" || code=$?
  [ "$code" -le 1 ] || fail "tar failed with $code"
  echo "$run"
}

case ${1:-} in
  idle | secrets | install | check | start | supervise | status | stop | pack) "$@" ;;
  *) fail "on_vm.sh is called by tpu.sh; it knows idle, secrets, install, check, start, status, stop, pack" ;;
esac
