"""Which routes the models of a run take in a step: those that their routers choose, or those of the rollout (R3).

Rollout and training may choose other experts for the same text, where kernels or precision differ; the ratio of their
probabilities then runs away (arXiv 2510.11370).
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
    """Brings the rollout's routes to the roles that replay them."""

    def __init__(
        self, settings: Settings, policy: RoleSettings, mesh: RoleMesh, recorded_layers: tuple[int, ...] | None,
        router_states: dict[str, RouterState], actor_passes: Callable[[StepBatch], list[Tensor]],
    ):  # fmt: skip
        """Collective: with `--router-replay rollout` all ranks learn which rank holds which layers of the policy.

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
        """Resets all models' routers: nothing is replayed, nothing is measured yet."""
        for state in self._router_states.values():
            state.begin()

    def dispatch(self, step_batch: StepBatch):
        """Where routes are replayed, sends each rank those that it needs in any pass of the step. Collective.

        These are the routes of the tokens and layers that the rank runs.
        """
        for role in self._roles if self._exchange else ():
            self._dispatch(step_batch, role)

    def _dispatch(self, step_batch: StepBatch, role: str):
        batch, wanted, state = step_batch[role], None, self._router_states.get(role)
        with step_batch.exchange_phase(ROLLOUT, role):
            if state is not None:
                passes = self._actor_passes(step_batch) if role == ACTOR else [torch.arange(len(batch))]
                wanted = state.wanted(batch, passes)
            table = self._exchange.send(step_batch[ROLLOUT], role, batch, wanted, step_batch.dp_assignment)
            if state is not None:
                state.table = table
