"""Where Megatron's buffers have the weights of grouped experts: at equal distances, in ascending order.

Megatron lays parameters out in the reverse order of the modules, and pads the end of a bucket, which may lie between
two experts of a layer.
"""

import contextlib
import math

import torch.distributed as dist
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.param_layout import bucket_end_divisor, pad_to_divisor

from megarl.mcore.moe.layer import MixtureLayer


@contextlib.contextmanager
def stacked_experts(stages, config, pg_collection):
    """Context in which buffers of these chunks are made, with a DistributedDataParallelConfig; names do not change.

    Every parameter begins where a bucket could end, so that a bucket's end adds no padding.
    """
    modules = [module for chunk in stages for module in chunk.modules()]
    lists = [m.experts.local_experts for m in modules if isinstance(m, MixtureLayer) and m.is_grouped]
    replicas = math.lcm(*(dist.get_world_size(group) for group in (pg_collection.dp_cp, pg_collection.expt_dp)))
    divisor = bucket_end_divisor(replicas, config.pad_buckets_for_high_nccl_busbw)
    pad_param_start = distrib_optimizer.pad_param_start
    try:
        for module_list in lists:
            _reverse(module_list)
        if lists:
            distrib_optimizer.pad_param_start = lambda param_start_index: pad_to_divisor(param_start_index, divisor)
        yield
    finally:
        distrib_optimizer.pad_param_start = pad_param_start
        for module_list in lists:
            _reverse(module_list)


def _reverse(module_list):
    """Reverses the order in which a list of modules has its parameters, not their names."""
    module_list._modules = dict(reversed(module_list._modules.items()))
