"""Which weights of the table (`mcore.model.weight_table`) each rank of a role holds, which of them are trained, and how
many parameters a model has; and whether flags that name parameters name some of them.

Low-rank factors are in the order in which megarl adds them (`mcore.lora`).
"""

import difflib
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import compress
from operator import not_
from typing import Any, NamedTuple, TypeVar

import torch

from megarl.errors import UsageError, flag_of
from megarl.mcore.config import optimizer_flags
from megarl.mcore.config.megatron_flags import parallel_sizes
from megarl.mcore.config.model_flags import is_gated
from megarl.mcore.config.optimizer_flags import ATTRIBUTES, frozen_patterns, is_frozen, layout_free
from megarl.mcore.lora.targets import LoRASettings
from megarl.mcore.model.pipeline_layout import layer_kinds, stage_layers
from megarl.mcore.model.projections import MAMBA_LINEARS, HeadLayout, linears_of
from megarl.mcore.model.weight_table import (
    EMBEDDING,
    LAYERS,
    UNSPLIT,
    Weight,
    embedding_weights,
    head_weights,
    layer_weights,
)
from megarl.mcore.recurrence import layer_sizes

NEAREST = 3  # names in the message about a pattern
KEYS = 64  # of the latest namespaces
CACHED = 8  # models: a plan asks for the weights of each of its roles several times
# Prefixes of attributes on which weights do not depend, and which a search, or a rollout, has otherwise.
NO_WEIGHTS = ("recompute", "sequence_parallel", "use_distributed_optimizer")
T = TypeVar("T")
HEAD = "output_layer."  # of critics and reward models: it is trained beside the factors
SCALAR_HEAD = ("value", "reward model")  # kinds (see `memory.stage_memory`) with one output per token


def stage_weights(args, vocab_size: int, value_head: bool) -> list[list[list[Weight]]]:
    """Weights of every pipeline stage, chunk by chunk, as each rank of the stage holds them; not to be changed."""
    return _stage_weights(ModelKey.of(args, NO_WEIGHTS), vocab_size, value_head)


@dataclass(frozen=True)
class ModelKey:
    """Megatron's namespace as a key of a cache: equal if all values are that a result depends on."""

    args: Any = field(compare=False)
    values: str

    @classmethod
    def of(cls, args, left_out: tuple[str, ...] = ("recompute",)) -> "ModelKey":
        """Made once for each of the latest namespaces, which are not changed. `left_out`: prefixes of attributes on
        which a result does not depend; weights, gradients and optimizer states do not depend on what is recomputed."""
        at = (id(args), left_out)
        if at not in _keys:  # a key holds its namespace, so that no other one gets its id
            if len(_keys) >= KEYS:
                _keys.clear()
            values = {name: each for name, each in vars(args).items() if not name.startswith(left_out)}
            _keys[at] = cls(args, repr(values))
        return _keys[at]


_keys: dict[tuple[int, tuple[str, ...]], ModelKey] = {}


@functools.lru_cache(maxsize=CACHED)
def _stage_weights(model: ModelKey, vocab_size: int, value_head: bool) -> list[list[list[Weight]]]:
    """Equal chunks are the same list."""
    args = model.args
    sizes, stages, kinds = parallel_sizes(args), stage_layers(args), layer_kinds(args)
    last = (len(stages) - 1, len(stages[-1]) - 1)
    made: dict[tuple, list[Weight]] = {}

    def chunk(layers: range, is_first: bool, is_last: bool) -> list[Weight]:
        key = (tuple(kinds[layer] for layer in layers), is_first, is_last, layers.start if args.freeze else 0)
        if key not in made:
            made[key] = _chunk(args, vocab_size, value_head, layers, is_first, is_last, sizes)
        return made[key]

    return [
        [chunk(layers, (s, c) == (0, 0), (s, c) == last) for c, layers in enumerate(chunks)]
        for s, chunks in enumerate(stages)
    ]


def of_stages(stages: list[list[list[Weight]]], compute: Callable[[list[list[Weight]], int], T]) -> list[T]:
    """`compute(chunks, stage)` of each stage, once for stages with equal chunks; only the first stage is told apart."""
    found: dict[tuple, T] = {}
    keys = [(stage == 0, *map(id, chunks)) for stage, chunks in enumerate(stages)]
    for stage, key in enumerate(keys):
        if key not in found:
            found[key] = compute(stages[stage], stage)
    return [found[key] for key in keys]


class ParameterTotals(NamedTuple):
    """Parameters of a whole model, of one token's forward, and of the rank that holds most."""

    total: int
    active: int
    largest_rank: int


