"""All code that uses Megatron: the only package that imports `megatron.*`.

The import first installs the CPU device shim (see `device.py`), which does nothing if CUDA is present.
"""

import logging
import warnings

from megarl.mcore import device
from megarl.mcore.absent import TRACKERS, absent

# Unless logging is configured, importing Megatron sets the root logger to INFO and prints hundreds of lines per rank.
logging.basicConfig(level=logging.WARNING)
logging.getLogger("megatron").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="megatron")
warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")  # about how Megatron calls it
# New names for what Megatron and megarl call by the names that older versions of torch have, too.
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
# A rank's current device is its own: `role_mesh.join_process_group` says why its groups are bound to none.
warnings.filterwarnings("ignore", r"barrier\(\): using the device under current context")

with absent(*TRACKERS):  # Megatron's timers would import them
    device.install()  # before any other import of megatron

    from megarl.mcore.kernels import linear  # imports megatron

    linear.install()
