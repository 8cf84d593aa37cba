"""Environments of the package verifiers (version 0.4, as prime-rl runs them), with the policy as their one agent.

An `Env` of verifiers is a coroutine that asks its agent for replies; it runs beside the episode. What it says is an
observation, a turn is the reply. The clients, runtimes and harnesses of verifiers are not used.
"""

import asyncio
import importlib
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, get_type_hints

from megarl.environments.adapters import optional
from megarl.environments.protocol import BaseEnvironment, Message, Observation, Task, Turn, user_message
from megarl.errors import UsageError


class VerifiersEnvironment(BaseEnvironment):
    """An episode of `env`, an `Env` of verifiers with one agent, which episodes share: make it once in the factory.

    The task is in the prompt's metadata, as `verifiers_prompt` writes it. Its weighted rewards are the reward, at the
    end, and the parts; its `@stop` functions end the episode. UsageError without verifiers, for several agents, and for
    tool servers, containers, `setup` or `finalize` in a runtime, and hooks on requests.
    """

    def __init__(self, env: Any):
        agents = optional("verifiers.v1.configs.agent", "verifiers>=0.4,<0.5", "a VerifiersEnvironment")
        self._env, self._seats = env, agents.agent_config_fields(env.config)
        if problem := _problem(env, len(self._seats)):
            raise UsageError(f"VerifiersEnvironment {env.config.env_id}: {problem}")
        self._said: asyncio.Queue[list[Message]] = asyncio.Queue()
        self._replies: asyncio.Queue[Turn] = asyncio.Queue()
        self._traces: list[Any] = []
        self._run: asyncio.Task | None = None

    async def reset(self, task: Task) -> Observation:
        """Begins the environment's run, up to its first question."""
        kind = self._env.taskset.task_type()
        if not isinstance(task.metadata.get("task"), dict):
            raise ValueError("metadata must hold task, the data of a task of verifiers (verifiers_prompt)")
        data = kind.data_type().model_validate(task.metadata["task"])
        self._run = asyncio.create_task(self._play(kind(data, self._env.taskset.config.task)))
        return await self._next()

    async def step(self, turn: Turn) -> Observation:
        """Gives the turn to the environment as the agent's reply."""
        await self._replies.put(turn)
        return await self._next()

    async def close(self) -> None:
        """Ends the environment's run."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.wait({self._run})

    async def _play(self, task: Any) -> None:
        seats = {
            name: _Seat(name, config, self._said, self._replies, self._traces) for name, config in self._seats.items()
        }
        agents = SimpleNamespace(**seats)
        await self._env.setup(agents)
        await self._env.run(task, agents)
        await self._env.finalize(task, _v1("episode").Episode(task=_about(task), traces=self._traces))

    async def _next(self) -> Observation:
        """What the environment says next, or how it ended."""
        question = asyncio.ensure_future(self._said.get())
        try:
            await asyncio.wait({question, self._run}, return_when=asyncio.FIRST_COMPLETED)
            if question.done():
                return Observation(question.result())
        finally:
            question.cancel()
        self._run.result()  # raises what the environment raised
        rewards = {name: reward for trace in self._traces for name, reward in trace.rewards.items()}
        if missing := [name for name, reward in rewards.items() if reward is None]:
            raise RuntimeError(f"verifiers has not computed the rewards {', '.join(missing)}")
        parts = {name: float(reward.value) for name, reward in rewards.items()}
        return Observation(reward=sum(parts.values()), done=True, parts=parts)


class _Seat:
    """The policy as an agent of verifiers: `run` is one reply to a task, `interaction` an exchange."""

    trainable = True

    def __init__(self, name: str, config: Any, said: Any, replies: Any, traces: list[Any]):
        self.name, self.config = name, config
        self.said, self.replies, self._traces = said, replies, traces

    async def run(self, task: Any, **_: Any) -> Any:
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **_: Any) -> AsyncIterator["_Interaction"]:
        interaction = _Interaction(self, task)
        yield interaction
        await interaction.close()
        self._traces.append(interaction.trace)


class _Interaction:
    def __init__(self, seat: _Seat, task: Any):
        session, state, trace = map(_v1, ("session", "state", "trace"))
        self._seat, self._task, self._closed = seat, task, False
        agent = trace.AgentInfo(config=seat.config, name=seat.name)
        self.trace = trace.Trace(task=_about(task), state=state.state_cls(type(task))(), agent=agent)
        self._stops = [(session.call_hook, hook, trace.Trace) for hook in task.hooks("stop")]
        for message in _opening(task.data):
            self._add(_typed(message))

    async def turn(self, message: str | list[Any] | None = None) -> Any:
        """Says `message`, if any, and waits for the policy's reply: a `Segment`, terminated after a stop."""
        segment = _v1("agent").Segment
        for call, hook, kind in self._stops:
            if self.trace.num_turns and await call(hook, {kind: self.trace}):
                self.trace.stop(hook.__name__)
                return segment(messages=[], terminated=True)
        said = [user_message(message)] if isinstance(message, str) else [_plain(each) for each in message or []]
        for each in said:
            self._add(_typed(each))
        await self._seat.said.put(said)
        turn = await self._seat.replies.get()
        reply = _v1("types").AssistantMessage(content=turn.content, reasoning_content=turn.reasoning or None)
        self._add(reply, sampled=True)
        return segment(messages=[reply])

    async def close(self) -> Any:
        if not self._closed:
            self._closed = True
            if self.trace.stop_condition is None:
                self.trace.stop("user_closed")
            await self._task.score(self.trace)
            self.trace.is_completed = self.trace.ok = True
        return self.trace

    def _add(self, message: Any, sampled: bool = False) -> None:
        parent = len(self.trace.nodes) - 1 if self.trace.nodes else None
        self.trace.nodes.append(_v1("graph").MessageNode(parent=parent, message=message, sampled=sampled))


