"""Compiled kernels for fp32 on a CPU (`src/`, PyTorch operators `megarl::…`), as an alternative to PyTorch's operators.

`launch/setup_env.sh` and `python -m megarl build_kernels` compile them (`build.py`) if there is a C++ compiler; without
them everything runs on PyTorch's operators. A row's bits depend on nothing but the row, so rollout and training agree
to the last bit; both always use the same kernels. Operators take contiguous tensors.
"""

import functools
import hashlib
import os
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor

from megarl.mcore import device

SOURCES = Path(__file__).with_name("src")
ops = torch.ops.megarl

_is_enabled = True
_WITH_MEMORY = Tensor, torch.nn.Parameter  # other types have none, such as those of a fake mode


def own_folder() -> Path:
    """Where files about this machine are kept: in the Python environment, or in the user's cache where an environment
    may not be written."""
    shared = Path(sys.prefix) / "megarl"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    is_writable = os.access(shared if shared.exists() else sys.prefix, os.W_OK)
    return shared if is_writable or not cache.is_absolute() else cache / "megarl"


def library_path() -> Path:
    """The compiled kernels of these sources and flags, for this torch and processor: in the Python environment if they
    are there, else in `own_folder`, whether or not they have been built."""
    name = _library_name(os.environ.get("MEGARL_KERNELS_MARCH") or "native")  # as in build.py, which runs alone
    shared = Path(sys.prefix) / "megarl" / name
    return shared if shared.exists() else own_folder() / name


@functools.cache
def _library_name(march: str) -> str:
    files = [*sorted(SOURCES.iterdir()), SOURCES.with_name("build.py"), Path(torch.__file__).with_name("version.py")]
    content = b"".join(path.read_bytes() for path in files) + _processor()
    return f"kernels-{march}-{hashlib.sha256(content).hexdigest()[:16]}.so"


def _processor() -> bytes:
    """The line of /proc/cpuinfo with the instructions that this processor has: the compiler uses all of them."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines(keepends=True)
    except OSError:
        return b""
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")


@functools.cache
def is_built() -> bool:
    """Whether the compiled kernels are there and this process has loaded them."""
    if device.has_cuda() or not (path := library_path()).exists():
        return False
    try:
        torch.ops.load_library(path)
    except OSError as error:
        warnings.warn(f"{path}: {str(error).splitlines()[0]}; PyTorch's operators are used", stacklevel=2)
        return False
    return True


def absence() -> str:
    """Why the compiled kernels are not there and what to do, in one line; empty if they are, or with CUDA."""
    if is_built() or device.has_cuda():
        return ""
    try:
        reason = library_path().with_suffix(".failed").read_text(encoding="utf-8").splitlines()[-1]
    except (OSError, ValueError, IndexError):
        reason = "no compiled kernels"
    return f"{reason}; `python -m megarl build_kernels` makes them if there is a C++20 compiler"


def enable(is_enabled: bool):
    """Switches the kernels on or off for all models that this process builds afterwards; on by default."""
    global _is_enabled
    _is_enabled = is_enabled


def is_used() -> bool:
    """Whether the kernels are built and switched on."""
    return _is_enabled and is_built()


def supports(*tensors: Tensor) -> bool:
    """Whether the kernels compute with these tensors."""
    return is_used() and all(x.dtype is torch.float32 and x.is_cpu and type(x) in _WITH_MEMORY for x in tensors)
