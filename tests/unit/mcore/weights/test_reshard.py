"""Weight transfers between layouts: every tensor exact on every rank, one plan, bytes counted; output layers."""

import pytest
import torch
import torch.distributed as dist

from tests.helpers.models.layouts import CP2, EP2, PP2, SP, TP2, TP4, VP2
from tests.helpers.models.reshard_pair import DEEP, Pair, roles, tensors
from tests.helpers.models.tiny_models import VOCAB
from tests.helpers.tiers import by_default, long
from tests.helpers.worlds import run_world

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-router-score-function sigmoid"
MOE = f"{DEEP} {EXPERTS}"
DENSE_FIRST = f"{MOE} --moe-layer-freq ([0]+[1]*3)"


def size_in_bytes(stages) -> int:
    return sum(tensor.nbytes for tensor in tensors(stages).values())


# -- layouts -----------------------------------------------------------------------------------------------------

LAYOUTS = {
    "dp2 tp2": (2, "llama", roles("0-1", [], "0-1", [TP2])),
    "tp2 dp2": (2, "llama", roles("0-1", [TP2], "0-1", [])),
    "tp2 dp4": (4, "gpt2", roles("0-1", [TP2], "0-3", [])),
    "tp2 elsewhere": (3, "llama", roles("0-1", [TP2], "2", [])),
    "tp2 tp2 elsewhere": (4, "llama", roles("0-1", [TP2], "2-3", [TP2])),
    "tp2 overlapping": (3, "gpt2", roles("0-1", [TP2], "1-2", [TP2])),
    "cp2 sp": (4, "llama", roles("0-3", [CP2, TP2], "1-2", [TP2, SP])),
    "pp2 tp2": (2, "gpt2", roles("0-1", [PP2], "0-1", [TP2], DEEP)),
    "tp2 pp2 tied": (2, "llama", roles("0-1", [TP2], "0-1", [PP2], DEEP)),
    "vp2 pp2": (2, "gpt2", roles("0-1", [PP2, VP2], "0-1", [PP2], DEEP)),
    "pp2 vp2 elsewhere": (4, "llama", roles("0-1", [PP2], "2-3", [PP2, VP2], DEEP)),
    "tp2 vp2 dp4": (4, "llama", roles("0-3", [TP2, PP2, VP2], "0-3", [], DEEP)),
    "ep2 ep1": (2, "llama", roles("0-1", [EP2], "0-1", [], MOE)),
    "ep1 ep2": (3, "llama", roles("0", [], "1-2", [EP2], MOE)),
    "tp2 ep2 pp2": (4, "llama", roles("0-3", [TP2, SP, EP2], "0-3", [PP2, EP2], MOE)),
    "dense first": (4, "llama", roles("0-3", [PP2, EP2], "1-2", [TP2, SP], DENSE_FIRST)),
    "tp4 dp2": (4, "llama", roles("0-3", [TP4], "0-1", [])),  # two query groups
    "tp2 tp4 of one group": (4, "llama", roles("0-1", [TP2], "0-3", [TP4, SP], "--num-query-groups 1")),
}


def move(rank, flags, shape):
    """(bytes sent, bytes held by the source, tensor-parallel bytes of the source) of a transfer that is exact."""
    pair = Pair(flags, shape)
    if not pair.is_member:
        return None
    transfer = pair.transfer()
    sent = transfer.run()
    pair.check()
    transfer.verify()
    weights = [p for chunk in pair.source or () for p in chunk.parameters()]
    split = sum(p.nbytes for p in weights if getattr(p, "tensor_model_parallel", False))
    return sent, size_in_bytes(pair.source), split


CHOSEN = ("dp2 tp2", "tp2 overlapping", "tp2 pp2 tied", "pp2 vp2 elsewhere", "ep1 ep2", "dense first")


@pytest.mark.parametrize("layout", by_default(LAYOUTS, CHOSEN))
def test_every_tensor_arrives_on_every_rank(layout):
    size, shape, flags = LAYOUTS[layout]
    results = run_world(move, size, flags, shape)
    sent, held, split = zip(*(result or (0, 0, 0) for result in results), strict=True)
    if layout == "dp2 tp2":  # each rank has all that it needs
        assert sent == (0, 0)
    if layout == "tp2 dp2":  # each lacks the other's half
        assert sent == split and min(sent) > 0
    if layout == "tp2 elsewhere":
        assert sum(sent[:2]) == held[0] + split[1] and sent[2] == 0


def spread(rank):
    pair = Pair(roles("0-1", [], "2", []))
    largest = max(tensor.nbytes for tensor in tensors(pair.source or pair.destination).values())
    return pair.transfer().run(), size_in_bytes(pair.source), largest


def test_source_replicas_share_the_sending():
    (one, whole, largest), (other, _, _), (nothing, _, _) = run_world(spread, 3)
    assert nothing == 0 and one + other == whole
    assert abs(one - other) <= 2 * largest