def verifiers_prompt(task: Any) -> dict[str, Any]:
    """The line of a prompt file for a task of verifiers, with its data as metadata. ValueError if it has no prompt."""
    messages = _opening(task.data)
    if not messages:
        raise ValueError("a task without prompt and system prompt cannot be a line of a prompt file")
    return {"prompt": messages, "metadata": {"task": task.data.model_dump(mode="json", exclude_none=True)}}


def _v1(module: str) -> Any:
    return importlib.import_module(f"verifiers.v1.{module}")


def _opening(data: Any) -> list[Message]:
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    prompt = [user_message(data.prompt)] if isinstance(data.prompt, str) else [_plain(m) for m in data.prompt or []]
    return system + prompt


def _plain(message: Any) -> Message:
    return {"role": message.role, "content": _v1("types").content_text(message.content)}


def _typed(message: Message) -> Any:
    types = _v1("types")
    kinds = {"system": types.SystemMessage, "user": types.UserMessage, "assistant": types.AssistantMessage}
    return kinds[message["role"]](content=message["content"])


def _about(task: Any) -> Any:
    """A task as traces name it."""
    return _v1("trace").TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)


def _problem(env: Any, agents: int) -> str | None:
    """Why an environment cannot be run without verifiers' runtimes; None: it can."""
    from verifiers.v1 import Request, Response

    without_runtime = _v1("task").Task
    task, config = env.taskset.task_type(), env.taskset.config
    members, kinds = [getattr(task, name) for name in dir(task)], ("reward", "metric", "stop", "intercept")
    hooks = {kind: [hook for hook in members if hasattr(hook, kind)] for kind in kinds}
    scoring = [inspect.signature(hook).parameters for hook in hooks["reward"] + hooks["metric"]]
    hints = [hint for hook in hooks["stop"] for hint in get_type_hints(hook).values()]
    on_messages = Request in hints or Response in hints
    if agents != 1:
        return f"has {agents} agents; allowed is one, the policy"
    if task.NEEDS_CONTAINER or task.toolsets(config.task) or env.taskset.toolsets(config):
        return "its tasks need containers or tool servers"
    if task.setup is not without_runtime.setup or task.finalize is not without_runtime.finalize:
        return "its tasks have a setup or finalize for a runtime"
    if any("runtime" in parameters for parameters in scoring):
        return "its rewards or metrics need a runtime"
    return "it has hooks on requests or responses" if hooks["intercept"] or on_messages else None
