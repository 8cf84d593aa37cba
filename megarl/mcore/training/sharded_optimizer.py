"""Megarl's forms of Megatron's optimizers whose states are divided over data-parallel ranks.

`ShardedOptimizer` divides elements, also for SGD, and with states on the host. `LayerWiseOptimizer` is for Muon: each
rank has whole parameters of its own, and updates them.
"""

from itertools import chain

import megatron.core.optimizer as megatron_optimizer
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
from megatron.core.optimizer import DistributedOptimizer, OptimizerConfig
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer
from megatron.core.utils import to_local_if_dtensor
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from megarl.mcore.config.optimizer_flags import SGD
from megarl.mcore.training.adam import HostShard


def create_momentum(sgd: torch.optim.SGD, config: OptimizerConfig):
    """Creates the momentum of parameters that have none. Zeros, to which torch adds the first gradient."""
    for parameter in (p for group in sgd.param_groups for p in group["params"] if config.sgd_momentum):
        sgd.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


# One call for all tensors: of thousands of experts, one for each would take longer than the update.
def copy_together(this: list[Tensor], that: list[Tensor], overflow_buf=None):
    """Copies tensors `this`, or their shards on this rank, to those of `that`, which may have other types; replaces
    Megatron's function of this kind."""
    if that:
        own, others = (list(map(to_local_if_dtensor, tensors)) for tensors in (that, this))
        torch._foreach_copy_(own, others)


class ShardedOptimizer(DistributedOptimizer):
    """Megatron's distributed optimizer, also for SGD: Megatron knows the states of Adam and Lion alone.

    Of parameters that a `HostAdam` has moved to the host, weights and states are read and written there.
    """

    model_float16_groups: list[list[Tensor]]
    shard_fp32_from_float16_groups: list[list[Tensor]]

    def __init__(self, optimizer, config, grad_scaler, init_state_fn, **kwargs):
        super().__init__(optimizer, config, grad_scaler, init_state_fn or create_momentum, **kwargs)

    @property
    def optimizer_state_keys(self):
        """Names of the states of a parameter."""
        if self.config.optimizer != SGD:
            return super().optimizer_state_keys
        return ("momentum_buffer",) if self.config.sgd_momentum else ()

    def model_weights(self) -> dict[Tensor, Tensor]:
        """The model's weights [n] of each of the optimizer's parameters, which is itself one if these are fp32."""
        copies = (self.shard_fp32_from_float16_groups, self.shard_float16_groups)
        pairs = zip(*map(chain.from_iterable, copies), strict=True)
        return dict(pairs) | {parameter: parameter for parameter in chain.from_iterable(self.shard_fp32_groups)}

    @property
    def _on_host(self) -> dict[Tensor, HostShard]:
        return getattr(self.optimizer, "on_host", {})

    def _copies(self) -> tuple[list[Tensor], list[Tensor]]:
        """The fp32 copies on the device, and the model's weights of each. The host sends its own in its update."""
        pairs = {main: own for main, own in self.model_weights().items() if own is not main}
        here = [main for main in pairs if main not in self._on_host]
        return here, [pairs[main] for main in here]

    def _copy_main_params_to_model_params(self):
        if not self.is_stub_optimizer:
            copy_together(*self._copies())

    def _copy_model_params_to_main_params(self, state_dict=None):
        assert state_dict is None, "weights are those of the model"
        main, weights = self._copies()
        copy_together(weights, main)
        for shard in self._on_host.values():
            shard.main.copy_(shard.weights)

    def _get_main_param_and_optimizer_states(self, model_param) -> dict[str, Tensor]:
        tensors = super()._get_main_param_and_optimizer_states(model_param)
        shard = self._on_host.get(tensors["param"])
        return tensors if shard is None else tensors | {"param": shard.main}

    def get_parameter_state_dp_zero(self, use_gloo_comm=True, empty_data=False, return_on_all_ranks=False):
        """Megatron's; one rank copies its states to the host as they are, with no bucket of them on the device.

        Without `--overlap-grad-reduce`, which one rank does not have, a bucket is a whole buffer, which Megatron would
        have there twice in fp32.
        """
        is_alone = self.data_parallel_group.size() == 1
        state = super().get_parameter_state_dp_zero(use_gloo_comm, empty_data or is_alone, return_on_all_ranks)
        if not is_alone or empty_data:
            return state
        for number, (buffer, by_type) in enumerate(zip(self.buffers, self.gbuf_ranges, strict=True)):
            for dtype, ranges in by_type.items():
                start = 0
                for bucket, found in zip(buffer.buckets, ranges, strict=True):
                    for model_param, place in found["param_map"].items():
                        own, tensors = place["gbuf_local"], self._get_main_param_and_optimizer_states(model_param)
                        for name, tensor in tensors.items():
                            state[number][dtype][name][start + own.start : start + own.end].copy_(tensor)
                    start += bucket.numel_unpadded
        return state

    def _set_main_param_and_optimizer_states(self, model_param, tensors: dict[str, Tensor]):
        for name, own in self._get_main_param_and_optimizer_states(model_param).items():
            own.copy_(tensors[name])


