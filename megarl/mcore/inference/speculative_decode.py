"""Speculative decoding that changes no result: several tokens of a request in one engine step.

The token at a position is the one that the position's uniform number draws (`megarl.algorithms.token_sampling`),
whatever was drafted: if the draft is equal, the row that read it has drawn the next token; if not, later rows are
dropped. Rejection sampling (arXiv 2211.17192) would give another sequence.

A layer of multi-token prediction drafts one token a request and step. It reads a step's hidden states and the tokens
drawn from them: once after each step, as replicas that share its experts compute together. Its keys and values, one
more layer of the cache, take part in guesses alone: those of a token belong to the sequence that was read first, and
sequences that share blocks or rows may go on differently.
Shapes: n requests, T tokens of the step with padding, H hidden size.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from megarl.batch import expand_array_counts
from megarl.mcore import device
from megarl.mcore.inference import admission, draft_rows
from megarl.mcore.inference.decode_loop import DecodeLoopEngine
from megarl.mcore.inference.draft_index import MAX_DEPTH, NO_TOKEN
from megarl.mcore.inference.draft_rows import Groups
from megarl.mcore.inference.drafter import Drafter, Drafts, StepCosts
from megarl.mcore.inference.generation import EngineCounts
from megarl.mcore.inference.paged_context import PagedContext
from megarl.mcore.model.gpt import ModelChunk, without_fork_of_random_state
from megarl.mcore.model.prediction_layer import PredictionLayer
from megarl.mcore.parallel.process_groups import all_reduce_number
from megarl.observe import activity


class SpeculativeEngine(DecodeLoopEngine):
    """Generates what its base class does in fewer steps: it drafts in those for which that has its short path."""

    def __init__(self, controller, context):
        super().__init__(controller, context)
        c, self.device_decode.may_go_ahead = self.context, False
        costs = costs_of(self.controller.inference_wrapped_model.model, self.pg_collection.pp)
        self.drafter, self.counts = Drafter(costs, c.max_requests, c.max_sequence_length), EngineCounts()
        self.max_rows = min(2 * c.max_requests, c.max_tokens)  # bounds the memory of a step's logits
        self.prediction: PredictionDrafts | None = None

    @property
    def device_rows(self) -> int | None:
        """As of the base class; replicas that share experts plan steps after which a layer predicts on the host."""
        return None if self.prediction is not None and self.is_coupled else super().device_rows

    def step_modern(self) -> dict:
        """Runs one step of all requests; returns the finished requests under "finished_request_records"."""
        c, groups = self.context, self._update_groups()
        count = c.total_request_count
        if not self._only_decodes:
            decoding = count - c.paused_request_count
            if decoding and not c.num_prefill_requests and not admission.may_add(self):
                self.counts = self.counts.plus(EngineCounts(steps=1, requests=decoding, tokens=decoding))
            return super().step_modern()
        self.counts = self.counts.plus(EngineCounts(steps=1, requests=count, tokens=count))
        if self.agreed_rows is not None:  # replicas that share experts have as many rows
            return super().step_modern()
        looks = self.prediction is not None or self.drafter.should_look(count)
        drafts = self._drafts(groups) if looks else None
        if drafts is None and self.drafter.costs.shares(len(groups.first), count):
            drafts = Drafts(np.zeros(0, np.int64), np.zeros(len(groups.first), np.int64))
        if drafts is None:
            return super().step_modern()
        activity.tick()
        return self._step_with_drafts(drafts, groups)

    def _update_groups(self, more: int = 0, max_growth: int = 1, last: Tensor | None = None) -> Groups:
        """Returns which requests in the cache have the same sequence. `more`: tokens that each drew after its last
        known one; `max_growth`, `last`: as in `SequenceGroups.update`, `last` by default those of the context."""
        c, groups = self.context, self.drafter.groups
        if groups.are_apart:
            return Groups.apart(c.total_request_count - c.paused_request_count)
        ids, lengths = c.sampled_rows()
        last = c.token_to_input_ids[: len(ids)] if last is None else last
        return groups.update(ids.tolist(), (lengths + more).tolist(), last.tolist(), max_growth)

    def _drafts(self, groups: Groups) -> Drafts | None:
        """Returns the tokens to try after the last one of each group, with blocks of the cache for them; None if none
        are worth it."""
        c = self.context
        ids, lengths = (x.numpy() for x in c.sampled_rows())
        n, rows = c.total_request_count, self.drafter.rows_of(ids)

        def tail(i: int, size: int) -> Sequence[int]:
            request = self.get_request(int(ids[i]))
            generated = request.generated_tokens
            if size > len(generated):  # an evicted request's response so far was added to its prompt
                generated = [*request.prompt_tokens.tolist(), *generated]
            return generated[len(generated) - size :]

        self.drafter.catch_up(rows, lengths, c.token_to_input_ids[:n].numpy(), tail)
        # A request ends at its output length: the last row that may be used draws the token that reaches it.
        room = np.full(len(groups.first), MAX_DEPTH)
        np.minimum.at(room, groups.of, np.maximum(c.request_output_lengths[:n].numpy() - lengths - 1, 0))
        if forced := self.controller.sampling.forced:
            np.minimum.at(room, groups.of, forced.room(c.request_ids[:n], torch.from_numpy(lengths)).numpy())
        predicted = None if self.prediction is None else self.prediction.guesses(ids[groups.first])
        drafts = self.drafter.draft(rows[groups.first], room, groups.sizes, self.max_rows, predicted)
        if not len(drafts.tokens):
            return None
        counts = np.minimum(drafts.counts, room)
        counts = draft_rows.fit_to_blocks(c, torch.from_numpy(counts[groups.of])).numpy()[groups.first]
        if (counts < drafts.counts).any():
            owner, place = expand_array_counts(drafts.counts)
            drafts = Drafts(drafts.tokens[place < counts[owner]], counts)
        return drafts

    def _step_with_drafts(self, drafts: Drafts, groups: Groups) -> dict:
        """Runs a step that reads the last token and the drafted ones of each group once.

        Example: requests R and S have the same sequence, which ends in x, and the drafts a b. Their group's rows x a b
        are computed once and stand for three rows of R and three of S. If R draws a c … after them, its first two rows
        drew its next tokens: a, which was drafted, and c, after which the row of the wrong draft b counts for nothing.
        If S draws d … its first row alone counts. So `counts` is [2, 1], and R and S now have different sequences.
        """
        c, requests = self.context, self._requests_in_cache()
        tokens, each = torch.from_numpy(drafts.tokens), torch.from_numpy(drafts.counts)
        # The host plans rows that stand for several requests, recurrent states, and replicas that share experts.
        is_apart = len(groups.first) == len(groups.of) and not self.is_coupled and c.drafts_on_device
        rows = self.device_decode.rows(len(tokens) + len(each)) if is_apart else None
        inputs = draft_rows.begin_step(c, tokens, each, groups, rows)
        if rows is None:
            drawn, logprobs = self._draw(self._forward(inputs).squeeze(0))
        else:
            drawn, found = self.device_decode.run(rows)
            logprobs = torch.tensor(found, dtype=torch.float64)
        counts = draft_rows.accepted_counts(c, drawn)
        if self.prediction is not None:
            self.prediction.after_drafts(drawn, counts)
        draft_rows.copy_to_group(c, counts)
        first = (c.draft_rows.places == 0).nonzero().flatten()  # row of each request's last known token
        draft_rows.end_step(c, counts)
        last = first + counts - 1  # row that drew each request's last new token
        drawn_last = drawn[last]
        # Requests of a group tried the same drafts: as many accepted ones are the same ones.
        self._update_groups(more=1, max_growth=MAX_DEPTH + 1, last=drawn_last)
        tokens, logprobs = drawn.tolist(), logprobs.tolist()
        for request, start, end in zip(requests, first.tolist(), last.tolist(), strict=True):
            if end > start:
                request.generated_tokens += tokens[start:end]
                request.generated_log_probs += logprobs[start:end]
        more = int(counts.sum()) - len(requests)
        drafted = len(tokens) - len(requests)
        self.counts = self.counts.plus(EngineCounts(tokens=more, drafted=drafted, accepted=more))
        return self._end_step(drawn_last, [logprobs[row] for row in last.tolist()])

    def _end_step(self, tokens: Tensor, logprobs: list[float]) -> dict:
        if self.prediction is not None:
            self.prediction.after_decode(tokens)
        return super()._end_step(tokens, logprobs)

    def _draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the token [S] after each row of all requests and its log-prob [S], `max_rows` at a time."""
        c, sampling = self.context, self.controller.sampling
        rows, drawn, logprobs = c.draft_rows, [], []
        for start in range(0, len(rows.owners), self.max_rows):
            chunk = slice(start, start + self.max_rows)
            c.draft_rows = rows._replace(owners=rows.owners[chunk], computed=rows.computed[chunk])
            chosen = rows.computed[chunk].to(logits.device)
            tokens = sampling.sample_kernel(logits, len(chosen), c, gather_indices=chosen)
            drawn.append(tokens.cpu())
            logprobs.append(sampling.log_probs(tokens).cpu())
        c.draft_rows = rows
        return torch.cat(drawn), torch.cat(logprobs)


