"""Gymnasium's environments as text and as images, with the real package; FrozenLake against value iteration."""

import asyncio
import json
import re

import gymnasium
import numpy as np
import pytest

from megarl.data.images.decoding import decode
from megarl.environments.adapters.gymnasium_env import FrozenLake, GymnasiumEnvironment, observation_text
from megarl.environments.protocol import Task, seen_of
from tests.helpers.envs.played_environments import check_replay, play, said, written
from tests.references.value_iteration import optimal_values

DISCOUNT = 0.9
HARD = ["SHFF", "FHFH", "FFFH", "HHFG"]  # one way


class Echo(gymnasium.Env):
    """Repeats what was written; the third turn is the last, `stop` ends sooner."""

    observation_space = gymnasium.spaces.Text(100)
    action_space = gymnasium.spaces.Text(10, charset="abcdeopst ")

    def __init__(self, reward=0.25):
        self.reward, self.turns, self.closed = reward, 0, False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turns = 0
        return f"begin {self.np_random.integers(1000)}", {}

    def step(self, action):
        self.turns += 1
        return f"heard {action}", self.reward, action == "stop", self.turns == 3, {}

    def close(self):
        self.closed = True


def shortest(environment, task):
    """(rewards, positions) of an episode whose policy follows value iteration."""
    text = said([environment.reset(task)])[0]
    actions = optimal_values(environment.env, DISCOUNT)[1]
    rewards, positions = [], [text]
    for number in range(100):
        row, column = map(int, re.fullmatch(r"row (\d+), column (\d+)", text).groups())
        word = FrozenLake.WORDS[min(actions[4 * row + column])]
        observation = environment.step(written(*[""] * number, f"I go {word}.")[number])
        rewards.append(observation.reward)
        if observation.done:
            return rewards, positions
        positions.append(text := said([observation])[0])
    raise AssertionError("the policy goes round in circles")


def test_the_best_policy_reaches_the_goal_on_the_shortest_way():
    rewards, positions = shortest(FrozenLake(), Task([]))
    assert rewards == [0.0] * 5 + [1.0] and positions[0] == "row 0, column 0"
    environment = FrozenLake()
    environment.reset(Task([]))
    values, _ = optimal_values(environment.env, DISCOUNT)
    assert values[0] == pytest.approx(DISCOUNT**5, abs=1e-15), "the reference itself: five steps before the last"
    rewards, positions = shortest(FrozenLake(), Task([], metadata={"map": HARD}))
    assert rewards == [0.0] * 5 + [1.0] and positions[3] == "row 2, column 1"


def test_holes_invalid_actions_and_words():
    texts = ["DOWN", "what?", "upright, leftover", "down and then right", "Right", ""]
    _, observations = play(FrozenLake(), Task([]), written(*texts))
    no_action = "No action: allowed are left, down, right, up"
    assert said(observations) == ["row 1, column 0", no_action, no_action, "row 2, column 0", "row 2, column 1",
                                  no_action]  # fmt: skip
    _, observations = play(FrozenLake(), Task([]), written("down", "right", "never read"))
    assert [(o.reward, o.done, o.messages) for o in observations[1:]] == [(0.0, True, [])]


@pytest.mark.parametrize("rows", ["SG", [], [1], ["SF", "F"], ["SX", "FG"], ["FF", "FG"], ["SS", "FG"], [""], [[]]])
def test_wrong_maps(rows):
    with pytest.raises(ValueError, match="metadata: map must"):
        FrozenLake().reset(Task([], metadata={"map": rows}))


def test_text_spaces_and_functions_that_make_environments():
    def make(**options):
        return GymnasiumEnvironment(Echo, **options)

    first, observations = play(
        make(reward=0.5), Task([], seed=2**40 + 1), written("abc", "XYZ", "too many letters", "stop")
    )
    assert re.fullmatch(r"begin \d+", said([first])[0])
    assert said(observations)[0] == "heard abc" and all("No action" in text for text in said(observations)[1:3])
    assert [(o.reward, o.done) for o in observations] == [(0.5, False), (0.0, False), (0.0, False), (0.5, True)]
    _, observations = play(make(), Task([]), written(*"abcde"))
    assert [(o.reward, o.done) for o in observations] == [(0.25, False), (0.25, False), (0.25, True)]
    environment = make()
    environment.close()  # before the reset, as of an episode that failed
    environment.reset(Task([]))
    environment.close()
    assert environment.env.closed


def test_numbers_as_actions_and_arrays_as_observations():
    def make():
        return GymnasiumEnvironment("CartPole-v1")

    turns = written("1", "push 0", "7", "-1", "none", *["1"] * 40)
    first, observations = play(make(), Task([], seed=5), turns)
    direct = gymnasium.make("CartPole-v1")
    state, _ = direct.reset(seed=5)
    expected = [state.tolist(), *(direct.step(action)[0].tolist() for action in (1, 0))]
    assert [json.loads(text) for text in said([first, *observations[:2]])] == expected
    assert set(said(observations[2:5])) == {"No action: allowed are the numbers 0 to 1"}
    assert observations[-1].done and len(observations) < 40
    assert play(make(), Task([], seed=6), turns)[0] != first == play(make(), Task([], seed=5), turns)[0]
    check_replay(make, Task([], seed=5), turns)


def test_own_parsers_and_spaces_without_one():
    def make(**options):
        return GymnasiumEnvironment("Pendulum-v1", **options)

    with pytest.raises(TypeError, match="needs parse_action"):
        play(make(), Task([]), written("1"))
    environment = make(parse_action=lambda text: [float(text)], render_text=lambda state: f"{state[0]:.3f}")
    _, observations = play(environment, Task([], seed=1), written("0.5", "much"))
    assert re.fullmatch(r"-?\d\.\d{3}", said(observations)[0]) and "could not convert" in said(observations)[1]


def test_observations_as_text():
    space = gymnasium.spaces.Dict(
        {"a": gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(3)]), "b": gymnasium.spaces.MultiBinary(2)}
    )
    shown = json.loads(observation_text(space.sample()))
    assert len(shown["a"]) == 1 and shown["a"][0] in range(3) and len(shown["b"]) == 2
    assert observation_text("ü\n") == "ü\n"


def test_restored_at_each_turn():
    check_replay(FrozenLake, Task([], seed=9), written("down", "x", "down", "right", "down", "right", "right"))
    check_replay(lambda: GymnasiumEnvironment(Echo), Task([], seed=9), written("a", "b", "stop"))


class Painted(Echo):
    """Renders the number of the turn, and who made it."""

    def __init__(self, render_mode):
        super().__init__()
        self.render_mode = render_mode

    def render(self):
        assert self.render_mode == "rgb_array"
        return np.full((40, 64, 3), 10 * self.turns, np.uint8)


def test_what_is_rendered_is_shown():
    turns = written("a", "b")
    first, observations = play(GymnasiumEnvironment(Painted, shows_images=True), Task([]), turns)
    for number, observation in enumerate([first, *observations]):
        (message,), images = observation.messages, asyncio.run(seen_of(observation))[1]
        assert [part["type"] for part in message["content"]] == ["image"]
        assert [decode(data).getpixel((0, 0)) for data in images.values()] == [(10 * number,) * 3]
    environment = GymnasiumEnvironment(Painted, shows_images=True, render_text=lambda text: text.upper())
    parts = play(environment, Task([]), turns)[1][0].messages[0]["content"]
    assert parts[0]["image"].size == (64, 40) and parts[1] == {"type": "text", "text": "HEARD A"}
