"""Adapter folders of PEFT 0.21: adapter_config.json and adapter_model.safetensors."""

import dataclasses
import json
import re
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl import probe
from megarl.errors import UsageError, one_line
from megarl.mcore.lora.peft_modules import PeftModule, fuse, peft_modules, unfuse
from megarl.mcore.lora.settings import MLP_TARGETS, TARGETS, LoRASettings
from megarl.mcore.weights.hf.family import Family
from megarl.mcore.weights.hf.folder import MAX_BYTES
from megarl.mcore.weights.hf.safetensors_file import DTYPES
from megarl.numbers import is_plain_number
from megarl.plain_files import check_regular, read_json, reason_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, HEAD = "base_model.model.", "score.weight"
PATTERNS = ("alpha_pattern", "rank_pattern")
OFF = ("use_dora", "fan_in_fan_out", "lora_bias", "layer_replication", "trainable_token_indices", "use_qalora",
       "alora_invocation_tokens", "arrow_config", "megatron_config", "loftq_config", "corda_config",
       "eva_config")  # fmt: skip
LINEAR_INIT = (True, False, "gaussian", "orthogonal")  # other initializations change the weights under the factors


def _is_positive(value) -> bool:
    return is_plain_number(value) and value > 0


def _are_names(value) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_rank(value) -> bool:
    return type(value) is int and value > 0


def _is_pattern(value) -> bool:
    return isinstance(value, dict) and all(map(_is_positive, value.values()))


def _are_ranks(value) -> bool:
    return isinstance(value, dict) and all(map(_is_rank, value.values()))


# Entries of the config that are read, and what they must be, if they are there.
ALLOWED = {
    "r": (_is_rank, "a whole number above 0"), "rank_pattern": (_are_ranks, "whole numbers above 0 by pattern"),
    "lora_alpha": (_is_positive, "a number above 0"), "alpha_pattern": (_is_pattern, "numbers above 0 by pattern"),
    "use_rslora": (lambda value: isinstance(value, bool), "true or false"),
    "modules_to_save": (_are_names, "a list of names"), "target_parameters": (_are_names, "a list of names"),
}  # fmt: skip


class PeftAdapter(NamedTuple):
    """A folder's factors as megarl trains them."""

    lora: LoRASettings
    factors: dict[str, Tensor]  # whole, by key in a checkpoint; ranks may be below that of `lora`
    head: Tensor | None  # [1, H], a scalar head


def read_adapter(path: str, args, family: Family) -> PeftAdapter:
    """Reads the folder of `--lora-adapter` for a model of any layout.

    Args:
        args: the role's Megatron namespace.
        family: of the model.

    Raises:
        UsageError: not such a folder, or factors that megarl cannot train.
    """
    folder, error = Path(path), _error(path)
    config = _read_config(folder, error)
    tensors = _read_tensors(folder, error)
    head, factors = tensors.pop(HEAD, None), {}
    prefixes = family.module_prefixes  # code of published folders may have its own
    named = (each for each in prefixes if any(name.startswith(f"{each}layers.") for name in tensors))
    modules = peft_modules(args, family, next(named, prefixes[0]))
    _check_patterns(config, modules, error)
    rslora = bool(config.get("use_rslora"))
    stored = LoRASettings(rank=config["r"], alpha=config["lora_alpha"], rslora=rslora, targets=TARGETS)
    for module in modules:
        found = _take(module, tensors, config)
        if found is None:
            continue
        a, b, rank = found
        if b.shape[-2] != module.rows or a.shape[-1] != module.columns or a.shape[-2] != b.shape[-1]:
            raise error(
                f"{module.name} has factors of shapes {list(a.shape)} and {list(b.shape)}; its input is "
                f"{module.columns}, its output {module.rows}"
            )
        if rank != (said := _of_module(config, "rank_pattern", module.name, config["r"])):
            raise error(f"{module.name} has factors of rank {rank}, but {CONFIG} says {said} (r, rank_pattern)")
        ratio = (
            dataclasses.replace(
                stored, rank=rank, alpha=_of_module(config, "alpha_pattern", module.name, config["lora_alpha"])
            ).scale
            / stored.scale
        )
        factors |= unfuse(module, a, b if ratio == 1 else b * ratio)
    if tensors:
        raise error(f"{min(tensors)} is no factor of a layer that megarl adapts: {', '.join(TARGETS)}")
    if not factors:
        raise error(f"{WEIGHTS} has no factors")
    names = {key.split(".")[-2] for key in factors}
    rank = max(factor.shape[-2] for key, factor in factors.items() if key.endswith("A"))
    targets = tuple(target for target in TARGETS if target in names)
    return PeftAdapter(dataclasses.replace(stored.with_rank(rank), targets=targets), factors, head)


