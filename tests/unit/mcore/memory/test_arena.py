"""Blocks of device memory: tensors keep values and strides through moves, and only changes are copied back."""

import torch

from megarl.mcore.memory.arena import ALIGNMENT, Arena, TensorLayout, lay_out


def test_tensors_are_laid_out_one_after_another():
    tensors = [torch.zeros(3), torch.zeros(5, dtype=torch.bfloat16), torch.zeros(40, dtype=torch.float64)]
    layouts, size = lay_out(tensors)
    assert [layout.offset * tensor.itemsize for layout, tensor in zip(layouts, tensors, strict=True)] == [
        0, ALIGNMENT, 2 * ALIGNMENT,
    ]  # fmt: skip
    assert size == 2 * ALIGNMENT + 5 * 64
    wide = TensorLayout.of(torch.zeros(2, 3).t(), 4).on(torch.zeros(10).untyped_storage())
    assert wide.shape == (3, 2) and wide.stride() == (1, 3) and wide.storage_offset() == 4


def test_an_arena_moves_its_tensors_and_copies_back_what_was_changed():
    tensors = [torch.arange(6.0).view(2, 3).t(), torch.ones(5, dtype=torch.bfloat16)]
    expected = [tensor.clone() for tensor in tensors]
    arena = Arena(lambda: tensors)
    assert not arena.is_present and not arena.storage.nbytes()
    arena.arrive()
    assert tensors[0].stride() == (1, 3) and all(map(torch.equal, tensors, expected))
    tensors[0].add_(1)
    arena.is_changed = True
    arena.leave()
    assert torch.equal(arena.on_host(tensors[0]), expected[0] + 1)
    arena.arrive()
    tensors[1].add_(1)  # nobody says so
    arena.leave()
    arena.arrive()
    assert torch.equal(tensors[0], expected[0] + 1) and torch.equal(tensors[1], expected[1])


def test_replaced_tensors_join_the_block_when_it_leaves():
    tensors = [torch.zeros(4)]
    arena = Arena(lambda: tensors)
    arena.arrive()
    tensors[0].data = torch.full((4,), 3.0)
    arena.leave()
    arena.arrive()
    assert tensors[0].untyped_storage().data_ptr() == arena.storage.data_ptr() and (tensors[0] == 3).all()
