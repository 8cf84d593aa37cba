"""Plays sessions with an agent of verifiers: `verifiers_driver.py URL OUT game`, until the run has ended.

Its harness is a program of its own behind verifiers' proxy; the task is its prompt, and two messages of a user follow.
"""

import asyncio
import os
import sys

import verifiers.v1 as vf
from session_loop import play_all


class Sum(vf.Task):
    """A sum, whose result is in the data of the task."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Whether the last answer has the result."""
        return float(self.data.answer in (trace.last_reply or ""))


class SumData(vf.TaskData):
    """The data of a sum."""

    answer: str


async def play(address: str, session: dict) -> dict | None:
    """Plays a session; returns its reward, None if it has failed."""
    variable = f"KEY_{session['id']}"
    os.environ[variable] = session["key"]
    agent = vf.Agent(
        vf.AgentConfig(
            harness={"id": "null"}, runtime=vf.SubprocessConfig(), model="policy", max_turns=3,
            client=vf.EvalClientConfig(base_url=address, api_key_var=variable),
        )
    )  # fmt: skip
    task = session["task"]
    data = SumData(idx=0, prompt=task["messages"][-1]["content"], answer=task["answer"])
    async with agent.interaction(Sum(data)) as interaction:
        for message in (None, "and?", "so?"):
            await interaction.turn(message)
    return None if interaction.trace.errors else {"reward": interaction.trace.reward}


if __name__ == "__main__":
    asyncio.run(play_all(sys.argv[1], sys.argv[2], play))
