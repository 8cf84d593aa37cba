"""The choice of keys against a plain loop, the same in any batch, and attention over lists of keys."""

import pytest
import torch

from megarl.batch import SharedPrefix
from megarl.mcore.attention import chosen_keys
from megarl.mcore.attention.chosen_keys import Choice, KeyReads, choose, chosen_attention, disagreement
from megarl.mcore.attention.packing import pack_sequences
from megarl.mcore.kernels import native
from tests.helpers.models.attention_inputs import needs_kernels
from tests.helpers.models.reference_kernels import pack_bits
from tests.helpers.worlds import run_world

pytestmark = needs_kernels
HEADS, CHANNELS, COUNT = 3, 16, 8


def whole_numbers(*shape, seed: int, largest: int = 1) -> torch.Tensor:
    """Small ones, of which sums are exact and equal scores are common."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-largest, largest + 1, shape, generator=generator).float()


def by_loop(scores: list[float], count: int) -> list[int]:
    """The largest ones, of equal ones the first; by ascending positions."""
    best = sorted(range(len(scores)), key=lambda position: (-scores[position], position))
    return sorted(best[:count])


def chosen(heads, weights, keys, rows, seen, count=COUNT) -> list[list[int]]:
    bits = native.ops.choose_keys(heads, weights, keys, rows, torch.tensor(seen), count)
    return native.ops.chosen_rows(bits, rows, count).tolist()


@pytest.mark.parametrize("keys", [9, 40, 300, 701])
def test_the_largest_scores_are_chosen_and_of_equal_ones_the_first(keys):
    """Keys are rows of a wider cache in any order."""
    cache = whole_numbers(2 * keys, CHANNELS + 5, seed=1)[:, 5:]
    rows = torch.randperm(2 * keys, generator=torch.Generator().manual_seed(2))[:keys]
    seen = [COUNT + 1, keys, max(COUNT + 1, keys // 2), keys - 1 if keys > 9 else keys]
    heads, weights = whole_numbers(4, HEADS, CHANNELS, seed=3), whole_numbers(4, HEADS, seed=4, largest=2)
    products = torch.einsum("qhc,kc->qhk", heads.double(), cache[rows].double()).relu() / CHANNELS**0.5
    scores = torch.einsum("qh,qhk->qk", weights.double(), products)
    found, ties = chosen(heads, weights, cache, rows, seen), 0
    for row, limit, listed in zip(scores.tolist(), seen, found, strict=True):
        wanted = by_loop(row[:limit], COUNT)
        assert listed == rows[wanted].tolist()
        ties += sorted(row[:limit])[-COUNT] == sorted(row[:limit])[-COUNT - 1]
    assert ties or keys == 9
    for i, limit in enumerate(seen):  # alone, and with no keys after the last one
        assert chosen(heads[i : i + 1], weights[i : i + 1], cache, rows[:limit], [limit]) == [found[i]]


def test_scores_that_are_no_numbers_choose_the_same_number_of_keys():
    heads, weights = whole_numbers(2, HEADS, CHANNELS, seed=5), torch.tensor([[float("nan")] * 3, [float("inf")] * 3])
    keys = whole_numbers(20, CHANNELS, seed=6)
    for listed in chosen(heads, weights, keys, torch.arange(20), [20, 20]):
        assert len(set(listed)) == COUNT


def index_queries(tokens: int):
    heads, weights = whole_numbers(tokens, HEADS, CHANNELS, seed=7, largest=3), whole_numbers(tokens, HEADS, seed=8)
    return lambda at: heads[at], weights


def test_each_query_has_one_list_or_all_keys_and_pieces_choose_as_the_whole(monkeypatch):
    lengths = [5, 30, 8, 1, 9]
    layout = pack_sequences(torch.tensor(lengths))
    reads = KeyReads.of_stream(layout, 0, COUNT)
    few = [int(t) for _, batches in reads.dense for b in batches for t in b.queries.flatten()[b.real_queries]]
    assert sorted(few + reads.of_long.tolist()) == list(range(sum(lengths))) and len(reads.of_long) == 22 + 1
    keys, queries = whole_numbers(sum(lengths), CHANNELS, seed=9), index_queries(sum(lengths))
    whole = torch.cat([*choose(*queries, keys, reads.long, COUNT).lists()])
    position = layout.positions[reads.of_long]
    start = reads.of_long - position
    assert ((whole >= start[:, None]) & (whole <= reads.of_long[:, None])).all()
    monkeypatch.setattr(chosen_keys, "QUERIES", 7)
    pieces = choose(*queries, keys, reads.long, COUNT)
    assert len(pieces.tiles) > 3 and torch.equal(torch.cat([*pieces.lists()]), whole)
    assert sum(bits.numel() for _, bits in pieces.tiles) < whole.numel()  # bytes; a list has 8 for each number


def compared_with(scores_of, query, latents, reads, scale) -> tuple[float, int]:
    """The disagreement of the choice of the keys with the largest of `scores_of`(mean attention, tokens)."""
    choice, wanted, number = Choice([], COUNT), 0.0, 0
    uses = dict(zip(reads.compared[0].tolist(), reads.compared[2].tolist(), strict=True))
    for segment in reads.long:
        is_seen = torch.arange(len(segment.keys)) < segment.seen[:, None]
        scores = torch.einsum("maw,kw->mak", query[segment.queries].double(), latents[segment.keys].double()) * scale
        attention = scores.masked_fill(~is_seen.unsqueeze(1), -torch.inf).softmax(-1).mean(1)
        made = scores_of(attention).masked_fill(~is_seen, -torch.inf)
        is_chosen = torch.zeros_like(is_seen).scatter_(1, made.topk(COUNT).indices, True)
        choice.tiles.append((segment.keys, pack_bits(is_chosen)))
        share = (attention * is_chosen).sum(1) / attention.topk(COUNT).values.sum(1)
        for missed in (1 - share).tolist():
            wanted, number = wanted + uses.get(number, 0) * missed, number + 1
    some = query[reads.of_long[reads.compared[0]]]
    found, count = disagreement(some, latents, choice, reads.compared, scale, torch.distributed.group.WORLD).tolist()
    assert found == pytest.approx(wanted, abs=1e-5) and count == sum(uses.values())
    return found / count, int(count)


def of_choices(rank) -> list:
    """Shares that a choice of the most attended keys misses, of the least attended, and of any ones."""
    generator, found = torch.Generator().manual_seed(11), []
    for shared in (None, SharedPrefix(torch.tensor([0, 0, 2]), torch.tensor([0, 19, 0]))):
        layout = pack_sequences(torch.tensor([30, 40, 70]), shared=shared)
        reads = KeyReads.of_stream(layout, 0, COUNT)
        query, latents = (torch.randn(140, *shape, generator=generator) for shape in ((3, 26), (26,)))
        kinds = lambda x: x, torch.neg, lambda x: torch.rand(x.shape, generator=generator)
        found += [compared_with(kind, query, latents, reads, 0.7) for kind in kinds]
    return found


def test_a_wrong_choice_disagrees_with_the_attention_and_the_best_one_does_not():
    """The most attended keys; planted faults: the least attended ones, and any. A shared prefix counts for both."""
    (found,) = run_world(of_choices, 1)
    for best, worst, others in (found[:3], found[3:]):
        assert abs(best[0]) < 1e-6 and worst[0] > 0.9 > others[0] > 0.3
    assert [count for _, count in found] == 6 * [2 + 4 + 7]


def test_attention_over_lists_and_its_gradients():
    """Sizes that are no multiples of a vector; the latents are keys and values of all heads."""
    generator = torch.Generator().manual_seed(10)
    query = torch.randn(6, 3, 20 + 6, generator=generator, requires_grad=True)
    latents = torch.randn(40, 20 + 6, generator=generator, requires_grad=True)
    scores = torch.randn(6, 40, generator=generator)
    lists = scores.topk(COUNT).indices.sort().values
    packed = pack_bits(torch.zeros(6, 40, dtype=torch.bool).scatter_(1, lists, True))
    choice = Choice([(torch.arange(40), packed[:4]), (torch.arange(40), packed[4:])], COUNT)
    assert torch.equal(torch.cat([*choice.lists()]), lists)
    out = chosen_attention(query, latents, 20, choice, 0.3)
    weights = torch.einsum("qad,qkd->qak", query, latents[lists]).mul(0.3).softmax(-1)
    wanted = torch.einsum("qak,qkd->qad", weights, latents[lists][..., :20])
    assert (out - wanted).abs().max() < 1e-5
    upward = torch.randn(out.shape, generator=generator)
    for one, other in zip(*(torch.autograd.grad((x * upward).sum(), (query, latents)) for x in (out, wanted)),
                          strict=True):  # fmt: skip
        assert (one - other).abs().max() < 1e-5 * other.abs().max()
