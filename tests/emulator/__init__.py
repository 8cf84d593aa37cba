"""A CUDA device with numbers, and without hardware: megarl's CUDA branches run on a CPU, in real programs.

    python -m tests.emulator --ranks 2 megarl.train_rl --bf16 --tensor-model-parallel-size 2 …

Torch's own CUDA tensors, allocator, streams and graphs run over a runtime whose device memory is host memory
(`runtime.c`). Operators run their CPU kernels on that memory, and launching a graph runs what it captured again, on
the addresses that they had (`operators.cpp`); they are refused what CUDA refuses (`refusals.h`), and memory that was
freed holds NaN (`memory.h`). Work on streams is done at once, and checked as if it were done as late as it may be
(`order.h`); pinned memory that a copy writes is hidden from the host until it has waited (`hidden.h`). gloo poses as
NCCL (`nccl.py`), whose calls are compared across ranks (`matching.py`); Triton's kernels run by their references or
its interpreter (`kernels.py`). `faults.py` has what the checks are for. Numbers are those of CPU kernels: it shows
wrong addresses, orders, devices and types, not the rounding of a GPU, nor its speed.
"""
