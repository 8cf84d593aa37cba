"""What the engine did for a step's training responses, as metrics: decode steps, drafts, and prompts read."""

import torch

from megarl.arguments import Settings
from megarl.comm.role_mesh import RoleGroups
from megarl.mcore import device
from megarl.mcore.inference.engine import RolloutEngine
from megarl.mcore.inference.reusable_blocks import PrefillCounts
from megarl.mcore.inference.speculative_decode import DecodeCounts
from megarl.mcore.vision.store import ImageCounts


class EngineCounts:
    """The counts of a replica's engine since the last `take_metrics`, on a rank of the rollout."""

    def __init__(self, settings: Settings, role_groups: RoleGroups):
        self._settings, self._role_groups = settings, role_groups
        self._decoded, self._prefilled = DecodeCounts(), PrefillCounts()
        self._images: ImageCounts | None = None

    def add(self, engine: RolloutEngine, is_training: bool):
        """Counts what the engine did since the last call, if it was for training."""
        decoded, prefilled = engine.take_decode_counts(), engine.take_prefill_counts()
        images = engine.take_image_counts()
        if is_training:
            self._images = images if self._images is None or images is None else self._images.plus(images)
            self._decoded = self._decoded.plus(decoded)
            self._prefilled = self._prefilled.plus(prefilled)

    def take_metrics(self) -> dict[str, float]:
        """The metrics `rollout/…` and `images/…` of all replicas; {} without drafts, prefix caching and images. A
        collective of the role."""
        s, role_groups = self._settings, self._role_groups
        drafts = s.speculative_rollout or s.mtp_drafts
        images, self._images = self._images, None
        of_images = {} if images is None else images.metrics(role_groups)
        if not (drafts or s.rollout_prefix_caching):
            return of_images
        counts = [*self._decoded, *self._prefilled]
        self._decoded, self._prefilled = DecodeCounts(), PrefillCounts()
        table = torch.zeros(len(role_groups.replicas), len(counts), dtype=torch.int64, device=device.device())
        table[role_groups.dp_rank] = torch.tensor(counts)
        table = role_groups.dp_all_reduce(table)
        *decoded, read, reused = table.sum(0).tolist()
        total, found = DecodeCounts._make(decoded), of_images
        if drafts:
            found |= {
                "rollout/decode_steps": int(table[:, 0].max()),
                "rollout/accepted_tokens_per_step": total.tokens / max(total.requests, 1),
                "rollout/draft_acceptance": total.accepted / max(total.drafted, 1),
            }
        if s.mtp_drafts:
            found["rollout/mtp_acceptance"] = total.right / max(total.predicted, 1)
        if s.rollout_prefix_caching:
            found |= {"rollout/prefill_tokens": read, "rollout/reused_tokens": reused}
        return found
