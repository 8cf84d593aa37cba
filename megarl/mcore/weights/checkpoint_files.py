"""Files of Megatron's distributed checkpoints: written in two parts, and read without running code from them.

All ranks plan a save together, then each rank writes its own file, at once or in a thread: Megatron's own split, with
its writer and format. Writing and finishing need no collective, so that a rank may train while it writes.

A pickle can call any function that it names. torch reads a checkpoint's `.metadata`, and its planner reads stored
objects, as unrestricted pickles; here pickles may name only the types that a checkpoint needs. The classes replace both
readers in Megatron's strategy. Files of older Megatron versions (`common.pt`) are rejected: megarl never writes them.
"""

import contextlib
import hashlib
import io
import os
import pickle
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed import checkpoint
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, filesystem, metadata
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.storage import WriteResult

from megarl.errors import UsageError


class PlannedSave:
    """This rank's share of a checkpoint."""

    def __init__(self, strategy: TorchDistSaveShardedStrategy, writer, metadata):
        self.finalize_fns: list = []  # Megatron adds its own here, which are collectives: `finish` replaces them
        self._strategy, self._writer = strategy, writer
        self._metadata = metadata
        writer.storage_meta = lambda: None  # a random number and this folder's name: equal saves have equal bytes
        if metadata is not None:
            metadata.all_local_plans = None  # for a cache that is not used

    def snapshot(self, state: dict):
        """Copies this rank's tensors to host memory, so that training may change them before `write`. `state`: that was
        planned; other tensors are copies already."""
        held = (getattr(value, "data", None) for value in nested_values(state))
        self._to_host({data.untyped_storage().data_ptr() for data in held if isinstance(data, torch.Tensor)})

    def _to_host(self, live: set[int]):
        buckets = []
        for path, name, (objects, tensors) in self._writer.write_buckets:
            copied = []
            for item, tensor in tensors:
                is_live = tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in live
                copied.append((item, tensor.clone() if is_live else tensor.to("cpu")))
            buckets.append((path, name, (objects, copied)))
        self._writer.write_buckets = buckets

    def write(self) -> tuple[list[WriteResult], dict[str, dict]]:
        """Writes this rank's files and flushes them to the disk. May run in a thread. Returns what `finish` needs, and
        {file: {"size": …, "sha256": …}}."""
        self._to_host(set())
        results, sealed = [], {}
        for path, name, (objects, tensors) in self._writer.write_buckets:
            with _HashedFile(path) as file:
                for item, data in (*objects, *tensors):
                    kind = SerializationFormat.TORCH_SAVE
                    results.append(_write_item(self._writer.transforms, cast(Any, file), data, item, name, kind))
            sealed[name] = {"size": file.size, "sha256": file.digest.hexdigest()}
        return results, sealed

    def finish(self, results: list[list[WriteResult]]):
        """Writes the metadata, on rank 0; `results` are those of all ranks."""
        self._writer.finish(self._metadata, results)
        config = CheckpointingConfig(self._strategy.backend, self._strategy.version)
        save_config(config, str(self._writer.checkpoint_dir))


class _HashedFile:
    """A file that is hashed while it is written; leaving the context flushes it to the disk.

    An error of a write is raised at the end: torch.save ends the process if its file raises.
    """

    def __init__(self, path):
        self._path, self._file = path, open(path, "wb")
        self._error = None
        self.size, self.digest = 0, hashlib.sha256()

    def write(self, data) -> int:
        """Appends bytes; after an error it only counts them."""
        count = memoryview(data).nbytes
        try:
            if self._error is None:
                self._file.write(data)
        except OSError as error:
            self._error = error
        self.digest.update(data)
        self.size += count
        return count

    def tell(self) -> int:
        return self.size

    def flush(self):
        """Does nothing: the file is flushed at the end."""

    def __enter__(self) -> "_HashedFile":
        return self

    def __exit__(self, *_):
        try:
            if self._error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            with contextlib.suppress(OSError):  # what an error has left in the buffer
                self._file.close()
        if self._error is not None:
            raise OSError(self._error.errno, self._error.strerror, str(self._path))


class _Strategy(TorchDistSaveShardedStrategy):
    def _get_save_and_finalize_callbacks(self, writer, save_state_dict_ret, async_strategy) -> PlannedSave:
        _, metadata, _ = save_state_dict_ret
        return PlannedSave(self, writer, metadata)


def plan_save(state: dict, folder: Path) -> PlannedSave:
    """Plans a save to a folder, which must exist and be empty; a collective of the whole world."""
    # Megatron would start a process for this queue, which `PlannedSave.write` does not use.
    filesystem_async._results_queue = filesystem_async._results_queue or os.devnull
    with torch.no_grad():
        return dist_checkpointing.save(state, str(folder), _Strategy(), async_sharded_save=True, async_strategy="mcore")


# -- reading -------------------------------------------------------------------------------------------------------

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
