"""Flags of learning: updates, the critic, LoRA, multi-token prediction, moving average and refreshed reference."""

import dataclasses
from collections.abc import Iterator

from megarl.flags.conditions import CRITIC, ENGINE, REFERENCE, TRAINED, Broken, FlagContext, on
from megarl.flags.fields import TRAINING, flag, not_negative, positive
from megarl.flags.lora import NAMES, TARGETS, are_targets

MODELS = ("actor", "critic", "reward", "reference", "teacher")  # roles that run a model over packed sequences
TRAINED_ROLES = ("actor", "critic")

REFRESHES = on(lambda s: s.reference_update_interval > 0, "needs --reference-update-interval")
AVERAGES = on(lambda s: s.ema_decay is not None and s.evaluates, "needs --ema-decay and --eval-prompts")


@dataclasses.dataclass(frozen=True)
class Learning:
    """Learning."""

    train_iters: int = positive(100, programs=TRAINING)
    """number of training steps"""
    ppo_epochs: int = positive(1)
    """epochs over a step's batch (1707.06347)"""
    minibatch_size: int | None = positive(None)
    """sequences per optimizer update, in whole groups if --samples-per-prompt divides it; default: the whole batch"""
    max_tokens_per_microbatch: int = positive(16384, programs=TRAINING, roles=MODELS)
    """maximum tokens of a micro-batch; may differ per role"""
    value_clip_range: float = positive(0.2, when=CRITIC)
    """clip range of the value loss"""
    critic_warmup_steps: int = not_negative(0, when=CRITIC)
    """first steps in which only the critic is trained"""
    offload: bool = flag(False, roles=MODELS)
    """keep a role's memory on the host while the role is idle; may differ per role"""
    # LoRA.
    lora_rank: int | None = flag(
        None,
        lambda v: v > 0,
        "a number above 0; leave it out to train all weights",
        programs=TRAINING,
        roles=TRAINED_ROLES,
    )
    """train low-rank factors of this rank instead of the weights (2106.09685); may differ per role; default: all
    weights"""
    lora_alpha: float | None = positive(None, programs=TRAINING, roles=TRAINED_ROLES)
    """α of the factors' scale α/rank; default: --lora-rank"""
    lora_rslora: bool = flag(False, programs=TRAINING, roles=TRAINED_ROLES)
    """scale the factors by α/√rank (2312.03732)"""
    lora_targets: str | None = flag(
        None,
        are_targets,
        f"{NAMES}; with --model-source transformers names of the module's linear layers",
        programs=TRAINING,
        roles=TRAINED_ROLES,
        names=TARGETS,
    )
    """layers with factors, with commas: {names} (of experts, too), or all-linear for all of them, the default"""
    lora_adapter: str | None = flag(None, programs=TRAINING, roles=TRAINED_ROLES)
    """folder of a PEFT adapter: the factors to start from, with their rank, scale and targets; needs --hf-model; a
    larger --lora-rank adds to theirs"""
    # Multi-token prediction.
    mtp_train: bool = flag(False, programs="rl sft", when=TRAINED)
    """train the layer of multi-token prediction on the policy's responses, by its own loss, gradient norm and
    optimizer: the policy's own numbers stay the same to the bit (2412.19437)"""
    mtp_drafts: bool = flag(False, when=ENGINE)
    """decode steps also read what the layer of multi-token prediction drafts; text and log-probs stay the same to the
    bit"""
    # Moving average and refreshed reference.
    ema_decay: float | None = flag(None, lambda v: 0 < v < 1, "above 0, below 1", programs=TRAINING, when=TRAINED)
    """keep an exponential moving average of the trained weights with this decay D: e ← D·e + (1 − D)·w after each step;
    default: none"""
    evaluate_ema: bool = flag(False, programs=TRAINING, when=AVERAGES)
    """evaluate the moving average instead of the weights that are trained"""
    reference_update_interval: int = not_negative(0, when=REFERENCE)
    """steps after which the reference gets the actor's weights, each time (2505.24864); 0: never"""
    reference_mixup: float = flag(1.0, lambda v: 0 < v <= 1, "above 0, at most 1", when=REFRESHES)
    """α of that: w_ref ← α·w + (1 − α)·w_ref (2404.09656)"""

    @property
    def predicts(self) -> bool:
        """Whether policy and rollout have the layer that predicts the token after the next one."""
        return self.mtp_train or self.mtp_drafts


def rules(run: FlagContext) -> Iterator[Broken]:
    """Rules of updates."""
    s = run.settings
    if s.minibatch_size is not None and s.minibatch_size > s.sequences_per_step:
        why = f"allowed is at most --prompts-per-step × --samples-per-prompt = {s.sequences_per_step}"
        yield "--minibatch-size", why