def _error(path: str):
    return lambda problem: UsageError(one_line(f"--lora-adapter {path}: {problem}"))


def _read_config(folder: Path, error) -> dict:
    try:
        config = read_json(folder / CONFIG, MAX_BYTES)
    except FileNotFoundError:
        raise error(f"{CONFIG} is missing; allowed is a folder of PEFT's save_pretrained") from None
    except (OSError, ValueError, RecursionError) as problem:
        raise error(f"{CONFIG} cannot be read ({reason_of(problem)})") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise error(f"{CONFIG} describes no LoRA adapter (peft_type)")
    for name, (holds, allowed) in ALLOWED.items():
        if not (config.get(name) is None or holds(config[name])):
            raise error(f"{CONFIG}: {name} is {config[name]!r}; it must be {allowed}")
    for name in (name for name in OFF if config.get(name)):
        raise error(f"{CONFIG}: {name} is not supported")
    if config.get("bias", "none") != "none" or set(config.get("modules_to_save") or ()) - {"score", "classifier"}:
        raise error(f"{CONFIG}: trains more than low-rank factors (bias, modules_to_save)")
    if config.get("init_lora_weights", True) not in LINEAR_INIT:
        raise error(
            f"{CONFIG}: init_lora_weights {config['init_lora_weights']!r} changes the weights under the factors"
        )
    if config.get("r") is None or config.get("lora_alpha") is None:
        raise error(f"{CONFIG}: r and lora_alpha are missing; they must be numbers above 0")
    return config


def _read_tensors(folder: Path, error) -> dict[str, Tensor]:
    """The tensors by name without PEFT's prefix."""
    try:
        check_regular(folder / WEIGHTS)
        tensors = load_file(folder / WEIGHTS)
    except FileNotFoundError:
        raise error(f"{WEIGHTS} is missing") from None
    except (SafetensorError, OSError) as problem:
        raise error(f"{WEIGHTS} is no readable safetensors file ({' '.join(str(problem).split())})") from None
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES.values() or tensor.dim() != 2 or not tensor.numel():
            raise error(
                f"{name} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}; factors are matrices of "
                f"{', '.join(DTYPES)}"
            )
        if not tensor.isfinite().all():
            raise error(f"{name} has a NaN or an infinity")
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def _check_patterns(config: dict, modules: list[PeftModule], error):
    """UsageError for a pattern that is no regular expression, or takes too long to match."""
    for entry in PATTERNS:
        patterns = config.get(entry) or {}
        if not probe.ends(lambda patterns=patterns: [_matches(p, each.name) for p in patterns for each in modules]):
            raise error(f"{CONFIG}: {entry} takes more than {probe.limits()}, to match")
        for pattern in patterns:
            try:
                _matches(pattern, "")
            except (re.error, RecursionError, OverflowError) as problem:
                raise error(f"{CONFIG}: {entry}: {pattern[:100]!r} is no regular expression ({problem})") from None


def _take(module: PeftModule, tensors: dict[str, Tensor], config: dict) -> tuple[Tensor, Tensor, int] | None:
    """Removes a module's A [R, K] and B [N, R] from the tensors, experts in front; the last number is PEFT's rank."""
    if module.experts is None:
        pair = _pop(module.name, tensors)
        return pair and (*pair, len(pair[0]))
    experts, _, parameter = module.name.rpartition(".")
    pair = _pop(_wrapper(experts, parameter, tensors, config), tensors)
    if pair is None:
        return _single_experts(experts, module, tensors)
    a, b = pair
    if len(a) % module.experts or b.shape[1] != len(a):
        return a, b, len(a)  # of a wrong shape
    a = a.view(module.experts, -1, a.shape[-1])
    return a, b.view(len(b), -1, module.experts).permute(2, 0, 1), a.shape[1]