class LayerWiseOptimizer(LayerWiseDistributedOptimizer):
    """Megatron's, for roles that are a part of the world, for fp32 and on every device.

    Megatron's sums norms over the whole world, wraps and saves the optimizers of 16 bits alone, and gathers shares of
    unequal size, which gloo cannot.
    """

    def __init__(self, optimizers, config, pg_collection, init_state_fn_list, model_chunks):
        super().__init__(optimizers, config, pg_collection, init_state_fn_list, model_chunks)
        if not config.bf16:
            pairs = zip(optimizers, init_state_fn_list, strict=True)
            self.chained_optimizers = [FP32Optimizer(optimizer, config, create) for optimizer, create in pairs]
            self.config = config
        for part in self.chained_optimizers:
            part.tp_group, part.expert_tp_group = pg_collection.tp, pg_collection.expt_tp

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """The norm of all gradients: each parameter counts on the rank that updates it."""
        gradients = [grad for part in self.chained_optimizers for grad in part.get_grads_for_grad_norm()]
        return get_grad_norm_fp32(gradients, grad_stats_parallel_group=self.pg_collection.intra_dist_opt)

    @torch.no_grad()
    def allgather_params(self):
        """Sends each rank's updated parameters to the other replicas."""
        for shares, group in ((self.dp_cp_params_list, self.dp_cp), (self.expt_dp_params_list, self.expt_dp)):
            for rank, parameters in enumerate(shares or []):
                if parameters:
                    flat = _flatten_dense_tensors([parameter.detach() for parameter in parameters])
                    dist.broadcast(flat, dist.get_global_rank(group, rank), group)
                    for parameter, value in zip(parameters, _unflatten_dense_tensors(flat, parameters), strict=True):
                        parameter.copy_(value)

    def sharded_state_dict(self, model_sharded_state_dict, is_loading: bool = False, **kwargs) -> dict:
        """The states of this rank's parameters, for a checkpoint that loads with any number of replicas."""
        state = ChainedOptimizer.sharded_state_dict(self, model_sharded_state_dict, is_loading, **kwargs)
        for entry in nested_values(state):
            if isinstance(entry, ShardedBase):  # no other replica has it
                entry.replica_id = 0 if isinstance(entry.replica_id, int) else (*entry.replica_id[:2], 0)
        for part in [state] if len(self.chained_optimizers) == 1 else state.values():
            own = part.get("optimizer", part)
            # Lists and dictionaries without tensors would vanish from a checkpoint.
            own["state"] = own["state"] or LocalNonpersistentObject({})
            if copies := part.get("fp32_from_fp16_params"):
                part["fp32_from_fp16_params"] = {i: c or LocalNonpersistentObject([]) for i, c in enumerate(copies)}
        return state


megatron_optimizer.DistributedOptimizer = ShardedOptimizer
megatron_optimizer.LayerWiseDistributedOptimizer = LayerWiseOptimizer
