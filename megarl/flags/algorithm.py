"""Flags of the algorithm: advantages, the policy's loss, the KL to the reference.

The options of policy losses are defined beside them (`algorithms.policy_losses`).
"""

import dataclasses
import functools
from collections.abc import Iterator

from megarl.algorithms import ESTIMATORS
from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.algorithms.estimators import NO_ADVANTAGE
from megarl.algorithms.kl import IN_LOSS, KL_KINDS
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.flags.conditions import TRAINED, Broken, Condition, FlagContext, on
from megarl.flags.fields import flag, fraction, not_negative, one_of, positive


@functools.cache
def of_estimator(option: str) -> Condition:
    """The condition that the estimator has an option."""
    return Condition(lambda run: option in run.estimator.options, "--advantage {advantage} does not use them")


@functools.cache
def of_loss(option: str) -> Condition:
    """The condition that the policy loss has the option that a flag sets."""
    return Condition(lambda run: option in run.policy_loss.flags(), "--policy-loss {policy_loss} does not use them")


BASELINES = Condition(
    lambda run: "baselines" in run.estimator.needs, "--advantage {advantage} needs no greedy responses"
)
NORM = on(lambda s: s.loss_aggregation == "seq-mean-token-sum-norm", "needs --loss-aggregation seq-mean-token-sum-norm")
KL = on(lambda s: s.kl_coefficient > 0, "--kl-coefficient is 0")
ADAPTIVE_KL = on(
    lambda s: s.kl_controller == "adaptive" and s.kl_coefficient > 0,
    "needs --kl-controller adaptive and --kl-coefficient above 0",
)


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Advantages."""

    advantage: str = flag("gae", names=ESTIMATORS)
    """advantage estimator: {names}, file.py:function or package.module:function; default with --distill and
    no --reward: none"""
    gamma: float = fraction(1.0, when=of_estimator("gamma"))
    """discount γ (1506.02438)"""
    gae_lambda: float = fraction(0.95, when=of_estimator("lam"))
    """λ of GAE (1506.02438)"""
    gae_length_alpha: float | None = positive(None, when=of_estimator("length_alpha"))
    """α: advantages of a response of l tokens have λ = 1 − 1/(α·l), the critic's returns --gae-lambda (VAPO,
    2504.05118: 0.05)"""
    group_std: bool = flag(True, when=of_estimator("group_std"))
    """divide by the group's standard deviation (2402.03300); false: Dr. GRPO (2503.20783)"""
    whiten_advantages: bool | None = flag(None, when=of_estimator("whiten"))
    """whiten advantages to mean 0 and variance 1 over the batch; default: as the estimator defines"""
    greedy_baseline: bool = flag(False, when=BASELINES)
    """generate and score a greedy response to each prompt as a baseline (ReMax, 2310.10505)"""
    # The policy's loss.
    policy_loss: str = flag("ppo-clip", names=POLICY_LOSSES)
    """policy loss: {names}, file.py:function or package.module:function"""
    loss_aggregation: str = one_of("token-mean", AGGREGATIONS)
    """how token losses are averaged: {names}"""
    loss_norm_length: float | None = positive(None, when=NORM)
    """length that divides the summed token losses (Dr. GRPO, 2503.20783); default: --max-response-length"""
    entropy_coefficient: float = not_negative(0.0)
    """coefficient of the entropy bonus"""
    opsm_threshold: float | None = positive(None, when=TRAINED)
    """drop the policy loss of a response with a negative advantage whose mean log(μ/π_θ) is above this (2512.02556)"""
    positive_nll_coefficient: float = not_negative(0.0, when=TRAINED)
    """weight of the mean negative log-prob of the correct responses' tokens (VAPO, 2504.05118: 0.1)"""
    mask_truncated_responses: bool = flag(False)
    """exclude responses that --max-response-length truncated from the losses of actor and critic (2503.14476 §3.4);
    their rewards stay in the group's baseline"""
    # The KL to the reference.
    kl_coefficient: float = not_negative(0.05)
    """KL coefficient β to the reference policy (2203.02155); 0: no KL"""
    kl_in: str = one_of("reward", ("reward", "loss"), when=KL)
    """add the KL to the reward (2203.02155) or to the loss (2402.03300)"""
    kl_estimator: str = one_of("k1", KL_KINDS, when=KL)
    """KL estimator: k1, k2, k3 (joschu.net/blog/kl-approx.html); k1+, k3+: with the gradient of k2; k3-unbiased: times
    π_θ/π_old (2512.02556)"""
    kl_controller: str = one_of("fixed", ("fixed", "adaptive"), when=KL)
    """fixed or adaptive β (1909.08593 §2.2)"""
    kl_target: float | None = positive(None, when=ADAPTIVE_KL)
    """target KL per response of the adaptive β, in nats (1909.08593)"""
    kl_horizon: float = positive(10000, when=ADAPTIVE_KL)
    """horizon of the adaptive β, responses (1909.08593)"""


