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
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from megarl.errors import UsageError, one_line
from megarl.mcore.any_model import attention, rows
from megarl.mcore.any_model.attention import FirstPass, Slot, Unsupported
from megarl.mcore.any_model.recurrence import functions_of
from megarl.mcore.kernels.batch_invariance import VECTOR
from megarl.mcore.weights.hf.folder import HFFolder

FLAG = "--model-source transformers"
NO_INTERFACE = "does not call transformers' attention interface"
PROBED = 4  # tokens of the first pass
SPREAD = 0.1  # of the values of vectors
EXPERT_STEP = 7  # between the numbers with which two experts' matrices begin
LIMIT = "attention_chunk_size"  # in config.json: the longest sequence that attention sees whole
# Rotary embeddings with other angles for all tokens of a pass that has a longer sequence than an entry says.
ROPES = {"longrope": "original_max_position_embeddings", "dynamic": "max_position_embeddings"}


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

        Raises:
            Unsupported: transformers cannot build it so.
        """
        config = copy.deepcopy(self.config)
        experts = "eager" if attention_name == "eager" else rows.NAME
        with one_line_errors(self.kind, "be built"):
            with torch.device("meta"), initialization.no_init_weights():
                module = self.kind._from_config(
                    config, dtype=dtype, attn_implementation=attention_name, experts_implementation=experts
                )
            _set_places(module)
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
    mappings = MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    mapping = next((each for each in mappings if CONFIG_MAPPING[kind] in each), None)
    if mapping is None:
        raise folder.error(
            f"config.json: model_type {kind!r}: transformers has no language model (ForCausalLM) of it, and none that "
            "reads images"
        )
    config = config_of(folder)
    config.dtype = None
    if hasattr(config.get_text_config(), "is_decoder"):
        config.get_text_config().is_decoder = True
    return of_config(config, mapping)


def config_of(folder: HFFolder) -> Any:
    """The config of a folder of a type that transformers has. UsageError for a wrong entry."""
    kind = CONFIG_MAPPING[folder.config["model_type"]]
    try:
        described, _ = kind.get_config_dict(folder.path)  # reads infinity, as transformers writes it
        return kind.from_dict(described)
    except Exception as error:  # whatever a class of transformers raises for a wrong entry
        raise folder.error(f"config.json: transformers refuses it ({_in_one_line(str(error))})") from None


def of_config(config: Any, mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING) -> Source:
    """The class that an auto class takes for a config, with the part of a composite config that it takes. `mapping`: of
    that class, by default of `AutoModelForCausalLM`."""
    found = mapping[type(config)]
    kind = found[0] if isinstance(found, tuple) else found
    text = config.sub_configs.get("text_config")
    return Source(config.get_text_config() if text is not None and kind.config_class is text else config, kind)


def find_slots(
    module: PreTrainedModel,
    positions: Tensor | None = None,
    place: torch.device | str = "cpu",
    matmul: Callable = rows.no_matmul,
) -> tuple[Slot, ...]:
    """The slots of a module's attention, in the order of a pass, which are also set on its parts. The shapes of a
    sequence's recurrent states are set on the module (`state_shapes`).

    Args:
        positions: [PROBED] of the tokens; default: the first ones.
        place: where its buffers are; a module that is split over ranks communicates from there.
        matmul: in place of torch's.

    Raises:
        Unsupported: attention in another way, or the module needs what megarl does not hand over.
    """
    probe = FirstPass(tokens=PROBED, functions=functions_of(module))
    stubs = rows.installed(rows.no_product, matmul)
    with torch.no_grad(), values_in(module, functools.partial(_zeros, place=place)), attention.running(probe), stubs:
        tokens, text = torch.arange(PROBED, device=place), module.config.get_text_config()
        indexer = [name for name, value in vars(text).items() if name.startswith("index") and value]
        with one_line_errors(type(module), f"run without its sparse indexer, {indexer[0]}" if indexer else "run"):
            at = tokens if positions is None else positions
            module(input_ids=tokens[None] % text.vocab_size, position_ids=at[None], use_cache=False)
    if not probe.found and not probe.states:
        raise Unsupported(f"{type(module).__name__} {NO_INTERFACE}")
    module.state_shapes = tuple(probe.states)  # type: ignore[assignment]  # torch's type of an attribute
    return probe.set_slots()


def layers_of(module: nn.Module) -> nn.ModuleList:
    """The transformer layers of a module: its longest list of modules of one base class with attention in them."""
    lists = [each for each in module.modules() if isinstance(each, nn.ModuleList) and len(each)]
    with_slots = [each for each in lists if any(hasattr(part, "attention_slots") for part in each.modules())]
    return max(with_slots or lists, key=lambda each: sum(1 for _ in each.parameters()))


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of a module, each once, by the first of its names."""
    tensors = [(name, x) for name, x in module.state_dict(keep_vars=True).items() if torch.is_tensor(x)]
    once = {id(x): (name, x) for name, x in reversed(tensors)}
    return dict(reversed(once.values()))


