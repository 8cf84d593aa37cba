"""Loads torchrl's file of value functions as an independent reference for GAE, without torchrl's dependencies."""

import functools
import importlib.util
import sys
import types

from tests.references.installed import folder_of

VERSION = "0.14.1"

# The file imports these helpers of its vectorised forms; the plain loop, which is compared with, calls none of them.
_HELPERS = (
    "_custom_conv1d",
    "_get_num_per_traj",
    "_inv_pad_sequence",
    "_make_gammas_tensor",
    "_split_and_pad_sequence",
)
_PARENTS = ("torchrl", "torchrl.objectives", "torchrl.objectives.value")


@functools.cache
def load_torchrl() -> types.ModuleType:
    """torchrl's real `objectives/value/functional.py`. `sys.modules` is left as it was.

    Raises:
        RuntimeError: torchrl is not installed, or in another version.
    """
    path = folder_of("torchrl", VERSION) / "objectives" / "value" / "functional.py"
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "torchrl"}
    stubs = {name: types.ModuleType(name) for name in _PARENTS}
    stubs["torchrl.objectives.value.utils"] = utils = types.ModuleType("torchrl.objectives.value.utils")
    for name in _HELPERS:
        setattr(utils, name, None)
    try:
        sys.modules.update(stubs)
        spec = importlib.util.spec_from_file_location("torchrl_value_functional", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        for name in stubs:
            del sys.modules[name]
        sys.modules.update(before)
    return module
