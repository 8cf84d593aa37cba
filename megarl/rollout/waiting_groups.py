"""Groups that wait in a checkpoint: what its manifest says about them, and whether a run can continue them."""

from megarl.arguments import Settings
from megarl.batch import GENERATED_FIELDS
from megarl.errors import UsageError
from megarl.rollout.partial_rollouts import VERSIONS

ENTRY = "waiting_groups"


def batch_fields(settings: Settings) -> set[str]:
    """Names of the fields that groups have while they wait."""
    found = {*GENERATED_FIELDS, *settings.sampled_fields}
    if settings.partial_rollouts:
        found.add(VERSIONS)
    return found | ({"routes"} if settings.router_replay == "rollout" else set())


def manifest_entry(settings: Settings, complete: int, unfinished: int) -> dict:
    """The entry of a checkpoint's manifest about its groups.

    Args:
        complete: groups in the group buffer, of all replicas.
        unfinished: groups among the partial rollouts.
    """
    facts = {"complete": complete, "unfinished": unfinished, "samples_per_prompt": settings.samples_per_prompt}
    return {ENTRY: facts | {"fields": sorted(batch_fields(settings)), "is_ahead": settings.one_step_off}}


def check(manifest: dict, settings: Settings, has_new_prompts: bool):
    """Checks that a run can continue the groups of a checkpoint. Raises UsageError.

    `has_new_prompts`: other `--prompts` than the checkpoint's; groups name their prompts by line.
    """
    if ENTRY not in manifest:
        return
    found, s = manifest[ENTRY], settings
    complete, unfinished, samples = found["complete"], found["unfinished"], found["samples_per_prompt"]
    if has_new_prompts and (complete or unfinished):
        raise UsageError(
            f"--load-changed-data: the checkpoint of --load {s.load} holds responses to the old "
            "prompts that wait for their batch; resume with the old --prompts, or from a step without them"
        )
    if complete and (samples != s.samples_per_prompt or set(found["fields"]) != batch_fields(s)):
        raise UsageError(
            f"--load: the checkpoint holds groups of {samples} responses that wait for their batch to be full; "
            "--samples-per-prompt, --group-filter, --greedy-baseline, --partial-rollouts, --router-replay and "
            "--environment must be those that they were sampled with"
        )
    if unfinished and (not s.partial_rollouts or samples != s.samples_per_prompt):
        raise UsageError(
            f"--load: the checkpoint holds {unfinished} unfinished groups of {samples} responses; add "
            f"--partial-rollouts --samples-per-prompt {samples}"
        )
    if complete:
        _check_batch_size(complete, found["is_ahead"], s)


def _check_batch_size(complete: int, is_ahead: bool, s: Settings):
    if is_ahead and (not s.one_step_off or complete != s.prompts_per_step):
        raise UsageError(
            f"--load: a batch of {complete} groups was generated ahead; allowed are --one-step-off and "
            f"--prompts-per-step {complete}"
        )
    if not is_ahead and complete >= s.prompts_per_step:
        raise UsageError(
            f"--prompts-per-step {s.prompts_per_step}: the checkpoint of --load {s.load} holds {complete} groups that "
            f"wait for their batch to be full; allowed is more than {complete}"
        )
