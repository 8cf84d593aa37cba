"""The MoE layer and its experts, with a direct path for experts that are plain SwiGLU MLPs.

Megatron's experts are made batch-invariant: a token's output does not depend on the other tokens. The direct path
replaces Megatron's dispatcher and experts, whose some 100 small operators take longer than a decode step's products.
It groups the (token, expert) pairs by expert once, and sums the k results of a token in ascending order of the experts:
on a CPU with the bits of Megatron's path, which on CUDA adds in no fixed order. There `--moe-grouped-gemm` computes all
experts of a layer in one product (`kernels.swiglu`). With expert parallelism, rows travel with their gates.

Experts may read and write latents (Nemotron 3, `--moe-latent-size`): projections of hidden states lead to the experts
and back; the router and the shared expert read hidden states.
"""

import contextlib
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.param_layout import bucket_end_divisor, pad_to_divisor
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from megarl.batch import expand_counts
from megarl.mcore import device
from megarl.mcore.kernels import with_gradient
from megarl.mcore.kernels.batch_invariance import MIN_ROWS, is_exact
from megarl.mcore.kernels.linear import ReplicatedLinear, at_least_rows, forward_product, linear
from megarl.mcore.kernels.swiglu import grouped_swiglu, is_plain_swiglu, stack_, stacked_swiglu
from megarl.mcore.moe import equal_rows


class Experts(SequentialMLP):
    """Repeats the last token of an expert with fewer than `MIN_ROWS` tokens on a CPU: matrix products of fewer rows use
    another kernel, so a token's output would depend on how many tokens its expert has."""

    def __init__(self, num_local_experts: int, config, **kwargs):
        super().__init__(num_local_experts, config, **kwargs)
        if not config.add_bias_linear:
            return
        for expert in self.local_experts:
            # Megatron adds the bias in place, which autograd forbids for a view, and marks its gradient to be summed
            # over tensor-parallel ranks, which have other experts or other tokens of all ranks.
            expert.linear_fc2.register_forward_hook(lambda module, inputs, result: (result[0].clone(), result[1]))
            expert.linear_fc2.bias.sequence_parallel = False

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, gates: Tensor):
        """Tokens [T, H], grouped by expert, and their gates [T] -> ([T, H], no bias)."""
        counts = tokens_per_expert.to(hidden.device, torch.int64)
        missing = torch.where(counts > 0, (MIN_ROWS - counts).clamp(min=0), 0)
        if device.has_cuda() or not missing.any():
            return super().forward(hidden, tokens_per_expert, gates)
        padded = counts + missing
        expert, offset = expand_counts(padded)
        rows = (counts.cumsum(0) - counts)[expert] + offset.minimum(counts[expert] - 1)
        output, bias = super().forward(hidden[rows], padded, gates[rows])
        return output[offset < counts[expert]], bias


class SharedExperts(SharedExpertMLP):
    """Shared experts, which every token uses. Their gate has one column; on a CPU BLAS has kernels for so few columns
    whose sums depend on the number of tokens, so the column is repeated, and fp32 uses the product of linear layers."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Tokens [T, 1, H] -> [T, 1, H]."""
        output, _ = MLP.forward(self, hidden)
        if not self.use_shared_expert_gate:
            return output
        if is_exact(self.config):
            gate = linear(hidden, self.gate_weight, None, forward_product(self.config))
        elif device.has_cuda():
            gate = torch.nn.functional.linear(hidden, self.gate_weight)
        else:
            gate = at_least_rows(linear, hidden, self.gate_weight.expand(MIN_ROWS, -1))[..., :1]
        return output * torch.sigmoid(gate)


