"""The actor's loss in a real update: every policy loss, aggregation, correction and KL is the same in every split."""

import functools
import itertools
import math

import pytest
import torch

from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.algorithms.kl import KL_KINDS
from megarl.algorithms.packed import broadcast_to_tokens
from megarl.algorithms.policy_loss import PolicyTokens
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.algorithms.rollout_correction import kept_tokens, parse_bounds
from megarl.mcore.model.forward_pass import TokenScores
from megarl.roles.actor_loss import ActorLoss
from tests.helpers.models.role_stubs import PLAIN, LocalStepBatch, experience, role_of
from tests.helpers.programs import program, rl_argv
from tests.helpers.tiers import by_default, long
from tests.helpers.worlds import run_world

WHOLE = f"{PLAIN} --minibatch-size 12 --ppo-epochs 1 --clip-grad 0 --entropy-coefficient 0.05 --advantage grpo"
BOUNDS = {  # that mask tokens of this experience
    "dppo-tv": "--dppo-tv-low 0.005", "dppo-kl": "--dppo-kl-low 0.002", "m2po": "--m2po-threshold 0.01",
    "clip-cov": "--clip-cov-least 0 --clip-cov-share 0.1", "kl-cov": "--kl-cov-share 0.3",
}  # fmt: skip
LOSSES = {
    **{f"{loss}, {mode}": f"--policy-loss {loss} --loss-aggregation {mode} {BOUNDS.get(loss, '')}"
       for loss, mode in itertools.product(POLICY_LOSSES, AGGREGATIONS)},
    "dual clip": "--dual-clip 1.01 --clip-range 0.005 --clip-range-high 0.01",
    **{f"KL {kind} in the loss": f"--kl-in loss --kl-coefficient 0.7 --kl-estimator {kind}" for kind in KL_KINDS},
    "tis": "--rollout-correction tis --rollout-correction-cap 1.05",
    "tis of sequences": "--rollout-correction tis --rollout-correction-level sequence --rollout-correction-cap 1.05",
    "mis": "--rollout-correction mis --rollout-correction-cap 1.1",
    "mis of sequences": "--rollout-correction mis --rollout-correction-level sequence --rollout-correction-cap 1.1",
    "mis, geometric": "--rollout-correction mis --rollout-correction-level geometric --rollout-correction-cap 1.05",
    "icepop": "--rollout-correction icepop --rollout-correction-floor 0.9 --rollout-correction-cap 1.1",
    "dropped responses": "--opsm-threshold 0.02",
    "real, two updates": "--policy-loss real --ppo-epochs 2",
    "correct responses": "--positive-nll-coefficient 0.3",
    "rejected tokens": "--rollout-rejection token-k1=0.9:1.1",
    "rejected responses, weights": "--rollout-rejection mean-abs=0.2 max-k3=0.05 --rollout-correction mis",
}  # fmt: skip
# Each policy loss with one aggregation, each aggregation with a policy loss; and all the rest.
PAIRS = {f"{loss}, {mode}" for loss, mode in zip(POLICY_LOSSES, itertools.cycle(AGGREGATIONS))} | {"real, two updates"}
SOME = {name: flags for name, flags in LOSSES.items() if name in PAIRS or "--policy-loss" not in flags}
WITH_ALL = "two replicas, micro-batches of one"
LAYOUTS = {
    WITH_ALL: (2, "--max-tokens-per-microbatch 10"),
    "CP2": (2, "--context-parallel-size 2 --max-tokens-per-microbatch 40"),
    "PP2": (2, "--pipeline-model-parallel-size 2 --max-tokens-per-microbatch 20"),
}


def several_turns(nonsense: float, batch):
    """The batch with an observation inside its longer responses, and `nonsense` at tokens of the environment."""
    ends = batch.cu_seqlens[1:].tolist()
    for end, length in zip(ends, batch.response_lengths.tolist(), strict=True):
        if length > 2:
            batch.response_mask[end - 2] = False
    for name in ("logprobs", "rollout_logprobs", "reference_logprobs", "advantages"):
        getattr(batch, name)[~batch.response_mask] = nonsense
    return batch


def without_rejected(batch):
    """The batch as if the policy had not generated the tokens that break the bound of the losses above."""
    (bound,) = parse_bounds("token-k1=0.9:1.1")
    batch.response_mask = kept_tokens(
        batch.logprobs, batch.rollout_logprobs, batch.response_mask, batch.cu_seqlens, bound
    )
    return batch


def updated(rank: int, parsed: dict, changed=lambda batch: batch) -> dict:
    """{loss: (metrics, log-probs after the update in the order of the step)} on this rank."""
    found = {}
    for name, settings in parsed.items():
        role, place = role_of("actor", settings)
        batch = changed(experience(place.dp_rank, len(place.replicas)))
        role._updates_on_policy = lambda *_: False  # the old policy of this experience is another one
        of_estimator = batch.advantages
        role.update(LocalStepBatch(actor=batch), settings.settings.kl_coefficient)
        assert batch.advantages is of_estimator, "samples of tokens would show those that responses are compared by"
        metrics, old = role.metrics, batch.logprobs
        role.metrics, batch.rollout_logprobs = {}, torch.zeros_like(old)
        role.old_logprobs(LocalStepBatch(actor=batch))
        found[name] = metrics, dict(zip(batch.sequence_ids.tolist(), batch.logprobs.split(batch.lengths.tolist())))
    return found


def updates(folder, layout: str, size: int, losses: dict, *changed) -> list[dict]:
    parsed = {name: program("rl", rl_argv(folder, f"{WHOLE} {layout} {flags}"), size) for name, flags in losses.items()}
    return run_world(updated, size, parsed, *changed)


