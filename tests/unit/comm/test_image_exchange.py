"""Images go with their sequences, each once for a replica, to the bit."""

import pytest
import torch

from megarl.batch import Batch
from megarl.comm import image_exchange
from megarl.comm.exchange import PendingSends
from megarl.data.images.names import image_ids
from megarl.mcore.vision.store import Image, ImageStore
from tests.helpers.models.batches import create_mesh
from tests.helpers.worlds import run_world

SIZES = {5: (1, 2, 3), 6: (1, 4, 2), 2**46 + 3: (1, 1, 1)}
LAYOUTS = {
    "two replicas to one of two ranks": ("--role-map actor=0-1;critic=2-3;reward=2;reference=3"
                                         " --critic-tensor-model-parallel-size 2", 4),
    "one to two, on a rank of its own": ("--role-map actor=0;critic=1-2;reward=0;reference=0", 3),
    "same ranks": ("", 2),
}  # fmt: skip


def image(key: int, dtype: torch.dtype = torch.float32) -> Image:
    size, generator = SIZES[key], torch.Generator().manual_seed(key)
    rows = size[0] * size[1] * size[2]
    return Image(size, *(torch.randn(*shape, generator=generator).to(dtype) for shape in ((rows, 4), (2, rows, 4))))


def store_with(*keys: int, dtype: torch.dtype = torch.float32) -> ImageStore:
    store = ImageStore(None, 4, 2, dtype)
    for key in keys:
        store.put(key, image(key, dtype))
    return store


def is_same(store: ImageStore, key: int, dtype: torch.dtype = torch.float32) -> bool:
    expected, found = image(key, dtype), store[key]
    return found.size == expected.size and all(map(torch.equal, found[1:], expected[1:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_round_trip(dtype):
    keys = sorted(SIZES)
    buffer = image_exchange.to_bytes(store_with(*keys, dtype=dtype), keys)
    there = store_with(dtype=dtype)
    unaligned = torch.cat([torch.zeros(3, dtype=torch.uint8), buffer])[3:]
    assert image_exchange.from_bytes(there, unaligned) == keys
    assert all(is_same(there, key, dtype) for key in keys) and len(there) == 3
    assert image_exchange.from_bytes(there, image_exchange.to_bytes(there, [])) == []


def batch_of(numbers: list[int], rows: list[list[int]]) -> Batch:
    return Batch(
        sequence_ids=torch.tensor(numbers),
        lengths=torch.tensor([len(rows[i]) for i in numbers]),
        tokens=torch.tensor([t for i in numbers for t in rows[i]]),
    )


def there(rank: int, flags: str):
    """(dp rank in the critic, keys that arrived, whether all have the same bits) of each rank of the critic."""
    mesh = create_mesh(flags)
    rows = [[1, *image_ids(5, 6), 2], [3], [*image_ids(6, 8), *image_ids(5, 6)], [*image_ids(5, 6), 7]]
    actor, critic = mesh["actor"], mesh["critic"]
    dp_assignment = {
        "actor": torch.arange(4) % len(actor.replicas), "critic": torch.arange(4) // 2 % len(critic.replicas)
    }  # fmt: skip
    batch = store = None
    if actor.is_member:
        batch = batch_of([i for i in range(4) if dp_assignment["actor"][i] == actor.dp_rank], rows)
        store = store_with(*SIZES)
    elif critic.is_member:
        store = store_with()
    is_apart = set(actor.ranks).isdisjoint(critic.ranks)
    pending = PendingSends() if is_apart else None
    image_exchange.send(mesh, store, batch, "actor", "critic", dp_assignment, pending)
    if pending is not None:
        pending.wait()
    if not critic.is_member or not is_apart:
        return None
    return critic.dp_rank, sorted(store), all(is_same(store, key) for key in store)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_go_with_their_sequences(layout):
    flags, size = LAYOUTS[layout]
    found = [each for each in run_world(there, size, flags) if each is not None]
    expected = {"two replicas to one of two ranks": [(0, [5, 6], True)] * 2,
                "one to two, on a rank of its own": [(0, [5], True), (1, [5, 6], True)], "same ranks": []}  # fmt: skip
    assert found == expected[layout]
