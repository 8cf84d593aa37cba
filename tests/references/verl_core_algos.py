"""Loads verl's algorithm file as an independent reference, without verl's dependencies and without importing verl.

The wheel is installed apart because it also brings top-level packages named `tests` and `scripts`.
"""

import functools
import importlib.util
import pathlib
import sys
import types

from tests.references.installed import folder_of

VERSION = "0.9.1"

# What the loaded files import but the compared functions never call: module -> names it must offer.
_STUBS = {
    "omegaconf": ("DictConfig",),
    "tensordict": ("TensorDict",),
    "transformers": ("PreTrainedTokenizer",),
    "verl": (),
    "verl.trainer": (),
    "verl.trainer.config": ("AlgoConfig",),
    "verl.utils": (),
    "verl.utils.device": ("get_device_name", "get_torch_device"),
    "verl.utils.import_utils": (),
    "verl.workers": (),
    "verl.workers.config": ("ActorConfig",),
}


@functools.cache
def load_verl() -> types.SimpleNamespace:
    """The real files of verl: `.core_algos` and `.torch_functional`. `sys.modules` is left as it was.

    Raises:
        RuntimeError: verl is not installed, or in another version.
    """
    root = folder_of("verl", VERSION)
    before = {name: module for name, module in sys.modules.items() if _is_touched(name)}
    try:
        for name in before:
            del sys.modules[name]
        for name, offered in _STUBS.items():
            sys.modules[name] = _stub(name, offered)
        sys.modules["verl.utils.import_utils"].deprecated = lambda replacement="": lambda function: function
        functional = _load("verl.utils.torch_functional", root / "utils" / "torch_functional.py")
        groupwise = _load("verl.utils.groupwise", root / "utils" / "groupwise.py")
        utils = sys.modules["verl.utils"]
        utils.torch_functional = functional
        utils.as_torch_index, utils.group_mean_std = groupwise.as_torch_index, groupwise.group_mean_std
        core = _load("verl.trainer.ppo.core_algos", root / "trainer" / "ppo" / "core_algos.py")
    finally:
        for name in [name for name in sys.modules if _is_touched(name)]:
            del sys.modules[name]
        sys.modules.update(before)
    return types.SimpleNamespace(core_algos=core, torch_functional=functional)


def _is_touched(name: str) -> bool:
    return name in _STUBS or name.startswith("verl.")


def _stub(name: str, offered: tuple[str, ...]) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = []  # so that submodules may be imported from it
    for attribute in offered:
        setattr(module, attribute, type(attribute, (), {}))
    return module


def _load(name: str, path: pathlib.Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
