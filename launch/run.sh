#!/usr/bin/env bash
# Starts a megarl program: on this node's ranks, on several nodes, or in a Slurm allocation with srun.
#   NPROC=4 bash launch/run.sh train_rl --config configs/quickstart.yaml
#   DRY_RUN=1 NNODES=64 NPROC=8 bash launch/run.sh train_rl --config my_run.yaml
# Reads:
#   NPROC          ranks on a node; default: on one node of CPUs without OMP_NUM_THREADS whichever of one rank with all
#                  threads or a rank per core a measurement finds faster; in a Slurm allocation its tasks, else GPUs, per
#                  node; otherwise 1
#   NNODES         nodes, default: those of the Slurm allocation, otherwise 1
#   NODE_RANK, MASTER_ADDR, MASTER_PORT    number of this node, and where the first one listens; run the command on each
#   RDZV_ENDPOINT, RDZV_ID                 instead of those three: HOST:PORT where the nodes meet and number themselves,
#                                          and the job's name there
#   DRY_RUN        1: print the command, check its flags (train_rl: `megarl.plan`, which needs no data), start nothing
#   VOCAB_SIZE     for DRY_RUN without --hf-model or tokenizer
#   GPU_MEMORY     for DRY_RUN: GiB of a GPU; the plan ends with a verdict, and status 1 if the run does not fit
#   GENERATORS     with train_rl --replica-port PORT on one node: so many replicas of the rollout beside it, which end with
#                  it; MAX_RESTARTS is theirs, too
#   GENERATOR_NPROC    ranks of each of them, default 1
#   MAX_RESTARTS   restarts from the latest checkpoint of --save after a failure, default 0
#   LAUNCHER       auto (default), torchrun (ignore a Slurm allocation) or srun
#   SRUN_FLAGS     further flags of srun, separated by spaces
#   OMP_NUM_THREADS    threads per rank, default: the node's cores divided by its ranks
#   PYTHON, MEGARL_VENV    see launch/setup_env.sh
# Exit status: 0; 1 of DRY_RUN if the plan does not fit into GPU_MEMORY; 2 after one line for wrong flags or variables;
# otherwise that of the rank that failed, torchrun's or srun's.
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
PROGRAMS="train_rl, train_sft, train_reward, train_preference, evaluate, serve, generate"
show_help "${1:-}"
[[ $# -gt 0 ]] || wrong "no program given; allowed: $PROGRAMS"
PROGRAM=$1
shift
case $PROGRAM in
    train_rl | train_sft | train_reward | train_preference | evaluate | serve | generate) ;;
    *) wrong "unknown program $PROGRAM; allowed: $PROGRAMS" ;;
esac
LAUNCHER=${LAUNCHER:-auto}
case $LAUNCHER in
    torchrun | srun) ;;
    auto) LAUNCHER=torchrun; if in_allocation; then LAUNCHER=srun; fi ;;
    *) wrong "LAUNCHER=$LAUNCHER: allowed: auto, torchrun, srun" ;;
esac
if [[ $LAUNCHER == srun ]]; then read_allocation; fi
check_numbers NPROC NNODES GENERATORS GENERATOR_NPROC
NNODES=${NNODES:-1} MAX_RESTARTS=${MAX_RESTARTS:-0}
[[ $MAX_RESTARTS =~ ^[0-9]+$ ]] || wrong "MAX_RESTARTS=$MAX_RESTARTS: allowed is a whole number"
nodes=() ranks=()
if [[ $LAUNCHER == torchrun && $NNODES -gt 1 && -n ${RDZV_ENDPOINT:-} ]]; then
    nodes=(--nnodes "$NNODES" --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-id "${RDZV_ID:-megarl}")
elif [[ $LAUNCHER == torchrun && $NNODES -gt 1 ]]; then
    for name in NODE_RANK MASTER_ADDR MASTER_PORT; do
        [[ -n ${!name:-}${DRY_RUN:-} ]] || wrong "$name is not set: NNODES=$NNODES needs it, or RDZV_ENDPOINT"
    done
    nodes=(--nnodes "$NNODES" --node-rank "${NODE_RANK:-NODE_RANK}" --master-addr "${MASTER_ADDR:-MASTER_ADDR}"
        --master-port "${MASTER_PORT:-MASTER_PORT}")
