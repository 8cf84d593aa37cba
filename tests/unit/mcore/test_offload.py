"""Offload: the same run bit for bit, memory that is really freed, one copy on the host; the cache in gradients."""

import contextlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.mcore.inference.engine import RolloutEngine
from megarl.mcore.offload import ALIGNMENT, Arena, KVCacheInGradBuffer, TensorLayout, lay_out
from megarl.mcore.weights import dist_checkpoint
from tests.helpers.checkpoints import save_state
from tests.helpers.models.trainable_models import DISTRIBUTED, MOE, TP2, critic_model, loss_of_values
from tests.helpers.models.updates import batch_of, forward_of, split_microbatches
from tests.helpers.programs import metrics, rl_argv, samples, timeless, train
from tests.helpers.tiers import long
from tests.helpers.worlds import on_each_rank, run_world
from tools.bench.offload import run_rounds

SMALL_MOMENTS = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95"
BIAS = "--moe-router-enable-expert-bias --moe-router-score-function sigmoid --moe-router-load-balancing-type none"


def states(trainable_model) -> list:
    """The tensors of its optimizer, parameters included."""
    found = []
    for part in trainable_model.optimizer.chained_optimizers:
        for parameter in (p for group in part.optimizer.param_groups for p in group["params"]):
            found += [parameter, *part.optimizer.state[parameter].values()]
    return found