def sharded(rank, flags):
    """Transfers from an FSDP source that has gathered and freed its parameters once; returns the bytes sent."""
    from megarl.mcore.model.forward_pass import token_scores
    from megarl.mcore.parallel.fsdp import shard

    pair = Pair(flags)
    for chunk in pair.source or ():
        shard(chunk, pair.places["actor"].pg_collection)
        with torch.no_grad():
            token_scores(chunk, torch.arange(8), torch.tensor([5, 3]), 1.0, VOCAB)
    transfer = pair.transfer()
    transfer.run()
    transfer.verify()
    pair.check()
    return transfer.bytes_sent


@pytest.mark.parametrize(
    "size, flags", [(3, roles("0-2", [], "1-2", [TP2])), (4, roles("0-3", [TP2], "0", []))], ids=["dp3", "tp2 dp2"]
)
def test_fsdp_sources_with_unequal_shards_transfer_exactly(size, flags):
    assert sum(run_world(sharded, size, flags)) > 0


# -- one plan ----------------------------------------------------------------------------------------------------


def again(rank, bucket_bytes, large):
    """Two transfers with one plan: most bytes that a round sends or receives, messages, bytes that were packed."""
    from megarl.mcore.weights import reshard

    reshard.LARGE_BYTES = large
    pair = Pair(roles("0-1", [EP2], "1-2", [], EXPERTS))
    transfer = pair.transfer(bucket_bytes=bucket_bytes)
    rounds, original = [], dist.batch_isend_irecv

    def seen(operations):
        assert all(o.tensor.dim() == 1 and o.tensor.is_contiguous() for o in operations)
        rounds.append([[o.tensor.nbytes for o in operations if o.op is op] for op in (dist.isend, dist.irecv)])
        return original(operations)

    def no_gathering(*args, **kwargs):
        raise AssertionError("a plan is built once")

    gather, dist.batch_isend_irecv, dist.all_gather_object = dist.all_gather_object, seen, no_gathering
    first = transfer.run()
    pair.check()
    memory = {side: buffer.data_ptr() for side, buffer in transfer._staging.items()}
    for chunk in pair.source or ():
        chunk._apply(torch.clone)  # as an offload would: parameters have other memory, buffers are other tensors
    for tensor in tensors(pair.source).values():
        tensor.mul_(3).add_(0.5)
    assert transfer.run() == first == sum(map(sum, (sends for sends, _ in rounds))) / 2
    assert memory == {side: buffer.data_ptr() for side, buffer in transfer._staging.items()}
    pair.check(lambda tensor: tensor * 3 + 0.5)
    dist.all_gather_object = gather
    transfer.verify()
    packed = sum(buffer.nbytes for buffer in transfer._staging.values())
    return max(max(map(sum, turn)) for turn in rounds), sum(len(side) for turn in rounds for side in turn), packed


# A row has 256 bytes, of which 200 fit for each of two peers.
@pytest.mark.parametrize(
    "bucket_bytes, large", [long((2**20, 2**16)), long((400, 2**16)), (2**20, 128), long((400, 128))]
)
def test_a_plan_is_reused_and_bounds_its_buffers(bucket_bytes, large):
    largest, messages, packed = zip(*run_world(again, 3, bucket_bytes, large), strict=True)
    assert 300 < max(largest) <= bucket_bytes and max(packed) <= 2 * bucket_bytes
    if bucket_bytes == 2**20:  # one round: a message each way between two ranks, or one for each large box
        assert (max(messages) <= 8) == (large == 2**16)
        assert large == 2**16 or max(packed) < max(largest) / 4  # most boxes lie together in both models


def narrowed(rank):
    """A destination with two dtypes: the router's bias stays in fp32, all else is bf16."""
    pair = Pair(roles("0", [], "1", [], MOE))
    half = {}
    if pair.destination is not None:
        for parameter in pair.destination.parameters():
            parameter.data = parameter.data.bfloat16()
        half = {name: tensor.dtype for name, tensor in tensors(pair.destination).items()}
    transfer = pair.transfer()
    sent = transfer.run()
    transfer.verify()
    pair.expected = {name: tensor.to(half[name]) for name, tensor in pair.expected.items()}
    pair.check()
    return sent, size_in_bytes(pair.destination), set(half.values())


def test_the_sender_converts_to_the_destinations_dtypes():
    (sent, _, _), (nothing, held, dtypes) = run_world(narrowed, 2)
    assert (sent, nothing) == (held, 0) and dtypes == {torch.bfloat16, torch.float32}


