"""megarl's own flags, all topics together, and what follows from flags of several topics.

A field `kl_target` is the flag `--kl-target` and the key `kl-target` of a config file. Numbers in help texts are arXiv
papers. A new flag is a field of its topic, with its conditions and the topic's `rules`.
"""

import dataclasses
import itertools
from collections.abc import Iterator

from megarl.algorithms import ESTIMATORS
from megarl.algorithms.estimators import NO_ADVANTAGE
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.errors import Rule
from megarl.flags import (
    algorithm,
    correction,
    data,
    debug,
    distillation,
    environment,
    evaluation,
    generation_flags,
    learning,
    preferences,
    rewards,
    run,
    selection,
    serving,
)
from megarl.flags.conditions import FlagContext
from megarl.flags.distillation import LOSS, REWARD
from megarl.rewards import expression

# In the order of their rules: the first that is broken is the error.
TOPICS = (
    data, rewards, selection, algorithm, distillation, preferences, learning, generation_flags, correction, evaluation,
    debug, serving, environment,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Settings(
    run.Run, data.Data, generation_flags.Generation, selection.Selection, rewards.Rewards, algorithm.Algorithm,
    correction.Correction, learning.Learning, evaluation.Evaluation, environment.Environments,
    distillation.Distillation, preferences.Preferences, serving.Serving, debug.Debug,
):  # fmt: skip
    """The values of megarl's own flags."""

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates in a step with a full batch."""
        sequences = self.sequences_per_step
        return self.ppo_epochs * -(-sequences // (self.minibatch_size or sequences))

    @property
    def minibatch_groups(self) -> int | None:
        """Groups in a mini-batch, which share the prompt's computation; None: the mini-batches of a step are one, or
        each of their responses is drawn by itself."""
        size, group = self.minibatch_size, self.samples_per_prompt
        return None if size is None or size % group else size // group

    @property
    def uneven_minibatches(self) -> tuple[int, int] | None:
        """Responses in the last mini-batch of a full step and in the others; None if they are equally many."""
        size, total = self.minibatch_size, self.sequences_per_step
        rest = 0 if size is None else total % size
        return (rest, size) if size is not None and rest and size < total else None

    def updates_on_policy(self, prompts: int) -> bool:
        """Whether the only update of a batch of so many prompts gives its old log-probs: it is the first forward."""
        sequences = prompts * self.samples_per_prompt
        is_only_update = self.ppo_epochs == 1 and (self.minibatch_size or sequences) >= sequences
        estimator = ESTIMATORS.get(self.advantage)
        reads_old_logprobs = self.kl_in == "reward" and self.kl_coefficient > 0 or self.distill == REWARD
        are_read = reads_old_logprobs or estimator is not None and bool(estimator.needs & {"logprobs", "squares"})
        loss = POLICY_LOSSES.get(self.policy_loss)
        selects = loss is not None and loss.select is not None
        return is_only_update and not are_read and not selects and not self.corrects_before_updates

    @property
    def only_distills(self) -> bool:
        """Whether the divergence from the teacher is all of the loss."""
        in_loss = self.kl_in == "loss" and self.kl_coefficient
        other_terms = self.entropy_coefficient or self.positive_nll_coefficient or in_loss
        return self.distill == LOSS and self.advantage == NO_ADVANTAGE and not other_terms

    @property
    def has_stale_tokens(self) -> bool:
        """Whether tokens may be of an older policy than the one that is trained on them."""
        return self.generation_lag > 0 or self.partial_rollouts

    @property
    def can_lose_responses(self) -> bool:
        """Whether there may be sequences without response tokens: failed episodes, or responses that have no score."""
        return self.environment is not None or self.reward_failure == "drop"

    @property
    def part_weights(self) -> tuple[float, ...]:
        """Weights of the parts of the reward, if the estimator may read several: the terms that count, then the length
        penalty. () for a single part, which is the score."""
        estimator = ESTIMATORS.get(self.advantage)
        if estimator is not None and "parts" not in estimator.needs:
            return ()
        weights = [term.weight for term in expression.parse(self.reward) if term.weight]
        weights += [self.overlong_penalty] if self.overlong_buffer else []
        return tuple(weights) if len(weights) > 1 else ()

    @property
    def reads_squares(self) -> bool:
        """Whether the estimator reads Σπ_old² of each token."""
        estimator = ESTIMATORS.get(self.advantage)
        return estimator is not None and "squares" in estimator.needs


def rules(run: FlagContext) -> Iterator[Rule]:
    """The rules that a run breaks."""
    for flag, reason, *shown in itertools.chain.from_iterable(topic.rules(run) for topic in TOPICS):
        yield Rule(flag, True, reason, shown[0] if shown else None)
    for field in dataclasses.fields(Settings):
        needs, is_given = field.metadata["needs"], getattr(run.settings, field.name) != field.default
        if needs and is_given and needs.why_not(run) is not None:
            yield Rule("--" + field.name.replace("_", "-"), True, needs.reason)
