"""Saving in two parts: all ranks plan together, then each rank writes its own file, at once or in a thread.

Megatron's own split, with its writer and format. Writing and finishing need no collective, so that a rank may train
while it writes.
"""

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.distributed.checkpoint.storage import WriteResult


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
