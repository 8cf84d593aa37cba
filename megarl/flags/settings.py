"""megarl's own flags, all topics together: what follows from flags of several topics, and which flags go together.

A field `kl_target` is the flag `--kl-target` and the key `kl-target` of a config file. Numbers in help texts are arXiv
papers. A new flag is a field of its topic, with its conditions and the topic's `rules`. Files of a
mixture may have groups of their own sizes (`samples-per-prompt`), for which the rules hold, too.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

from megarl.algorithms import ESTIMATORS
from megarl.algorithms.estimators import NO_ADVANTAGE
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.data.mixture import TRAINING, MixtureEntry, is_mixture, read_mixture
from megarl.data.prompt import RL
from megarl.errors import Rule, UsageError
from megarl.flags import (
    algorithm,
    data,
    distillation,
    environment,
    generation_flags,
    learning,
    preferences,
    rewards,
    run,
    selection,
    serving,
)
from megarl.flags.algorithm import is_corrected
from megarl.flags.conditions import Condition, FlagContext
from megarl.flags.distillation import LOSS, REWARD
from megarl.rewards import expression

# In the order of their rules: the first that is broken is the error.
TOPICS = (
    data, rewards, selection, algorithm, distillation, preferences, learning, generation_flags, run,
    serving, environment,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Settings(
    run.Run, data.Data, generation_flags.Generation, selection.Selection, rewards.Rewards, algorithm.Algorithm,
    learning.Learning, environment.Environments, distillation.Distillation, preferences.Preferences, serving.Serving,
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


def without_effect(run: FlagContext, given: dict[str, Condition | None]) -> dict[str, str]:
    """Given flags that have no effect in a run, with the reason. `given`: flag -> the condition under which it has one;
    None: always."""
    reasons = {flag: condition.why_not(run) for flag, condition in given.items() if condition is not None}
    return {flag: reason for flag, reason in reasons.items() if reason is not None}


def warning(idle: dict[str, str]) -> list[str]:
    """One line that names the flags without effect, grouped by reason; none without any."""
    if not idle:
        return []
    by_reason: dict[str, list[str]] = {}
    for flag, why in idle.items():
        by_reason.setdefault(why, []).append(flag)
    return ["without effect: " + "; ".join(f"{', '.join(flags)} ({why})" for why, flags in by_reason.items())]


def cautions(run: FlagContext) -> list[str]:
    """Warnings about combinations that run, but seldom as the user expects."""
    s, found = run.settings, []
    if "parts" in run.estimator.needs and not s.part_weights:
        found.append(
            f"--advantage {s.advantage}: --reward {s.reward} has one part that counts, so that there are no "
            "others to tell apart"
        )
    if (sizes := s.uneven_minibatches) is not None and not s.debug_rollout_only:
        found.append(
            f"--minibatch-size {s.minibatch_size}: the last mini-batch of a step has {sizes[0]} responses "
            f"instead of {sizes[1]}, and is an update like the others"
        )
    if not s.generation_lag or is_corrected(run) or s.debug_rollout_only:
        return found
    return [
        *found,
        f"--generation-lag {s.generation_lag} without --rollout-correction: responses are up to {s.generation_lag} "
        "updates old, and the loss takes them for the trained policy's",
    ]


def check_rules(run: FlagContext):
    """UsageError for the first broken rule, then for a file of a mixture whose groups the run cannot have."""
    for rule in rules(run):
        raise UsageError(rule.problem(run.settings))
    if run.program == "rl":
        _check_sizes(run)


def group_sizes(settings: Settings) -> set[int]:
    """The sizes that groups of a step may have. UsageError for a mixture that cannot be read."""
    return {entry.samples_per_prompt or settings.samples_per_prompt for entry in _entries(settings)}


def expected_responses(settings: Settings) -> int:
    """Responses of a step in which each file of a mixture has its share, rounded up. UsageError as of `group_sizes`."""
    s, entries = settings, _entries(settings)
    weights = sum(entry.weight for entry in entries)
    responses = sum(entry.weight * (entry.samples_per_prompt or s.samples_per_prompt) for entry in entries)
    return math.ceil(s.prompts_per_step * responses / weights)


def _check_sizes(context: FlagContext):
    """The rules hold as if all groups had the size of a file's."""
    s, size = context.settings, context.settings.minibatch_size
    for entry in _entries(s):
        samples = entry.samples_per_prompt
        if samples is None or samples == s.samples_per_prompt:
            continue
        where = f"{TRAINING} {s.prompts}: {entry.name}: samples-per-prompt {samples}"
        own = dataclasses.replace(s, samples_per_prompt=samples, minibatch_size=None)
        for rule in rules(context._replace(settings=own)):
            is_of_size = rule.flag == "--samples-per-prompt"
            raise UsageError(f"{where}: {rule.reason if is_of_size else rule.problem(own)}")
        if size is not None and size % s.samples_per_prompt:
            raise UsageError(
                f"--minibatch-size {size}: {where} differs from --samples-per-prompt, so that mini-batches have whole "
                f"groups, each counted as {s.samples_per_prompt}; allowed are multiples of {s.samples_per_prompt}"
            )


def _entries(settings: Settings) -> tuple[MixtureEntry, ...]:
    """The entries of `--prompts`; without a mixture one that says nothing."""
    path = settings.prompts
    if path is not None and is_mixture(path):
        return read_mixture(path, TRAINING, RL)
    return (MixtureEntry("", path or "", Fraction(1)),)
