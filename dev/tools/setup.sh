#!/usr/bin/env bash
# Make .venv (or .venv-tpu, when that is the argument): the locked packages, this repo (editable), and the Jupyter kernel
# "grpo-course". `make setup` and `make setup-tpu` run it. `make setup-site` makes .venv-site, of packages alone.
# Its .complete is written last and names what was installed where, so a second run has nothing to do, and an
# interrupted one is detected and repeated.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${1:-.venv}
case $venv in
  .venv) lock=requirements/cpu.lock size="2 GB on disk" ;;
  .venv-tpu) lock=requirements/tpu.lock size="8 GB on disk, and as much again for the cache where it is on another disk" ;;
  .venv-site) lock=requirements/site.lock size="0.7 GB on disk" ;;
  *) echo "error: VENV=$venv: choose .venv or .venv-tpu" >&2; exit 1 ;;
esac
dev/tools/check-environment.sh "$venv"
stamp=$venv/.complete
log=.cache/setup.log
content=$(cat requirements/bootstrap.lock "$lock" pyproject.toml dev/tools/setup.sh dev/tools/install_kernel.py grpo_lib/common/environment.py | cksum)

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$PWD
$content" ] && "$venv/bin/python" -c '' 2>/dev/null; then
  exit 0
fi
if [ "$venv" = .venv-tpu ] && [ "$(uname -sm)" != "Linux x86_64" ]; then
  echo "error: .venv-tpu needs Linux on x86-64 (a TPU VM, or any such machine); here is $(uname -sm)" >&2
  exit 1
fi
python=$(dev/tools/find-python.sh)
# Colab sets these for its own environment; two name files that do not exist.
unset UV_CONSTRAINT UV_BUILD_CONSTRAINT UV_OVERRIDE UV_SYSTEM_PYTHON UV_PRERELEASE
mkdir -p .cache
: > $log
export UV_CACHE_DIR=${UV_CACHE_DIR:-$PWD/.cache/uv} UV_NO_PROGRESS=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# Packages from a stick or a class server (make wheelhouse), a folder or an address, and from nowhere else.
if [ -n "${WHEELHOUSE:-}" ]; then
  case $WHEELHOUSE in
    *://*) ;;
    *) WHEELHOUSE=$(cd "$WHEELHOUSE" && pwd) || { echo "error: WHEELHOUSE=$WHEELHOUSE is no folder" >&2; exit 1; } ;;
  esac
  export PIP_NO_INDEX=1 PIP_FIND_LINKS=$WHEELHOUSE UV_NO_INDEX=1 UV_FIND_LINKS=$WHEELHOUSE
fi

fail() { # say in one line what went wrong; the details are in the log
  if grep -qiE 'dns|resolve host|name resolution|connect|network|timed? ?out|no matching distribution found for uv' $log; then
    echo "error: the Python package index could not be reached; check the network and run make setup again" \
      "(details: $log)" >&2
  else
    echo "error: $1; details: $log; last line: $(tail -n 1 $log)" >&2
  fi
  exit 1
}

# An environment without a stamp, or one that was moved, is not to be trusted.
if ! { [ -f "$stamp" ] && [ "$(head -n 1 "$stamp")" = "$PWD" ] && "$venv/bin/python" -c 'import pip' 2>/dev/null; }; then
  echo "setup: making $venv with $python"
  if "$python" -c 'import ensurepip, venv' 2> /dev/null; then
    "$python" -m venv --clear "$venv" >> $log 2>&1 || fail "python -m venv failed"
  else
    uv venv --clear --seed --python "$python" "$venv" >> $log 2>&1 || fail "uv venv failed"
  fi
fi
rm -f "$stamp"
echo "setup: installing $(grep -c '^[A-Za-z0-9].*==' "$lock") packages of $lock" \
  "($size; a few minutes the first time)"
"$venv/bin/python" -m pip install --quiet --retries 2 --require-hashes -r requirements/bootstrap.lock >> $log 2>&1 ||
  fail "uv could not be installed"
install=("$venv/bin/uv" pip sync --python "$venv/bin/python" --require-hashes "$lock")
"${install[@]}" >> $log 2>&1 || "${install[@]}" --offline >> $log 2>&1 || fail "$lock could not be installed"
if [ "$venv" != .venv-site ]; then
  "$venv/bin/uv" pip install --python "$venv/bin/python" --no-deps --no-build-isolation --offline --editable . >> $log 2>&1 ||
    fail "this repo could not be installed into $venv"
  "$venv/bin/python" dev/tools/install_kernel.py >> $log 2>&1 || fail "the Jupyter kernel could not be registered"
fi
# Python compiles a library when it is first imported, and keeps that only where it may; 4,500 files take 15 s.
if [ "$venv" = .venv ]; then
  env -u PYTHONDONTWRITEBYTECODE PYTHONPATH=dev/tools "$venv/bin/python" -c 'import run_notebooks; run_notebooks.import_libraries()' \
    >> $log 2>&1 || fail "the libraries could not be imported"
fi
printf '%s\n%s\n' "$PWD" "$content" > "$stamp"
echo "setup: done"
