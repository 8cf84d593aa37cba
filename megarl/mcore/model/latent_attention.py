"""Multi-latent attention (DeepSeek-V2, 2405.04434 §2.1) over packed sequences in training and a cache of latents.

Parameters have Megatron's names; the rest is megarl's own, because Megatron's module needs sequences that start at
position 0, and its cache needs CUDA kernels with other bits than training. Projections to the latents are whole on each
tensor-parallel rank. PyTorch's fused kernels need keys, queries and values of one width: they are padded to it.
With `--exact-rollout` on CUDA latents are not expanded (`attention.latent_rows`), neither in rollout nor in training's
forward; backward is that of expanded keys and values.
Shapes: T tokens, A heads of this rank with D channels for scores (the last r rotated) and V for values, L of a latent.
"""

import functools
from collections.abc import Callable

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.attention import Attention
from torch import Tensor
from torch.nn.functional import pad

from megarl.mcore.attention import rotary_embeddings as rotary
from megarl.mcore.attention.cache_attention import Latents, softmax_scale
from megarl.mcore.attention.latent_rows import RowChoice, RowReads, row_attention
from megarl.mcore.attention.rotary_embeddings import Rotation
from megarl.mcore.kernels import with_gradient
from megarl.mcore.kernels.batch_invariance import is_exact, sigmoid
from megarl.mcore.kernels.linear import ReplicatedLinear, apply_linear, linear, of_all_tokens, to_all_ranks
from megarl.mcore.model.decoder_layer import StepPlan, local_layer
from megarl.mcore.parallel.context_parallel import gather_for_attention


def rotate_pairs(x: Tensor, rotation: Rotation | None) -> Tensor:
    """Rotates channels (0, 1), (2, 3) … of [T, 1, heads, r]; None: of models without positions, not at all.

    In the result the first channels of all pairs come before the second ones, as in Megatron; scores do not depend on
    the order.
    """
    if rotation is None:
        return x
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat([first, second], -1) * rotation.cosines + torch.cat([second, first], -1) * rotation.sines


