"""Flags of the gap between the policy that generated and the one that is trained: old log-probs, weights, rejection."""

import dataclasses
from collections.abc import Iterator

from megarl.algorithms.rollout_correction import CORRECTIONS, LEVELS, parse_bounds
from megarl.flags.conditions import TRAINED, Broken, FlagContext, on
from megarl.flags.fields import flag, one_of, parses, positive

RECOMPUTE, ROLLOUT, INTERPOLATE = OLD_LOGPROBS = ("recompute", "rollout", "interpolate")

CORRECTION = on(lambda s: s.rollout_correction != "none", "--rollout-correction is none")
ICEPOP = on(lambda s: s.rollout_correction == "icepop", "needs --rollout-correction icepop")


@dataclasses.dataclass(frozen=True)
class Correction:
    """Correction of the gap between rollout and training."""

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


def is_corrected(run: FlagContext) -> bool:
    """Whether the loss knows that another policy than the trained one generated."""
    s = run.settings
    return s.rollout_correction != "none" or s.old_logprobs != RECOMPUTE or run.policy_loss.reads_rollout


def rules(run: FlagContext) -> Iterator[Broken]:
    """Rules of how the rollout's policy enters the loss."""
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
