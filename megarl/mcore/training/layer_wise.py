"""Muon with states divided over data-parallel ranks: each rank has whole parameters of its own, and updates them."""

import megatron.core.optimizer as megatron_optimizer
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


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


megatron_optimizer.LayerWiseDistributedOptimizer = LayerWiseOptimizer