class LatentAttention(Attention):
    """Queries from the hidden states or a latent of them, keys and values from a latent that all heads share."""

    count: int | None = None  # keys that a query chooses; None: it attends to all

    def __init__(self, config, submodules, layer_number, attn_mask_type, **kwargs):
        super().__init__(config, submodules, layer_number, attn_mask_type, "self", **kwargs)
        self.kv_channels = config.qk_head_dim, config.v_head_dim
        self.latent_channels = config.kv_lora_rank, config.qk_pos_emb_head_dim
        self.score_channels = config.qk_head_dim, config.qk_pos_emb_head_dim
        self.widths = sum(self.score_channels), config.v_head_dim
        if not hasattr(self.core_attention.backend, "takes_narrow_values"):
            self.widths = max(self.widths), max(self.widths)
        self.concentration = rotary.concentration(config, self.core_attention.kind)
        heads, hidden = config.num_attention_heads, config.hidden_size
        queries = heads * sum(self.score_channels)
        self.has_query_latent = config.q_lora_rank is not None
        if self.has_query_latent:
            self.linear_q_down_proj = ReplicatedLinear(hidden, config.q_lora_rank, config, self.tp_group)
            self.q_layernorm = self._norm(submodules.q_layernorm, config.q_lora_rank)
            self.linear_q_up_proj = self._column_parallel(submodules.linear_q_up_proj, config.q_lora_rank, queries)
        else:
            self.linear_q_proj = self._column_parallel(submodules.linear_q_proj, hidden, queries)
        self.linear_kv_down_proj = ReplicatedLinear(hidden, sum(self.latent_channels), config, self.tp_group)
        self.kv_layernorm = self._norm(submodules.kv_layernorm, config.kv_lora_rank)
        up = self._column_parallel(submodules.linear_kv_up_proj, config.kv_lora_rank, heads * sum(self.kv_channels))
        self.linear_kv_up_proj = of_all_tokens(up)
        self.has_gates = bool(config.attention_output_gate)
        if self.has_gates:  # a number of each head (Ling 3)
            self.linear_gate = self._column_parallel(submodules.linear_kv_up_proj, hidden, heads)

    def _norm(self, kind, width: int):
        epsilon = self.config.latent_norm_epsilon
        return kind(self.config, width, self.config.layernorm_epsilon if epsilon is None else epsilon)

    def _column_parallel(self, kind, columns: int, rows: int):
        off = dict.fromkeys(("gather_output", "bias", "skip_bias_add", "is_expert"), False)
        own = {"config": self.config, "init_method": self.config.init_method, "tp_group": self.tp_group}
        return kind(columns, rows, **off, **own)

    def get_query_key_value_tensors(self, *args, **kwargs):
        """Megatron's interface, which `forward` does not use."""
        raise NotImplementedError

    _layer = functools.cached_property(local_layer)

    def forward(
        self, hidden_states, attention_mask, *, inference_context=None, rotary_pos_emb=None, packed_seq_params=None, **_
    ) -> tuple[Tensor, Tensor | None]:
        """[T, 1, H] (under sequence parallelism, this rank's tokens) -> output of that shape, and a bias to add.

        `packed_seq_params` is a `PackedLayout`, `inference_context` a `PagedContext`; rotary_pos_emb [T, 1, r] or None.
        """
        if inference_context is not None:
            return self.step(hidden_states, inference_context.plan(rotary_pos_emb))
        layout = packed_seq_params
        rotation = None
        if rotary_pos_emb is not None:
            rotation = Rotation.of(rotary_pos_emb.unsqueeze(1), hidden_states.dtype, self.concentration)
        latent = self._query_latent(hidden_states)
        query, latents = self._query(latent, rotation), self._latents(hidden_states, rotation)
        if layout.order is not None:
            latents = gather_for_attention(latents, layout.order, layout.cp_group)
        attend = self._packed(hidden_states, latent, rotation, layout)
        if self.checkpoint_core_attention and self.training:  # keys and values are expanded again, too
            attended = tensor_parallel.checkpoint(attend, False, query, latents)
        else:
            attended = attend(query, latents)
        return self.linear_proj(self._values(attended, hidden_states))

    def _packed(self, hidden: Tensor, latent: Tensor, rotation: Rotation, layout) -> Callable[[Tensor, Tensor], Tensor]:
        """The attention of a micro-batch: queries [T, A, D], latents [T', L + r] -> attended values [T, A·V].

        `hidden`, `latent`: hidden states [T, 1, H], as of `forward`, and what `_query_latent` makes of them.
        """

        def attend(query: Tensor, latents: Tensor) -> Tensor:
            return self.core_attention.attend(query, *self.expand(latents), layout)

        if not is_exact(self.config):
            return attend
        exact = functools.partial(self._attend_rows, reads=self._row_reads(layout))
        if not torch.is_grad_enabled():
            return exact
        anchor = torch.empty(0, device=hidden.device, requires_grad=True)
        return lambda query, latents: _computed_as(query, latents, attend, exact, anchor)

    def _row_reads(self, layout) -> RowReads:
        """Those of a micro-batch."""
        if layout.key_reads is None:
            layout.key_reads = RowReads.of_stream(layout, self.core_attention.kind, self.count)
        return layout.key_reads

    def _row_reads_of_step(self, plan: StepPlan) -> RowReads:
        if not plan.key_reads:
            reads, block = plan.reads[self.core_attention.kind], plan.caches[self._layer].shape[1]
            plan.key_reads.append(RowReads.of_step(reads, block, self.count))
        return plan.key_reads[0]

    def step(self, hidden: Tensor, plan: StepPlan) -> tuple[Tensor, Tensor | None]:
        """As that of `PagedSelfAttention`, over a cache of latents [blocks, block, L + r, or more]."""
        rotation = None if plan.rotations is None else plan.rotations[self.core_attention.kind]
        latent = self._query_latent(hidden)
        query, latents = self._query(latent, rotation), self._cached(hidden, rotation)
        latents = latents if plan.dedup is None else latents.index_select(0, plan.dedup.inverse)
        rows = plan.caches[self._layer].flatten(0, 1)
        rows[:, : latents.shape[1]].index_copy_(0, plan.slot_mapping, latents)
        attended = self._attend_cache(query, rows, plan, (hidden, latent, rotation))
        return apply_linear(self.linear_proj, self._values(attended, hidden))

    def _cached(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        """What is cached of tokens."""
        return self._latents(hidden, rotation)

    def _attend_cache(self, query: Tensor, rows: Tensor, plan: StepPlan, tokens: tuple) -> Tensor:
        """Queries [T, A, D] and rows of the cache -> attended values [T, A·V]; `tokens`: hidden states, latents of
        queries, rotation."""
        if is_exact(self.config):
            return self._attend_rows(query, rows, self._row_reads_of_step(plan))
        core, cached = self.core_attention, Latents(plan.caches[self._layer], self.expand, self.widths[1])
        return plan.attend(query.unsqueeze(2), cached, plan.reads[core.kind], core.softmax_scale, **core.options)

    def _query_latent(self, hidden: Tensor) -> Tensor:
        """[T, 1, H] -> normed latents of queries; the hidden states themselves in models without such latents."""
        return self.q_layernorm(self.linear_q_down_proj(hidden)) if self.has_query_latent else hidden

    def _query(self, latent: Tensor, rotation: Rotation) -> Tensor:
        """Of `_query_latent` (under sequence parallelism, this rank's tokens) -> [T, A, D, or more by padding]."""
        projected, _ = apply_linear(self.linear_q_up_proj if self.has_query_latent else self.linear_q_proj, latent)
        plain, turned = projected.unflatten(-1, (-1, sum(self.score_channels))).split(self.score_channels, -1)
        return padded(torch.cat([plain, rotate_pairs(turned, rotation)], -1), self.widths[0]).squeeze(1)

    def _latents(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        """[T, 1, H] (under sequence parallelism, this rank's tokens) -> [T, L + r]: normed latents, rotated keys."""
        latent, shared = self.linear_kv_down_proj(hidden).split(self.latent_channels, -1)
        latents = torch.cat([self.kv_layernorm(latent), shared], -1)
        latents = to_all_ranks(latents, self.tp_group, self.config.sequence_parallel)
        latent, shared = latents.split(self.latent_channels, -1)
        return torch.cat([latent, rotate_pairs(shared.unsqueeze(2), rotation).squeeze(2)], -1).squeeze(1)

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """[…, L + r] -> keys and values […, A, D or V, or more by padding]."""
        latent, shared = latents.split(self.latent_channels, -1)
        expanded, _ = apply_linear(self.linear_kv_up_proj, latent.contiguous())
        key, value = expanded.unflatten(-1, (-1, sum(self.kv_channels))).split(self.kv_channels, -1)
        shared = shared.unsqueeze(-2).expand(*key.shape[:-1], -1)
        return padded(torch.cat([key, shared], -1), self.widths[0]), padded(value, self.widths[1])

    def _attend_rows(self, query: Tensor, latents: Tensor, reads: RowReads, choice: RowChoice | None = None) -> Tensor:
        """Queries [T, A, D] and latents [T', L + r] -> attended values [T, A·V], without expanding latents."""
        of_keys, of_values = self._expansion()
        scale, width = self._scale(query), self.latent_channels[0]
        if torch.is_grad_enabled():
            attended = row_attention(self._absorbed(query, of_keys), latents, width, reads, choice, scale)
            return padded(self._by_head(attended, of_values), self.widths[1]).flatten(1)
        from megarl.mcore.kernels.cuda.key_choice import attend_rows  # needs Triton

        out = query.new_zeros(*query.shape[:2], self.widths[1])
        for tokens, rows, first, seen, _ in reads.chosen(choice):  # absorbed heads are wide
            absorbed = self._absorbed(query[tokens], of_keys)
            attended, _ = attend_rows(absorbed, latents, rows, first, seen, width, scale)
            out[tokens] = padded(self._by_head(attended, of_values), self.widths[1])
        return out.flatten(1)

    def _scale(self, query: Tensor) -> float:
        return softmax_scale(query.shape[-1], self.core_attention.softmax_scale)

    def _absorbed(self, query: Tensor, of_keys: Tensor) -> Tensor:
        """Queries [n, A, D], times the weights of keys: [n, A, L + r]."""
        plain, turned = query[..., : sum(self.score_channels)].split(self.score_channels, -1)
        return torch.cat([self._by_head(plain, of_keys.transpose(1, 2)), turned], -1)

    def _expansion(self) -> tuple[Tensor, Tensor]:
        """Weights of the layer that expands latents, by head: of keys [A, D − r, L], of values [A, V, L]."""
        layer = self.linear_kv_up_proj
        weight = layer.weight
        # A product has low-rank factors, which a weight of 16 bits lacks, and gives them their gradients.
        adds_factors = getattr(layer, "adds_product", None)
        if adds_factors or adds_factors is not None and torch.is_grad_enabled():
            weight = apply_linear(layer, torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device))[0].t()
        weight = weight if weight.is_cuda or is_exact(self.config) else weight.float()  # kernels of a CPU are of fp32
        of_keys, of_values = weight.unflatten(0, (-1, sum(self.kv_channels))).split(self.kv_channels, 1)
        return of_keys, of_values

    def _by_head(self, x: Tensor, weights: Tensor) -> Tensor:
        """[n, A, K] and weights [A, N, K] -> [n, A, N]; a row's bits depend on the row alone, on a CPU and with
        `--exact-rollout`."""
        if is_exact(self.config):
            return _exact_by_head(x, weights)
        if x.is_cuda:
            return torch.einsum("nak,amk->nam", x, weights)
        return torch.stack([linear(x[:, head], weight) for head, weight in enumerate(weights.unbind())], 1)

    def _values(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """Attended values of A heads [T, A·V, or more by padding] -> [T, 1, A·V], times the heads' gates, of the hidden
        states as of `forward`, in models that have them."""
        values = attended.unflatten(-1, (-1, self.widths[1]))[..., : self.kv_channels[1]]
        if self.has_gates:
            gates = sigmoid(apply_linear(self.linear_gate, hidden)[0].float())
            values = values * gates.to(values.dtype).transpose(1, 2)
        return values.flatten(1).unsqueeze(1)


def padded(heads: Tensor, width: int) -> Tensor:
    """[…, D] with zeros up to `width` numbers."""
    return heads if heads.shape[-1] == width else pad(heads, (0, width - heads.shape[-1]))


def _gradient_of_other(ctx, grad):
    query, latents = (x.detach().requires_grad_() for x in ctx.saved_tensors)
    with torch.enable_grad():
        out = ctx.other(query, latents)
    torch.autograd.backward(out, grad)  # weights get theirs here
    return query.grad, latents.grad, None, None, None


@with_gradient(_gradient_of_other)
def _computed_as(ctx, query, latents, other, function, _anchor):
    """The result of a function, with the gradients of another one that computes the same in other bits. `_anchor` makes
    the result need a gradient even if no input does, since weights may."""
    ctx.save_for_backward(query, latents)
    ctx.other = other
    return function(query, latents)


def _gradient_by_head(ctx, grad):
    x, weights = ctx.saved_tensors
    return torch.einsum("nam,amk->nak", grad, weights), torch.einsum("nam,nak->amk", grad, x)


@with_gradient(_gradient_by_head)
def _exact_by_head(ctx, x, weights):
    from megarl.mcore.kernels.cuda.exact_rows import product_by_head  # needs Triton

    ctx.save_for_backward(x, weights)
    return product_by_head(x, weights)
