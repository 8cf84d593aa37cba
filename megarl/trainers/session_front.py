"""The HTTP process of sessions as the ranks see it: rank 0 starts it, and the leaders of all replicas have links."""

import contextlib
from typing import TYPE_CHECKING

from megarl.arguments import Settings
from megarl.comm.role_mesh import RoleGroups
from megarl.data.conversations import Encoder
from megarl.environments.sessions.pool import SessionPool
from megarl.serving.frontend_process import start_process
from megarl.tool_formats.by_template import name_of

if TYPE_CHECKING:  # it needs packages that other environments do not
    from megarl.environments.sessions.front import SessionsConfig


class SessionFront:
    """The process; `pool` has the sessions of a replica on its leader, and is None on other ranks."""

    def __init__(self, config: "SessionsConfig", settings: Settings, role_groups: RoleGroups, encoder: Encoder):
        """Starts it on rank 0, and says where it is. A collective of the world.

        Args:
            role_groups: of the rollout.
            encoder: the policy's.

        Raises:
            UsageError: the address cannot be used.
        """
        self._stack, self.pool = contextlib.ExitStack(), None
        module = "megarl.environments.sessions.front"
        url, link, child = start_process(self._stack, module, config, role_groups)
        if child is not None:
            print(f"megarl: sessions of agents at {url}", flush=True)
        if link is not None:
            parser = name_of(settings.tool_call_parser, encoder.template)
            self.pool = SessionPool(link, parser, settings.environment_retries)

    def close(self):
        self._stack.close()
