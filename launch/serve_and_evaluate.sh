#!/usr/bin/env bash
# Evaluates a policy through a generation server: starts the server on a free port of this node, runs `evaluate` as its
# client, stops the server. The results are those of `evaluate` alone, byte for byte.
#   bash launch/serve_and_evaluate.sh --config configs/quickstart.yaml --load RUN --tokenizer-model FILE \
#       --eval-prompts FILE [further flags of megarl.evaluate; --load and --weights-folder … go to the server]
# Reads: NPROC (ranks of the server, default 1); CLIENT_NPROC (ranks of the evaluation, default 1); SERVER_FLAGS (further
# flags of megarl.serve, separated by spaces); PYTHON and MEGARL_VENV (see launch/setup_env.sh).
# Exit status: 0; 2 for wrong flags; otherwise that of the side that failed.
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
PYTHON_BIN=$(bash "$ROOT/launch/setup_env.sh" serve)

# The server takes the flags of the policy; those of the evaluation, and their values, are the client's alone.
clients=$(PYTHONPATH="$ROOT" "$PYTHON_BIN" -c 'from megarl.flags.parser import own_flags
print("", *(own_flags("evaluate").keys() - own_flags("serve").keys()), "")')
server=() client=()
while [[ $# -gt 0 ]]; do
    flag=$1
    values=()
    shift
    while [[ $# -gt 0 && $1 != --* ]]; do values+=("$1") && shift; done
    name=${flag%%=*}
    name=${name#--}
    if [[ $flag == --load ]]; then
        server+=("$flag" "${values[@]}")
    elif [[ $clients == *" $name "* || $clients == *" ${name#no-} "* ]]; then
        client+=("$flag" "${values[@]}")
    else
        server+=("$flag" "${values[@]}") client+=("$flag" "${values[@]}")
    fi
done

log=$(mktemp)
NPROC=${NPROC:-1} bash "$ROOT/launch/run.sh" serve --port 0 "${server[@]}" ${SERVER_FLAGS:-} >"$log" &
pid=$!
stop() {
    kill -TERM "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
    rm -f "$log"
}
trap stop EXIT
until grep -q '^megarl: serving ' "$log"; do
    kill -0 "$pid" 2>/dev/null || { status=0 && wait "$pid" || status=$?; exit "$((status ? status : 1))"; }
    sleep 0.2
done
url=$(sed -n 's/^megarl: serving .* at //p' "$log")
echo "serve_and_evaluate: the server is at $url" >&2

NPROC=${CLIENT_NPROC:-1} bash "$ROOT/launch/run.sh" evaluate "${client[@]}" --rollout-server "$url"
kill -TERM "$pid"
wait "$pid"