@functools.cache
def expected(folder, has_all: bool) -> dict:
    return updates(folder, "--max-tokens-per-microbatch 1000", 1, LOSSES if has_all else SOME)[0]


@pytest.mark.parametrize("layout", by_default(LAYOUTS, ("CP2",)))
def test_no_loss_depends_on_the_split(layout, folder):
    size, flags = LAYOUTS[layout]
    has_all = layout == WITH_ALL
    for found in updates(folder, flags, size, LOSSES if has_all else SOME):
        for name, (metrics, logprobs) in found.items():
            reference, its_logprobs = expected(folder, has_all)[name]
            assert reference["actor/grad_norm"] > 1e-3
            assert metrics == pytest.approx(reference, rel=2e-5, abs=1e-6), name
            for number, row in logprobs.items():
                torch.testing.assert_close(row, its_logprobs[number], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_all", [False, long(True)])
def test_every_loss_is_another_one(has_all, folder):
    """Two names that gave one gradient would hide a flag that is not read."""
    norms = {name: metrics["actor/grad_norm"] for name, (metrics, _) in expected(folder, has_all).items()}
    names = sorted(norms, key=norms.get)
    same = [(one, two) for one, two in itertools.pairwise(names) if math.isclose(norms[one], norms[two], rel_tol=1e-6)]
    assert {name for pair in same for name in pair} == {f"KL {kind} in the loss" for kind in ("k2", "k1+", "k3+")}


def test_observations_and_prompts_count_nowhere(folder):
    """Multi-turn responses: values at tokens that the policy did not generate change no bit."""
    whole = "--max-tokens-per-microbatch 1000"
    nonsense = [functools.partial(several_turns, number) for number in (1e3, float("nan"))]
    (one,), (other,) = (updates(folder, whole, 1, SOME, changed) for changed in nonsense)
    for name, (metrics, logprobs) in one.items():
        assert metrics == other[name][0] and all(map(math.isfinite, metrics.values())), name
        assert all(torch.equal(row, other[name][1][number]) for number, row in logprobs.items()), name


def test_rejected_tokens_leave_numerators_and_denominators(folder):
    """Not so with weights of 0, as of `mis`."""
    ((found, _),) = updates(folder, "", 1, {"plain": ""}, without_rejected)[0].values()
    rejected = expected(folder, False)["rejected tokens"][0]
    assert all(rejected[name] == pytest.approx(value, rel=1e-6) for name, value in found.items())
    assert 0.2 < rejected["rejection/fraction"] < 0.9


def compared(rank: int, parsed) -> tuple:
    """After an update: advantages by the policy loss; by log-probs of a pass of its own; of an unchanged policy."""
    role, _ = role_of("actor", parsed)
    batch, loss = experience(0, 1), parsed.policy_loss
    old, positions = batch.logprobs.clone(), torch.arange(len(batch))
    role._updates_on_policy = lambda *_: False
    role.update(LocalStepBatch(actor=batch), 0.0)
    found = role._compare(batch, positions, LocalStepBatch.groups, batch.advantages, False)
    role.old_logprobs(LocalStepBatch(actor=batch))
    columns, groups = (batch.advantages, batch.response_mask, batch.cu_seqlens), batch.sequence_ids // 2
    inputs = (PolicyTokens(x, old, *columns) for x in (batch.logprobs, old))
    return found, *(loss.compare(tokens, loss.options, groups, len(batch) // 2, lambda x: x) for tokens in inputs)


def test_responses_are_compared_by_the_policy_before_the_update(folder):
    ((found, expected, unchanged),) = run_world(
        compared, 1, program("rl", rl_argv(folder, f"{WHOLE} --policy-loss real --real-tau 0.1"), 1)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert (found - unchanged).abs().max() > 1e-3 and found.any()


def test_the_loss_is_that_of_the_policy_less_an_entropy_bonus_plus_the_other_terms(folder):
    terms = "--kl-in loss --kl-coefficient 0.7 --kl-estimator k2 --positive-nll-coefficient 0.3"
    parsed = program("rl", rl_argv(folder, f"{WHOLE} {terms}"), 1)
    batch = experience(0, 1)
    mask, generator = batch.response_mask, torch.Generator().manual_seed(0)
    logprobs, entropy = -torch.rand(2, len(mask), generator=generator)
    scores, loss = TokenScores(logprobs, -entropy), ActorLoss(parsed.settings, parsed.policy_loss)
    value, found = loss(scores, batch, logprobs, loss.local_counts(batch, mask), 0.7)
    policy, bonus = -batch.advantages[mask].mean(), -entropy[mask].mean()  # of equal policies: the ratio is 1
    kl = 0.5 * (logprobs - batch.reference_logprobs)[mask].square().mean()
    correct = mask & broadcast_to_tokens(batch.correct, mask, batch.cu_seqlens)
    nll = -logprobs[correct].mean()
    assert float(value) == pytest.approx(float(policy - 0.05 * bonus + 0.7 * kl + 0.3 * nll), rel=1e-5)
    named = dict(zip(loss.names, found.tolist(), strict=True))
    assert named["actor/positive_nll"] == pytest.approx(float(nll), rel=1e-5) and correct.sum() < mask.sum()
    assert named["actor/entropy"] == pytest.approx(float(bonus), rel=1e-5) and bonus > 0.1
    assert named["actor/kl_loss"] == pytest.approx(float(kl), rel=1e-5) and kl > 1e-3
