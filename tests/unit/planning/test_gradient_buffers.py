"""Gradient buffers: shares of all ranks are the weights, each once; buckets end where the limit says."""

from types import SimpleNamespace

import pytest

from megarl.mcore.model.weight_table import Weight
from megarl.planning.gradient_buffers import BUCKET_ALIGNMENT, buffers, gradient_bytes

WEIGHTS = [Weight(f"w{i}", (rows, 7), 2, is_shared=i == 0) for i, rows in enumerate((90, 3, 41, 64, 1))]
ARGS = {
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1,
    "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1, "world_size": 3, "overlap_grad_reduce": False,
    "ddp_bucket_size": None, "use_distributed_optimizer": True, "ddp_pad_buckets_for_high_nccl_busbw": False,
    "accumulate_allreduce_grads_in_fp32": True,
}  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"use_distributed_optimizer": False},
                                  {"overlap_grad_reduce": True, "ddp_bucket_size": 300}])  # fmt: skip
def test_each_element_has_one_rank_and_buckets_follow_each_other(more):
    args = SimpleNamespace(**ARGS | more)
    (buffer,) = buffers(WEIGHTS, args, first_stage=True)
    assert buffer.shares().sum() == sum(weight.elements for weight in WEIGHTS)
    assert (buffer.shares_of_weights().sum(0) == [weight.elements for weight in WEIGHTS[::-1]]).all()
    starts, ends = zip(*buffer.buckets, strict=True)
    assert starts == (0, *ends[:-1]) and gradient_bytes(buffer, args) == 4 * buffer.elements
    if args.use_distributed_optimizer:
        assert all(end % (3 * BUCKET_ALIGNMENT) == 0 for end in ends)
        assert len(buffer.buckets) > (2 if args.overlap_grad_reduce else 1)  # the tied embedding is alone
    else:
        assert buffer.buckets.tolist() == [[0, sum(weight.elements for weight in WEIGHTS)]]
