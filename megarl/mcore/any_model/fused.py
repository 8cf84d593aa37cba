"""Parts of transformers' modules that megarl's compiled kernels compute, in fp32 on a CPU.

These are RMSNorms, attention's projections with norms and rotation of heads, SwiGLU MLPs, and decode steps of plain
layers: those that are alike and follow each other are one operator. A part is recognised by what it computes: it is
called with inputs of several sizes at positions up to the longest, and must return what the kernels return. Names of
modules and weights stay as they are, and what is wrapped around linear layers later is called.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from megarl.mcore.any_model import attention, rows, source
from megarl.mcore.any_model.attention import CachePass, FirstPass, Slot, Unsupported
from megarl.mcore.any_model.rows import SIZES, TOLERANCE, ModuleNorm, agree, floats_of, norm_of, prepacked_product
from megarl.mcore.attention.native_attention import NativeDecodes
from megarl.mcore.attention.rotary_embeddings import rotated_heads
from megarl.mcore.kernels import native
from megarl.mcore.kernels.linear import prepacked
from megarl.mcore.kernels.swiglu import activated

PLAIN = bool, int, float, str, type(None), Tensor  # arguments by which a part hands nothing to others


class Merged:
    """Linear layers of one input; a rollout computes them as one product.

    `groups`: in which their columns alternate: the first group of each layer, the second of each, and so on.
    """

    def __init__(self, linears: list[nn.Module], groups: int = 1):
        self.linears: list[Any] = linears
        self.groups = groups

    def is_possible(self) -> bool:
        """Whether the layers are nothing but products with weights that are whole."""
        return all(map(_is_bare, self.linears)) and len({each.bias is None for each in self.linears}) == 1

    def weight(self) -> Tensor:
        """[N, K] of all, differentiable."""
        return self._join([each.weight for each in self.linears])

    def bias(self) -> Tensor | None:
        """[N] of all."""
        biases = [each.bias for each in self.linears]
        return None if biases[0] is None else self._join(biases)

    def _join(self, parts: list[Tensor]) -> Tensor:
        return torch.cat([each.unflatten(0, (self.groups, -1)) for each in parts], dim=1).flatten(0, 1)

    def __call__(self, x: Tensor) -> Tensor | None:
        """[…, K] -> […, N] without gradients; None where the merged weight is not prepacked."""
        return prepacked_product(self, x, sum(each.out_features for each in self.linears), self.bias())


class GatedMLP:
    """down(silu(gate(x)) · up(x)) (2002.05202 eq. 5)."""

    def __init__(self, wide: list[nn.Module], down: Any):
        """`wide`: gate and up, or the linear layer that is both."""
        self.merged, self.down = Merged(wide), down

    def __call__(self, x: Tensor) -> Tensor:
        """[…, H] -> […, H]."""
        both, linears = self.merged(x), self.merged.linears
        if both is None and x.numel() > x.shape[-1] ** 2 and self.merged.is_possible():  # smaller than the outputs
            both = functional.linear(x, self.merged.weight(), self.merged.bias())
        return self.down(activated(torch.cat([each(x) for each in linears], dim=-1) if both is None else both))


class Attention:
    """Projections to heads, their norms, rotation of channels half a head apart, attention, projection."""

    def __init__(self, part: nn.Module, linears: list[nn.Module], norms: list[nn.Module], rotates: bool):
        """The linear layers are in the order q, k, v, output, the norms in the order q, k, if there are any."""
        self.part, self._own, self.norms, self.rotates = part, part.forward, norms, rotates
        self.merged, self.output = Merged(linears[:3], self.slot.groups), linears[3]
        self.scores: Any = None  # `Scores` that the part asks for

    @property
    def slot(self) -> Slot:
        """Of its one call of the attention function."""
        return vars(self.part)["attention_slots"][0]

    def __call__(self, hidden_states: Tensor, position_embeddings=None, attention_mask=None, cache=None, **others):
        """[1, T, H] -> the same shape, and None for the weights of attention."""
        if cache is not None:  # which a module may ask for positions
            others |= {"position_embeddings": position_embeddings, "attention_mask": attention_mask, "cache": cache}
            return self._own(hidden_states=hidden_states, **others)
        slot, tokens, all_heads = self.slot, hidden_states.shape[1], self.merged(hidden_states)
        if all_heads is not None:
            grouped = all_heads.view(tokens, slot.groups, -1, slot.key_channels)
            query, key, value = grouped[:, :, :-2].flatten(1, 2), grouped[:, :, -2], grouped[:, :, -1]
        else:
            heads = (linear(hidden_states).view(tokens, -1) for linear in self.merged.linears)
            widths = slot.key_channels, slot.key_channels, slot.value_channels
            query, key, value = (x.unflatten(1, (-1, width)) for x, width in zip(heads, widths, strict=True))
        if self.norms:
            query, key = (
                norm(x.reshape(tokens, -1, norm.weight.numel())).view(x.shape)
                for norm, x in zip(self.norms, (query, key), strict=True)
            )
        if self.rotates:
            query, key = rotated_heads(query, key, *(x.unsqueeze(1) for x in rotation(position_embeddings)))
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        given = {"scaling": self.scores.scale, "sliding_window": self.scores.window}
        out, _ = attention.attention(self.part, query, key, value, attention_mask, **given)
        return self.output(out.reshape(1, tokens, -1)), None


def rotation(embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """transformers' cosines and sines [1, T, r] as the kernels take them, [T, r]; computed once in a pass."""
    cosines, sines = embeddings
    known = attention.current().rotations
    if id(sines) not in known:
        signed = sines.squeeze(0).clone(memory_format=torch.contiguous_format)
        signed[:, : signed.shape[1] // 2].neg_()
        known[id(sines)] = sines, (cosines.squeeze(0).contiguous(), signed)
    return known[id(sines)][1]


class Layer:
    """x + m · attention(norm(x)), and the same with an MLP: one operator in a step that only decodes."""

    def __init__(self, part: nn.Module, parts: list[nn.Module], multiplier: float):
        """`parts`: the norm before attention, attention, the norm before the MLP, the MLP."""
        self.part, self._own, self.multiplier = part, part.forward, multiplier
        self.first, self.attention, self.second, self.mlp = (vars(each)["fused"] for each in parts)
        self._made: tuple = (None, [])  # attention's merged weight, and the operator's weights made with it
        self.following: list[Layer] = []  # layers that the same operator computes after it
        self._norms = [self.first, self.second, *(vars(norm)["fused"] for norm in self.attention.norms)]

    def kind(self) -> tuple:
        """What layers that one operator computes have in common."""
        shape = self.attention.slot._replace(number=0), self.mlp.down.in_features, self.attention.rotates
        return *shape, self.attention.scores.scale, self.multiplier, self.first.eps, len(self._norms)

    def has_operator(self) -> bool:
        """Whether the operator computes such a layer."""
        slot, linears = self.attention.slot, [*self.mlp.merged.linears, self.mlp.down, self.attention.output]
        is_wide = slot.channels == slot.key_channels == slot.value_channels and not slot.has_score_options
        has_head_norms = all(norm.part.weight.numel() == slot.channels for norm in self._norms[2:])
        has_plain_parts = all(each.bias is None for each in linears) and len({each.eps for each in self._norms}) == 1
        return is_wide and has_head_norms and has_plain_parts

    def plain(self, hidden_states: Tensor, **others) -> Tensor:
        """What the operator computes, by the parts."""
        attended, _ = self.attention(self.first(hidden_states), **others)
        hidden = hidden_states + attended * self.multiplier
        return hidden + self.mlp(self.second(hidden)) * self.multiplier

    def __call__(self, hidden_states: Tensor, position_embeddings=None, **others) -> Tensor:
        """[1, T, H] -> [1, T, H]; of the last of the layers that follow it, which then return their input."""
        each, slot = attention.current(), self.attention.slot
        if self in each.computed:
            return hidden_states
        reads = each.plan.reads[slot.window is not None] if isinstance(each, CachePass) else None
        only_decodes = reads is not None and reads.only_decodes and isinstance(reads.decodes[0], NativeDecodes)
        weights = self._weights() if only_decodes and each.plan.dedup is None else []
        if not weights:
            return self._own(hidden_states, position_embeddings=position_embeddings, **others)
        out, decodes, empty = hidden_states.clone(), reads.decodes[0], hidden_states.new_empty(0)
        turned = rotation(position_embeddings) if self.attention.rotates else (empty, empty)
        cosines, sines = (x[: each.tokens] for x in turned)
        layers = [self]
        if all(following := [layer._weights() for layer in self.following]):
            layers, weights = layers + self.following, [*weights, *itertools.chain(*following)]
            each.computed.update(self.following)
        caches = [each.plan.caches[layer.attention.slot.number] for layer in layers]
        keys = each.plan.slot_mapping, decodes.pages, decodes.keys, decodes.starts
        options = slot.heads, self.mlp.down.in_features, self.first.eps, self.attention.scores.scale, decodes.window
        options += (self.multiplier,)
        native.ops.decode_layers(out[0, : each.tokens], weights, caches, cosines, sines, *keys + options)
        return out

    def _weights(self) -> list[Tensor]:
        """The operator's; empty unless they are prepacked."""
        attend, wide, empty = self.attention.merged, self.mlp.merged, torch.empty(0)
        made_for, weights = self._made
        if (packed := prepacked(attend)) is None or packed is made_for:
            return [] if packed is None else weights
        bare = (each.weight for each in (self.attention.output, self.mlp.down) if _is_bare(each))
        rest = [prepacked(each) for each in (wide, *bare)]
        if len(rest) < 3 or any(each is None for each in rest):
            return []
        both, one, other = rest
        query, key = [norm.weight().detach() for norm in self._norms[2:]] or (empty, empty)
        bias, (first, second) = attend.bias(), (norm.weight().detach() for norm in self._norms[:2])
        self._made = packed, [first, packed, empty if bias is None else bias, query, key, one, second, both, other]
        return self._made[1]


def _is_bare(linear: nn.Module) -> bool:
    is_alone = type(linear) is nn.Linear and "forward" not in vars(linear) and type(linear.weight.data) is Tensor
    return is_alone and not linear._forward_hooks and not linear._forward_pre_hooks


def products(module: nn.Module) -> tuple[list[Tensor], Iterator[tuple[Any, Tensor]]]:
    """Weights that a rollout multiplies by: of single linear layers, and of merged ones, with what merges them; those
    of `Conv1D` transposed."""
    fused = [vars(part)["fused"] for part in module.modules() if "fused" in vars(part)]
    merged = [each.merged for each in fused if isinstance(each, (GatedMLP, Attention)) and each.merged.is_possible()]
    parts = {id(linear) for each in merged for linear in each.linears}
    single = [each.weight for each in module.modules() if isinstance(each, nn.Linear) and id(each) not in parts]
    turned = [x.weight for x in module.modules() if isinstance(x, Conv1D) and native.supports(x.weight)]
    return single, itertools.chain(
        ((each, each.weight()) for each in merged), ((w, w.t().contiguous()) for w in turned)
    )


# -- recognition -------------------------------------------------------------------------------------------------------


Call = tuple[Tensor, dict[str, Any], Any]  # hidden states that a part is given, further arguments, what it returns


def fuse(module: PreTrainedModel):
    """Makes the parts of a module that the kernels compute call them. Its parameters may be on the meta device."""
    if not native.is_used() or module.dtype is not torch.float32:
        return
    with contextlib.suppress(Unsupported), torch.no_grad():
        calls = _calls(module)
        for candidates in (_norms, _attentions, _mlps, _layers):
            for part, call in calls.items():
                if "fused" not in vars(part) and not any(True for _ in part.buffers()):
                    _take(part, candidates(part), call)
        _join(calls)


def _calls(module: PreTrainedModel) -> dict[nn.Module, Call]:
    """What each part that one pass calls once, with hidden states, is given and returns."""
    found: dict[nn.Module, list] = {part: [] for part in module.modules()}

    def note(part, args, kwargs, out):
        hidden, *more = *args, *(kwargs.pop(name) for name in ("hidden_states",) if name in kwargs), None
        is_plain = len(more) == 1 and all(isinstance(x, PLAIN) for x in tree_leaves(list(kwargs.values())))
        if is_plain and torch.is_tensor(hidden) and hidden.is_floating_point():
            found[part].append((hidden, kwargs, out))

    hooks = [part.register_forward_hook(note, with_kwargs=True) for part in found]
    try:
        longest = getattr(module.config.get_text_config(), "max_position_embeddings", None) or source.PROBED
        source.find_slots(module, torch.tensor([0, 1, longest // 2, longest - 1]))
    finally:
        for hook in hooks:
            hook.remove()
    return {part: calls[0] for part, calls in found.items() if len(calls) == 1}


def _join(calls: dict[nn.Module, Call]):
    """Lets the first of alike layers, each of which reads what the one before it returns, compute them all."""
    layers = [(fused, call) for part, call in calls.items() if isinstance(fused := vars(part).get("fused"), Layer)]
    first = [each for each, _ in layers[:1]]
    for (one, (_, given, out)), (other, (hidden, rest, _)) in itertools.pairwise(layers):
        arguments, others = (list(map(id, tree_leaves(each))) for each in (given, rest))
        if hidden is out and arguments == others and one.kind() == other.kind():
            first[0].following.append(other)
        else:
            first = [other]


def _take(part: nn.Module, candidates: Iterator, call: Call):
    """Replaces a part's forward pass by the first candidate that computes the same in such a call."""
    (hidden, others, _), generator = call, torch.Generator().manual_seed(0)
    inputs = [size * torch.randn(hidden.shape, generator=generator) for size in SIZES]

    def outcome(function, x: Tensor):
        probe = FirstPass()
        with attention.running(probe), rows.installed():
            out = function(x, **others)
        *given, scores = probe.given or (None,)
        return [*tree_leaves(out), *given], scores

    for each in candidates:
        with source.values_in(part, source.spread_values), contextlib.suppress(Exception):  # whatever a part raises
            wanted, (each.scores, *_) = zip(*(outcome(part.forward, x) for x in inputs), strict=True)
            found = [outcome(getattr(each, "plain", each), x)[0] for x in inputs]
            limit = 0 if isinstance(each, Layer) else TOLERANCE
            pairs = [pair for both in zip(found, wanted, strict=True) for pair in zip(both[0], both[1], strict=True)]
            is_alike = all((one is None) == (other is None) for one, other in pairs)
            if is_alike and all(agree(one, other, limit) for one, other in pairs if torch.is_tensor(other)):
                part.fused = part.forward = each
                return


def _children(part: nn.Module) -> tuple[list[nn.Module], list[nn.Module], list[nn.Module]]:
    """Linear layers, norms that are recognised, and other children with weights."""
    children = [each for each in part.children() if any(True for _ in each.parameters())]
    linears: list[nn.Module] = [each for each in children if type(each) is nn.Linear]
    norms = [each for each in children if isinstance(vars(each).get("fused"), ModuleNorm)]
    return linears, norms, [each for each in children if each not in linears and each not in norms]


def _norms(part: nn.Module):
    if (norm := norm_of(part)) is not None and norm.bias() is None:
        yield norm


def _attentions(part: nn.Module):
    slots, (linears, norms, others) = vars(part).get("attention_slots", ()), _children(part)
    if len(slots) == 1 and not slots[0].has_score_options and len(linears) == 4 and len(norms) in (0, 2) and not others:
        yield from (Attention(part, linears, norms, rotates) for rotates in (True, False))


def _mlps(part: nn.Module):
    linears, norms, others = _children(part)
    if len(linears) in (2, 3) and not norms and not others:
        yield from (GatedMLP(wide, linears[-1]) for wide in (linears[:-1], linears[-2::-1]))


def _layers(part: nn.Module):
    linears, norms, children = _children(part)
    attends = [each for each in children if isinstance(vars(each).get("fused"), Attention)]
    mlps = [each for each in children if isinstance(vars(each).get("fused"), GatedMLP)]
    if len(attends) == len(mlps) == 1 and len(children) == len(norms) == 2 and not linears:
        first, second = norms
        made = (Layer(part, [first, *attends, second, *mlps], multiplier) for multiplier in (1.0, *floats_of(part)))
        yield from (each for each in made if each.has_operator())