def rules(run: FlagContext) -> Iterator[Broken]:
    """Rules of estimator, loss and KL."""
    yield from _advantage(run)
    yield from _comparisons(run)
    yield from _kl(run)


def _advantage(run: FlagContext) -> Iterator[Broken]:
    s, needs = run.settings, run.estimator.needs
    counts, has_teacher = any(term.weight for term in run.terms), s.distill != "none"
    has_advantage = s.advantage != NO_ADVANTAGE
    if "groups" in needs and s.samples_per_prompt == 1:
        why = f"--advantage {s.advantage} compares the responses to a prompt; allowed is 2 or more"
        yield "--samples-per-prompt", why
    if "baselines" in needs and not s.greedy_baseline:
        yield "--advantage", "needs --greedy-baseline, whose reward it subtracts"
    if s.reads_squares and s.old_logprobs != "recompute":
        yield "--advantage", f"reads Σπ² over the vocabulary, which --old-logprobs {s.old_logprobs} does not compute"
    if not has_advantage and not has_teacher:
        yield "--advantage", "needs --distill: nothing else would be learnt"
    if has_advantage and not counts and run.program == "rl" and has_teacher:
        yield "--advantage", "no reward counts, so that all advantages are 0; allowed is none"
    if not has_advantage and counts:
        yield "--advantage", f"leaves out what --reward {s.reward} says; give it weight 0, or take another estimator"
    if not has_advantage and s.kl_in != "loss" and s.kl_coefficient:
        yield "--advantage", "leaves out the KL in the reward; give --kl-in loss or --kl-coefficient 0"
    if s.credit == "turns" and "credit_turns" not in run.estimator.options:
        why = "needs --advantage rloo: it compares each turn with the same turn of the other responses to the prompt"
        yield "--credit", why


def _comparisons(run: FlagContext) -> Iterator[Broken]:
    """Of a policy loss that compares the responses of a group."""
    s, compares = run.settings, run.policy_loss.compare is not None
    size, group = s.minibatch_size or s.sequences_per_step, s.samples_per_prompt
    if compares and group == 1:
        yield "--policy-loss", "compares the responses of a group; needs --samples-per-prompt 2 or more"
    if compares and size < s.sequences_per_step and size % group:
        yield (
            "--minibatch-size",
            f"would split groups, whose responses --policy-loss {s.policy_loss} compares; allowed are multiples "
            f"of --samples-per-prompt {group}",
        )
    if compares and s.old_logprobs == "interpolate":
        why = f"changes between the updates; allowed with --policy-loss {s.policy_loss} are recompute, rollout"
        yield "--old-logprobs", why
    if compares and s.distill == "reward":
        yield (
            "--distill",
            f"adds to the advantages, of which --policy-loss {s.policy_loss} reads the sign alone; allowed are "
            "loss, none",
        )


def _kl(run: FlagContext) -> Iterator[Broken]:
    s, sequences = run.settings, run.settings.sequences_per_step
    adapts, is_reward = s.kl_controller == "adaptive", s.kl_in == "reward"
    if "parts" in run.estimator.needs and is_reward and s.kl_coefficient:
        yield (
            "--kl-in",
            f"--advantage {s.advantage} compares the parts of --reward, of which the KL is none; allowed is "
            "loss, or --kl-coefficient 0",
        )
    if is_reward and s.kl_estimator in IN_LOSS:
        yield "--kl-estimator", "needs --kl-in loss: it changes only the gradient, and a reward has none"
    if adapts and s.kl_target is None:
        yield "--kl-controller", "needs --kl-target"
    # β must stay above 0: an update multiplies it by at least 1 − 0.2·n/horizon.
    if adapts and s.kl_horizon <= 0.2 * sequences:
        yield "--kl-horizon", f"allowed is more than 0.2 × {sequences} responses of a step"
