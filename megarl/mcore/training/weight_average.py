"""The exponential moving average of what a model trains, in fp32 in host memory, each rank's own shard."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from torch import Tensor

from megarl.mcore.lora import adapter
from megarl.mcore.offload import host_memory, lay_out
from megarl.mcore.parallel import fsdp
from megarl.mcore.weights import dist_checkpoint


class WeightAverage:
    """e ← D·e + (1 − D)·w after each step, of all weights that are trained: with low-rank factors, of the factors.

    Buffers, such as those that balance experts, are not averaged: they are always the model's.
    """

    def __init__(self, stages, decay: float):
        """Begins with the model's weights.

        Args:
            stages: the model's chunks; their weights are on the device whenever a method is called.
            decay: D.
        """
        self._stages, self._decay = stages, decay
        self._parameters = [parameter for parameter in stages.parameters() if parameter.requires_grad]
        like = [torch.empty(rows.shape, dtype=torch.float32, device="meta") for rows in self._rows()]
        layouts, size = lay_out(like)
        memory = host_memory(size).untyped_storage()
        self._averages = [layout.on(memory) for layout in layouts]
        self.reset()

    @property
    def bytes(self) -> int:
        """Bytes in host memory on this rank."""
        return sum(average.nbytes for average in self._averages)

    def _rows(self) -> list[Tensor]:
        return [fsdp.rows_here(parameter) for parameter in self._parameters]

    @torch.no_grad()
    def reset(self):
        """Begins anew with the model's present weights."""
        for average, rows in zip(self._averages, self._rows(), strict=True):
            average.copy_(rows)

    @torch.no_grad()
    def update(self):
        """Moves the average towards the model's present weights."""
        for average, rows in zip(self._averages, self._rows(), strict=True):
            moved = average.to(rows.device, non_blocking=True)  # the same tensor on a CPU
            moved.lerp_(rows.float(), 1 - self._decay)
            if moved is not average:
                average.copy_(moved, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    @contextlib.contextmanager
    def in_model(self) -> Iterator[None]:
        """Context in which the model has the average, rounded to its types, as its weights; then its own again, to the
        bit. Whatever reads the model inside, such as a weight transfer, reads the average. A collective under FSDP."""
        own = [rows.cpu() if rows.is_cuda else rows.clone() for rows in self._rows()]
        self._fill(self._averages)
        try:
            yield
        finally:
            self._fill(own)

    @torch.no_grad()
    def _fill(self, values: Sequence[Tensor]):
        for rows, value in zip(self._rows(), values, strict=True):
            rows.copy_(value)
        adapter.merge(self._stages)

    def state(self, role: str, plain: dict, pg_collection, loading: bool) -> dict:
        """The average's checkpoint state, under the keys of a role `<role>_ema`; `plain`: as of `role_state`.

        What is not averaged is in it as the model has it, so that others load it like the weights of a role; `loading`:
        only the averages are, which `dist_checkpoint.load` will fill.
        """
        source, pairs = dist_checkpoint.average_of(role), zip(self._parameters, self._averages, strict=True)
        averages = {id(parameter): fsdp.with_rows(parameter, average) for parameter, average in pairs}
        weights = dist_checkpoint.trained_weights(self._stages, pg_collection)
        reads_all = self._stages[0].config.freezes_by_name
        for state in weights.values():
            for name, entry in list(state.items()):
                average = averages.get(id(entry.data))
                if average is None and loading and reads_all and isinstance(entry.data, Tensor):
                    average = torch.empty_like(entry.data)  # frozen, maybe in a stack of layers, read as a whole
                if average is not None:
                    state[name] = make_sharded_optimizer_tensor(entry, average, source)
                elif loading:
                    del state[name]
                else:
                    entry.key = f"{source}.{entry.key}"
        stored = dist_checkpoint.plain_object(f"{source}.plain", plain, pg_collection)
        return fsdp.local_rows({"model": weights, "plain": stored})

    @torch.no_grad()
    def load(self, loaded: dict, pg_collection):
        """Takes the filled state of `state(…, loading=True)`."""
        average_of = {id(p): average for p, average in zip(self._parameters, self._averages, strict=True)}
        for chunk, state in dist_checkpoint.trained_weights(self._stages, pg_collection).items():
            for name, entry in state.items():
                if (average := average_of.get(id(entry.data))) is not None:
                    average.copy_(fsdp.rows_here(loaded["model"][chunk][name]))
