#!/usr/bin/env bash
# `make gpu` on a bare machine without a network:  tests/bench/gpu/run.sh [OPTION …]
#
# `--part A`, then `--part B`: each ends within ten minutes, and neither needs the other. summary.md names first what is
# broken.
#
# Installs the wheels of `make gpu-wheels` from WHEELS (default build/gpu-wheels) into a directory of their own; PYTHON
# (default python3) is the Python that has torch. The compiled CPU kernels travel, too: workers/engine/cpu/compiled.
# A directory, not a virtual environment: where PYTHON is in a virtual environment itself, another one would not see its
# packages. Results go to OUT (default build/gpu).
set -euo pipefail
cd "$(dirname "$0")/../../.."

python=${PYTHON:-python3}
wheels=${WHEELS:-build/gpu-wheels}
site=${SITE:-build/gpu-site}

shopt -s nullglob
files=("$wheels"/*.whl)
if ((${#files[@]} == 0)); then
    printf 'No wheels in %s: run "make gpu-wheels" where there is a network, and bring them here.\n' "$wheels" >&2
    exit 1
fi
if [[ ! -e $site/installed ]]; then
    rm -rf "$site"
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --disable-pip-version-check --target "$site" "${files[@]}"
    touch "$site/installed"
fi
# Only what the machine lacks is there.
export PYTHONPATH="$PWD:$PWD/$site${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m tests.bench gpu --out "${OUT:-build/gpu}" "$@"
