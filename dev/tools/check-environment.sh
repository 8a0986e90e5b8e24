#!/usr/bin/env bash
# check-environment.sh FOLDER ...: refuse, in one line and before anything is touched, a folder in which no environment
# may be made.  Making one clears the folder, and through a link that would be somebody else's.
set -euo pipefail
cd "$(dirname "$0")/../.."

is_environment() { # also one whose making, or whose clearing, was interrupted
  [ -f "$1/pyvenv.cfg" ] || compgen -G "$1/lib/python3*" > /dev/null
}

for venv in "$@"; do
  if [ -L "$venv" ]; then
    echo "error: $venv is a symbolic link, and making the environment would empty the folder that it points to;" \
      "remove the link (rm $venv) and try again" >&2
    exit 1
  fi
  if [ -e "$venv" ] && ! is_environment "$venv" && [ -n "$(find "$venv" ! -type d -print -quit)" ]; then
    echo "error: $venv is not a Python environment, and making one would delete it; move it away and try again" >&2
    exit 1
  fi
done
