"""fp8 weights by the library that wrote them: names of their scales, and which numbers of a matrix share one."""

from collections.abc import Callable
from typing import Any, NamedTuple

from megarl.errors import UsageError

CONFIG_ENTRY = "quantization_config"
FP8, COMPRESSED, MODELOPT = "fp8", "compressed-tensors", "modelopt"  # values of `quant_method`
METHODS = (FP8, COMPRESSED, MODELOPT)
DEFAULT_BLOCK = (128, 128)
# Last parts of the names of scalars that scale activations or a cache: they have no part in the weights.
ACTIVATIONS = ("activation_scale", "input_scale", "output_scale", "k_scale", "v_scale")
STRATEGIES = {"tensor": (None, None), "channel": (1, None)}  # of compressed-tensors

MakeError = Callable[[str], UsageError]


class Fp8Format(NamedTuple):
    """How the fp8 weights of a folder are scaled."""

    scales: str  # after a tensor's name
    rows: int | None  # that share a scale; None: all
    columns: int | None

    @property
    def is_whole(self) -> bool:
        """Whether a matrix has one scale."""
        return self.rows is None and self.columns is None

    def block_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns that share a scale in a matrix, or in one of each expert, of this shape."""
        return self.rows or shape[-2], self.columns or shape[-1]


def as_object(entry: Any) -> dict[str, Any]:
    """`quantization_config`, which may be the name of a method alone."""
    return {"quant_method": None} | entry if isinstance(entry, dict) else {"quant_method": entry}


def format_of(entry: Any, error: MakeError) -> Fp8Format | None:
    """The format that `quantization_config` describes; None for a method without fp8.

    Raises:
        UsageError: a form of one of the methods that is not read.
    """
    values = as_object(entry)
    method = values["quant_method"]
    if method == FP8:
        block = values.get("weight_block_size", list(DEFAULT_BLOCK))
        return Fp8Format("_scale_inv", *((None, None) if block is None else _block(block, error)))
    if method == MODELOPT:
        algorithm = values.get("quant_algo")
        if algorithm != "FP8":
            raise error(f"config.json: {CONFIG_ENTRY}: quant_algo {algorithm!r} of {MODELOPT}: allowed is 'FP8'")
        return Fp8Format("_scale", None, None)
    return _compressed(values, error) if method == COMPRESSED else None


def _block(block: Any, error: MakeError) -> tuple[int, int]:
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise error(
            f"config.json: {CONFIG_ENTRY}: weight_block_size {block!r}: allowed are two whole numbers above 0, the "
            "rows and columns that have one scale, or null for one scale of a whole tensor"
        )
    return block[0], block[1]


def _compressed(values: dict[str, Any], error: MakeError) -> Fp8Format:
    """The only form of weights that all groups of layers have."""
    groups = values.get("config_groups")
    if values.get("transform_config"):
        raise error(f"config.json: {CONFIG_ENTRY}: transform_config: allowed is none: it rotates weights")
    described = list(groups.values()) if isinstance(groups, dict) else []
    weights = [group.get("weights") if isinstance(group, dict) else None for group in described]
    found = {_strategy(each, error) for each in weights}
    if len(found) != 1:
        raise error(
            f"config.json: {CONFIG_ENTRY}: config_groups {str(groups)[:200]}: allowed is one kind of weights of "
            f"{COMPRESSED}, in fp8"
        )
    return Fp8Format("_scale", *STRATEGIES[found.pop()])


def _strategy(weights: Any, error: MakeError) -> str:
    values = weights if isinstance(weights, dict) else {}
    kind = values.get("num_bits"), values.get("type"), values.get("strategy"), values.get("symmetric", True)
    if kind not in [(8, "float", strategy, True) for strategy in STRATEGIES]:  # may hold lists
        raise error(
            f"config.json: {CONFIG_ENTRY}: weights of {COMPRESSED} with num_bits {kind[0]!r}, type {kind[1]!r}, "
            f"strategy {kind[2]!r}, symmetric {kind[3]!r}: allowed are 8, 'float', "
            f"{' or '.join(map(repr, STRATEGIES))} and true; take the model's folder in 16 bits"
        )
    return kind[2]
