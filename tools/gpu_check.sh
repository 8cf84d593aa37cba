#!/usr/bin/env bash
# Checks megarl on this machine's CUDA device: versions and kernel choices, kernels against fp64, decode and update
# speed, several ranks on the device, whole programs, the tests marked gpu. Needs no network and installs nothing.
#   bash tools/gpu_check.sh [--small] [STAGE …]
#   bash tools/gpu_check.sh prepare                    # on a CPU, before: fills build/ (--small: for short alone)
#   OUT=somewhere bash tools/gpu_check.sh short-a      # 400 seconds at most, and short-b
# A STAGE may be a group of stages: short (short-a, short-b), all (whole-a, whole-b, whole-c), the default. Each part is
# a command of less than ten minutes. --small takes small sizes, to try the check on an emulated device:
#   python -m tests.emulator tools.gpu_check --small --out runs/gpu_check short
# Reads: OUT (folder of the report, default runs/gpu_check); PYTHON (interpreter that has torch, default python3).
# Packages that the interpreter lacks are taken from build/packages if that folder is there (docs/gpu.md).
# Writes OUT/report.json, after each stage, and OUT/STAGE.log. Exit status: 0; 1 if a stage failed; 2 for wrong use or a
# machine without a CUDA device.
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$ROOT"
export PYTHONPATH="$ROOT:$ROOT/build/packages${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m tools.gpu_check --out "${OUT:-runs/gpu_check}" "$@"
