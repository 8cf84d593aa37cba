"""A driver of sessions, for a process of its own. It plays until the run has ended.

Kinds: `sums` plays the agent of that name; `faults` also leaves some sessions to themselves.
"""

import asyncio
import contextlib
import json
import random
import socket
import urllib.error
import urllib.request
from types import SimpleNamespace

import openai

from tests.helpers.envs.agents import sums
from tests.helpers.waiting import SAFETY_SECONDS
from tests.helpers.worlds import die_with_parent

WAIT = 0.05  # seconds between two tries to take a session
CLIENTS = 4  # sessions at a time


def free_port() -> int:
    """A port that no connection of a client gets, not even one of the driver to this port itself."""
    for _ in range(100):
        port = random.SystemRandom().randrange(20_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError


def post(url: str, key: str, body: dict | bytes | None = None, kind: str = "application/json") -> tuple[int, dict]:
    """(status, answer) of a request."""
    data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
    headers = {"Content-Type": kind} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=SAFETY_SECONDS) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


async def take(url: str, key: str) -> dict | None:
    """The next session; None if the run has ended."""
    came = False
    while True:
        try:
            status, found = await asyncio.to_thread(post, f"{url}/sessions", key)
        except OSError:  # it has not begun to listen, or has ended
            if came:
                return None
            await asyncio.sleep(WAIT)
            continue
        came = True
        if status == 200:
            return found
        assert status == 503, found
        await asyncio.sleep(WAIT)


async def play(url: str, found: dict) -> float:
    """Plays a session to its end."""
    client = openai.AsyncOpenAI(base_url=url + found["path"], api_key=found["key"], max_retries=0)
    try:
        reward = await sums(SimpleNamespace(**found["task"]), client)
    except (openai.BadRequestError, openai.ConflictError):  # a budget is used up; it has expired
        reward = 0.0
    finally:
        await client.close()
    end = f"{url}/sessions/{found['id']}/finish"
    status, answer = await asyncio.to_thread(post, end, found["key"], {"reward": reward})
    assert status in (200, 409), answer  # it may have expired
    return reward


async def drive(url: str, key: str, kind: str):
    """Plays sessions, several at a time."""
    taken = 0

    async def one():
        nonlocal taken
        while (found := await take(url, key)) is not None:
            taken += 1
            if kind == "faults" and taken % 3 == 0:
                continue  # it is left to itself, and expires
            await play(url, found)

    await asyncio.gather(*(one() for _ in range(CLIENTS)))


def main(url: str, key: str, kind: str):
    """The driver, which ends with its parent."""
    die_with_parent()
    asyncio.run(drive(url, key, kind))
