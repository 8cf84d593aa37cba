"""Recurrences of transformers' modules: functions of megarl in place of those that their modeling files call.

What mixers compute for each row alone, projections, gates and norms, stays theirs. For what goes from row to row they
call functions of their file: a causal convolution, Mamba-2's state space (2405.21060), the gated delta rule
(2412.06464). In a pass of megarl these names stand for functions over the pass's runs; the `Pass` says where the states
are. On a CPU compiled kernels compute them token by token, in training, prefill and decode alike.

Shapes: R rows of a pass, of which the first T are tokens; G groups with K channels of a key, H heads with V of a value.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from megarl.mcore.any_model import attention
from megarl.mcore.any_model.attention import Unsupported
from megarl.mcore.kernels import native
from megarl.mcore.kernels.batch_invariance import VECTOR
from megarl.mcore.recurrence import apply_rule, delta_rule, has_kernels, state_space
from megarl.mcore.recurrence.delta_rule import HeadSizes
from megarl.mcore.recurrence.runs import Runs, States, convolved, normed
from megarl.mcore.recurrence.state_space import SpaceSizes

MAX_TAPS = 8  # tokens that a convolution of the compiled kernels reads
SILU = "silu", "swish"
# What transformers' functions, and kernels in their place, read besides; anything else they drop.
OTHERS = "cu_seqlens", "initial_state", "initial_states", "output_final_state", "return_final_states", "seq_idx", "z"


class Channels(NamedTuple):
    """Sizes of a convolution, which has no memories."""

    channels: int
    activates: bool  # by a SiLU
    heads = keys = values = 0


class Convolution(NamedTuple):
    """A causal convolution of each channel, as `apply_rule` takes it; fp32. Its state: the last inputs."""

    x: Tensor  # [T, C]
    weight: Tensor  # [C, taps]
    bias: Tensor  # [C]

    one_token = None

    def by_token(self, sizes: Channels, runs: Runs, states: States) -> Tensor:
        """[T, C] by compiled kernels."""
        weight = self.weight.t().contiguous()
        return native.ops.causal_convolution(self.x, weight, self.bias, runs.table, states.inputs, sizes.activates)

    def by_chunks(self, sizes: Channels, runs: Runs, states: States | None = None) -> Tensor:
        """As `by_token` up to rounding, by PyTorch's operations, which have gradients without `states`."""
        return convolved(self.x, self.weight.unsqueeze(1), self.bias, runs, states, sizes.activates)

    def token_gradients(self, grad: Tensor, sizes: Channels, runs: Runs, _):
        """Results with gradients, and theirs, from the gradient of what rows read."""
        return self.by_chunks(sizes, runs), grad


class HeadStates(NamedTuple):
    """Heads with a state [K, V] each, by the rule of the type of `sizes`, as `apply_rule` takes them; fp32."""

    x: Tensor  # [T, C] after the convolution, as `state_space` and `delta_rule` lay out channels
    scales: Tensor  # [T, H] steps, or strengths
    decays: Tensor  # [T, H]; their logarithms where PyTorch's operations compute

    one_token = None

    def by_token(self, sizes: SpaceSizes | HeadSizes, runs: Runs, states: States) -> Tensor:
        """[T, H, V] by compiled kernels."""
        groups, keys, table = sizes.groups, sizes.keys, runs.table
        if isinstance(sizes, HeadSizes):
            return native.ops.delta_rule(self.x, self.decays, self.scales, groups, keys, table, states.memories)
        none = self.x.new_zeros(sizes.heads)  # skips
        return native.ops.state_space(self.x, self.scales, self.decays, none, groups, keys, table, states.memories)

    def by_chunks(self, sizes: SpaceSizes | HeadSizes, runs: Runs, states: States | None = None) -> Tensor:
        """As of `Convolution`."""
        if isinstance(sizes, HeadSizes):
            return delta_rule.scan(normed(self.x, sizes.normed), self.decays, self.scales, sizes, runs, states)
        return state_space.scan(self.x, self.scales, self.decays, sizes, runs, states)

    def token_gradients(self, grad: Tensor, sizes: SpaceSizes | HeadSizes, runs: Runs, memories: Tensor):
        """As of `Convolution`; the memories are those of the pass."""
        fields, backward = (self.x, self.scales, self.decays), native.ops.state_space_backward
        if isinstance(sizes, HeadSizes):
            fields, backward = (self.x, self.decays, self.scales), native.ops.delta_rule_backward
        with torch.no_grad():
            found = backward(grad.contiguous(), *fields, sizes.groups, sizes.keys, runs.table, memories)
        return fields, found


class Recurrence(NamedTuple):
    """What a pass computes at one place: its rows, and how."""

    inputs: Convolution | HeadStates
    sizes: Any  # `Channels`, `SpaceSizes` or `HeadSizes`

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Of a sequence's state."""
        if isinstance(self.inputs, Convolution):
            return self.inputs.weight.shape[1] - 1, self.sizes.channels
        return self.sizes.heads, self.sizes.keys, self.sizes.values

    @property
    def read_shape(self) -> tuple[int, ...]:
        """Of what each row reads."""
        return self.state_shape[1:] if isinstance(self.inputs, Convolution) else self.state_shape[::2]

    def of_rows(self, change: Callable[[Tensor], Tensor]) -> "Recurrence":
        """The same of changed rows."""
        rows, names = self.inputs, ("x",) if isinstance(self.inputs, Convolution) else HeadStates._fields
        return self._replace(inputs=rows._replace(**{name: change(getattr(rows, name)) for name in names}))

    def at(self, numbers: Tensor) -> "Recurrence":
        """The same of some of the rows."""
        return self.of_rows(lambda x: x[numbers])

    def apply(self, runs: Runs, states: Tensor | None = None) -> Tensor:
        """[T, …]: what each row reads; the runs change `states` [S, …] in place. None: the runs name states of their
        own, and there are gradients."""
        taps = self.state_shape[0] + 1
        if isinstance(self.inputs, Convolution) and runs.taps != taps:
            runs = dataclasses.replace(runs, taps=taps)
        return apply_rule(self.inputs, self.sizes, runs, None if states is None else States(states, states))


