"""The HTTP process of sessions as the ranks see it: rank 0 starts it, and the leaders of all replicas have links."""

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megarl.arguments import Settings
from megarl.child_process import Child
from megarl.comm.role_mesh import RoleGroups
from megarl.data.conversations import Encoder
from megarl.environments.sessions.pool import SessionPool
from megarl.serving import links
from megarl.serving.frontend_process import answer_of, end_process, ranks_address
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
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            config = dataclasses.replace(config, ranks_address=ranks_address(self._stack))
            child = Child("megarl.environments.sessions.front")
            self._stack.callback(end_process, child)
            child.send(config)
            found = [answer_of(child)]
            print(f"megarl: sessions of agents at {found[0][0]}", flush=True)
        dist.broadcast_object_list(found, src=0)
        _, address, key = found[0]
        if role_groups.is_leader:
            link = links.Link(links.connect(address, key))
            parser = name_of(settings.tool_call_parser, encoder.template)
            self.pool = SessionPool(link, parser, settings.environment_retries)

    def close(self):
        self._stack.close()