def step(trainable_model) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Values, losses and gradient norm of an evaluation and two updates."""
    batch = batch_of(trainable_model.role_groups)
    parts = split_microbatches(batch, 2, 1)
    trainable_model.router_state.attach(batch, parts)
    values = [out for out, _ in trainable_model.forward_only(parts, forward_of(True))]
    with trainable_model.present_for_updates():
        trainable_model.router_state.attach(batch, parts)
        losses, *_ = trainable_model.update(parts, forward_of(True), loss_of_values)
        trainable_model.router_state.attach(batch, parts)
        more, applied, norm = trainable_model.update(parts, forward_of(True), loss_of_values)
    assert applied
    return torch.cat(values), torch.stack(losses + more), norm


def assert_same_steps(kept, moved):
    for found, expected in zip(step(moved), step(kept), strict=True):
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))


def assert_away(trainable_model):
    """No tensor of the model has device memory, except buffers of a few numbers."""
    gradients = [b.grad_data for w in trainable_model.wrapped for b in w.buffers + w.expert_parallel_buffers]
    assert gradients and not any(
        tensor.untyped_storage().nbytes()
        for tensor in [*trainable_model.model.parameters(), *gradients, *states(trainable_model)]
    )


def steps_with_offload(rank: int, flags: str, folder: Path):
    """Steps of a model with offload and one without; then saves, loads into a third, and continues."""
    kept, moved = critic_model(flags, False), critic_model(flags, True)
    copies = [block.host_copy.data_ptr() for kind in ("weights", "optimizer") for block in moved.offload.blocks[kind]]
    assert_away(moved)
    for _ in range(2):
        assert_same_steps(kept, moved)
        assert_away(moved)
    if rank == 0:
        folder.mkdir()
    dist.barrier()
    save_state(moved.state({"count": 1}), folder)
    other = critic_model(flags, True)
    state = other.state({}, loading=True)
    assert_away(other)
    assert other.restore(dist_checkpoint.load_role(state, folder, other.role_groups.pg_collection)) == {"count": 1}
    other.scheduler.step(kept.scheduler.num_steps)
    for found in (moved, other):
        assert_away(found)
        with found.offload.present("weights", "optimizer"):
            assert all(map(torch.equal, found.model.parameters(), kept.model.parameters()))
            assert all(map(torch.equal, found.model.buffers(), kept.model.buffers()))
            assert all(map(torch.equal, states(found), states(kept))) and any(t.any() for t in states(kept))
    assert_same_steps(kept, other)
    assert_away(other)
    assert copies == [
        block.host_copy.data_ptr() for kind in ("weights", "optimizer") for block in moved.offload.blocks[kind]
    ]
    weights = {parameter.untyped_storage().data_ptr() for parameter in kept.model.parameters()}
    other_states = [tensor for tensor in states(kept) if tensor.untyped_storage().data_ptr() not in weights]
    return sum(tensor.nbytes for tensor in [*kept.model.parameters(), *other_states]), moved.offload.bytes


@pytest.mark.parametrize("size, flags", [
    (1, MOE), long((2, f"--bf16 {DISTRIBUTED} {MOE} {BIAS}")), long((2, f"--bf16 {DISTRIBUTED} {SMALL_MOMENTS}")),
])  # fmt: skip
def test_moves_to_host_and_back_are_exact_and_free_device_memory(size, flags, tmp_path):
    for held, copies in run_world(steps_with_offload, size, flags, tmp_path / "checkpoint"):
        assert held <= copies <= 1.1 * held


@on_each_rank()
def test_nested_moves_and_failures_inside_one(rank: int):
    """Nested moves, failures, and a forward while the weights are on the host."""
    trainable_model = critic_model("", True)
    weight, offload = next(trainable_model.model.parameters()), trainable_model.offload
    with torch.no_grad(), offload.present("weights"):
        before = weight.clone()
        with offload.present("weights", changed=True):
            weight.add_(1)
        assert torch.equal(weight, before + 1)
    with offload.present("weights"):
        assert torch.equal(weight, before + 1)
    with pytest.raises(RuntimeError, match="weights are on the host"):
        forward_of(True)(
            trainable_model.model[0], split_microbatches(batch_of(trainable_model.role_groups), 1, 1)[0][0]
        )
    (block,) = offload.blocks["weights"]
    with pytest.raises(ValueError, match="the first"), offload.present("weights"):
        block.find = None  # now it cannot leave
        raise ValueError("the first")


@on_each_rank()
def test_the_host_holds_the_payload_once(rank):
    """Each of the four matrices is large enough that the system gets its memory back once it is freed."""
    run_rounds(2**20)  # touches what it needs of the libraries' pages, which a forked process has not mapped yet
    found = run_rounds(208 * 2**20)
    payload = found["payload_bytes"]
    assert 0.9 * payload < found["host_peak_bytes"] < 1.1 * payload
    assert 0.9 * payload < found["host_away_bytes"] < 1.1 * payload  # no device memory is left


@pytest.mark.parametrize("size, flags, resumes", [(1, "--bf16", True), long((2, f"{TP2} {DISTRIBUTED}", False))])
def test_a_run_is_the_same_with_offload_of_every_role(size, flags, resumes, tmp_path):
    flags += " --lr-decay-iters 3 --reward tests.helpers.programs:graded_reward"
    train("rl", rl_argv(tmp_path / "kept", f"{flags} --train-iters 2"), size)
    if resumes:
        train("rl", rl_argv(tmp_path / "moved", f"{flags} --offload --train-iters 1"), size)
        flags += f" --load {tmp_path / 'moved'}"
    train("rl", rl_argv(tmp_path / "moved", f"{flags} --offload --train-iters 2", warm_start=not resumes), size)
    kept, moved = metrics(tmp_path / "kept"), metrics(tmp_path / "moved")
    assert sorted(kept) == sorted(moved) == [1, 2]
    for number in (1, 2):
        assert timeless(moved[number]) == timeless(kept[number])
        assert samples(tmp_path / "moved", number) == samples(tmp_path / "kept", number)
        assert all(moved[number][f"memory/{role}/offloaded_bytes"] > 0 for role in ("actor", "critic"))
        assert all(moved[number][f"time/{role}/offload_s"] > 0 for role in ("actor", "critic", "reference"))
    written = sorted((tmp_path / "kept" / "checkpoints").rglob("*.distcp"))
    assert len(written) == 2 * size  # of the step and of the frozen reference
    for path in written:
        assert path.read_bytes() == (tmp_path / "moved" / path.relative_to(tmp_path / "kept")).read_bytes()


NAN = 255  # of every byte: NaN in all types of floating point


@pytest.mark.parametrize("flags", ["", f"--bf16 {MOE} {DISTRIBUTED}"])
@on_each_rank()
def test_the_kv_cache_is_in_the_largest_gradient_buffer_and_grows_it(rank, flags):
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


def spoil(monkeypatch):
    """Fills the shared bytes with NaN whenever they change hands."""
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
    build = RolloutEngine._build

    def noted(engine, config, vocab_size, options):
        build(engine, config, vocab_size, options)
        cache_in_grad_buffer = options.cache_in_grad_buffer
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
    monkeypatch.setattr("megarl.mcore.offload.KVCacheInGradBuffer", lambda *_: None)
    train("rl", rl_argv(tmp_path / "own", flags), size)
    for step in (1, 2):
        rows = [timeless(metrics(tmp_path / name)[step]) for name in ("shared", "own")]
        assert rows[0] == rows[1] and rows[0]["steps_skipped"] == 0
        assert samples(tmp_path / "shared", step) == samples(tmp_path / "own", step)


def test_a_separate_rollout_has_its_own_cache_memory(tmp_path, monkeypatch):
    flags = "--role-map actor=0;critic=0;reward=0;reference=0;rollout=1 --train-iters 1"
    assert run_with_shared_cache(tmp_path, monkeypatch, 2, flags) == ["1-False"]


# -- blocks --------------------------------------------------------------------------------------------------------


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
