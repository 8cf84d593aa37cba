"""The difficulty pools in a checkpoint."""

import io

import torch

from megarl.data.pools import DifficultyPools
from megarl.errors import UsageError
from megarl.mcore.weights.safe_reading import load_plain


def to_bytes(pools: DifficultyPools) -> bytes:
    file = io.BytesIO()
    torch.save({name: torch.from_numpy(values) for name, values in pools.state_dict().items()}, file)
    return file.getvalue()


def from_bytes(pools: DifficultyPools, data: bytes, where: str):
    """Restores the state of `to_bytes`. UsageError, which begins with `where`, for damaged or unsafe data."""
    state, names = load_plain(data, where), pools.state_dict().keys()
    tensors = {name: state.get(name) for name in names} if isinstance(state, dict) else {}
    if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise UsageError(f"{where}: holds no pools")
    pools.load_state_dict({name: tensor.numpy() for name, tensor in tensors.items()}, where)
