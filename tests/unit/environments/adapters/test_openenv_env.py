"""OpenEnv over its websocket: against recorded frames, and against its own server where the package is installed."""

import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.environments.adapters.openenv_env import OpenEnvEnvironment, observation_text
from megarl.environments.protocol import Task, ToolCall, Turn
from megarl.errors import UsageError
from tests.helpers.envs.openenv_server import openenv_server
from tests.helpers.envs.played_environments import said, written

REAL = Path(__file__).parents[3] / "references" / "openenv_server.py"


@pytest.fixture(params=["recorded", "real"])
def address(request):
    """Of a server of the game, which the tests below cannot tell apart."""
    if request.param == "recorded":
        with openenv_server() as (url, _):
            yield url
        return
    if importlib.util.find_spec("openenv") is None:
        pytest.skip("the package openenv would bring 107 others")
    server = subprocess.Popen([sys.executable, str(REAL)], stdout=subprocess.PIPE, text=True)
    try:
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.kill()
        server.communicate()


def guess(text):
    return {"guess": int(text)}


async def episode(url, seed, *texts, **options):
    """(observation of the reset, those of the turns) of a whole session."""
    environment = OpenEnvEnvironment(url, guess, **options)
    first = await environment.reset(Task([], seed=seed))
    observations = []
    for turn in written(*texts):
        observations.append(await environment.step(turn))
    await environment.close()
    return first, observations


def test_a_game_is_played_to_its_end(address):
    first, observations = asyncio.run(episode(address, 3, "8", "x", "0", "0", "0"))
    assert said([first]) == ["Guess 1 to 15."]
    assert said(observations)[0] in ("higher", "lower") and said(observations)[1].startswith(
        "No action: invalid literal"
    )
    assert [(o.reward, o.done) for o in observations] == [(0.0, False)] * 4 + [(0.0, True)]
    numbers = [str(n) for n in range(1, 16) if asyncio.run(episode(address, 2**40, str(n)))[1][0].reward == 1.0]
    assert len(numbers) == 1, "the seed decides the number, on each connection the same"


def test_sessions_at_the_same_time_are_apart(address):
    async def together(seeds):
        return await asyncio.gather(*(episode(address, seed, *"81357"[:4]) for seed in seeds))

    seeds = [1, 2, 3, 1]
    alone = [asyncio.run(episode(address, seed, *"8135")) for seed in seeds]
    assert asyncio.run(together(seeds)) == alone and alone[0] == alone[3]


def test_what_the_server_refuses(address):
    async def refused():
        environment = OpenEnvEnvironment(address, lambda text: {"guess": 99} if text == "99" else {"guessed": text})
        await environment.reset(Task([]))
        observation = await environment.step(written("8")[0])
        assert said([observation])[0].startswith("No action: guess: Field required") and not observation.done
        with pytest.raises(RuntimeError, match="step: EXECUTION_ERROR: 'boom'"):
            await environment.step(written("99")[0])
        await environment.close()

    asyncio.run(refused())


def test_restored_at_each_turn(address):
    async def restored():
        turns = written("0", "15", "x")
        task = Task([], seed=5)
        _, before = await episode(address, 5, "0", "15", "x")
        environment = OpenEnvEnvironment(address, guess, replayable=True)
        assert environment.replayable and not OpenEnvEnvironment(address, guess).replayable
        await environment.restore(task, turns[:2], before[:2])
        assert await environment.step(turns[2]) == before[2]
        await environment.close()

    asyncio.run(restored())


def test_tools_are_listed_and_called():
    async def calls(url):
        environment = OpenEnvEnvironment(url)
        await environment.reset(Task([]))
        assert environment.tools[0]["function"]["name"] == "add" and environment.tools[0]["type"] == "function"
        two = (ToolCall("call_0_0", "add", {"a": 1, "b": -1}), ToolCall("call_0_1", "nope", {}))
        observation = await environment.step(Turn(0, "", "", calls=two, errors=("malformed JSON",)))
        assert [message["content"] for message in observation.messages] == [
            "0", "Error: Unknown tool: 'nope'", "Error: no tool call: malformed JSON",
        ]  # fmt: skip
        assert [m.get("tool_call_id") for m in observation.messages] == ["call_0_0", "call_0_1", None]
        assert not observation.done and (await environment.step(written("0")[0])).done
        await environment.close()

    with openenv_server() as (url, _):
        asyncio.run(calls(url))


def test_sessions_are_ended():
    async def end(url):
        opened, never = OpenEnvEnvironment(url, guess), OpenEnvEnvironment(url, guess)
        await opened.reset(Task([]))
        await opened.close()
        await opened.close()  # a second time, and without a connection, changes nothing
        await never.close()

    with openenv_server() as (url, closed):
        asyncio.run(end(url))
    assert closed == [True]


@pytest.mark.long
def test_a_server_that_is_gone_is_a_failure_of_the_environment():
    async def orphaned():
        with openenv_server() as (url, _):
            environment = OpenEnvEnvironment(url, guess)
            await environment.reset(Task([]))
        with pytest.raises(Exception, match="going away|close frame|Connect"):
            await environment.step(written("1")[0])
        await environment.close()

    asyncio.run(orphaned())


def test_observations_as_text():
    assert observation_text({"metadata": {"a": 1}, "text": "ü"}) == "ü"
    assert observation_text({"text": "a", "score": 1}) == '{"text": "a", "score": 1}'
    assert observation_text({"count": 1}) == '{"count": 1}' and observation_text({"metadata": {}}) == ""


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://a", "http://", "http:///ws"])
def test_addresses_that_are_none(url):
    with pytest.raises(UsageError, match="allowed are http, https, ws and wss"):
        OpenEnvEnvironment(url)
