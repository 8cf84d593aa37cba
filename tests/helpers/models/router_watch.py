"""Records the experts of every token in whole runs, and perturbs the routers of training."""

import torch

from tests.helpers.programs import in_world

NOISE = 0.02  # largest perturbation of the training routers' logits; their standard deviation is about 0.1


class Watch:
    """The experts that the ranks of a run used: {(kind, step, sequence, position, layer): experts}.

    Kinds: `generated` in the rollout, `passed` and `updated` by the actor, `reference`. Two records of one token in
    one layer must be equal.
    """

    def __init__(self, noisy_from: int, replays: bool):
        """Perturbs the router logits of every pass but the rollout's from step `noisy_from` on.

        `replays`: whether the run replays the rollout's routes.
        """
        self.seen, self.step, self.noisy_from, self.replays = {}, 0, noisy_from, replays
        self._watch_routers()
        self._watch_rollout()
        self._watch_actor()

    def note(self, kind: str, batch, tokens, routes, layers):
        """Records routes [R, L, k] of tokens [R] of a batch; ignores positions after its end and rows of −1."""
        ends = batch.lengths.cumsum(0)
        for token, row in zip(tokens.tolist(), routes.tolist(), strict=True):
            if token >= len(batch.tokens) or not row or row[0][0] < 0:
                continue
            place = int(torch.searchsorted(ends, token, right=True))
            where = (int(batch.sequence_ids[place]), token - int(ends[place] - batch.lengths[place]))
            for layer, experts in zip(layers, row, strict=True):
                assert self.seen.setdefault((kind, self.step, *where, layer), experts) == experts

    def _watch_routers(self):
        from megatron.core.inference.utils import InferenceMode

        from megarl.mcore.moe.router import Router

        gating, watch = Router.gating, self

        def disturbed(router, hidden):
            logits = gating(router, hidden)
            if watch.step < watch.noisy_from or InferenceMode.is_active():
                return logits
            # The same wherever and whenever a token is routed, backward's recomputation too.
            return logits + NOISE * torch.sin(1e4 * logits)

        Router.gating = disturbed

    def _watch_rollout(self):
        from megarl.router_replay.route_exchange import RoutingReplay

        send_routes, watch = RoutingReplay.send_routes, self

        def sending(replay, step_batch):
            watch.step, batch = step_batch.step, step_batch["rollout"]
            if batch is not None and batch.routes is not None:
                layers = replay._exchange.layers("rollout", torch.distributed.get_rank())
                watch.note("generated", batch, torch.arange(len(batch.tokens)), batch.routes, layers)
            send_routes(replay, step_batch)

        RoutingReplay.send_routes = sending

    def _watch_actor(self):
        from megarl.router_replay import router_state
        from megarl.router_replay.router_state import RouterState

        attach, collect, watch = RouterState.attach, RouterState.add_statistics, self

        def attaching(self, batch, parts):
            attach(self, batch, parts)
            for part, places in parts:
                part.watched = (batch, places)

        def collecting(self, parts, trained):
            collect(self, parts, trained)
            is_probe = watch.replays and self.replayed_routes is None  # with live routers
            if self.role.name == "critic" or is_probe:
                return
            for part, _ in parts:
                batch, places = part.watched
                tokens = router_state._tokens_of(batch, places, part.routing.rows)
                routes = part.routing.recorded(self.topk)
                kind = "reference" if self.role.name == "reference" else "updated" if trained else "passed"
                watch.note(kind, batch, tokens, routes, self.layers)
                for own, held in shared_pairs(part, part.routing.rows.token_indices):
                    watch.note(kind, batch, batch.token_positions(places)[own], routes[held], self.layers)

        RouterState.attach, RouterState.add_statistics = attaching, collecting


def shared_pairs(part, token_indices):
    """[(tokens of a micro-batch that another sequence holds, rows of this rank that hold them)], one or none."""
    from megarl.comm.microbatches import shared_tokens

    shared, row_of = shared_tokens(part.host_metadata), {t: row for row, t in enumerate(token_indices.tolist())}
    if shared is None:
        return []
    pairs = [(a, row_of[b]) for a, b in zip(*(x.tolist() for x in shared), strict=True) if b in row_of]
    return [torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)]


def run_watched(rank: int, parsed, noisy_from: int) -> dict:
    """Runs train_rl on this rank; returns the recorded experts."""
    watch = Watch(noisy_from, parsed.settings.router_replay == "rollout")
    in_world(rank, "rl", parsed)
    return watch.seen
