"""The plan's memory with optimizer states on the host, against real tensors: exactly, on every rank."""

import pytest
import torch.distributed as dist

from megarl.planning import memory, parameters
from tests.helpers.planned_memory import build, check_weights, real_bytes
from tests.helpers.tiers import by_default
from tests.helpers.tiny_models import VOCAB, parse_roles

DISTRIBUTED = "--use-distributed-optimizer"
EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 36 --moe-router-topk 2 --moe-layer-freq [0,1]"
    " --moe-shared-expert-intermediate-size 50 --expert-model-parallel-size 2"
)
VPP = "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
SMALL_SECOND = "--use-precision-aware-optimizer --exp-avg-sq-dtype bf16 --adam-beta2 0.95"
HOST = f"{DISTRIBUTED} --optimizer-cpu-offload --optimizer-offload-fraction"
HOST_MODELS = [
    (f"{EXPERTS} --bf16 {HOST} 0.4", "llama", 4), (f"{HOST} 1 --bf16", "recurrent", 2),
    (f"{VPP} --bf16 {HOST} 0.7", "llama", 4), (f"{SMALL_SECOND} --tensor-model-parallel-size 2 {HOST} 0.5", "gpt2", 2),
    (f"{HOST} 0.3 --overlap-grad-reduce --ddp-bucket-size 5000", "llama", 3),
]  # fmt: skip


@pytest.mark.parametrize("flags, shape, ranks", by_default(HOST_MODELS, HOST_MODELS[:1]))
def test_states_on_the_host_are_exact_on_every_rank(flags, shape, ranks):
    from megarl.mcore.memory.offload import bytes_on_host
    from megarl.mcore.parallel.process_groups import fake_world

    for rank in range(ranks):
        with fake_world(ranks, rank):
            args, pg_collection, stages, wrapped, optimizer = build(flags, shape, False)
            planned = check_weights(args, pg_collection, stages, False, rank, ranks)
            stage = dist.get_rank(pg_collection.pp)
            each = ranks // dist.get_world_size(pg_collection.pp)
            parts = memory.host_part(parameters.stage_weights(args, VOCAB, False)[stage], args, stage)
            gone, on_host = (int(part[rank % each * len(part) // each]) for part in parts)
            moved = [part.optimizer.on_host for part in optimizer.chained_optimizers]
            weights, gradients, states = real_bytes(stages, wrapped, optimizer)
            states -= sum(
                (main.nbytes if main is not shard.weights else 0)
                + sum(moment.nbytes for moment in part.optimizer.state[main].values())
                for part, shards in zip(optimizer.chained_optimizers, moved, strict=True)
                for main, shard in shards.items()
            )
            assert planned == (weights, gradients, states + gone) and gone > 0
            assert on_host == bytes_on_host(optimizer)


def test_a_stage_has_on_device_and_host_what_the_fraction_leaves():
    flags = f"--bf16 {DISTRIBUTED}"
    shares = [memory.stage_memory(parse_roles(f"{flags} {more}", 1)["actor"], VOCAB, "train", 9, 1, 0)[0]
              for more in ("", f"{HOST} 1", f"{HOST} 0.5")]  # fmt: skip
    device, host, half = shares
    assert (device.host, host.optimizer, host.host) == (0, 0, device.optimizer // 12 * 16)
    assert device.total - host.total == device.optimizer and 0.5 <= half.optimizer / device.optimizer < 0.6
    assert half.host == (device.optimizer - half.optimizer) // 12 * 16
