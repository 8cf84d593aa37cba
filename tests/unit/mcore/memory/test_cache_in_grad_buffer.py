"""The rollout's KV cache in the gradient buffer: one memory, the same run bit for bit, whatever either leaves in it."""

import contextlib
from pathlib import Path

import pytest
import torch

from tests.helpers.programs import metrics, rl_argv, samples, timeless, train
from tests.helpers.tiers import long
from tests.helpers.trainable_models import DISTRIBUTED, MOE, TP2, critic_model
from tests.helpers.worlds import run_world

NAN = 255  # of every byte: NaN in all types of floating point


def check_memory(rank: int, flags: str):
    """Caches below and above the size of the largest buffer, with offload and without."""
    for offload in (False, True):
        trainable_model = critic_model(flags, offload)
        buffers = [b for w in trainable_model.wrapped for b in w.buffers + w.expert_parallel_buffers]
        with trainable_model.cache_in_grad_buffer.present():
            largest = max(buffers, key=lambda b: b.grad_data.nbytes)
            storage, size = largest.grad_data.untyped_storage(), largest.grad_data.nbytes
            small = trainable_model.cache_in_grad_buffer.memory(size - 4)
            assert small.untyped_storage()._cdata == storage._cdata and storage.nbytes() == size
            big = trainable_model.cache_in_grad_buffer.memory(2 * size)
            assert big.untyped_storage()._cdata == storage._cdata and storage.nbytes() == 2 * size
            big.fill_(NAN)
            assert all(p.main_grad.isnan().all() for p in largest.params)
            for chunk in trainable_model.wrapped:
                chunk.zero_grad_buffer()
            assert not any(b.grad_data.any() for b in buffers) and bool((big[size:] == NAN).all())
        assert storage.nbytes() == (0 if offload else 2 * size)
        with trainable_model.present_for_updates():
            assert storage.nbytes() == 2 * size and big.data_ptr() == largest.grad_data.data_ptr()


@pytest.mark.parametrize("flags", ["", f"--bf16 {MOE} {DISTRIBUTED}"])
def test_the_kv_cache_is_in_the_largest_gradient_buffer_and_grows_it(flags):
    run_world(check_memory, 1, flags)


def spoil(monkeypatch):
    """Fills the shared bytes with NaN whenever they change hands."""
    from megarl.mcore.memory.offload import KVCacheInGradBuffer

    present = KVCacheInGradBuffer.present

    @contextlib.contextmanager
    def spoiled(cache_in_grad_buffer):
        with present(cache_in_grad_buffer):
            for buffer in cache_in_grad_buffer._buffers:
                bytes_ = torch.empty(0, dtype=torch.uint8).set_(buffer.grad_data.untyped_storage())
                bytes_.fill_(NAN)
            yield
            for buffer in cache_in_grad_buffer._buffers:
                bytes_ = torch.empty(0, dtype=torch.uint8).set_(buffer.grad_data.untyped_storage())
                bytes_.fill_(NAN)

    monkeypatch.setattr(KVCacheInGradBuffer, "present", spoiled)


def watch(monkeypatch, folder: Path):
    """Records for each rank whether its cache is in the gradient buffer."""
    from megarl.mcore.inference.engine import RolloutEngine

    build = RolloutEngine._build

    def noted(engine, config, pg_collection, vocab_size, cache_in_grad_buffer, *rest):
        build(engine, config, pg_collection, vocab_size, cache_in_grad_buffer, *rest)
        held = (
            {b.grad_data.untyped_storage()._cdata for b in cache_in_grad_buffer._buffers}
            if cache_in_grad_buffer
            else set()
        )
        shared = engine.context.memory_buffer.untyped_storage()._cdata in held
        (folder / f"{torch.distributed.get_rank()}-{shared}").touch()

    monkeypatch.setattr(RolloutEngine, "_build", noted)


def run_with_shared_cache(folder: Path, monkeypatch, size: int, flags: str) -> list[str]:
    """A run whose cache is overwritten if it is in the gradient buffer; returns `rank-whether it is`, sorted."""
    notes = folder / "notes"
    notes.mkdir()
    with monkeypatch.context() as patch:
        watch(patch, notes)
        spoil(patch)
        train("rl", rl_argv(folder / "shared", flags), size)
    return sorted(path.name for path in notes.iterdir())


@pytest.mark.parametrize("size, flags", [
    (1, "--bf16 --offload"), long((2, f"{TP2} {DISTRIBUTED} --overlap-grad-reduce --rollout-prefix-caching")),
])  # fmt: skip
def test_a_run_is_the_same_with_the_cache_in_gradients(size, flags, tmp_path, monkeypatch):
    flags += " --train-iters 2 --reward tests.helpers.programs:graded_reward"
    assert run_with_shared_cache(tmp_path, monkeypatch, size, flags) == [f"{rank}-True" for rank in range(size)]
    monkeypatch.setattr("megarl.mcore.memory.offload.KVCacheInGradBuffer", lambda *_: None)
    train("rl", rl_argv(tmp_path / "own", flags), size)
    for step in (1, 2):
        rows = [timeless(metrics(tmp_path / name)[step]) for name in ("shared", "own")]
        assert rows[0] == rows[1] and rows[0]["steps_skipped"] == 0
        assert samples(tmp_path / "shared", step) == samples(tmp_path / "own", step)


def test_a_separate_rollout_has_its_own_cache_memory(tmp_path, monkeypatch):
    flags = "--role-map actor=0;critic=0;reward=0;reference=0;rollout=1 --train-iters 1"
    assert run_with_shared_cache(tmp_path, monkeypatch, 2, flags) == ["1-False"]
