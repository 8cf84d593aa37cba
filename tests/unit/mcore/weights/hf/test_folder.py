"""A folder's files: what is refused by name, slices that make up a tensor, numbers that are none; new files."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from megarl.errors import UsageError
from megarl.mcore.weights.hf.folder import (
    CONFIG,
    INDEX,
    SINGLE,
    FolderReader,
    HFFolder,
    MappedFile,
    damaged_decays,
    make_header,
    read_header,
    size_of,
    slices_of,
)


def folder_of(path, tensors: dict[str, torch.Tensor], **index: str) -> HFFolder:
    (path / CONFIG).write_text("{}")
    save_file(tensors, path / SINGLE)
    if index:
        (path / INDEX).write_text(json.dumps({"weight_map": index}))
    return HFFolder(path)


@pytest.mark.parametrize("index, says", [
    ({"a": SINGLE, "b": "../model.safetensors"}, "names '../model.safetensors', which is no file of this folder"),
    ({"b": SINGLE}, f"puts b into {SINGLE}, which does not hold it"),
    ({"a": "other.safetensors"}, f"holds both {INDEX} and {SINGLE}"),
])  # fmt: skip
def test_an_index_that_does_not_fit_is_refused(index, says, tmp_path):
    folder = folder_of(tmp_path, {"a": torch.ones(2)}, **index)
    with pytest.raises(UsageError) as error:
        _ = folder.tensors
    assert str(error.value).startswith(f"--hf-model {tmp_path}: ") and says in str(error.value)


def test_tensors_that_the_index_does_not_name_are_unnamed(tmp_path):
    folder = folder_of(tmp_path, {"a": torch.ones(2), "b": torch.ones(3)}, a=SINGLE)
    assert [*folder.tensors] == ["a"] and folder.unnamed == {"b"} and folder.files() == [SINGLE]


def test_a_name_of_the_hub_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="nothing is downloaded: fetch it first"):
        HFFolder("Qwen/Qwen3-8B")


@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (2, 3, 4)])
@pytest.mark.parametrize("elements", [1, 6, 100])
def test_slices_make_up_a_tensor(shape, elements, tmp_path):
    whole = torch.arange(math.prod(shape)).view(shape)
    parts = [whole[index] for index in slices_of(shape, elements)]
    assert torch.cat([part.reshape(-1) for part in parts]).equal(whole.reshape(-1))
    assert all(part.numel() <= max((elements, *shape[-1:])) for part in parts)


def test_decays_that_are_not_finite_are_found_and_nothing_else(tmp_path):
    tensors = {f"l.{i}.A_log": torch.tensor([1.0, value]) for i, value in enumerate((0.0, math.nan, -math.inf))}
    folder = folder_of(tmp_path, tensors | {"l.1.weight": torch.tensor([math.nan])})
    assert damaged_decays(folder, folder.weights) == ["l.1.A_log", "l.2.A_log"]
    assert FolderReader(folder).read("l.0.A_log", (slice(1, 2),)).tolist() == [0.0]


# -- files that are written ----------------------------------------------------------------------------------------

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
