"""Positions of tokens beside images, as transformers' classes compute them, and rows of a store."""

import pytest
import torch
import torch.distributed as dist

from megarl.data.images.names import image_ids
from megarl.mcore.any_model.tower import FAMILIES
from megarl.mcore.vision.store import Image, ImageStore, RequestPositions, axes_of
from tests.helpers.folders import vision_folders
from tests.helpers.folders.vision_folders import KINDS, PROMPTS
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world

SIZES = {7: (1, 2, 2), 9: (1, 2, 6), 11: (2, 4, 3)}  # by key


def rows_of(key: int) -> list[int]:
    time, height, width = SIZES[key]
    return image_ids(key, time * height * width)


def small_store(layers: int = 2) -> ImageStore:
    store = ImageStore(axes_of((2, 3, 3), False), 4, layers, torch.float32)
    for key, size in SIZES.items():
        n = len(rows_of(key))
        store.put(key, Image(size, torch.randn(n, 4), torch.randn(layers, n, 4)))
    return store


def compare_positions(rank: int, kind: str, folder: vision_folders.VisionFolder):
    model, store = vision_folders.module_of(kind), vision_folders.store_of(folder)
    for prompt, more in zip(PROMPTS, folder.greedy, strict=True):
        given = vision_folders.inputs_of(kind, prompt, folder.images, more)
        expected = torch.arange(given["input_ids"].shape[1]).expand(3, -1)
        if "image_grid_thw" in given:
            inputs = {name: given[name] for name in ("input_ids", "image_grid_thw", "mm_token_type_ids")}
            expected = model.model.get_rope_index(**inputs)[0][:, 0]
        assert torch.equal(store.positions(torch.tensor(folder.tokens(prompt) + more)), expected)


@pytest.mark.parametrize("kind", by_default([kind for kind in KINDS if FAMILIES.get(kind)], ["qwen3_vl"]))
def test_positions_are_those_of_transformers(kind):
    run_world(compare_positions, 1, kind, vision_folders.folder_of(kind))


def test_neighbours_are_two_images_and_a_sequence_may_end_within_one():
    store = small_store()
    apart = store.positions(torch.tensor([5, *rows_of(9), *rows_of(7), 6]))
    assert apart[:, 12].tolist() == [1, 2, 6]  # the last row of the first
    assert apart[:, 13:].tolist() == [[7, 7, 7, 7, 9], [7, 7, 8, 8, 9], [7, 8, 7, 8, 9]]
    assert torch.equal(store.positions(torch.tensor([5, *rows_of(9)[:4]])), apart[:, :5])
    assert small_store().positions(torch.tensor([5, *rows_of(11), 6]))[:, -1].tolist() == [5, 5, 5]


def test_packed_positions_begin_anew():
    store = small_store()
    first, second = [5, *rows_of(7), 6], [*rows_of(9), 8]
    found = store.packed_positions(torch.tensor(first + second), torch.tensor([len(first), len(second)]))
    assert torch.equal(found, torch.cat([store.positions(torch.tensor(each)) for each in (first, second)], 1))
    assert store.packed_positions(torch.tensor([5, 6, 7]), torch.tensor([3])) is None


def test_rows_are_those_of_the_ids():
    store = small_store()
    tokens = torch.tensor([3, *rows_of(9)[2:4], 4, rows_of(7)[3], 5])
    rows = store.rows(tokens)
    assert rows.at.tolist() == [1, 2, 4]
    assert torch.equal(rows.embeddings(), torch.cat([store[9].embeddings[2:4], store[7].embeddings[3:]]))
    assert torch.equal(rows.features(1), torch.cat([store[9].features[1, 2:4], store[7].features[1, 3:]]))
    assert store.rows(torch.tensor([1, 2])) is None


def test_an_image_that_is_not_there_is_an_error():
    with pytest.raises(RuntimeError, match="image 0x8 of a token stream is not in the store"):
        small_store().rows(torch.tensor(image_ids(8, 2))).embeddings()


