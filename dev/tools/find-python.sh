#!/usr/bin/env bash
# Print the path of a Python that can make the course's environment: 3.12 or 3.13, with venv and pip, or beside uv, which
# makes environments without them (Colab).
# A python3.12 on PATH may be a shim that fails, so every candidate is run before it is believed.
set -u
usable() { # usable COMMAND: run it, and let it print where it really is
  "$1" -I -c 'import importlib.util, shutil, ssl, sys
importlib.util.find_spec("ensurepip") or shutil.which("uv") or sys.exit(1)
sys.exit(1) if not (3, 12) <= sys.version_info < (3, 14) else print(sys.executable)' 2>/dev/null
}

if [ -n "${PYTHON:-}" ]; then
  usable "$PYTHON" && exit 0
  echo "error: PYTHON=$PYTHON is not a working Python 3.12 or 3.13 with venv; point PYTHON at one, or unset it" >&2
  exit 1
fi

home=${HOME:-/nonexistent}
candidates=(python3.12 python3 python3.13 python)
for place in \
  "${PYENV_ROOT:-$home/.pyenv}"/versions/3.1[23]*/bin/python3 \
  "${CONDA_PREFIX:-/nonexistent}/bin/python3" \
  "$home"/{miniforge3,mambaforge,miniconda3,anaconda3,micromamba,.conda}/{,envs/*/}bin/python3 \
  /opt/{conda,miniforge3,miniconda3,anaconda3}/{,envs/*/}bin/python3 \
  "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$home/.local/share}/uv/python}"/cpython-3.1[23]*/bin/python3 \
  /usr/bin/python3.1[23] /usr/local/bin/python3.1[23] \
  /opt/homebrew/bin/python3.1[23] /usr/local/opt/python@3.1[23]/bin/python3.1[23] \
  /Library/Frameworks/Python.framework/Versions/3.1[23]/bin/python3
do
  [ -x "$place" ] && candidates+=("$place")
done
for candidate in "${candidates[@]}"; do
  usable "$candidate" && exit 0
done
echo "error: no Python 3.12 or 3.13 found; install one (apt install python3.12-venv, brew install python@3.12," \
  "or uv python install 3.12), or name it: make setup PYTHON=/path/to/python3.12" >&2
exit 1
