"""The transfer of a policy to a rollout's own model, with low-rank factors that its weights do not contain."""

import torch.distributed as dist
from torch import Tensor

from megarl.mcore.lora.adapter import trained_state
from megarl.mcore.weights import reshard
from megarl.mcore.weights.reshard import WeightTransfer
from megarl.mcore.weights.reshard_plan import model_weights


def policy_checksums(stages, pg_collection, has_factors: bool) -> dict[str, int]:
    """Checksums of all weights of a policy and of its factors by key, as `reshard.checksum`; collective of the role."""
    group = pg_collection.intra_dist_opt
    sums = reshard.checksum(model_weights(stages, pg_collection), group)
    if has_factors:
        sums |= reshard.checksum(model_weights(stages, pg_collection, trained_state), group)
    return sums


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
