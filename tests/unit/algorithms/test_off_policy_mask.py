"""Off-policy sequence masking: against its definition, in TRL's and slime's reading."""

import itertools
import math

import torch

from megarl.algorithms.off_policy_mask import off_policy_kept
from tests.references.ragged import ragged_batches
from tests.references.verl_policy_losses import policy_tokens


def test_tokens_with_a_negative_advantage_of_far_responses_are_dropped():
    dropped = 0
    for case, batch in enumerate(ragged_batches()):
        rollout, old, advantages = -batch.normal().abs(), -batch.normal().abs(), batch.normal()
        logprobs = rollout + batch.normal((0.01, 0.3, 3.0)[case % 3])
        noisy = [torch.where(batch.mask, field, math.nan) for field in (logprobs, old, advantages, rollout)]
        kept, threshold = off_policy_kept(policy_tokens(batch, *noisy), 0.1), 0.1
        for start, stop in itertools.pairwise(batch.cu_seqlens.tolist()):
            mask = batch.mask[start:stop]
            gaps = (rollout - logprobs)[start:stop][mask].tolist()
            is_far = bool(gaps) and math.fsum(gaps) / len(gaps) > threshold
            expected = [not (is_far and a < 0) for a in advantages[start:stop][mask].tolist()]
            assert kept[start:stop][mask].tolist() == expected
            dropped += expected.count(False)
        assert kept[~batch.mask].all()
    assert dropped > 200
