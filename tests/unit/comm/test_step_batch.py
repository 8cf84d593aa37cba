"""A step's batches: responses go to each role once, and computed fields to the role that reads them."""

import pytest
import torch

from megarl.batch import ACTOR, GENERATED, fields_sent
from megarl.comm.step_batch import StepBatch
from megarl.flags.settings import Settings
from megarl.groups import PromptGroups
from megarl.observe.timers import Timers
from tests.helpers.models.batches import create_mesh, random_batch, sequences, share_of
from tests.helpers.worlds import run_world

COUNT = 6


def there_and_back(rank: int, flags: str):
    """Dispatches the responses, fills the critic's values, and gathers them on the actor."""
    mesh, settings = create_mesh(flags), Settings()
    dp_assignment = {role: torch.arange(COUNT) % len(groups.replicas) for role, groups in mesh.roles.items()}
    whole = random_batch(1, fields_sent(settings, [GENERATED]), ids=torch.arange(COUNT))
    responses = share_of(whole, mesh["rollout"], dp_assignment)
    groups = PromptGroups.equal(COUNT, 1)
    batch = StepBatch(mesh, Timers(), dp_assignment, responses, 1, None, groups, settings)
    batch.dispatch("actor", "critic", "reward")
    assert batch.count == COUNT and batch["reference"] is None
    for role in ("actor", "critic"):
        expected = share_of(whole, mesh[role], dp_assignment)
        assert (batch[role] is None) == (expected is None)
        if expected is not None:
            fields = fields_sent(settings, [GENERATED], role)
            assert sorted(batch[role].present()) == sorted({"sequence_ids", "lengths", *fields})
            assert torch.equal(batch[role].tokens, expected.tokens)
    before = batch["critic"]
    batch.dispatch("critic")  # it has them
    assert batch["critic"] is before
    if before is not None:
        before.values = before.tokens * 0.5
    batch.pass_on("critic", ACTOR)
    batch.wait_sends()
    mine = batch["actor"]
    assert mine is None or torch.equal(mine.values, mine.tokens * 0.5)
    return [] if mine is None or not mesh["actor"].is_leader else sequences(mine)


@pytest.mark.parametrize("flags, size", [
    ("", 2), ("--role-map actor=0;critic=1;reward=1;reference=0", 2),
    ("--role-map actor=0-1;critic=2;reward=2;reference=0", 3),
])  # fmt: skip
def test_fields_reach_the_roles_that_read_them(flags, size):
    found = [row for rows in run_world(there_and_back, size, flags) for row in rows]
    assert sorted(row["sequence_ids"] for row in found) == list(range(COUNT)) and all("values" in row for row in found)
