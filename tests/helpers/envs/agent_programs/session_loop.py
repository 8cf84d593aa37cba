"""The loop of a driver of sessions, for programs of this folder."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import httpx

CLIENTS = 2  # sessions at a time


async def play_all(url: str, out: str, play: Callable[[str, dict], Awaitable[dict | None]]):
    """Plays sessions from when the run listens until it has ended, several at a time.

    Args:
        url: of the run.
        out: file that gets a line of JSON for each episode: what `play` returns.
        play: takes the address of a session's policy and the session; returns a `reward` and more, or None if it has
            failed.
    """
    came = False

    async def one(client: httpx.AsyncClient):
        nonlocal came
        while True:
            try:
                answer = await client.post(f"{url}/sessions")
            except httpx.TransportError:  # it has not begun to listen, or has ended
                if came:
                    return
                await asyncio.sleep(0.1)
                continue
            came = True
            if answer.status_code == 503:
                await asyncio.sleep(0.1)
                continue
            session = answer.raise_for_status().json()
            result = await play(url + session["path"], session)
            if result is not None:
                with open(out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")
            end = {"failure": "it has failed"} if result is None else {"reward": result["reward"]}
            headers = {"Authorization": f"Bearer {session['key']}"}
            answer = await client.post(f"{url}/sessions/{session['id']}/finish", headers=headers, json=end)
            answer.raise_for_status()

    async with httpx.AsyncClient(timeout=None) as client:
        await asyncio.gather(*(one(client) for _ in range(CLIENTS)))
