"""Kernels for CUDA devices, written in Triton. Imported only where one of them runs: a CPU needs no Triton."""
