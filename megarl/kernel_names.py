"""Names of the kernels that compute products with weights in fp32 on a CPU, for `--kernels`."""

KERNELS = ("compiled", "onednn", "blas")  # fastest first on most machines
