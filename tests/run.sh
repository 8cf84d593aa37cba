#!/usr/bin/env bash
# Runs the tests in the environment of launch/setup_env.sh, from any folder; arguments go to pytest:
#   bash tests/run.sh -k exchange
#   bash tests/run.sh tests/unit/comm
# Without arguments the whole suite runs, in two processes with every other file each: most tests keep one core busy, and
# worlds of ranks wait much of their time. Without a CUDA device the tests marked `gpu` are left out, which is printed.
# Tests marked `long` run when they are selected: bash tests/run.sh -m long
# The exit status is pytest's.
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
PYTHON_BIN=$(bash "$ROOT/launch/setup_env.sh" test)

cd "$ROOT"
# This checkout's code comes first, also in an environment that several checkouts share.
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
# Several ranks share the cores: more threads than cores spin against each other.
export OMP_NUM_THREADS=1

select=()
if ! "$PYTHON_BIN" tools/check_env.py --has-cuda; then
    select=(-m "not gpu and not long")
    echo "tests/run.sh: leaves out the tests marked gpu, which need a CUDA device" >&2
fi

whole=true  # no argument selects tests
for argument in "$@"; do [[ $argument == --durations=* ]] || whole=false; done

status=0
if $whole; then
    halves=("" "")
    mapfile -t files < <(find tests -name "test_*.py" | sort)
    for i in "${!files[@]}"; do halves[i % 2]+=" ${files[i]}"; done
    printed=$(mktemp)
    trap 'kill "${other:-}" 2>/dev/null || true; rm -f "$printed"' EXIT
    # shellcheck disable=SC2086  # each half is a list of words
    "$PYTHON_BIN" -m pytest -p no:cacheprovider "${select[@]}" "$@" ${halves[1]} >"$printed" 2>&1 &
    other=$!
    # shellcheck disable=SC2086
    "$PYTHON_BIN" -m pytest -p no:cacheprovider "${select[@]}" "$@" ${halves[0]} || status=$?
    wait "$other" || status=$?
    cat "$printed"
else
    "$PYTHON_BIN" -m pytest "${select[@]}" "$@" || status=$?
fi
echo "tests/run.sh: $SECONDS s in all" >&2
exit "$status"
