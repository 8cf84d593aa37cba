"""Flags of the groups that make a batch: filters, over-sampling, partial rollouts, pools of difficulty."""

import dataclasses
import math
from collections.abc import Iterator

from megarl.flags.algorithm import is_corrected
from megarl.flags.conditions import Broken, FlagContext, on
from megarl.flags.fields import flag, not_negative, one_of, parses, positive

MIN_WEIGHT = 0.01  # of a pool that is not left out, as a share of the largest

PARTIAL = on(lambda s: s.partial_rollouts, "needs --partial-rollouts")
RANGE = on(lambda s: s.group_filter == "range", "needs --group-filter range")
POOLS = on(lambda s: s.pool_bounds is not None, "needs --pool-bounds")
ROUNDS = on(lambda s: s.dynamic_sampling, "needs --dynamic-sampling")


def parse_bounds(text: str) -> tuple[float, float]:
    """`"0.1,0.9"` -> (0.1, 0.9). ValueError unless it is two finite numbers, the first below the second."""
    low, high = (float(item) for item in text.split(","))
    if not -math.inf < low < high < math.inf:
        raise ValueError(text)
    return low, high


def parse_shares(text: str) -> tuple[float, float]:
    """As `parse_bounds`, of numbers from 0 to 1."""
    low, high = parse_bounds(text)
    if low < 0 or high > 1:
        raise ValueError(text)
    return low, high


def parse_weights(text: str) -> tuple[float, float, float]:
    """`"0.5,1,0"` -> how often a prompt of each pool is drawn, as a share of the most frequent. ValueError."""
    hard, normal, easy = (float(item) for item in text.split(","))
    most = max(hard, normal, easy)
    if not 0 < most < math.inf or not all(n == 0 or n >= MIN_WEIGHT * most for n in (hard, normal, easy)) or not normal:
        raise ValueError(text)
    return hard / most, normal / most, easy / most


@dataclasses.dataclass(frozen=True)
class Selection:
    """Selection of groups for a batch."""

    group_filter: str = one_of("none", ("none", "reward", "correct", "range"))
    """drop groups whose rewards (reward) or verdicts (correct) are all equal, or whose mean reward is not inside
    --group-filter-range (range); none: keep all (2503.14476 §3.2)"""
    group_filter_range: str = flag("0,1", parses(parse_bounds), "two numbers, the first below the second", when=RANGE)
    """means of the rewards that --group-filter range keeps, LOW,HIGH, between the two"""
    over_sampling: float = flag(1.0, lambda v: 1 <= v < math.inf, "1 or more")
    """start this many times the prompts, keep the groups whose longest responses are shortest and stop the others; 1:
    none"""
    partial_rollouts: bool = flag(False)
    """continue the groups that over-sampling stopped in the next round (2501.12599 §2.6)"""
    max_staleness: int = not_negative(0, when=PARTIAL)
    """drop a stopped group whose oldest token is more than this many steps old; 0: no limit"""
    dynamic_sampling: bool = flag(False)
    """generate for further prompts until the batch is full after filtering (DAPO, 2503.14476 §3.2)"""
    max_sampling_rounds: int = positive(10, when=ROUNDS)
    """maximum sampling rounds per step; an incomplete batch then waits for the next step"""
    # Difficulty pools.
    pool_bounds: str | None = flag(None, parses(parse_shares), "two numbers from 0 to 1, the first below the second")
    """draw prompts by their difficulty, LOW,HIGH: a prompt is hard if at most the share LOW of its latest group was
    correct, easy if at least HIGH was; default: no pools"""
    pool_weights: str = flag(
        "0.5,1,0.25",
        parses(parse_weights),
        "three numbers with commas, NORMAL above 0, each 0 or at least a hundredth of the largest",
        when=POOLS,
    )
    """how often hard, normal and easy prompts are drawn, as HARD,NORMAL,EASY; 0 leaves a pool out"""
    pool_retire_after: int = not_negative(0, when=POOLS)
    """leave a prompt out for good after this many hard groups in a row; 0: never"""

    @property
    def scores_rounds(self) -> bool:
        """Whether all responses of a round are scored before the batch is full."""
        return self.group_filter != "none" or self.pool_bounds is not None


def rules(run: FlagContext) -> Iterator[Broken]:
    """Rules of filters, pools and partial rollouts."""
    s = run.settings
    filters, has_pools, is_alone = s.group_filter != "none", s.pool_bounds is not None, s.samples_per_prompt == 1
    counts = any(term.weight for term in run.terms)
    if filters and is_alone:
        yield "--group-filter", "needs --samples-per-prompt 2 or more: it compares the responses of a group"
    if s.group_filter in ("reward", "range") and not counts and run.program == "rl":
        yield "--group-filter", "no reward counts, so that all groups would be dropped"
    if s.dynamic_sampling and not filters:
        why = "needs --group-filter reward, correct or range: without a filter the batch is always full"
        yield "--dynamic-sampling", why
    if has_pools and is_alone:
        yield "--pool-bounds", "needs --samples-per-prompt 2 or more: a prompt is as difficult as its group says"
    if has_pools and not run.terms:
        yield "--pool-bounds", "needs a --reward that says which responses are correct"
    if has_pools and s.debug_train_only:
        yield "--pool-bounds", "not allowed with --debug-train-only, whose prompts are those of --load-rollouts"
    if s.partial_rollouts and s.over_sampling == 1:
        yield "--partial-rollouts", "needs --over-sampling above 1: otherwise every group of a round is finished"
    if s.partial_rollouts and not is_corrected(run):
        yield (
            "--partial-rollouts",
            "needs a --rollout-correction, an --old-logprobs of the rollout or a --policy-loss that reads "
            "them: older policies than the trained one generated parts of a response",
        )
    if 0 < s.max_staleness < s.generation_lag:
        why = f"allowed is 0, or at least --generation-lag {s.generation_lag}: all responses are that many updates old"
        yield "--max-staleness", why
