#!/usr/bin/env bash
# Builds Transformer Engine's part for PyTorch on a machine without a CUDA device, driver or nvcc, and runs tests/te and
# the test of its layer spec: models of both specs must have the same weights. Nothing is computed with its layers. The
# first run downloads about 4 GB and compiles for about an hour on one core; later runs take a minute.
#   bash tools/te_check.sh [PYTEST ARGUMENT …]
#   MAX_JOBS=8 bash tools/te_check.sh
# Reads: MEGARL_TE_VENV (folder of the environment, default build/te_venv; one that can import transformer_engine.pytorch
# is used as it is); MAX_JOBS (compilers at a time, default 1); PYTHON (see launch/setup_env.sh).
# Exit status: that of pytest; 1 if the build failed, with its log in FOLDER/te_build.log; 2 for a torch without CUDA 13.
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
FOLDER=$(realpath -m -- "${MEGARL_TE_VENV:-$ROOT/build/te_venv}")
VERSION=2.20.2
export NVTE_FRAMEWORK=pytorch

# torch comes first: it loads NCCL, which the core library wants.
has_engine() { "$FOLDER/bin/python" -c 'import torch, transformer_engine.pytorch' >/dev/null 2>&1; }

pip_install() {
    "$PYTHON_BIN" -I -m pip install --no-input --disable-pip-version-check --progress-bar off "$@" >>"$LOG" 2>&1 || {
        echo "te_check: pip install $* failed; the end of $LOG:" >&2
        tail -n 15 "$LOG" >&2
        exit 1
    }
}

if ! has_engine; then
    PYTHON_BIN=$(MEGARL_VENV="$FOLDER" bash "$ROOT/launch/setup_env.sh")
    LOG=$FOLDER/te_build.log
    CUDA=$("$PYTHON_BIN" -c 'import torch; print(torch.version.cuda or "none")')
    if [[ $CUDA != 13.* ]]; then
        echo "te_check: torch in $FOLDER was built for CUDA $CUDA; needed is 13" >&2
        exit 2
    fi
    echo "te_check: builds Transformer Engine $VERSION in $FOLDER" >&2
    # Headers that torch's packages lack: crt/ and nv/.
    pip_install setuptools wheel ninja pybind11 "pytest>=8,<10" "nvidia-cuda-crt==$CUDA.*" "nvidia-cuda-cccl==$CUDA.*"
    pip_install "transformer-engine==$VERSION" "transformer-engine-cu13==$VERSION"
    SITE=$("$PYTHON_BIN" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    export CPATH="$SITE/nvidia/cu13/include/cccl${CPATH:+:$CPATH}" PATH="$FOLDER/bin:$PATH"
    export NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_WITH_NCCL_EP=0 MAX_JOBS="${MAX_JOBS:-1}"
    pip_install --no-build-isolation "transformer-engine-torch==$VERSION"
    has_engine || {
        "$FOLDER/bin/python" -c 'import torch, transformer_engine.pytorch' 2>&1 | tail -n 3 >&2
        exit 1
    }
fi

cd "$ROOT"
export MEGARL_TE=1 OMP_NUM_THREADS=1 PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
OF_LAYERS=tests/unit/mcore/model/layer_specs/test_transformer_engine.py
exec "$FOLDER/bin/python" -m pytest -p no:cacheprovider -m te tests/te "$OF_LAYERS" "$@"
