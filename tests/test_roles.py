"""Roles: micro-batches under a real cap, mini-batches by sequence, the same update in every split and layout."""

from datetime import timedelta

import pytest
import torch

from megarl.batch import Batch, lane_of
from megarl.data.tokenizers import build_tokenizer
from megarl.observe.timers import Timers
from megarl.roles import microbatches as mb
from tests.programs import program, rl_argv
from tests.worlds import run_world

# -- micro-batches and mini-batches ------------------------------------------------------------------------------


def test_eight_sequences_of_seven_tokens_under_a_cap_of_eight_are_eight_microbatches():
    assert [group.tolist() for group in mb.pack(torch.full((8,), 7), 8)] == [[i] for i in range(8)]


@pytest.mark.parametrize("seed", range(20))
def test_the_cap_holds_and_every_sequence_stands_once(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 13, (seed,), generator=generator)
    groups = mb.pack(lengths, 12)
    assert [i for group in groups for i in group.tolist()] == list(range(seed))
    assert all(lengths[group].sum() <= 12 for group in groups)
    for one, other in zip(groups, groups[1:], strict=False):  # none was closed early
        assert lengths[one].sum() + lengths[other[0]] > 12


def test_nothing_packs_into_nothing_and_a_whole_cap_into_one():
    assert mb.pack(torch.zeros(0, dtype=torch.int64), 8) == []
    assert [group.tolist() for group in mb.pack(torch.tensor([3, 5, 8]), 8)] == [[0, 1], [2]]


@pytest.mark.parametrize("count, size", [(12, 4), (12, 5), (12, 1), (7, 3)])
def test_minibatches_part_the_sequences(count, size):
    parts = mb.minibatch_ids(count, size, 3, 1, 0)
    assert [len(part) for part in parts] == [size] * (count // size) + [count % size] * (count % size > 0)
    assert sorted(torch.cat(parts).tolist()) == list(range(count))
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)


@pytest.mark.parametrize("size", [None, 12, 13])
def test_one_minibatch_holds_all(size):
    (part,) = mb.minibatch_ids(12, size, 3, 1, 0)
    assert part.tolist() == list(range(12))


def test_minibatches_depend_on_seed_step_and_epoch_alone():
    def drawn(*where):
        return [part.tolist() for part in mb.minibatch_ids(24, 6, *where)]

    torch.manual_seed(0)
    first = drawn(3, 1, 0)
    torch.rand(5)
    assert drawn(3, 1, 0) == first
    assert len({str(drawn(*where)) for where in [(3, 1, 0), (4, 1, 0), (3, 2, 0), (3, 1, 1)]}) == 4


def small_batch(count=5) -> Batch:
    lengths = torch.arange(2, count + 2)
    total = int(lengths.sum())
    return Batch(sequence_ids=torch.arange(count) * 3, lengths=lengths, tokens=torch.arange(total) % 16)


def test_members_are_found_by_id_not_by_place():
    assert mb.members(small_batch(), torch.tensor([6, 4, 0, 12, 13])).tolist() == [0, 2, 4]


def test_write_back_puts_values_where_their_sequences_stand():
    batch = small_batch()
    offsets = [slice(int(a), int(b)) for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)]
    whole = torch.rand(len(batch.tokens)) + 1
    pieces = [(torch.cat([whole[offsets[i]] for i in places]), torch.tensor(places)) for places in ([3, 0], [4, 1])]
    mb.write_back(batch, "values", [*pieces, (torch.ones(1), torch.zeros(0, dtype=torch.int64))])
    for i, rows in enumerate(offsets):
        assert torch.equal(batch.values[rows], whole[rows] if i != 2 else torch.zeros(4))
    assert batch.values.dtype == torch.float32


def counts(rank: int, lengths: list[list[int]]):
    import torch.distributed as dist

    mine = torch.tensor(lengths[rank], dtype=torch.int64)
    ids = torch.arange(len(mine))
    batch = Batch(sequence_ids=ids, lengths=mine, tokens=torch.zeros(int(mine.sum()), dtype=torch.int64),
                  response_mask=torch.ones(int(mine.sum()), dtype=torch.bool))  # fmt: skip
    parts = mb.microbatches(batch, ids, 8, dist.group.WORLD)
    return [(len(part.tokens), bool(part.response_mask.any()), places.tolist()) for part, places in parts]


def test_lanes_run_equally_many_microbatches_and_spare_ones_count_nowhere():
    one, other, third = run_world(counts, 3, [[7, 7, 7], [4, 4], []])
    assert one == [(7, True, [0]), (7, True, [1]), (7, True, [2])]
    assert other == [(8, True, [0, 1]), (1, False, []), (1, False, [])]
    assert third == [(1, False, [])] * 3


# -- updates -----------------------------------------------------------------------------------------------------

SEQUENCES = 12
# No division by tiny second moments: differences of rounding stay as small as they are in the gradient.
PLAIN = "--adam-eps 1 --lr 0.05 --critic-lr 0.05 --weight-decay 0 --lr-decay-style constant"


