#!/usr/bin/env bash
# What the cluster tests share; to be sourced. Sets ROOT, the checkout.

ROOT=$(cd -- "$HERE/../.." && pwd -P)
SCRIPT=$(basename -- "$0")
export PYTHONPATH=$ROOT

# install_if_missing PROGRAM:PACKAGE...: installs all these Debian packages if a program is missing; needs root.
install_if_missing() {
    local pair missing=false log
    [[ $(id -u) == 0 ]] || { echo "$SCRIPT: needs root" >&2 && exit 2; }
    for pair in "$@"; do type -P "${pair%:*}" >/dev/null || missing=true; done
    $missing || return 0
    echo "$SCRIPT: installs ${*#*:}" >&2
    log=$(mktemp)
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${@#*:}"; } \
        >"$log" 2>&1 || { cat "$log" >&2 && rm -f "$log" && exit 2; }
    rm -f "$log"
}

say() { printf '%s: %s (%d s)\n' "$SCRIPT" "$*" "$SECONDS"; }

# fail WORD...: ends the test with the logs of $WORK.
fail() {
    echo "$SCRIPT: FAILED: $*" >&2
    for log in "$WORK"/*.log; do printf '==> %s\n' "$log" && tail -n 30 "$log"; done >&2
    exit 1
}

# same RUN RUN: metrics without times, samples, and the checkpoints that both have are equal, byte for byte. A signal makes
# a checkpoint of its own.
same() {
    "$PYTHON_BIN" - "$1" "$2" <<'PYTHON' || fail "$2 differs from $1"
import json
import sys
from pathlib import Path

from tools import record_runs

runs = [record_runs.record(Path(folder)) for folder in sys.argv[1:]]
saved = [{name.split("/")[0] for name in run["checkpoints"]} for run in runs]
for run in runs:
    run["checkpoints"] = {k: v for k, v in run["checkpoints"].items() if k.split("/")[0] in saved[0] & saved[1]}
found = record_runs.differences(*({"run": run} for run in runs))
if max(saved[0]) != max(saved[1]):
    found.append(f"last checkpoints: {max(saved[0])}, {max(saved[1])}")
rows = [[record_runs.reproducible(json.loads(line)) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
        for folder in sys.argv[1:]]  # fmt: skip
for first, second in zip(*rows):
    for name in sorted(first | second):
        if first.get(name) != second.get(name):
            found.append(f"step {first['step']}: {name}: {first.get(name)}, {second.get(name)}")
print("".join(line + "\n" for line in found), end="")
sys.exit(bool(found))
PYTHON
}

# Makes a policy and the command PPO of STEPS steps, with its role map for two nodes, and runs it undisturbed on one node.
prepare() {
    say "a warm start of 20 steps"
    SAVE=$WORK/warm bash launch/warm_start.sh --train-iters 20 --eval-interval 20 --lr-warmup-iters 1 \
        >"$WORK/warm.log" 2>&1 || fail "the warm start"
    PPO=(train_rl --config configs/quickstart.yaml --prompts "$WORK/warm/data/train.jsonl"
        --eval-prompts "$WORK/warm/data/heldout.jsonl" --tokenizer-model "$WORK/warm/data/tokenizer.model"
        --pretrained-checkpoint "$WORK/warm/sft" --train-iters "$STEPS" --eval-samples 40 --eval-interval 3
        --save-interval 2 --keep-best false --lr-warmup-iters 1 --lr-decay-iters 10)
    NODES_MAP=(--role-map "actor=node 0;critic=node 1;reward=node 1;reference=node 1")
    say "undisturbed: four ranks of launch/run.sh on one node"
    LAUNCHER=torchrun NPROC=4 bash launch/run.sh "${PPO[@]}" \
        --role-map "actor=0-1;critic=2-3;reward=2-3;reference=2-3" --save "$WORK/undisturbed" \
        >"$WORK/undisturbed.log" 2>&1 || fail "the undisturbed run"
}
