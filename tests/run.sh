#!/usr/bin/env bash
# Runs the tests in the environment of launch/setup_env.sh, from any folder. Three tiers, and any selection:
#   bash tests/run.sh                     the default tier, on every change
#   bash tests/run.sh -m long             whole matrices: of a room that you change (add its folder), before a release
#   bash tests/run.sh -m nightly          what proves an environment: packaging, other programs, clusters
#   bash tests/run.sh tests/unit/comm -k exchange
# Arguments go to pytest. A whole tier runs in several processes that claim one file after another, one process more than
# there are cores (JOBS names another number), since tests wait for ranks, children and time limits.
# Without a CUDA device the tests marked `gpu` are left out, which is printed.
# The exit status is pytest's.
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
PYTHON_BIN=$(bash "$ROOT/launch/setup_env.sh" test)

cd "$ROOT"
# This checkout's code comes first, also in an environment that several checkouts share.
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
cores=$(env -u OMP_NUM_THREADS nproc) # that variable would be its answer
# Several ranks share the cores: more threads than cores spin against each other.
export OMP_NUM_THREADS=1
# Compile each module once, not in every program that a test starts.
unset PYTHONDONTWRITEBYTECODE

select=()
if ! "$PYTHON_BIN" tools/check_env.py --has-cuda; then
    select=(-m "not gpu and not long and not nightly")
    echo "tests/run.sh: leaves out the tests marked gpu, which need a CUDA device" >&2
fi

whole=true # no argument selects tests of a tier
for argument in "$@"; do
    case $argument in
        --durations=* | -m | long | nightly) ;;
        *) whole=false ;;
    esac
done

if $whole; then
    select=(-p no:cacheprovider "--jobs=${JOBS:-$((cores < 8 ? cores + 1 : 8))}" "${select[@]}")
fi
status=0
"$PYTHON_BIN" -m pytest "${select[@]}" "$@" || status=$?
spent=$(mktemp)
trap 'rm -f "$spent"' EXIT
times >"$spent" # of all processes that have ended: user and system time on the second line, as 1m2.345s 0m6.789s
cpu=$(awk 'NR == 2 { for (i = 1; i <= 2; i++) { split($i, t, /[ms]/); sum += 60 * t[1] + t[2] } print int(sum) }' "$spent")
echo "tests/run.sh: $SECONDS s in all, $cpu s of CPU" >&2
exit "$status"
