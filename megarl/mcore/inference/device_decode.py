"""Decode steps that are planned on the device: fixed shapes and addresses, one copy to the device, one from it.

A step of n requests, or of n rows of which some read drafted tokens (`draft_rows.py`), has the rows of the next batch
bucket; later ones are padding. The host sends each row's last token, position, random key and cache blocks. All else is
computed on the device, so the step can be a CUDA graph, one per bucket and pipeline stage (`controller.py`): a small
model's step has hundreds of kernels that take less time than their launches. Graphs have a runner of megarl's own,
since Megatron's asks for process-wide groups.

A few requests rarely end, so the next step's graph is launched before the host reads this one's tokens. If a request
ends, or another kind of step comes, it is dropped: what it has written is written again, or nobody reads it.
Shapes: B rows of a bucket, P blocks of a request.
"""

import sys
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.mcore import device
from megarl.mcore.attention.cache_attention import bucket_of
from megarl.mcore.moe.layer import max_equal_rows
from megarl.mcore.parallel.process_groups import all_reduce_number

MAX_AHEAD = 8  # requests; with more, steps are dropped so often that they take more time than the host's work
# Of 32 bits, of a row before its blocks: token, position, shift (of its rotation, after images), recurrent state,
# temperature, greedy, two of its random key.
_NUMBERS = 8


class StepOutputs(NamedTuple):
    """What a step computes."""

    computed: Tensor  # [2, B] float64: tokens and their log-probs; of stages before the last one hidden states
    routes: Tensor | None  # [B, L, k] int32 of this rank's tokens; None: not recorded, or no MoE layer on this rank
    hidden: tuple[Tensor, Tensor | None] | None = None  # as of `PagedContext.keep_hidden`


class DeviceStep:
    """Inputs of the steps of one bucket, in device memory that stays where it is."""

    def __init__(self, rows: int, blocks: int, spare_block: int, groups: int, hidden: Tensor | None = None):
        """`blocks`: P, of the longest request; `spare_block`: of the cache, for rows of padding; `groups`: G of keys
        and values; `hidden`: memory for the hidden states of the pipeline stage before this one."""
        self.rows, self._spare_block, self.hidden = rows, spare_block, hidden
        self._staged = torch.zeros(rows * (_NUMBERS + blocks), dtype=torch.int32)
        if device.has_cuda():
            self._staged = self._staged.pin_memory()
        self._sent = torch.zeros_like(self._staged, device=device.device())
        self.following = torch.zeros(rows, dtype=torch.int64, device=device.device())  # tokens, for `after`
        self.read = torch.zeros(2, rows, dtype=torch.float64, pin_memory=device.has_cuda())  # samples, on the host
        # Views of what was sent.
        fields = self._fields(self._sent)
        self.keys, self.temperatures, self.greedy, self._tokens, self._positions, self.shifts, *fields = fields
        self.states, self.blocks = fields
        # What `begin` makes of them, [B]: tokens to read and their positions (0 in padding), the keys that each sees (0
        # in padding), and rows of the flattened cache for its key and value.
        self.tokens, self.positions, self.slots = torch.zeros(3, rows, dtype=torch.int64, device=device.device())
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device.device())
        self.arrived = torch.zeros(rows * groups, dtype=torch.int32, device=device.device())  # see `paged_decode`

    def _fields(self, memory: Tensor) -> tuple[Tensor, ...]:
        """(keys [B] int64, temperatures [B] fp32, greedy [B], tokens [B], positions [B] (−1: padding), shifts [B],
        recurrent states [B] (−1: padding), blocks [B, P]) of a buffer; int32 unless they say otherwise."""
        rows = self.rows
        keys, temperatures, *others, blocks = memory.split([2 * rows, *[rows] * 6, len(memory) - _NUMBERS * rows])
        return keys.view(torch.int64), temperatures.view(torch.float32), *others, blocks.view(rows, -1)

    def send(self, inputs: tuple[Tensor, ...]):
        """Sends the inputs of n requests, host tensors [n] and [n, P] in the order of `_fields`; a missing block is −1.
        The host may not send again before it has read the step's results."""
        count, fields = len(inputs[0]), self._fields(self._staged)
        for field, values, padding in zip(fields, inputs, (0, 1, 0, 0, -1, 0, -1, self._spare_block), strict=True):
            field[:count], field[count:] = values, padding
        fields[-1].masked_fill_(fields[-1] < 0, self._spare_block)
        self._sent.copy_(self._staged, non_blocking=True)

    def advance(self, drawn: Tensor):
        """Makes the tokens drawn [B] the inputs of the next step."""
        self._tokens.copy_(drawn)
        self._positions.add_(self._positions >= 0)

    def begin(self, size: int):
        """Makes of what was sent what the layers read, with cache blocks of `size` tokens."""
        from megarl.mcore.kernels.cuda.rotate_heads import begin_rows  # needs Triton

        sent = self._tokens, self._positions, self.blocks
        begin_rows(self.tokens, self.positions, self.lengths, self.slots, sent[0], sent[1], sent[2], size)