class LatentProjection(ReplicatedLinear):
    """One of the two projections of latents; whole on every tensor-parallel rank."""

    def __init__(self, columns: int, rows: int, *, config, group, **_):
        """`group`: tensor-parallel ranks; the others are arguments of Transformer Engine's layer."""
        super().__init__(columns, rows, config, group)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[T, 1, K] -> [T, 1, N], and no bias."""
        return super().forward(x), None


@contextlib.contextmanager
def _own_projections(group) -> Iterator[None]:
    """Context in which Megatron's MoE layer gets these projections: its own need Transformer Engine."""
    of_megatron = moe_layer.HAVE_TE, moe_layer.TELinear
    moe_layer.HAVE_TE, moe_layer.TELinear = True, functools.partial(LatentProjection, group=group)
    try:
        yield
    finally:
        moe_layer.HAVE_TE, moe_layer.TELinear = of_megatron


class MixtureLayer(MoELayer):
    """Megatron's MoE layer; `forward` takes the direct path where it can."""

    def __init__(self, config, pg_collection=None, **kwargs):
        with _own_projections(pg_collection.tp):
            super().__init__(config, pg_collection=pg_collection, **kwargs)
        c, self._ep_size = self.experts.config, dist.get_world_size(self.ep_group)
        is_plain = is_plain_swiglu(c) and not c.moe_apply_probs_on_input
        is_supported = self.experts.tp_group.size() == 1 and not c.moe_latent_size and not self.shared_expert_overlap
        is_supported = is_supported and (self._ep_size == 1 or c.moe_token_dispatcher_type == "alltoall")
        self._is_direct = is_plain and is_supported
        self.is_grouped = c.moe_grouped_gemm and is_plain and device.has_cuda()  # if it takes the direct path
        if self.is_grouped:
            experts = self.experts.local_experts
            stack_([expert.linear_fc1.weight for expert in experts])
            stack_([expert.linear_fc2.weight for expert in experts])

    def forward(self, hidden_states: Tensor, intermediate_tensors=None, padding_mask=None):
        """Hidden states [T, 1, H] of this rank's tokens -> output of that shape, and no bias."""
        if not self._is_direct or self._has_factors or padding_mask is not None:
            return super().forward(hidden_states, intermediate_tensors, padding_mask)
        if self.moe_layer_recompute and self.training:
            return tensor_parallel.checkpoint(self._mix, False, hidden_states), None
        return self._mix(hidden_states), None

    def step(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        """As `forward` without gradients, with the same bits, in an engine's step in which all ranks that share the
        experts have the same number of rows, at most `max_equal_rows`."""
        return self(hidden_states) if self._ep_size == 1 else (self._mix(hidden_states, has_equal_rows=True), None)

    @property
    def max_equal_rows(self) -> int:
        """The most rows of a rank in `step`; 0: only `forward` computes this layer. For several ranks."""
        if not self._is_direct or self._has_factors:
            return 0
        c = self.config
        return equal_rows.max_rows(self.ep_group, c.moe_router_topk, c.hidden_size * c.params_dtype.itemsize)

    @property
    def _has_factors(self) -> bool:
        """Whether low-rank factors replace the products of the experts; all experts have them or none."""
        expert = self.experts.local_experts[0]
        return any("_forward_impl" in vars(layer) for layer in (expert.linear_fc1, expert.linear_fc2))

    @property
    def reads_host(self) -> bool:
        """Whether the host must know how many rows each expert has, also in `step`."""
        return not (self._is_direct and self.is_grouped) or self._has_factors

    def _mix(self, hidden_states: Tensor, has_equal_rows: bool = False) -> Tensor:
        shared = self.shared_experts_compute(hidden_states)
        probs, routing_map = self.router(hidden_states)
        mix = self._mix_equal_rows if has_equal_rows else self._mix_rows
        output = mix(hidden_states.view(-1, hidden_states.shape[-1]), probs, routing_map).view_as(hidden_states)
        return output if shared is None else output + shared

    def _mix_equal_rows(self, hidden: Tensor, probs: Tensor, routing_map: Tensor) -> Tensor:
        topk = self.config.moe_router_topk
        values, order = equal_rows.exchange_and_compute(
            hidden, probs, routing_map, topk, self.ep_group, self._compute_first
        )
        return _sum_pairs(values, order, len(hidden))

    def _mix_rows(self, hidden: Tensor, probs: Tensor, routing_map: Tensor) -> Tensor:
        places, tokens, order, ends = _pairs(routing_map, self.config.moe_router_topk)
        gates, rows = probs.reshape(-1), _rows_of_pairs(hidden, tokens, order)
        if self.is_grouped and self._ep_size == 1:
            values = stacked_swiglu(rows, gates, ends, *self._weights, places)
        else:
            compute = self._compute if self._ep_size == 1 else self._exchange_and_compute
            values = compute(rows, gates.index_select(0, places), routing_map.sum(0))
        return _combine(values, tokens, order, len(hidden))

    @property
    def _weights(self) -> tuple[list[Tensor], list[Tensor]]:
        """The first and the second weights of this rank's experts."""
        experts = self.experts.local_experts
        return [expert.linear_fc1.weight for expert in experts], [expert.linear_fc2.weight for expert in experts]

    def _compute(self, rows: Tensor, gates: Tensor, counts: Tensor) -> Tensor:
        if self.is_grouped:
            return stacked_swiglu(rows, gates, counts.cumsum(0).int(), *self._weights)
        return grouped_swiglu(rows, gates, counts.tolist(), *self._weights, forward_product(self.config))

    def _compute_first(self, rows: Tensor, gates: Tensor, ends: Tensor) -> Tensor:
        """`_compute` of the experts' rows [P, H], which end at `ends`; results of later ones are not defined."""
        if self.is_grouped:
            return stacked_swiglu(rows, gates, ends, *self._weights)
        starts, output = [0, *ends.tolist()], torch.empty_like(rows)
        counts, total = [end - start for start, end in itertools.pairwise(starts)], starts[-1]
        product = forward_product(self.config)
        output[:total] = grouped_swiglu(rows[:total], gates[:total], counts, *self._weights, product)
        return output

    def _exchange_and_compute(self, rows: Tensor, gates: Tensor, counts: Tensor) -> Tensor:
        """`_compute` of rows [P, H] of experts on all expert-parallel ranks; `counts` [E]: of this rank's rows."""
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.ep_group)
        sent, received = counts.view(self._ep_size, -1), received.view(self._ep_size, -1)  # [ranks, local experts]
        taken, given = torch.stack([received.sum(1), sent.sum(1)]).tolist()  # one wait for the device
        parts = [rows, gates.unsqueeze(1)]
        # In one message if they have one type: rows of 16 bits would be twice as long beside gates of fp32.
        messages = [torch.cat(parts, dim=1)] if rows.dtype is gates.dtype else parts
        messages = [tensor_parallel.all_to_all(self.ep_group, each, taken, given) for each in messages]
        # Received by rank, then expert; wanted by expert, then rank.
        starts = received.flatten().cumsum(0).sub_(received.flatten()).view_as(received).t().flatten()
        sizes = received.t().flatten()
        total = len(messages[0])
        shifts = torch.repeat_interleave(starts - (sizes.cumsum(0) - sizes), sizes, output_size=total)
        by_expert = shifts + torch.arange(total, device=rows.device)
        by_rank = by_expert.argsort()
        messages = [_permute(each, by_expert, by_rank) for each in messages]
        rows, gates = messages[0].split((rows.shape[1], 1), 1) if len(messages) == 1 else messages
        output = self._compute(rows, gates.squeeze(1), received.sum(0))
        return tensor_parallel.all_to_all(self.ep_group, _permute(output, by_rank, by_expert), given, taken)