def test_a_request_goes_on_after_its_largest_position():
    store = small_store()
    positions = RequestPositions(store)
    prompt, text = [5, *rows_of(9), 6], [1, 2, 3]
    positions.begin(2, torch.tensor(prompt))
    positions.begin(0, torch.tensor(text))
    whole = store.positions(torch.tensor([*prompt, 7, 8]))
    indices, requests = torch.arange(len(prompt) + 2), torch.full((len(prompt) + 2,), 2)
    assert torch.equal(positions.at(indices, requests), whole)
    mixed = positions.at(torch.tensor([1, 14, 3, 0]), torch.tensor([2, 2, 0, -1]))
    assert torch.equal(mixed, torch.stack([whole[:, 1], whole[:, 14], torch.tensor([3] * 3), torch.zeros(3).long()], 1))
    assert positions.at(torch.tensor([15, 3]), torch.tensor([2, 0])).tolist() == [int(whole[0, 15]), 3]
    positions.begin(2, torch.tensor(text))  # a later request with this id has no image
    assert positions.at(torch.tensor([1, 9]), torch.tensor([2, 2])).tolist() == [1, 9]


def test_a_store_has_the_precision_of_its_model():
    store = ImageStore(None, 4, 0, torch.bfloat16)
    store.put(7, Image((1, 2, 2), torch.randn(4, 4), torch.randn(0, 4, 4)))
    assert store[7].embeddings.dtype == torch.bfloat16 and store[7].bytes == 32


class Source:
    """Computes images, and remembers which."""

    def __init__(self):
        self.computed = []

    def size(self, key: int) -> tuple[int, int, int]:
        return SIZES[key]

    def compute(self, key: int) -> Image:
        self.computed.append(key)
        n = len(rows_of(key))
        return Image(SIZES[key], torch.full((n, 4), float(key)), torch.zeros(2, n, 4))


def test_an_image_is_computed_once_and_again_when_it_was_forgotten():
    source = Source()
    store = ImageStore(axes_of((2, 3, 3), False), 4, 2, torch.float32, source.size, source.compute)
    store.positions(torch.tensor([*rows_of(7), 5, *rows_of(11)]))
    assert source.computed == []  # positions need sizes alone
    tokens = torch.tensor([*rows_of(7), *rows_of(9), *rows_of(7)])
    assert store.rows(tokens).embeddings()[:, 0].tolist() == [7.0] * 4 + [9.0] * 12 + [7.0] * 4
    assert source.computed == [7, 9]
    counts = store.take_counts()
    assert counts.read == {7: (4, False), 9: (12, False)} and counts.seconds > 0
    store.rows(torch.tensor(rows_of(9))).features(0)
    assert store.take_counts().read == {9: (12, True)}
    store.use(7)
    store.trim(store[7].bytes)  # the one that was used last stays
    assert list(store) == [7]
    store.trim(0, {7})
    assert list(store) == [7]
    store.trim(0)
    assert not store
    store.rows(torch.tensor(rows_of(9))).embeddings()
    assert source.computed == [7, 9, 9]


def shared(rank: int) -> tuple[list[int], dict, bool]:
    """(keys that this rank has computed, what was read, whether all is as computed) of a store of three ranks."""
    source = Source()
    store = ImageStore(axes_of((2, 3, 3), False), 4, 2, torch.bfloat16, source.size, source.compute)
    if rank == 1:
        store.use(7)  # for another role
        store.take_counts()
    tokens = torch.tensor([*rows_of(7), 5, *rows_of(9), *rows_of(11)])
    for _ in range(2):
        store.share(tokens, dist.group.WORLD)
    store.share(torch.tensor([5]), dist.group.WORLD)
    expected = all(torch.equal(store[key].embeddings, Source().compute(key).embeddings.bfloat16()) for key in SIZES)
    return source.computed, store.take_counts().read, expected


def test_one_rank_computes_an_image_for_those_that_read_the_same_tokens():
    found = run_world(shared, 3)
    assert [computed for computed, *_ in found] == [[9], [7], [11]]
    assert found[0][1] == {7: (4, False), 9: (12, False), 11: (24, False)} and found[1][1][7] == (4, True)
    assert all(expected for *_, expected in found)
