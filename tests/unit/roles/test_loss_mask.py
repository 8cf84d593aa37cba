"""--mask-truncated-responses: as if the truncated responses were not there, and equal to TRL's formulas."""

import pytest
import torch

from megarl.algorithms.aggregation import local_counts
from megarl.algorithms.policy_loss import ClipOptions
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.batch import Batch
from megarl.mcore.model.forward_pass import TokenScores
from tests.helpers.models.role_stubs import (
    LocalStepBatch,
    assert_equal_updates,
    assert_no_update,
    experience,
    role_of,
    update,
)
from tests.helpers.programs import program, rl_argv
from tests.helpers.tiers import long
from tests.helpers.worlds import run_world

MASK = "--mask-truncated-responses"
WHOLE = "--minibatch-size 12 --ppo-epochs 1 --clip-grad 0 --entropy-coefficient 0.05"
CASES = [("actor", "token-mean"), long(("actor", "seq-mean-token-sum-norm")), ("critic", "token-mean")]


def finished(dp_rank: int, replicas: int) -> Batch:
    batch = experience(dp_rank, replicas)
    return batch.select(batch.finished.nonzero().flatten())


@pytest.mark.parametrize("name, aggregation", CASES)
def test_a_masked_response_trains_as_if_it_were_not_there(name, aggregation, tmp_path):
    flags = f"{WHOLE} --loss-aggregation {aggregation}"
    (without,) = update(tmp_path, name, flags, batch_of=finished)
    (masked,) = update(tmp_path, name, f"{flags} {MASK}")
    (plain,) = update(tmp_path, name, flags)
    moments = "critic/explained_variance"  # of all tokens: masked ones have values, too
    without.metrics.pop(moments, None), masked.metrics.pop(moments, None)
    assert_equal_updates(masked, without)
    assert plain.metrics[f"{name}/grad_norm"] != pytest.approx(masked.metrics[f"{name}/grad_norm"], rel=1e-3)


@pytest.mark.parametrize("name, flags", [
    long(("actor", "--max-tokens-per-microbatch 10")), ("actor", "--pipeline-model-parallel-size 2"),
    long(("critic", "--max-tokens-per-microbatch 10")), ("critic", "--context-parallel-size 2"),
])  # fmt: skip
def test_no_masked_loss_depends_on_the_split(name, flags, tmp_path):
    (expected,) = update(tmp_path, name, f"{WHOLE} {MASK}")
    for found in update(tmp_path, name, f"{WHOLE} {MASK} {flags}", 2):
        assert found.metrics == pytest.approx(expected.metrics, rel=2e-5, abs=1e-6)


# -- nothing to learn from -----------------------------------------------------------------------------------------


def after_masks(rank: int, parsed, name: str) -> tuple[bool, bool, dict]:
    """Whether a normal update changes the weights; whether one after it does whose responses are all truncated."""
    role, place = role_of(name, parsed)
    batch = experience(place.dp_rank, len(place.replicas))

    def changes() -> bool:
        before = [p.detach().clone() for p in role.trainable_model.model.parameters()]
        role.update(LocalStepBatch({name: batch}), *[0.5] * (name == "actor"))
        return any(not torch.equal(*pair) for pair in zip(before, role.trainable_model.model.parameters()))

    first = changes()
    batch.finished[:], role.metrics = False, {}
    return first, changes(), role.metrics


@pytest.mark.parametrize("name", ["actor", "critic"])
@pytest.mark.parametrize("size", [long(1), 2])
def test_a_step_of_truncated_responses_changes_no_weight(name, size, tmp_path):
    """Not even by the momentum and the weight decay of the optimizer; and it is no fault to be counted."""
    flags = f"--lr 1e-2 --critic-lr 1e-2 --weight-decay 0.1 --kl-in loss --entropy-coefficient 0.05 {MASK}"
    parsed = program("rl", rl_argv(tmp_path, f"{flags} --minibatch-size 4 --ppo-epochs 2"), size)
    for first, second, metrics in run_world(after_masks, size, parsed, name):
        assert first and not second
        assert_no_update(name, metrics)


# -- TRL -----------------------------------------------------------------------------------------------------------


def trl_losses(logprobs, old, advantages, batch, low: float, high: float, longest: int) -> dict[str, torch.Tensor]:
    """Losses of TRL 1.16's GRPO trainer with `mask_truncated_completions`, by `loss_type`, from its formulas.

    Completions in rows padded to the longest; a truncated one has a mask of zeros, but counts in the means over rows.
    """
    rows, width = len(batch), int(batch.response_lengths.max())
    mask, columns = torch.zeros(rows, width), {"new": logprobs, "old": old, "advantages": advantages}
    padded = {name: torch.zeros(rows, width) for name in columns}
    for row, (start, end) in enumerate(zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:])):
        first = start + int(batch.prompt_lengths[row])
        for name, values in columns.items():
            padded[name][row, : end - first] = values[first:end]
        mask[row, : end - first] = float(batch.finished[row])
    ratio = torch.exp(padded["new"] - padded["old"])
    one, two = ratio * padded["advantages"], ratio.clamp(1 - low, 1 + high) * padded["advantages"]
    losses = -torch.min(one, two)
    return {
        "dapo": (losses * mask).sum() / mask.sum().clamp(min=1.0),
        "grpo": ((losses * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean(),
        "dr_grpo": (losses * mask).sum() / (rows * longest),
    }


@pytest.mark.parametrize("aggregation, loss_type", [
    ("token-mean", "dapo"), ("seq-mean-token-mean", "grpo"), ("seq-mean-token-sum-norm", "dr_grpo"),
])  # fmt: skip
def test_losses_and_gradients_are_those_of_trl(aggregation, loss_type, tmp_path):
    from megarl.roles.actor_loss import ActorLoss
    from megarl.roles.loss_mask import loss_mask

    flags = f"--advantage grpo --kl-coefficient 0 --loss-aggregation {aggregation} --loss-norm-length 7 {MASK}"
    flags = flags if loss_type == "dr_grpo" else flags.replace("--loss-norm-length 7", "")
    settings = program("rl", rl_argv(tmp_path, flags), 1).settings
    batch = experience(0, 1)
    assert 0 < batch.finished.sum() < len(batch)
    clip = ClipOptions(0.1, 0.3)
    loss = ActorLoss(settings, POLICY_LOSSES["ppo-clip"]._replace(options=clip))
    counts = local_counts(loss_mask(batch, settings), batch.cu_seqlens)
    found, expected = (batch.rollout_logprobs.clone().requires_grad_() for _ in range(2))
    scores = TokenScores(found, torch.zeros_like(found))
    value, _ = loss(scores, batch, batch.logprobs, counts, 0.0)
    target = trl_losses(expected, batch.logprobs, batch.advantages, batch, 0.1, 0.3, 7)[loss_type]
    if loss_type != "dapo":  # megarl's mean is over the responses that count, TRL's over all
        target = target * len(batch) / counts[1]
    torch.testing.assert_close(value, target.to(value), rtol=1e-6, atol=1e-7)
    value.backward()
    target.backward()
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-5, atol=1e-8)
    truncated = batch.response_mask & ~loss_mask(batch, settings)
    assert truncated.any() and not found.grad[truncated].any() and found.grad[loss_mask(batch, settings)].any()
