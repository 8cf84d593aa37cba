"""Carried groups: each replica holds and saves its own, every rank knows of all, and any layout can load them."""

import torch

from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.mcore.inference.generation import GenerationRequest
from megarl.rollout import waiting_groups
from megarl.rollout.episodes.episode import Episode, EpisodeLimits
from megarl.rollout.response_log import Record
from tests.helpers.models.tiny_models import parse_roles
from tests.helpers.worlds import SAFETY, run_world

GROUPS, SAMPLES = 5, 2
SETTINGS = {"samples_per_prompt": SAMPLES, "partial_rollouts": True, "max_staleness": 1}


def responses(groups: list[int], version: int = 0) -> Batch:
    """Prompts of 1 to 3 tokens with responses of 0 to 4 tokens of this version, the same in every layout."""
    ids = torch.tensor([group * SAMPLES + i for group in groups for i in range(SAMPLES)])
    prompts, lengths = ids // SAMPLES % 3 + 1, ids // SAMPLES % 3 + 1 + ids % 5
    mask = [i >= p for p, n in zip(prompts.tolist(), lengths.tolist(), strict=True) for i in range(n)]
    tokens = [10 * i + j for i, n in zip(ids.tolist(), lengths.tolist(), strict=True) for j in range(n)]
    return Batch(
        sequence_ids=ids, prompt_ids=ids // SAMPLES, prompt_lengths=prompts, finished=ids % 4 == 3, lengths=lengths,
        tokens=torch.tensor(tokens), rollout_logprobs=-torch.tensor(tokens) / 7, response_mask=torch.tensor(mask),
        versions=torch.full((len(tokens),), version, dtype=torch.int32),
    )  # fmt: skip


def buffer_of(episodes=None):
    """An empty buffer of this rank's replica."""
    from megarl.comm import role_mesh
    from megarl.rollout.partial_rollouts import PartialRolloutBuffer

    mesh = role_mesh.create_mesh(parse_roles("", torch.distributed.get_world_size(), program="rl"), SAFETY)
    return PartialRolloutBuffer(mesh["rollout"], Settings(**SETTINGS), episodes)


def keep(buffer, lines: range, taken: list[int], longest: int, version: int = 0):
    """A round of groups with these lines, which go to the replicas in turn; all but `taken` are kept."""
    from megarl.rollout.requests import PromptRequest

    place = buffer.role_groups
    batch = responses([*lines[place.dp_rank :: len(place.replicas)]], version)
    batch.sequence_ids = batch.sequence_ids - lines[0] * SAMPLES
    requests = [PromptRequest(line, (), SAMPLES, 9, 7, line // 4) for line in lines]
    buffer.keep_unfinished(batch, requests, torch.tensor(taken, dtype=int), longest)


def state_of(buffer) -> tuple:
    """(its record as it is on disk, the record, lines that this rank holds)."""
    record = buffer.to_record()
    on_disk = waiting_groups.packed(waiting_groups.UNFINISHED, record)
    return on_disk, record, sorted(set(buffer.rows.prompt_ids.tolist()))


def carried(rank: int) -> tuple:
    """(`state_of`, requests of the next round) after one round."""
    buffer = buffer_of()
    keep(buffer, range(GROUPS), [1], 3)
    return state_of(buffer), buffer.pop_oldest(2, 1)


def resumed(rank: int, records: list[Record]) -> tuple:
    """`state_of` groups that were loaded from the records of several replicas."""
    buffer = buffer_of()
    buffer.load(records)
    return state_of(buffer)


def test_each_replica_holds_the_groups_that_it_began():
    (((data, record, held), popped),) = run_world(carried, 1)
    assert held == [0, 2, 3, 4] and [request.line for request in popped] == [0, 2]
    assert popped[0].lengths == (0, 1) and popped[0].step == 7 and popped[0].dp_rank == 0
    assert popped[0].tokens == [0] and [each.tokens for each in popped[0].responses] == [[], [11]]
    assert None not in popped[1].lengths  # the second was cut to 3 tokens
    assert popped[0].remaining == [9, 8]
    two = run_world(carried, 2)
    assert [lines for (*_, lines), _ in two] == [[0, 2, 4], [3]]
    files = [found for (_, found, _), _ in two]
    dealt = run_world(resumed, 2, files)
    assert [lines for *_, lines in dealt] == [[0, 3], [2, 4]]  # groups 0, 2, 3, 4 in turn
    for records in (files, [record], [found for _, found, _ in dealt]):
        ((found, _, lines),) = run_world(resumed, 1, records)
        assert (found, lines) == (data, held)
    (_, mine), (_, other) = two
    assert mine == popped
    for whole, known in zip(popped, other, strict=True):
        assert known.tokens == known.responses == ()
        assert known._replace(tokens=whole.tokens, responses=whole.responses) == whole


class Episodes:
    """Stands where the carried episodes are; none has ended, and those of line 3 cannot be replayed."""

    def retain(self, keys):
        self.retained = list(keys)

    def of(self, keys) -> list[Episode]:
        limits = EpisodeLimits(1, 1, 1)
        return [
            Episode(0, GenerationRequest([], 0, 1), 0, limits, key, replayable=key.split("/")[1] != "3") for key in keys
        ]


def with_episodes(rank: int) -> tuple[list[int], list[str], dict, list[str]]:
    """(lines of the groups that a round keeps, its episodes that continue, metrics, those when all are old)."""
    buffer = buffer_of(Episodes())
    keep(buffer, range(GROUPS), [0, 1], 3)
    retained, metrics = buffer.episodes.retained, buffer.metrics()
    lines = [request.line for request in buffer.requests]
    buffer.pop_oldest(9, 2)
    return lines, retained, metrics, buffer.episodes.retained


def test_only_episodes_of_groups_that_are_kept_and_can_be_replayed_go_on():
    metrics = {"rollout/carried_groups": 2, "rollout/dropped_groups": 1}
    expected = [2, 4], ["7/2/0", "7/2/1", "7/4/2", "7/4/3"], metrics, []
    assert run_world(with_episodes, 1) == [expected] and run_world(with_episodes, 2) == [expected] * 2


def stale(rank: int) -> tuple[list[int], list[int]]:
    """Lines left, and those that this rank holds, after groups have become too old."""
    buffer = buffer_of()
    for version, lines in ((0, range(2)), (2, range(2, 4))):
        keep(buffer, lines, [], 9, version)
    buffer.pop_oldest(0, 2)  # as with --generation-lag 1: what trains on them is newer than what continues them
    return [request.line for request in buffer.requests], state_of(buffer)[2]


def test_stale_groups_are_dropped_where_they_are_held():
    assert run_world(stale, 1) == [([2, 3], [2, 3])]
    assert run_world(stale, 2) == [([2, 3], [2]), ([2, 3], [3])]
