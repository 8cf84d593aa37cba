"""Loads verl's rollout correction by path, like its algorithm file, without its dependencies."""

import functools
import importlib.util
import pathlib
import sys
import types
from unittest import mock

from tests.references.verl_core_algos import load_verl

# What the file imports but the compared functions never call: module -> names it must offer.
_STUBS = {
    "verl": (),
    "verl.protocol": ("DataProto",),
    "verl.trainer": (),
    "verl.trainer.config": (),
    "verl.trainer.config.algorithm": ("RolloutCorrectionConfig",),
    "verl.utils": (),
    "verl.workers": (),
    "verl.workers.config": (),
    "verl.workers.config.actor": ("PolicyLossConfig",),
}


@functools.cache
def load_verl_correction() -> types.ModuleType:
    """The real rollout_corr_helper.py. `sys.modules` is left as it was; RuntimeError as `load_verl`."""
    verl = load_verl()
    modules = {name: types.ModuleType(name) for name in _STUBS}
    for name, offered in _STUBS.items():
        modules[name].__path__ = []  # so that submodules may be imported from it
        for attribute in offered:
            setattr(modules[name], attribute, type(attribute, (), {}))
    modules["verl.utils"].torch_functional = modules["verl.utils.torch_functional"] = verl.torch_functional
    path = pathlib.Path(verl.core_algos.__file__).with_name("rollout_corr_helper.py")
    spec = importlib.util.spec_from_file_location("verl.trainer.ppo.rollout_corr_helper", path)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, modules):
        spec.loader.exec_module(module)
    return module
