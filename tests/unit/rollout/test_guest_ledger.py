"""Entries of the ledger between a run and its guests: requests, leases, and the pairs that weights go over."""

import dataclasses
import functools
import socket
import threading
import types
from datetime import timedelta

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from megarl.mcore.inference.generation import GenerationRequest
from megarl.mcore.weights.reshard_plan import GlobalTensor, LocalWeights, WeightShard, box_view
from megarl.rollout import guest_ledger
from megarl.rollout.guest_ledger import Front, front_of, is_set, move_weights, post, queued, request_of
from tests.helpers.texts.refusals import refusal
from tests.helpers.tiers import long
from tests.helpers.worlds import SAFETY_SECONDS, run_world

SERVERS: list[TCPStore] = []


def in_child(function):
    """Makes a test whose body runs in a process of its own: a store has threads, and tests fork."""

    @functools.wraps(function)
    def test():
        run_world(lambda rank: function(), 1)

    return test


def ledgers(count: int) -> list[PrefixStore]:
    """Clients of one ledger."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False) for _ in range(count)]
    SERVERS.append(server)  # they live as long as the process
    return [PrefixStore("start", client) for client in clients]


@in_child
def test_of_guests_that_want_a_request_at_the_same_time_one_has_it():
    guests, won = ledgers(4), []
    barrier = threading.Barrier(len(guests))

    def lease(number: int):
        for request in range(200):
            barrier.wait()
            if is_set(guests[number], f"lease/0/{request}", "", f"guest {number}"):
                won.append(request)

    threads = [threading.Thread(target=lease, args=(number,)) for number in range(len(guests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [*range(200)]
    holder = guests[0].get("lease/0/7").decode()
    assert not is_set(guests[1], "lease/0/7", "guest of an earlier run", "")
    assert is_set(guests[1], "lease/0/7", holder, "")
    assert is_set(guests[2], "lease/0/7", "", "another") and not is_set(guests[3], "lease/0/7", "", "late")


@in_child
def test_what_is_written_down_is_read_again():
    run, guest = ledgers(2)
    assert front_of(guest, 3) == Front() and request_of(guest, "request/0/1", None, list) is None
    request = GenerationRequest([5, 1, 2**31 - 1], -(2**63), 7, written=2, counted_tokens=3)
    post(run, "request/0/1", request)
    assert request_of(guest, "request/0/1", None, list) == request
    stops = types.SimpleNamespace(stops=(b"a", "é\n".encode()))
    post(run, "request/0/2", dataclasses.replace(request, stops=stops))
    assert request_of(guest, "request/0/2", None, list).stops == ["a", "é\n"]
    for item in (b"\0\xff", b"", b"third"):
        guest.queue_push("answers/0", item)
    assert queued(run, "answers/0") == [b"\0\xff", b"", b"third"] and queued(run, "answers/0") == []


KINDS = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)


def weights_of(tensors: list) -> LocalWeights:
    """The rows from 1 on of each tensor, as shards."""
    wholes, boxes = {}, {}
    for number, tensor in enumerate(tensors):
        key, origin = f"{number}", (0,) * tensor.dim()
        wholes[key] = GlobalTensor(tuple(tensor.shape), tensor.dtype)
        start = (min(1, tensor.shape[0]), *origin[1:]) if tensor.dim() else ()
        shape = (tensor.shape[0] - start[0], *tensor.shape[1:]) if tensor.dim() else ()
        boxes[WeightShard(key, (), start, shape)] = functools.partial(box_view, lambda tensor=tensor: tensor, origin)
    return LocalWeights(wholes, boxes)


@in_child
def test_weights_go_over_a_pair_to_the_bit():
    generator = torch.Generator().manual_seed(3)
    sizes = [(4, 3), (1,), (), (5, 2, 2), (2, 0), (3, 7)]
    sent = [torch.randint(0, 9, size, generator=generator).to(kind) for size in sizes for kind in KINDS]
    sent[0][2] = torch.tensor([float("nan"), -0.0, 1e-45])
    got = [torch.zeros_like(tensor) for tensor in sent]
    ends = ledgers(2)
    thread = threading.Thread(target=move_weights, args=(ends[1], "pair/x/0", 1, [weights_of(got)], SAFETY_SECONDS))
    thread.start()
    move_weights(ends[0], "pair/x/0", 0, [weights_of(sent)], SAFETY_SECONDS)
    thread.join()
    assert any(tensor.dim() and tensor[1:].numel() for tensor in sent)
    for one, other in zip(sent, got, strict=True):
        rows = slice(1, None) if one.dim() else ...
        assert one[rows].reshape(-1).view(torch.uint8).equal(other[rows].reshape(-1).view(torch.uint8))
        assert not one.dim() or not other[:1].any()


@in_child
def test_a_pair_without_its_other_end_is_an_error():
    (run,) = ledgers(1)
    with pytest.raises(RuntimeError):
        move_weights(run, "pair/x/0", 0, [weights_of([torch.ones(3)])], 0.2)
    run.set("alive", "")  # what is shared with the ledger goes on
    run.wait(["alive"], timedelta(seconds=1))


@pytest.mark.parametrize("address", ["host", ":29600", "host:", "host:0", "host:65536", "host:1e3", long("host:²")])
def test_what_is_no_address_is_refused(address):
    line = refusal(guest_ledger.address_of, address)
    assert line == f"--join {address}: allowed is HOST:PORT, with the --replica-port of a run"


def test_addresses():
    assert guest_ledger.address_of("node-7:29600") == ("node-7", 29600)
    assert guest_ledger.address_of("[::1]:1") == ("::1", 1)
    assert "no.such.host.invalid:1" in refusal(guest_ledger.find, "no.such.host.invalid:1", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_server(("", 0)) as other:
            taken = other.getsockname()[1]
            assert f"--replica-port {taken}: " in refusal(guest_ledger.serve, taken)
    assert guest_ledger.find(f"127.0.0.1:{port}", 0.0) is None
