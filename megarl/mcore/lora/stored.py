"""Factors in a checkpoint, and a fingerprint of the weights under them."""

import hashlib
from pathlib import Path

import torch.distributed as dist

from megarl.errors import UsageError
from megarl.mcore.lora.adapter import BALANCING, Adapter, base_weights, set_base
from megarl.mcore.lora.settings import LoRASettings
from megarl.mcore.weights import dist_checkpoint, reshard
from megarl.mcore.weights.reshard_plan import LocalWeights

FINGERPRINT = "base"  # entry of a role's plain state


def base_fingerprint(stages, pg_collection) -> str:
    """Precision and hash of the weights under a model's factors, equal in every layout; a collective of the role.

    A head, which critics replace, and what balances experts do not count.
    """
    with base_weights(stages):
        sums = reshard.checksum(LocalWeights(stages, pg_collection), pg_collection.intra_dist_opt)
    frozen = [(key, sums[key]) for key in sorted(sums) if not key.endswith(BALANCING) and "output_layer." not in key]
    return f"{stages[0].config.params_dtype} {hashlib.blake2b(repr(frozen).encode(), digest_size=8).hexdigest()}"


def check_fingerprint(stored: str, found: str, role: str, pg_collection):
    """UsageError unless the weights are those that a checkpoint's factors were trained on.

    Weights of another precision are not compared.
    """
    if stored.split(maxsplit=1)[0] == found.split(maxsplit=1)[0] and stored != found:
        raise UsageError(
            f"{role}: the weights under the factors are not those of the checkpoint; give the --pretrained-checkpoint, "
            "--hf-model or --seed of its run",
            reporting_rank=dist.get_process_group_ranks(pg_collection.intra_dist_opt)[0],
        )


def load_factors(folder: Path, source: str, lora: LoRASettings, stages, args, pg_collection, is_frozen: bool):
    """Adds the factors of a checkpoint to a model's weights, with rounding in 16 bits; a collective of the role.

    A frozen model keeps factors of 16 bits apart, as they were trained. Also loads a scalar head that both have.

    Args:
        source: role whose factors they are.
        args: Megatron namespace of the model's role.

    Raises:
        UsageError: the model's weights are not those that the factors were trained on.
    """
    set_base(stages)  # of factors that the model trains on top
    adapters = [Adapter(chunk, lora, args, pg_collection) for chunk in stages]
    held = dist_checkpoint.tensor_shapes(folder)
    state = dist_checkpoint.factors_state(source, stages, adapters, pg_collection, held)
    loaded = dist_checkpoint.load_role(state, folder, pg_collection)
    check_fingerprint(loaded["plain"][FINGERPRINT], base_fingerprint(stages, pg_collection), source, pg_collection)
    for i, (chunk, adapter) in enumerate(zip(stages, adapters, strict=True)):
        of_chunk = loaded["model"][f"chunk{i}"]
        names = [name for name in of_chunk if name.startswith("adapter.")]
        adapter.load_state_dict({name.removeprefix("adapter."): of_chunk.pop(name) for name in names})
        chunk.load_state_dict(of_chunk, strict=False)
        if is_frozen and adapter.is_apart:
            adapter.attach(chunk)
            chunk.requires_grad_(False)
        else:
            adapter.fold()
