"""Low-rank factors of a rank's weights, in the order in which megarl adds them (`megarl.mcore.lora`)."""

from megarl.lora import LoRASettings
from megarl.mcore.config.model_flags import is_gated
from megarl.mcore.lora.projections import LINEARS
from megarl.mcore.weights.hf.mapping import HeadLayout
from megarl.planning.parameters import Weight, is_half

HEAD = "output_layer."  # of critics and reward models: it is trained beside the factors


def trained_and_frozen(
    weights: list[Weight], args, lora: LoRASettings | None, value_head: bool
) -> tuple[list[Weight], int]:
    """The weights of a chunk that are trained, and the bytes of all others: without factors, all and 0.

    In fp32 a layer with factors also keeps its weight without them.
    """
    if lora is None:
        return weights, 0
    trained = [w for w in weights if value_head and w.name.startswith(HEAD)]
    frozen = sum(w.elements * w.itemsize for w in weights if w not in trained)
    for weight in weights:
        if factors := _factors(weight, args, lora):
            trained += factors
            frozen += weight.elements * weight.itemsize if weight.itemsize == 4 else 0
    return trained, frozen


def factors_apart(weights: list[Weight], args, lora: LoRASettings | None) -> list[Weight]:
    """The factors that a chunk's weights do not contain, as in 16 bits."""
    return [] if lora is None or not is_half(args) else trained_and_frozen(weights, args, lora, value_head=False)[0]


def _factors(weight: Weight, args, lora: LoRASettings) -> list[Weight]:
    """A [r, K] and B [n, r] of each targeted projection of a weight; [] for a weight without."""
    names = next((names for suffix, names in LINEARS.items() if weight.name.endswith(f"{suffix}.weight")), ())
    if not names:
        return []
    columns, found = weight.elements // weight.rows, []
    for name, rows in zip(names, _rows(weight.rows, len(names), args), strict=True):
        if name in lora.targets:
            a, b = (lora.rank, lora.rank * columns), (rows, rows * lora.rank)
            kinds = {"lora_A": a, "lora_B": b}
            found += [
                weight._replace(name=f"{weight.name}.{name}.{kind}", rows=size[0], elements=size[1], is_shared=False)
                for kind, size in kinds.items()
            ]
    return found


def _rows(rows: int, projections: int, args) -> list[int]:
    """Rows of each projection of a layer."""
    if projections < 3:
        gates = 2 if projections == 2 and is_gated(args) else 1
        return [rows // gates] * projections if gates == projections else [0] * (projections - 1) + [rows]
    each = rows // (HeadLayout.of(args).queries + 2)
    return [rows - 2 * each, each, each]
