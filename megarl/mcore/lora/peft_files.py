"""Adapter folders of PEFT 0.21: adapter_config.json and adapter_model.safetensors."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.errors import UsageError, one_line
from megarl.mcore.lora.peft_config import CONFIG, MERGE, check_patterns, read_config, stored_settings
from megarl.mcore.lora.peft_modules import Member, PeftModule, fuse, known_modules, peft_modules, unfuse
from megarl.mcore.lora.targets import MLP_TARGETS, TARGETS, LoRASettings
from megarl.mcore.weights.hf.family import Family
from megarl.mcore.weights.hf.folder import DTYPES
from megarl.plain_files import check_regular

WEIGHTS, PICKLED = "adapter_model.safetensors", "adapter_model.bin"
PREFIX, HEAD = "base_model.model.", "score.weight"
PARAMETER = re.compile(r"\.(lora_\w+(\..+)?|(base_layer\.)?(weight|bias))$")  # of a module's name in the file
SHOWN = 6  # modules in an error
Problem = Callable[[str], UsageError]
Pair = tuple[Tensor, Tensor]  # A [R, K] and B [N, R]


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
    config = read_config(folder, error)
    tensors = _read_tensors(folder, error)
    names = sorted(tensors)
    head, factors = _pop_head(tensors, args.hidden_size, error), {}
    prefixes = family.module_prefixes  # code of published folders may have its own
    named = (each for each in prefixes if any(name.startswith(f"{each}layers.") for name in tensors))
    modules = known_modules(args, family, next(named, prefixes[0]))
    check_patterns(config, modules, error)
    trained = []
    for module in modules:
        found = _factors_of(module, tensors, config, error)
        if twice := found.keys() & factors.keys():
            raise error(f"{WEIGHTS} has two pairs of factors of {min(twice)}")
        factors |= found
        trained += [module] if found else []
    _check_rest(names, tensors, trained, family, error)
    if not factors:
        raise error(f"{WEIGHTS} has no factors")
    projections = {key.split(".")[-2] for key in factors}
    rank = max(factor.shape[-2] for key, factor in factors.items() if key.endswith("A"))
    targets = tuple(target for target in TARGETS if target in projections)
    if args.model_folder is not None:
        targets = args.model_folder.targets_naming({module.name for module in trained})
    return PeftAdapter(dataclasses.replace(stored_settings(config).with_rank(rank), targets=targets), factors, head)


def _error(path: str) -> Problem:
    return lambda problem: UsageError(one_line(f"--lora-adapter {path}: {problem}"))


def _read_tensors(folder: Path, error: Problem) -> dict[str, Tensor]:
    try:
        check_regular(folder / WEIGHTS)
        tensors = load_file(folder / WEIGHTS)
    except FileNotFoundError:
        pickled = f"; {PICKLED} is not read, PEFT's save_pretrained writes the other"
        raise error(f"{WEIGHTS} is missing{pickled if (folder / PICKLED).exists() else ''}") from None
    except (SafetensorError, OSError) as problem:
        raise error(f"{WEIGHTS} is no readable safetensors file ({' '.join(str(problem).split())})") from None
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def _pop_head(tensors: dict[str, Tensor], hidden_size: int, error: Problem) -> Tensor | None:
    if (head := tensors.pop(HEAD, None)) is not None:
        _check_matrix(HEAD, head, error)
        if head.shape != (1, hidden_size):
            raise error(f"{HEAD} is {list(head.shape)}; a scalar head is {[1, hidden_size]}")
    return head


def _check_rest(names: list[str], rest: dict[str, Tensor], trained: list[PeftModule], family: Family, error: Problem):
    """UsageError for tensors that are no factors of `trained` modules, with what to train instead.

    Args:
        names: of all tensors.
        rest: those that are in no pair of a known module.
    """
    known = {module.name for module in trained}
    owners = {name: PARAMETER.sub("", name) for name in sorted(rest)}
    halves = {name: {f"{owner}.lora_A.weight", f"{owner}.lora_B.weight"} for name, owner in owners.items()}
    if alone := [x for x, owner in owners.items() if owner in known or x in halves[x] and not halves[x] <= rest.keys()]:
        raise error(f"{alone[0]} is not one of a pair of factors, lora_A.weight and lora_B.weight")
    modules = sorted({re.sub(r"(?<=\.)\d+(?=\.|$)", "*", owner) for owner in owners.values()})
    if modules:
        more = f" and {len(modules) - SHOWN} more" if len(modules) > SHOWN else ""
        read = [PARAMETER.sub("", name) for name in names if name not in rest]
        raise error(
            f"trains modules that have no factors in megarl: {', '.join(modules[:SHOWN])}{more}; "
            f"{_instead(trained, read, family)}{MERGE}"
        )


def _instead(trained: list[PeftModule], read: list[str], family: Family) -> str:
    """The entries of PEFT's config that train the other modules of an adapter alone; `read`: their names in the file.

    They are not said by `exclude_modules`: PEFT 0.21 does not apply it to a router that "all-linear" has chosen.
    """
    single = re.compile(r".+\.experts\.\d+\.(\w+)")  # of transformers 4
    plain = [module.name.rpartition(".")[2] for module in trained if module.experts is None]
    modules = list(dict.fromkeys(plain + [match[1] for name in read if (match := single.fullmatch(name))]))
    wrappers = {name.removesuffix(".base_layer") for name in read}
    stacked = {m.name.rpartition(".")[2] for m in trained if m.experts and m.name.rpartition(".")[0] in wrappers}
    entries: list[str] = []
    if modules and family.multimodal is not None:  # towers have modules of the same names
        entries.append(f"target_modules=r'.*language_model.*\\.({'|'.join(modules)})'")
    elif modules:
        entries.append(f"target_modules={modules}")
    if stacked:
        entries.append(f"target_parameters={[f'{family.experts}.{name}' for name in sorted(stacked, reverse=True)]}")
    return f"train with {', '.join(entries)}, " if entries else "train others, "


def _factors_of(module: PeftModule, tensors: dict[str, Tensor], config: dict, error: Problem) -> dict[str, Tensor]:
    """Removes a module's A [R, K] and B [N, R] from the tensors; the factors of its members by key, {} without any."""
    size = (module.rows, module.columns)
    if module.experts is None:
        pair = _pop(module.name, tensors, error)
        return {} if pair is None else unfuse(module, *_checked(module.name, pair, size, config, error))
    experts, _, parameter = module.name.rpartition(".")
    pair = _pop(_wrapper(experts, parameter, tensors, config), tensors, error)
    if pair is None:
        return _factors_of_singles(module, tensors, config, error)
    a, b = pair
    if len(a) % module.experts == 0 and b.shape[1] == len(a):
        a = a.view(module.experts, -1, a.shape[-1])
        b = b.view(len(b), -1, module.experts).permute(2, 0, 1)
    return unfuse(module, *_checked(module.name, (a, b), size, config, error))


