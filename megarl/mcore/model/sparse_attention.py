"""Multi-latent attention over the keys that a frozen lightning indexer chooses (DeepSeek-V3.2, GLM-5).

Index keys, C numbers a token and layer, are further columns of the cache of latents, so that blocks, equal prompts,
prefix caching, drafts and eviction treat them as they treat latents.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor

from megarl.mcore import device
from megarl.mcore.attention import native_attention
from megarl.mcore.attention.chosen_keys import Choice, KeyReads, choose, chosen_attention, disagreement
from megarl.mcore.attention.latent_rows import RowReads, row_disagreement
from megarl.mcore.attention.rotary_embeddings import Rotation
from megarl.mcore.attention.segments import SegmentPlan
from megarl.mcore.kernels.batch_invariance import is_exact
from megarl.mcore.kernels.linear import (
    ReplicatedLinear,
    apply_linear,
    at_least_rows,
    of_all_tokens,
    to_all_ranks,
)
from megarl.mcore.kernels.norm import BY_ROWS
from megarl.mcore.model.decoder_layer import StepPlan
from megarl.mcore.model.latent_attention import LatentAttention, padded, rotate_pairs
from megarl.mcore.model.pipeline_layout import indexer_of
from megarl.mcore.parallel.context_parallel import gather_for_attention
from megarl.mcore.parallel.process_groups import split_state_dict

KEY_NORM_EPSILON = 1e-6  # in transformers and in DeepSeek's own code


def rotate_halves(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotates channels (i, i + r/2) of [T, 1, heads, r]."""
    first, second = x.chunk(2, -1)
    return x * rotation.cosines + torch.cat([second, first], -1) * rotation.sines


