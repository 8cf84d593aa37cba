"""Episodes of environments that are played directly, without a policy or workers."""

import asyncio

from megarl.environments.protocol import Task, ToolCall, Turn, resolved


def written(*texts: str) -> list[Turn]:
    """Turns with these texts, without tool calls."""
    return [Turn(number, text, text) for number, text in enumerate(texts)]


def calling(number: int, name: str, **arguments) -> Turn:
    """A turn that calls one tool."""
    return Turn(number, "", "", calls=(ToolCall(f"call_{number}_0", name, arguments),))


def play(environment, task: Task, turns: list[Turn]):
    """(observation of reset, those of the turns up to the end of the episode); the environment stays open."""

    async def episode():
        first = await resolved(environment.reset(task))
        observations = []
        for turn in turns:
            observations.append(await resolved(environment.step(turn)))
            if observations[-1].done:
                break
        return first, observations

    return asyncio.run(episode())


def check_replay(make, task: Task, turns: list[Turn]):
    """At each turn a new environment that is restored goes on as the first one did."""
    _, before = play(make(), task, turns)
    for played in range(len(before)):

        async def go_on(environment, played=played):
            await resolved(environment.restore(task, turns[:played], before[:played]))
            rest = [await resolved(environment.step(turn)) for turn in turns[played : len(before)]]
            await resolved(environment.close())
            return rest

        assert asyncio.run(go_on(make())) == before[played:], f"restored after {played} turns"


def said(observations) -> list[str]:
    """The texts of observations."""
    return ["".join(message["content"] for message in observation.messages) for observation in observations]
