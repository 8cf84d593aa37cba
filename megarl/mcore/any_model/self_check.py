"""Whether a module of transformers computes under megarl what it computes alone, and on several ranks what it does on
one: tried before work starts.

A gap of 0 between rollout and training does not show it: both would be wrong alike. The module is cut to the layers
that show each kind, and gets weights of little memory. Its logits with transformers' own attention and experts are
compared with megarl's: of one sequence, of two packed ones, and of a prefill with steps after it. All of it runs on the
CPU: the flags of a run are read before its devices are used.
"""

import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

from megarl.mcore.any_model import attention, fused, recurrence, source, tensor_parallel
from megarl.mcore.any_model.attention import Pass, Unsupported
from megarl.mcore.any_model.chunk import HeadInputs, head_inputs
from megarl.mcore.any_model.source import Source
from megarl.mcore.any_model.tensor_parallel import Ranks, starred
from megarl.mcore.attention.backends import eager
from megarl.mcore.recurrence.runs import NONE, Runs

TOKENS, FIRST = 40, 13  # of the sequence; of the first of two packed ones
SPLIT_TOKENS = 12  # of a split module
STEPS = [FIRST, TOKENS - FIRST - 3, 1, 1, 1]  # tokens of each step: a prefill in two parts, and a decode
WINDOW = 8  # at most, so that the sequence is longer
TOLERANCE = 1e-3  # of a logit, beside the largest
SEED = 7
# Entries of a config that say how wide something is, and no more; and what is enough to see whether it is right.
WIDTHS = (
    "vocab_size vocab_size_per_layer_input intermediate_size intermediate_size_mlp moe_intermediate_size "
    "expert_ffn_hidden_size shared_expert_intermediate_size shared_intermediate_size ffn_hidden_size"
)
WIDTH = 128


def check(found: Source, longest: int):
    """Raises Unsupported, with what differs, if a module does not compute alone what it computes under megarl.

    Args:
        longest: maximum length of a sequence, in tokens; a window that holds it whole is as none.
    """
    small = shortened(found, longest)
    own, module = small.module(torch.float32, "eager"), small.module(torch.float32)
    if getattr(type(module.get_output_embeddings()), "forward", None) is not nn.Linear.forward:
        raise Unsupported(f"{type(module).__name__} does not compute its logits by one linear layer")
    source.find_slots(module)
    fused.fuse(module)
    tokens = torch.randint(small.text.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(SEED))
    tokens += tokens == getattr(small.text, "pad_token_id", None)  # some types give padding no position
    inputs = HeadInputs(module)
    run = functools.partial(logits, module, inputs)
    of_own, of_module = (source.values_in(each, source.spread_values) for each in (own, module))
    with torch.no_grad(), source.one_line_errors(type(module)), of_own, of_module:
        whole = run(tokens, [TOKENS])
        wanted = own(input_ids=tokens[None], use_cache=False).logits[0].float()  # with positions of its own, too
        _compare(type(module), "its own attention and experts", whole, wanted)
        last = HeldPass(1, functions=recurrence.functions_of(module))
        with attention.running(last), source.one_line_errors(type(module), f"read {longest} tokens"):
            inputs(tokens[None, :1], torch.tensor([[longest - 1]]))  # tables of positions have an end
        apart = torch.cat([run(part, [len(part)]) for part in tokens.split([FIRST, TOKENS - FIRST])])
        _compare(type(module), "two sequences packed together", run(tokens, [FIRST, TOKENS - FIRST]), apart)
        _compare(type(module), "a prefill and steps after it", run(tokens), whole)


def _compare(kind: type, what: str, found: Tensor, wanted: Tensor):
    difference, largest = float((found - wanted).abs().max()), max(1.0, float(wanted.abs().max()))
    if not difference <= TOLERANCE * largest:
        raise Unsupported(
            f"{kind.__name__} computes other logits (off by {difference:.1g}, the largest is {largest:.1g}) than with "
            f"{what}: it has states, masks or positions beside transformers' attention interface"
        )


def logits(module: PreTrainedModel, inputs: HeadInputs, tokens: Tensor, lengths: list[int] | None = None) -> Tensor:
    """Logits [T, V] of tokens [T] under megarl's passes, by torch's own products.

    Args:
        lengths: of packed sequences; None: one sequence, as two parts of a prefill and its last tokens one by one.
    """
    sizes, own = [len(tokens)] if lengths else STEPS, torch.tensor(lengths or [len(tokens)])
    positions = torch.cat([torch.arange(length) for length in own])
    sequence, functions = torch.arange(len(own)).repeat_interleave(own), recurrence.functions_of(module)
    held, found, end = {}, [], 0
    for each, at in zip(tokens.split(sizes), positions.split(sizes), strict=True):
        end += len(each)
        with attention.running(HeldPass(len(each), functions=functions, held=held, sequence=sequence[:end])):
            hidden = inputs(each[None], at[None])
        found.append(linear(*head_inputs(module.get_output_embeddings(), hidden)).float())
    whole, cap = torch.cat(found), inputs.softcap
    return whole if cap is None else cap * torch.tanh(whole / cap)


