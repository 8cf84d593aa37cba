#!/usr/bin/env bash
# Starts a megarl program on this node's ranks: checks its flags, then forks the ranks or executes torchrun.
#   NPROC=4 bash launch/run.sh train_rl --config configs/quickstart.yaml
# Reads: NPROC (ranks on this node; default: 1, but for training on the CPUs of one node without OMP_NUM_THREADS one rank
# with all threads or one for each core, whichever a measurement finds faster); NNODES, NODE_RANK, MASTER_ADDR and
# MASTER_PORT (for several nodes; run the command on each); MAX_RESTARTS (default 0); OMP_NUM_THREADS (threads per rank,
# default: the node's cores divided by its ranks); PYTHON and MEGARL_VENV (see launch/setup_env.sh). Under srun, start
# the program itself with `python -m megarl.train_rl`, one task per rank, with RANK, LOCAL_RANK and WORLD_SIZE set from
# Slurm's variables.
# Exit status: 0; 2 after one line for wrong flags or variables; otherwise that of the rank that failed, or torchrun's
# (with CUDA, and on several nodes).
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
PROGRAMS="train_rl, train_sft, train_reward, evaluate, serve"
[[ $# -gt 0 ]] || { echo "run.sh: no program given; allowed: $PROGRAMS" >&2; exit 2; }
NAME=$1
shift
case $NAME in
    train_rl | train_sft | train_reward | evaluate | serve) ;;
    *) echo "run.sh: unknown program $NAME; allowed: $PROGRAMS" >&2; exit 2 ;;
esac
NNODES=${NNODES:-1}
for name in NPROC NNODES; do
    [[ -z ${!name:-} || ${!name} =~ ^[1-9][0-9]*$ ]] || { echo "run.sh: $name=${!name}: allowed is a whole number above 0" >&2; exit 2; }
done
MAX_RESTARTS=${MAX_RESTARTS:-0}  # after a failure, from the latest checkpoint of --save
[[ $MAX_RESTARTS =~ ^[0-9]+$ ]] || { echo "run.sh: MAX_RESTARTS=$MAX_RESTARTS: allowed is a whole number" >&2; exit 2; }
PYTHON_BIN=$(bash "$ROOT/launch/setup_env.sh")

# Several checkouts may share an environment: this checkout's code must come first.
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

nodes=()
if [[ $NNODES -gt 1 ]]; then
    nodes=(--nnodes "$NNODES" --node-rank "${NODE_RANK:?run.sh: NODE_RANK is not set}"
        --master-addr "${MASTER_ADDR:?run.sh: MASTER_ADDR is not set}"
        --master-port "${MASTER_PORT:?run.sh: MASTER_PORT is not set}")
fi
ranks=()
[[ -z ${NPROC:-} ]] || ranks=(--nproc-per-node "$NPROC")
exec "$PYTHON_BIN" -m megarl.launcher "${nodes[@]}" "${ranks[@]}" --max-restarts "$MAX_RESTARTS" "$NAME" "$@"
