#!/usr/bin/env bash
# Creates, completes or reuses the Python environment of megarl.
#   PYTHON_BIN=$(bash launch/setup_env.sh [EXTRA,EXTRA])   extras of setup.py: gpu, images, math, optimizers, parquet,
#                                                          serve, trackers, environments, test, clients, bench, docs,
#                                                          smollm2; default none
#   bash launch/setup_env.sh --which-python                print the interpreter that would be used, and exit
# The last line of stdout is the path of the environment's python; all messages go to stderr.
# Reads: PYTHON (interpreter, used without fallback); MEGARL_VENV (folder, default .venv of this checkout).
# Exit status: 0 ready; 1 the installation failed; 2 wrong arguments or no usable interpreter.
# A folder MEGARL_VENV has only the dependencies, so that several checkouts can share it and run their own code through
# PYTHONPATH; the checkout's own .venv also has the package, as an editable install.
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
# megatron-core has compiled wheels only for these versions.
MINORS=(12 13)
# Libraries that the tests compare with. Kept out of the import path, since they have further top-level packages.
REFERENCES=(verl==0.9.1)
# Prints version and interpreter. A free-threaded build, which has no wheels, gets a "t". In an environment, the
# interpreter is the one it was made from.
PROBE='import sys, sysconfig, venv, ensurepip
threads = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
print("%d.%d.%d" % sys.version_info[:3] + threads, getattr(sys, "_base_executable", None) or sys.executable)'

say() { printf 'setup_env: %s\n' "$*" >&2; }

die() { # status line...
    local status=$1 line
    shift
    for line; do say "$line"; done
    exit "$status"
}

# ---- the interpreter ----

REFUSED=() # one line for each rejected candidate
PICKED=''  # the interpreter
VERSION='' # its version, as 3.12.1

supported() { # version
    local minor
    for minor in "${MINORS[@]}"; do
        [[ $1 =~ ^3\.$minor\.[0-9]+$ ]] && return 0
    done
    return 1
}

