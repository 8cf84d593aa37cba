"""Flags of the losses of actor and critic, and of multi-token prediction.

The options of each policy loss are defined in its module (`algorithms.policy_losses`).
"""

import dataclasses

from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.flags.fields import flag, not_negative, one_of, positive


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """What a step minimizes, and in how many updates."""

    policy_loss: str = flag("ppo-clip", f"policy loss: {', '.join(POLICY_LOSSES)}, or package.module:function")
    ppo_epochs: int = positive(1, "epochs over a step's batch (1707.06347)")
    minibatch_size: int | None = positive(None, "sequences per optimizer update, in whole groups if"
                                         " --samples-per-prompt divides it; default: the whole batch")  # fmt: skip
    loss_aggregation: str = one_of("token-mean", AGGREGATIONS, "how token losses are averaged: "
                                    + ", ".join(AGGREGATIONS))  # fmt: skip
    loss_norm_length: float | None = positive(None, "length that divides the summed token losses (Dr. GRPO,"
                                               " 2503.20783); default: --max-response-length", when="norm")  # fmt: skip
    entropy_coefficient: float = not_negative(0.0, "coefficient of the entropy bonus")
    opsm_threshold: float | None = positive(None, "drop the policy loss of a response with a negative advantage whose"
                                             " mean log(μ/π_θ) is above this (2512.02556)", when="trained")  # fmt: skip
    positive_nll_coefficient: float = not_negative(0.0, "weight of the mean negative log-prob of the correct responses'"
                                                    " tokens (VAPO, 2504.05118: 0.1)", when="trained")  # fmt: skip
    value_clip_range: float = positive(0.2, "clip range of the value loss", when="critic")
    critic_warmup_steps: int = not_negative(0, "first steps in which only the critic is trained", when="critic")
    # Multi-token prediction.
    mtp_train: bool = flag(False, "train the layer of multi-token prediction on the policy's responses, by its own"
                            " loss, gradient norm and optimizer: the policy's own numbers stay the same to the bit"
                            " (2412.19437)", programs="rl sft", when="trained")  # fmt: skip
    mtp_drafts: bool = flag(False, "decode steps also read what the layer of multi-token prediction drafts; text and"
                             " log-probs stay the same to the bit", when="engine")  # fmt: skip

    @property
    def predicts(self) -> bool:
        """Whether policy and rollout have the layer that predicts the token after the next one."""
        return self.mtp_train or self.mtp_drafts
