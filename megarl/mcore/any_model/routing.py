"""Routers of transformers' modules: what records the experts that a token uses, and makes a router use others.

Routers differ by type, but choose by `topk`: the last one whose indices reach the experts function. There a `topk` of
megarl's takes its place. It returns the experts in ascending order, those of a route to replay if the token has one,
with the values that the scores have there now; the router's own code makes gates of them. A first pass with planted
experts shows that it does.
"""

import functools
import itertools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megarl.mcore.any_model import attention, rows, source
from megarl.mcore.any_model.attention import Unsupported
from megarl.mcore.moe.router import RouteRecorder

NOWHERE = -1
_topk = torch.topk


class ModuleRouter:
    """The router of one layer, as `moe.router.Router` is to those that record and replay its routes."""

    to_recompute = ()  # a pass has its routes, in recomputation, too
    experts = topk = 0
    is_planting = False

    def __init__(self, layer_number: int, block: nn.Module):
        """`block`: holds the router and the experts."""
        self.layer_number, self.router_replay = layer_number, RouteRecorder("")
        self.router_replay.layer_number = layer_number
        self._place: int | None = None  # of the choice among the block's calls of `topk`
        self._seen: list[Tensor] = []  # indices of these calls, until the place is known
        self._planted: Tensor | None = None
        block.forward = functools.partial(self._forward, block.forward)

    def _forward(self, forward, *args, **kwargs):
        calls = itertools.count()

        def choose(input, k, dim=-1, largest=True, sorted=True):  # of torch, and a method of tensors
            if next(calls) == self._place:
                return self._chosen(input, k)
            found = _topk(input, k, dim, largest, sorted)
            if self._place is None:
                self._seen.append(found.indices)
            return found

        with rows.replaced([(torch, "topk", choose), (Tensor, "topk", choose)]):
            return forward(*args, **kwargs)

    def _chosen(self, input: Tensor, k: int):
        """The router's choice, of the last axis, as `torch.topk` returns it."""
        each, scores, recorder = attention.current(), input.reshape(-1, input.shape[-1]), self.router_replay
        self.experts, self.topk = scores.shape[1], k
        routing: Any = self if self.is_planting else getattr(getattr(each, "layout", None), "routing", None)
        recorder.routing = routing
        own = recorder.get_replay_topk(scores[: each.tokens], k, default_compute_topk=_of_rows)
        others = _of_rows(scores[each.tokens :], k)  # rows that fill up vectors
        values, experts = (torch.cat(pair).view(*input.shape[:-1], k) for pair in zip(own, others, strict=True))
        return torch.return_types.topk((values, experts))

    def choose(self, _: int, live: Tensor) -> Tensor:
        """As of `Routing`: plants other experts than the live ones."""
        self._planted = ((live + 1) % self.experts).sort(dim=1).values
        return self._planted

    def take(self, _, args: tuple, kwargs: dict):
        """A hook of the experts: finds the place of their choice; then compares what was planted there with what
        arrives. Raises Unsupported."""
        _, chosen, gates = (*args, *kwargs.values())
        if self.is_planting:
            if self._planted is None or not torch.equal(chosen.reshape(self._planted.shape), self._planted):
                raise Unsupported("a router does not take the experts that it is given")
            if not gates.all():
                raise Unsupported("a router has no gates for experts that it would not choose")
            return
        equal = [torch.equal(x.flatten(), chosen.flatten()) for x in self._seen]
        if True not in equal:
            raise Unsupported("a router does not choose its experts by topk")
        self._place, self._seen = len(equal) - 1 - equal[::-1].index(True), []


def _of_rows(scores: Tensor, topk: int, **_) -> tuple[Tensor, Tensor]:
    values, experts = _topk(scores, topk, dim=-1)
    return values, experts


def install(module: PreTrainedModel, place: torch.device | str = "cpu") -> list[ModuleRouter]:
    """The routers of a module whose slots were found, in the order of its layers; [] for a dense one, or one whose
    experts are not called by transformers' interface.

    Args:
        place: as of `source.find_slots`.

    Raises:
        Unsupported: what keeps the routers from replaying routes; they choose as before.
    """
    blocks = [
        (number, block, each)
        for number, layer in enumerate(source.layers_of(module), 1)
        for block in layer.modules()
        for each in block.children()
        if hasattr(each, "_is_expert_parallel")  # of transformers' interface
    ]
    routers = [ModuleRouter(number, block) for number, block, _ in blocks]
    pairs = zip(routers, (each for *_, each in blocks), strict=True)
    hooks = [each.register_forward_pre_hook(router.take, with_kwargs=True) for router, each in pairs]
    try:
        for is_planting in (False, True) if routers else ():
            for router in routers:
                router.is_planting = is_planting
            source.find_slots(module, place=place)
        if len({router.layer_number for router in routers}) < len(routers):
            raise Unsupported("a layer has several routers")
        if len({(router.experts, router.topk) for router in routers}) > 1:
            raise Unsupported("routers choose among unlike numbers of experts")
    except Unsupported:
        for router in routers:
            router._place, router._seen = NOWHERE, []  # all choices are the router's own code's
        raise
    finally:
        for hook, router in zip(hooks, routers, strict=True):
            hook.remove()
            router.is_planting = False
    return routers
