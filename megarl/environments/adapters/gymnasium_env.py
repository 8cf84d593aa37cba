"""Environments of the package gymnasium, played in text or in images."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from megarl.environments.adapters import optional
from megarl.environments.protocol import BaseEnvironment, Message, Observation, Task, Turn, user_message

_SEEDS = 0x7FFFFFFF  # gymnasium takes seeds of 31 bits
_INTEGER = re.compile(r"-?[0-9]{1,9}")


class GymnasiumEnvironment(BaseEnvironment):
    """An environment of gymnasium: `env` is its id, with options as keywords, or a function that makes it.

    `actions` are the words for the actions of a `Discrete` space, in its order; without them, an action is its number.
    The first word (or number) of a turn is its action; in a `Text` space it is the whole turn. `parse_action` makes an
    action of a text instead and raises ValueError if it cannot. A turn without an action is answered with the actions
    that there are. `render_text` makes a text of an observation; the first one is added to the prompt. With
    `shows_images` a message is what the environment renders in its mode rgb_array, and the text of `render_text` if
    that is given.

    The environment must be a function of its seed and the actions, as gymnasium demands; otherwise set `replayable` to
    False in a subclass. UsageError without gymnasium.
    """

    def __init__(
        self,
        env: str | Callable[..., Any],
        actions: Sequence[str] | None = None,
        parse_action: Callable[[str], Any] | None = None,
        render_text: Callable[[Any], str] | None = None,
        shows_images: bool = False,
        **options: Any,
    ):
        self._gymnasium = optional("gymnasium", "gymnasium>=1.1,<2", "a GymnasiumEnvironment")
        self._make, self._actions, self._options = env, list(actions or ()), options
        self._parse, self._shows_images = parse_action or self._action, shows_images
        self._render = render_text or (None if shows_images else observation_text)
        if shows_images:
            self._options = {"render_mode": "rgb_array"} | self._options
        self.env: Any = None

    def reset(self, task: Task) -> Observation:
        """Makes the environment and gives it the task's seed."""
        options = {**self._options, **self.options(task)}
        self.env = self._gymnasium.make(self._make, **options) if isinstance(self._make, str) else self._make(**options)
        observation, _ = self.env.reset(seed=task.seed & _SEEDS)
        return Observation([self._message(observation)])

    def options(self, task: Task) -> dict[str, Any]:
        """Further options of the environment of a task: none."""
        return {}

    def step(self, turn: Turn) -> Observation:
        """Takes the turn's action."""
        try:
            action = self._parse(turn.content)
        except ValueError as error:
            return Observation([user_message(f"No action: {error}")])
        observation, reward, terminated, truncated, _ = self.env.step(action)
        done = bool(terminated or truncated)
        return Observation([] if done else [self._message(observation)], float(reward), done)

    def _message(self, observation: Any) -> Message:
        text = None if self._render is None else self._render(observation)
        if not self._shows_images:
            return user_message(text or "")
        from PIL import Image

        parts: list[dict[str, Any]] = [{"type": "image", "image": Image.fromarray(self.env.render())}]
        return {"role": "user", "content": parts + ([] if text is None else [{"type": "text", "text": text}])}

    def close(self) -> None:
        if self.env is not None:
            self.env.close()

    def _action(self, text: str) -> Any:
        """The action that a text names; ValueError, for the policy, if it names none."""
        space, spaces = self.env.action_space, self._gymnasium.spaces
        if isinstance(space, spaces.Text):
            if not space.contains(text):
                raise ValueError(
                    f"allowed are {space.min_length} to {space.max_length} of the characters {space.characters}"
                )
            return text
        if not isinstance(space, spaces.Discrete):
            raise TypeError(f"a GymnasiumEnvironment with actions in {space} needs parse_action")
        if self._actions:
            words = "|".join(map(re.escape, self._actions))
            found = re.search(rf"(?<!\w)(?:{words})(?!\w)", text, re.IGNORECASE)
            if found is None:
                raise ValueError(f"allowed are {', '.join(self._actions)}")
            return int(space.start) + [word.lower() for word in self._actions].index(found[0].lower())
        first, last = int(space.start), int(space.start + space.n - 1)
        number = _INTEGER.search(text)
        if number is None or not first <= int(number[0]) <= last:
            raise ValueError(f"allowed are the numbers {first} to {last}")
        return int(number[0])


class FrozenLake(GymnasiumEnvironment):
    """gymnasium's 4x4 FrozenLake without slipping: `left`, `down`, `right`, `up`, from S to G without falling in an H.

    The task's metadata may give another `map`, a list of rows. Observations are the position; the reward is 1 at G.
    """

    WORDS = ("left", "down", "right", "up")

    def __init__(self):
        super().__init__("FrozenLake-v1", self.WORDS, render_text=self._position, is_slippery=False)

    def options(self, task: Task) -> dict[str, Any]:
        """The map."""
        rows = task.metadata.get("map")
        return {"map_name": "4x4"} if rows is None else {"desc": _checked_map(rows)}

    def _position(self, state: int) -> str:
        row, column = divmod(int(state), self.env.unwrapped.ncol)
        return f"row {row}, column {column}"


def observation_text(observation: Any) -> str:
    """An observation as text: a string as it is, all else as JSON, with arrays as lists."""
    return observation if isinstance(observation, str) else json.dumps(_plain(observation), ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _checked_map(rows: Any) -> list[str]:
    """The rows of a map; ValueError unless they form a rectangle with a start and a goal."""
    if not isinstance(rows, list) or not rows or not all(isinstance(row, str) and row for row in rows):
        raise ValueError("metadata: map must be a list of rows of the letters S, F, H and G")
    letters = "".join(rows)
    if {len(row) for row in rows} != {len(rows[0])} or set(letters) - set("SFHG") or letters.count("S") != 1:
        raise ValueError("metadata: map must have rows of the same length, of the letters F, H, G and one S")
    return rows