def experience(lane: int, lanes: int) -> Batch:
    """A lane's share of a step that is the same for every number of lanes; one sequence has no response."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, 7, (SEQUENCES,), generator=generator)
    responses = torch.randint(1, 5, (SEQUENCES,), generator=generator)
    responses[3] = 0
    lengths = prompts + responses
    total = int(lengths.sum())
    mask = torch.cat([torch.arange(n) >= p for n, p in zip(lengths.tolist(), prompts.tolist(), strict=True)])
    noise = {name: torch.randn(total, generator=generator) * mask for name in
             ("logprobs", "reference_logprobs", "values", "returns", "advantages", "entropy")}  # fmt: skip
    noise["logprobs"] = -2.7 + 0.1 * noise["logprobs"]
    ids = torch.arange(SEQUENCES)
    batch = Batch(
        sequence_ids=ids, lengths=lengths, prompt_lengths=prompts, prompt_ids=ids // 2, response_mask=mask,
        tokens=torch.randint(0, 16, (total,), generator=generator), finished=ids % 3 > 0, correct=ids % 2 > 0,
        scores=torch.randn(SEQUENCES, generator=generator), **noise,
    )  # fmt: skip
    return batch.select((lane_of(ids, lanes, 2) == lane).nonzero().flatten())


def role_of(name: str, parsed):
    """Actor or critic on this rank, its head drawn: at 0 it would hide what is below."""
    from megarl import world
    from megarl.roles.actor import Actor
    from megarl.roles.critic import Critic

    here = world.create(parsed.roles, timedelta(seconds=60))
    tokenizer = build_tokenizer("SentencePieceTokenizer", parsed.settings.tokenizer_model)
    if name == "actor":
        return Actor(parsed.settings, parsed.roles[name], here[name], tokenizer, Timers()), here[name]
    role = Critic(parsed.settings, parsed.roles[name], here[name], tokenizer.vocab_size, Timers())
    with torch.no_grad():
        role.learner.model.output_layer.weight.copy_(torch.linspace(-0.2, 0.3, 32))
    return role, here[name]


def updated(rank: int, parsed, name: str, bad=None):
    """(gradients of the last update, weights, metrics) of a role behind `update`."""
    role, place = role_of(name, parsed)
    batch = experience(place.lane, len(place.lanes))
    before = {n: p.detach().clone() for n, p in role.learner.model.named_parameters()}
    if bad is not None and rank == 1:
        field, value = bad
        getattr(batch, field)[batch.response_mask.nonzero()[0]] = value
    role.update({name: batch}, step=1)
    gradients = {n: p.main_grad.clone() for n, p in role.learner.model.named_parameters()}
    weights = {n: p.detach().clone() for n, p in role.learner.model.named_parameters()}
    return gradients, weights, role.metrics, all(torch.equal(before[n], weights[n]) for n in weights)


def update(folder, name: str, flags: str, size: int = 1, bad=None) -> list:
    parsed = program("rl", rl_argv(folder, f"{PLAIN} {flags}"), size)
    return run_world(updated, size, parsed, name, bad)


SPLITS = {
    "micro-batches of one": (1, "--max-tokens-per-microbatch 10"),
    "two lanes": (2, ""),
    "four lanes, micro-batches of one": (4, "--max-tokens-per-microbatch 10"),
}


@pytest.mark.parametrize("name", ["actor", "critic"])
@pytest.mark.parametrize("split", SPLITS)
def test_the_gradient_does_not_depend_on_the_split(split, name, tmp_path):
    whole = "--max-tokens-per-microbatch 1000 --minibatch-size 12 --ppo-epochs 1 --clip-grad 0"
    ((expected, weights, numbers, unchanged),) = update(tmp_path, name, whole)
    assert not unchanged
    size, flags = SPLITS[split]
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 1e-3
    for found, its_weights, its_numbers, _ in update(tmp_path, name, f"{whole} {flags}", size):
        for key, gradient in expected.items():
            assert (found[key] - gradient).abs().max() <= 1e-6 * max(largest, 1), key
            assert (its_weights[key] - weights[key]).abs().max() <= 1e-6, key
        assert its_numbers == pytest.approx(numbers, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", ["actor", "critic"])
def test_lanes_without_sequences_change_nothing(name, tmp_path):
    """Mini-batches of one sequence: on four lanes three of them always run an empty micro-batch."""
    flags = "--minibatch-size 1 --ppo-epochs 2"
    ((_, weights, numbers, unchanged),) = update(tmp_path, name, flags)
    assert not unchanged and numbers[f"{name}/updates_skipped"] == 0
    for _, its_weights, its_numbers, _ in update(tmp_path, name, flags, 4):
        assert all((its_weights[key] - weights[key]).abs().max() <= 1e-5 for key in weights)
        assert its_numbers == pytest.approx(numbers, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name, field", [("actor", "advantages"), ("critic", "returns")])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_update_that_is_not_finite_on_one_lane_is_skipped_on_all(name, field, value, tmp_path):
    flags = "--minibatch-size 12 --ppo-epochs 2"
    for _, _, numbers, unchanged in update(tmp_path, name, flags, 2, (field, value)):
        assert unchanged
        assert numbers[f"{name}/updates_skipped"] == 2