def parameters_of_a_token(model) -> int:
    """This rank's parameters that a token is multiplied by: of its experts, other replicas' tokens use as many. Of a
    module of transformers all experts count."""
    config, count = model.config, 0
    for name, parameter in model.named_parameters():
        is_expert, ranks = config.num_moe_experts and ".experts." in name, config.expert_model_parallel_size
        share = config.moe_router_topk * ranks / config.num_moe_experts if is_expert else 1
        count += int(parameter.numel() * share)
    return count


def costs_of(model, stages) -> StepCosts:
    """The costs of a decode step: the same on all ranks of a replica, which must draft the same tokens and may have
    different numbers of threads. A collective of its pipeline stages, the group `stages`, which compute in turn."""
    parameters, config = all_reduce_number(parameters_of_a_token(model), stages), model.config
    if device.has_cuda():
        return StepCosts.on_gpu(parameters, config.num_layers)
    threads = torch.get_num_threads() if config.tensor_model_parallel_size * dist.get_world_size(stages) == 1 else 1
    return StepCosts.on_cpu(parameters, config.num_layers, threads)


# -- drafts by the layer of multi-token prediction -------------------------------------------------------------------


class PredictionDrafts:
    """The layer's part in the steps of an engine."""

    def __init__(self, engine, layer: PredictionLayer):
        """`engine`: on the model whose hidden states the layer reads; its sampling draws the layer's tokens."""
        self._model: ModelChunk = engine.controller.inference_wrapped_model.model
        self._layer, self._device, self._sampling = layer, engine.device_decode, engine.controller.sampling
        self._context: PagedContext = engine.context
        self._device.modules.append(layer)
        self._guesses = np.full(self._context.max_requests, NO_TOKEN, np.int64)  # by request id
        self._context.after_prefill = self._after_prefill

    def guesses(self, request_ids: np.ndarray) -> np.ndarray:
        """Returns [n] the token that may follow the last one of each request; `NO_TOKEN` without a guess."""
        return self._guesses[request_ids]

    def after_decode(self, drawn: Tensor):
        """After a step that decoded a token of each request: `drawn` [n] are its tokens, on the host."""
        c, n = self._context, len(drawn)
        if c.hidden is None:  # of a step with drafts
            return
        following = torch.zeros(c.hidden_rows, dtype=torch.int64)
        following[:n] = drawn
        self._guess(self._predicted(following)[:n], torch.arange(n), *c.sampled_rows())

    def after_drafts(self, drawn: Tensor, counts: Tensor):
        """After a step with drafted tokens, before it ends. `drawn`: [S] the token after each row of all requests;
        `counts`: [n] rows of each request that drew its next tokens."""
        c, rows = self._context, self._context.draft_rows
        is_own = rows.requests[rows.computed] == rows.owners  # the others have the same rows
        following = torch.zeros(c.hidden_rows, dtype=torch.int64)
        following[rows.computed[is_own]] = drawn[is_own]
        hidden = self._predicted(following)
        last = (rows.places == 0).nonzero().flatten() + counts - 1
        read = following[rows.computed[last]] == drawn[last]  # of a group's requests, those that drew the same token
        ids, positions = (x[last] for x in c.sampled_rows())
        self._guesses[ids.numpy()] = NO_TOKEN
        if read.any():
            self._guess(hidden, rows.computed[last][read], ids[read], positions[read])

    def predict_for_others(self):
        """In a step without requests here: this replica has experts that other replicas' tokens use."""
        self._predicted(torch.zeros(self._context.hidden_rows, dtype=torch.int64))

    def _after_prefill(self, drawn: Tensor):
        """After a step that also read prompts, which drew tokens [n]; nothing is guessed after it."""
        c = self._context
        if c.hidden is None:
            return
        active = c.of_step
        ends, size = c.request_query_lengths[active].long().cumsum(0), c.padded_active_token_count
        following = c.token_to_input_ids[:size].long().cpu().roll(-1)
        following[ends - 1] = drawn[: len(ends)].long().cpu()
        ids = c.request_ids[active]
        is_partial = ids == c.chunked_prefill_request_id
        if is_partial.any():  # the token that was drawn after a part of its prompt is dropped
            request = c.request_of(c.chunked_prefill_request_id)
            following[ends[is_partial] - 1] = request.remaining_prompt_tokens[0]
        self._predicted(following)
        self._guesses[ids.numpy()] = NO_TOKEN

    def _predicted(self, following: Tensor) -> Tensor:
        """[T, H] for the head, of the step's tokens; `following` [T] are their next ones, on the host."""
        c, step = self._context, self._context.hidden_step
        (hidden, frequencies), c.hidden = c.hidden, None
        if step is None:
            ids, positions = (x.to(hidden.device) for x in (following, c.token_to_pos_ids[: len(following)]))
            return self._computed(hidden, frequencies, ids, positions)
        step.following.copy_(following)
        with c.use_device_plan(step):
            return self._device.after(step, lambda: self._computed(hidden, frequencies, step.following, step.positions))

    def _computed(self, hidden: Tensor, frequencies: Tensor | None, ids: Tensor, positions: Tensor) -> Tensor:
        """As `_predicted`; `ids` and `positions` [T] are on the device."""
        of = self._layer.layer
        with without_fork_of_random_state():
            embedded = self._model.embedding(input_ids=ids.unsqueeze(0), position_ids=positions.unsqueeze(0))
        states, plan = self._layer.combined(hidden, embedded), self._context.plan(frequencies)
        states = states if plan.dedup is None else states.index_select(0, plan.dedup.kept_tokens)
        states = of.final_layernorm(of.mtp_model_layer.step(states, plan))
        if self._model.config.sequence_parallel:
            states = gather_from_sequence_parallel_region(states, group=self._model.pg_collection.tp)
        return states.squeeze(1)

    def _guess(self, hidden: Tensor, rows: Tensor, ids: Tensor, positions: Tensor):
        """Guesses what follows the tokens of some requests. `hidden`: [T, H] of the layer; `rows`: [n] those of them
        that read each request's last token; `ids`, `positions`: [n] of the requests, and of these tokens."""
        model, ids = self._model, ids.long()
        weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        head, is_split = model.output_layer, model.output_layer.sequence_parallel
        head.sequence_parallel = False  # the rows are on all ranks
        logits, _ = head(hidden[rows.to(hidden.device)].unsqueeze(1), weight=weight, runtime_gather_output=True)
        head.sequence_parallel = is_split
        self._guesses[ids.numpy()] = self._sampling.guess(logits.squeeze(1), ids, positions.long() + 1).cpu().numpy()
