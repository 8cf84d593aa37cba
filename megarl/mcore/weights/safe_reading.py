"""Reading checkpoints without running code from them: pickles may name only the types that a checkpoint needs.

A pickle can call any function that it names. torch reads a checkpoint's `.metadata`, and its planner reads stored
objects, as unrestricted pickles; the classes here replace both readers in Megatron's strategy. Files of older Megatron
versions (`common.pt`) are rejected: megarl never writes them.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from torch.distributed import checkpoint
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, filesystem, metadata
from torch.distributed.checkpoint.planner import LoadPlan

from megarl.errors import UsageError

_TYPES = (
    metadata.Metadata, metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata,
    metadata.TensorProperties, metadata.MetadataIndex, metadata.StorageMeta, metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
)  # fmt: skip
_DTYPES = {
    ("torch", str(value).removeprefix("torch.")): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_LAYOUTS = {("torch.serialization", "_get_layout"): torch.serialization._get_layout, ("torch", "Size"): torch.Size}
ALLOWED = {(kind.__module__, kind.__qualname__): kind for kind in _TYPES} | _DTYPES | _LAYOUTS


class UnsafeFile(ValueError):
    """A file of a checkpoint names code that no checkpoint needs, or cannot be read; the message names the file."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"names {module}.{name}, which no checkpoint needs")
        return ALLOWED[module, name]


class SafeReader(FileSystemReader):
    """torch's reader of checkpoints, which reads `.metadata` with an allow-list."""

    def read_metadata(self, *args, **kwargs) -> metadata.Metadata:
        """The content of `.metadata`. Raises `UnsafeFile`."""
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as file:
            data = file.read()
        try:
            found = _MetadataUnpickler(io.BytesIO(data)).load()
            if not isinstance(found, metadata.Metadata) or not isinstance(found.state_dict_metadata, dict):
                raise pickle.UnpicklingError("holds no metadata of a checkpoint")
        except Exception as error:  # a damaged pickle can raise anything
            raise UnsafeFile(f"{path}: {_line(error)}") from None
        if getattr(found, "storage_meta", None) is None:
            found.storage_meta = metadata.StorageMeta()
        return found

    def read_data(self, plan: LoadPlan, planner):
        """Reads file by file. Raises `UnsafeFile`."""
        by_file: dict[str, list] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        done = torch.futures.Future()
        done.set_result(None)
        for path, items in by_file.items():
            try:
                super().read_data(LoadPlan(items), planner)
            except (pickle.UnpicklingError, EOFError) as error:
                raise UnsafeFile(f"{self.path / path}: {_line(error)}") from None
        return done


class SafeLoadPlanner(torch_strategy.MCoreLoadPlanner):
    """Megatron's planner, which reads an object as plain data and tensors only."""

    def load_bytes(self, read_item, value: io.BytesIO):
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def load_plain(data: bytes, where: str):
    """The plain data and tensors that `torch.save` wrote. UsageError, which begins with `where`, for other data."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can raise anything
        raise UsageError(f"{where}: {_line(error)}") from None


def _load_common_state(checkpoint_dir) -> dict:
    """What Megatron stores once for all ranks."""
    if (Path(checkpoint_dir) / serialization.COMMON_STATE_FNAME).exists():
        raise UnsafeFile(f"{checkpoint_dir}: has a {serialization.COMMON_STATE_FNAME}, which megarl does not write")
    key = ShardedObject("common_state", None, (1,), (0,)).unique_key
    state: dict[str, Any] = {key: io.BytesIO()}
    planner = SafeLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    checkpoint.load(state, storage_reader=SafeReader(checkpoint_dir), planner=planner, no_dist=True)
    return state[key][0]


def _line(error: Exception) -> str:
    """The first sentence of an error; torch adds advice on how to run the code."""
    text = " ".join(str(error).split())
    advice = text.find("WeightsUnpickler error:")
    text = text[advice:].removeprefix("WeightsUnpickler error: ") if advice >= 0 else text
    return f"{type(error).__name__}: {text[:200]}"


def reason_of(failure: UnsafeFile | CheckpointException) -> UnsafeFile | None:
    """The `UnsafeFile` that is the failure, or that torch's loader wrapped in it; None if it had another reason."""
    errors = [failure] if isinstance(failure, UnsafeFile) else [error for error, _ in failure.failures.values()]
    return next((error for error in errors if isinstance(error, UnsafeFile)), None)


def install():
    """Makes Megatron read checkpoints with these classes."""
    torch_strategy.FileSystemReader = SafeReader
    torch_strategy.MCoreLoadPlanner = SafeLoadPlanner
    serialization.load_common_state_dict = _load_common_state
