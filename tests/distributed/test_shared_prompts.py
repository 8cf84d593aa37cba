"""Prompts shared by several responses are computed once: the same results to the last bit, in every layout."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist

from megarl.batch import Batch, SharedPrefix, common_prefix_lengths
from megarl.comm import microbatches as mb
from tests.helpers.models.layouts import CP2, DENSE, EP2, LAYOUTS, MOE, SP, TP2
from tests.helpers.models.tiny_models import VOCAB, build, join_actor, parse_roles
from tests.helpers.models.updates import clipped_loss
from tests.helpers.tiers import by_default, long
from tests.helpers.worlds import run_world

EXPERTS = (
    f"{MOE} --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.03"
    " --moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.5 0.3"
    " --moe-z-loss-coeff 0.1 --moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate"
)
SELECTIVE = "--recompute-granularity selective --recompute-modules moe"
# Prompts with the lengths of their responses: a single token, an empty response, one response, two to a prompt that
# came twice, a prompt longer than what follows.
GROUPS = [(1, [3, 4]), (2, [0, 5, 1]), (9, [2]), (17, [3, 20, 1, 7]), (5, [0, 0]), (16, [1, 1, 30])]


def batch_of_groups(groups=GROUPS, seed: int = 0) -> Batch:
    """Responses to the prompts one after another, with the fields that a policy update needs."""
    generator = torch.Generator().manual_seed(seed)
    rows, masks, numbers, prompt_lengths = [], [], [], []
    for number, (length, responses) in enumerate(groups):
        prompt = torch.randint(0, VOCAB, (length,), generator=generator)
        for count in responses:
            rows.append(torch.cat([prompt, torch.randint(0, VOCAB, (count,), generator=generator)]))
            masks.append(torch.arange(length + count) >= length)
            numbers.append(number)
            prompt_lengths.append(length)
    tokens = torch.cat(rows)
    return Batch(
        sequence_ids=torch.arange(len(rows)), lengths=torch.tensor([len(row) for row in rows]), tokens=tokens,
        prompt_ids=torch.tensor(numbers), prompt_lengths=torch.tensor(prompt_lengths), response_mask=torch.cat(masks),
        logprobs=-3 + 0.2 * torch.randn(len(tokens), generator=generator),
        advantages=torch.randn(len(tokens), generator=generator),
    )  # fmt: skip


def shared_of(batch: Batch) -> SharedPrefix | None:
    """Of a micro-batch of all sequences."""
    ((part, _),) = mb.build_microbatches(batch, [torch.arange(len(batch))], mb.prompt_prefixes(batch))
    return part.host_metadata.shared


# -- what is held, and where ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor_ranks", [1, 4])
def test_shared_prefixes_are_stored_once_and_restored(tensor_ranks):
    from megarl.mcore.attention.packing import pack_sequences

    batch = batch_of_groups()
    packing = pack_sequences(batch.lengths, tensor_ranks=tensor_ranks, shared=shared_of(batch))
    prompts = sum(length - 1 for length, _ in GROUPS)
    assert packing.tokens == prompts + sum(1 + count for _, counts in GROUPS for count in counts)
    assert (packing.tokens + packing.padding) % tensor_ranks == 0
    stream = batch.tokens[packing.held]
    # A token that is held where it is asked for is that token; the one before it in the stream is the one before it.
    position = torch.cat([torch.arange(n) for n in batch.lengths.tolist()])
    assert torch.equal(stream[packing.source], batch.tokens)
    assert torch.equal(packing.positions[packing.source], position)
    later = position > 0
    before = packing.source[later] - 1
    assert torch.equal(packing.positions[before], position[later] - 1)
    assert torch.equal(stream[before], batch.tokens[later.nonzero().flatten() - 1])
    assert len(set(packing.source[batch.response_mask].tolist())) == int(batch.response_mask.sum())
    assert torch.equal(stream[packing.last], batch.tokens[batch.cu_seqlens[1:] - 1])


def test_the_first_response_of_a_prompt_holds_the_shared_prefix():
    batch = batch_of_groups([(3, [1, 2]), (4, [1]), (1, [2, 2])])
    assert shared_of(batch).holders.tolist() == [0, 0, 2, 3, 3]
    assert shared_of(batch).tokens.tolist() == [0, 2, 0, 0, 0]  # a prompt's last token is each one's own
    assert shared_of(batch_of_groups([(3, [1]), (4, [1]), (1, [2, 2])])) is None
    assert mb.prompt_prefixes(Batch(lengths=torch.tensor([2]), tokens=torch.tensor([1, 1]))) is None


def test_different_prompts_with_one_id_are_not_shared():
    batch = batch_of_groups([(3, [1, 2])])
    batch.tokens[4] += 1
    with pytest.raises(RuntimeError, match="1 prompt tokens differ between sequences with the same prompt id"):
        shared_of(batch)


# -- numbers ----------------------------------------------------------------------------------------------------------


def one_rank(rank, shape: str, value_head: bool):
    """[(with sharing, without)] of what a pass gives, and of the gradients: scores of all tokens and of responses, or
    values of tokens and scores of sequences."""
    from megarl.mcore.model.forward_pass import sequence_scores, token_scores, token_values

    model, *_ = build("", shape, value_head)
    if value_head:
        torch.nn.init.normal_(model.output_layer.weight)
    found = []
    for groups in (GROUPS, [(2, [0, 1])], [(30, [2] * 6)]):
        batch = batch_of_groups(groups)
        weight = torch.randn(len(batch.tokens), generator=torch.Generator().manual_seed(1))
        for mask in (None, batch.response_mask):
            results = []
            for shared in (shared_of(batch), None):
                model.zero_grad()
                if value_head and mask is None:
                    out = (token_values(model, batch.tokens, batch.lengths, shared=shared),)
                elif value_head:
                    out = (sequence_scores(model, batch.tokens, batch.lengths, shared=shared),)
                else:
                    scores = token_scores(model, batch.tokens, batch.lengths, 0.7, VOCAB, mask=mask, shared=shared)
                    out = (scores.logprobs, scores.entropy)
                sum((part * weight[: len(part)]).sum() for part in out).backward()
                gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
                results.append(([part.detach() for part in out], gradients))
            found.append(results)
    return found


@pytest.mark.parametrize("shape, value_head", by_default(
    itertools.product(("llama", "gpt2", "latent", "recurrent", "mamba"), (False, True)),
    [("llama", True), ("latent", False), ("mamba", False)]))  # fmt: skip
def test_sharing_prefixes_changes_no_bit_of_a_forward(shape, value_head):
    for (shared, gradients), (alone, expected) in run_world(one_rank, 1, shape, value_head)[0]:
        assert all(map(torch.equal, shared, alone))
        assert gradients.keys() == expected.keys() and any(g.abs().max() > 0 for g in expected.values())
        for name, gradient in gradients.items():  # sums in another order, of many terms that cancel
            assert float((gradient - expected[name]).abs().max()) <= 2e-4 * max(1, float(expected[name].abs().max()))


def update(rank, flags: str, share: bool):
    """(log-probs [T] of the whole batch, loss, gradient norm, router metrics, expert biases) of an update over two
    micro-batches per replica; routers replay the routes of the pass before it."""
    from megarl.algorithms.aggregation import token_mean
    from megarl.mcore.model import forward_pass
    from megarl.roles.trainable_model import TrainableModel

    role = parse_roles(f"{flags} --max-tokens-per-microbatch 150", dist.get_world_size())["actor"]
    _, place = join_actor(flags)
    trainable_model, batch = TrainableModel(role, place, VOCAB, 1), batch_of_groups()
    mine = torch.arange(len(batch))[batch.prompt_ids % len(place.replicas) == place.dp_rank]
    batch = batch.select(mine)
    if not share:
        batch.prompt_ids = None
    count = place.dp_all_reduce(batch.response_mask.sum().double())

    def forward(chunk, part):
        known = part.host_metadata
        return forward_pass.token_scores(
            chunk, part.tokens, known.lengths, 0.8, VOCAB, part.routing, known.response_mask, known.shared
        )

    def loss(out, part):
        value = token_mean(clipped_loss(out, part) - 0.1 * out.entropy, part.response_mask, count)
        return value, value.detach().double()

    parts = trainable_model.microbatches(batch, torch.arange(len(batch)))
    assert any(part.host_metadata.shared is not None for part, _ in parts) == share
    mb.write_back(batch, "logprobs", [(s.logprobs, p) for s, p in trainable_model.forward_only(parts, forward)])
    written, state = batch.logprobs, trainable_model.router_state
    if role.megatron.num_experts:
        state.replayed_routes = state.record(batch, parts)
    parts = trainable_model.microbatches(batch, torch.arange(len(batch)))
    losses, applied, norm = trainable_model.update(parts, forward, loss)
    assert applied
    biases = [router.expert_bias for router in trainable_model.optimizer.routers]
    return written, float(place.dp_all_reduce(torch.stack(losses).sum())), norm, state.metrics("router", True), biases


def updates(rank, flags: str):
    """`update` with and without sharing."""
    return [update(rank, flags, share) for share in (True, False)]


@functools.cache
def alone():
    return run_world(updates, 1, DENSE)[0]


@pytest.mark.parametrize("layout", [long("one"), long("dp2"), "tp2-sp", long("pp2"), "pp2-vp2", long("cp2"),
                                    long("tp2-sp-cp2"), long("pp2-cp2-recompute"), long("sharded-dp2")])  # fmt: skip
def test_prefix_sharing_does_not_depend_on_the_layout(layout):
    size, shape, flags = LAYOUTS[layout]
    (_, one_loss, one_norm, *_), _ = alone()
    for (shared, loss, norm, *_), (whole, *expected) in run_world(updates, size, f"{shape} {flags}"):
        assert torch.equal(shared, whole)
        assert [loss, norm] == pytest.approx(expected[:2], rel=1e-5)
        assert [loss, norm] == pytest.approx([one_loss, one_norm], rel=1e-5)


@functools.cache
def experts_alone():
    return run_world(updates, 1, EXPERTS)[0]


@pytest.mark.parametrize("size, layout", [long((1, SELECTIVE)), (2, f"{TP2} {EP2} {SP}"), long((2, f"{CP2} {EP2}"))])
def test_experts_count_a_shared_prompt_for_each_response(size, layout):
    """Loads, losses of the routers and expert biases are those of every response with its own prompt."""
    one, _ = experts_alone()
    for shared, whole in run_world(updates, size, f"{EXPERTS} {layout}"):
        assert torch.equal(shared[0], whole[0])
        for expected in (whole, one):
            assert shared[1:3] == pytest.approx(expected[1:3], rel=1e-5)
            assert shared[3] == pytest.approx(expected[3], rel=1e-5)
            assert all(map(torch.equal, shared[4], expected[4])) and all(bias.any() for bias in shared[4])
        assert shared[3]["router/replayed_fraction"] == 1 and shared[3]["router/disagreement"] == 0
        assert {"router/aux_loss", "router/z_loss"} <= shared[3].keys()


def test_sequences_of_one_prompt_id_share_their_prefix():
    rows, ids = [[1, 2, 3], [5], [1, 2], [1, 2, 4, 4], [], [7, 8]], torch.tensor([0, 1, 0, 0, 2, 2])
    assert common_prefix_lengths(rows, ids).tolist() == [2, 1, 2, 2, 0, 0]
    assert common_prefix_lengths([], ids[:0]).tolist() == []


# -- micro-batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4, 40])
@pytest.mark.parametrize("seed", range(8))
def test_responses_to_a_prompt_share_a_microbatch_where_the_cap_allows(seed, count):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 6, (30,), generator=generator).sort().values
    lengths = torch.randint(4, 12, (30,), generator=generator)
    prompts, cap = mb.PromptPrefixes(ids, torch.full((30,), 3)), 40
    groups = mb.bin_pack(lengths, cap, 64, count, prompts=prompts)
    assert sorted(torch.cat(groups).tolist()) == list(range(30))
    assert all(int(lengths[group].sum()) <= cap and group.tolist() == sorted(group.tolist()) for group in groups)
    assert len(groups) >= min(count, 30)
    if count == 1:
        for number in ids.unique().tolist():
            members = (ids == number).nonzero().flatten()
            homes = [i for i, group in enumerate(groups) if torch.isin(group, members).any()]
            assert len(homes) <= -(-int(lengths[members].sum()) // (cap - int(lengths.max())))


def test_shared_prefixes_count_once_in_the_cost():
    """Four short responses to a long prompt are less work than one long text, not that of four."""
    ids, lengths = torch.tensor([0, 0, 0, 0, 1, 2, 3]), torch.tensor([1002] * 4 + [1200] * 3)
    prompts = mb.PromptPrefixes(ids, torch.tensor([1000] * 4 + [1] * 3))
    groups = mb.bin_pack(lengths, 9000, 4096, 2, prompts=prompts)
    assert sorted(group.tolist() for group in groups) == [[0, 1, 2, 3, 5], [4, 6]]
    groups = mb.bin_pack(lengths, 9000, 4096, 2, prompts=prompts._replace(shared=torch.zeros(7, dtype=torch.int64)))
    assert sorted(group.tolist() for group in groups) == [[0, 1, 2, 3], [4, 5, 6]]
