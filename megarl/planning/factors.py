"""Low-rank factors of a rank's weights, in the order in which megarl adds them (`megarl.mcore.lora`)."""

from itertools import compress
from operator import not_

from megarl.mcore.config.model_flags import is_gated
from megarl.mcore.config.optimizer_flags import is_frozen, layout_free
from megarl.mcore.lora.targets import LoRASettings
from megarl.mcore.model.projections import MAMBA_LINEARS, HeadLayout, linears_of
from megarl.mcore.recurrence.rule import layer_sizes
from megarl.planning.parameters import Weight, is_half

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer."  # of critics and reward models: it is trained beside the factors


def trained_and_frozen(
    weights: list[Weight], args, lora: LoRASettings | None, value_head: bool
) -> tuple[list[Weight], list[Weight]]:
    """The weights of a chunk that are trained, and all others: without factors, all and those that `--freeze` names.

    In fp32 a layer with factors also keeps its weight without them.
    """
    if lora is None:
        if not args.freeze:
            return weights, []
        is_trained = [not is_frozen(args, _layout_free(weight)) for weight in weights]
        return [*compress(weights, is_trained)], [*compress(weights, map(not_, is_trained))]
    trained = [w for w in weights if value_head and w.name.startswith(HEAD)]
    frozen = [w for w in weights if w not in trained]
    frozen += [w for w in weights if w.itemsize == 4 and _factors(w, args, lora)]
    return trained + all_factors(weights, args, lora), frozen


def _layout_free(weight: Weight) -> str:
    """The name that patterns are matched with; a later stage's copy of a tied embedding has the embedding's."""
    return EMBEDDING if weight.is_shared else layout_free(weight.name)


def all_factors(weights: list[Weight], args, lora: LoRASettings | None) -> list[Weight]:
    """The factors of a chunk's weights."""
    return [] if lora is None else [factor for weight in weights for factor in _factors(weight, args, lora)]


def factors_apart(weights: list[Weight], args, lora: LoRASettings | None) -> list[Weight]:
    """The factors that a chunk's weights do not contain, as in 16 bits."""
    return all_factors(weights, args, lora) if is_half(args) else []


def _factors(weight: Weight, args, lora: LoRASettings) -> list[Weight]:
    """A [r, K] and B [n, r] of each targeted projection of a weight; [] for a weight without."""
    names = next((names for suffix, names in linears_of(args).items() if weight.name.endswith(f"{suffix}.weight")), ())
    if not names:
        return []
    columns, found = weight.elements // weight.rows, []
    for name, rows in zip(names, _rows(weight.rows, names, args), strict=True):
        if name in lora.targets:
            a, b = (lora.rank, lora.rank * columns), (rows, rows * lora.rank)
            kinds = {"lora_A": a, "lora_B": b}
            found += [
                weight._replace(name=f"{weight.name}.{name}.{kind}", rows=size[0], elements=size[1], is_shared=False)
                for kind, size in kinds.items()
            ]
    return found


def _rows(rows: int, names: tuple[str, ...], args) -> list[int]:
    """Rows of B of each projection of a layer."""
    projections, t = len(names), args.tensor_model_parallel_size
    if projections > 3:
        return [*layer_sizes(args, t).parts.values()]
    if names in MAMBA_LINEARS.values():  # each rank has the whole B
        return [rows * t]
    if projections < 3:
        gates = 2 if projections == 2 and is_gated(args) else 1
        return [rows // gates] * projections if gates == projections else [0] * (projections - 1) + [rows]
    heads = HeadLayout.of(args)
    if heads.ranks_of_group(t) > 1:  # each rank has the whole B
        rows = heads.groups * sum(heads.heights) * heads.channels
    each = rows // sum(heads.heights)
    return [rows - 2 * each, each, each]
