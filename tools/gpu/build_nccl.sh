#!/usr/bin/env bash
# Builds an NCCL that takes several ranks on one device, for one architecture and the calls of megarl alone, so that it
# is small enough to travel: build/nccl/libnccl.so.2, which `python -m tools.gpu.ranks --backend nccl` takes.
#   git clone --depth 1 https://github.com/NVIDIA/nccl build/nccl_source     # 2.30 or later
#   pip install --target build/cuda nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl
#   bash tools/gpu/build_nccl.sh build/nccl_source
# Reads: CUDA_HOME (folder of bin/nvcc; default that of these packages); ARCH (default 90); JOBS (default: processors).
# With FUNCS="AllReduce Sum f32 * *|AllReduce Sum bf16 * *" NCCL 2.30.7 took 28 minutes on two cores and has 5.6 MB. All of
# FUNCS has not been built yet, and no such library has run on a device.
# Exit status: 0; 2 for wrong use; otherwise that of the command that failed.
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
wrong() { echo "build_nccl.sh: $*" >&2 && exit 2; }
CUDA_HOME=${CUDA_HOME:-$ROOT/build/cuda/nvidia/cu13} ARCH=${ARCH:-90}
FUNCS=${FUNCS:-"AllGather * *|Broadcast * *|SendRecv|AllReduce Sum * * *|AllReduce MinMax * * *|ReduceScatter Sum * * *"}
[[ $# == 1 ]] || wrong "give the folder of NCCL's source"
[[ -f $1/makefiles/version.mk ]] || wrong "$1: no source of NCCL: makefiles/version.mk is not there"
[[ $ARCH =~ ^[0-9]+a?$ ]] || wrong "ARCH=$ARCH: allowed is the number of an architecture, as 90"
[[ -x $CUDA_HOME/bin/nvcc ]] || wrong "CUDA_HOME=$CUDA_HOME: bin/nvcc is not there"
minor=$(sed -n 's/^NCCL_MINOR *:= *//p' "$1/makefiles/version.mk")
((minor >= 30)) || wrong "$1: NCCL 2.$minor takes one rank on a device: 2.30 or later takes several"

[[ -e $CUDA_HOME/lib64 || ! -d $CUDA_HOME/lib ]] || ln -s lib "$CUDA_HOME/lib64" # where its Makefile looks
make -C "$1" -j"${JOBS:-$(nproc)}" src.build CUDA_HOME="$CUDA_HOME" ONLY_FUNCS="$FUNCS" \
    NVCC_GENCODE="-gencode=arch=compute_$ARCH,code=sm_$ARCH"
mkdir -p "$ROOT/build/nccl"
strip -s "$(readlink -f "$1/build/lib/libnccl.so.2")" -o "$ROOT/build/nccl/libnccl.so.2"
ls -l "$ROOT/build/nccl/libnccl.so.2"
