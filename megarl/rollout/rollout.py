"""The rollout: writes text with the actor's policy, on the actor's own module or on a model of its own layout."""

import time

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.arguments import RoleSettings, Settings
from megarl.batch import Batch, round_robin
from megarl.comm.role_mesh import RoleMesh
from megarl.data.tokenizers import Tokenizer
from megarl.errors import UsageError
from megarl.mcore import device
from megarl.mcore.inference.engine import Completion, GenerationRequest, RequestList, RolloutEngine
from megarl.mcore.memory.offload import KVCacheInGradBuffer
from megarl.mcore.model import gpt
from megarl.mcore.moe.routing import NO_ROUTE
from megarl.mcore.weights.reshard import WeightTransfer
from megarl.observe.timers import Timers
from megarl.rollout.request_queue import UNFINISHED, GroupEarlyStop, SharedRequestQueue, shortest_groups
from megarl.rollout.requests import (
    PartialResponse,
    PromptRequest,
    build_requests,
    completions_to_batch,
    partial_responses_of,
    skip_if_enough_are_finished,
)


class Rollout:
    """The engine that writes, and the way by which the actor's weights come to it."""

    name = "rollout"

    def __init__(
        self, settings: Settings, role: RoleSettings, mesh: RoleMesh, trained: gpt.ModelChunks | None, tokenizer: Tokenizer,
        timers: Timers, cache_in_grad_buffer: KVCacheInGradBuffer | None = None,
    ):  # fmt: skip
        """Takes the actor's module where the two share it, else builds a model and plans the transfer. Collective.

        `trained` is the actor's module on this rank, None outside the actor. `cache_in_grad_buffer`: the bytes of its gradients, in
        which the cache lives where the two share a module.
        """
        self.settings, self.role, self.timers, self.tokenizer = settings, role, timers, tokenizer
        self.mesh, self.role_groups = mesh, mesh["rollout"]
        self.metrics: dict[str, float] = {}
        self.engine = self._transfer = self.model = None
        if role.model_role == "actor":
            self.model = trained
        elif self.role_groups.is_member:
            self.model = gpt.build_frozen_model(role.megatron, tokenizer.vocab_size, self.role_groups.pg_collection)
        if role.model_role == self.name and (trained is not None or self.model is not None):
            self._group = mesh.ranks_group("actor", self.name)
            self._transfer = WeightTransfer(
                trained, mesh["actor"].pg_collection, self.model, self.role_groups.pg_collection, self._group
            )
        if self.role_groups.is_member:
            self.engine = RolloutEngine(
                self.model[0],
                self.role_groups.pg_collection,
                tokenizer.vocab_size,
                settings.max_prompt_length + settings.max_response_length,
                settings.rollout_buffer_gb,
                settings.rollout_max_requests,
                settings.rollout_prefix_caching,
                settings.rollout_chunked_prefill,
                cache_in_grad_buffer=cache_in_grad_buffer if role.model_role == "actor" else None,
            )
            self._check_capacity()

    def _check_capacity(self):
        s, capacity = self.settings, self.engine.capacity
        longest = s.max_prompt_length + s.max_response_length
        if capacity < longest:
            raise UsageError(
                f"--rollout-buffer-gb {s.rollout_buffer_gb}: the cache holds one text of {capacity} tokens; "
                f"--max-prompt-length + --max-response-length is {longest}",
                speaker=self.role_groups.ranks.start,
            )

    @property
    def recorded_layers(self) -> tuple[int, ...] | None:
        """Numbers of the MoE layers whose routes this rank records; None in a run that records none."""
        if self.settings.router_replay != "rollout":
            return None
        return self.engine.layers if self.role_groups.is_member else ()

    @property
    def is_static(self) -> bool:
        """Whether lanes know their requests before anything is written; else they draw them as they have room."""
        return self.settings.rollout_dispatch == "static" or len(self.role_groups.replicas) == 1

    def sync_weights(self):
        """Brings the actor's present weights to the engine; nothing to do where it runs on the actor's module.

        A collective of the actor's and the rollout's ranks. Waiting for the others is no work of either role.
        """
        self.metrics = {"weights/sync_bytes": 0, "weights/sync_s": 0.0}
        if self._transfer is None:
            return
        roles = [name for name in ("actor", "rollout") if self.mesh[name].is_member]
        with self.timers.phase(roles[-1], "wait"):
            dist.barrier(group=self._group)
        start = time.perf_counter()
        # A rank of both roles books the time to the rollout.
        with self.timers.phase(roles[0], "sync"), self.timers.phase(roles[-1], "sync"):
            sent = torch.tensor(self._transfer.run(), dtype=torch.int64, device=device.device())
            dist.all_reduce(sent, group=self._group)
            self.metrics = {"weights/sync_bytes": int(sent)}
            if self.settings.verify_weights:
                self._transfer.verify()
        self.metrics["weights/sync_s"] = time.perf_counter() - start

    def generate(
        self, prompts: list[PromptRequest], samples: int, step: int, temperature: float | None = None,
        wanted: int | None = None,
    ) -> Batch | None:  # fmt: skip
        """Writes `samples` responses to each prompt; this lane's share of them, packed.

        `temperature` is `--temperature` by default, of text to learn from, and has its routes with
        `--router-replay rollout`; 0 takes the likeliest token each time. With `wanted` writing stops once it is sure
        which so many groups come `first`; responses of others may lack their end. Responses that were begun before go
        on; what there was of them stands in the prompts of the batch.
        """
        if not self.role_groups.is_member:
            return None
        s = self.settings
        with self.timers.phase(self.role_groups.model_role, "rollout"):
            ids = torch.arange(len(prompts) * samples)
            requests = build_requests(ids, prompts, samples, s.seed, step, s.max_response_length)
            requests = requests if wanted is None else skip_if_enough_are_finished(requests, samples, wanted)
            routes = temperature is None and self.recorded_layers is not None
            temperature = s.temperature if temperature is None else temperature
            sampling = SamplingSettings(temperature or 1.0, s.top_k, s.top_p, greedy=temperature == 0)
            is_race = wanted is not None and wanted < len(prompts) and any(r.max_new_tokens for r in requests)
            race = GroupEarlyStop(wanted, samples, requests, self.role_groups) if is_race else None
            done = self._write(requests, samples, sampling, routes, race)
            done |= self._not_written(requests, partial_responses_of(ids, prompts, samples), samples, routes)
            return completions_to_batch(done, prompts, samples, requests, self.engine.no_routes if routes else None)

    def _write(
        self,
        requests: list[GenerationRequest],
        samples: int,
        sampling: SamplingSettings,
        routes: bool,
        race: GroupEarlyStop | None,
    ) -> dict[int, Completion]:
        """What this lane wrote of the requests of all lanes, by their place in the list."""
        end, replicas, most, done = self.tokenizer.eos_id, len(self.role_groups.replicas), None, {}
        if self.is_static:
            dp_assignment = round_robin(torch.arange(len(requests)), replicas, samples).tolist()
            mine = [(i, request) for i, request in enumerate(requests) if dp_assignment[i] == self.role_groups.dp_rank]
            source = RequestList((i, request) for i, request in mine if request.max_new_tokens)
        else:
            # A prompt's samples stay together where they share its cache, or where a lane must know when they are done.
            source = SharedRequestQueue(
                requests, samples if self.settings.rollout_prefix_caching or race else 1, self.role_groups
            )
            most = source.share
        for number, done[number] in self.engine.stream(source, end, sampling, routes, most, race and race.longest):
            if race:
                race.ended(number, done[number])
        for board in (source, race):
            if isinstance(board, (SharedRequestQueue, GroupEarlyStop)):
                board.close()
        return done

    def _not_written(
        self, requests: list[GenerationRequest], parts: list[PartialResponse], samples: int, routes: bool
    ) -> dict[int, Completion]:
        """Responses that get no more tokens; they are dealt to the lanes. Their routes are unknown."""
        dp_assignment, done = (
            round_robin(torch.arange(len(requests)), len(self.role_groups.replicas), samples).tolist(),
            {},
        )
        none = self.engine.no_routes
        for i, request in enumerate(requests):
            if not request.max_new_tokens and dp_assignment[i] == self.role_groups.dp_rank:
                unknown = none.new_full((len(request.prompt), *none.shape[1:]), NO_ROUTE) if routes else None
                done[i] = Completion([], [], parts[i].is_finished, unknown)
        return done

    def recompute_routes(self, batch: Batch | None, prompts: list[PromptRequest], samples: int):
        """Has the engine read responses that were whole before `generate`, for their routes under the present policy.

        `batch`: this rank's share of the responses to `prompts`, as they were given to `generate`.
        """
        limit, every = self.settings.max_response_length, torch.arange(len(prompts) * samples)
        is_whole = torch.tensor([not part.remaining(limit) for part in partial_responses_of(every, prompts, samples)])
        if batch is None or self.recorded_layers is None or not is_whole.any():
            return
        with self.timers.phase(self.role_groups.model_role, "rollout"):
            places = is_whole[batch.sequence_ids.cpu()].nonzero().flatten().tolist()
            texts, bounds = batch.tokens.split(batch.lengths.tolist()), batch.cu_seqlens.tolist()
            # The last token has no route: the engine draws one in its place.
            requests = [GenerationRequest(texts[i][:-1].tolist(), 0, 1) for i in places]
            done = self.engine.generate(requests, self.tokenizer.eos_id, SamplingSettings(), routes=True)
            for i, completion in zip(places, done, strict=True):
                batch.routes[bounds[i] : bounds[i + 1]] = completion.routes.to(batch.routes.device)

    def earliest_groups(
        self, batch: Batch | None, prompts: list[PromptRequest], samples: int, wanted: int
    ) -> tuple[Tensor, int]:
        """([wanted] ascending numbers of the groups that come first of those that `generate` was given, their longest
        response).

        Those whose longest response is the shortest, in new tokens, of equal ones the first; all their responses have
        their end. `batch`: this rank's share. A collective of the world.
        """
        ids = torch.arange(len(prompts) * samples)
        longest = torch.zeros_like(ids, device=device.device())
        if self.role_groups.is_leader:
            left = [
                part.remaining(self.settings.max_response_length)
                for part in partial_responses_of(ids, prompts, samples)
            ]
            lengths = batch.response_lengths
            is_whole = batch.finished | (lengths == longest.new_tensor(left)[batch.sequence_ids])
            longest[batch.sequence_ids] = lengths.masked_fill(~is_whole, UNFINISHED)
        dist.all_reduce(longest)
        longest = longest.view(-1, samples).amax(1).cpu()
        first = shortest_groups(longest, wanted)
        return first, int(longest[first].max())

    def dp_assignment(self, batch: Batch | None, count: int, group=None) -> Tensor:
        """[count] int64: the lane that wrote each sequence; `batch`: this rank's share.

        A collective of the group: the world, or one that all ranks of the rollout are in.
        """
        dp_assignment = torch.zeros(count, dtype=torch.int64, device=device.device())
        if len(self.role_groups.replicas) > 1:
            if self.role_groups.is_leader:
                dp_assignment[batch.sequence_ids] = self.role_groups.dp_rank
            dist.all_reduce(dp_assignment, group=group)
        return dp_assignment.cpu()
