"""All code that uses Megatron: the only package that imports `megatron.*`.

The import first installs the CPU device shim (see `device.py`), which does nothing if CUDA is present.
"""

import logging
import os
import sys
import warnings

from megarl.mcore import device

# Before Blackwell, tensor parallelism needs kernels in launch order. Megatron checks this; it must be set early.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

# Unless logging is configured, importing Megatron sets the root logger to INFO and prints hundreds of lines per rank.
logging.basicConfig(level=logging.WARNING)
logging.getLogger("megatron").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="megatron")
warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")  # about how Megatron calls it

# Megatron's timers, which megarl does not use, would import TensorBoard into every program: absent until the end.
_is_blocked = sys.modules.setdefault("torch.utils.tensorboard", None) is None

device.install()  # before any other import of megatron

from megarl.mcore.kernels import linear  # noqa: E402  imports megatron

linear.install()
if _is_blocked:
    del sys.modules["torch.utils.tensorboard"]
