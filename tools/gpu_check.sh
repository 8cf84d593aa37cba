#!/usr/bin/env bash
# Checks megarl on this machine's CUDA device in about ten minutes: versions and kernel choices, the tests marked gpu,
# kernels against fp64, decode and update speed, three PPO steps, two deterministic runs. Needs no network and installs
# nothing.
#   bash tools/gpu_check.sh [STAGE …]
#   OUT=somewhere bash tools/gpu_check.sh decode update
# Reads: OUT (folder of the report, default runs/gpu_check); PYTHON (interpreter that has torch, default python3).
# Packages that the interpreter lacks are taken from build/packages if that folder is there (docs/gpu.md).
# Writes OUT/report.json, after each stage, and OUT/STAGE.log. Exit status: 0; 1 if a stage failed; 2 for wrong use or a
# machine without a CUDA device.
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$ROOT"
export PYTHONPATH="$ROOT:$ROOT/build/packages${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" tools/gpu_check.py --out "${OUT:-runs/gpu_check}" "$@"
