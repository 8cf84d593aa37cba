"""The HTTP process of sessions as the ranks see it: rank 0 starts it, and the leaders of all replicas have links."""

import contextlib
from typing import TYPE_CHECKING

from megarl.arguments import Settings
from megarl.comm.role_mesh import RoleGroups
from megarl.data.conversations import Encoder
from megarl.environments.calls import TO_LEADERS
from megarl.environments.sessions.session_pool import SessionPool
from megarl.serving.frontend_process import start_process
from megarl.tool_formats.table import name_of

if TYPE_CHECKING:  # it needs packages that other environments do not
    from megarl.environments.sessions.front import SessionsConfig


def open_sessions(
    config: "SessionsConfig", settings: Settings, role_groups: RoleGroups, encoder: Encoder,
    stack: contextlib.ExitStack,
) -> SessionPool | None:  # fmt: skip
    """Starts the process on rank 0, and says where it is; the sessions of a replica on its leader, None elsewhere.

    A collective of the world.

    Args:
        role_groups: of the rollout.
        encoder: the policy's.
        stack: ends the process.

    Raises:
        UsageError: the address cannot be used.
    """
    url, link, child = start_process(stack, "megarl.environments.sessions.front", config, role_groups, TO_LEADERS)
    if child is not None:
        print(f"megarl: sessions of agents at {url}", flush=True)
    if link is None:
        return None
    return SessionPool(link, name_of(settings.tool_call_parser, encoder.template), settings.environment_retries)
