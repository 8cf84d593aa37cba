"""Walks what algorithms compute of a batch on a device without hardware: advantages, losses, corrections, metrics."""

import itertools

import torch

from megarl.groups import PromptGroups
from tests.cuda_walk.device import CUDA, Walk
from tests.cuda_walk.training import device_batch, host_batch
from tests.helpers.models.tiny_models import join_actor


class Step(dict):
    """Batches of a step by role, as `StepBatch` has them."""

    groups, step = PromptGroups.equal(3, 2), 1
    count = groups.count


def _scored_batch():
    batch, _ = host_batch()
    sequences, tokens = len(batch.lengths), len(batch.tokens)
    batch.scores, batch.baseline_scores = (torch.linspace(0, end, sequences) for end in (1, 2))
    batch.correct = batch.finished = torch.arange(sequences) % 2 == 0
    batch.entropy = batch.turn_rewards = batch.squares = torch.linspace(0, 1, tokens)
    return device_batch(batch)


def _advantages(walk: Walk, groups) -> dict:
    from megarl.algorithms import ESTIMATORS
    from megarl.flags.settings import Settings
    from megarl.observe.timers import Timers
    from megarl.roles.advantage_computer import AdvantageComputer

    found = {}
    for name, credit in [*((name, "episodes") for name in ESTIMATORS), ("rloo", "turns")]:
        settings = Settings(advantage=name, samples_per_prompt=2, reward="exact-match", kl_coefficient=0.1,
                            credit=credit, max_turns=3, mask_truncated_responses=True)  # fmt: skip
        computer, batch = AdvantageComputer(settings, ESTIMATORS[name], groups, Timers()), _scored_batch()
        walk.clear()
        computer.compute(Step(actor=batch))
        computer.update_kl_coefficient(Step(actor=batch))
        found[f"{name} {credit}"] = walk.counts()
        assert batch.advantages.device == CUDA
    return found


def _losses(walk: Walk) -> dict:
    from megarl.algorithms.aggregation import AGGREGATIONS, local_counts
    from megarl.algorithms.kl import KL_KINDS
    from megarl.algorithms.policy_loss import PolicyTokens
    from megarl.algorithms.policy_losses import POLICY_LOSSES
    from megarl.algorithms.rollout_correction import CORRECTIONS, LEVELS, correction_sums
    from megarl.flags.settings import Settings
    from megarl.mcore.model.forward_pass import TokenScores
    from megarl.roles.actor_loss import ActorLoss

    first = [("ppo-clip", *each) for each in itertools.product(CORRECTIONS, LEVELS, AGGREGATIONS, KL_KINDS)]
    others = [(name, "none", LEVELS[0], AGGREGATIONS[0], "k1") for name in POLICY_LOSSES]
    found = {}
    for name, correction, level, aggregation, kl in first + others:
        settings = Settings(policy_loss=name, rollout_correction=correction, rollout_correction_level=level,
                            rollout_correction_floor=0.5 if correction == "icepop" else None,
                            loss_aggregation=aggregation, kl_in="loss", kl_estimator=kl, entropy_coefficient=0.1,
                            max_response_length=8, mask_truncated_responses=True)  # fmt: skip
        batch = _scored_batch()
        logprobs, entropy = (x.clone().requires_grad_() for x in (batch.logprobs, batch.entropy))
        columns = batch.advantages, batch.response_mask, batch.cu_seqlens, batch.rollout_logprobs
        walk.clear()
        if (select := POLICY_LOSSES[name].select) is not None:
            tokens = PolicyTokens(batch.logprobs, batch.logprobs, *columns)
            drawn = batch.logprobs.detach().double().exp()
            batch.selected = select(tokens, POLICY_LOSSES[name].options, drawn, lambda x: x)
        counts = local_counts(batch.response_mask, batch.cu_seqlens)
        loss = ActorLoss(settings, POLICY_LOSSES[name])
        value, sums = loss(TokenScores(logprobs, entropy), batch, batch.logprobs, counts, 0.1)
        value.backward()
        found[f"{name} {correction} {level} {aggregation} {kl}"] = walk.counts()
        measured = correction_sums(  # once a step, for its metrics
            batch.logprobs, batch.rollout_logprobs, batch.response_mask, batch.cu_seqlens, loss.correction
        )
        assert {x.device for x in (logprobs.grad, entropy.grad, sums, *measured)} == {CUDA}
    return found


def _value_loss(walk: Walk) -> dict:
    from megarl.algorithms.advantages import clipped_value_loss, explained_variance_moments
    from megarl.algorithms.aggregation import token_mean

    batch = _scored_batch()
    values = batch.values.clone().requires_grad_()
    walk.clear()
    losses, _ = clipped_value_loss(values, batch.values, batch.returns, 0.2)
    token_mean(losses, batch.response_mask, batch.response_mask.sum().double()).backward()
    moments = explained_variance_moments(batch.values, batch.returns, batch.response_mask)
    assert values.grad.device == moments.device == CUDA
    return {"clipped": walk.counts()}


def walk_all(walk: Walk) -> dict:
    """What is counted in each."""
    walk.all_true = True
    _, groups = join_actor("--bf16", program="rl")
    return {"advantages": _advantages(walk, groups), "losses": _losses(walk) | _value_loss(walk)}


SCENARIOS = {"algorithms": (walk_all, 1)}  # name -> (what walks, ranks)
