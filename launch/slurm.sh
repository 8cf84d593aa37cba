#!/usr/bin/env bash
#SBATCH --job-name=megarl
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#SBATCH --signal=USR1@600
# Batch script for Slurm: runs a program, or a script of launch/, on all nodes of the job. Submit it from the checkout:
#   sbatch --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 launch/slurm.sh train_rl --config my_run.yaml --save DIR
#   MODEL=qwen3_8b … sbatch --nodes 4 --ntasks-per-node 8 --gpus-per-node 8 launch/slurm.sh launch/rl.sh
#   DRY_RUN=1 NNODES=64 NPROC=8 bash launch/slurm.sh launch/rl.sh      print and check, without Slurm
# A run that Slurm preempts, or warns before its time limit (--signal=USR1@600: ten minutes), ends its step and saves; then
# this script requeues the job, which then resumes from that checkpoint. Choose the 600 s longer than a step
# and a save, and shorter than the time limit. After a failure of a node Slurm itself starts the job again.
# Reads: the variables of launch/run.sh (also MAX_RESTARTS) and of the script; MEGARL_ROOT (the checkout, default: the
# folder that the job was submitted from).
# Exit status: that of the program or script; 2 for wrong variables.
set -euo pipefail

# Slurm runs a copy of this file.
ROOT=${MEGARL_ROOT:-$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)}
[[ -f $ROOT/launch/run.sh ]] || ROOT=${SLURM_SUBMIT_DIR:-}
[[ -f $ROOT/launch/run.sh ]] || {
    echo "slurm.sh: no checkout in ${ROOT:-the folder of this script}: submit the job from the checkout, or set MEGARL_ROOT" >&2
    exit 2
}
[[ $# -gt 0 ]] || { echo "slurm.sh: no program or script given" >&2; exit 2; }
cd "$ROOT"
if [[ $1 == *.sh ]]; then
    [[ -f $1 ]] || { echo "slurm.sh: no script $1 in $ROOT" >&2; exit 2; }
    command=(bash "$@")
else
    command=(bash launch/run.sh "$@")
fi
if [[ -n ${DRY_RUN:-} ]]; then
    export LAUNCHER=srun
    exec "${command[@]}"
fi
[[ -n ${SLURM_JOB_ID:-} ]] || { echo "slurm.sh: SLURM_JOB_ID is not set: submit this script with sbatch" >&2; exit 2; }

MEGARL_END_FILE=$(mktemp)
export MEGARL_END_FILE
trap 'rm -f "$MEGARL_END_FILE"' EXIT
cancelled=false
trap 'cancelled=true' TERM  # scancel sends it to this script, too; preemption does not

# Slurm preempts a job while it runs: `scontrol` then tells the time.
preempted() { scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; }

# In the background, because bash handles signals only between commands.
"${command[@]}" &
child=$!
status=0
wait "$child" || status=$?
while kill -0 "$child" 2>/dev/null; do
    status=0
    wait "$child" || status=$?
done
if [[ $cancelled == false ]] && { [[ $(cat "$MEGARL_END_FILE") == signal ]] || { [[ $status != 0 ]] && preempted; }; }; then
    echo "slurm.sh: job $SLURM_JOB_ID goes back into the queue" >&2
    rm -f "$MEGARL_END_FILE" # Slurm kills this script
    scontrol requeue "$SLURM_JOB_ID"
    sleep 3600 # until Slurm ends this script: its own end would be the job's
fi
exit "$status"
