"""Everything that touches Megatron: the only folder that imports `megatron.*`.

Importing it installs the CPU device shim first (see `device.py`); with CUDA present that does nothing.
"""

import logging
import os
import warnings

from megarl.mcore import device

# Tensor parallelism before Blackwell needs kernels in launch order; Megatron checks for it, and it must be set early.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

# Megatron prints hundreds of lines a rank and turns the root logger to INFO when it is imported, unless one is set up.
logging.basicConfig(level=logging.WARNING)
logging.getLogger("megatron").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="megatron")
warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")  # on how Megatron calls it

device.install()  # before anything else imports megatron

from megarl.mcore.kernels import linear  # noqa: E402  imports megatron

linear.install()
