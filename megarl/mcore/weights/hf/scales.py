"""Scales of a folder's quantized tensors, read before any work starts: one that is not finite makes NaN of a block."""

from megarl.mcore.weights.hf.folder import HFFolder
from megarl.mcore.weights.hf.folder_reader import FolderReader, slices_of
from megarl.mcore.weights.hf.stored_tensors import NAN_EXPONENT, Mxfp4Tensor, StoredTensor

ELEMENTS = 2**22  # at a time


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