@contextlib.contextmanager
def one_line_errors(kind: type, what: str = "run") -> Iterator[None]:
    """Context in which an error of transformers' code is one line for the user: Unsupported."""
    try:
        yield
    except Unsupported:
        raise
    except Exception as error:  # whatever a module raises
        if error.args == (attention.NAME,):  # looked up in a table of its own
            raise Unsupported(f"{kind.__name__} {NO_INTERFACE}") from None
        text = _in_one_line(f"{type(error).__name__}: {error}")
        raise Unsupported(f"{kind.__name__} cannot {what} ({text})") from None


def _in_one_line(text: str) -> str:
    return one_line(" ".join(text.split()))[:300]


def flags_of(source: Source, slots: Sequence[Slot], error: Callable[[str], UsageError]) -> dict[str, object]:
    """Megarl's flags of a model: the engine, its cache, the packing and the planner read them; no layer does.

    Raises:
        UsageError: what one cache cannot hold; `error` makes it of a text.
    """
    windows = {slot.window for slot in slots} - {None}
    if len(windows) > 1:
        sizes = ", ".join(map(str, sorted(windows)))
        raise error(f"has attention windows of {len(windows)} sizes ({sizes}), not of one")
    hidden, inner = source.text.hidden_size, getattr(source.text, "intermediate_size", None)
    flags: dict[str, object] = {
        "num-layers": max(1, len(slots)),
        "hidden-size": hidden,
        "num-attention-heads": max((slot.heads for slot in slots), default=1),
        "kv-channels": max((slot.channels for slot in slots), default=VECTOR),
        "group-query-attention": True,
        "num-query-groups": max((slot.groups for slot in slots), default=1),
        "ffn-hidden-size": max(inner) if isinstance(inner, list) else inner or 4 * hidden,
        "normalization": "RMSNorm",
        "disable-bias-linear": True,
        "swiglu": True,
        "make-vocab-size-divisible-by": math.gcd(source.text.vocab_size, 128),
        "position-embedding-type": "none",
    }
    if windows:
        flags["window-size"] = f"{windows.pop() - 1},0"
    if any(slot.has_score_options for slot in slots):
        flags["softmax-type"] = "learnable"  # for the choice of a backend; softcaps and sinks are the modules'
    return flags


def check_length(source: Source, longest: int, error: Callable[[str], UsageError]):
    """UsageError if sequences of `longest` tokens are longer than what the type computes as a whole."""
    limits = {LIMIT: getattr(source.text, LIMIT, None)}
    ropes = getattr(source.text, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):  # of each type of layers
        if isinstance(rope, dict) and (kind := rope.get("rope_type")) in ROPES:
            entry = ROPES[kind]
            limit = rope.get(entry) if kind == "longrope" else source.text.max_position_embeddings
            limits[f"rope_type {kind}, {entry}"] = limit
    for name, limit in limits.items():
        if isinstance(limit, int) and longest > limit:
            raise error(f"config.json: {name} {limit}: prompt and response together have up to {longest} tokens")


@torch.no_grad()
def _set_places(module: PreTrainedModel):
    """Moves the parameters of a module that was built on the meta device there, and its buffers to the CPU, with the
    values that its class begins with; those of a folder, for which it has none, are 0."""
    for part in module.modules():
        for name, x in part._parameters.items():
            if x is not None and not x.is_meta:  # made by a function without a device
                part._parameters[name] = nn.Parameter(x.to("meta"), x.requires_grad)
        part._buffers |= {
            name: torch.zeros_like(x, device="cpu") for name, x in part._buffers.items() if x is not None and x.is_meta
        }
    for parameter in module.parameters():
        parameter._is_hf_initialized = True  # for transformers, which then leaves it
    module.initialize_weights()


def _zeros(name: str, shape: torch.Size, dtype: torch.dtype, place: torch.device | str = "cpu") -> Tensor:
    return torch.zeros((), dtype=dtype, device=place).expand(shape)


@contextlib.contextmanager
def values_in(module: nn.Module, values: Callable[[str, torch.Size, torch.dtype], Tensor] = _zeros) -> Iterator[None]:
    """Context in which the parameters on the meta device have values, which need not fill memory: `values` of their
    name, shape and type."""
    names = {owner: name for name, owner in module.named_modules()}
    own = [(owner, name, x) for owner in names for name, x in owner._parameters.items() if x is not None and x.is_meta]
    for owner, name, x in own:
        made = values(f"{names[owner]}.{name}", x.shape, x.dtype)
        owner._parameters[name] = nn.Parameter(made, requires_grad=False)
    try:
        yield
    finally:
        for owner, name, x in own:
            owner._parameters[name] = x


def spread_values(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Values of a parameter that depend on its name and shape alone. A matrix repeats the numbers of a vector, one
    place further in each row, so that it needs no memory."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 1000 + len(shape))
    if len(shape) < 2:
        centre = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
        return (centre + SPREAD * torch.randn(shape, generator=generator)).to(dtype)
    strides = [EXPERT_STEP] * (len(shape) - 2) + [1, 1]
    size = 1 + sum(stride * (length - 1) for stride, length in zip(strides, shape, strict=True))
    vector = torch.randn(size, generator=generator) * shape[-1] ** -0.5
    return vector.to(dtype).as_strided(shape, strides)