fi
[[ -z ${NPROC:-} ]] || ranks=(--nproc-per-node "$NPROC")
port=
if [[ -n ${GENERATORS:-} ]]; then
    [[ $PROGRAM == train_rl && $LAUNCHER == torchrun && $NNODES == 1 ]] ||
        wrong "GENERATORS=$GENERATORS: allowed with train_rl on one node; elsewhere start megarl.generate yourself"
    words=("${@//=/ }")
    for word in ${words[*]}; do [[ ${before:-} != --replica-port ]] || port=$word; before=$word; done
    [[ -n $port ]] || wrong "GENERATORS=$GENERATORS: needs --replica-port on the command line"
fi
find_python

if [[ $LAUNCHER == srun ]]; then
    cores=()
    # srun does not take this from the allocation.
    [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || cores=("--cpus-per-task=$SLURM_CPUS_PER_TASK")
    # shellcheck disable=SC2206  # a list of words
    command=(srun "--nodes=$NNODES" "--ntasks=$((NNODES * NPROC))" "--ntasks-per-node=$NPROC" "${cores[@]}"
        --distribution=block --kill-on-bad-exit=1 ${SRUN_FLAGS:-} "$PYTHON_BIN" -m "megarl.$PROGRAM" "$@")
else
    command=("$PYTHON_BIN" -m megarl.launcher "${nodes[@]}" "${ranks[@]}" --max-restarts "$MAX_RESTARTS" "$PROGRAM" "$@")
fi

if [[ -n ${DRY_RUN:-} || -n ${SHOW_COMMAND:-} ]]; then show_command "${command[@]}"; fi
if [[ -n ${DRY_RUN:-} ]]; then
    if [[ $PROGRAM == train_rl ]]; then
        plan "$@"
        exit
    fi
    export WORLD_SIZE=$((NNODES * ${NPROC:-1})) LOCAL_WORLD_SIZE=${NPROC:-1}
    exec "$PYTHON_BIN" -m "megarl.$PROGRAM" "$@" --check
fi
if [[ -n $port ]]; then
    "${command[@]}" &
    run=$! generators=()
    for ((i = 0; i < GENERATORS; i++)); do
        "$PYTHON_BIN" -m megarl.launcher --nproc-per-node "${GENERATOR_NPROC:-1}" --max-restarts "$MAX_RESTARTS" \
            generate --join "127.0.0.1:$port" "$@" &
        generators+=($!)
    done
    trap 'kill -TERM "${generators[@]}" 2>/dev/null || true' EXIT
    for name in TERM INT USR1; do
        # shellcheck disable=SC2064  # the names as they are now
        trap "kill -$name $run 2>/dev/null || true" "$name"
    done
    status=0
    while kill -0 "$run" 2>/dev/null; do
        status=0
        wait "$run" || status=$?
    done
    exit "$status"
fi
[[ $LAUNCHER == srun ]] || exec "${command[@]}"

# ---- srun: what the launcher does on one node ----

export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
ERRORS=$(mktemp) FOLDER=$(mktemp) END=${MEGARL_END_FILE:-} mine=
[[ -n $END ]] || { mine=$(mktemp) && END=$mine; }
export MEGARL_END_FILE=$END MEGARL_FOLDER_FILE=$FOLDER
trap 'rm -f "$ERRORS" "$FOLDER" ${mine:+"$mine"}' EXIT
# say_why: repeats the line of the rank that failed first as the last one, after what other ranks and srun have printed. For
# a rank that was killed, which says nothing, it says how to resume.
say_why() {
    local line
    if ! line=$(grep -E '^([0-9]+: *)?megarl: (rank [0-9]+ failed in|error:|stopped:|hung:)' "$ERRORS" |
        grep -m1 -vE 'Connection (reset|closed) by peer'); then
        ((status <= 128)) || "$PYTHON_BIN" -c 'import sys; from megarl import launcher; launcher.tell_killed(*sys.argv[1:])' \
            "$status" "$(cat "$FOLDER")" "$ERRORS"
        return 0
    fi
    [[ $(tail -n1 "$ERRORS") == "$line" ]] || echo "$line" >&2
}
attempt=0
while true; do
    : >"$END"
    export TORCHELASTIC_RESTART_COUNT=$((${SLURM_RESTART_COUNT:-0} + attempt))
    status=0
    # After a signal, too, `tee` passes on what srun prints.
    { "${command[@]}" 2>&1 >&3 | (trap '' INT TERM USR1 && exec tee "$ERRORS" >&2); } 3>&1 || status=$?
    # The first rank has written why it ended, if another start would not change that.
    [[ $status != 0 && ! -s $END && $attempt -lt $MAX_RESTARTS ]] || break
    attempt=$((attempt + 1))
    echo "run.sh: restart $attempt of at most $MAX_RESTARTS" >&2
done
[[ $status == 0 ]] || say_why
exit "$status"