def _factors_of_singles(
    module: PeftModule, tensors: dict[str, Tensor], config: dict, error: Problem
) -> dict[str, Tensor]:
    """Factors of modules of single experts, as transformers 4 has them: `experts.3.gate_proj`.

    Experts without factors, and ranks that an expert lacks, get zeros.
    """
    found, experts = {}, module.experts or 0
    for member in module.members:
        size = (member.rows, module.columns)
        named = _pop_singles(member, experts, tensors, error)
        pairs = {i: _checked(name, pair, size, config, error) for i, (name, pair) in named.items()}
        if not pairs:
            continue
        rank, (a, b) = max(len(a) for a, _ in pairs.values()), next(iter(pairs.values()))
        whole_a, whole_b = a.new_zeros(experts, rank, module.columns), b.new_zeros(experts, member.rows, rank)
        for i, (a, b) in pairs.items():
            whole_a[i, : len(a)], whole_b[i, :, : len(a)] = a, b
        found |= {f"{member.key}.lora_A": whole_a, f"{member.key}.lora_B": whole_b}
    return found


def _pop_singles(
    member: Member, experts: int, tensors: dict[str, Tensor], error: Problem
) -> dict[int, tuple[str, Pair]]:
    """(name, factors) by expert, of the first of the names of a projection that has any factors."""
    for single in member.singles:
        names = [single.format(expert=expert) for expert in range(experts)]
        pairs = [_pop(name, tensors, error) for name in names]
        if any(pairs):
            return {i: (name, pair) for i, (name, pair) in enumerate(zip(names, pairs, strict=True)) if pair}
    return {}


