"""Flags of multi-token prediction."""

import dataclasses

from megarl.flags.fields import flag


@dataclasses.dataclass(frozen=True)
class PredictionSettings:
    """The layer that predicts the token after the next one."""

    mtp_train: bool = flag(False, "train the layer of multi-token prediction on the policy's responses, by its own"
                            " loss, gradient norm and optimizer: the policy's own numbers stay the same to the bit"
                            " (2412.19437)", programs="rl sft", when="trained")  # fmt: skip
    mtp_drafts: bool = flag(False, "decode steps also read what the layer of multi-token prediction drafts; text and"
                             " log-probs stay the same to the bit", when="engine")  # fmt: skip

    @property
    def predicts(self) -> bool:
        """Whether policy and rollout have the layer."""
        return self.mtp_train or self.mtp_drafts