class Indexer(torch.nn.Module):
    """The projections of queries, keys and weights, which are never trained.

    Parameters have Megatron's names. The largest projection is split by heads over tensor-parallel ranks, which gather
    its results: each rank chooses for all of its tokens. The first r of C channels are rotated: pairs of neighbours, or
    halves.
    """

    def __init__(self, config, group, heads_of_rank: torch.nn.Module):
        """`heads_of_rank`: column-parallel layer from latents of queries to I·C numbers."""
        super().__init__()
        self.heads, self.channels = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        self.rotated, self.config, self.tp_group = config.qk_pos_emb_head_dim, config, group
        self.rotate = rotate_pairs if config.dsa_indexer_rope_interleaved else rotate_halves
        self.linear_wq_b = of_all_tokens(heads_of_rank)
        self.linear_wk = ReplicatedLinear(config.hidden_size, self.channels, config, group)
        place = {"dtype": config.params_dtype, "device": device.device()}
        norm = BY_ROWS[torch.nn.LayerNorm] if is_exact(config) else torch.nn.LayerNorm
        self.k_norm = norm(self.channels, eps=KEY_NORM_EPSILON, **place)
        self.linear_weights_proj = ReplicatedLinear(config.hidden_size, self.heads, config, group)
        self.requires_grad_(False)

    sharded_state_dict = split_state_dict

    @torch.no_grad()
    def queries(self, hidden: Tensor, latent: Tensor, rotation: Rotation) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """Hidden states and normed latents [T, 1, …], under sequence parallelism of this rank's tokens -> heads and
        weights of all T, as `choose` takes them."""
        both = torch.cat([self.linear_weights_proj(hidden), latent], -1)
        both = to_all_ranks(both, self.tp_group, self.config.sequence_parallel)
        weights, latent = both.split((self.heads, latent.shape[-1]), -1)
        return functools.partial(self._heads, latent, rotation), weights.squeeze(1).float() * self.heads**-0.5

    @torch.no_grad()
    def keys(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        """[T, 1, H], under sequence parallelism of this rank -> [T, C] of all T."""
        keys = to_all_ranks(self.k_norm(self.linear_wk(hidden)), self.tp_group, self.config.sequence_parallel)
        return self._rotated(keys.unsqueeze(2), rotation).flatten(1)

    def _heads(self, latent: Tensor, rotation: Rotation, tokens: Tensor) -> Tensor:
        heads = at_least_rows(lambda x: apply_linear(self.linear_wq_b, x)[0], latent[tokens])
        heads = gather_from_tensor_model_parallel_region(heads, group=self.tp_group)
        return self._rotated(heads.unflatten(-1, (self.heads, self.channels)), rotation.at(tokens)).squeeze(1)

    def _rotated(self, x: Tensor, rotation: Rotation) -> Tensor:
        turned, plain = x.split((self.rotated, self.channels - self.rotated), -1)
        return torch.cat([self.rotate(turned, rotation), plain], -1)


class SparseLatentAttention(LatentAttention):
    """`LatentAttention` over chosen keys, in sequences that have more than a query chooses."""

    def __init__(self, config, submodules, layer_number, *args, **kwargs):
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        self.count, self.source = config.dsa_indexer_topk, indexer_of(config, layer_number)
        self.is_shared = layer_number < config.num_layers and indexer_of(config, layer_number + 1) == self.source
        if self.source == layer_number:
            rows = config.dsa_indexer_n_heads * config.dsa_indexer_head_dim
            heads = self._column_parallel(submodules.linear_q_up_proj, config.q_lora_rank, rows)
            self.core_attention.indexer = Indexer(config, self.tp_group, heads)
        # Sums of `disagreement` since they were last taken.
        self.disagreement = torch.zeros(2, dtype=torch.float64, device=device.device())

    def _packed(self, hidden: Tensor, latent: Tensor, rotation: Rotation, layout):
        if layout.max_seqlen_kv <= self.count:
            return super()._packed(hidden, latent, rotation, layout)
        if self._uses_rows(hidden):
            self._row_reads(layout)
        elif layout.key_reads is None:
            layout.key_reads = KeyReads.of_stream(layout, self.core_attention.kind, self.count)
        keys = None
        if self._indexer is not None:
            keys = self._indexer.keys(hidden, rotation)
            if layout.order is not None:
                keys = gather_for_attention(keys, layout.order, layout.cp_group)
        choice = self._choice(layout.key_reads, keys, (hidden, latent, rotation))

        def attend(query: Tensor, latents: Tensor) -> Tensor:
            return self._attend(query, latents, layout.key_reads, choice, layout)

        return attend

    def _uses_rows(self, x: Tensor) -> bool:
        return x.is_cuda or is_exact(self.config)

    @property
    def _indexer(self) -> Indexer | None:
        return getattr(self.core_attention, "indexer", None)

    def _choice(self, reads: KeyReads | RowReads, keys: Tensor | None, tokens: tuple):
        """This layer's choice by index keys [T', C], or the one that it shares; None: all queries see few keys."""
        if not reads.is_long:
            return None
        if keys is None:
            return reads.choices[self.source]
        hidden, latent, rotation = tokens
        heads_of, weights = self._indexer.queries(hidden, latent, rotation)
        choice: Any = None
        if isinstance(reads, RowReads):
            choice = reads.choose(heads_of, weights, keys)
        else:
            choice = choose(heads_of, weights, keys.float(), reads.long, self.count)
        if self.is_shared:
            reads.choices[self.source] = choice
        return choice

    def _attend(self, query: Tensor, latents: Tensor, reads: KeyReads | RowReads, choice, layout=None) -> Tensor:
        """Queries [T, A, D] and latents [T', L + r] -> attended values [T, A·V]; `layout`: of a micro-batch."""
        if isinstance(reads, KeyReads):
            attended = self._attended(query.float(), latents.float(), reads, choice, self._scale(query))
            return attended.flatten(1).to(query.dtype)
        if choice is not None and torch.is_grad_enabled():
            with torch.no_grad():  # once in an update, also of recomputed layers
                of_keys, _ = self._expansion()
                some = [self._absorbed(query[tokens], of_keys) for tokens, *_ in reads.compared(layout)]
                found = row_disagreement(some, latents, reads, choice, self._scale(query), self.tp_group)
                self.disagreement += found
        return self._attend_rows(query, latents, reads, choice)

    def _attended(self, query: Tensor, latents: Tensor, reads: KeyReads, choice: Choice | None, scale: float) -> Tensor:
        out = self._attend_to_all(query, latents, reads, scale)
        if choice is None:
            return out
        if torch.is_grad_enabled():  # once in an update, also of recomputed layers
            long = query.index_select(0, reads.of_long)
            self._compare(long, latents, choice, reads.compared, scale)
            found = self._attend_to_chosen(long, latents, choice, scale)
            return out.index_copy(0, reads.of_long, found)
        for part, own in choice.parts():  # absorbed heads are wide
            tokens = reads.of_long[part]
            out[tokens] = self._attend_to_chosen(query[tokens], latents, own, scale)
        return out

    def _attend_to_chosen(self, query: Tensor, latents: Tensor, choice: Choice, scale: float) -> Tensor:
        """Queries [n, A, D], which choose keys -> attended values [n, A, V]."""
        of_keys, of_values = self._expansion()
        absorbed = self._absorbed(query, of_keys)
        attended = chosen_attention(absorbed, latents, self.latent_channels[0], choice, scale)
        return padded(self._by_head(attended, of_values), self.widths[1])

    @torch.no_grad()
    def _compare(self, query: Tensor, latents: Tensor, choice: Choice, compared, scale: float):
        """Compares the choice of some of the queries [n, A, D] with the attention that they would pay to all keys."""
        some = self._absorbed(query[compared[0]], self._expansion()[0])
        self.disagreement += disagreement(some, latents, choice, compared, scale, self.tp_group)

    def _attend_to_all(self, query: Tensor, latents: Tensor, reads: KeyReads, scale: float) -> Tensor:
        """[T, A, V] of the queries that see few keys; those of others mean nothing."""
        if len(reads.dense) == 1 and torch.is_grad_enabled():
            rows, batches = reads.dense[0]
            key, value = self._expanded(latents, rows)
            return native_attention.packed_attention(query, key, value, SegmentPlan(batches, rows), scale)
        out = query.new_zeros(*query.shape[:2], self.widths[1])
        for rows, batches in reads.dense:
            key, value = self._expanded(latents, rows)
            for batch in batches:
                native_attention.attend(query, key, value, batch, (scale, None, None), out)
        return out

    def _expanded(self, latents: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of some rows; their product has the dtype of the weights."""
        key, value = self.expand(latents.index_select(0, rows).to(self.config.params_dtype))
        return key.float(), value.float()

    def _cached(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        latents = self._latents(hidden, rotation)
        return latents if self._indexer is None else torch.cat([latents, self._indexer.keys(hidden, rotation)], -1)

    def _attend_cache(self, query: Tensor, rows: Tensor, plan: StepPlan, tokens: tuple) -> Tensor:
        if self._uses_rows(rows):
            reads = self._row_reads_of_step(plan)
        else:
            if not plan.key_reads:
                of_cache = KeyReads.of_step(plan.reads[self.core_attention.kind], self.count)
                plan.key_reads.append(of_cache if rows.dtype is torch.float32 else of_cache.of_read_rows())
            reads = plan.key_reads[0]
            rows = rows if reads.rows is None else rows.index_select(0, reads.rows).float()
        width = sum(self.latent_channels)
        keys = None if self._indexer is None else rows[:, width:]
        return self._attend(query, rows[:, :width], reads, self._choice(reads, keys, tokens))


def take_disagreement(stages, layers: int, group) -> dict[str, float]:
    """Metrics of a model with indexers, of its updates since the last call: `disagreement`, the mean over layers, and
    that of each layer; {} if no compared query chose keys. Collective.

    Args:
        stages: the model's chunks on this rank.
        layers: of the whole model.
        group: all ranks of the model.
    """
    sums = torch.zeros(layers, 2, dtype=torch.float64, device=device.device())
    for chunk in stages:
        for module in chunk.modules():
            if isinstance(module, SparseLatentAttention):
                sums[module.layer_number - 1] += module.disagreement
                module.disagreement.zero_()
    dist.all_reduce(sums, group=group)
    numbers = [number for number in range(layers) if sums[number, 1] > 0]
    if not numbers:
        return {}
    by_layer = (sums[numbers, 0] / sums[numbers, 1]).tolist()
    found = {f"disagreement/layer_{n + 1:03d}": value for n, value in zip(numbers, by_layer, strict=True)}
    return {"disagreement": sum(by_layer) / len(by_layer)} | found
