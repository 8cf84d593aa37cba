"""guess-number and its control: answers, rewards, ends, and what a policy can reach in each."""

import random

import pytest

from megarl.environments.games import GuessNumber, guess_number_blind
from megarl.environments.protocol import Task
from tests.helpers.envs.played_environments import check_replay, play, said, written


def secret(task):
    """The number of a task, found by asking for each."""
    low, high = task.metadata.get("low", 1), task.metadata.get("high", 15)
    game, found = GuessNumber(), []
    for number, turn in enumerate(written(*map(str, range(low, high + 1))), start=low):
        game.reset(task)
        found += [number] if game.step(turn).reward == 1.0 else []
    (number,) = found
    return number


def bisect(environment, task, trusting=True):
    """The rewards of a policy that halves the range by the answers; without trust it guesses 1, 2, 3, ..."""
    low, high = task.metadata.get("low", 1), task.metadata.get("high", 15)
    environment.reset(task)
    rewards = []
    for number in range(20):
        guess = (low + high) // 2 if trusting else number + 1
        observation = environment.step(written(str(guess))[0])
        rewards.append(observation.reward)
        if observation.done:
            return rewards
        low, high = (guess + 1, high) if said([observation]) == ["higher"] else (low, guess - 1)
    raise AssertionError("the episode does not end")


def test_answers_rewards_and_end():
    task = Task([], seed=3)
    number = secret(task)
    assert 1 < number < 15
    below, above = str(number - 1), f"is it {number + 1}? or {number}"
    first, observations = play(GuessNumber(), task, written(below, above, above, str(number), "never read"))
    assert first.messages == [] and said(observations) == ["higher", "lower", "lower", ""]
    assert [(o.reward, o.done, o.correct) for o in observations] == [(0.0, False, False)] * 3 + [(1.0, True, True)]
    _, observations = play(GuessNumber(), task, written(*[below] * 9))
    assert len(observations) == 4 and (observations[-1].reward, observations[-1].correct) == (0.0, False)


def test_each_number_is_drawn_and_halving_finds_it_in_four_turns():
    tasks = [Task([], seed=seed) for seed in range(100)]
    assert {secret(task) for task in tasks} == set(range(1, 16))
    assert all(sum(bisect(GuessNumber(), task)) == 1.0 for task in tasks)


def test_without_answers_no_policy_finds_more_than_four_of_fifteen():
    """Constant answers: what a policy sees depends on the number only by the episode's end."""
    tasks = {}
    for seed in range(100):
        tasks.setdefault(secret(Task([], seed=seed)), Task([], seed=seed))
    for trusting in (True, False):
        solved = sum(sum(bisect(guess_number_blind(), task, trusting)) for task in tasks.values())
        assert len(tasks) == 15 and solved <= 4
    answers = set()
    for number, task in tasks.items():
        for turn in written(*(str(guess) for guess in range(1, 16) if guess != number)):
            game = guess_number_blind()
            game.reset(task)
            answers.update(said([game.step(turn)]))
    assert answers == {"wrong"}


def test_range_and_guesses_of_the_metadata():
    task = Task([], metadata={"low": 100, "high": 131, "guesses": 5}, seed=7)
    assert 100 <= secret(task) <= 131
    rewards = bisect(GuessNumber(), task)
    assert len(rewards) <= 5
    wrong = "100" if secret(task) > 100 else "131"
    assert len(play(GuessNumber(), task, written(*[wrong] * 6))[1]) == 5


@pytest.mark.parametrize("text", ["", "-", "9" * 5000, "９", "\ud800", "1" * 19, "½", "\0", "0", "16", "108"])
@pytest.mark.parametrize("make", [GuessNumber, guess_number_blind])
def test_what_is_no_number_of_the_range_ends_the_episode(text, make):
    task = Task([], seed=1)
    (observation,) = play(make(), task, written(text, str(secret(task))))[1]
    assert (observation.messages, observation.reward, observation.done) == ([], 0.0, True)


@pytest.mark.parametrize("metadata", [{"low": 5, "high": 4}, {"guesses": 0}, {"low": "1"}, {"high": True}, {"low": -1}])
def test_wrong_metadata(metadata):
    with pytest.raises(ValueError, match="metadata: "):
        GuessNumber().reset(Task([], metadata=metadata))


def test_restored_at_each_turn_and_no_global_generator_is_touched():
    random.seed(11)
    state = random.getstate()
    for make in (GuessNumber, guess_number_blind):
        check_replay(make, Task([], seed=2**63 - 5), written("0", "x", "16", "0"))
    assert random.getstate() == state
