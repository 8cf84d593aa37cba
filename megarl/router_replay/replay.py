"""Router replay (R3): training passes take the routes of the rollout instead of those that their routers choose.

If kernels or precision differ, rollout and training may choose different experts for the same token, and the ratio of
their probabilities diverges (arXiv 2510.11370).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megarl.arguments import RoleSettings, Settings
from megarl.comm.role_mesh import RoleMesh
from megarl.comm.step_batch import ACTOR, ROLLOUT, StepBatch
from megarl.router_replay.route_exchange import RouteExchange
from megarl.router_replay.router_state import RouterState


class RoutingReplay:
    """Sends the rollout's routes to the roles that replay them."""

    def __init__(
        self, settings: Settings, policy: RoleSettings, mesh: RoleMesh, recorded_layers: tuple[int, ...] | None,
        router_states: dict[str, RouterState], actor_passes: Callable[[StepBatch], list[Tensor]],
    ):  # fmt: skip
        """With `--router-replay rollout`, gathers which rank holds which MoE layers of the policy. Collective.

        Args:
            policy: the actor's settings.
            recorded_layers: MoE layers whose routes this rank records in the rollout (`Rollout.recorded_layers`).
            router_states: of this rank's models, by role.
            actor_passes: `Actor.passes_of_step`.
        """
        self._router_states, self._actor_passes = router_states, actor_passes
        self._exchange = None
        self._roles = ("actor", "reference") if settings.router_replay_reference else ("actor",)
        if settings.router_replay == "rollout":
            layers = {name: router_states[name].layers for name in self._roles if name in router_states}
            layers[ROLLOUT] = recorded_layers
            self._exchange = RouteExchange(mesh, layers, policy.megatron.moe_router_topk, policy.megatron.num_experts)

    def begin_step(self):
        """Resets the routers of all models: removes routes to replay, and statistics."""
        for state in self._router_states.values():
            state.begin_step()

    def send_routes(self, step_batch: StepBatch):
        """Sends each rank the routes that it replays in the step, for its own tokens and layers only. Ranks that only
        generate do not wait (`StepBatch.wait_sends`). Collective."""
        for role in self._roles if self._exchange else ():
            self._send_routes(step_batch, role)

    def _send_routes(self, step_batch: StepBatch, role: str):
        batch, state = step_batch[role], self._router_states.get(role)
        wanted = None
        with step_batch.exchange_phase(ROLLOUT, role):
            if state is not None:
                passes = self._actor_passes(step_batch) if role == ACTOR else [torch.arange(len(batch))]
                wanted = state.wanted(batch, passes)
            table = self._exchange.send(
                step_batch[ROLLOUT], role, batch, wanted, step_batch.dp_assignment,
                step_batch.pending_sends(ROLLOUT, role),
            )  # fmt: skip
            if state is not None:
                state.replayed_routes = table
