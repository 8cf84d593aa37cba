"""Adam that keeps the states of some parameters on the host, whose cores update them: `--optimizer-cpu-offload`.

In an update the gradients of these parameters go to the host, and new weights in the model's type come back. Their
fp32 weights and moments never leave it. Megatron's `HybridDeviceOptimizer` does the same for CUDA tensors alone; after
its weights were loaded it would go on with those that it had before, if they are fp32.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.mcore.memory.arena import host_memory, lay_out
from megarl.mcore.training.adam import SmallMomentsAdam, pieces


class HostShard(NamedTuple):
    """The host's part of a parameter of n elements, beside its moments."""

    weights: Tensor  # [n] of the model, on the device
    main: Tensor  # [n] the same in fp32 on the host, of which those are rounded
    transfer: Tensor  # [n] fp32 on the host: the gradient, after the update the weights in the model's type


class _Piece(NamedTuple):
    """Views of one or several host shards that are updated at a time, after `arrived`."""

    group: dict
    columns: list[list[Tensor]]  # weights, main, transfer, moments
    arrived: Callable[[], None]  # waits for the gradients


class HostAdam(SmallMomentsAdam):
    """`SmallMomentsAdam` that updates parameters in `on_host` with the cores of the host, all others on the device.

    The device's storage of such a parameter's fp32 copy is empty. Its gradient is on the device as any other's, so that
    norms and clipping see no difference.
    """

    def __init__(self, params, *args, moments: dict[str, torch.dtype], overlaps: bool, pins: bool, **kwargs):
        """`overlaps`: copies run beside updates; `pins`: page-locked memory for copies; the rest as of the base."""
        super().__init__(params, *args, moments=moments, **kwargs)
        self.on_host: dict[Tensor, HostShard] = {}
        self._overlaps, self._pins = overlaps, pins
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None

    @torch.no_grad()
    def move_to_host(self, weights: dict[Tensor, Tensor]):
        """Moves parameters to the host, before their moments are created.

        Args:
            weights: parameter -> the model's weights [n] of which it is the fp32 copy; itself if these are fp32.
        """
        layouts, size = lay_out([torch.empty(len(p), dtype=torch.float32, device="meta") for p in weights])
        memory = host_memory(size, is_pinned=self._pins).untyped_storage()
        for (parameter, of_model), layout in zip(weights.items(), layouts, strict=True):
            self.on_host[parameter] = HostShard(of_model, parameter.detach().to("cpu", copy=True), layout.on(memory))
            if parameter is not of_model:
                parameter.untyped_storage().resize_(0)

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's fp32 weights, moments and memory for copies."""
        moments = sum(t.nbytes for parameter in self.on_host for t in self.state.get(parameter, {}).values())
        return moments + sum(shard.main.nbytes + shard.transfer.nbytes for shard in self.on_host.values())

    def create_moments(self, parameter: Tensor):
        """As the base's, on the host for a parameter that is there."""
        if parameter in self.on_host and not self.state[parameter]:
            self.state[parameter] = {name: torch.zeros(len(parameter), dtype=t) for name, t in self.moments.items()}
        super().create_moments(parameter)

    def load_state_dict(self, state_dict: dict):
        """As the base's; the host's states do not visit the device."""
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        here = {number: parameter for number, parameter in zip(saved, own, strict=True) if parameter in self.on_host}
        states = state_dict["state"]
        others = {number: state for number, state in states.items() if number not in here}
        super().load_state_dict(state_dict | {"state": others})
        for number, parameter in here.items():
            if number in states:
                self.state[parameter] = {name: states[number][name].to("cpu", t) for name, t in self.moments.items()}

    @torch.no_grad()
    def step(self, closure=None):
        """Updates every parameter that has a gradient; the host's while the device updates the others."""
        current = torch.cuda.current_stream()
        if self._overlaps and self._streams is None:
            self._streams = torch.cuda.Stream(), torch.cuda.Stream()
        down, up = self._streams or (current, current)
        down.wait_stream(current)
        up.wait_stream(current)
        sent = [self._send_gradients(group, columns, down) for group, columns in self._host_columns()]
        super().step()
        for piece in sent:
            self._update_on_host(piece, up)
        current.wait_stream(up)

    def _update(self, group: dict, params: list):
        if params := [parameter for parameter in params if parameter not in self.on_host]:
            super()._update(group, params)

    def _host_columns(self) -> Iterator[tuple[dict, list[list[Tensor]]]]:
        """(group, columns) of each piece: gradients on the device, then as in `_Piece`."""
        for group in self.param_groups:
            rows = []
            for parameter in group["params"]:
                if parameter in self.on_host and parameter.grad is not None:
                    self.create_moments(parameter)
                    state = self.state[parameter]
                    rows.append((parameter.grad, *self.on_host[parameter], state["exp_avg"], state["exp_avg_sq"]))
            for columns in pieces(*map(list, zip(*rows, strict=True))):
                yield group, columns

    def _send_gradients(self, group: dict, columns: list[list[Tensor]], stream) -> _Piece:
        gradients, *others = columns
        with torch.cuda.stream(stream):
            for gradient, transfer in zip(gradients, others[2], strict=True):
                transfer.copy_(gradient, non_blocking=True)
            return _Piece(group, others, stream.record_event().synchronize)

    def _update_on_host(self, piece: _Piece, stream):
        weights, main, transfer, *moments = piece.columns
        piece.arrived()
        self._update_tensors(piece.group, main, transfer, *moments)
        with torch.cuda.stream(stream):
            for of_model, own, memory in zip(weights, main, transfer, strict=True):
                rounded = memory.view(of_model.dtype)[: len(own)].copy_(own)  # the gradient is no longer needed
                of_model.copy_(rounded, non_blocking=True)