def _checked(name: str, pair: Pair, size: tuple[int, int], config: dict, error: Problem) -> Pair:
    """A pair, experts in front, as factors of the adapter's common scale; `size`: rows and columns of the module.

    Raises:
        UsageError: it does not fit the module, or the config.
    """
    (a, b), (rows, columns) = pair, size
    if b.shape[-2] != rows or a.shape[-1] != columns or a.shape[-2] != b.shape[-1]:
        raise error(
            f"{name} has factors of shapes {list(a.shape)} and {list(b.shape)}; its input is {columns}, its output "
            f"{rows}"
        )
    said = stored_settings(config, name)
    if a.shape[-2] != said.rank:
        raise error(f"{name} has factors of rank {a.shape[-2]}, but {CONFIG} says {said.rank} (r, rank_pattern)")
    ratio = said.scale / stored_settings(config).scale
    return a, b if ratio == 1 else b * ratio


def _check_matrix(name: str, tensor: Tensor, error: Problem):
    if tensor.dtype not in DTYPES.values() or tensor.dim() != 2 or not tensor.numel():
        raise error(
            f"{name} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}; factors are matrices of "
            f"{', '.join(DTYPES)}"
        )
    if not tensor.isfinite().all():
        raise error(f"{name} has a NaN or an infinity")


def _pop(name: str, tensors: dict[str, Tensor], error: Problem) -> Pair | None:
    a, b = f"{name}.lora_A.weight", f"{name}.lora_B.weight"
    if a not in tensors or b not in tensors:
        return None
    for each in (a, b):
        _check_matrix(each, tensors[each], error)
    return tensors.pop(a), tensors.pop(b)


def _wrapper(experts: str, parameter: str, tensors: dict[str, Tensor], config: dict) -> str:
    """Name of the wrapper of a parameter: PEFT wraps the down projections around those of gate and up."""
    named = [name.rpartition(".")[2] for name in config.get("target_parameters") or ()]
    if parameter != "down_proj" and f"{experts}.base_layer.lora_A.weight" in tensors:
        return f"{experts}.base_layer"
    return experts if parameter == "down_proj" or "down_proj" not in named else f"{experts}.none"


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
    parameters, ranks, renamed = [], {}, MLP_TARGETS if args.num_experts else ()
    if args.model_folder is not None:
        renamed = args.model_folder.renamed_by_peft()
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
        elif name.endswith(renamed):
            # Among modules, PEFT would take these names for those of experts, as older transformers had them.
            parameters.append(f"{name}.weight")
        else:
            modules.append(name)
        tensors[f"{PREFIX}{name}.lora_A.weight"], tensors[f"{PREFIX}{name}.lora_B.weight"] = a, b
    if head is not None:
        tensors[f"{PREFIX}{HEAD}"] = head
    alphas = {name: lora.with_rank(rank).alpha for name, rank in ranks.items()}
    task = "CAUSAL_LM" if head is None else "SEQ_CLS"
    config: dict[str, Any] = {"peft_type": "LORA", "task_type": task, "base_model_name_or_path": base}
    config |= {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rslora}
    config |= {"rank_pattern": ranks, "alpha_pattern": alphas}
    config |= {"target_modules": modules, "target_parameters": parameters or None, "bias": "none", "lora_dropout": 0.0}
    config |= {"fan_in_fan_out": False, "init_lora_weights": True, "inference_mode": True}
    config["modules_to_save"] = None if head is None else ["score"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS).unlink(missing_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial = folder / f"{WEIGHTS}.partial"
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}, partial)
    partial.replace(folder / WEIGHTS)
