"""The requests of a running engine, from their admission to their completions."""

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.utils import InferenceMode

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.data.detokenizer import StopMatcher
from megarl.mcore.inference.end_tokens import NO_TOKEN, EndTokens, ForcedTokens, StopStates
from megarl.mcore.inference.generation import Completion, GenerationRequest, TokenChunk
from megarl.mcore.moe.router import recording_routes
from megarl.mcore.parallel.process_groups import all_reduce_number
from megarl.mcore.vision.store import share

# What a replica wants of those that share experts with it, or all of them agreed to do: nothing, a wait for requests,
# or a step; a step in which each decodes as many rows, which is `WAIT` plus their number; or another one.
NONE, WAIT, ANY_STEP = 0, 1, 2**30


class _OwnParams(SamplingParams):
    """Parameters of one request alone, so that Megatron's deep copies of them are not needed."""

    def __deepcopy__(self, _) -> "_OwnParams":
        return self


class GenerationSession:
    """Requests that join and leave an engine between its steps. All ranks of a replica make the same calls."""

    def __init__(
        self,
        owner,
        end_ids: tuple[int, ...],
        settings: SamplingSettings,
        routes: bool,
        stops: StopMatcher | None = None,
    ):
        """Begins without requests. `owner`: a `RolloutEngine`. Others as of its `session`; requests may have own."""
        self.owner = owner
        self.engine, self.context = owner.engine, owner.context
        self.sampling, self.drafter = owner.sampling, owner.drafter
        self.settings, self.routes = settings, routes
        self._matcher, self.stops = stops, StopStates(self._drawn_since)
        self.end_tokens = self.context.end_tokens = EndTokens(end_ids, self.stops)
        self.clear()

    def clear(self):
        """Drops all requests and their cache, which may have been computed with older weights."""
        self.context.reset()
        self.context.kv_block_allocator.record(self.routes)
        self.engine.requests.clear()
        self.engine.waiting_request_ids.clear()
        size = self.owner.max_requests
        self.sampling.reset(self.settings, size)
        self.forced = self.sampling.forced = self.end_tokens.forced = ForcedTokens(self._drawn_since, size)
        self._numbers: dict[int, int] = {}  # request id in the engine -> number of the request
        self._free_ids = deque(range(size))
        # By request id: tokens of the prompt, and `GenerationRequest.counted_tokens`.
        self._prompt_lengths, self._counted = np.zeros((2, size), dtype=np.int64)
        self._aborted: set[int] = set()  # request ids that end with the next step
        self.end_tokens.clear()
        if self.drafter is not None:
            self.drafter.reset(self.end_tokens.ids)
        InferenceMode.unset_active()

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, number: int, request: GenerationRequest):
        """Adds a request under a number of the caller's; the engine must have room for one more."""
        share(self.owner.model, request.prompt, self.owner.tensor_group)
        request_id = self._free_ids.popleft()
        self._numbers[request_id] = number
        self._prompt_lengths[request_id] = len(request.prompt)
        self._counted[request_id] = request.counted_tokens
        self.sampling.begin(request_id, request)
        self.end_tokens.set_own(request_id, request.end_ids)
        if (matcher := request.stops or self._matcher) is not None:
            self.stops.begin(request_id, matcher, request.prompt[request.start :])
        if request.thinking is not None:
            self.forced.begin(request_id, request.thinking, request.prompt, request.start)
        params = _OwnParams(
            num_tokens_to_generate=request.max_new_tokens,
            termination_id=NO_TOKEN,  # set by `Controller`
            return_log_probs=True,
            skip_prompt_log_probs=True,
        )
        self.engine.add_request(request_id, request.prompt, params)
        if self.drafter is not None:
            self.drafter.begin(request_id, request.prompt)

    def abort(self, numbers: Iterable[int]):
        """Drops requests: those that wait at once, others with the next step. They have no completions."""
        numbers = set(numbers)
        for request_id in [i for i, number in self._numbers.items() if number in numbers]:
            if request_id in self.engine.waiting_request_ids:
                self.engine.waiting_request_ids.remove(request_id)
                del self.engine.requests[request_id]
                self._forget(request_id)
            else:
                self._aborted.add(request_id)

    def limit_responses(self, max_response: int | None):
        """Ends responses in the cache after `max_response` tokens, `counted_tokens` included, with the next step."""
        if max_response is not None:
            c, active = self.context, slice(self.context.total_request_count)
            ids = c.request_ids[active].long()
            lengths, counted = torch.from_numpy(self._prompt_lengths)[ids], torch.from_numpy(self._counted)[ids]
            limits = lengths + (max_response - counted).clamp(min=1)
            c.request_output_lengths[active] = c.request_output_lengths[active].minimum(limits)

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        """Context of steps. Outside of it this rank may run forward passes of any model, but not update this one."""
        with torch.inference_mode():
            InferenceMode.set_active()
            try:
                with recording_routes(self.owner.model) if self.routes else contextlib.nullcontext():
                    yield
            finally:
                InferenceMode.unset_active()
                # Training cannot write to scratch memory of sequence parallelism allocated in inference mode.
                parallel_state.get_global_memory_buffer().buffer.clear()

    def step(self, agreed: int = ANY_STEP) -> list[tuple[int, Completion]]:
        """Runs one step of all requests; returns those that ended, aborted ones excepted. Without requests it computes
        tokens of replicas that share experts. `agreed`: the `highest_of_replicas` of what they wanted, a step."""
        is_coupled = self.owner.is_coupled
        rows = self.engine.agreed_rows = agreed - WAIT if is_coupled and agreed < ANY_STEP else None
        if not self.engine.has_unfinished_requests():
            if rows is not None:
                self.engine.device_decode.run(rows)
            elif is_coupled:
                self.owner.controller.dummy_forward()
            return []
        if self._aborted:
            active = slice(self.context.total_request_count)
            is_aborted = [i in self._aborted for i in self.context.request_ids[active].tolist()]
            self.context.request_output_lengths[active][torch.tensor(is_aborted, dtype=torch.bool)] = 0
        completions = (self._completion(record) for record in self.engine.step_modern()["finished_request_records"])
        return [completion for completion in completions if completion is not None]

    def new_tokens(self, reported: Mapping[int, int]) -> Iterator[TokenChunk]:
        """What open requests got since the last chunk; `reported`: known tokens, by number; others are passed over."""
        for request_id, number in self._numbers.items():
            if (start := reported.get(number)) is None:
                continue
            tokens, logprobs = self._drawn(request_id)
            if (count := len(tokens) - start) > 0:
                top = self.sampling.top_logprobs_of(request_id, int(self._prompt_lengths[request_id]) + start, count)
                yield TokenChunk(number, [*map(int, tokens[start:])], [*map(float, logprobs[start:])], top)

    def _drawn(self, request_id: int) -> tuple[list[int], list[float]]:
        """What a request has drawn, and the log-probs."""
        requests = self.engine.requests[request_id].record.requests
        tokens, logprobs = requests[0].generated_tokens, requests[0].generated_log_probs
        for request in requests[1:]:  # it was evicted
            more = request.generated_log_probs or []
            tokens, logprobs = tokens + request.generated_tokens, (logprobs or []) + more
        return tokens, logprobs

    def _drawn_since(self, request_id: int, count: int) -> Sequence[int]:
        return self._drawn(request_id)[0][count:]

    def unfinished(self) -> list[tuple[int, Completion]]:
        """All requests that have not ended, with their tokens so far and without routes."""
        numbers = list(self._numbers.values())
        chunks = {chunk.number: chunk for chunk in self.new_tokens(dict.fromkeys(numbers, 0))}
        empty = TokenChunk(number=-1, tokens=[], logprobs=[])
        found = ((number, chunks.get(number, empty)) for number in numbers)
        return [(number, Completion(chunk.tokens, chunk.logprobs, finished=False)) for number, chunk in found]

    def _completion(self, record) -> tuple[int, Completion] | None:
        # An evicted request is a record of several, each with the response so far as part of its prompt.
        request = record.merge() if len(record.requests) > 1 else record.requests[0]
        tokens, logprobs = [*map(int, request.generated_tokens)], [*map(float, request.generated_log_probs)]
        if len(tokens) != len(logprobs):
            raise RuntimeError(f"the engine returned {len(tokens)} tokens and {len(logprobs)} log-probs for a request")
        request_id, length = request.request_id, len(request.prompt_tokens) + len(tokens)
        recorded = self.context.kv_block_allocator.routes_of(request_id, length) if self.routes else None
        if self.drafter is not None:
            self.drafter.finish(request_id, [*request.prompt_tokens.tolist(), *tokens])
        is_finished = self.end_tokens.have_ended(request_id, tokens)
        if is_finished and self.forced:
            is_finished = not self.forced.are_forced(torch.tensor([request_id]), torch.tensor([length - 1]))
        top_logprobs = self.sampling.top_logprobs_of(request_id, len(request.prompt_tokens), len(tokens))
        is_aborted, number = request_id in self._aborted, self._forget(request_id)
        if is_aborted:
            return None
        return number, Completion(tokens, logprobs, is_finished, recorded, top_logprobs)

    def _forget(self, request_id: int) -> int:
        """Frees the id of a request that ended; returns its number."""
        self.sampling.finish(request_id)
        self.stops.finish(request_id)
        self.forced.finish(request_id)
        self._aborted.discard(request_id)
        self._free_ids.append(request_id)
        return self._numbers.pop(request_id)

    @property
    def wanted_step(self) -> int:
        """The step that this replica wants of those that share experts with it."""
        rows = self.engine.device_rows if self.owner.is_coupled else None
        return ANY_STEP if rows is None else WAIT + rows

    def highest_of_replicas(self, level: int) -> int:
        """The highest of what the replicas that share experts with this one want. A collective of these replicas."""
        return all_reduce_number(level, self.owner.expert_group, dist.ReduceOp.MAX)
