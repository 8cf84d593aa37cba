"""What a judge, or a reward that compares the responses to a prompt, adds to the traffic of a step."""

import dataclasses
import functools

from megarl.comm import load_balance
from megarl.comm.announcements import judges_early
from megarl.flags.settings import group_sizes
from megarl.planning.traffic import StepSizes, step_sizes
from megarl.rewards.chosen_verifiers import needs_whole_groups
from megarl.rewards.judge.config import judgements_of_group, read_config

_read_config = functools.lru_cache(maxsize=1)(read_config)  # a search of layouts asks again and again


def judge_sizes(settings) -> StepSizes:
    """The sizes of a step from which the traffic of a judge follows: its sequences are judgements.

    UsageError as of `read_config`.
    """
    config, step = _read_config(settings.judge_config), step_sizes(settings)
    count = settings.prompts_per_step * judgements_of_group(config, max(group_sizes(settings)))
    prompt = max(settings.judge_max_length - config.max_tokens, 0)
    return dataclasses.replace(step, sequences=count, prompt=prompt, response=config.max_tokens)


def holds_own_groups(role_groups: dict, settings, has_judge: bool) -> bool:
    """Whether the reward holds other sequences than roles with the same replicas: of whole groups, which it compares or
    which a judge reads during the rollout."""
    if "reward" not in role_groups or len(role_groups["reward"].replicas) == 1:
        return False
    if judges_early(settings, has_judge, role_groups["reward"].ranks, role_groups["rollout"].ranks):
        return True
    prompts, size = settings.prompts_per_step, settings.minibatch_groups
    replicas, are_split = len(role_groups["reward"].replicas), size is not None and size < prompts
    stay = are_split and max(group_sizes(settings)) > 1 and load_balance.stay_whole(prompts % size or size, replicas)
    return not stay and needs_whole_groups(settings)


def early_responses(role_groups: dict, settings, has_judge: bool, vocab_size: int) -> list[dict]:
    """What a judge reads during the rollout, in the form of `exchanges`: tokens as JSON, through the store."""
    reward, rollout = (role_groups[name].ranks if name in role_groups else range(0) for name in ("reward", "rollout"))
    if not judges_early(settings, has_judge, reward, rollout):
        return []
    step = step_sizes(settings)
    sent = step.sequences * step.response * (len(str(vocab_size - 1)) + 1)  # digits and a comma
    names = {"source": "rollout", "destination": "reward", "fields": ["tokens while generating"]}
    return [names | {"payload": sent, "sent": sent}]
