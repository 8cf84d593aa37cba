"""All code that uses Megatron: the only package that imports `megatron.*`.

The import first installs the CPU device shim (see `device.py`), which does nothing if CUDA is present.
"""

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator

from megarl.mcore import device

TRACKERS = ("torch.utils.tensorboard", "wandb")  # seconds of a start; Megatron would load them, megarl does not


@contextlib.contextmanager
def absent(names: Iterable[str]) -> Iterator[None]:
    """Context in which importing these modules raises ImportError, as if they were not installed. Modules that have
    been imported already stay."""
    hidden = [name for name in names if sys.modules.setdefault(name, None) is None]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


# Unless logging is configured, importing Megatron sets the root logger to INFO and prints hundreds of lines per rank.
logging.basicConfig(level=logging.WARNING)
logging.getLogger("megatron").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="megatron")
warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")  # about how Megatron calls it
# New names for what Megatron and megarl call by the names that older versions of torch have, too.
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
# A rank's current device is its own: `role_mesh.join_process_group` says why its groups are bound to none.
warnings.filterwarnings("ignore", r"barrier\(\): using the device under current context")

with absent(TRACKERS):  # Megatron's timers would import them
    device.install()  # before any other import of megatron

    from megarl.mcore.kernels import linear  # imports megatron

    linear.install()
