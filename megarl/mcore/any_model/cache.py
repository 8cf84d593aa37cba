"""The engine's context for a model of transformers: each slot of attention has its own cache in one buffer."""

import copy
import math
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from megarl.mcore.any_model.attention import Slot
from megarl.mcore.inference.paged_context import PagedContext
from megarl.mcore.inference.recurrent_context import RecurrentContext
from megarl.mcore.kernels.batch_invariance import VECTOR


def _is_uniform(slots: Sequence[Slot]) -> bool:
    return len({(slot.groups, slot.channels) for slot in slots}) == 1


def mean_cache(slots: Sequence[Slot], ranks: int) -> tuple[int, int]:
    """Query groups of the whole model and channels whose product is the mean of the slots, as `SlotContext` has them
    on each of so many tensor-parallel ranks."""
    if not slots:  # a module without attention, whose cache is of no use
        return ranks, VECTOR
    if _is_uniform(slots):
        return slots[0].groups, slots[0].channels
    return ranks, -(-sum(slot.groups * slot.channels for slot in slots) // (ranks * len(slots)))


class SlotContext(PagedContext):
    """Caches each slot's keys and values of this rank's heads in their own shape."""

    def __init__(self, model_config, inference_config, memory=None):
        """Arguments as of `PagedContext`; the model's slots are `model_config.attention_slots`."""
        self._keep(model_config, inference_config)
        super().__init__(model_config, inference_config, memory)

    def _keep(self, model_config, inference_config):
        self._attention, self._tensor_ranks = model_config.attention_slots, inference_config.pg_collection.tp

    def _cache_config(self, model_config):
        """A config whose layers have as many numbers for a token as the slots together."""
        config, ranks = copy.copy(super()._cache_config(model_config)), dist.get_world_size(self._tensor_ranks)
        whole = [slot._replace(groups=ranks * slot.groups) for slot in self._attention]
        config.num_layers = max(1, len(whole))
        config.num_query_groups, config.kv_channels = mean_cache(whole, ranks)
        return config

    def layer_caches(self) -> tuple[Tensor, ...]:
        """[blocks, block, G, 2, C] of each slot."""
        if _is_uniform(self._attention):
            return super().layer_caches()
        flat, blocks, start, caches = self.memory_buffer.flatten(), self.memory_buffer.shape[1], 0, []
        for slot in self._attention:
            shape = blocks, self.block_size_tokens, slot.groups, 2, slot.channels
            caches.append(flat[start : start + math.prod(shape)].view(shape))
            start += math.prod(shape)
        return tuple(caches)


class StateSlotContext(SlotContext, RecurrentContext):
    """Also keeps a state of each request for each recurrence of the module, in its own shape."""

    reads_tables = False  # the host plans the runs of a step

    def __init__(self, model_config, inference_config, memory, snapshots: int | None):
        """Arguments as of `RecurrentContext`; the shapes of a sequence's states are `model_config.state_shapes`."""
        self._keep(model_config, inference_config)
        cached = [True] * len(self._attention)
        RecurrentContext.__init__(self, model_config, inference_config, memory, has_cache=cached, snapshots=snapshots)

    def _state_shapes(self, model_config, ranks):
        return [[shape] for shape in model_config.state_shapes]

    def _states_in(self, parts):
        return parts[0]

    def _take(self, inputs, runs, layer):
        inputs.apply(runs, self._states[layer])