def parameter_totals(args, vocab_size: int, value_head: bool) -> ParameterTotals:
    """Counts of a role's model: total = all weights; active = total − (1 − k/E) · routed experts."""
    return _parameter_totals(ModelKey.of(args, NO_WEIGHTS), vocab_size, value_head)


@functools.lru_cache(maxsize=CACHED)
def _parameter_totals(model: ModelKey, vocab_size: int, value_head: bool) -> ParameterTotals:
    args = model.args
    kinds = layer_kinds(args)
    weights = [(1, _chunk(args, vocab_size, value_head, range(0), True, True, UNSPLIT))]
    if args.model_folder is None:
        weights += [(kinds.count(kind), layer_weights(args, kind)) for kind in set(kinds)]
    total = sum(times * w.elements for times, module in weights for w in module)
    routed = sum(times * w.elements for times, module in weights for w in module if w.is_routed)
    idle = round(routed * (1 - used_experts(args)))
    stages = _stage_weights(model, vocab_size, value_head)
    ranks = of_stages(stages, lambda chunks, _: sum(w.elements for c in chunks for w in c))
    return ParameterTotals(total, total - idle, max(ranks))


def used_experts(args) -> float:
    """k/E: the share of routed experts that a token uses; 1 without experts."""
    if args.model_folder is not None:
        return next((topk / experts for experts, topk in args.model_folder.reach().experts.values()), 1.0)
    return args.moe_router_topk / args.num_experts if args.num_experts else 1.0


def _whole_model(args, vocab_size: int, value_head: bool) -> list[Weight]:
    """All weights of a role's model, as one rank would hold them."""
    return _chunk(args, vocab_size, value_head, range(args.num_layers), True, True, UNSPLIT)


def layout_free_names(args, value_head: bool) -> list[str]:
    """The names that patterns are matched with (`optimizer_flags`), each once."""
    return list(dict.fromkeys(layout_free(weight.name) for weight in _whole_model(args, 1, value_head)))


def frozen_total(args, vocab_size: int, value_head: bool) -> int:
    """Parameters of a role's model that are not trained, without low-rank factors (`optimizer_flags.is_frozen`)."""
    weights = _whole_model(args, vocab_size, value_head) if frozen_patterns(args) else []
    return sum(weight.elements for weight in weights if is_frozen(args, layout_free(weight.name)))


def _chunk(args, vocab_size: int, value_head: bool, layers: range, first: bool, last: bool, sizes) -> list[Weight]:
    if args.model_folder is not None:
        return args.model_folder.rank_weights(value_head, sizes.tensor, args.params_dtype.itemsize)
    weights = embedding_weights(args, vocab_size, value_head, sizes) if first else []
    kinds = layer_kinds(args)
    of_kind = {kind: layer_weights(args, kind, sizes) for kind in {kinds[layer] for layer in layers}}
    # Layers of a role that freezes parameters by name are numbered over the whole model.
    for number, layer in enumerate(layers, layers.start if args.freeze else 0):
        weights += [Weight(f"{LAYERS}{number}.{w.name}", *w[1:]) for w in of_kind[kinds[layer]]]
    return weights + (head_weights(args, vocab_size, value_head, first, sizes) if last else [])


def is_half(args) -> bool:
    """Whether weights are kept in 16 bits, with fp32 copies in the optimizer."""
    return args.params_dtype != torch.float32


def trained_and_frozen(
    weights: list[Weight], args, lora: LoRASettings | None, value_head: bool
) -> tuple[list[Weight], list[Weight]]:
    """The weights of a chunk that are trained, and all others: without factors, all and those that `--freeze` names.

    In fp32 a layer with factors also keeps its weight without them.
    """
    if lora is None:
        if not frozen_patterns(args):
            return weights, []
        # A later stage's copy of a tied embedding has the embedding's name.
        names = [EMBEDDING if weight.is_shared else layout_free(weight.name) for weight in weights]
        is_trained = [not is_frozen(args, name) for name in names]
        return [*compress(weights, is_trained)], [*compress(weights, map(not_, is_trained))]
    trained = [w for w in weights if value_head and w.name.startswith(HEAD)]
    frozen = [w for w in weights if w not in trained]
    frozen += [w for w in weights if w.itemsize == 4 and _factors(w, args, lora)]
    return trained + all_factors(weights, args, lora), frozen


def all_factors(weights: list[Weight], args, lora: LoRASettings | None) -> list[Weight]:
    """The factors of a chunk's weights."""
    return [] if lora is None else [factor for weight in weights for factor in _factors(weight, args, lora)]


def factors_apart(weights: list[Weight], args, lora: LoRASettings | None) -> list[Weight]:
    """The factors that a chunk's weights do not contain, as in 16 bits."""
    return all_factors(weights, args, lora) if is_half(args) else []


