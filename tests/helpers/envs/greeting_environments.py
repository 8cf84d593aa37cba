"""Environments that add to the first prompt, or fail to, for tests of its length."""

import os
import threading

from megarl.environments.protocol import BaseEnvironment, Observation, Task

HERE = "tests.helpers.envs.greeting_environments"
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks a word up in a dictionary.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}}}  # fmt: skip


class Greets(BaseEnvironment):
    """Says the same on every line."""

    def reset(self, task: Task) -> Observation:
        """A message."""
        return Observation([{"role": "user", "content": "Answer with one word. " * 3}])

    def step(self, turn) -> Observation:
        """Ends the episode."""
        return Observation(reward=1.0, done=True)


class Tells(BaseEnvironment):
    """Says what the line's metadata hold."""

    async def reset(self, task: Task) -> Observation:
        """A message."""
        return Observation([{"role": "user", "content": task.metadata["story"]}])


class Equips(Greets):
    """Has a tool from its reset on, as servers give them, and says something."""

    def __init__(self):
        self.tools = []

    def reset(self, task: Task) -> Observation:
        """Learns of the tool."""
        self.tools = [TOOL]
        return super().reset(task)


class Raises(BaseEnvironment):
    """Has nothing to say."""

    def reset(self, task: Task) -> Observation:
        """Raises."""
        raise ConnectionError("no game\nserver")


class Leaves(BaseEnvironment):
    """Ends its process."""

    def reset(self, task: Task) -> Observation:
        """Leaves."""
        os._exit(3)


class Hangs(BaseEnvironment):
    """Never says anything, and no signal of Python ends its thread."""

    def reset(self, task: Task) -> Observation:
        """Waits."""
        threading.Event().wait()
        return Observation()
