"""Small tensors of a folder that are read before any work starts, since one number in them that is not finite makes NaN
of many: scales of quantized tensors, and decays of recurrent states."""

from collections.abc import Iterable

from megarl.mcore.weights.hf.folder import HFFolder
from megarl.mcore.weights.hf.folder_reader import FolderReader, slices_of
from megarl.mcore.weights.hf.stored_tensors import NAN_EXPONENT, Mxfp4Tensor, StoredTensor

ELEMENTS = 2**22  # at a time
DECAYS = (".A_log", ".dt_bias")


def damaged_scales(folder: HFFolder) -> list[str]:
    """Names of scales with a NaN or an infinity. Reads all scales of the folder."""
    reader, found = FolderReader(folder), []
    for tensor in folder.weights.values():
        if not isinstance(tensor, StoredTensor):
            _, name = tensor.stored
            parts = (reader.read(name, part) for part in slices_of(folder.tensors[name].shape, ELEMENTS))
            is_exponent = isinstance(tensor, Mxfp4Tensor)
            if any((part == NAN_EXPONENT if is_exponent else ~part.float().isfinite()).any() for part in parts):
                found.append(name)
    return sorted(found)


def damaged_decays(folder: HFFolder, names: Iterable[str]) -> list[str]:
    """Those among the tensors of these names that are decays or their biases, with a NaN or an infinity. Reads them."""
    reader, found = FolderReader(folder), []
    for name in (name for name in sorted(names) if name.endswith(DECAYS)):
        parts = (reader[name][part] for part in slices_of(folder.weights[name].shape, ELEMENTS))
        if any((~part.float().isfinite()).any() for part in parts):
            found.append(name)
    return found
