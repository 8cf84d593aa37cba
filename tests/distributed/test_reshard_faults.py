"""Errors of a weight transfer, what its verification finds, and the checksum that it uses."""

import pytest
import torch

from tests.helpers.reshard_pair import DEEP, PP2, TP2, VP2, Pair, roles, tensors
from tests.helpers.worlds import run_world


def damage(rank):
    from megarl.mcore.weights.reshard import checksum
    from megarl.mcore.weights.reshard_plan import LocalWeights

    pair = Pair(roles("0-1", [TP2], "1-2", []))
    transfer = pair.transfer()
    transfer.run()
    sums = [checksum(LocalWeights(getattr(pair, side), place.pg_collection), pair.group)
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


FAULTS = {
    r"^output_layer.weight: the source has no": ["--reference-untie-embeddings-and-output-weights", DEEP],
    r"^output_layer.weight: the destination has no": ["--actor-untie-embeddings-and-output-weights", DEEP],
    r"mlp.linear_fc1.weight: its shape is \(4, 256, 64\) .* \(4, 192, 64\)": ["--reference-ffn-hidden-size 96", DEEP],
    r"at \(1,\): the source holds 0 of ": [f"--actor-{PP2} --actor-{VP2}", DEEP],
}


def refused(rank):
    for message, flags in FAULTS.items():
        pair = Pair(roles("0-1", [], "0-1", [], " ".join(flags)))
        if VP2 in flags[0] and rank == 1:
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
    from megarl.mcore.weights.reshard_plan import LocalWeights

    pair = Pair(roles("0", [], "0", []))
    pg_collection = pair.places["actor"].pg_collection
    with pytest.raises(
        ValueError, match="^embedding.word_embeddings.weight: this rank holds the same part of it twice"
    ):
        LocalWeights([*pair.source, *pair.source], pg_collection)

    def clone(module, state, *_):
        state.update({name: tensor.clone() for name, tensor in state.items()})

    pair.source[0].decoder.final_layernorm._register_state_dict_hook(clone)
    with pytest.raises(ValueError, match="^decoder.final_layernorm.weight: the model describes a copy"):
        LocalWeights(pair.source, pg_collection)
    return True


def test_a_state_dict_that_describes_other_memory_is_rejected():
    assert run_world(misdescribed, 1) == [True]