# probe CANDIDATE: sets PICKED and VERSION, or adds to REFUSED. Runs the candidate: a pyenv shim exists, yet may fail.
probe() {
    local answer reason
    if ! answer=$("$1" -I -c "$PROBE" 2>&1); then
        reason=${answer%%$'\n'*}
        [[ $reason == Traceback* ]] && reason=${answer##*$'\n'}
        REFUSED+=("$1: does not work: ${reason:-no message}")
        return 1
    fi
    read -r VERSION PICKED <<<"${answer##*$'\n'}"
    if supported "$VERSION"; then return 0; fi
    REFUSED+=("$1: is Python $VERSION")
    return 1
}

# Candidates, one per line, best first: the PATH, then the versions that pyenv has installed.
candidates() {
    local name minor base found
    for name in python3 "${MINORS[@]/#/python3.}"; do
        type -aP "$name" || true
    done
    base=${PYENV_ROOT:-}
    [[ -n $base ]] || base=$(pyenv root 2>/dev/null) || base=${HOME:-}/.pyenv
    for minor in "${MINORS[@]}"; do
        found=$(printf '%s\n' "$base/versions/3.$minor."*/bin/python | sort -rV)
        while read -r name; do
            if [[ -x $name ]]; then printf '%s\n' "$name"; fi
        done <<<"$found"
    done
}

pick_python() {
    local candidate path
    if [[ -n ${PYTHON:-} ]]; then
        path=$(type -P "$PYTHON") || die 2 "PYTHON=$PYTHON: no such program; allowed: a Python 3.12 or 3.13"
        probe "$path" || die 2 "PYTHON=$PYTHON cannot be used; allowed: a Python 3.12 or 3.13 with venv and ensurepip" \
            "  ${REFUSED[0]}"
        return
    fi
    while read -r candidate; do
        if [[ -n $candidate ]] && probe "$candidate" </dev/null; then return; fi
    done < <(candidates)
    [[ ${#REFUSED[@]} -gt 0 ]] || REFUSED=("nothing named python3, python3.12 or python3.13, on the PATH or in pyenv")
    die 2 "no usable Python: megarl needs 3.12 or 3.13 with the modules venv and ensurepip. Tried:" \
        "${REFUSED[@]/#/  }" \
        "Install one, for instance with \`pyenv install 3.12\`, and run this again," \
        "or name one: PYTHON=/path/to/python3.12 bash launch/setup_env.sh"
}

# ---- the environment's state file: status, maker, setup (a hash of what is asked for), python, extras ----

setup_hash() { cat "$ROOT/setup.py" "$ROOT/launch/setup_env.sh" | sha256sum | cut -d' ' -f1; }

read_state() {
    local key value
    S_status='' S_maker='' S_setup='' S_python='' S_extras=''
    [[ -f $STATE ]] || return 0
    while IFS='=' read -r key value; do
        case $key in status | maker | setup | python | extras) printf -v "S_$key" '%s' "$value" ;; esac
    done <"$STATE"
}

write_state() { # status; the rename makes it atomic
    printf '%s\n' "status=$1" "maker=$S_maker" "setup=$S_setup" "python=$S_python" "extras=$S_extras" >"$STATE.new"
    mv -f "$STATE.new" "$STATE"
}

python_works() { [[ -x $PY && $("$PY" -I -c "$PROBE" 2>/dev/null) == "${S_python%.*}."* ]]; }

# Whether the environment is complete: same setup.py, all requested extras, and a working python.
ready() {
    local extra
    read_state
    [[ $S_status == ready && $S_setup == "$(setup_hash)" ]] || return 1
    for extra in ${EXTRAS//,/ }; do
        [[ ,$S_extras, == *,$extra,* ]] || return 1
    done
    python_works
}

# With PYTHON set, an environment of another Python version is an error.
refuse_other_version() {
    [[ -z ${PYTHON:-} || -z $S_python || ${S_python%.*} == "${VERSION%.*}" ]] || die 2 \
        "PYTHON=$PYTHON is Python $VERSION, but $VENV was made with $S_python;" \
        "remove that folder, or name another one with MEGARL_VENV"
}

# ---- making it ----

LOG_START=1 # first line of the last pip call in the log

pip_install() {
    LOG_START=$(($(wc -l <"$LOG") + 1))
    "$PY" -I -m pip install --no-input --disable-pip-version-check --progress-bar off "$@" >>"$LOG" 2>&1
}

# Removes what an interrupted installation left; the lock and the state stay.
clear_remains() {
    say "removing an unfinished or broken installation in $VENV"
    find "$VENV" -mindepth 1 -maxdepth 1 ! -name 'megarl-env.*' -exec rm -rf {} +
}

# Whether an interrupted completion has left a working environment as it was: pip changes nothing before this line.
is_unchanged() { [[ $S_status == completing ]] && ! grep -q '^Installing collected packages' "$LOG"; }

prepare_folder() {
    local foreign
    if [[ ! -f $STATE ]]; then
        if [[ -e $VENV/pyvenv.cfg ]]; then
            # Not made by this script: packages may be added, nothing is ever removed.
            S_maker=other
            S_python=$("$PY" -I -c "$PROBE" 2>/dev/null | cut -d' ' -f1) || true
            supported "$S_python" || die 2 \
                "$VENV has no working Python 3.12 or 3.13 (found: ${S_python:-none}); remove it or set MEGARL_VENV"
        else
            foreign=$(find "$VENV" -mindepth 1 -maxdepth 1 ! -name 'megarl-env.*')
            [[ -z $foreign ]] || die 2 "$VENV has other files and is no Python environment; set MEGARL_VENV"
            S_maker=setup_env
        fi
    elif [[ $S_status != ready ]] && ! is_unchanged || ! python_works; then
        [[ $S_maker == setup_env ]] || die 2 \
            "an installation into $VENV did not finish, and this script did not make it; remove it or set MEGARL_VENV"
        clear_remains
        S_status='' S_python='' S_extras=''
    fi
    refuse_other_version
}

failed() { # what
    say "$1 failed; the end of $LOG:"
    tail -n 15 "$LOG" >&2
    # pip changes nothing before this line of its log: a working environment still works.
    if ! tail -n "+$LOG_START" "$LOG" | grep '^Installing collected packages' >/dev/null; then
        if [[ $S_status == ready || $S_status == completing ]]; then write_state "$S_status"; fi
    fi
    exit 1
}

install_packages() {
    local lines=() gpu_lines=()
    mapfile -t lines <<<"$PLAIN_LIST"
    pip_install "${lines[@]}" || failed 'installing the packages'
    S_status=ready # for `failed`: a step that fails below leaves a working environment
    if [[ ,$WANTED, == *,gpu,* ]]; then
        # transformer-engine compiles against the torch that is installed, so the build must see it.
        mapfile -t gpu_lines <<<"$GPU_LIST"
        pip_install setuptools wheel ninja pybind11 || failed 'installing the build tools'
        pip_install --no-build-isolation "${gpu_lines[@]}" || failed 'building the gpu extra'
    fi
    if [[ ,$WANTED, == *,test,* ]]; then install_references; fi
    if [[ $(cd -- "$VENV" && pwd -P) == "$ROOT/.venv" ]]; then
        pip_install --no-deps --no-build-isolation -e "$ROOT" || failed 'installing megarl'
        # pip compiles packages, but not an editable one. With PYTHONDONTWRITEBYTECODE, as many images set it, each
        # process would compile megarl's modules again. A checkout that cannot be written is no error.
        "$PY" -I -m compileall -q "$ROOT/megarl" "$ROOT/tools" >>"$LOG" 2>&1 || true
    fi
}

install_references() {
    local line
    for line in "${REFERENCES[@]}"; do
        if [[ -d $VENV/references/${line/==/-}.dist-info ]]; then continue; fi
        pip_install --no-deps --ignore-requires-python --upgrade --target "$VENV/references" "$line" ||
            failed 'installing what the tests compare with'
    done
}

# Requirement lines for a comma-separated list of extras; exits for a wrong extra before anything is made.
list_requirements() { "$1" -I "$ROOT/tools/check_env.py" --requirements --extras "$2" || exit 2; }

make_environment() {
    WANTED=$(printf '%s\n' ${S_extras//,/ } ${EXTRAS//,/ } | sort -u | paste -sd, -)
    local without_gpu=,$WANTED,
    without_gpu=${without_gpu/,gpu,/,}
    PLAIN_LIST=$(list_requirements "$PICKED" "$without_gpu")
    GPU_LIST=$(list_requirements "$PICKED" "$WANTED")
    : >"$LOG"
    if [[ ! -e $VENV/pyvenv.cfg ]]; then
        write_state installing
        S_python=$VERSION
        say "making $VENV with Python $VERSION: about 5.4 GB and two to four minutes, log in $LOG"
        "$PICKED" -I -m venv "$VENV" >>"$LOG" 2>&1 || failed 'making the environment'
    else
        write_state completing
        say "completing $VENV${WANTED:+ (extras $WANTED)}, log in $LOG"
    fi
    install_packages
    S_setup=$(setup_hash) S_extras=$WANTED
    "$PY" -I "$ROOT/tools/check_env.py" --extras "$WANTED" >&2 || {
        S_setup='' # pip succeeded, so nothing is cleared, but the next run checks again
        write_state ready
        die 1 "$VENV is not fit for megarl: see the problems above"
    }
    write_state ready
    say "ready after $SECONDS s"
}

# ---- compiled kernels: one library for each state of their sources and flags, version of torch and processor ----

KERNELS=$ROOT/megarl/mcore/kernels/native/src
KERNELS_BUILD=$ROOT/megarl/mcore/kernels/native/build.py

# Same name as `library_path` in megarl/mcore/kernels/native/__init__.py computes.
kernels_library() {
    local key torch=$VENV/lib/python${S_python%.*}/site-packages/torch
    key=$({
        (export LC_ALL=C && cat "$KERNELS"/* "$KERNELS_BUILD" "$torch/version.py")
        grep -m1 -E '^(flags|Features)' /proc/cpuinfo
    } 2>/dev/null | sha256sum | cut -c1-16) || true
    printf '%s\n' "$VENV/megarl/kernels-${MEGARL_KERNELS_MARCH:-native}-$key.so"
}

build_kernels() {
    local library started=$SECONDS line
    [[ -d $KERNELS ]] || return 0
    library=$(kernels_library)
    [[ ! -e $library && ! -e ${library%.so}.failed ]] || return 0
    if line=$("$PY" -I "$KERNELS_BUILD" "$KERNELS" "$library" 2>&1); then
        say "compiled kernels for this processor in $((SECONDS - started)) s"
    else
        say "${line##*$'\n'}"
        # Not tried again at every start; an environment that cannot be written is no error.
        { mkdir -p "$VENV/megarl" && printf '%s\n' "$line" >"${library%.so}.failed"; } 2>/dev/null || true
    fi
}

main() {
    if [[ ${1:-} == --which-python ]]; then
        pick_python
        printf '%s\n' "$PICKED"
        return
    fi
    EXTRAS=${1:-}
    [[ $# -le 1 && $EXTRAS =~ ^[a-z0-9,]*$ ]] || die 2 "usage: bash launch/setup_env.sh [EXTRA,EXTRA | --which-python]"
    VENV=${MEGARL_VENV:-$ROOT/.venv}
    [[ $VENV == /* ]] || VENV=$PWD/$VENV
    PY=$VENV/bin/python STATE=$VENV/megarl-env.state LOG=$VENV/megarl-env.log
    if [[ -n ${PYTHON:-} ]]; then pick_python; fi
    if ready; then
        refuse_other_version
    else
        if [[ -z $PICKED ]]; then pick_python; fi
        list_requirements "$PICKED" "$EXTRAS" >/dev/null
        mkdir -p "$VENV"
        if type -P flock >/dev/null; then
            exec 9>"$VENV/megarl-env.lock"
            flock -n 9 || { say "waiting for another set-up of $VENV" && flock 9; }
        fi
        if ! ready; then # another call may have made it in the meantime
            prepare_folder
            make_environment
        fi
    fi
    build_kernels
    printf '%s\n' "$PY"
}

main "$@"