def _factors(weight: Weight, args, lora: LoRASettings) -> list[Weight]:
    """A [r, K] and B [n, r] of each targeted projection of a weight; [] for a weight without."""
    if args.model_folder is not None:
        name = layout_free(weight.name).removesuffix(".weight")
        names: tuple[str, ...] = ("",) if name in args.model_folder.linears(lora.targets) else ()
    else:
        linears = linears_of(args).items()
        names = next((names for suffix, names in linears if weight.name.endswith(f"{suffix}.weight")), ())
    if not names:
        return []
    columns, found = weight.elements // weight.rows, []
    for name, rows in zip(names, _rows(weight.rows, names, args), strict=True):
        if name == "" or name in lora.targets:
            for kind, shape in (("lora_A", (lora.rank, columns)), ("lora_B", (rows, lora.rank))):
                found.append(weight._replace(name=f"{weight.name}.{name}.{kind}", shape=shape, is_shared=False))
    return found


def _rows(rows: int, names: tuple[str, ...], args) -> list[int]:
    """Rows of B of each projection of a layer."""
    projections, t = len(names), args.tensor_model_parallel_size
    if projections > 3:
        return [*layer_sizes(args, t).parts.values()]
    if names in MAMBA_LINEARS.values():  # each rank has the whole B
        return [rows * t]
    if projections < 3:
        gates = 2 if projections == 2 and (is_gated(args) or "gate_proj" not in names) else 1
        return [rows // gates] * projections if gates == projections else [0] * (projections - 1) + [rows]
    heads = HeadLayout.of(args)
    if heads.ranks_of_group(t) > 1:  # each rank has the whole B
        rows = heads.groups * sum(heads.heights) * heads.channels
    each = rows // sum(heads.heights)
    return [rows - 2 * each, each, each]


# -- flags with patterns of parameter names (`mcore.config.optimizer_flags`), against the roles' models ---------------


def check_patterns(config):
    """UsageError for a pattern of a trained role without effect, and for a frozen role or pipeline stage.

    `config`: a `RunConfig`.
    """
    for role in map(config.roles.__getitem__, config.trained):
        _check(role.name, role.megatron, role.lora is not None, role.has_scalar_head)


def _check(role: str, args, has_lora: bool, value_head: bool):
    if has_lora and args.optimizer == optimizer_flags.MUON:
        raise UsageError(
            f"{role}: --optimizer {optimizer_flags.MUON}: not allowed with low-rank factors; allowed is adam or sgd"
        )
    given = [name for name in sorted(ATTRIBUTES) if getattr(args, name)]
    for flag in map(flag_of, given if has_lora else ()):
        raise UsageError(f"{role}: {flag}: not allowed with low-rank factors, beside which all weights are frozen")
    if not given:
        return
    names = layout_free_names(args, value_head)
    trained = [name for name in names if not is_frozen(args, name)]
    for attribute in given:
        texts = getattr(args, attribute)
        for number, pattern in enumerate(found := optimizer_flags.patterns_of(args, attribute)):
            flag = f"{role}: {flag_of(attribute)} {texts[number]}"
            named = [name for name in names if optimizer_flags.matches(name, [pattern])]
            if not named:
                raise UsageError(f"{flag}: names no parameter of the {role}; nearest: {_nearest(pattern, names)}")
            if attribute == optimizer_flags.FREEZE:
                continue
            if not {*named} & {*trained}:
                raise UsageError(f"{flag}: names only parameters that are not trained")
            if all(optimizer_flags.matches(name, found[number + 1 :]) for name in named):
                raise UsageError(f"{flag}: has no effect: later patterns name all of its parameters")
    if args.freeze:
        _check_stages(role, args, value_head, trained)


def _nearest(pattern: str, names: list[str]) -> str:
    """The names most like a pattern, those of layers once, with a * for the number."""
    kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
    text = re.sub(r"\.\d+\.", ".*.", pattern)
    return ", ".join(difflib.get_close_matches(text, kinds, NEAREST, cutoff=0.0))


def _check_stages(role: str, args, value_head: bool, trained: list[str]):
    """UsageError for a chunk of the model without a trained parameter; `trained`: names of the whole model's."""
    flag = f"{role}: --freeze {' '.join(args.freeze)}"
    if not trained:
        raise UsageError(f"{flag}: leaves nothing to train")
    if args.model_folder is not None:  # one chunk
        return
    for stage, chunks in enumerate(stage_weights(args, 1, value_head)):
        if not all(trained_and_frozen(weights, args, None, value_head)[0] for weights in chunks):
            raise UsageError(f"{flag}: leaves nothing to train on pipeline stage {stage}; use fewer stages")
