"""Speculative decoding that changes no result: several tokens of a request in one engine step.

The token at a position is the one that the position's uniform number draws (`megarl.algorithms.counter_rng`). It
depends on the text before it alone, so a drafted token can be compared with the one that is drawn at its position in
any case: if they are equal, the row that read the draft has drawn the next token; if not, the drawn token is the next
one, and later rows are dropped. This is no rejection sampling, whose text is another one (arXiv 2211.17192).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megarl.mcore.inference import draft_rows
from megarl.mcore.inference.decode_loop import DecodeLoopEngine
from megarl.mcore.inference.drafter import DraftedText, Drafter
from megarl.observe import activity


class DecodeCounts(NamedTuple):
    """What decode steps did: steps in which no prompt is prefilled."""

    steps: int = 0
    requests: int = 0  # summed over steps
    tokens: int = 0  # generated
    drafted: int = 0
    accepted: int = 0  # drafted tokens that became part of a response

    def plus(self, other: Sequence[int]) -> "DecodeCounts":
        """Returns the sum of both counts."""
        return DecodeCounts(*(a + b for a, b in zip(self, other, strict=True)))


class SpeculativeEngine(DecodeLoopEngine):
    """Generates the same tokens, log-probs and routes as its base class, in fewer steps.

    It drafts in steps for which the base class has its short path, and in those after a request has ended.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        c = self.context
        self.drafter, self.counts = Drafter(), DecodeCounts()
        self._drafted: tuple[list, list[DraftedText]] = ([], [])  # requests of the last such step, and their texts
        self.max_rows = min(2 * c.max_requests, c.max_tokens)  # bounds the memory of a step's logits

    def step_modern(self) -> dict:
        """Runs one step of all requests; returns the finished requests under "finished_request_records"."""
        c, count = self.context, self.context.total_request_count
        if not self._can_draft:
            decoding = count - c.paused_request_count
            if decoding and not c.num_prefill_requests and not self.waiting_request_ids:
                self.counts = self.counts.plus((1, decoding, decoding, 0, 0))
            return super().step_modern()
        self.counts = self.counts.plus((1, count, count, 0, 0))
        drafts = self._drafts(count)
        if c.only_decodes and not any(drafts):
            return super().step_modern()
        activity.tick()
        return self._step_with_drafts(self._drafted[0], drafts)

    @property
    def _can_draft(self) -> bool:
        """Whether the next step decodes one token of each request, and the engine has its short step for the model."""
        c = self.context
        known, c.only_decodes = c.only_decodes, c.can_draft  # the base class tells the rest
        try:
            return self._only_decodes
        finally:
            c.only_decodes = known

    def _drafts(self, count: int) -> list[list[int]]:
        """Returns the tokens to try after the last one of each request, with blocks of the cache for them."""
        c, drafter, drafts = self.context, self.drafter, [[] for _ in range(count)]
        if self._decoding_requests is None or self._decoding_requests is not self._drafted[0]:
            requests = self._decoding_requests or [self.get_request(i) for i in c.request_ids[:count].tolist()]
            self._drafted = requests, [drafter.text_of(request.request_id) for request in requests]
        requests, texts = self._drafted
        followed = drafter.followed(texts)
        if not followed:
            return drafts
        for i in followed:
            self._catch_up(texts[i], requests[i])
        lengths = c.request_kv_length_offsets[:count] + c.request_query_lengths[:count]
        # A request ends at its output length: the last row that may be used draws the token that reaches it.
        room = (c.request_output_lengths[:count] - lengths - 1).clamp_(min=0).tolist()
        found = drafter.draft([texts[i] for i in followed], [room[i] for i in followed], count, self.max_rows)
        for i, draft in zip(followed, found, strict=True):
            drafts[i] = draft[: room[i]]
        sizes = draft_rows.fit_to_blocks(c, [len(draft) for draft in drafts]) if any(drafts) else []
        return [draft[:size] for draft, size in zip(drafts, sizes, strict=True)] if sizes else drafts

    def _catch_up(self, text: DraftedText, request):
        """Adds the tokens that a request got since its text was followed last."""
        generated = request.generated_tokens
        missing = len(request.prompt_tokens) + len(generated) - len(text.tokens)
        if missing > len(generated):  # the request was evicted: its response is now part of its prompt
            generated = [*request.prompt_tokens.tolist(), *generated]
        if missing:
            self.drafter.extend(text, generated[-missing:])

    def _step_with_drafts(self, requests: list, drafts: list[list[int]]) -> dict:
        """Runs a step that reads the last token and the drafted ones of each request."""
        c, sampling = self.context, self.controller._sampling
        draft_rows.begin_step(c, drafts)
        ids, positions = c.current_input_and_position_ids()
        logits = self._forward({"tokens": ids, "position_ids": positions, "attention_mask": None})
        sampled = sampling.sample_kernel(logits.squeeze(0), sum(map(len, drafts)) + len(drafts), c)
        logprobs, tokens = sampling.log_probs(sampled).tolist(), sampled.tolist()
        accepted = self._accepted(tokens, drafts)
        draft_rows.end_step(c, [len(rows) for rows in accepted])
        for request, rows in zip(requests, accepted, strict=True):
            request.generated_tokens += [tokens[row] for row in rows[:-1]]
            request.generated_log_probs += [logprobs[row] for row in rows[:-1]]
        more = sum(map(len, accepted)) - len(accepted)
        self.counts = self.counts.plus((0, 0, more, len(tokens) - len(drafts), more))
        return self._end_step(
            requests, [tokens[rows[-1]] for rows in accepted], [logprobs[rows[-1]] for rows in accepted]
        )

    def _accepted(self, tokens: list[int], drafts: list[list[int]]) -> list[range]:
        """Returns the rows of each request that drew its next tokens: those whose earlier drafts are what was drawn."""
        accepted, start, end_ids = [], 0, self.context.end_tokens.ids
        for draft in drafts:
            row = start
            for token in draft:
                if tokens[row] != token or token in end_ids:
                    break
                row += 1
            accepted.append(range(start, row + 1))
            start += len(draft) + 1
        return accepted

    def _end_step(self, requests: list, tokens: list[int], logprobs: list[float]) -> dict:
        """Advances by the last new token of each request, as a step without drafts does."""
        sampled = torch.tensor(tokens)
        self.controller._sampled_tokens_cuda[: len(tokens)] = sampled
        if not self.context.advance_decode(sampled):
            return self._finish_step(logprobs)
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            request.generated_tokens.append(token)
            request.generated_log_probs.append(logprob)
        self._decoding_requests = requests
        return {"finished_request_records": []}
