"""A server of the package OpenEnv with a guessing game: `python openenv_server.py` prints its port and serves."""

import random
import socket

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class GuessAction(Action):
    """A guess."""

    guess: int


class GuessObservation(Observation):
    """What the game says."""

    text: str


class Guess(Environment):
    """A number of 1 to 15, four guesses."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        """Draws the number."""
        self.number, self.left = random.Random(seed).randint(1, 15), 4
        return GuessObservation(text="Guess 1 to 15.")

    def step(self, action, timeout_s=None, **_):
        """Answers a guess."""
        if action.guess == 99:
            raise KeyError("boom")
        self.left -= 1
        if action.guess == self.number:
            return GuessObservation(text="right", reward=1.0, done=True)
        answer = "higher" if action.guess < self.number else "lower"
        return GuessObservation(text=answer, reward=0.0, done=self.left <= 0)

    @property
    def state(self):
        """Nothing."""
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Guess, GuessAction, GuessObservation, max_concurrent_envs=8)
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
