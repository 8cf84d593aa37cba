"""A process with environments: `python -m megarl.environments.worker FD SECONDS`. Imports no torch.

It answers each call when it is done; many episodes run at once on its event loop, plain methods in threads.
"""

import asyncio
import contextlib
import functools
import os
import queue
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from megarl import plugins
from megarl.child_process import parent
from megarl.environments import ENVIRONMENTS
from megarl.environments.agents.agent import Agent, as_agent
from megarl.environments.agents.session import Session
from megarl.environments.calls import Answer, Ask, Asked, Call, Close, Replied
from megarl.environments.protocol import BaseEnvironment, ImageBytes, Observation, resolved, seen_of
from megarl.plugins import place_of
from megarl.user_results import LateCall, is_async, limited, shown_error

THREADS = 512  # of plain methods; started when they are needed


class Worker:
    """Serves the calls of a pool."""

    def __init__(self, connection: Connection, seconds: float):
        """`seconds`: limit of each call of an environment."""
        self._connection, self._seconds = connection, seconds
        self._environments: dict[int, BaseEnvironment | Agent] = {}
        self._tasks: set[asyncio.Task] = set()
        self._calls: dict[int, asyncio.Task] = {}  # the last call of each episode
        self._threads = ThreadPoolExecutor(THREADS)
        self._sessions: dict[int, Session] = {}  # of agents, by ticket
        self._answers: queue.SimpleQueue[Answer | Asked] = queue.SimpleQueue()  # to be written
        self._ended = asyncio.Event()

    async def serve(self):
        """Runs until the pool closes the connection. Threads read and write: if the process waited for the pool to
        read, and the pool for it, both would wait for ever.
        """
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._write, daemon=True).start()
        threading.Thread(target=self._read, args=(loop,), daemon=True).start()
        await self._ended.wait()

    def _write(self):
        with contextlib.suppress(OSError):
            while True:
                self._connection.send(self._answers.get())

    def _read(self, loop: asyncio.AbstractEventLoop):
        try:
            while True:
                loop.call_soon_threadsafe(self._begin, self._connection.recv())
        except (EOFError, OSError):
            loop.call_soon_threadsafe(self._ended.set)

    def _begin(self, message: Call | Close | Replied):
        if isinstance(message, Replied):
            if message.ticket in self._sessions:
                self._sessions[message.ticket].receive(message.request, message.reply)
            return
        if isinstance(message, Close):
            running = self._calls.pop(message.number, None)
            task = asyncio.create_task(self._close_idle(message.number, running))
        else:
            task = self._calls[message.number] = asyncio.create_task(self._answer(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, call: Call):
        loop = asyncio.get_running_loop()
        start, environment = loop.time(), None
        facts: dict[str, Any] = {"observation": None, "tools": [], "replayable": True}
        try:
            environment, observation = await self._played(call)
            facts["observation"], facts["images"] = await seen_of(observation, call.name)
            facts["tools"] = list(environment.tools) if not call.turns else []
            facts["is_agent"] = isinstance(environment, Agent)
        except LateCall as late:
            facts |= {"failure": str(late), "is_late": True, "is_stuck": late.is_stuck}
        except (Exception, SystemExit) as error:
            facts["failure"] = " ".join(f"{shown_error(error)[:500]}{place_of(error)}".split())
        known = environment or self._environments.get(call.number)
        facts["replayable"] = bool(getattr(known, "replayable", True))
        if "failure" in facts:
            await self._close(call.number)
        seconds = known.seconds if isinstance(known, Agent) else loop.time() - start
        self._answers.put(Answer(call.number, call.ticket, seconds=seconds, **facts))

    async def _played(self, call: Call) -> tuple[BaseEnvironment | Agent, Observation]:
        """(environment, its answer to the last turn or to the reset; of an agent its end)."""
        environment = self._environments.get(call.number)
        if environment is None:
            factory = plugins.load("--environment", call.name, ENVIRONMENTS, awaits=True)
            environment = as_agent(factory) or await self._limited(factory)
            self._environments[call.number] = environment
            if isinstance(environment, Agent):
                return environment, await self._run_agent(environment, call)
            task = call.task.with_names()
            if not call.turns:
                return environment, await self._limited(environment.reset, task)
            await self._limited(environment.restore, task, list(call.turns[:-1]), list(call.observations))
        assert not isinstance(environment, Agent)  # it has one call, which runs it to its end
        return environment, await self._limited(environment.step, call.turns[-1])

    async def _run_agent(self, agent: Agent, call: Call) -> Observation:
        from megarl.environments.agents.endpoint import endpoint  # needs packages that other environments do not

        def send(request: int, ask: Ask, images: ImageBytes):
            self._answers.put(Asked(call.number, call.ticket, request, ask, images))

        session = self._sessions[call.ticket] = Session(send)
        async with endpoint(session):
            try:
                return await session.watch(agent.run(call.task.with_parts(), session), self._seconds)
            finally:
                agent.seconds = session.worked_seconds
                del self._sessions[call.ticket]
                session.close()

    async def _limited(self, function, *args):
        """The result of a method, a coroutine or not. LateCall at the limit."""
        call = functools.partial(function, *args)
        if is_async(function):
            return await limited(call(), self._seconds, "answer")
        running = asyncio.get_running_loop().run_in_executor(self._threads, call)
        done, _ = await asyncio.wait([running], timeout=self._seconds)
        if not done:
            running.add_done_callback(lambda future: future.exception())  # nobody else asks for it
            late = LateCall(f"no answer within {self._seconds:g} s")
            late.is_stuck = True
            raise late
        return await limited(resolved(running.result()), self._seconds, "answer")

    async def _close_idle(self, number: int, running: asyncio.Task | None):
        """Closes an environment after its last call: no environment is closed while it works."""
        if isinstance(self._environments.get(number), Agent) and running is not None:
            running.cancel()  # an agent may work for long, and nobody needs its score any more
        if running is not None and not running.done():  # else at once, before the next call of the episode
            await asyncio.wait([running])
        await self._close(number)

    async def _close(self, number: int):
        environment = self._environments.pop(number, None)
        if environment is None:
            return
        try:
            await self._limited(environment.close)
        except (Exception, SystemExit) as error:
            print(f"environment: close: {type(error).__name__}: {error}", file=sys.stderr)


def main():
    """Serves until the pool is gone, then ends at once, whatever threads are left."""
    connection = parent()

    async def serve():
        await Worker(connection, float(sys.argv[2])).serve()

    asyncio.run(serve())
    os._exit(0)


if __name__ == "__main__":
    main()
