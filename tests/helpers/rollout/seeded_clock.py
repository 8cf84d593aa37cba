"""Generation whose clock is a seed: when weights arrive within a round does not depend on any machine's speed."""

import random

from tests.helpers.waiting import wait_until

NEVER = 1000


def install(rank: int, seed: int | None):
    """From now on the seed says at which look of a replica, of those in a round with the same weights, the next ones
    are there; None: the clock decides, and looks are only more frequent; NEVER: at none, so that weights are as old as
    they may be. For a rank of the rollout."""
    from megarl.mcore.inference import engine
    from megarl.rollout.schedule import ScheduledRounds

    engine.POLL_STEPS = 1
    if seed is None:
        return
    looks: dict[tuple, int] = {}

    def may_take(rounds) -> bool:
        if seed == NEVER or not rounds.role_groups.is_leader or rounds.step >= rounds._newest:
            return False
        place = (*rounds._round, rounds.step)
        looks[place] = looks.get(place, 0) + 1
        found_at = random.Random(f"{seed} {rank} {place}").choice([1, 3, 3, 4, NEVER])
        return looks[place] >= found_at and wait_until(
            rounds.sync.is_next_there
        )  # no trained rank waits for this round

    ScheduledRounds._may_take = may_take