def _pop(name: str, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    if f"{name}.lora_A.weight" not in tensors or f"{name}.lora_B.weight" not in tensors:
        return None
    return tensors.pop(f"{name}.lora_A.weight"), tensors.pop(f"{name}.lora_B.weight")


def _wrapper(experts: str, parameter: str, tensors: dict[str, Tensor], config: dict) -> str:
    """Name of the wrapper of a parameter: PEFT wraps the down projections around those of gate and up."""
    named = [name.rpartition(".")[2] for name in config.get("target_parameters") or ()]
    is_inner = parameter != "down_proj" and (f"{experts}.base_layer.lora_A.weight" in tensors)
    if is_inner:
        return f"{experts}.base_layer"
    return experts if parameter == "down_proj" or "down_proj" not in named else f"{experts}.none"


def _single_experts(experts: str, module: PeftModule, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, int] | None:
    """Factors of modules of single experts, as older transformers have them: `experts.3.gate_proj`."""
    projections = [member.key.rpartition(".")[2] for member in module.members]
    names = [[f"{experts}.{i}.{name}" for name in projections] for i in range(module.experts)]
    if not all(f"{name}.lora_A.weight" in tensors for of_expert in names for name in of_expert):
        return None
    stacked, rank = {}, 0
    for i, member in enumerate(module.members):
        pairs = [_pop(of_expert[i], tensors) for of_expert in names]
        stacked[f"{member.key}.lora_A"], stacked[f"{member.key}.lora_B"] = map(torch.stack, zip(*pairs, strict=True))
        rank = pairs[0][0].shape[0]
    return *fuse(module, stacked, rank), rank


def _matches(pattern: str, name: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def _of_module(config: dict, entry: str, name: str, default: float) -> float:
    """A module's value of an entry by pattern, the first that matches its name; without one the default."""
    patterns = (config.get(entry) or {}).items()
    return next((value for pattern, value in patterns if _matches(pattern, name)), default)


def write_adapter(
    folder: Path, lora: LoRASettings, factors: dict[str, Tensor], head: Tensor | None, base: str, args, family: Family
):
    """Writes a folder; its weights appear last, by a rename.

    Args:
        factors: whole factors of all layers by key in a checkpoint.
        head: [1, H], a scalar head.
        base: the folder of the weights under the factors, for the user.
        args, family: as of `read_adapter`.
    """
    tensors, modules = {}, []
    parameters, ranks = [], {}
    for module in peft_modules(args, family, family.module_prefixes[0]):
        pair = fuse(module, factors, lora.rank)
        if pair is None:
            continue
        (a, b), name = pair, module.name
        if a.shape[-2] != lora.rank:
            ranks[name.rpartition(".")[2]] = a.shape[-2]
        if module.experts is not None:
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
            parameters.append(name)
            experts, _, parameter = name.rpartition(".")
            name = f"{experts}.base_layer" if parameter != "down_proj" and "down_proj" in lora.targets else experts
        elif args.num_experts and name.endswith(MLP_TARGETS):
            # Among modules, PEFT would take these names for those of experts, as older transformers had them.
            parameters.append(f"{name}.weight")
        else:
            modules.append(name)
        tensors[f"{PREFIX}{name}.lora_A.weight"], tensors[f"{PREFIX}{name}.lora_B.weight"] = a, b
    if head is not None:
        tensors[f"{PREFIX}{HEAD}"] = head
    alphas = {name: lora.with_rank(rank).alpha for name, rank in ranks.items()}
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM" if head is None else "SEQ_CLS", "base_model_name_or_path": base,
        "r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rslora, "rank_pattern": ranks,
        "alpha_pattern": alphas, "target_modules": modules, "target_parameters": parameters or None, "bias": "none",
        "lora_dropout": 0.0, "fan_in_fan_out": False, "init_lora_weights": True, "inference_mode": True,
        "modules_to_save": None if head is None else ["score"],
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS).unlink(missing_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial = folder / f"{WEIGHTS}.partial"
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}, partial)
    partial.replace(folder / WEIGHTS)
