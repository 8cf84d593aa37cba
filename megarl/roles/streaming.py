"""A step that is judged while it is written: its groups in chunks, each handed over as soon as all of it has ended.

The rollout's ranks only give: they write on and wait for nobody. Chunks are dealt to the lanes of other roles by
sequence id, since lengths are not known before the end; what is learnt from is shared out by work as in any step.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch import SHARED, Batch, concatenate
from megarl.exchange import Pending, are_apart
from megarl.mcore import device
from megarl.observe.timers import Timers
from megarl.roles import lanes
from megarl.roles.flow import HOME, SOURCE, Flow
from megarl.roles.rollout import Rollout
from megarl.rollout.requests import Drawn, build_requests, pack_completions
from megarl.rollout.sampling import SamplingSettings
from megarl.rollout.turns import InTurn
from megarl.world import World

JUDGES = ("reward", "reference", "critic")  # roles that run over text before anything is learnt from it
GIVEN_BACK = {"critic": ["values"]}  # what a judge that learns computed over its chunks


def beside(world: World, replays: bool = False) -> tuple[str, ...]:
    """Judges that can work while the rollout writes; `replays`: the reference waits for the rollout's routes."""
    roles = (role for role in JUDGES if role in world.places and not (replays and role == "reference"))
    return tuple(role for role in roles if are_apart(world, SOURCE, role))


def bounds_of(prompts: int, samples: int, chunks: int) -> list[int]:
    """Sequence id behind the last one of each chunk: whole groups, in the order of the prompts."""
    return [samples * (prompts * (number + 1) // chunks) for number in range(chunks)]


def written(rollout: Rollout, prompts: list[Drawn], samples: int, step: int, bounds: list[int]) -> Iterator:
    """This lane's share of each chunk (a Batch, None outside the rollout), as soon as it is there.

    The engine goes on when the next one is asked for, and holds the requests of early chunks first.
    """
    s, place = rollout.settings, rollout.place
    if not place.is_member:
        yield from [None] * len(bounds)
        return
    requests = build_requests(torch.arange(bounds[-1]), prompts, samples, s.seed, step, s.max_response_length)
    routes = rollout.recorded_layers is not None
    source = InTurn(requests, bounds, place, rollout.is_dealt, samples, samples if s.rollout_prefix_caching else 1)
    sampling = SamplingSettings(s.temperature, s.top_k, s.top_p)
    stream = rollout.engine.stream(source, rollout.tokenizer.eos_id, sampling, routes, source.most)
    no_routes, done = rollout.engine.no_routes if routes else None, {}
    for chunk, bound in enumerate(bounds):
        with rollout.timers.phase(place.host, "rollout"):
            # Behind the last one the engine comes to rest.
            while (bound == bounds[-1] or not source.is_over(chunk)) and (ended := next(stream, None)):
                number, done[number] = ended
                source.ended(number)
            part = {number: done.pop(number) for number in list(done) if number < bound}
            batch = pack_completions(part, prompts, samples, requests, no_routes)
        yield batch
    source.close()


class Chunk(Flow):
    """Some groups of a step, numbered as in the step, for the judges beside the rollout."""

    is_chunk = True

    def __init__(self, step: "Streamed", rollout: Batch | None, count: int):
        super().__init__(step._world, step._timers, step._owners, rollout)
        self._roles, self._pending, self._count = step.judges, step._pending, count

    @property
    def count(self) -> int:
        """Sequences of the chunk on all lanes together."""
        return self._count

    def _wants(self, role: str) -> bool:
        return role in self._roles and super()._wants(role)

    def _send(self, source: str, destination: str, names: list[str], pending: Pending | None = None) -> Batch | None:
        return super()._send(source, destination, names, pending or self._pending)


class Streamed(Flow):
    """A step's data that are still being written."""

    def __init__(
        self, world: World, timers: Timers, samples: int, bounds: list[int], chunks: Iterator, judges: tuple[str, ...],
        owners_of: Callable[[Batch | None, int, object], Tensor],
        share_out: Callable[[Tensor, Tensor], dict[str, Tensor]],
    ):  # fmt: skip
        """
        Args:
            chunks: of `written`.
            judges: of `beside`.
            owners_of: `Rollout.owners`.
            share_out: (lengths, lane of the rollout that wrote each sequence) -> owners by work.
        """
        super().__init__(world, timers, lanes.dealt(world, bounds[-1], samples), None)
        self.judges, self._bounds, self._chunks = judges, bounds, chunks
        self._owners_of, self._share_out = owners_of, share_out

    def parts(self) -> Iterator[Flow]:
        """Each chunk when it is written, then all of the step, for the roles that chunks do not go to."""
        parts, before = [], 0
        for bound, batch in zip(self._bounds, self._chunks, strict=True):
            parts.append(Chunk(self, batch, bound - before))
            before = bound
            yield parts[-1]
        self._join(parts)
        yield self

    def _join(self, parts: list[Chunk]):
        """Makes one step of the chunks. The policy's ranks wait for no judge: these hear of the lengths later."""
        for role in (SOURCE, *self.judges):
            is_here = self._world[role].is_member
            self._batches[role] = concatenate([part[role] for part in parts]) if is_here else None
        rollout, policy = self._world[SOURCE], self._world.ranks_group(HOME, SOURCE)
        with self._timers.phase(rollout.host, "exchange"):
            if rollout.is_member or self._world[HOME].is_member:
                lengths = lanes.lengths_of(self._world, self[SOURCE], self.count, policy)
                facts = torch.stack([lengths, self._owners_of(self[SOURCE], self.count, policy).to(lengths.device)])
                self._pending.hold(dist.broadcast(facts, rollout.leaders[0], async_op=True), facts)
            else:
                facts = torch.empty(2, self.count, dtype=torch.int64, device=device.device())
                dist.broadcast(facts, rollout.leaders[0])
        lengths, holders = facts.cpu()
        self._by_work = self._share_out(lengths, holders)
        self._owners = self._by_work | {role: self._owners[role] for role in self.judges}

    def give(self, role: str, names: list[str]):
        """As of any step; a judge of several lanes gets its sequences anew, shared out by work."""
        if not self._has(role) or torch.equal(self._owners[role], self._by_work[role]):
            return super().give(role, names)
        self._owners[role] = self._by_work[role]
        self._batches[role] = self._send(HOME, role, [*SHARED, *GIVEN_BACK[role], *names])
