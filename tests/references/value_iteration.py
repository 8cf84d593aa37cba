"""Value iteration on gymnasium's tables of transitions: the best that a policy can do."""

import gymnasium
import numpy


def optimal_values(env: gymnasium.Env, discount: float) -> tuple[numpy.ndarray, list[set[int]]]:
    """(values of the states, the best actions of each state) of an environment with a table `P` of transitions.

    Deterministic or not; exact up to the rounding of doubles, because the sweeps go on until nothing changes.
    """
    table = env.unwrapped.P
    states, actions = len(table), len(table[0])
    values = numpy.zeros(states)
    while True:
        returns = numpy.array([
            [sum(chance * (reward + discount * values[after] * (not done))
                 for chance, after, reward, done in table[state][action])
             for action in range(actions)] for state in range(states)
        ])  # fmt: skip
        if (returns.max(1) == values).all():
            return values, [set(numpy.flatnonzero(row == row.max()).tolist()) for row in returns]
        values = returns.max(1)
