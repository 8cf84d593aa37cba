"""The HTTP client of a coroutine agent: requests to its own endpoint reach it without a connection.

Imported only where openai is installed.
"""

import asyncio
import functools
import importlib
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from megarl.environments.agents.endpoint import answer_whole
from megarl.environments.agents.session import Session

_httpx: Any = importlib.import_module(DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])  # openai's own


class EpisodeTransport(_httpx.AsyncBaseTransport):
    """Answers requests to the endpoint of an episode; all others go over the network."""

    def __init__(self, session: Session):
        url = _httpx.URL(session.url)
        self._session, self._origin = session, (url.scheme, url.netloc)

    async def handle_async_request(self, request: Any) -> Any:
        """See httpx. A timeout of the request limits the time until it is answered."""
        url = request.url
        if (url.scheme, url.netloc) != self._origin:
            return await _network().send(request, stream=True)
        body = await request.aread()
        headers = [(name.lower(), value) for name, value in request.headers.raw]
        await asyncio.sleep(0)  # an agent that repeats what is refused must not keep the others from running
        try:
            async with asyncio.timeout(request.extensions.get("timeout", {}).get("read")):
                answer = await answer_whole(self._session, request.method, url.path, headers, body)
        except TimeoutError:
            raise _httpx.ReadTimeout("the policy did not answer in time", request=request) from None
        return _httpx.Response(answer.status_code, headers=answer.raw_headers, content=bytes(answer.body))


def client_of(session: Session) -> AsyncOpenAI:
    """The client of an agent, which may close it."""
    http = DefaultAsyncHttpxClient(timeout=None, transport=EpisodeTransport(session))
    return AsyncOpenAI(base_url=session.url, api_key=session.key, timeout=None, max_retries=0, http_client=http)


@functools.cache
def _network() -> DefaultAsyncHttpxClient:
    """The connections of all agents of this process to other servers: making a client of its own takes some 30 ms."""
    return DefaultAsyncHttpxClient(timeout=None)
