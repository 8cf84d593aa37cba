"""Adam with FusedAdam's interface, in plain PyTorch: with moments of fp32, or of 16 bits, or with states on the host.

With `--optimizer-cpu-offload` the host's cores update some parameters: in an update their gradients go to the host, and
new weights in the model's type come back. Their fp32 weights and moments never leave it. Megatron's
`HybridDeviceOptimizer` does the same for CUDA tensors alone; after its weights were loaded it would go on with those
that it had before, if they are fp32.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from megatron.core.utils import to_local_if_dtensor
from torch import Tensor
from torch.optim.adamw import adamw

from megarl.mcore.offload import host_memory, lay_out

PIECE = 2**24  # elements whose 16-bit moments have fp32 copies at a time


class Adam(torch.optim.Optimizer):
    """Adam (1412.6980) or AdamW (1711.05101) with FusedAdam's interface: the step counter is in the param group.

    torch's AdamW keeps a step in every parameter's state, which a distributed-optimizer checkpoint cannot load.
    If Transformer Engine or Apex is installed, Megatron uses their FusedAdam instead of this class.

    With `--use-precision-aware-optimizer` it keeps its moments in types of their own and computes in fp32. After each
    update they are rounded to the nearest number. Their fp32 copies are of about `PIECE` elements at a time.
    """

    def __init__(self, params, lr, weight_decay, betas, eps, adam_w_mode=True, capturable=False, moments=None):
        """`moments`: types by name, "exp_avg" and "exp_avg_sq"; None: those of the parameters."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})
        self.adam_w_mode, self.moments = adam_w_mode, moments

    @torch.no_grad()
    def step(self, closure=None):
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params)

    def _update(self, group: dict, params: list):
        for p in params:
            self.create_moments(p)
        first, second = ([self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq"))
        columns = params, [p.grad for p in params], first, second
        # Each rank updates its own rows of a sharded parameter.
        weights, grads, first, second = (list(map(to_local_if_dtensor, column)) for column in columns)
        self._update_tensors(group, weights, grads, first, second)

    def _update_tensors(self, group: dict, weights: list, grads: list, first: list, second: list):
        decay = group["weight_decay"]
        if not self.adam_w_mode:
            grads, decay = [g.add(p, alpha=decay) for g, p in zip(grads, weights, strict=True)], 0.0
        if self.moments is None:
            return _adamw(group, decay, weights, grads, first, second)
        for of_weights, of_grads, *kept in pieces(zip(weights, grads, first, second, strict=True)):
            computed = [[moment.float() for moment in moments] for moments in kept]
            _adamw(group, decay, of_weights, of_grads, computed[0], computed[1])
            for moment, result in zip(chain.from_iterable(kept), chain.from_iterable(computed), strict=True):
                if moment is not result:  # fp32
                    moment.copy_(result)

    def create_moments(self, parameter: Tensor):
        """Creates the moments of a parameter that has none, as zeros."""
        if not self.state[parameter]:
            moments = self.moments or dict.fromkeys(("exp_avg", "exp_avg_sq"))
            self.state[parameter] = {name: torch.zeros_like(parameter, dtype=kind) for name, kind in moments.items()}

    def create_all_moments(self):
        """Creates the moments of all parameters that have none."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.create_moments(parameter)

    def load_state_dict(self, state_dict: dict):
        """As torch's, which gives each state the type of its parameter, and then in the types of the moments."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state |= {name: state[name].to(dtype) for name, dtype in (self.moments or {}).items() if name in state}


def _adamw(group: dict, decay: float, weights: list, grads: list, first: list, second: list):
    # One tensor for all: one for each would be as many copies to a device.
    steps = list(torch.full((len(weights),), group["step"] - 1.0, device=weights[0].device).unbind())
    options = {"beta1": group["betas"][0], "beta2": group["betas"][1], "lr": group["lr"], "eps": group["eps"]}
    options |= {"fused": True, "amsgrad": False, "maximize": False, "weight_decay": decay}
    adamw(weights, grads, first, second, [], steps, **options)


def pieces(rows: Iterable[Sequence[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """Cuts tensors by rows; yields columns of views of at most `PIECE` elements together, or of one row.

    Args:
        rows: tensors of one shape each, equally many.
    """
    piece, size = [], 0
    for tensors in rows:
        tensors = [torch.atleast_1d(tensor) for tensor in tensors]
        count = max(1, PIECE * len(tensors[0]) // max(1, tensors[0].numel()))
        for parts in zip(*(tensor.split(count) for tensor in tensors), strict=True):
            if piece and size + parts[0].numel() > PIECE:
                yield _columns(piece)
                piece, size = [], 0
            piece.append(parts)
            size += parts[0].numel()
    if piece:
        yield _columns(piece)


def _columns(rows: list[tuple[Tensor, ...]]) -> list[list[Tensor]]:
    return [[row[column] for row in rows] for column in range(len(rows[0]))]


class HostShard(NamedTuple):
    """The host's part of a parameter of n elements, beside its moments."""

    weights: Tensor  # [n] of the model, on the device
    main: Tensor  # [n] the same in fp32 on the host, of which those are rounded
    transfer: Tensor  # [n] fp32 on the host: the gradient, after the update the weights in the model's type


class HostAdam(Adam):
    """`Adam` that updates parameters in `on_host` with the cores of the host, all others on the device.

    The device's storage of such a parameter's fp32 copy is empty. Its gradient is on the device as any other's, so that
    norms and clipping see no difference.
    """

    def __init__(self, params, *args, overlaps: bool, pins: bool, **kwargs):
        """`overlaps`: copies run beside updates; `pins`: page-locked memory for copies; the rest as of the base, with
        `moments`."""
        super().__init__(params, *args, **kwargs)
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
        sent = []
        for group, (gradients, *columns) in self._host_columns():
            with torch.cuda.stream(down):
                for gradient, transfer in zip(gradients, columns[2], strict=True):
                    transfer.copy_(gradient, non_blocking=True)
                sent.append((group, columns, down.record_event()))
        super().step()
        for group, (weights, main, transfers, first, second), arrived in sent:
            arrived.synchronize()
            self._update_tensors(group, main, transfers, first, second)
            with torch.cuda.stream(up):
                for of_model, own, memory in zip(weights, main, transfers, strict=True):
                    rounded = memory.view(of_model.dtype)[: len(own)].copy_(own)  # the gradient is no longer needed
                    of_model.copy_(rounded, non_blocking=True)
        current.wait_stream(up)

    def _update(self, group: dict, params: list):
        if params := [parameter for parameter in params if parameter not in self.on_host]:
            super()._update(group, params)

    def _host_columns(self) -> Iterator[tuple[dict, list[list[Tensor]]]]:
        """(group, columns) of each piece: gradients on the device, fields of `HostShard`, moments."""
        for group in self.param_groups:
            rows = []
            for parameter in group["params"]:
                if parameter in self.on_host and parameter.grad is not None:
                    self.create_moments(parameter)
                    state = self.state[parameter]
                    rows.append((parameter.grad, *self.on_host[parameter], state["exp_avg"], state["exp_avg_sq"]))
            for columns in pieces(rows):
                yield group, columns