def damage(rank):
    from megarl.mcore.weights.reshard import checksum
    from megarl.mcore.weights.reshard_plan import model_weights

    pair = Pair(roles("0-1", [TP2], "1-2", []))
    transfer = pair.transfer()
    transfer.run()
    sums = [checksum(model_weights(getattr(pair, side), place.pg_collection), pair.group)
            for side, place in zip(("source", "destination"), pair.places.values(), strict=True)]  # fmt: skip
    assert sums[0] == sums[1] and len(set(sums[0].values())) == len(sums[0])
    for ranks, message in (([1, 2], "weights differ .*: decoder.layers.mlp.linear_fc2.weight$"),
                           ([2], "replicas .* differ: decoder.layers.mlp.linear_fc2.weight$")):  # fmt: skip
        for fault in (flip, swap):
            if rank in ranks:
                fault(pair.destination[0].decoder.layers[1].mlp.linear_fc2.weight.data)
            with pytest.raises(RuntimeError, match=message):
                transfer.verify()
            transfer.run()
            transfer.verify()
    return True


def flip(weight):
    weight.view(torch.int32)[5, 3] ^= 1  # the last bit of one element


def swap(weight):
    weight[7, [1, 2]] = weight[7, [2, 1]]


def test_one_flipped_bit_and_two_swapped_elements_are_found():
    assert run_world(damage, 3) == [True] * 3


UNTIED = "--untie-embeddings-and-output-weights"
FAULTS = {  # message -> flags of source and destination
    r"^output_layer.weight: the source has no": ([], [UNTIED]),
    r"^output_layer.weight: the destination has no": ([UNTIED], []),
    r"mlp.linear_fc1.weight: its shape is \(4, 256, 64\) .* \(4, 192, 64\)": ([], ["--ffn-hidden-size 96"]),
    r"at \(1,\): the source holds 0 of ": ([PP2, VP2], []),
}


def refused(rank):
    for message, (source, destination) in FAULTS.items():
        pair = Pair(roles("0-1", source, "0-1", destination, DEEP))
        if source == [PP2, VP2] and rank == 1:
            pair.source = pair.source[1:]  # a virtual stage is missing
        with pytest.raises(ValueError, match=message):
            pair.transfer()
        assert all(tensor.isnan().all() for tensor in tensors(pair.destination).values())
    return True


def test_tensors_without_a_source_are_named_before_any_transfer():
    assert run_world(refused, 2) == [True] * 2


def test_checksum_is_the_sum_of_bits_times_odd_hashes(monkeypatch):
    from megarl.mcore.weights import reshard
    from megarl.mcore.weights.reshard_plan import WeightShard

    def scatter(n):
        n = (n + 0x9E3779B97F4A7C15) % 2**64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            signed = n - 2**64 if n >= 2**63 else n
            n = (n ^ (signed >> shift)) * factor % 2**64
        return n | 1

    monkeypatch.setattr(reshard, "ELEMENTS_AT_ONCE", 4)
    values = torch.randn(3, 2, dtype=torch.bfloat16)
    places = [[(1 * 5 + 2 + row) * 4 + 1 + column for column in range(2)] for row in range(3)]  # in a [2, 5, 4]
    bits = values.view(torch.int16).tolist()
    expected = sum(bits[i][j] * scatter(places[i][j]) for i in range(3) for j in range(2))
    total = reshard._sum_of_shard(values, WeightShard("key", (1,), (2, 1), (3, 2)), (2, 5, 4), torch.bfloat16)
    assert int(total) % 2**64 == expected % 2**64


def misdescribed(rank):
    from megarl.mcore.weights.reshard_plan import model_weights

    pair = Pair(roles("0", [], "0", []))
    pg_collection = pair.places["actor"].pg_collection
    with pytest.raises(
        ValueError, match="^embedding.word_embeddings.weight: this rank holds the same part of it twice"
    ):
        model_weights([*pair.source, *pair.source], pg_collection)

    def clone(module, state, *_):
        state.update({name: tensor.clone() for name, tensor in state.items()})

    pair.source[0].decoder.final_layernorm._register_state_dict_hook(clone)
    with pytest.raises(ValueError, match="^decoder.final_layernorm.weight: the model describes a copy"):
        model_weights(pair.source, pg_collection)
    return True


def test_a_state_dict_that_describes_other_memory_is_rejected():
    assert run_world(misdescribed, 1) == [True]


# -- the output layer alone ----------------------------------------------------------------------------------------


def moved(rank: int) -> list[list[float]]:
    """Rows 0-2 and 3-5 of [6, 2], as ranks hold them that have 4 rows each."""
    from megarl.mcore.weights.reshard import WeightTransfer, head_rows

    held = head_rows(torch.arange(12.0).view(6, 2)[3 * rank : 3 * rank + 3], 3 * rank, 6)
    rows = torch.zeros(4, 2, dtype=torch.float64)
    wanted = head_rows(rows[: max(6 - 4 * rank, 0)], 4 * rank, 6)
    WeightTransfer(held, wanted, dist.group.WORLD).run()
    return rows.tolist()


def test_each_row_arrives_once():
    first, second = run_world(moved, 2)
    assert [*first, *second] == [*torch.arange(12.0).view(6, 2).tolist(), [0, 0], [0, 0]]
