"""Environments of an OpenEnv server, over its websocket; OpenEnv's own package, which brings 107, is not needed."""

import json
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from megarl.environments.adapters import optional
from megarl.environments.protocol import BaseEnvironment, Message, Observation, Task, ToolCall, Turn, user_message
from megarl.errors import UsageError

_SEEDS = 0x7FFFFFFF
_MAX_MESSAGE_BYTES = 16 << 20  # of the server


class OpenEnvEnvironment(BaseEnvironment):
    """A session of the server at `url` (http, https, ws or wss), on a connection of its own.

    `action` makes the fields of the environment's action of what the policy wrote, and raises ValueError if it cannot;
    an action that the server finds invalid is answered with the reason, too. Without `action` the policy plays by tool
    calls: the server's tools are offered to it, and a turn that calls none ends the episode. `render_text` makes a text
    of the fields of an observation. `replayable`: the same seed and actions give the same observations, and do no harm.

    UsageError without the package websockets, or for another url.
    """

    def __init__(
        self,
        url: str,
        action: Callable[[str], dict[str, Any]] | None = None,
        render_text: Callable[[dict[str, Any]], str] | None = None,
        replayable: bool = False,
        headers: dict[str, str] | None = None,
    ):
        self._websockets = optional("websockets.asyncio.client", "websockets>=15", "an OpenEnvEnvironment")
        self._closed = optional("websockets.exceptions", "websockets>=15", "an OpenEnvEnvironment").ConnectionClosed
        self._url, self._local = _websocket_url(url)
        self._action, self._render, self._headers = action, render_text or observation_text, headers
        self.tools, self.replayable = [], replayable
        self._connection: Any = None

    async def reset(self, task: Task) -> Observation:
        """Connects, and begins with the task's seed."""
        proxy = {"proxy": None} if self._local else {}
        self._connection = await self._websockets.connect(
            self._url, max_size=_MAX_MESSAGE_BYTES, additional_headers=self._headers, **proxy
        )
        data = await self._ask("reset", {"seed": task.seed & _SEEDS})
        if self._action is None:
            listed = await self._ask("step", {"type": "list_tools"})
            self.tools = [_schema(tool) for tool in listed["observation"]["tools"]]
        text = self._render(data["observation"])
        return Observation([user_message(text)] if text else [])

    async def step(self, turn: Turn) -> Observation:
        """Sends the turn's action, or its calls one after the other."""
        if self._action is None:
            return await self._call(turn)
        try:
            data = await self._ask("step", self._action(turn.content))
        except ValueError as error:
            return Observation([user_message(f"No action: {error}")])
        done = bool(data["done"])
        messages = [] if done else [user_message(self._render(data["observation"]))]
        return Observation(messages, float(data["reward"] or 0.0), done)

    async def close(self) -> None:
        """Ends the session, if the server is still there."""
        if self._connection is None:
            return
        try:
            await self._connection.send(json.dumps({"type": "close"}))
        except (OSError, self._closed):
            pass
        await self._connection.close()

    async def _call(self, turn: Turn) -> Observation:
        messages: list[Message] = []
        reward, done = 0.0, not turn.calls and not turn.errors
        for call in turn.calls:
            if done:
                break
            fields = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
            data = await self._ask("step", fields)
            messages.append(_answer(call, data["observation"]))
            reward, done = reward + float(data["reward"] or 0.0), bool(data["done"])
        if turn.errors:
            messages.append(user_message("\n".join(f"Error: no tool call: {error}" for error in turn.errors)))
        return Observation([] if done else messages, reward, done)

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """The data of the server's answer. ValueError, for the policy, if it finds an action invalid."""
        await self._connection.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await self._connection.recv())
        data = answer.get("data") or {}
        if answer.get("type") == "observation":
            return {"reward": None, "done": False, **data}
        details = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in data.get("errors", [])]
        reason = " ".join((", ".join(details) or str(data.get("message", answer))).split())[:500]
        if kind == "step" and data.get("code") == "VALIDATION_ERROR":
            raise ValueError(reason)
        raise RuntimeError(f"{self._url}: {kind}: {data.get('code', 'no observation')}: {reason}")


def observation_text(fields: dict[str, Any]) -> str:
    """The text of an observation: its only field if that is a string, else JSON; without the metadata."""
    shown = {name: value for name, value in fields.items() if name != "metadata"}
    texts = list(shown.values())
    if len(texts) == 1 and isinstance(texts[0], str):
        return texts[0]
    return json.dumps(shown, ensure_ascii=False) if shown else ""


def _answer(call: ToolCall, fields: dict[str, Any]) -> Message:
    """The message of a tool: its error or its result, of MCP's the data."""
    error, result = fields.get("error"), fields.get("result")
    if isinstance(result, dict) and "content" in result:
        data = result.get("data")
        result = "\n".join(part.get("text", "") for part in result["content"]) if data is None else data
    text = f"Error: {error['message']}" if error else result
    content = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _websocket_url(url: str) -> tuple[str, bool]:
    """(address of the websocket, whether it is this machine's own)."""
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}.get(parts.scheme)
    if scheme is None or not parts.hostname:
        raise UsageError(f"OpenEnvEnvironment {url}: allowed are http, https, ws and wss addresses")
    try:
        local = ip_address(parts.hostname).is_loopback
    except ValueError:
        local = parts.hostname == "localhost"
    return f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}/ws", local
