"""Which routes the models of a run take in a step: those that their routers choose, or those of the rollout (R3).

Rollout and training may choose other experts for the same text, where kernels or precision differ; the ratio of their
probabilities then runs away (arXiv 2510.11370).
"""

import torch

from megarl.arguments import RoleSettings, Settings
from megarl.comm.role_mesh import RoleMesh
from megarl.comm.step_batch import ROLLOUT, StepBatch
from megarl.roles.actor import Actor
from megarl.roles.critic import Critic
from megarl.roles.reference import Reference
from megarl.rollout.rollout import Rollout
from megarl.router_replay.route_exchange import RouteExchange


class RoutingReplay:
    """Brings the rollout's routes to the roles that take them."""

    def __init__(
        self, settings: Settings, policy: RoleSettings, mesh: RoleMesh, rollout: Rollout, actor: Actor, critic: Critic,
        reference: Reference,
    ):  # fmt: skip
        """Collective: with `--router-replay rollout` all ranks learn who holds which layers of the policy."""
        self._actor = actor
        learners = {"actor": actor.trainable_model, "critic": critic.trainable_model}
        self._routes = {name: trainable_model.routes for name, trainable_model in learners.items() if trainable_model}
        if reference.frozen_model:
            self._routes["reference"] = reference.frozen_model.routes
        self._exchange = None
        self._roles = ("actor", "reference") if settings.router_replay_reference else ("actor",)
        if settings.router_replay == "rollout":
            layers = {name: self._routes[name].layers for name in self._roles if name in self._routes}
            layers[ROLLOUT] = rollout.recorded_layers
            self._exchange = RouteExchange(mesh, layers, policy.megatron.moe_router_topk, policy.megatron.num_experts)

    def begin(self):
        """Starts a step of all models: nothing is replayed, nothing is measured yet."""
        for routes in self._routes.values():
            routes.begin()

    def share(self, flow: StepBatch, step: int):
        """Where routes are replayed, each rank gets the ones that it will need. Collective.

        These are the routes of the tokens and layers that the rank runs in any pass of the step.
        """
        for role in self._roles if self._exchange else ():
            self._share(flow, role, step)

    def _share(self, flow: StepBatch, role: str, step: int):
        batch, wanted, routes = flow[role], None, self._routes.get(role)
        with flow.exchange_phase(ROLLOUT, role):
            if routes is not None:
                is_actor = role == self._actor.name
                passes = self._actor.passes(flow, step) if is_actor else [torch.arange(len(batch))]
                wanted = routes.wanted(batch, passes)
            table = self._exchange.send(flow[ROLLOUT], role, batch, wanted, flow.dp_assignment)
            if routes is not None:
                routes.table = table
