"""Faults that a CUDA device would show, or hide, planted for the emulator's checks; and what is right beside them."""

import ctypes
import os

import torch
import torch.distributed as dist
from torch import Tensor

N = 1024


def run(name: str, variables: dict[str, str]):
    """Runs one of FAULTS on this rank, with a process group of all ranks if there are several."""
    os.environ.update(variables)
    has_group = int(variables["WORLD_SIZE"]) > 1
    if has_group:
        dist.init_process_group(os.environ.get("MEGARL_DEVICE_BACKEND", "nccl"))
    FAULTS[name](int(variables["RANK"]))
    if has_group:
        dist.destroy_process_group()


def _ones(*shape: int, **kwargs) -> Tensor:
    return torch.ones(shape or (N,), device="cuda", **kwargs)


def _capture(function) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph.held = function()
    return graph


def host_tensor_in_a_collective(rank: int):
    dist.all_reduce(torch.ones(N))


def host_index(rank: int):
    _ones(4, 4).index_select(0, torch.tensor([1]))


def item_in_a_capture(rank: int):
    total = _ones().sum()
    _capture(total.item)


def freed_table_in_a_graph(rank: int):
    tables = [_ones()]
    graph = _capture(lambda: tables[0] * 2)
    tables.clear()
    tables.append(_ones())  # the allocator gives it the same memory
    graph.replay()


def table_that_no_graph_holds(rank: int):
    from megarl.mcore.inference import device_decode

    device_decode._tensors = lambda _: []
    _steps_of_a_replaced_table()


def _steps_of_a_replaced_table() -> Tensor:
    """What a graph computes whose table nobody else holds any more."""
    from megarl.mcore.inference.device_decode import StepGraphs

    graphs, tables = StepGraphs(), [_ones()]
    graphs.begin([])
    for _ in range(2):
        graphs.run("step", lambda: tables[0] * 2)
    tables.clear()
    tables.append(torch.zeros(N, device="cuda"))
    return graphs.run("step", lambda: tables[0] * 2)


def missing_wait(rank: int):
    x, side = _ones(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.mul(2)


def offload_without_wait(rank: int):
    torch.cuda.Stream.wait_stream = lambda *_: None
    _offloaded(_ones()).leave()


def offload_read_early(rank: int):
    x = _ones()
    block = _offloaded(x)
    block.leave()
    torch.cuda.Stream.synchronize = lambda _: None
    for _ in range(2):  # as for a checkpoint, whose weights were on the device again to be gathered
        block.arrive()
        block.leave()
    block.on_host(x).sum()


def _offloaded(x: Tensor):
    from megarl.mcore.offload import DeviceBlock

    return DeviceBlock(x.untyped_storage(), torch.empty(x.nbytes, dtype=torch.uint8).pin_memory())


def host_update_of_gradients_on_their_way(rank: int):
    torch.cuda.Event.synchronize = lambda _: None
    _updated_by_the_host()


def host_update_of_gradients_not_computed(rank: int):
    wait, waits = torch.cuda.Stream.wait_stream, []
    torch.cuda.Stream.wait_stream = lambda *streams: waits.append(streams) if not waits else wait(*streams)
    _updated_by_the_host()


def weights_of_a_host_update_read_early(rank: int):
    wait, waits = torch.cuda.Stream.wait_stream, []
    torch.cuda.Stream.wait_stream = lambda *streams: waits.append(streams) or (wait(*streams) if len(waits) % 3 else 0)
    _updated_by_the_host(updates=1)


def _updated_by_the_host(updates: int = 2) -> Tensor:
    """Weights [32 N] of bf16 after updates of which the host computes one half: whole pages of pinned memory."""
    from megarl.mcore.training.adam import HostAdam

    weights = [_ones(16 * N, dtype=torch.bfloat16) for _ in range(2)]
    mains = [of_model.float().requires_grad_() for of_model in weights]
    moments = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.float32)
    adam = HostAdam(mains, 0.5, 0.0, (0.9, 0.99), 1e-8, moments=moments, overlaps=True, pins=True)
    adam.move_to_host({mains[0]: weights[0]})
    for _ in range(updates):
        for main in mains:
            main.grad = _ones(16 * N)
        adam.step()
    weights[1].copy_(mains[1].detach())
    return torch.cat(weights)


def missing_record_stream(rank: int):
    x, side = _ones(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    del x
    _ones()  # the allocator gives it the memory that the other stream still reads


def collective_without_wait(rank: int):
    x = _ones()
    work = dist.all_reduce(x, async_op=True)
    x.mul(2)
    work.wait()


def swapped_collectives(rank: int):
    calls = [dist.all_reduce, lambda x: dist.broadcast(x, 0)]
    for call in calls if rank == 0 else reversed(calls):
        call(_ones())


def collective_of_one_rank(rank: int):
    if rank == 0:
        dist.broadcast(_ones(), 0)  # whose root need not wait


def allocation_in_a_capture(rank: int):
    _capture(lambda: ctypes.CDLL(None).cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(N)))


def pinned_memory_reused(rank: int):
    staged = torch.zeros(N).pin_memory()
    _ones().copy_(staged, non_blocking=True)
    staged.fill_(1)
    torch.cuda.synchronize()


def pinned_memory_read_early(rank: int):
    staged = torch.zeros(2, dtype=torch.float64).pin_memory()
    staged.copy_(_ones(2), non_blocking=True)
    staged.tolist()


