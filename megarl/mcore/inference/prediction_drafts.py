"""Drafts by the layer of multi-token prediction, one token a request and step.

The layer reads a step's hidden states and the tokens drawn from them: once after each step, as replicas that share its
experts compute together. Its keys and values, one more layer of the cache, take part in guesses alone: those of a token
belong to the sequence that was read first, and sequences that share blocks or rows may go on differently.
Shapes: n requests, T tokens of the step with padding, H hidden size.
"""

import numpy as np
import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from megarl.mcore.inference.draft_index import NO_TOKEN
from megarl.mcore.inference.paged_context import PagedContext
from megarl.mcore.model.gpt import ModelChunk, without_fork_of_random_state
from megarl.mcore.model.prediction_layer import PredictionLayer


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
