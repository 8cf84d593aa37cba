"""A run's environments: what is checked of them before any work starts, and the HTTP process of sessions."""

import contextlib
from typing import TYPE_CHECKING

import numpy as np

from megarl.arguments import Settings
from megarl.comm.role_mesh import RoleGroups
from megarl.data import node_files
from megarl.data.conversations import Encoder
from megarl.data.prompts import PromptSet
from megarl.data.template_checks import check_template
from megarl.environments.calls import TO_LEADERS
from megarl.environments.loading import AGENT, KINDS, TOOLS, check_factories
from megarl.environments.session_pool import SessionPool
from megarl.errors import UsageError, warn_as_first
from megarl.serving.configuration import check_listening
from megarl.serving.frontend_process import start_process
from megarl.tool_formats.chosen_format import load_format, name_of, unread_calls

if TYPE_CHECKING:  # it needs packages that other environments do not
    from megarl.environments.session_front import SessionsConfig


def check_environment_flags(settings: Settings):
    """UsageError for an environment of the flags that cannot be made, or a parser of tool calls that does not exist."""
    if settings.environment:
        load_format(name_of(settings.tool_call_parser, None))
        if not settings.agent_sessions:
            _kinds(settings, [settings.environment])


def sessions_of(settings: Settings) -> "SessionsConfig":
    """The configuration of `--agent-sessions`. UsageError for missing packages or keys."""
    api_keys = check_listening(settings)
    from megarl.environments.session_front import sessions_config  # needs these packages

    return sessions_config(settings, api_keys)


def check_environments(settings: Settings, encoder: Encoder, prompt_sets: dict[str, PromptSet]):
    """UsageError for an environment of a line that cannot be made, or a chat template with which a conversation cannot
    continue."""
    if not settings.environment:
        return
    named = {name for prompts in prompt_sets.values() for name in named_in(prompts, encoder)}
    others = sorted(named - {settings.environment})
    if settings.agent_sessions and others:
        raise UsageError(f"--agent-sessions: the environments of lines are not used, and some name {others[0]}")
    own = [AGENT] if settings.agent_sessions else _kinds(settings, [settings.environment])
    check_kinds(settings, encoder, {*own, *(_kinds(settings, others) if others else [])})


def check_kinds(settings: Settings, encoder: Encoder, kinds: set[str]):
    """UsageError for a chat template with which conversations with these kinds of environments cannot continue."""
    if problem := unread_calls(settings.tool_call_parser, encoder.template):
        problem += ", or a function"
        if TOOLS in kinds:
            raise UsageError(problem)
        if AGENT in kinds:
            warn_as_first([f"{problem}, if agents offer tools"])
    form = load_format(name_of(settings.tool_call_parser, encoder.template))
    # A history that the template rewrites is a new row of an agent.
    check_template(encoder, tuple(sorted(kinds - {AGENT})), form.call_id)


def _kinds(settings: Settings, names: list[str]) -> list[str]:
    """The kind of each environment; a process of the node makes each of them once.

    UsageError for agents with a setting that needs turns in a line.
    """

    def checked() -> dict[str, np.ndarray]:
        found = check_factories(names)
        return {"kinds": np.array([KINDS.index(found[name]) for name in names])}

    kinds = [KINDS[number] for number in node_files.arrays(lambda: ("environments", *names), checked)["kinds"].tolist()]
    if AGENT in kinds:
        with_routes = settings.partial_rollouts and settings.router_replay == "rollout"
        refused = {
            "--credit turns": settings.credit == "turns",
            "--partial-rollouts with --router-replay rollout": with_routes,
        }
        if flags := [flag for flag, is_set in refused.items() if is_set]:
            name = names[kinds.index(AGENT)]
            raise UsageError(f"{flags[0]}: not with an agent, which {name} is")
    return kinds


def named_in(prompts: PromptSet, encoder: Encoder) -> list[str]:
    """The environments that lines of a set name, sorted."""

    def names() -> dict[str, np.ndarray]:
        found = sorted({prompt.environment for prompt in prompts if prompt.environment})
        return {"names": np.frombuffer("\n".join(found).encode(), np.uint8)}

    return prompts.on_node(names, "environments", encoder)["names"].tobytes().decode().split()


def open_sessions(
    config: "SessionsConfig", settings: Settings, role_groups: RoleGroups, encoder: Encoder, stack: contextlib.ExitStack
) -> SessionPool | None:
    """Starts the process on rank 0, and says where it is; the sessions of a replica on its leader, None elsewhere.

    A collective of the world.

    Args:
        role_groups: of the rollout.
        encoder: the policy's.
        stack: ends the process.

    Raises:
        UsageError: the address cannot be used.
    """
    url, link, child = start_process(stack, "megarl.environments.session_front", config, role_groups, TO_LEADERS)
    if child is not None:
        print(f"megarl: sessions of agents at {url}", flush=True)
    if link is None:
        return None
    return SessionPool(link, name_of(settings.tool_call_parser, encoder.template), settings.environment_retries)
