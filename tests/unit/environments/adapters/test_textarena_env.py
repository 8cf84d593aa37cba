"""TextArena's games with the real package, which the test extra does not install: it would bring 33 others."""

# ruff: noqa: NPY002  # the games draw from numpy's legacy generator

import random
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest

from megarl.environments.adapters.textarena_env import TextArenaEnvironment
from megarl.environments.protocol import Task
from tests.helpers.envs.played_environments import check_replay, play, said, written

GUESS, BANDIT, MINES = "GuessTheNumber-v0", "Bandit-v0", "Minesweeper-v0"


@pytest.fixture
def textarena():
    return pytest.importorskip("textarena")


def halving(seed):
    """Texts of an episode of the guessing game that follows the answers; the observations."""
    environment, low, high, texts, observations = TextArenaEnvironment(GUESS), 1, 20, [], []
    environment.reset(Task([], seed=seed))
    while not (observations and observations[-1].done):
        guess = (low + high) // 2
        texts.append(f"[{guess}]")
        observations.append(environment.step(written(texts[-1])[0]))
        low, high = (guess + 1, high) if "higher" in said(observations)[-1] else (low, guess - 1)
    return texts, observations


def test_a_game_is_played_to_its_end(textarena):
    first, _ = play(TextArenaEnvironment(GUESS), Task([], seed=4), [])
    assert first.messages[0]["role"] == "user" and "between 1 and 20" in said([first])[0]
    texts, observations = halving(4)
    assert observations[-1].reward == 1.0 and len(texts) <= 5
    # Nothing that was said before is said again, and the policy's own words are not repeated to it.
    assert set(said(observations[:-1])) <= {"The target number is higher.", "The target number is lower."}
    _, observations = play(TextArenaEnvironment(GUESS), Task([], seed=4), written("five", "[99]"))
    assert "invalid move" in said(observations)[0] and observations[1].done and observations[1].reward == 0.0


def test_the_same_seed_is_the_same_game(textarena):
    for game in (GUESS, BANDIT, MINES, "Mastermind-v0", "FrozenLake-v0", "TowerOfHanoi-v0"):
        turns = written("[1]", "[2 2]", "x")
        runs = [play(TextArenaEnvironment(game), Task([], seed=2**63 - 1), turns) for _ in range(2)]
        assert runs[0] == runs[1], game
    lengths = {len(halving(seed)[0]) for seed in range(12)}
    assert len(lengths) > 1, "the seeds have drawn the same number"


def test_the_processs_generators_are_left_alone(textarena):
    random.seed(1)
    numpy.random.seed(2)
    before = random.getstate(), numpy.random.get_state()[1].tolist()
    with pytest.raises(ValueError):
        TextArenaEnvironment("no such game").reset(Task([]))
    play(TextArenaEnvironment(MINES), Task([], seed=3), written("[1 1]", "[2 2]"))
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before


def test_episodes_at_the_same_time_do_not_disturb_each_other(textarena):
    """A game that draws in each step: alone, in turns with others, and in threads."""
    turns = written(*["[red]", "[blue]", "[green]", "[yellow]"] * 4)
    names = {seed: play(TextArenaEnvironment(BANDIT), Task([], seed=seed), []) for seed in range(8)}
    alone = {seed: play(TextArenaEnvironment(BANDIT), Task([], seed=seed), turns)[1] for seed in range(8)}
    assert len({str(said(observations)) for observations in alone.values()}) > 1, "nothing was drawn"
    games = {seed: TextArenaEnvironment(BANDIT) for seed in range(8)}
    assert {seed: (game.reset(Task([], seed=seed)), []) for seed, game in games.items()} == names
    found = {seed: [] for seed in games}
    for turn in turns:
        for seed, game in games.items():
            found[seed].append(game.step(turn))
    assert found == alone
    with ThreadPoolExecutor(8) as threads:
        played = threads.map(lambda seed: play(TextArenaEnvironment(BANDIT), Task([], seed=seed), turns)[1], alone)
        assert dict(zip(alone, played, strict=True)) == alone


def test_restored_at_each_turn(textarena):
    texts, _ = halving(4)
    check_replay(lambda: TextArenaEnvironment(GUESS), Task([], seed=4), written("x", *texts))
    check_replay(lambda: TextArenaEnvironment(BANDIT), Task([], seed=4), written("[red]", "[blue]", "[red]"))
