"""Single-player games of the package TextArena."""

# ruff: noqa: NPY002  # the games draw from numpy's legacy generator

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy

from megarl.environments.adapters import optional
from megarl.environments.protocol import BaseEnvironment, Observation, Task, Turn, user_message

_turn = threading.Lock()  # the global generators belong to one game at a time


class TextArenaEnvironment(BaseEnvironment):
    """A single-player game: `game` is its id, such as `GuessTheNumber-v0`; `options` go to `textarena.make`.

    The game's own prompt is added to the task's, then what the game says after each turn. The reward, at the end, is
    the game's. An invalid move is answered, and a second one in a row ends most games. UsageError without TextArena.

    TextArena's games draw from the global generators of `random` and numpy. Each episode has states of its own, which
    are in force only while its game runs, one game at a time in a process.
    """

    def __init__(self, game: str, **options: Any):
        self._textarena = optional("textarena", "textarena>=0.7,<0.8", f"the game {game}")
        self._game, self._options = game, options
        self._env: Any = None
        self._states: tuple[Any, Any] = (None, None)

    def reset(self, task: Task) -> Observation:
        """Starts the game with the task's seed."""
        with self._own_random(task.seed):
            self._env = self._textarena.make(self._game, **self._options)
            self._env.reset(num_players=1, seed=task.seed)
            return Observation(self._news())

    def step(self, turn: Turn) -> Observation:
        """Plays the turn's text."""
        with self._own_random():
            done, _ = self._env.step(turn.content)
            if not done:
                return Observation(self._news())
            rewards, _ = self._env.close()
        return Observation(reward=float((rewards or {}).get(0, 0.0)), done=True)

    def _news(self) -> list[dict[str, Any]]:
        """What the game has said since the last turn, without the wrappers that repeat all that was said before."""
        game = self._env
        while isinstance(game, self._textarena.Wrapper):
            game = game.env
        _, said = game.get_observation()
        own = self._textarena.ObservationType.PLAYER_ACTION
        texts = [text.strip() for _, text, kind in said if kind != own and text.strip()]
        return [user_message("\n".join(texts) or "(the game says nothing)")]

    @contextmanager
    def _own_random(self, seed: int | None = None) -> Iterator[None]:
        """The episode's generators in force, seeded by `seed` or as they were left; the process's ones afterwards."""
        with _turn:
            before = random.getstate(), numpy.random.get_state()
            try:
                if seed is not None:
                    random.seed(seed)
                    numpy.random.seed(seed & 0xFFFFFFFF)
                else:
                    random.setstate(self._states[0])
                    numpy.random.set_state(self._states[1])
                yield
                self._states = random.getstate(), numpy.random.get_state()
            finally:
                random.setstate(before[0])
                numpy.random.set_state(before[1])
