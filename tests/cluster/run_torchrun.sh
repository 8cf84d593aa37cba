#!/usr/bin/env bash
# Tests training over two nodes, which are network namespaces of this machine (two_nodes.sh), with a launcher on each:
# static addresses, and an endpoint. Both runs must equal one of launch/run.sh on a single node, byte
# for byte.
#   bash tests/cluster/run_torchrun.sh
# Needs root and iproute2. Leaves no process and no file behind.
# Exit status: 0; 1 if a test failed; 2 if this machine cannot run it.
set -euo pipefail

HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
source "$HERE/common.sh"
if [[ ${1:-} != --inside ]]; then
    install_if_missing ip:iproute2
    PYTHON_BIN=$(bash "$ROOT/launch/setup_env.sh")
    export PYTHON_BIN
    exec bash "$HERE/two_nodes.sh" "$HERE/run_torchrun.sh" --inside
fi

cd "$ROOT"
STEPS=2
prepare
both() { # NAME VARIABLE=VALUE...: runs the same command on both nodes, the second one with NODE_RANK 1
    local name=$1 first second status=0
    shift
    env NNODES=2 NPROC=2 NODE_RANK=0 "$@" bash launch/run.sh "${PPO[@]}" "${NODES_MAP[@]}" --save "$WORK/$name" \
        >"$WORK/$name-1.log" 2>&1 &
    first=$!
    on node2 env NNODES=2 NPROC=2 NODE_RANK=1 "$@" bash launch/run.sh "${PPO[@]}" "${NODES_MAP[@]}" --save "$WORK/$name" \
        >"$WORK/$name-2.log" 2>&1 &
    second=$!
    wait "$first" || status=$?
    wait "$second" || status=$?
    [[ $status == 0 ]] || fail "$name"
    same "$WORK/undisturbed" "$WORK/$name"
}

# A port that is free in namespaces that nobody else uses.
say "two launchers, static addresses"
both static MASTER_ADDR=node1 MASTER_PORT=29400
say "two launchers that number themselves"
both c10d RDZV_ENDPOINT=node1:29400 RDZV_ID=test
say "passed"
