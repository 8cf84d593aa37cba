"""A folder's model as transformers builds it: its class, its module without memory, and the flags that describe it.

Nothing of the folder is run: the class is that of the installed transformers for `model_type`. A module is built with
parameters on torch's meta device. Its first pass finds the slots of attention, with products that compute nothing, so
the size of a model does not matter.
"""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, initialization
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from megarl.errors import UsageError, one_line
from megarl.mcore.any_model import attention, rows
from megarl.mcore.any_model.attention import FirstPass, Slot, Unsupported
from megarl.mcore.weights.hf.folder import HFFolder

FLAG = "--model-source transformers"
PROBED = 4  # tokens of the first pass
# Entries of config.json that a model of transformers reads as the longest sequence that its attention sees whole.
LIMITS = ("attention_chunk_size",)


class Source(NamedTuple):
    """A model type of transformers with a folder's config."""

    config: Any  # `PreTrainedConfig`
    kind: type  # class of the module

    @property
    def text(self) -> Any:
        """The language model's part of the config."""
        return self.config.get_text_config()

    def module(self, dtype: torch.dtype, attention_name: str = attention.NAME) -> PreTrainedModel:
        """The module with parameters on the meta device and buffers on the CPU, in evaluation mode.

        Args:
            attention_name: name of the attention function that its modules call; also of the experts function, unless
                it is `eager`.
        """
        config = copy.deepcopy(self.config)
        experts = "eager" if attention_name == "eager" else rows.NAME
        with _parameters_on_meta(), initialization.no_init_weights():
            module = self.kind._from_config(
                config, dtype=dtype, attn_implementation=attention_name, experts_implementation=experts
            )
        module.tie_weights()
        for each in (module.config, module.config.get_text_config()):
            each._experts_implementation = experts
        return module.eval()


def read(folder: HFFolder) -> Source:
    """The class and the config of a folder. UsageError for a type that the installed transformers lacks."""
    kind = folder.config.get("model_type")
    if "auto_map" in folder.config and kind not in CONFIG_MAPPING:
        raise folder.error(f"config.json: auto_map: code in a folder is not run, and transformers has no type {kind!r}")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise folder.error(f"config.json: model_type {kind!r}: the installed transformers has no such type")
    config_class = CONFIG_MAPPING[kind]
    if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise folder.error(f"config.json: model_type {kind!r}: transformers has no language model (ForCausalLM) of it")
    try:
        config = config_class.from_dict(copy.deepcopy(folder.config))
    except Exception as error:  # whatever a class of transformers raises for a wrong entry
        raise folder.error(f"config.json: transformers refuses it ({one_line(str(error))[:300]})") from None
    config.dtype = None
    if hasattr(config.get_text_config(), "is_decoder"):
        config.get_text_config().is_decoder = True
    found = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    return Source(config, found[0] if isinstance(found, tuple) else found)


def find_slots(module: PreTrainedModel, vocab_size: int, place: torch.device | str = "cpu") -> tuple[Slot, ...]:
    """The slots of a module's attention, in the order of a pass, which are also set on its parts. `place`: where its
    buffers are; a module that is split over ranks communicates from there.

    Raises:
        Unsupported: attention in another way, or the module needs what megarl does not hand over.
    """
    probe = FirstPass(tokens=PROBED)
    with torch.no_grad(), without_memory(module, place), attention.running(probe), rows.installed(no_product):
        positions = torch.arange(PROBED, device=place)[None]
        try:
            module(input_ids=positions % vocab_size, position_ids=positions, use_cache=False)
        except Unsupported:
            raise
        except Exception as error:
            raise Unsupported(f"{type(module).__name__} cannot run: {one_line(str(error))[:200]}") from None
    if not probe.found:
        raise Unsupported(f"{type(module).__name__} does not call transformers' attention interface")
    return tuple(probe.found)


def flags_of(source: Source, slots: Sequence[Slot], error: Callable[[str], UsageError]) -> dict[str, object]:
    """Megarl's flags of a model: the engine, its cache, the packing and the planner read them; no layer does.

    Raises:
        UsageError: what one cache cannot hold; `error` makes it of a text.
    """
    windows = {slot.window for slot in slots} - {None}
    if len(windows) > 1:
        sizes = ", ".join(map(str, sorted(windows)))
        raise error(f"has attention windows of {len(windows)} sizes ({sizes}), not of one")
    hidden = source.text.hidden_size
    flags: dict[str, object] = {
        "num-layers": len(slots),
        "hidden-size": hidden,
        "num-attention-heads": max(slot.heads for slot in slots),
        "kv-channels": max(slot.channels for slot in slots),
        "group-query-attention": True,
        "num-query-groups": max(slot.groups for slot in slots),
        "ffn-hidden-size": getattr(source.text, "intermediate_size", None) or 4 * hidden,
        "normalization": "RMSNorm",
        "disable-bias-linear": True,
        "swiglu": True,
        "make-vocab-size-divisible-by": math.gcd(source.text.vocab_size, 128),
        "position-embedding-type": "none",
    }
    if windows:
        flags["window-size"] = f"{windows.pop() - 1},0"
    if any(slot.has_score_options for slot in slots):
        flags["attention-backend"] = "eager"
    return flags


def check_length(source: Source, longest: int, error: Callable[[str], UsageError]):
    """UsageError if sequences of `longest` tokens are longer than what the type computes as a whole."""
    for name in LIMITS:
        limit = getattr(source.text, name, None)
        if isinstance(limit, int) and longest > limit:
            raise error(f"config.json: {name} {limit}: prompt and response together have up to {longest} tokens")


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Context in which new modules have their parameters on the meta device, and their buffers where they say."""
    register = nn.Module.register_parameter

    def on_meta(module, name, parameter):
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


@contextlib.contextmanager
def without_memory(module: nn.Module, place: torch.device | str = "cpu") -> Iterator[None]:
    """Context in which the parameters on the meta device are zeros of one number each, on a device."""
    before = {
        (each, name): parameter
        for each in module.modules()
        for name, parameter in each._parameters.items()
        if parameter is not None and parameter.device.type == "meta"
    }
    for (each, name), parameter in before.items():
        zeros = torch.zeros((), dtype=parameter.dtype, device=place).expand(parameter.shape)
        each._parameters[name] = nn.Parameter(zeros, requires_grad=False)
    try:
        yield
    finally:
        for (each, name), parameter in before.items():
            each._parameters[name] = parameter


def no_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Zeros of the shape of x · weightᵀ."""
    return x.new_zeros(*x.shape[:-1], len(weight))


@functools.lru_cache(maxsize=8)
def of_path(path: str) -> Source:
    """`read` of a folder that was read before without an error."""
    return read(HFFolder(path))
