#!/usr/bin/env bash
# Runs the tests in the environment of launch/setup_env.sh, from any folder; arguments go to pytest:
#   bash tests/run.sh -k exchange
# Without a CUDA device the tests marked `gpu` are left out. The exit status is pytest's.
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
PYTHON_BIN=$(bash "$ROOT/launch/setup_env.sh" test)

cd "$ROOT"
# This checkout's code comes first, also in an environment that several checkouts share.
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
# Several ranks share the cores: more threads than cores spin against each other.
export OMP_NUM_THREADS=1

select=()
"$PYTHON_BIN" tools/check_env.py --has-cuda || select=(-m "not gpu")

status=0
"$PYTHON_BIN" -m pytest "${select[@]}" "$@" || status=$?
echo "tests/run.sh: $SECONDS s in all" >&2
exit "$status"
