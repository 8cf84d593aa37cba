"""Generation whose clock is a seed: when weights arrive within a round does not depend on any machine's speed."""

import random

from tests.helpers.waiting import wait_until


def install(rank: int, seed: int | None):
    """From now on a poll finds the next weights, or does not, as the seed says; None: the clock decides, and polls are
    only more frequent. For a rank of the rollout."""
    from megarl.mcore.inference import engine
    from megarl.rollout.scheduled_rounds import ScheduledRounds

    engine.POLL_STEPS = 2
    if seed is None:
        return
    generator = random.Random(1000 * seed + rank)

    def may_take(rounds) -> bool:
        weights = rounds.weights
        is_chosen = rounds.role_groups.is_leader and weights.step < rounds._newest and generator.random() < 0.4
        return is_chosen and wait_until(weights.is_next_there)  # no rank that trains waits for this round

    ScheduledRounds._may_take = may_take
