"""Files that are written tensor by tensor have the bytes of those that the library writes."""

import torch
from safetensors.torch import save_file

from megarl.mcore.weights.hf.safetensors_file import MappedFile, make_header, read_header, size_of

TENSORS = {
    "b": torch.arange(6, dtype=torch.bfloat16).view(3, 2), "a": torch.arange(5.0), "c": torch.ones(1, 4).half(),
    "empty": torch.zeros(0, 3), "one": torch.tensor(2.0),
}  # fmt: skip
KINDS = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}


def test_header_and_bytes_are_the_librarys(tmp_path):
    theirs, ours = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    save_file(TENSORS, theirs, metadata={"format": "pt"})
    header = make_header({name: (KINDS[each.dtype], tuple(each.shape)) for name, each in TENSORS.items()})
    assert header.content == read_header(theirs).content and header.file_bytes == theirs.stat().st_size
    file = MappedFile(ours, header)
    for name, tensor in TENSORS.items():
        file[name].copy_(tensor)
    file.flush()
    assert ours.read_bytes() == theirs.read_bytes()
    copy = MappedFile(tmp_path / "copy.safetensors", header)
    copy.copy_from(theirs, [*TENSORS])
    copy.flush()
    assert (tmp_path / "copy.safetensors").read_bytes() == theirs.read_bytes()


def test_sizes_of_types_of_any_width():
    assert [size_of(kind, (3, 4)) for kind in ("F4", "F8_E4M3", "BF16", "I64", "BOOL")] == [6, 12, 24, 96, 12]
