#!/usr/bin/env bash
# Starts a program of megarl on this node's ranks: checks its flags first, then forks them, or hands over to torchrun.
#   NPROC=4 bash launch/run.sh train_rl --config configs/quickstart.yaml
# Reads: NPROC (ranks of this node, default 1); for several nodes NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, the
# same command on each node; OMP_NUM_THREADS (threads of a rank; default: the ranks share the node's cores out); PYTHON
# and MEGARL_VENV (environment). Under srun start the program itself with `python -m megarl.train_rl`, one task a rank,
# with RANK, LOCAL_RANK and WORLD_SIZE set from Slurm's variables.
# Exit status: 2 for wrong flags, told in one line, which torchrun would wrap in a report of its own; else that of the
# rank that failed, or torchrun's (with CUDA, and on several nodes).
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
PROGRAMS="train_rl, train_sft, train_reward, evaluate"
[[ $# -gt 0 ]] || { echo "run.sh: name a program: $PROGRAMS" >&2; exit 2; }
NAME=$1
shift
case $NAME in
    train_rl | train_sft | train_reward | evaluate) ;;
    *) echo "run.sh: no program $NAME; allowed: $PROGRAMS" >&2; exit 2 ;;
esac
NPROC=${NPROC:-1}
NNODES=${NNODES:-1}
for name in NPROC NNODES; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || { echo "run.sh: $name=${!name}: allowed is a whole number above 0" >&2; exit 2; }
done
PYTHON_BIN=$(bash "$ROOT/launch/setup_env.sh")

# This checkout's code comes first, also in an environment that several checkouts share.
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

where=()
if [[ $NNODES -gt 1 ]]; then
    where=(--nnodes "$NNODES" --node-rank "${NODE_RANK:?run.sh: NODE_RANK is not set}"
        --master-addr "${MASTER_ADDR:?run.sh: MASTER_ADDR is not set}"
        --master-port "${MASTER_PORT:?run.sh: MASTER_PORT is not set}")
fi
exec "$PYTHON_BIN" -m megarl.launcher "${where[@]}" --nproc-per-node "$NPROC" "$NAME" "$@"