# -- functions of modeling files ---------------------------------------------------------------------------------------


def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **others) -> Tensor:
    """hidden_states [1, C, R], weight [C, taps], bias [C] -> [1, C, R]. Raises Unsupported, as all of these."""
    _refuse("a convolution", others)
    if weight.shape[1] > MAX_TAPS:
        raise Unsupported(f"a convolution reads {weight.shape[1]} tokens, more than {MAX_TAPS}")
    tokens, activates = hidden_states.squeeze(0).t()[: attention.current().tokens].float(), activation in SILU
    tokens = tokens if tokens.stride(1) == 1 else tokens.contiguous()
    weight = weight.float()
    inputs = Convolution(tokens, weight, weight.new_zeros(len(weight)) if bias is None else bias.float())
    rule = Recurrence(inputs, Channels(len(weight), activates))
    read = _read(rule, hidden_states.shape[2]).t().unsqueeze(0)
    read = read if activates or activation is None else ACT2FN[activation](read)
    return read.to(hidden_states.dtype)


def mamba2_chunk_scan(
    hidden_states, dt, decays, keys, queries, dt_bias=None, dt_softplus=False, dt_limit=(0, None), **others
) -> Tensor:
    """hidden_states [1, R, H, V], dt [1, R, H], decays (A), dt_bias and D [H], keys (B) and queries (C) [1, R, G, K] ->
    [1, R, H, V], fp32."""
    skips = others.pop("D", None)
    _refuse("a state space", others)
    heads, values = hidden_states.shape[2:]
    steps = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    steps = (functional.softplus(steps) if dt_softplus else steps).clamp(*dt_limit).squeeze(0)
    x = hidden_states.float()
    wide = torch.cat([_padded(x).flatten(2), keys.float().flatten(2), queries.float().flatten(2)], dim=-1)
    sizes = SpaceSizes(keys.shape[2], heads, keys.shape[3], _padded(x).shape[3])
    read = _read_heads(wide, steps, decays.float() * steps, sizes, values)
    return read if skips is None else read + skips.float().unsqueeze(-1) * x


def torch_chunk_gated_delta_rule(
    query, key, value, g, beta, use_qk_l2norm_in_kernel=False, **others
) -> tuple[Tensor, None]:
    """query, key [1, R, G, K], value [1, R, H, V], g, beta [1, R, H] -> [1, R, H, V], and no state."""
    _refuse("a delta rule", others)
    if not use_qk_l2norm_in_kernel or query.shape != key.shape:
        raise Unsupported("a delta rule has other queries and keys than ones of length 1")
    groups, keys = key.shape[2:]
    wide = torch.cat([each.float().flatten(2) for each in (query, key, _padded(value))], dim=-1)
    sizes = HeadSizes(groups, value.shape[2], keys, _padded(value).shape[3])
    read = _read_heads(wide, beta.float().squeeze(0), g.float().squeeze(0), sizes, value.shape[3])
    return read.to(query.dtype), None


FUNCTIONS = {each.__name__: each for each in (causal_conv1d_fn, mamba2_chunk_scan, torch_chunk_gated_delta_rule)}


def functions_of(module: nn.Module) -> tuple[tuple[Any, str, Callable], ...]:
    """Those that the files of a module's parts call, as of `rows.replaced`."""
    files = dict.fromkeys(sys.modules[type(each).__module__] for each in module.modules())
    return tuple((file, name, own) for file in files for name, own in FUNCTIONS.items() if hasattr(file, name))


def taps_of(shapes: Sequence[tuple[int, ...]]) -> int:
    """Tokens that the first convolution reads, by the shapes of states; 2 if there is none."""
    return next((shape[0] + 1 for shape in shapes if len(shape) == 2), 2)


def _refuse(what: str, others: dict):
    if unknown := [name for name in OTHERS if not (others.get(name) is None or others[name] is False)]:
        raise Unsupported(f"{what} asks for {', '.join(unknown)}")


def _padded(x: Tensor) -> Tensor:
    """Channels of heads, filled up to whole vectors."""
    return functional.pad(x, (0, -x.shape[-1] % VECTOR))


def _read_heads(wide: Tensor, scales: Tensor, log_decays: Tensor, sizes: SpaceSizes | HeadSizes, values: int) -> Tensor:
    """wide [1, R, C], scales and logarithms of decays [R, H] -> [1, R, H, values]. Exponents are of all rows: those of
    whole vectors have the same bits at any place."""
    tokens, decays = attention.current().tokens, log_decays.exp() if has_kernels(wide) else log_decays
    inputs = HeadStates(*(x[:tokens].contiguous() for x in (wide.squeeze(0), scales, decays)))
    return _read(Recurrence(inputs, sizes), wide.shape[1])[..., :values].unsqueeze(0)


def _read(rule: Recurrence, rows: int) -> Tensor:
    """[R, …]: what the pass's tokens read, and zeros."""
    read = attention.current().recur(rule)
    return functional.pad(read, (0, 0) * (read.dim() - 1) + (0, rows - len(read)))
