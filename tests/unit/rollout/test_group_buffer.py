"""Groups that wait, in runs that know the policy version of each token and in runs that do not."""

import torch

from megarl.batch import Batch
from tests.helpers.tiny_models import parse_roles
from tests.helpers.worlds import SAFETY, run_world


def versions_after(rank: int) -> dict:
    """Versions of the tokens of a group that is saved and loaded, by whether the two runs have versions."""
    from megarl.comm import role_mesh
    from megarl.rollout.group_buffer import GroupBuffer

    mesh, found = role_mesh.create_mesh(parse_roles("", 1, program="rl"), SAFETY), {}
    tokens, lengths = torch.arange(5), torch.tensor([2, 3])
    fields = {"sequence_ids": torch.arange(2), "prompt_ids": torch.zeros(2).long(), "finished": lengths > 2}
    fields |= {"prompt_lengths": torch.ones(2).long(), "rollout_logprobs": -tokens.float(), "response_mask": tokens > 0}
    for saves in (False, True):
        stamps = {"versions": tokens.int()} if saves else {}
        before = GroupBuffer(mesh, 2, (), has_versions=saves)
        before.add(Batch(tokens=tokens, lengths=lengths, **fields, **stamps), torch.tensor([True]))
        for loads in (False, True):
            after = GroupBuffer(mesh, 2, (), has_versions=loads)
            after.from_bytes([(before.to_bytes(), "group_buffer.pt")], version=7)
            versions = after.batch.versions
            assert after.batch.tokens.tolist() == tokens.tolist()
            found[saves, loads] = versions if versions is None else (versions.dtype, versions.tolist())
    return found


def test_a_run_that_needs_versions_gives_them_to_groups_without():
    assert run_world(versions_after, 1) == [{
        (False, False): None, (True, False): None, (False, True): (torch.int32, [7] * 5),
        (True, True): (torch.int32, [0, 1, 2, 3, 4]),
    }]  # fmt: skip
