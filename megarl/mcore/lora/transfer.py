"""Factors outside of their model: in a rollout's own model, in a checkpoint with a fingerprint of the weights under
them, and whole on one rank."""

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.errors import UsageError
from megarl.mcore.lora.adapter import Adapter, base_weights, set_base, trained_state
from megarl.mcore.lora.targets import LoRASettings
from megarl.mcore.model.gpt import value_head_of
from megarl.mcore.parallel import fsdp
from megarl.mcore.weights import dist_checkpoint, reshard
from megarl.mcore.weights.reshard import WeightTransfer
from megarl.mcore.weights.reshard_plan import LocalWeights, model_weights

FINGERPRINT = "base"  # entry of a role's plain state


def policy_parts(stages, pg_collection, has_factors: bool) -> list[LocalWeights]:
    """All weights of a policy on this rank; then what training changes, if factors are apart from the rest."""
    parts = (None, trained_state) if has_factors else (None,)
    return [model_weights(stages, pg_collection, part) for part in parts]


def policy_checksums(stages, pg_collection, has_factors: bool) -> dict[str, int]:
    """Checksums of all weights of a policy and of its factors by key, as `reshard.checksum`; collective of the role."""
    group, parts = pg_collection.intra_dist_opt, policy_parts(stages, pg_collection, has_factors)
    return {key: value for part in parts for key, value in reshard.checksum(part, group).items()}


class PolicyTransfer:
    """Brings all weights of a policy to another model. Methods without a group are collectives of `group`.

    The weights under factors of 16 bits never change: they travel once, what training changes travels each time.
    """

    def __init__(self, policy: tuple, rollout: tuple, group, has_factors: bool):
        """Plans the transfers.

        Args:
            policy, rollout: (stages, process groups) of both models on this rank; (None, None) outside the role.
            group: all ranks of both.
            has_factors: both models have factors apart from their weights.
        """
        whole = WeightTransfer(model_weights(*policy), model_weights(*rollout), group)
        self._transfers, self._has_run = [whole], False
        self.total_bytes = 0  # sent by all ranks in the last run
        if has_factors:
            source, destination = (model_weights(*model, trained_state) for model in (policy, rollout))
            self._transfers.append(WeightTransfer(source, destination, group))

    def run(self) -> int:
        """Transfers what the destination lacks; returns the bytes that this rank sent to others."""
        sent = sum(transfer.run() for transfer in self._take_due())
        if len(self._transfers) > 1:
            self._transfers[0].free_staging()
        return sent

    def send_copy(self) -> list[tuple[dist.Work | None, Tensor]]:
        """As of `WeightTransfer`, what the destination lacks."""
        return [send for transfer in self._take_due() for send in transfer.send_copy()]

    def _take_due(self) -> list[WeightTransfer]:
        """The transfers that bring what the destination lacks, which it has from then on."""
        due = self._transfers[1:] if len(self._transfers) > 1 and self._has_run else self._transfers
        self.total_bytes, self._has_run = sum(transfer.total_bytes for transfer in due), True
        return due

    def verify(self):
        """Compares every weight and factor, as `WeightTransfer.verify`."""
        for transfer in self._transfers:
            transfer.verify()

    def source_checksums(self, group) -> list[dict[str, int]]:
        """As of `WeightTransfer`, one dict for each transfer."""
        return [transfer.source_checksums(group) for transfer in self._transfers]

    def check(self, expected: list[dict[str, int]], group):
        for transfer, sums in zip(self._transfers, expected, strict=True):
            transfer.check(sums, group)


# -- in a checkpoint ---------------------------------------------------------------------------------------------


def base_fingerprint(stages, pg_collection) -> str:
    """Precision and hash of the weights under a model's factors, equal in every layout; a collective of the role.

    A head, which critics replace, and what balances experts do not count.
    """
    with base_weights(stages):
        sums = reshard.checksum(model_weights(stages, pg_collection), pg_collection.intra_dist_opt)
    changed = (key for key in sums if key.endswith(dist_checkpoint.BALANCING) or "output_layer." in key)
    frozen = [(key, sums[key]) for key in sorted(sums.keys() - set(changed))]
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
    weights = dist_checkpoint.model_state(source, stages, pg_collection, held, adapters)
    state = {"model": weights, "plain": dist_checkpoint.plain_object(f"{source}.plain", None, pg_collection)}
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


# -- whole -----------------------------------------------------------------------------------------------------------


def gather_factors(stages, pg_collection) -> tuple[dict[str, Tensor], Tensor | None] | None:
    """Whole factors on the host by key in a checkpoint, and a scalar head [1, H], on the role's first rank; else None.

    A collective of the role.
    """
    found = [(value, fsdp.whole(value.data).cpu()) for value in _factors(stages, pg_collection)]
    mine = [(v.key, v.global_shape, _box(v), data) for v, data in found if not any(v.replica_id)]
    heads = [fsdp.whole(chunk.output_layer.weight).cpu() for chunk in stages if value_head_of(chunk)]
    group = pg_collection.intra_dist_opt
    gathered: list[Any] = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object((mine, heads), gathered, group=group, group_dst=0)
    if gathered is None:
        return None
    whole: dict[str, Tensor] = {}
    for key, shape, box, data in (item for items, _ in gathered for item in items):
        whole.setdefault(key, data.new_empty(shape))[box] = data
    return whole, next((head for _, found in gathered for head in found), None)


@torch.no_grad()
def fill_factors(stages, factors: dict[str, Tensor], head: Tensor | None, pg_collection):
    """Copies whole factors, and a scalar head, into a model; the caller merges.

    Factors of a lower rank fill the first ranks: the others keep their drawn A and get B = 0. Layers without factors
    keep theirs.
    """
    for value in _factors(stages, pg_collection):
        if value.key in factors:
            whole = torch.zeros(value.global_shape, dtype=value.data.dtype, device=value.data.device)
            if value.key.endswith("A"):
                whole[_box(value)] = fsdp.whole(value.data)
                whole[..., : factors[value.key].shape[-2], :] = factors[value.key]
            else:
                whole[..., : factors[value.key].shape[-1]] = factors[value.key]
            _copy_rows(value.data, whole[_box(value)].view(value.data.shape))
    for chunk in stages:
        if head is not None and value_head_of(chunk):
            _copy_rows(chunk.output_layer.weight, head)


def _copy_rows(parameter: Tensor, whole: Tensor):
    here = fsdp.range_here(parameter)
    fsdp.rows_here(parameter).copy_(whole[here.start : here.stop])


def _factors(stages, pg_collection) -> list:
    metadata = {"dp_cp_group": pg_collection.dp_cp}
    states = [chunk.adapter.trained_state(chunk, metadata) for chunk in stages]
    return [value for state in states for name, value in state.items() if name.startswith("adapter.")]


def _box(value) -> tuple[slice | int, ...]:
    stacked, shape = value.prepend_axis_num, value.data.shape
    starts = value.global_offset[stacked:]
    return (*value.global_offset[:stacked], *(slice(a, a + n) for a, n in zip(starts, shape, strict=True)))
