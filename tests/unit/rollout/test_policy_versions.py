"""Versions of the policy: one more for each update, and how old a token is that an earlier one drew."""

import torch

from megarl.arguments import Settings
from megarl.rollout.policy_versions import PolicyVersions, staleness_of


def test_a_step_without_an_update_has_the_version_before_it():
    versions = PolicyVersions(Settings(generation_lag=2, critic_warmup_steps=1))
    for step, has_batch in enumerate((True, True, False, True), start=1):
        versions.end_step(step, has_batch)
    assert [versions.after_step(step) for step in (2, 3, 4)] == [1, 1, 2]
    assert versions.of_step(5) == (1, 2) and versions.of_weights(4) == 2
    versions.restart(9, 7)
    assert versions.of_step(10) == (7, 7) and versions.of_weights(8) == 7, "older weights are not there"


def test_tokens_of_later_policies_are_not_stale():
    assert staleness_of(torch.tensor([0, 2, 3, 9]), 3).tolist() == [3, 1, 0, 0]
