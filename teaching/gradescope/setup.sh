#!/usr/bin/env bash
# Gradescope runs this once, as root, when it builds the image: a Python with what grpo_teach needs, at the locked versions.
# For the base image with Ubuntu 24.04, whose Python is 3.12.  How to make the zip: ../gradescope.md.
set -euo pipefail
root=${AUTOGRADER:-/autograder}
python=${PYTHON:-python3}
if ! "$python" -c 'import ensurepip' 2> /dev/null; then
  apt-get install -y --no-install-recommends python3-venv
fi
"$python" -m venv "$root/venv"
"$root/venv/bin/python" -m pip install --quiet --require-hashes -r "$root/source/requirements/teach.lock"
