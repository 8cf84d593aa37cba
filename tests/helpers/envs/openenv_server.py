"""A server that speaks OpenEnv's websocket as version 0.10 does: the frames below were recorded from a real one."""

import asyncio
import json
import random
import threading
from contextlib import contextmanager

from tests.helpers.waiting import SAFETY_SECONDS

TOOLS = [
    {
        "name": "add",
        "description": "Adds.",
        "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    }
]


class Session:
    """A guessing game of 1 to 15 with four guesses, and the tool `add`, as one connection sees them."""

    def __init__(self):
        self.number, self.left = 0, 0

    def answer(self, message: dict) -> dict:
        """The frame that answers a frame."""
        data = message["data"]
        if message["type"] == "reset":
            self.number, self.left = random.Random(data["seed"]).randint(1, 15), 4
            return observed({"text": "Guess 1 to 15."}, None)
        if data.get("type") == "list_tools":
            return observed({"tools": TOOLS}, None)
        if data.get("type") == "call_tool":
            return observed(called(data["tool_name"], data["arguments"]), None)
        if not isinstance(data.get("guess"), int):
            missing = {"type": "missing", "loc": ["guess"], "msg": "Field required", "input": data}
            return failed("Invalid message", "VALIDATION_ERROR", errors=[missing])
        if data["guess"] == 99:
            return failed("'boom'", "EXECUTION_ERROR")
        self.left -= 1
        if data["guess"] == self.number:
            return observed({"text": "right"}, 1.0, True)
        return observed({"text": "higher" if data["guess"] < self.number else "lower"}, 0.0, self.left <= 0)


def observed(fields: dict, reward: float | None, done: bool = False) -> dict:
    """The frame of an observation."""
    return {"type": "observation", "data": {"observation": {"metadata": {}, **fields}, "reward": reward, "done": done}}


def failed(message: str, code: str, **more) -> dict:
    """The frame of an error."""
    return {"type": "error", "data": {"message": message, "code": code, **more}}


def called(name: str, arguments: dict) -> dict:
    """The fields of the observation of a tool call."""
    if name != "add":
        error = {"error_type": "tool_not_found", "message": f"Unknown tool: '{name}'"}
        return {"tool_name": name, "result": None, "error": error}
    total = arguments["a"] + arguments["b"]
    result = {"content": [{"type": "text", "text": str(total)}], "structured_content": {"result": total}, "data": total}
    return {"tool_name": name, "result": {**result, "is_error": False}, "error": None}


@contextmanager
def openenv_server():
    """(address, closed sessions): the list gets True for each session that said `close`, False for one that did not."""
    from websockets.asyncio.server import serve

    closed: list[bool] = []
    ready, loop = threading.Event(), asyncio.new_event_loop()
    found: dict[str, object] = {}

    async def talk(connection):
        assert connection.request.path == "/ws"
        session, said_goodbye = Session(), False
        async for frame in connection:
            message = json.loads(frame)
            if said_goodbye := message["type"] == "close":
                break
            await connection.send(json.dumps(session.answer(message)))
        closed.append(said_goodbye)

    async def run():
        found["stop"] = asyncio.Event()
        async with serve(talk, "127.0.0.1", 0) as server:
            found["port"] = server.sockets[0].getsockname()[1]
            ready.set()
            await found["stop"].wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()
    assert ready.wait(SAFETY_SECONDS)
    try:
        yield f"http://127.0.0.1:{found['port']}", closed
    finally:
        loop.call_soon_threadsafe(found["stop"].set)
        thread.join()
        loop.close()
