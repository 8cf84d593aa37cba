"""Flags of the algorithm: advantages, the policy's loss, the KL to the reference, and the gap between the policy that
generated and the one that is trained.

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
from megarl.algorithms.rollout_correction import CORRECTIONS, LEVELS, parse_bounds
from megarl.flags.conditions import TRAINED, Broken, Condition, FlagContext, on
from megarl.flags.fields import flag, fraction, not_negative, one_of, parses, positive

RECOMPUTE, ROLLOUT, INTERPOLATE = OLD_LOGPROBS = ("recompute", "rollout", "interpolate")


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
CORRECTION = on(lambda s: s.rollout_correction != "none", "--rollout-correction is none")
ICEPOP = on(lambda s: s.rollout_correction == "icepop", "needs --rollout-correction icepop")


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
    # Correction of the gap between rollout and training.
    old_logprobs: str = one_of(RECOMPUTE, OLD_LOGPROBS, when=TRAINED)
    """log-probs of π_old: those of a pass before the updates (recompute), those of the rollout, without that pass
    (rollout), or the latter moved towards the trained policy by a token's age (interpolate)"""
    rollout_correction: str = one_of("none", CORRECTIONS)
    """weight the loss by π_old/μ, where μ is the rollout policy: truncated (tis), masked (mis) or icepop; none: no
    weights"""
    rollout_correction_level: str = one_of("token", LEVELS)
    """ratio per token, per sequence, or geometric mean over a sequence; also of the metrics without correction"""
    rollout_correction_cap: float = positive(2.0, when=CORRECTION)
    """largest importance ratio"""
    rollout_correction_floor: float | None = positive(None, when=ICEPOP)
    """icepop: smallest importance ratio"""
    rollout_correction_normalize: bool = flag(False, when=CORRECTION)
    """divide the weights by their mean over the step's tokens, or responses"""
    rollout_rejection: str | None = flag(
        None,
        parses(parse_bounds),
        "NAME=BOUND …, each name once: token, sum, mean or max,"
        " then -k1 with LOW:HIGH of the ratio, or -k2, -k3, -abs with a number above"
        " 0 (max has no k1)",
        several=True,
        when=TRAINED,
    )
    """leave tokens or responses whose π_old/μ is out of bounds out of the actor's loss: NAME=BOUND …, as mean-abs=0.1
    token-k1=0.5:2; a name is token, sum, mean or max (over the response) and k1, k2, k3 or abs"""

    @property
    def corrects_before_updates(self) -> bool:
        """Whether what is left of the step, or its weights, depends on π_old of all its tokens."""
        return self.rollout_correction_normalize or self.rollout_rejection is not None or self.old_logprobs != RECOMPUTE


def rules(run: FlagContext) -> Iterator[Broken]:
    """Rules of estimator, loss and KL, and of how the rollout's policy enters the loss."""
    yield from _advantage(run)
    yield from _comparisons(run)
    yield from _kl(run)
    yield from _correction(run)


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


def is_corrected(run: FlagContext) -> bool:
    """Whether the loss knows that another policy than the trained one generated."""
    s = run.settings
    return s.rollout_correction != "none" or s.old_logprobs != RECOMPUTE or run.policy_loss.reads_rollout


def _correction(run: FlagContext) -> Iterator[Broken]:
    s, other = run.settings, run.settings.old_logprobs != RECOMPUTE
    kind, level, floor = s.rollout_correction, s.rollout_correction_level, s.rollout_correction_floor
    if kind == "icepop" and floor is None:
        yield "--rollout-correction", "needs --rollout-correction-floor"
    if kind == "icepop" and level != "token":
        yield "--rollout-correction", f"masks single tokens; not allowed with --rollout-correction-level {level}"
    if kind == "tis" and level == "geometric":
        why = "truncates importance weights, and a geometric mean is none; allowed levels are token, sequence"
        yield "--rollout-correction", why
    if kind != "none" and run.policy_loss.reads_rollout:
        why = f"would weigh twice: --policy-loss {s.policy_loss} has the ratio to the rollout's policy already"
        yield "--rollout-correction", why
    if kind != "none" and other:
        why = f"weighs by π_old/μ, which --old-logprobs {s.old_logprobs} takes for 1; leave one of them out"
        yield "--rollout-correction", why
    if floor is not None and floor > s.rollout_correction_cap:
        yield "--rollout-correction-floor", f"allowed is at most --rollout-correction-cap {s.rollout_correction_cap}"
    if s.old_logprobs == INTERPOLATE and not s.has_stale_tokens:
        yield "--old-logprobs", "moves tokens of older policies; needs --generation-lag or --partial-rollouts"
    if other and s.policy_loss == "m2po":
        why = "leaves nothing to mask: --policy-loss m2po compares π_old with the rollout; allowed is recompute"
        yield "--old-logprobs", why
    if other and s.router_replay == "old-logprob":
        yield "--old-logprobs", "has no pass whose routes --router-replay old-logprob could replay; allowed is rollout"
    if s.rollout_rejection is not None and other:
        yield (
            "--rollout-rejection",
            "compares the rollout with the policy before the step; not allowed with --old-logprobs "
            f"{s.old_logprobs}, which does not compute its log-probs",
        )
