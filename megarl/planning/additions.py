"""What a judge, a reward that compares the responses to a prompt, and images of prompts add to the plan of a step."""

import dataclasses
import functools

from megarl.comm import load_balance
from megarl.comm.announcements import judges_early
from megarl.errors import UsageError
from megarl.flags.settings import group_sizes
from megarl.planning.traffic import StepSizes, step_sizes
from megarl.rewards.chosen_verifiers import needs_whole_groups
from megarl.rewards.judge.config import judgements_of_group, read_config

IMAGE_READERS = ("actor", "critic", "reference", "teacher")  # roles with models that read the policy's tokens
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


# -- images of prompts -------------------------------------------------------------------------------------------------


def check_images(program, tokens: int | None):
    """UsageError for `--image-tokens` of a model that reads no images."""
    actor = program.roles["actor"]
    if tokens is None:
        return
    if actor.hf_model is None:
        raise UsageError(f"--image-tokens {tokens}: needs --hf-model, the folder of the vision tower")
    if tokens > program.settings.max_prompt_length:
        raise UsageError(f"--image-tokens {tokens}: more than --max-prompt-length {program.settings.max_prompt_length}")
    _tower(actor.hf_model.folder).check_reader(actor.megatron.model_folder is not None)


@functools.lru_cache(maxsize=1)
def _tower(folder):
    from megarl.mcore.any_model.tower import Tower  # imports transformers

    return Tower(folder)


def images_of(program, tokens: int) -> dict[str, int]:
    """Host memory that images of prompts take, in bytes: the `tower` on ranks that compute images, a `row` of an image,
    at most the rows of a `step`, and at most those that are kept between steps (`cache`)."""
    s, actor = program.settings, program.roles["actor"]
    tower = _tower(actor.hf_model.folder)
    row = tower.store(actor.megatron.params_dtype).row_bytes
    found = {"tokens": tokens, "tower": tower.bytes, "row": row, "step": s.prompts_per_step * tokens * row}
    return found | {"cache": int(s.image_cache_gb * 10**9)}


def image_moves(program, role_groups: dict, exchanges: list[dict], images: dict[str, int]) -> list[dict]:
    """What roles are sent of images in a step, in the form of `exchanges`, if no replica keeps one of an earlier step.

    A replica gets an image once from each that has generated responses to its prompt. Roles with the same replicas get
    it together.
    """
    result, served, step = [], [], step_sizes(program.settings)
    from_rollout = {move["destination"]: move for move in exchanges if move["source"] == "rollout"}
    for name in (name for name in IMAGE_READERS if name in role_groups and name in from_rollout):
        source, destination = role_groups["rollout"].replicas, role_groups[name].replicas
        is_free = not from_rollout[name]["payload"] or destination in served
        served.append(destination)
        pairs = len(source) * len(destination) - len(set(source) & set(destination))
        count = min(program.settings.prompts_per_step * pairs, step.sequences)
        payload = 0 if is_free else count * images["tokens"] * images["row"]
        names = {"source": "rollout", "destination": name, "fields": ["rows of images"]}
        result.append(names | {"payload": payload, "sent": payload * len(destination[0])})
    return result