@dataclass
class HeldPass(Pass):
    """A step whose keys and values are held in plain tensors, or a pass over packed sequences."""

    # Slot's number -> (keys [1, T, G, C], values) so far; number of a recurrence, as text -> its states
    held: dict = field(default_factory=dict)
    sequence: Tensor = torch.zeros(1, dtype=torch.int64)  # [T] number of each token's sequence, so far

    def attend_tokens(self, slot, query, key, value, scale, options):
        if (before := self.held.get(slot.number)) is not None:
            key, value = torch.cat([before[0], key]), torch.cat([before[1], value])
        self.held[slot.number] = key, value
        places = torch.arange(len(key))
        at = places[-len(query) :, None]
        mask = (places <= at) & (self.sequence[at] == self.sequence)
        if slot.window is not None:
            mask &= at - places < slot.window
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        out = eager.attend(query, key, value, mask[None, None], scale, options.get("softcap"), options.get("sinks"))
        return out[0].transpose(0, 1)

    def recur(self, rule):
        name, x = str(self.next_state()), rule.inputs.x
        ends = self.sequence[-len(x) :].bincount().cumsum(0).tolist()
        bounds = enumerate(zip([0, *ends], ends, strict=False))
        table = [(first, end - first, i if name in self.held else NONE, i) for i, (first, end) in bounds]
        states = self.held.setdefault(name, x.new_zeros(len(ends), *rule.state_shape))
        return rule.apply(Runs(torch.tensor(table), 0, recurrence.taps_of([rule.state_shape])), states)


# -- a module that is split over ranks ---------------------------------------------------------------------------------

# A plan of transformers says how weights are split. It does not say that a part takes a mean over a split axis, or that
# a whole weight, as the norm of single heads, gets a part of its gradient on each rank. A small model is run as each of
# the ranks, one after the other. What ranks would sum has the values of the whole model, so that no rank waits. What a
# rank's part of a sum depends on is found by changes: a backward pass would start threads, before ranks are forked.


class Trial(Ranks):
    """A model as one of so many ranks has it, where what they would send each other is known."""

    def __init__(self, found: Source, rank: int, size: int, sums: Sequence[Tensor] = ()):
        """`sums`: of all ranks, in the order of a pass; empty: those of this rank. Raises Unsupported."""
        self.rank, self.size, self._found = rank, size, found
        self._sums: Sequence[Tensor] = ()
        self._parts: list[Tensor] = []  # of the sums, by this rank
        self._inputs: list[Tensor] = []  # of what is split, in the first pass
        self._replayed: Iterator[Tensor] | None = None  # the same, in later ones
        self._shift = 0.0
        self.module = found.module(torch.float32)
        self.shapes = {name: each.shape for name, each in self.module.named_parameters(remove_duplicate=False)}
        self.splits = tensor_parallel.splits_of(self.module, size)
        tensor_parallel.split(self.module, self.splits, self)
        source.find_slots(self.module)
        self._sums, self._inputs = sums, []

    def to_all(self, x: Tensor) -> Tensor:
        """x, or in later passes what it was in the first one."""
        if self._replayed is not None:
            return next(self._replayed)
        self._inputs.append(x)
        return x

    def summed(self, x: Tensor) -> Tensor:
        """The known sum."""
        self._parts.append(x)
        return (self._sums[len(self._parts) - 1] if self._sums else x) + self._shift

    def gathered(self, x: Tensor) -> Tensor:
        """As of `summed`: each rank has zeros in the columns of others."""
        width = x.shape[-1]
        return self.summed(pad(x, (self.rank * width, (self.size - 1 - self.rank) * width)))

    def own_columns(self, x: Tensor) -> Tensor:
        """This rank's columns."""
        return self.to_all(x).chunk(self.size, -1)[self.rank]

    @torch.no_grad()
    def run(self, changed: str = "", shift: float = 0.0) -> list[Tensor]:
        """This rank's parts of all sums. In later passes than the first the inputs of what is split are as there.

        Args:
            changed: whole weights of this name, with * for numbers, are doubled.
            shift: added to each sum that the module gets.
        """
        self._parts, self._shift = [], shift
        self._replayed = iter(self._inputs) if self._inputs else None

        def values(name: str, _, dtype: torch.dtype) -> Tensor:
            whole = source.spread_values(name, self.shapes[name.removeprefix(".")], dtype)
            whole = whole * 2 if starred(name) == changed else whole
            return self.splits[name].of(whole, self.rank, self.size) if name in self.splits else whole

        tokens = torch.randint(self._found.text.vocab_size, (SPLIT_TOKENS,), generator=torch.Generator().manual_seed(0))
        with source.values_in(self.module, values):
            logits(self.module, HeadInputs(self.module), tokens, [SPLIT_TOKENS])
        return self._parts


