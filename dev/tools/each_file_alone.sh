#!/usr/bin/env bash
# Run each test file in a process of its own: no file may need what another one leaves behind. `make nightly` calls it.
# Without arguments: all files that `make test` runs. Exits with 1 and names the files that failed.
set -uo pipefail
cd "$(dirname "$0")/../.."
PY=${PY:-.venv/bin/python}
if [ $# = 0 ]; then
  mapfile -t files < <(find tests -name 'test_*.py' -not -path 'tests/tpu/stack/*' -not -path 'tests/tpu/on_tpu/*' | sort)
  set -- "${files[@]}"
fi

alone() {
  local log
  log=$(mktemp)
  "$PY" -m pytest "$1" > "$log" 2>&1
  case $? in
    0) printf '%s: ok\n' "$1" ;;
    *) printf '%s: FAILED\n' "$1"; cat "$log"; false ;;
  esac
  local result=$?
  rm -f "$log"
  return "$result"
}
export -f alone
export PY
printf '%s\n' "$@" | xargs -P 2 -I{} bash -c 'alone {}' || { echo "a file fails by itself: see FAILED above"; exit 1; }
