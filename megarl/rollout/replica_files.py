"""Files of a checkpoint that each replica of the rollout writes for itself; that of the first one with the difficulty
pools."""

import io
from collections.abc import Iterator
from pathlib import Path

import torch

from megarl.data.pools import DifficultyPools
from megarl.errors import UsageError
from megarl.mcore.weights.safe_reading import load_plain

GROUP_BUFFER_FILE = "group_buffer.pt"  # groups of an incomplete batch
PARTIAL_ROLLOUTS_FILE = "partial_rollouts.pt"  # groups with unfinished responses
POOLS_FILE = "pools.pt"  # of the first replica: difficulty pools
QUEUED_FILE = "queued-{step:08d}.pt"  # the batch of a later step, generated ahead


def of_replica(name: str, dp_rank: int) -> str:
    """The name of a replica's file: `group_buffer.pt` of the first one, `group_buffer-00001.pt` of the next."""
    return name if dp_rank == 0 else f"{name.removesuffix('.pt')}-{dp_rank:05d}.pt"


def find(folder: Path, name: str) -> list[Path]:
    """Each replica's file in a checkpoint; [] if it has none. `name`: of the first one."""
    first = folder / name
    return [first, *sorted(folder.glob(f"{first.stem}-*.pt"))] if first.exists() else []


def read(files: list[Path]) -> Iterator[tuple[bytes, str]]:
    """(content, start of an error message) of each replica's file, one at a time."""
    return ((path.read_bytes(), f"--load {path}") for path in files)


def pools_to_bytes(pools: DifficultyPools) -> bytes:
    file = io.BytesIO()
    torch.save({name: torch.from_numpy(values) for name, values in pools.state_dict().items()}, file)
    return file.getvalue()


def pools_from_bytes(pools: DifficultyPools, data: bytes, where: str):
    """Restores the state of `pools_to_bytes`. UsageError, which begins with `where`, for damaged or unsafe data."""
    state, names = load_plain(data, where), pools.state_dict().keys()
    tensors = {name: state.get(name) for name in names} if isinstance(state, dict) else {}
    if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise UsageError(f"{where}: holds no pools")
    pools.load_state_dict({name: tensor.numpy() for name, tensor in tensors.items()}, where)
