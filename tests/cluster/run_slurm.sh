#!/usr/bin/env bash
# Tests megarl on a real Slurm of two nodes, which are network namespaces of this machine (two_nodes.sh): a run of the
# quickstart's PPO over both nodes is preempted after its first step, goes back into the queue, resumes, and must equal an
# undisturbed run of launch/run.sh on four ranks, byte for byte. Also: srun without a wrapper, wrong flags, a killed rank
# with a restart, scancel.
#   bash tests/cluster/run_slurm.sh
# Needs root. Installs Debian's slurm-wlm, munge and iproute2 if they are missing. Leaves no process and no file behind.
# Exit status: 0; 1 if a test failed; 2 if this machine cannot run it.
set -euo pipefail

HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
source "$HERE/common.sh"
if [[ ${1:-} != --inside ]]; then
    install_if_missing slurmctld:slurm-wlm munged:munge ip:iproute2
    PYTHON_BIN=$(bash "$ROOT/launch/setup_env.sh")
    export PYTHON_BIN
    exec bash "$HERE/two_nodes.sh" "$HERE/slurm_cluster.sh" "$HERE/run_slurm.sh" --inside
fi

cd "$ROOT"
STEPS=6
state() { scontrol show job "$1" | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p'; }

# until_state JOB STATE: waits until a job is in this state; fails if it ends in another one.
until_state() {
    local now
    while now=$(state "$1") && [[ $now != "$2" ]]; do
        case $now in FAILED | CANCELLED | TIMEOUT | NODE_FAIL | COMPLETED) fail "job $1 is $now, not $2" ;; esac
        sleep 0.3
    done
}

last_step() { tail -n 1 "$1/metrics.jsonl" | sed 's/.*"step": \([0-9]*\).*/\1/'; }
lines() { if [[ -f $1 ]]; then wc -l <"$1"; else echo 0; fi; }

# until_lines FILE NUMBER JOB: waits until a file has so many lines; fails if the job ends before.
until_lines() {
    until [[ $(lines "$1") -ge $2 ]]; do
        case $(state "$3") in FAILED | CANCELLED | COMPLETED) fail "job $3 ended before line $2 of $1" ;; esac
        sleep 0.1
    done
}

# job NAME PROGRAM [flag ...]: submits launch/slurm.sh and prints the job's number.
job() {
    local name=$1
    shift
    sbatch --parsable --nodes 2 --ntasks-per-node 2 --output "$WORK/$name.log" launch/slurm.sh "$@"
}

prepare

say "Slurm: preempted after its first step"
id=$(job preempted "${PPO[@]}" "${NODES_MAP[@]}" --save "$WORK/preempted")
until_lines "$WORK/preempted/metrics.jsonl" 2 "$id" # the evaluation before training, and step 1
other=$(sbatch --parsable --partition high --nodes 2 --ntasks-per-node 2 --output "$WORK/high.log" --wrap 'sleep 1')
until_state "$id" PENDING
say "saved after step $(last_step "$WORK/preempted"), back in the queue"
[[ $(last_step "$WORK/preempted") -lt $STEPS ]] || fail "the run was not preempted before its end"
until_state "$other" COMPLETED
until_state "$id" COMPLETED
grep -q 'goes back into the queue' "$WORK/preempted.log" || fail "the job did not go back into the queue"
same "$WORK/undisturbed" "$WORK/preempted"
say "metrics, samples and checkpoints equal those of the undisturbed run, byte for byte"

say "srun without a wrapper, from salloc; wrong flags"
salloc --quiet --nodes 2 --ntasks-per-node 2 srun "$PYTHON_BIN" -m megarl."${PPO[0]}" "${PPO[@]:1}" "${NODES_MAP[@]}" \
    --train-iters 1 --save "$WORK/srun" >"$WORK/srun.log" 2>&1 || fail "srun"
grep -q '"step": 1,' "$WORK/srun/metrics.jsonl" || fail "srun wrote no metrics"
id=$(MAX_RESTARTS=1 job wrong "${PPO[@]}" --clip-rang 0.1)
until_state "$id" FAILED
[[ $(grep -c 'unknown flag; did you mean --clip-range' "$WORK/wrong.log") == 1 ]] || fail "wrong flags are not named once"

say "a rank that is killed, and a restart"
id=$(MAX_RESTARTS=1 job killed "${PPO[@]}" "${NODES_MAP[@]}" --save "$WORK/killed")
until_lines "$WORK/killed/metrics.jsonl" 4 "$id" # the checkpoint of step 2 is complete
kill -KILL "$(pgrep --newest --full '^[^ ]*python[^ ]* -m megarl.train_rl')"
until_state "$id" COMPLETED
grep -q 'run.sh: restart 1 of at most 1' "$WORK/killed.log" || fail "no restart"
[[ $(grep -c '^step *1/' "$WORK/killed.log") == 1 ]] || fail "the restart began at step 1"
same "$WORK/undisturbed" "$WORK/killed"

say "scancel"
id=$(job cancelled "${PPO[@]}" "${NODES_MAP[@]}" --train-iters 1000 --save "$WORK/cancelled")
until_lines "$WORK/cancelled/metrics.jsonl" 1 "$id"
scancel "$id"
until_state "$id" CANCELLED
if grep -q 'goes back into the queue' "$WORK/cancelled.log"; then fail "a cancelled job went back into the queue"; fi
say "passed"