def partial_weights(found: Source, ranks: int) -> tuple[str, ...]:
    """Names, with * for numbers, of whole weights that get a part of their gradient on each of so many ranks.

    Raises:
        Unsupported: a module that is split computes something else, or a gradient that no function of its plan sums.
    """
    small, kind = shortened(found, SPLIT_TOKENS, ranks), found.kind.__name__
    with source.one_line_errors(found.kind, f"run on {ranks} tensor-parallel ranks"):
        whole = Trial(small, 0, 1).run()
        trials = [Trial(small, rank, ranks, whole) for rank in range(ranks)]
        for wanted, *parts in zip(whole, *(trial.run() for trial in trials), strict=True):
            difference, largest = float((sum(parts) - wanted).abs().max()), max(1.0, float(wanted.abs().max()))
            if not difference <= TOLERANCE * largest:
                raise Unsupported(
                    f"{kind} computes something else in parts (off by {difference:.1g}, the largest is {largest:.1g}): "
                    "its plan splits what a part of it needs whole"
                )
        first, own = trials[0], trials[0].run()
        if _differ(first.run(shift=1.0), own):
            raise Unsupported(f"the plan of {kind} does not sum the gradient of what its ranks share")
        names = dict.fromkeys(starred(name) for name in first.shapes if name not in first.splits)
        return tuple(name for name in names if _differ(first.run(changed=name), own))


def _differ(found: list[Tensor], others: list[Tensor]) -> bool:
    return not all(map(torch.equal, found, others))


# -- a small model -----------------------------------------------------------------------------------------------------


def shortened(found: Source, longest: int, ranks: int = 1) -> Source:
    """The same model with its first layers alone, as many as show each kind of layer, and with short windows.
    Its widths can be split over so many ranks. Argument as of `check`."""
    config = copy.deepcopy(found.config)
    text = config.get_text_config()
    if isinstance(getattr(text, "sliding_window", None), int) and text.sliding_window < longest:
        text.sliding_window = min(text.sliding_window, WINDOW)
    if isinstance(limit := getattr(text, source.LIMIT, None), int):
        setattr(text, source.LIMIT, max(limit, TOKENS))
    small, width = found._replace(config=copy.deepcopy(config)), ranks * WIDTH
    for name in WIDTHS.split():
        if isinstance(getattr(small.text, name, None), int):
            setattr(small.text, name, min(getattr(small.text, name), width))
    if (getattr(small.text, "pad_token_id", None) or 0) >= width:
        small.text.pad_token_id = 0
    try:
        kinds, lists = _kinds(small)
    except Unsupported:  # a width that others have to fit
        small = found._replace(config=config)
        kinds, lists = _kinds(small)
    count = max(kinds.index(kind) for kind in kinds) + 1
    if count == len(kinds):
        return small
    cut = copy.deepcopy(small.config)
    text = cut.get_text_config()
    for name in lists:
        setattr(text, name, getattr(text, name)[:count])
    for name in ("num_layers", "num_hidden_layers"):  # some types count parts of a layer in the second
        if getattr(text, name, None) == len(kinds):
            setattr(text, name, count)
    shorter = found._replace(config=cut)
    try:
        return shorter if _kinds(shorter, lists)[0] == kinds[:count] else small
    except Unsupported:  # a number of layers by another name
        return small


def _kinds(found: Source, names: list[str] | None = None) -> tuple[list[tuple], list[str]]:
    """What tells each layer from others: its weights' names and shapes, its attention, its entries in the config.

    Args:
        names: of the lists that have an entry for each layer; None: all of that length.

    Returns:
        the kind of each layer, and the names of the lists.
    """
    module = found.module(torch.float32)
    source.find_slots(module)
    layers, entries = source.layers_of(module), vars(found.text)
    if names is None:
        names = [name for name, each in entries.items() if isinstance(each, list) and len(each) == len(layers)]
        is_counted = (type(entries[name][0]) is int and entries[name] == sorted(set(entries[name])) for name in names)
        names = [name for name, is_number in zip(names, is_counted, strict=True) if not is_number]  # of layers
    kinds = [
        (
            tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters()),
            tuple(slot._replace(number=0) for each in layer.modules() for slot in getattr(each, "attention_slots", ())),
            tuple(str(entries[name][number]) for name in names),
        )
        for number, layer in enumerate(layers)
        if all(number < len(entries[name]) for name in names)
    ]
    return kinds, names
