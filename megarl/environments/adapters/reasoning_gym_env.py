"""Tasks of reasoning-gym with feedback: a wrong answer may be tried again."""

from megarl.environments.protocol import BaseEnvironment, Observation, Task, Turn, user_message
from megarl.rewards.base import Sample
from megarl.rewards.tasks import reasoning_gym, source_dataset


class ReasoningGymEnvironment(BaseEnvironment):
    """A task of reasoning-gym, as tools/make_prompts.py writes them, with up to `tries` answers.

    The metadata's `source_dataset` names the task, whose own scorer scores each turn in a confined process within
    `seconds`. An answer with the full score ends the episode, and so does the last try; the reward is the score of
    that turn. The metadata may give another number of `tries`.
    """

    def __init__(self, tries: int = 3, seconds: float = 10.0):
        self._tries, self._verify = tries, reasoning_gym(seconds)
        self._task, self._left = Task([]), 0

    def reset(self, task: Task) -> Observation:
        """Adds nothing to the prompt. ValueError if the task is none of reasoning-gym."""
        source_dataset(task.metadata)
        tries = task.metadata.get("tries", self._tries)
        if not isinstance(tries, int) or isinstance(tries, bool) or tries < 1:
            raise ValueError(f"metadata: tries must be a whole number of at least 1, not {tries!r}")
        self._task, self._left = task, tries
        return Observation()

    def step(self, turn: Turn) -> Observation:
        """Scores an answer."""
        question = self._task.messages[-1]["content"] if self._task.messages else ""
        sample = Sample(question, turn.content, answer=self._task.answer, metadata=self._task.metadata)
        score = self._verify(sample)
        self._left -= 1
        if score.correct or self._left == 0:
            return Observation(reward=score.reward, done=True, correct=score.correct)
        tries = f"{self._left} tries are" if self._left > 1 else "One try is"
        return Observation([user_message(f"That is wrong. {tries} left.")], correct=False)
