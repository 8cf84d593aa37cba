"""Groups that wait, in runs that know the policy version of each token and in runs that do not."""

import torch

from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.groups import PromptGroups
from megarl.rollout.group_buffer import forced_responses, truncated_to
from megarl.rollout.response_log import Record
from tests.helpers.models.tiny_models import parse_roles
from tests.helpers.worlds import SAFETY, run_world


def versions_after(rank: int) -> dict:
    """Versions of the tokens of a group that is saved and loaded, by whether the two runs have versions."""
    from megarl.comm import role_mesh
    from megarl.rollout.group_buffer import GroupBuffer

    place, found = role_mesh.create_mesh(parse_roles("", 1, program="rl"), SAFETY)["rollout"], {}
    tokens, lengths = torch.arange(5), torch.tensor([2, 3])
    fields = {"sequence_ids": torch.arange(2), "prompt_ids": torch.zeros(2).long(), "finished": lengths > 2}
    fields |= {"prompt_lengths": torch.ones(2).long(), "rollout_logprobs": -tokens.float(), "response_mask": tokens > 0}
    for saves in (False, True):
        stamps = {"versions": tokens.int()} if saves else {}
        before = GroupBuffer(place, Settings(samples_per_prompt=2, generation_lag=int(saves)))
        before.add(
            Batch(tokens=tokens, lengths=lengths, **fields, **stamps), PromptGroups.equal(1, 2), torch.tensor([True])
        )
        for loads in (False, True):
            after = GroupBuffer(place, Settings(samples_per_prompt=2, generation_lag=int(loads)))
            after.load([before.to_record()], version=7)
            versions = after.batch.versions
            assert after.batch.tokens.tolist() == tokens.tolist()
            found[saves, loads] = versions if versions is None else (versions.dtype, versions.tolist())
    return found


def test_a_run_that_needs_versions_gives_them_to_groups_without():
    assert run_world(versions_after, 1) == [{
        (False, False): None, (True, False): None, (False, True): (torch.int32, [7] * 5),
        (True, True): (torch.int32, [0, 1, 2, 3, 4]),
    }]  # fmt: skip


def buffer_of(size: int):
    """(an empty `GroupBuffer`, this rank's role groups) of a rollout without a model."""
    from megarl.comm import role_mesh
    from megarl.rollout.group_buffer import GroupBuffer

    place = role_mesh.create_mesh(parse_roles("", size, program="rl"), SAFETY)["rollout"]
    return GroupBuffer(place, Settings(samples_per_prompt=2)), place


def unequal_groups(rank: int) -> tuple[Record | None, list[int]]:
    """(the record of this rank's replica of two, sizes) of three groups out of two rounds."""
    buffer, role_groups = buffer_of(2)
    for start, sizes, keep in ((0, [3, 1, 2], [True, False, True]), (50, [1, 4], [False, True])):
        groups = PromptGroups(sizes)
        ids = torch.arange(groups.count)
        tokens = (start + ids).repeat_interleave(2)
        whole = Batch(
            sequence_ids=ids, lengths=torch.full_like(ids, 2), prompt_lengths=torch.ones_like(ids), tokens=tokens,
            prompt_ids=groups.of(ids), finished=ids > 2, response_mask=tokens > 0, rollout_logprobs=-tokens.float(),
        )  # fmt: skip
        mine = groups.round_robin(2) == role_groups.dp_rank
        buffer.add(whole.select(mine.nonzero().flatten()), groups, torch.tensor(keep))
    return buffer.to_record(), buffer.sizes


def loaded(rank: int, records: list[Record]) -> tuple[list[int], list[int], list[int]]:
    """(sizes, tokens, ids) of the groups of a checkpoint, on one rank."""
    buffer, _ = buffer_of(1)
    buffer.load(records)
    taken = buffer.take()
    assert not buffer.sizes and not len(buffer)
    return taken.sizes, taken.batch.tokens[::2].tolist(), taken.batch.sequence_ids.tolist()


def test_groups_of_unequal_sizes_wait_in_a_checkpoint():
    results = run_world(unequal_groups, 2)
    assert [sizes for _, sizes in results] == [[3, 2, 4]] * 2
    (found,) = run_world(loaded, 1, [data for data, _ in results])
    assert found == ([3, 2, 4], [0, 1, 2, 4, 5, 51, 52, 53, 54], list(range(9)))


def batch() -> Batch:
    """Prompts of 1, 2 and 1 tokens with responses of 3, 1 and 4, all finished; one token is forced."""
    lengths, prompts = torch.tensor([4, 3, 5]), torch.tensor([1, 2, 1])
    mask = [False, True, True, True, False, False, True, False, True, True, False, True]
    return Batch(
        sequence_ids=torch.arange(3), lengths=lengths, prompt_lengths=prompts, finished=torch.ones(3).bool(),
        tokens=torch.arange(12), response_mask=torch.tensor(mask),
    )  # fmt: skip


def test_responses_are_cut_to_their_new_tokens():
    """The last one had two tokens before: it keeps these, and as many new ones as the others."""
    found = truncated_to(batch(), 1, torch.tensor([0, 0, 2]))
    assert found.lengths.tolist() == [2, 3, 4] and found.finished.tolist() == [False, True, False]
    assert found.tokens.tolist() == [0, 1, 4, 5, 6, 7, 8, 9, 10]
    assert truncated_to(batch(), 3, torch.zeros(3).long()).finished.tolist() == [True, True, False]


def test_responses_with_forced_tokens_are_counted():
    found = batch()
    assert forced_responses(found) == 1
    found.forced = torch.zeros(12).bool()
    assert forced_responses(found) == 0, "of an environment: what is not in the mask may be an answer"
    found.forced[[2, 10, 11]] = True
    assert forced_responses(found) == 2