def max_equal_rows(model) -> int:
    """The most rows of a rank in `MixtureLayer.step` of all MoE layers of a model; 0: some have none."""
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    return min((getattr(layer, "max_equal_rows", 0) for layer in layers), default=sys.maxsize)


def _pairs(routing_map: Tensor, each: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `kernels.cuda.mlp_rows`; the ends only on CUDA. The number of pairs need not be read from a device."""
    if device.has_cuda():
        from megarl.mcore.kernels.cuda.mlp_rows import expert_pairs  # needs Triton

        places, tokens, order, ends = expert_pairs(routing_map, each)
        return places, tokens, order, ends
    count, experts = routing_map.shape
    pairs = torch.nonzero_static(routing_map.t().reshape(-1), size=count * each).squeeze(1)  # of [E, T]
    tokens = pairs.remainder(count)
    places = tokens * experts + pairs.div(count, rounding_mode="floor")
    return places, tokens, tokens.argsort(stable=True), None


def _sum_pairs(values: Tensor, order: Tensor, tokens: int) -> Tensor:
    """Values [P, H] of pairs -> [T, H]: the sum of each token's k values, one after another."""
    if device.has_cuda():
        from megarl.mcore.kernels.cuda.mlp_rows import sum_pairs  # needs Triton

        return sum_pairs(values.contiguous(), order, tokens)
    terms = values.index_select(0, order).view(tokens, -1, values.shape[1]).unbind(1)
    total = terms[0] + terms[1] if len(terms) > 1 else terms[0]
    for term in terms[2:]:
        total += term
    return total


def _take(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(0, index)


def _rows_of_pairs(hidden: Tensor, tokens: Tensor, order: Tensor) -> Tensor:
    """Hidden states [T, H] -> [P, H] of each pair's token; `order` [P]: pairs by token."""
    return _apply(_take, tokens, functools.partial(_sum_pairs, tokens=len(hidden)), order, hidden)


def _combine(values: Tensor, tokens: Tensor, order: Tensor, count: int) -> Tensor:
    """Values [P, H] of pairs -> [T, H]; the adjoint of `_rows_of_pairs`."""
    return _apply(functools.partial(_sum_pairs, tokens=count), order, _take, tokens, values)


def _permute(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """Rows of x in another order; `inverse` is the one that restores it."""
    return _apply(_take, index, _take, inverse, x)


def _apply(function: Callable, index: Tensor, adjoint: Callable, adjoint_index: Tensor, x: Tensor) -> Tensor:
    """`function(x, index)`, linear in x; its gradient is `adjoint(gradient, adjoint_index)`."""
    if torch.is_grad_enabled():
        return _linear_map(x, function, index, adjoint, adjoint_index)
    return function(x, index)


def _linear_map_gradient(ctx, grad):
    return ctx.adjoint(grad, *ctx.saved_tensors), None, None, None, None


@with_gradient(_linear_map_gradient)
def _linear_map(ctx, x, function, index, adjoint, adjoint_index):
    ctx.save_for_backward(adjoint_index)
    ctx.adjoint = adjoint
    return function(x, index)


# -- where buffers have the weights of grouped experts -------------------------------------------------------------


@contextlib.contextmanager
def stacked_experts(stages, config, pg_collection):
    """Context in which Megatron's buffers of these chunks are made, with a DistributedDataParallelConfig, so that the
    weights of grouped experts lie at equal distances, in ascending order; names do not change. Megatron lays parameters
    out in the reverse order of the modules, and pads the end of a bucket, which may lie between two experts of a layer.
    Here every parameter begins where a bucket could end: its end adds no padding."""
    modules = [module for chunk in stages for module in chunk.modules()]
    lists = [m.experts.local_experts for m in modules if isinstance(m, MixtureLayer) and m.is_grouped]
    replicas = math.lcm(*(dist.get_world_size(group) for group in (pg_collection.dp_cp, pg_collection.expt_dp)))
    divisor = bucket_end_divisor(replicas, config.pad_buckets_for_high_nccl_busbw)
    pad_param_start = distrib_optimizer.pad_param_start
    try:
        for module_list in lists:
            _reverse(module_list)
        if lists:
            distrib_optimizer.pad_param_start = lambda param_start_index: pad_to_divisor(param_start_index, divisor)
        yield
    finally:
        distrib_optimizer.pad_param_start = pad_param_start
        for module_list in lists:
            _reverse(module_list)


def _reverse(module_list):
    """Reverses the order in which a list of modules has its parameters, not their names."""
    module_list._modules = dict(reversed(module_list._modules.items()))