def seed_in_a_capture(rank: int):
    _capture(lambda: torch.cuda.manual_seed(rank + 1))


def int16_collective(rank: int):
    dist.all_reduce(_ones(dtype=torch.int16))


def strided_collective(rank: int):
    dist.all_reduce(_ones(4, 8).t())


def send_without_receiver(rank: int):
    if rank == 0:
        dist.isend(_ones(), 1)
        torch.cuda.synchronize()


def both_send_first(rank: int):
    work = dist.isend(_ones(), 1 - rank)
    dist.recv(_ones(), 1 - rank)
    work.wait()


def not_deterministic(rank: int):
    torch.use_deterministic_algorithms(True)  # as --deterministic does
    _ones().put_(torch.tensor([0, 0], device="cuda"), _ones(2))


def healthy(rank: int):
    """What the faults do, as it should be done; on two ranks."""
    x, side, peer = _ones(), torch.cuda.Stream(), 1 - rank
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x.mul(2)
    x.record_stream(side)
    torch.cuda.current_stream().wait_stream(side)
    work = dist.all_reduce(y, async_op=True)
    work.wait()
    received, (work,) = _ones(), dist.batch_isend_irecv([dist.P2POp(dist.isend, y, peer)]) if rank == 0 else (None,)
    if rank:
        dist.batch_isend_irecv([dist.P2POp(dist.irecv, received, peer)])[0].wait()
    assert (received + y).sum().item() == N * (8 if rank else 5)  # the first rank has not yet waited for its send
    host = torch.zeros(N).pin_memory()
    host.copy_(y, non_blocking=True)
    torch.cuda.synchronize()
    assert (host == 4).all()
    graph = _capture(lambda: y.add_(1))
    graph.replay()
    assert y.sum().item() == N * 6  # the emulator computes while it captures
    block = _offloaded(y)
    block.leave()
    assert block.on_host(y).sum().item() == N * 6
    block.arrive()
    assert y.sum().item() == N * 6
    assert _steps_of_a_replaced_table().sum().item() == N * 2
    from megarl.mcore.offload import host_memory

    storage = host_memory(4 * N).untyped_storage()  # the tensor is gone
    assert torch.empty(0).set_(storage, 0, (N,)).is_pinned() and not host_memory(N, is_pinned=False).is_pinned()
    assert _updated_by_the_host().sum().item() == 0  # two steps of 0.5
    dist.barrier()


def fragmented(rank: int):
    """A hole of 32 MiB, into which the next tensor does not fit."""
    size = 32 << 20
    blocks = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    del blocks[0]
    blocks.append(torch.empty(size + (2 << 20), dtype=torch.uint8, device="cuda"))


def staged(rank: int):
    """Calls of two ranks over staged gloo: what gloo has no type for, parameters, batches in both directions."""
    peer, last = 1 - rank, rank == 1
    for dtype in (torch.int16, torch.float8_e4m3fn, torch.bfloat16):
        x = torch.full((3, 2), rank + 1.0, device="cuda").to(dtype)
        received = torch.nn.Parameter(
            torch.zeros(3, 2, device="cuda", dtype=dtype), requires_grad=x.is_floating_point()
        )
        messages = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, received, peer)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        assert (received.float() == peer + 1).all()
        rows, sizes = torch.empty_like(x), [2, 1] if last else [1, 2]
        dist.all_to_all_single(rows, x, sizes, sizes)
        assert rows[:, 0].float().tolist() == ([1, 1, 2] if last else [1, 2, 2])
        dist.broadcast(x, 1)
        assert (x.float() == 2).all()
    summed, gathered = torch.empty(2, device="cuda"), torch.empty(4, device="cuda")
    with dist._coalescing_manager(device=summed.device, async_ops=True) as manager:
        dist.reduce_scatter_tensor(summed, torch.arange(4.0, device="cuda"))
    manager.wait()
    assert summed.tolist() == ([4, 6] if last else [0, 2])
    with dist._coalescing_manager(device=summed.device, async_ops=True) as manager:
        dist.all_gather_into_tensor(gathered, summed)
    manager.wait()
    assert gathered.tolist() == [0, 2, 4, 6]
    found = [None, None]
    dist.all_gather_object(found, rank)
    assert found == [0, 1]
    for wrong in (torch.ones(2), torch.ones(2, dtype=torch.int16, device="cuda")):
        try:
            dist.all_reduce(wrong)
        except (RuntimeError, TypeError):
            continue
        raise AssertionError(f"a sum of {wrong} was not refused")


def staged_in_a_capture(rank: int):
    _capture(lambda: dist.all_reduce(_ones()))


FAULTS = {
    function.__name__: function
    for function in (
        host_tensor_in_a_collective, host_index, item_in_a_capture, freed_table_in_a_graph, table_that_no_graph_holds,
        missing_wait, offload_without_wait, offload_read_early, missing_record_stream, collective_without_wait,
        host_update_of_gradients_on_their_way, host_update_of_gradients_not_computed,
        weights_of_a_host_update_read_early,
        swapped_collectives, collective_of_one_rank, allocation_in_a_capture, pinned_memory_reused,
        pinned_memory_read_early, seed_in_a_capture, int16_collective, strided_collective, send_without_receiver,
        both_send_first, not_deterministic, healthy, fragmented, staged, staged_in_a_capture,
    )
}  # fmt: skip