class DeviceDecode:
    """Runs decode steps of an engine on the device."""

    def __init__(self, engine):
        self.has_graphs = True  # where a step can be a CUDA graph, it is one
        self.engine, self.context = engine, engine.context
        self._model = engine.controller.inference_wrapped_model.model
        self.modules: list[torch.nn.Module] = [self._model]  # with what computes something `after` a step
        self.stages, self._steps = engine.controller.stages, dict[int, DeviceStep]()
        self._graphs, self._is_captured, self._max_rows = StepGraphs(), False, 0
        self.may_go_ahead = True  # the next step is known to be a decode step if no request ends
        self._ahead: StepOutputs | None = None  # of the next step, which was launched

    def drop_ahead(self):
        """Drops a step that was launched ahead: another one comes."""
        self._ahead = None

    def begin(self):
        """Begins a session, in which the model and the cache stay where they are."""
        self.drop_ahead()
        is_coupled = self.engine.is_coupled
        self._max_rows = self.context.tensor_ranks * max_equal_rows(self._model) if is_coupled else sys.maxsize
        self._is_captured = self.has_graphs and all(map(can_capture, self.modules))
        if self._is_captured:
            own = [tensor for module in self.modules for tensor in (*module.parameters(), *module.buffers())]
            self._graphs.begin((*own, self.context.memory_buffer), self._is_so_on_any_rank)

    def _is_so_on_any_rank(self, is_so: bool) -> bool:
        """Whether it is so on a rank that takes part in this one's steps. Collective over these ranks."""
        groups = self.engine.pg_collection
        of_replica = all_reduce_number(int(is_so), groups.tp, dist.ReduceOp.MAX)
        return bool(all_reduce_number(of_replica, groups.ep, dist.ReduceOp.MAX))

    def rows(self, count: int) -> int | None:
        """Rows B of the next step, which decodes so many tokens, if it can run here; else None. Not here: pipeline
        stages of replicas that share experts, and forced tokens."""
        is_apart, sampling = self.engine.is_coupled and self.stages.count > 1, self.engine.controller.sampling
        if is_apart or not self.context.reads_tables or sampling.needs_host:
            return None
        if sampling.forced and sampling.forced.are_forced(*self.context.sampled_rows()).any():
            return None
        rows = bucket_of(count, self.context.tensor_ranks)
        return rows if rows <= self._max_rows else None

    def run(self, rows: int) -> tuple[Tensor, list[float]]:
        """Returns the tokens [n] on the host that a step of as many rows or fewer draws, and their log-probs. `rows`:
        of a bucket; the same on all replicas that share experts, also on one without requests."""
        c, drafts = self.context, self.context.draft_rows
        count = c.total_request_count if drafts is None else len(drafts.requests)
        step, outputs = self._step(rows), self._ahead
        if outputs is None:
            outputs = self._launch(step)
        samples, self._ahead, c.hidden, c.hidden_step = outputs.computed, None, outputs.hidden, step
        if self._goes_ahead(step):
            step.read.copy_(samples, non_blocking=True)
            is_read = torch.cuda.Event()
            is_read.record()
            step.advance(samples[0])
            self._ahead = self._outputs(step)
            is_read.synchronize()
            samples = step.read
        tokens, logprobs = samples[:, :count].cpu()
        if outputs.routes is not None:
            c.kv_block_allocator.store_routing_per_block(outputs.routes[:count].cpu().short().numpy())
        return tokens.long(), logprobs.tolist()

    def _launch(self, step: DeviceStep) -> StepOutputs:
        """Sends the inputs of a step and launches it; of several stages, `computed` is what the last one has."""
        c, sampling = self.context, self.engine.controller.sampling
        requests = torch.arange(c.total_request_count) if c.draft_rows is None else c.draft_rows.requests
        ids, own = c.request_ids[requests].long(), slice(len(requests))
        draws = (each[ids] for each in (sampling.keys, sampling.temperatures, sampling.greedy))
        tokens, positions = c.token_to_input_ids[own], c.token_to_pos_ids[own]
        shifts = torch.zeros_like(ids) if c.image_positions is None else c.image_positions.shifts(ids)
        step.send((*draws, tokens, positions, shifts, ids, c.request_to_kv_block_ids[requests]))
        with c.use_device_plan(step):
            self.stages.receive(step.hidden)
            outputs = self._outputs(step)
            return outputs._replace(computed=self.stages.of_last(outputs.computed, (2, step.rows), torch.float64))

    def _goes_ahead(self, step: DeviceStep) -> bool:
        """Whether to launch the next step before this one's tokens are read: both are the same graph. Routes would have
        to be read, too. Ranks of one replica would have to agree."""
        c = self.context
        is_alone = self.stages.count == 1 and not self.engine.is_coupled
        is_small = self.may_go_ahead and is_alone and c.total_request_count <= MAX_AHEAD
        is_same = is_small and self._is_captured and self._graphs.is_captured(self._key(step))
        return is_same and not self._model.config.moe_enable_routing_replay and c.goes_on_in_place()

    def _outputs(self, step: DeviceStep) -> StepOutputs:
        if not self._is_captured:
            return self._compute(step)
        return self._graphs.run(self._key(step), lambda: self._compute(step))

    def after(self, step: DeviceStep, function: Callable[[], Tensor]) -> Tensor:
        """Returns what `function` computes after each step from its hidden states and inputs: a graph where these are
        of a graph."""
        return self._graphs.run((*self._key(step), "after"), function) if self._is_captured else function()

    def _key(self, step: DeviceStep) -> tuple:
        return step.rows, self._model.config.moe_enable_routing_replay

    def _step(self, rows: int) -> DeviceStep:
        c = self.context
        if rows not in self._steps:
            blocks, spare = c.request_to_kv_block_ids.shape[1], c.kv_block_allocator.dummy_block_idx
            groups = max((cache.shape[2] for cache in c.layer_caches()), default=0)
            self._steps[rows] = DeviceStep(rows, blocks, spare, groups, self.stages.input_memory(rows))
        return self._steps[rows]

    def _compute(self, step: DeviceStep) -> StepOutputs:
        """One forward pass and a sampled token of each row, of the last stage; neither waits for the device."""
        step.begin(self.context.block_size_tokens)
        tokens, positions = step.tokens.unsqueeze(0), step.positions.unsqueeze(0)
        logits = self.engine.forward({"tokens": tokens, "position_ids": positions, "attention_mask": None})
        if not self.stages.is_last:
            return StepOutputs(logits, self.context.recorded_routes(), self.context.hidden)
        sampling = self.engine.controller.sampling
        numbers = sampling.numbers_on_device(step.keys, step.positions + 1)
        drawn, logprobs = sampling.sample_on_device(logits.squeeze(0), numbers, step.temperatures, step.greedy)
        samples = torch.stack([drawn.double(), logprobs.double()])
        return StepOutputs(samples, self.context.recorded_routes(), self.context.hidden)


