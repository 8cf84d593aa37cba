#!/usr/bin/env bash
# Functions of the scripts in launch/; to be sourced. Sets ROOT, the checkout.

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
SCRIPT=$(basename -- "$0")

# wrong WORD...: ends the script with one line and status 2.
wrong() { echo "$SCRIPT: $*" >&2 && exit 2; }

# check_numbers NAME...: each of these variables is unset, empty, or a whole number above 0.
check_numbers() {
    local name
    for name in "$@"; do
        [[ -z ${!name:-} || ${!name} =~ ^[1-9][0-9]*$ ]] || wrong "$name=${!name}: allowed is a whole number above 0"
    done
}

# show_help WORD...: if -h or --help is among the words, prints the comment at the script's beginning and ends the script; for
# a script that sets HELP_OF, with the flags of that program of megarl.
show_help() {
    local word
    for word in "$@"; do
        [[ $word == -h || $word == --help ]] || continue
        sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"
        [[ -n ${HELP_OF:-} ]] || exit 0
        find_python && exec "$PYTHON_BIN" -m "megarl.$HELP_OF" --help
        exit
    done
}

# Whether this is a shell or batch script with a Slurm allocation, and not itself a task of srun.
in_allocation() { [[ -n ${SLURM_JOB_ID:-} && -z ${SLURM_STEP_ID:-} ]]; }

# Sets NNODES and NPROC from the allocation where they are not set.
read_allocation() {
    in_allocation || [[ -n ${DRY_RUN:-} ]] || wrong "LAUNCHER=srun: there is no Slurm allocation; allowed in sbatch or salloc"
    NNODES=${NNODES:-${SLURM_JOB_NUM_NODES:-1}}
    if [[ -z ${NPROC:-} ]]; then
        local tasks=${SLURM_NTASKS_PER_NODE:-}
        # Without --ntasks-per-node: the tasks of --ntasks, unless there is one per node for several GPUs.
        [[ -n $tasks || -z ${SLURM_NTASKS:-} || ! ${SLURM_TASKS_PER_NODE:-} =~ ^([0-9]+)(\(x[0-9]+\))?$ ]] || tasks=${BASH_REMATCH[1]}
        [[ -n $tasks ]] || tasks=${SLURM_GPUS_ON_NODE:-1}
        NPROC=$tasks
    fi
}

# names FOLDER ENDING: names of the files in a folder of the checkout, without their ending, in one line.
names() {
    local path found=()
    for path in "$ROOT/$1"/*"$2"; do found+=("$(basename -- "$path" "$2")"); done
    echo "${found[@]}"
}

# find_python: sets PYTHON_BIN, and PYTHONPATH for it.
find_python() {
    PYTHON_BIN=$(bash "$ROOT/launch/setup_env.sh") || return
    # Several checkouts may share an environment: this checkout's code must come first.
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
}

# plan FLAG...: the plan of train_rl with these flags on NNODES nodes with NPROC ranks, for GPUs of GPU_MEMORY GiB if set.
plan() {
    "$PYTHON_BIN" -m megarl.plan --world-size "$((${NNODES:-1} * ${NPROC:-1}))" --ranks-per-node "${NPROC:-1}" \
        ${VOCAB_SIZE:+--vocab-size "$VOCAB_SIZE"} ${GPU_MEMORY:+--gpu-memory "$GPU_MEMORY"} "$@"
}

# least_recompute FLAG...: prints "recompute:" and the flags of the least recomputation with which train_rl fits; status 1
# if it never does. To be run in a subshell: it sets what launch/run.sh sets again.
least_recompute() {
    if [[ ${LAUNCHER:-auto} != torchrun ]] && in_allocation; then read_allocation; fi
    find_python && plan --least-recompute "$@"
}

# show_command WORD...: prints a command as one could type it.
show_command() {
    printf 'command:'
    printf ' %q' "$@"
    printf '\n'
}

# start PROGRAM ARRAY... -- [flag ...]: prints the flags of the named arrays, and starts the program with them and the
# further flags by launch/run.sh.
start() {
    local program=$1 flags=()
    shift
    while [[ $1 != -- ]]; do
        local -n values=$1
        printf '%-15s' "$1"
        ((${#values[@]} == 0)) || printf ' %q' "${values[@]}"
        printf '\n'
        flags+=("${values[@]}")
        shift
    done
    shift
    SHOW_COMMAND=1 exec bash "$ROOT/launch/run.sh" "$program" "${flags[@]}" "$@"
}
