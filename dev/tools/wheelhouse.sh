#!/usr/bin/env bash
# Download the locked packages into a folder, for thirty laptops and one slow network: `make wheelhouse OUT=`.
# `make setup WHEELHOUSE=` reads them from there, a folder on a stick or the address of a class server.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-build/wheelhouse}
locks=(-r requirements/bootstrap.lock -r "${LOCK:-requirements/cpu.lock}")
# For laptops of another kind, such as PLATFORM=macosx_14_0_arm64: then only wheels can be downloaded.
other=()
[ -z "${PLATFORM:-}" ] || other=(--platform "$PLATFORM" --only-binary=:all:)
mkdir -p "$out"
"$(dev/tools/find-python.sh)" -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
  "${other[@]}" --dest "$out" "${locks[@]}"
echo "$out: $(find "$out" -type f | wc -l | tr -d ' ') packages, $(du -sh "$out" | cut -f1)"
echo "on a stick: copy it, and run make setup WHEELHOUSE=/path/to/$(basename "$out")"
echo "on a class server: python3 -m http.server --directory $out, and make setup WHEELHOUSE=http://SERVER:8000"