# -- CUDA graphs -----------------------------------------------------------------------------------------------------


def can_capture(model) -> bool:
    """Whether a decode step of a model can be a graph: its kernels and their shapes depend on nothing that the host
    reads from the device, and its weights stay where they are, which those of --use-torch-fsdp2 do not."""
    reads_host = any(getattr(module, "reads_host", False) for module in model.modules())
    return device.has_cuda() and not reads_host and not any(isinstance(p, DTensor) for p in model.parameters())


class _MemoryRead(TorchDispatchMode):
    """Collects the memory that operators use and that none of them has made."""

    def __init__(self):
        super().__init__()
        self.held: dict[int, torch.UntypedStorage] = {}  # by address
        self._made: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in _tensors((args, kwargs)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._made:
                self.held[storage.data_ptr()] = storage
        results = func(*args, **(kwargs or {}))
        self._made.update(tensor.untyped_storage().data_ptr() for tensor in _tensors(results))
        return results


def _tensors(tree) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


# A graph, its outputs, and what it reads where it is and nobody else may hold: tables, constants.
_Graph = tuple[torch.cuda.CUDAGraph, Any, list[torch.UntypedStorage]]


class StepGraphs:
    """Graphs by key. The first call of a key runs its function, the second captures it, later ones replay it."""

    def __init__(self):
        self._graphs: dict[Hashable, _Graph | None] = {}  # None: ran once
        self._addresses: tuple[int, ...] = ()  # of the memory that the graphs read
        self._pool = None  # memory that all graphs share, since one runs at a time

    def begin(self, memory: Iterable[Tensor], is_so_on_any_rank: Callable[[bool], bool] = bool):
        """Begins a time in which all of `memory`, what functions read and others write, stays where it is. Graphs of
        earlier times are kept if it is where it was then, on all ranks with which functions communicate: NCCL wants a
        collective to be part of a graph on all of its ranks or on none. What else graphs read must never change."""
        addresses = tuple(tensor.data_ptr() for tensor in memory)
        # For example, weights came back from the host to another place.
        if is_so_on_any_rank(addresses != self._addresses):
            self._graphs.clear()
            self._addresses, self._pool = addresses, None

    def is_captured(self, key: Hashable) -> bool:
        """Whether the next call of a key replays a graph."""
        return self._graphs.get(key) is not None

    def run(self, key: Hashable, function: Callable[[], Any]) -> Any:
        """Returns the outputs of `function`, which the next call of any key may overwrite. `key`: calls of one key
        launch the same kernels on the same shapes, and read inputs from the same memory."""
        if key not in self._graphs:
            self._graphs[key] = None
            return function()
        found = self._graphs[key]
        if found is None:
            found = self._graphs[key] = self._capture(function)
        graph, outputs, _ = found
        graph.replay()
        return outputs

    def _capture(self, function: Callable[[], Any]) -> _Graph:
        torch.cuda.synchronize()
        graph, read = torch.cuda.CUDAGraph(), _MemoryRead()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"), read:
            outputs = function()
        self._pool = graph.pool()
        return graph, outputs, list(read.held.values())
