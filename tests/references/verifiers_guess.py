"""A taskset and an environment for the package verifiers: a number of 0 to 4 is guessed."""

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    """A number to guess."""

    number: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    """Two rewards with weights, and a way to end."""

    @vf.reward(weight=2.0)
    async def right(self, task, trace: vf.Trace) -> float:
        """Whether the last reply is the number."""
        return float(trace.last_reply == str(task.number))

    @vf.reward
    async def short(self, trace: vf.Trace) -> float:
        """Half a point for at most two turns."""
        return 0.5 * (trace.num_turns <= 2)

    @vf.stop
    async def gives_up(self, trace: vf.Trace) -> bool:
        """Whether the agent says enough."""
        return trace.last_reply == "enough"


class GuessSet(vf.Taskset[GuessTask, vf.TasksetConfig]):
    """A task for each number."""

    def load(self):
        """Yields them."""
        for number in range(5):
            yield GuessTask(
                GuessData(prompt="Guess 0 to 4.", system_prompt="Be brief.", number=number), self.config.task
            )


class GuessEnvConfig(vf.EnvConfig):
    """One agent."""

    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    """Says higher or lower until the number is found."""

    async def run(self, task, agents):
        """One episode."""
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply != str(task.data.number):
                if segment.last_reply == "crash":
                    raise KeyError("broken")
                answer = "higher" if segment.last_reply < str(task.data.number) else "lower"
                segment = await interaction.turn(answer)

    async def finalize(self, task, episode):
        """Another reward: of the whole transcript."""
        (trace,) = episode.traces
        expected = f"[system]\nBe brief.\n\n[user]\nGuess 0 to 4.\n\n[assistant]\n{trace.assistant_messages[0].content}"
        trace.record_reward("transcript", float(trace.transcript.startswith(expected)), 0.25)


__all__ = ["GuessEnv", "GuessSet"]
